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
