-- One table of sixty columns: a key, and each of ten types over and over.

DO $do$
DECLARE
    types text[] := '{bigint,int,"numeric(12,2)",text,timestamptz,uuid,boolean,"double precision",date,jsonb}';
    expressions text[] := ARRAY[
        'i * 1000 + %1$s', '(i + %1$s) %% 1000', '((i + %1$s) %% 1000000) / 100.0', '''value %1$s of '' || i',
        '''2026-01-01 00:00:00+00''::timestamptz + (i + %1$s) * interval ''1.000001 s''', 'md5(i::text)::uuid', '(i + %1$s) %% 2 = 0',
        '(i + %1$s) / 7.0', '''2026-01-01''::date + (i %% 365)::int', 'jsonb_build_object(''k'', i, ''tag'', ''value %1$s'')'
    ];
    columns text;
    selected text;
BEGIN
    SELECT string_agg(format('c%s %s', n, types[1 + n % 10]), ', ' ORDER BY n), string_agg(format(expressions[1 + n % 10], n), ', ' ORDER BY n)
    INTO columns, selected FROM generate_series(1, 59) n;
    EXECUTE format('CREATE TABLE bench.wide (id bigint PRIMARY KEY, %s)', columns);
    EXECUTE format(
        'CREATE FUNCTION bench.insert_wide(low bigint, high bigint) RETURNS void LANGUAGE sql AS '
        '$$INSERT INTO bench.wide SELECT i, %s FROM generate_series(low, high) i$$',
        selected
    );
END
$do$;
