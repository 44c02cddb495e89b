-- Partitions that contain rows: their filenodes, and the transactions that set them.

-- name: leaves
-- For each leaf of a table: its filenode, the transaction that set the filenode, and whether the leaf was
-- attached as an existing table with rows. If it was created as a partition, its pg_inherits row is from the
-- transaction that created it. That transaction also wrote the pg_attribute rows of its system columns, which
-- are never updated. If a table is created, filled and attached in one transaction, attaching rewrites the
-- pg_attribute rows of all its columns. The last column is the xmin of the same snapshot.
WITH RECURSIVE parts (root, oid, is_attached) AS (
    SELECT c.oid, c.oid, false FROM pg_catalog.pg_class c WHERE c.oid = ANY (%(oids)s::oid[]) AND c.relkind = 'p'
    UNION ALL
    SELECT p.root, i.inhrelid, p.is_attached OR i.xmin::text <> a.xmin::text OR NOT EXISTS (
        SELECT FROM pg_catalog.pg_attribute b
        WHERE b.attrelid = i.inhrelid AND b.attnum > 0 AND NOT b.attisdropped
          AND b.xmin::text = i.xmin::text AND b.cmin::text::int8 < i.cmin::text::int8
    )
    FROM parts p
    JOIN pg_catalog.pg_inherits i ON i.inhparent = p.oid
    JOIN pg_catalog.pg_attribute a ON a.attrelid = i.inhrelid AND a.attname = 'tableoid'
)
SELECT p.root, p.oid, c.relfilenode, c.xmin::text::bigint,
  CASE WHEN p.is_attached AND p.oid <> ALL (%(known)s::oid[]) THEN COALESCE(pg_catalog.pg_relation_size(p.oid), 0) > 0 ELSE false END,
  (SELECT pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::text::bigint)
FROM parts p
JOIN pg_catalog.pg_class c ON c.oid = p.oid AND c.relkind = 'r'
ORDER BY p.root, p.oid

-- name: older_row
-- Rows contain 32 bits of the id of the transaction that wrote them. For a row written by %(mark)s or later,
-- the distance is exact; an older one may seem as close after a wraparound, but a close one never seems far.
WITH moment AS MATERIALIZED (
    SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint AS next
)
SELECT 1
FROM moment m, {heap} t
WHERE t.tableoid = %(leaf)s AND %(mark)s <= m.next
  AND ((m.next - t.xmin::text::bigint) & 4294967295) > m.next - %(mark)s
LIMIT 1
