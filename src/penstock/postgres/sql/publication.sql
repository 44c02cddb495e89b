-- Publications and their contents. Catalog columns that only newer servers have are read through to_jsonb, so
-- that one statement serves all versions.

-- name: publication
SELECT p.oid, p.puballtables, p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate, p.pubviaroot,
       pg_catalog.pg_get_userbyid(p.pubowner), pg_catalog.pg_has_role(p.pubowner, 'USAGE')
FROM pg_catalog.pg_publication p
WHERE p.pubname = %(publication)s

-- name: relations
-- The requested tables, each with the facts that decide whether the publication contains it, whether it could
-- contain it, and whether this role may add it. A partitioned table is published under its own name, or leaf
-- by leaf. UPDATE fails on a leaf without replica identity, whatever the identity of its root. If there are
-- no leaves, the identity of the root is returned. The statement reads only the catalog, and waits for no
-- locks.
WITH RECURSIVE part (root, oid, kind) AS (
  SELECT c.oid, c.oid, c.relkind
  FROM ROWS FROM (pg_catalog.unnest(%(schemas)s::text[]), pg_catalog.unnest(%(names)s::text[])) AS r (nspname, relname)
  JOIN pg_catalog.pg_namespace n ON n.nspname = r.nspname
  JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = r.relname AND c.relkind IN ('r', 'p')
  UNION ALL
  SELECT p.root, c.oid, c.relkind
  FROM part p
  JOIN pg_catalog.pg_inherits i ON i.inhparent = p.oid AND NOT i.inhdetachpending
  JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition
), tree AS MATERIALIZED (
  SELECT p.root, COALESCE(pg_catalog.array_agg(p.oid) FILTER (WHERE p.kind <> 'p'), ARRAY[p.root]) AS leaves
  FROM part p
  GROUP BY p.root
), candidate (oid) AS (
  SELECT DISTINCT p.oid FROM part p
), published AS MATERIALIZED (
  -- include: published
), generated AS MATERIALIZED (
  -- Since Postgres 18, UPDATE also fails if the replica identity has a generated column that is not published. Virtual columns are never
  -- published.
  SELECT pg_catalog.current_setting('server_version_num')::int >= 180000 AS counts,
         COALESCE((SELECT pg_catalog.to_jsonb(p) ->> 'pubgencols' FROM pg_catalog.pg_publication p WHERE p.pubname = %(publication)s), 's') AS published
)
SELECT r.nspname, r.relname, c.oid, c.relkind::text, c.relpersistence::text,
       CASE WHEN c.relispartition THEN root.nspname END, CASE WHEN c.relispartition THEN root.relname END,
       c.oid IN (SELECT oid FROM published) OR pr.oid IS NOT NULL AND c.relkind = 'p' OR COALESCE(leaves.published, false),
       leaves.unidentified,
       leaves.apart,
       pr.oid,
       pg_catalog.jsonb_typeof(pg_catalog.to_jsonb(pr) -> 'prattrs') = 'array' AND EXISTS (
         SELECT 1
         FROM pg_catalog.pg_index i
         CROSS JOIN LATERAL pg_catalog.unnest((i.indkey::int2[])[0:i.indnkeyatts - 1]) k (attnum)
         WHERE i.indrelid = c.oid AND CASE c.relreplident WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END
           AND NOT pg_catalog.to_jsonb(pr) -> 'prattrs' @> pg_catalog.to_jsonb(k.attnum)
       ),
       CASE WHEN pg_catalog.jsonb_typeof(pg_catalog.to_jsonb(pr) -> 'prattrs') = 'array' THEN leaves.whole END,
       pg_catalog.pg_get_userbyid(c.relowner), pg_catalog.pg_has_role(c.relowner, 'USAGE'),
       pg_catalog.has_schema_privilege(n.oid, 'USAGE')
FROM ROWS FROM (pg_catalog.unnest(%(schemas)s::text[]), pg_catalog.unnest(%(names)s::text[])) AS r (nspname, relname)
LEFT JOIN pg_catalog.pg_namespace n ON n.nspname = r.nspname
LEFT JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = r.relname
LEFT JOIN tree ON tree.root = c.oid
LEFT JOIN pg_catalog.pg_publication_rel pr
  ON pr.prrelid = c.oid AND pr.prpubid = (SELECT p.oid FROM pg_catalog.pg_publication p WHERE p.pubname = %(publication)s)
LEFT JOIN LATERAL (
  SELECT rn.nspname, rc.relname
  FROM pg_catalog.pg_class rc
  JOIN pg_catalog.pg_namespace rn ON rn.oid = rc.relnamespace
  WHERE c.relispartition AND rc.oid = pg_catalog.pg_partition_root(c.oid)
) root ON true
LEFT JOIN LATERAL (
  SELECT pg_catalog.bool_and(l.oid IN (SELECT oid FROM published)) AS published,
         pg_catalog.array_agg(l.oid::pg_catalog.regclass::text) FILTER (WHERE l.relkind = 'f' OR l.relpersistence <> 'p') AS apart,
         pg_catalog.jsonb_agg(heap.identity ORDER BY ln.nspname, l.relname) FILTER (WHERE l.relkind <> 'f' AND CASE l.relreplident
           WHEN 'f' THEN hidden.kind IS NOT NULL WHEN 'n' THEN true WHEN 'i' THEN key.has_chosen IS NOT TRUE OR hidden.kind IS NOT NULL
           ELSE key.is_immediate IS NOT TRUE OR hidden.kind IS NOT NULL END) AS unidentified,
         pg_catalog.jsonb_agg(heap.identity ORDER BY ln.nspname, l.relname) FILTER (WHERE l.relreplident = 'f') AS whole
  FROM pg_catalog.unnest(tree.leaves) leaf (oid)
  JOIN pg_catalog.pg_class l ON l.oid = leaf.oid
  JOIN pg_catalog.pg_namespace ln ON ln.oid = l.relnamespace
  LEFT JOIN LATERAL (
    SELECT pg_catalog.bool_or(i.indisprimary) AS has_primary, pg_catalog.bool_or(i.indisprimary AND i.indimmediate) AS is_immediate,
           pg_catalog.bool_or(i.indisreplident AND i.indimmediate) AS has_chosen
    FROM pg_catalog.pg_index i
    WHERE i.indrelid = l.oid AND i.indisvalid
  ) key ON true
  LEFT JOIN LATERAL (
    SELECT max(a.attgenerated::text) AS kind
    FROM pg_catalog.pg_attribute a
    CROSS JOIN generated g
    WHERE g.counts AND a.attrelid = l.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated <> '' AND a.attgenerated::text <> g.published
      AND pg_catalog.jsonb_typeof(pg_catalog.to_jsonb(pr) -> 'prattrs') IS DISTINCT FROM 'array'
      AND (l.relreplident = 'f' OR EXISTS (
        SELECT 1
        FROM pg_catalog.pg_index i
        WHERE i.indrelid = l.oid AND CASE l.relreplident WHEN 'i' THEN i.indisreplident WHEN 'd' THEN i.indisprimary END
          AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
      ))
  ) hidden ON true
  CROSS JOIN LATERAL (
    SELECT pg_catalog.jsonb_build_array(
      ln.nspname, l.relname, l.relreplident, COALESCE(key.has_primary, false), COALESCE(key.is_immediate, false), hidden.kind
    ) AS identity
  ) heap
) leaves ON true
ORDER BY r.nspname, r.relname

-- name: listings
-- For tables with a column list: the columns of the list and of the key, and the row filter. Needs Postgres
-- 15.
SELECT pr.prrelid,
       ARRAY(
         SELECT a.attname::text
         FROM pg_catalog.pg_attribute a
         WHERE a.attrelid = pr.prrelid AND NOT a.attisdropped AND (a.attnum = ANY (pr.prattrs) OR EXISTS (
           SELECT 1
           FROM pg_catalog.pg_index i
           WHERE i.indrelid = pr.prrelid AND CASE c.relreplident WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END
             AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
         ))
         ORDER BY a.attnum
       ),
       pg_catalog.pg_get_expr(pr.prqual, pr.prrelid)
FROM pg_catalog.pg_publication_rel pr
JOIN pg_catalog.pg_publication p ON p.oid = pr.prpubid AND p.pubname = %(publication)s
JOIN pg_catalog.pg_class c ON c.oid = pr.prrelid
WHERE pr.prrelid = ANY (%(oids)s::oid[])

-- name: schemas
-- Which catalog entry added each schema to the publication. Needs Postgres 15.
SELECT n.nspname, s.oid
FROM pg_catalog.pg_publication_namespace s
JOIN pg_catalog.pg_namespace n ON n.oid = s.pnnspid
WHERE s.pnpubid = %(publication)s::oid

-- name: publishers
-- One of the owners of some tables and of the publication: a role that may add all of these tables to the
-- publication, or create it with them.
WITH publication AS (SELECT p.pubowner FROM pg_catalog.pg_publication p WHERE p.pubname = %(publication)s)
SELECT r.rolname::text
FROM pg_catalog.pg_roles r
WHERE (r.oid IN (SELECT c.relowner FROM pg_catalog.pg_class c WHERE c.oid = ANY (%(oids)s::oid[])) OR r.oid IN (SELECT pubowner FROM publication))
  AND NOT EXISTS (
    SELECT 1
    FROM pg_catalog.pg_class c
    WHERE c.oid = ANY (%(oids)s::oid[])
      AND NOT (pg_catalog.pg_has_role(r.oid, c.relowner, 'USAGE') AND pg_catalog.has_schema_privilege(r.oid, c.relnamespace, 'USAGE'))
  )
  AND COALESCE(
    (SELECT pg_catalog.pg_has_role(r.oid, pubowner, 'USAGE') FROM publication),
    pg_catalog.has_database_privilege(r.oid, pg_catalog.current_database(), 'CREATE')
  )
ORDER BY r.rolsuper, r.rolname
LIMIT 1

-- name: partition_identities
-- Partitions whose old keys lack columns that the stream announces for their root. A Relation message flags
-- the key of the root, but each heap logs old keys by its own replica identity. Neither ALTER TABLE … REPLICA
-- IDENTITY nor the creation of a partition propagates the identity. A heap that logs whole rows logs every
-- key. On a heap without any identity, UPDATE and DELETE fail. With `whole`, old rows are requested: if the
-- root or a heap has FULL, all of them need it. A publication without updates and deletes sends no old keys.
-- The statement reads only the catalog, and waits for no locks.
WITH RECURSIVE root (oid, schema, name, identity) AS MATERIALIZED (
    SELECT c.oid, n.nspname, c.relname, c.relreplident
    FROM ROWS FROM (pg_catalog.unnest(%(schemas)s::text[]), pg_catalog.unnest(%(names)s::text[])) AS r (nspname, relname)
    JOIN pg_catalog.pg_namespace n ON n.nspname = r.nspname
    JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = r.relname AND c.relkind = 'p'
    WHERE NOT EXISTS (
        SELECT 1 FROM pg_catalog.pg_publication p WHERE p.pubname = %(publication)s AND NOT p.pubupdate AND NOT p.pubdelete
    )
), parts (root, oid) AS (
    SELECT r.oid, r.oid FROM root r
    UNION ALL
    SELECT p.root, i.inhrelid FROM parts p
    JOIN pg_catalog.pg_inherits i ON i.inhparent = p.oid
    JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition
), leaf AS MATERIALIZED (
    SELECT p.root, c.oid, n.nspname, c.relname, c.relreplident
    FROM parts p
    JOIN pg_catalog.pg_class c ON c.oid = p.oid AND c.relkind = 'r'
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
), key AS MATERIALIZED (
    -- For roots and leaves: the columns of old keys. For a root with FULL: those of the primary key, which is its key in the stream.
    SELECT i.indrelid, i.indexrelid, ARRAY(
        SELECT a.attname::text FROM pg_catalog.pg_attribute a
        WHERE a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
        ORDER BY pg_catalog.array_position((i.indkey::int2[])[0:i.indnkeyatts - 1], a.attnum)
    ) AS columns
    FROM parts p
    JOIN pg_catalog.pg_class c ON c.oid = p.oid
    JOIN pg_catalog.pg_index i ON i.indrelid = c.oid AND i.indisvalid
    WHERE CASE c.relreplident WHEN 'i' THEN i.indisreplident WHEN 'n' THEN false ELSE i.indisprimary AND i.indimmediate END
), attached (root, oid) AS (
    SELECT r.oid, k.indexrelid FROM root r JOIN key k ON k.indrelid = r.oid
    UNION ALL
    SELECT a.root, i.inhrelid FROM attached a JOIN pg_catalog.pg_inherits i ON i.inhparent = a.oid
)
SELECT r.schema, r.name, r.identity::text, l.nspname, l.relname, COALESCE(rk.columns, '{}'), lk.columns,
       (SELECT x.relname FROM attached a JOIN pg_catalog.pg_index i ON i.indexrelid = a.oid AND i.indrelid = l.oid
        JOIN pg_catalog.pg_class x ON x.oid = i.indexrelid WHERE a.root = r.oid)
FROM root r
JOIN leaf l ON l.root = r.oid
JOIN key lk ON lk.indrelid = l.oid
LEFT JOIN key rk ON rk.indrelid = r.oid
WHERE l.relreplident <> 'f'
  AND (rk.columns IS NULL OR NOT lk.columns @> rk.columns
    OR %(whole)s AND (r.identity = 'f' OR EXISTS (SELECT 1 FROM leaf other WHERE other.root = r.oid AND other.relreplident = 'f')))
UNION ALL
-- The root itself: the server marks an old row as whole or as a key by the identity of the root, whatever the
-- heap of the row logs.
SELECT r.schema, r.name, r.identity::text, r.schema, r.name, COALESCE(rk.columns, '{}'), COALESCE(rk.columns, '{}'), NULL
FROM root r
LEFT JOIN key rk ON rk.indrelid = r.oid
WHERE %(whole)s AND r.identity <> 'f' AND EXISTS (SELECT 1 FROM leaf WHERE leaf.root = r.oid AND leaf.relreplident = 'f')
ORDER BY 1, 2, 4, 5
