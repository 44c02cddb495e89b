-- Column facts beyond the schema: column numbers, and default values for rows that are older than a column.

-- name: widths
-- The statement reads only the catalog, and waits for no locks. The rows of a partitioned table are in its
-- partitions.
WITH RECURSIVE parts (root, oid) AS (
    SELECT o.oid, o.oid FROM pg_catalog.unnest(%(oids)s::oid[]) o (oid)
    UNION ALL
    SELECT p.root, i.inhrelid FROM parts p
    JOIN pg_catalog.pg_inherits i ON i.inhparent = p.oid
    JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition
)
SELECT r.oid, r.relnatts::int, pg_catalog.md5(string_agg(pg_catalog.concat_ws(':', c.oid, c.relfilenode), ',' ORDER BY c.oid))
FROM parts p
JOIN pg_catalog.pg_class r ON r.oid = p.root
JOIN pg_catalog.pg_class c ON c.oid = p.oid
GROUP BY r.oid, r.relnatts

-- name: missing
-- The default values for rows that are older than a column, from all heaps of the table. The catalog stores
-- the value in an array with one element. The text of the array quotes the element if necessary, but does not
-- quote a comma if the delimiter of the type is another character. Such values are returned as null.
WITH RECURSIVE parts (oid) AS (
    SELECT %(oid)s::oid
    UNION ALL
    SELECT i.inhrelid FROM parts p
    JOIN pg_catalog.pg_inherits i ON i.inhparent = p.oid
    JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition
)
SELECT a.attname::text,
  array_agg(DISTINCT CASE WHEN t.typdelim = ',' THEN (a.attmissingval::text::text[])[1] END),
  bool_and(a.atthasmissing)
FROM parts p
JOIN pg_catalog.pg_class c ON c.oid = p.oid AND c.relkind = 'r'
JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
GROUP BY a.attname
HAVING bool_or(a.atthasmissing)

-- name: repeatable_read
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY

-- name: open_transactions
-- Transactions that are invisible to the current snapshot, although the log may already contain their
-- commits.
SELECT pg_catalog.pg_snapshot_xmax(s)::text::bigint, ARRAY(SELECT x::text::bigint FROM pg_catalog.pg_snapshot_xip(s) x)
FROM pg_catalog.pg_current_snapshot() s
