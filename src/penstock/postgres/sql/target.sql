-- A Postgres database as a target: what Penstock keeps in the schema `penstock` there, and what it does to the tables.

-- name: prepare
-- One row for each table: whose it is, what it was made from, and how far it is. A null position: it counts as no copy.
-- `staging` names the table beside it into which a snapshot that is not finished goes; the last one, until the first epoch after it.
-- `relation` is the table itself, whatever it is called: 0 if there was none yet, null if an earlier version did not write it down.
-- `copy` is what `staging` was when the rows that are there were copied, and stays.
CREATE SCHEMA IF NOT EXISTS penstock;
CREATE TABLE IF NOT EXISTS penstock.applied (
    "schema" text NOT NULL,
    "table" text NOT NULL,
    pipeline text NOT NULL,
    source_schema text NOT NULL,
    source_table text NOT NULL,
    source_oid bigint NOT NULL,
    "columns" jsonb NOT NULL,
    "key" jsonb NOT NULL,
    mode text NOT NULL,
    "position" pg_catalog.pg_lsn,
    staging text,
    PRIMARY KEY ("schema", "table")
) WITH (fillfactor = 50);
ALTER TABLE penstock.applied ADD COLUMN IF NOT EXISTS relation pg_catalog.regclass, ADD COLUMN IF NOT EXISTS origin text,
    ADD COLUMN IF NOT EXISTS copy text;
CREATE TABLE IF NOT EXISTS penstock.chunks (
    staging text NOT NULL,
    number integer NOT NULL,
    fence pg_catalog.pg_lsn NOT NULL,
    "rows" bigint NOT NULL,
    PRIMARY KEY (staging, number)
)

-- name: has_schema
SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = %(schema)s)

-- name: lacking
-- What the role may not do that a run does: a schema that it may not put tables into, or all that are not there if it may not make one;
-- a table of the pipeline's that is not the role's.
SELECT w."schema", n.oid IS NOT NULL, NULL::text FROM unnest(%(schemas)s::text[]) AS w ("schema")
LEFT JOIN pg_catalog.pg_namespace n ON n.nspname = w."schema"
WHERE CASE WHEN n.oid IS NULL THEN NOT pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE')
    ELSE NOT (pg_catalog.has_schema_privilege(n.oid, 'CREATE') AND pg_catalog.has_schema_privilege(n.oid, 'USAGE')) END
UNION ALL
SELECT n.nspname, true, c.relname FROM unnest(%(table_schemas)s::text[], %(tables)s::text[]) AS w ("schema", "table")
JOIN pg_catalog.pg_namespace n ON n.nspname = w."schema"
JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = w."table"
WHERE NOT pg_catalog.pg_has_role(c.relowner, 'USAGE')
ORDER BY 1, 3

-- name: looks_late
-- Constraints that may be deferred have triggers: on the table that they are of, and on the one that a foreign key refers to.
SELECT EXISTS (
    SELECT 1 FROM pg_catalog.pg_trigger t
    JOIN pg_catalog.pg_class c ON c.oid = t.tgrelid
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %(schema)s AND c.relname = %(table)s AND t.tgdeferrable
)

-- name: whoami
-- Where, as whom, and whether temporary tables may be made there.
SELECT pg_catalog.current_database(), CURRENT_USER, pg_catalog.has_database_privilege(pg_catalog.current_database(), 'TEMPORARY')

-- name: load
-- How a table stands; also where nothing is known of it, or nothing is there. What an earlier version did not keep is null.
SELECT a.pipeline, a.source_schema, a.source_table, a.source_oid, a."columns", a."key", a.mode, a."position"::text, a.staging,
    pg_catalog.to_jsonb(a) ->> 'origin', pg_catalog.to_jsonb(a) ->> 'copy',
    coalesce(pg_catalog.to_jsonb(a) ->> 'relation' <> c.oid::pg_catalog.regclass::text, false), c.oid IS NOT NULL
FROM (SELECT %(schema)s::text AS "schema", %(table)s::text AS "table") w
LEFT JOIN penstock.applied a USING ("schema", "table")
LEFT JOIN (pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace)
  ON n.nspname = w."schema" AND c.relname = w."table"

-- name: is_there
SELECT EXISTS (
    SELECT 1 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %(schema)s AND c.relname = %(table)s
)

-- name: lock
-- Whoever else writes to this table waits here, or is waited for. No row: there is no such table of this pipeline.
SELECT a."position"::text FROM penstock.applied a
WHERE a."schema" = %(schema)s AND a."table" = %(table)s AND a.pipeline = %(pipeline)s AND NOT EXISTS (
    SELECT 1 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = a."schema" AND c.relname = a."table" AND pg_catalog.to_jsonb(a) ->> 'relation' <> c.oid::pg_catalog.regclass::text
)
FOR UPDATE

-- name: begin
INSERT INTO penstock.applied AS a
    ("schema", "table", pipeline, source_schema, source_table, source_oid, "columns", "key", mode, staging, copy, origin, relation)
SELECT w."schema", w."table", %(pipeline)s, %(source_schema)s, %(source_table)s, %(source_oid)s, %(columns)s::jsonb, %(key)s::jsonb, %(mode)s,
    %(staging)s, %(staging)s, %(origin)s, coalesce((
        SELECT c.oid FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = w."schema" AND c.relname = w."table"
    ), 0)::pg_catalog.regclass
FROM (SELECT %(schema)s::text AS "schema", %(table)s::text AS "table") w
ON CONFLICT ("schema", "table") DO UPDATE SET
    source_schema = excluded.source_schema, source_table = excluded.source_table, source_oid = excluded.source_oid,
    "columns" = excluded."columns", "key" = excluded."key", mode = excluded.mode, staging = excluded.staging, copy = excluded.copy,
    origin = excluded.origin,
    relation = CASE WHEN excluded.relation = 0::pg_catalog.regclass THEN excluded.relation ELSE coalesce(a.relation, excluded.relation) END,
    "position" = NULL

-- name: describe
-- Take over from another table what it was made from.
UPDATE penstock.applied a SET source_oid = b.source_oid, "columns" = b."columns", "key" = b."key", mode = b.mode, origin = b.origin,
    copy = b.copy
FROM penstock.applied b
WHERE a."schema" = %(schema)s AND a."table" = %(table)s AND b."schema" = %(from_schema)s AND b."table" = %(from_table)s

-- name: evolve
UPDATE penstock.applied SET "columns" = %(columns)s::jsonb, "key" = %(key)s::jsonb, origin = %(origin)s
WHERE "schema" = %(schema)s AND "table" = %(table)s

-- name: record
UPDATE penstock.applied SET "position" = %(position)s::pg_catalog.pg_lsn, staging = NULL
WHERE "schema" = %(schema)s AND "table" = %(table)s AND pipeline = %(pipeline)s

-- name: settle
-- What stands there from now on is ours, filled up to the position.
UPDATE penstock.applied a SET "position" = %(position)s::pg_catalog.pg_lsn, relation = c.oid
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE a."schema" = %(schema)s AND a."table" = %(table)s AND a.pipeline = %(pipeline)s AND n.nspname = a."schema" AND c.relname = a."table"

-- name: forget
DELETE FROM penstock.applied WHERE "schema" = %(schema)s AND "table" = %(table)s AND pipeline = %(pipeline)s

-- name: owned
SELECT "table" FROM penstock.applied WHERE pipeline = %(pipeline)s AND "schema" = %(schema)s ORDER BY "table"

-- name: claim_chunk
-- Another attempt at the same chunk waits here for the end of this one. No row: it is there already.
INSERT INTO penstock.chunks (staging, number, fence, "rows") VALUES (%(staging)s, %(number)s, %(fence)s::pg_catalog.pg_lsn, 0)
ON CONFLICT (staging, number) DO NOTHING
RETURNING number

-- name: fill_chunk
UPDATE penstock.chunks SET "rows" = %(rows)s WHERE staging = %(staging)s AND number = %(number)s

-- name: chunk
SELECT fence::text, "rows" FROM penstock.chunks WHERE staging = %(staging)s AND number = %(number)s

-- name: chunks
SELECT number, "rows" FROM penstock.chunks WHERE staging = %(staging)s

-- name: forget_chunks
DELETE FROM penstock.chunks WHERE staging = %(staging)s

-- name: column_types
-- As this server writes them; text where it has no such type. An OID of 0 asks for text.
SELECT coalesce(pg_catalog.format_type(t.oid, w.modifier), 'text')
FROM unnest(%(oids)s::oid[], %(modifiers)s::int[]) WITH ORDINALITY AS w (oid, modifier, place)
LEFT JOIN pg_catalog.pg_type t ON t.oid = w.oid AND t.typnamespace = 'pg_catalog'::pg_catalog.regnamespace
ORDER BY w.place

-- name: columns
SELECT a.attname::text, pg_catalog.format_type(a.atttypid, a.atttypmod)
FROM pg_catalog.pg_attribute a
JOIN pg_catalog.pg_class c ON c.oid = a.attrelid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %(schema)s AND c.relname = %(table)s AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum

-- name: primary_key
-- Its columns in their order, and the name of its index.
SELECT ARRAY(
    SELECT a.attname::text FROM pg_catalog.unnest(i.indkey::int2[]) WITH ORDINALITY AS k (attnum, place)
    JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum ORDER BY k.place
), x.relname::text
FROM pg_catalog.pg_index i
JOIN pg_catalog.pg_class x ON x.oid = i.indexrelid
JOIN pg_catalog.pg_class c ON c.oid = i.indrelid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %(schema)s AND c.relname = %(table)s AND i.indisprimary

-- name: keys_table
-- A table for this transaction alone, with the types that the columns have in the table that they are looked up in.
CREATE TEMPORARY TABLE {keys} ON COMMIT DROP AS SELECT {columns} FROM {table} WITH NO DATA

-- name: delete_keys
DELETE FROM {table} AS t USING {keys} AS k WHERE {match}

-- name: delete_rows
-- As many of equal rows as {count} says. Equal is what is written alike, value by value: not every type has an equality of its own.
DELETE FROM {table} WHERE ctid = ANY (ARRAY(
    SELECT f.place FROM (
        SELECT t.ctid AS place, k.{count} AS wanted, pg_catalog.row_number() OVER (PARTITION BY k.ctid) AS number
        FROM {table} AS t JOIN {keys} AS k ON ROW({columns_t})::text = ROW({columns_k})::text
    ) f WHERE f.number <= f.wanted
))

-- name: take_out_others
-- Those that are not written alike, value by value, under the same key.
DELETE FROM {table} AS t WHERE NOT EXISTS (
    SELECT 1 FROM {filled} AS f WHERE {match} AND ROW({columns_t})::text = ROW({columns_f})::text
)

-- name: put_in_missing
INSERT INTO {table} ({columns}) SELECT {columns_f} FROM {filled} AS f WHERE NOT EXISTS (SELECT 1 FROM {table} AS t WHERE {match})

-- name: find_rows
SELECT {columns} FROM {table} AS t WHERE {wanted}

-- name: find_keys
SELECT {columns} FROM {table} AS t JOIN {keys} AS k ON {match} WHERE {wanted}

-- name: blocks
SELECT pg_catalog.pg_relation_size(c.oid) / pg_catalog.current_setting('block_size')::bigint
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %(schema)s AND c.relname = %(table)s

-- name: read_blocks
SELECT {columns} FROM ONLY {table} WHERE ctid >= {first}::tid AND ctid < {last}::tid
