-- A Postgres target: Penstock's state in the schema `penstock`, and statements on the target tables.

-- name: prepare
-- One row for each table: its pipeline, its source, and its position. The position is null if there is no
-- valid copy. `staging` names the staging table of an unfinished snapshot; after a snapshot it stays set
-- until the first epoch. `relation` is the OID of the table itself: 0 if there was none yet, null if an
-- earlier version did not record it. `copy` is the value that `staging` had for the copy of the current rows,
-- and stays set.
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

-- name: missing_privileges
-- The privileges that a run needs and the role lacks: to create tables in a schema, or a missing schema;
-- ownership of a table of the pipeline.
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

-- name: has_deferred_checks
-- Deferrable constraints have triggers: on their table, and on the one that a foreign key refers to.
SELECT EXISTS (
    SELECT 1 FROM pg_catalog.pg_trigger t
    JOIN pg_catalog.pg_class c ON c.oid = t.tgrelid
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %(schema)s AND c.relname = %(table)s AND t.tgdeferrable
)

-- name: current_role
-- Database, role, and whether the role may create temporary tables.
SELECT pg_catalog.current_database(), CURRENT_USER, pg_catalog.has_database_privilege(pg_catalog.current_database(), 'TEMPORARY')

-- name: load
-- The state of a table, even if nothing is recorded or the table does not exist. Values that an earlier
-- version did not record are null.
SELECT a.pipeline, a.source_schema, a.source_table, a.source_oid, a."columns", a."key", a.mode, a."position"::text, a.staging,
    pg_catalog.to_jsonb(a) ->> 'origin', pg_catalog.to_jsonb(a) ->> 'copy',
    coalesce(pg_catalog.to_jsonb(a) ->> 'relation' <> c.oid::pg_catalog.regclass::text, false), c.oid IS NOT NULL
FROM (SELECT %(schema)s::text AS "schema", %(table)s::text AS "table") w
LEFT JOIN penstock.applied a USING ("schema", "table")
LEFT JOIN (pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace)
  ON n.nspname = w."schema" AND c.relname = w."table"

-- name: exists
SELECT EXISTS (
    SELECT 1 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %(schema)s AND c.relname = %(table)s
)

-- name: lock
-- Waits for other writers of this table, and makes them wait. Returns no row if this pipeline has no such
-- table.
SELECT a."position"::text FROM penstock.applied a
WHERE a."schema" = %(schema)s AND a."table" = %(table)s AND a.pipeline = %(pipeline)s AND NOT EXISTS (
    SELECT 1 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = a."schema" AND c.relname = a."table" AND pg_catalog.to_jsonb(a) ->> 'relation' <> c.oid::pg_catalog.regclass::text
)
FOR UPDATE

-- name: record_begun
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

-- name: copy_shape
-- Copy columns and origin from another table's record.
UPDATE penstock.applied a SET source_oid = b.source_oid, "columns" = b."columns", "key" = b."key", mode = b.mode, origin = b.origin,
    copy = b.copy
FROM penstock.applied b
WHERE a."schema" = %(schema)s AND a."table" = %(table)s AND b."schema" = %(from_schema)s AND b."table" = %(from_table)s

-- name: record_evolved
UPDATE penstock.applied SET "columns" = %(columns)s::jsonb, "key" = %(key)s::jsonb, origin = %(origin)s
WHERE "schema" = %(schema)s AND "table" = %(table)s

-- name: record_position
UPDATE penstock.applied SET "position" = %(position)s::pg_catalog.pg_lsn, staging = NULL
WHERE "schema" = %(schema)s AND "table" = %(table)s AND pipeline = %(pipeline)s

-- name: record_settled
-- The table at this place is now the pipeline's, filled up to the position.
UPDATE penstock.applied a SET "position" = %(position)s::pg_catalog.pg_lsn, relation = c.oid
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE a."schema" = %(schema)s AND a."table" = %(table)s AND a.pipeline = %(pipeline)s AND n.nspname = a."schema" AND c.relname = a."table"

-- name: forget
DELETE FROM penstock.applied WHERE "schema" = %(schema)s AND "table" = %(table)s AND pipeline = %(pipeline)s

-- name: owned
SELECT "table" FROM penstock.applied WHERE pipeline = %(pipeline)s AND "schema" = %(schema)s ORDER BY "table"

-- name: claim_chunk
-- Another attempt at the same chunk waits here for the end of this one. Returns no row if the chunk is loaded
-- already.
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
-- The names of types in this server's format. An OID of 0 means text, which also replaces a type that this
-- server does not have.
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
-- Its columns in order, and the name of its index.
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
-- A table for this transaction only, with the types that the columns have in the target table.
CREATE TEMPORARY TABLE {keys} ON COMMIT DROP AS SELECT {columns} FROM {table} WITH NO DATA

-- name: delete_keys
DELETE FROM {table} AS t USING {keys} AS k WHERE {match}

-- name: delete_rows
-- For each row in the table of keys, deletes as many equal rows as its count says. Rows are equal if all
-- their values have the same text, since not every type has an equality operator.
DELETE FROM {table} WHERE ctid = ANY (ARRAY(
    SELECT f.place FROM (
        SELECT t.ctid AS place, k.{count} AS wanted, pg_catalog.row_number() OVER (PARTITION BY k.ctid) AS number
        FROM {table} AS t JOIN {keys} AS k ON ROW({columns_t})::text = ROW({columns_k})::text
    ) f WHERE f.number <= f.wanted
))

-- name: delete_other_rows
-- Deletes each row that has no counterpart: a row with the same key and the same text of all values.
DELETE FROM {table} AS t WHERE NOT EXISTS (
    SELECT 1 FROM {filled} AS f WHERE {match} AND ROW({columns_t})::text = ROW({columns_f})::text
)

-- name: insert_missing_rows
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
