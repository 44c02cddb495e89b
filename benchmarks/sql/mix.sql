-- Five tables of different shapes. Of every twenty changes each table gets two inserts, an update of the first row and a delete of the second.

CREATE TABLE bench.customers (id bigint PRIMARY KEY, name text, email text, since date, active boolean);
CREATE TABLE bench.products (id bigint PRIMARY KEY, title text, price numeric(12,2), attributes jsonb);
CREATE TABLE bench.sales (id bigint PRIMARY KEY, customer bigint, amount numeric(12,2), at timestamptz, reference uuid, note text);
CREATE TABLE bench.visits (id bigint PRIMARY KEY, page text, at timestamptz, seconds double precision);
CREATE TABLE bench.stock (id bigint PRIMARY KEY, product bigint, quantity int);

CREATE FUNCTION bench.change_mix(low bigint, high bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    i bigint;
    turn int;
    earlier bigint;
    moment timestamptz;
BEGIN
    FOR i IN low - 1 .. high - 1 LOOP
        turn := i / 5 % 4;
        earlier := i - 10;
        moment := '2026-01-01 00:00:00+00'::timestamptz + i * interval '1.000001 s';
        CASE i % 5
        WHEN 0 THEN
            CASE turn
            WHEN 2 THEN UPDATE bench.customers SET email = email || '.org', active = NOT active WHERE id = earlier;
            WHEN 3 THEN DELETE FROM bench.customers WHERE id = earlier;
            ELSE INSERT INTO bench.customers VALUES (i, 'customer ' || i, 'c' || i || '@example.com', '2026-01-01'::date + (i % 365)::int, true);
            END CASE;
        WHEN 1 THEN
            CASE turn
            WHEN 2 THEN UPDATE bench.products SET price = price * 2 WHERE id = earlier;
            WHEN 3 THEN DELETE FROM bench.products WHERE id = earlier;
            ELSE INSERT INTO bench.products VALUES (i, 'product ' || i, (i % 100000) / 100.0, jsonb_build_object('colour', i % 7, 'size', i % 50));
            END CASE;
        WHEN 2 THEN
            CASE turn
            WHEN 2 THEN UPDATE bench.sales SET amount = amount + 1, note = note || '!' WHERE id = earlier;
            WHEN 3 THEN DELETE FROM bench.sales WHERE id = earlier;
            ELSE INSERT INTO bench.sales VALUES (i, i % 1000, (i % 100000) / 100.0, moment, md5(i::text)::uuid, 'sale number ' || i);
            END CASE;
        WHEN 3 THEN
            CASE turn
            WHEN 2 THEN UPDATE bench.visits SET seconds = seconds * 1.5 WHERE id = earlier;
            WHEN 3 THEN DELETE FROM bench.visits WHERE id = earlier;
            ELSE INSERT INTO bench.visits VALUES (i, '/pages/' || i % 1000, moment, i / 7.0);
            END CASE;
        ELSE
            CASE turn
            WHEN 2 THEN UPDATE bench.stock SET quantity = quantity - 1 WHERE id = earlier;
            WHEN 3 THEN DELETE FROM bench.stock WHERE id = earlier;
            ELSE INSERT INTO bench.stock VALUES (i, i % 1000, i % 100);
            END CASE;
        END CASE;
    END LOOP;
END
$$;
