-- Partitions that hold rows themselves: which a table has, where their rows lie, and since when.

-- name: leaves
-- By table: where the rows of each leaf lie, who wrote that into the catalog, and whether the leaf was a table before it became a part, and
-- has rows. What is created as a part has its row in pg_inherits from the transaction that made it; the one that says where its system
-- columns are is never written again. A table may be made, filled and attached in one transaction, too: attaching writes the rows of all its
-- columns again, so that none is left of before. The last column is as of the moment that the rest is of.
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
-- Rows carry 32 bits of the number of who wrote them. One that was written by %(mark)s or later is as many numbers away as that says; of
-- the others some may look as near, once the numbers have come round, but none that is near looks far.
WITH moment AS MATERIALIZED (
    SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint AS next
)
SELECT 1
FROM moment m, {heap} t
WHERE t.tableoid = %(leaf)s AND %(mark)s <= m.next
  AND ((m.next - t.xmin::text::bigint) & 4294967295) > m.next - %(mark)s
LIMIT 1
