-- One table of ten columns of ten types.

CREATE TABLE bench.orders (
    id bigint PRIMARY KEY,
    quantity int,
    amount numeric(12,2),
    note text,
    created_at timestamptz,
    reference uuid,
    active boolean,
    score double precision,
    day date,
    payload jsonb
);

CREATE FUNCTION bench.insert_orders(low bigint, high bigint) RETURNS void LANGUAGE sql AS $$
    INSERT INTO bench.orders
    SELECT i, i % 1000, (i % 1000000) / 100.0, 'order number ' || i, '2026-01-01 00:00:00+00'::timestamptz + i * interval '1.000001 s',
           md5(i::text)::uuid, i % 2 = 0, i / 7.0, '2026-01-01'::date + (i % 365)::int,
           jsonb_build_object('k', i, 'tag', 'value ' || i % 10)
    FROM generate_series(low, high) i
$$;

CREATE FUNCTION bench.update_orders(low bigint, high bigint) RETURNS void LANGUAGE sql AS $$
    UPDATE bench.orders SET quantity = quantity + 1, note = note || '!' WHERE id BETWEEN low AND high
$$;

-- Keys in no order: 611953 is prime, so that of a million numbers in a row each gives another key.
CREATE FUNCTION bench.scatter_orders(low bigint, high bigint) RETURNS void LANGUAGE sql AS $$
    UPDATE bench.orders SET quantity = quantity + 1, note = note || '!'
    FROM generate_series(low, high) i WHERE id = i * 611953 % 1000000 + 1
$$;

-- Of four changes one inserts, two update and one deletes; a million of them meet no key twice.
CREATE FUNCTION bench.mix_orders(low bigint, high bigint) RETURNS void LANGUAGE sql AS $$
    INSERT INTO bench.orders
    SELECT 1000000 + i, i % 1000, (i % 1000000) / 100.0, 'order number ' || i, '2026-01-01 00:00:00+00'::timestamptz + i * interval '1.000001 s',
           md5(i::text)::uuid, i % 2 = 0, i / 7.0, '2026-01-01'::date + (i % 365)::int,
           jsonb_build_object('k', i, 'tag', 'value ' || i % 10)
    FROM generate_series(low, high) i WHERE i % 4 = 0;
    UPDATE bench.orders SET quantity = quantity + 1, note = note || '!'
    FROM generate_series(low, high) i WHERE i % 4 IN (1, 2) AND id = i * 611953 % 1000000 + 1;
    DELETE FROM bench.orders USING generate_series(low, high) i WHERE i % 4 = 3 AND id = i * 611953 % 1000000 + 1
$$;
