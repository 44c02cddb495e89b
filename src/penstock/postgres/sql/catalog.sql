-- The current catalog. Used to choose tables, to plan snapshots and to read primary keys; never to decode the
-- log.

-- name: tables
SELECT c.oid, n.nspname, c.relname
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p')
  AND NOT c.relispartition
  AND c.relpersistence = 'p'
  AND n.nspname <> 'information_schema'
  AND n.nspname !~ '^pg_'
  AND c.oid <> ALL (%(without)s::oid[])
ORDER BY n.nspname, c.relname

-- name: columns
-- If the publication has a column list for the table (since Postgres 15), these are the columns of the list.
-- In Postgres 15, a list may contain generated columns, which are not published. Without a list, these are
-- all columns that are not generated. Since Postgres 18, stored generated columns are in the stream too if
-- the publication says so. A publication that does not exist yet will publish them, since Penstock creates
-- it.
WITH generated AS MATERIALIZED (
  SELECT COALESCE(
    (SELECT pg_catalog.to_jsonb(p) ->> 'pubgencols' = 's' FROM pg_catalog.pg_publication p WHERE p.pubname = %(publication)s::text),
    %(publication)s::text IS NOT NULL AND pg_catalog.current_setting('server_version_num')::int >= 180000
      AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_publication p WHERE p.pubname = %(publication)s::text)
  ) AS stored
), candidate (oid) AS (
  SELECT pg_catalog.unnest(%(oids)s::oid[])
), published AS MATERIALIZED (
  -- include: published
)
SELECT a.attrelid, a.attname, a.atttypid, a.atttypmod, a.attnum::int
FROM pg_catalog.pg_attribute a
LEFT JOIN published p ON p.oid = a.attrelid
WHERE a.attrelid = ANY (%(oids)s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
  AND CASE WHEN p.attributes IS NOT NULL THEN a.attnum = ANY (p.attributes)
      AND (a.attgenerated = '' OR pg_catalog.current_setting('server_version_num')::int >= 180000)
    ELSE a.attgenerated = '' OR a.attgenerated = 's' AND (SELECT stored FROM generated) END
ORDER BY a.attrelid, a.attnum

-- name: attributes
-- The type is printed as SQL writes it, with the modifier -1: without one, `character` would be parsed as
-- `character(1)`. For a domain, the base type is printed, since parsing a value as the domain would run
-- functions of the domain's owner.
SELECT a.attname::text, a.attnum::int, pg_catalog.format_type(b.oid, -1)
FROM pg_catalog.pg_attribute a
CROSS JOIN LATERAL (
    WITH RECURSIVE base (oid, below) AS (
        SELECT t.oid, t.typbasetype FROM pg_catalog.pg_type t WHERE t.oid = a.atttypid
        UNION ALL
        SELECT t.oid, t.typbasetype FROM base JOIN pg_catalog.pg_type t ON t.oid = base.below
    )
    SELECT oid FROM base WHERE below = 0
) b
WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped

-- name: types
-- Built-in types have OIDs below 10000. A type with an element is an array only if the element refers to it
-- as its array. Only base types are identified by name; the name of a table's row type, or of an array of it,
-- may be invalid UTF-8.
WITH RECURSIVE needed (oid) AS (
    (
        SELECT oid FROM pg_catalog.pg_type WHERE oid >= 10000 AND %(oids)s::oid[] IS NULL
        UNION ALL
        SELECT pg_catalog.unnest(%(oids)s::oid[])
    )
    UNION
    SELECT CASE t.typtype WHEN 'd' THEN t.typbasetype ELSE e.oid END
    FROM needed
    JOIN pg_catalog.pg_type t ON t.oid = needed.oid
    LEFT JOIN pg_catalog.pg_type e ON e.oid = t.typelem AND e.typarray = t.oid
    WHERE t.typtype = 'd' OR e.oid IS NOT NULL
)
SELECT t.oid, CASE WHEN t.typtype = 'b' AND e.oid IS NULL THEN t.typname ELSE '' END, t.typtype::text, t.typbasetype, t.typtypmod, coalesce(e.oid, 0), coalesce(e.typdelim::text, ',')
FROM needed
JOIN pg_catalog.pg_type t ON t.oid = needed.oid
LEFT JOIN pg_catalog.pg_type e ON e.oid = t.typelem AND e.typarray = t.oid
WHERE t.oid >= 10000

-- name: type_texts
-- The definitions of enums and composite types that the text of their values depends on: these types and all
-- that they consist of. Labels are digests, since in a SQL_ASCII database they may be invalid UTF-8.
WITH RECURSIVE used (root, oid) AS (
    SELECT o.oid, o.oid FROM pg_catalog.unnest(%(oids)s::oid[]) o (oid)
    UNION
    SELECT u.root, part.oid
    FROM used u
    JOIN pg_catalog.pg_type t ON t.oid = u.oid
    CROSS JOIN LATERAL (
        SELECT t.typbasetype WHERE t.typtype = 'd'
        UNION ALL SELECT t.typelem WHERE t.typtype = 'b'
        UNION ALL SELECT r.rngsubtype FROM pg_catalog.pg_range r WHERE r.rngtypid = t.oid
        UNION ALL SELECT r.rngtypid FROM pg_catalog.pg_range r WHERE r.rngmultitypid = t.oid
        UNION ALL SELECT a.atttypid FROM pg_catalog.pg_attribute a
            WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
    ) part (oid)
    WHERE part.oid >= 10000
)
SELECT u.root, u.oid,
  ARRAY(SELECT e.oid FROM pg_catalog.pg_enum e WHERE e.enumtypid = u.oid ORDER BY e.oid),
  ARRAY(SELECT pg_catalog.md5(e.enumlabel::text) FROM pg_catalog.pg_enum e WHERE e.enumtypid = u.oid ORDER BY e.oid),
  coalesce((SELECT pg_catalog.md5(string_agg(pg_catalog.concat_ws(':', a.attnum, a.atttypid, a.atttypmod), ',' ORDER BY a.attnum))
    FROM pg_catalog.pg_attribute a
    WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped), '')
FROM used u
JOIN pg_catalog.pg_type t ON t.oid = u.oid
WHERE t.typtype IN ('e', 'c')

-- name: keys
-- The result includes the generated columns, and whether the replica identity is FULL.
SELECT i.indrelid, array_agg(a.attname::text ORDER BY a.attnum),
       COALESCE(array_agg(a.attname::text ORDER BY a.attnum) FILTER (WHERE a.attgenerated <> ''), '{}'), bool_or(c.relreplident = 'f')
FROM pg_catalog.pg_index i
JOIN pg_catalog.pg_class c ON c.oid = i.indrelid
JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
WHERE CASE c.relreplident WHEN 'i' THEN i.indisreplident WHEN 'n' THEN false ELSE i.indisprimary AND i.indimmediate END
  AND i.indrelid = ANY (%(oids)s::oid[])
GROUP BY i.indrelid

-- name: key_operators
-- For key columns whose index has an operator class that is not built in: the type that it compares, its
-- equality operator, and the array delimiter of the type. The operator is trusted only if class, operator and
-- function belong to superusers, and class and operator to an extension, since reading rows by key runs it.
SELECT a.attname::text, pg_catalog.format_type(k.opcintype, -1),
  CASE WHEN (SELECT bool_and(r.rolsuper) FROM pg_catalog.pg_roles r WHERE r.oid IN (k.opcowner, o.oprowner, f.proowner))
      AND EXISTS (SELECT FROM pg_catalog.pg_depend d
                  WHERE d.classid = 'pg_catalog.pg_opclass'::regclass AND d.objid = k.oid AND d.deptype = 'e')
      AND EXISTS (SELECT FROM pg_catalog.pg_depend d
                  WHERE d.classid = 'pg_catalog.pg_operator'::regclass AND d.objid = o.oid AND d.deptype = 'e')
    THEN pg_catalog.format('OPERATOR(%%I.%%s)', n.nspname, o.oprname) END,
  (SELECT t.typdelim::text FROM pg_catalog.pg_type t WHERE t.oid = k.opcintype)
FROM pg_catalog.pg_index i
JOIN pg_catalog.pg_class c ON c.oid = i.indrelid
CROSS JOIN LATERAL pg_catalog.generate_series(0, i.indnkeyatts - 1) at
JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[at]
JOIN pg_catalog.pg_opclass k ON k.oid = i.indclass[at] AND k.opcnamespace <> 'pg_catalog'::regnamespace
JOIN pg_catalog.pg_am m ON m.oid = k.opcmethod AND m.amname = 'btree'
JOIN pg_catalog.pg_amop p ON p.amopfamily = k.opcfamily AND p.amoplefttype = k.opcintype AND p.amoprighttype = k.opcintype AND p.amopstrategy = 3
JOIN pg_catalog.pg_operator o ON o.oid = p.amopopr
JOIN pg_catalog.pg_namespace n ON n.oid = o.oprnamespace
JOIN pg_catalog.pg_proc f ON f.oid = o.oprcode
WHERE i.indrelid = %(oid)s
  AND CASE c.relreplident WHEN 'i' THEN i.indisreplident WHEN 'n' THEN false ELSE i.indisprimary AND i.indimmediate END
UNION ALL
-- Composite types and ranges that are not built in: their input functions run the checks of domains that they consist of.
SELECT a.attname::text, pg_catalog.format_type(b.oid, -1), NULL, NULL
FROM pg_catalog.pg_attribute a
CROSS JOIN LATERAL (
    WITH RECURSIVE base (oid, below, kind) AS (
        SELECT t.oid, t.typbasetype, t.typtype FROM pg_catalog.pg_type t WHERE t.oid = a.atttypid
        UNION ALL
        SELECT t.oid, t.typbasetype, t.typtype FROM base JOIN pg_catalog.pg_type t ON t.oid = base.below
    )
    SELECT oid FROM base WHERE oid >= 10000 AND kind IN ('c', 'r', 'm')
) b
WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped

-- name: key_faults
-- Why tables that seem to have a key have none: their replica identity is NOTHING, or the primary key is
-- deferrable.
SELECT c.oid, c.relreplident = 'n'
FROM pg_catalog.pg_class c
WHERE c.oid = ANY (%(oids)s::oid[])
  AND EXISTS (SELECT 1 FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid AND i.indisprimary AND (c.relreplident = 'n' OR NOT i.indimmediate))

-- name: whole_rows
-- A partitioned table has no rows itself: its partitions decide. Unlike pg_partition_tree,
-- pg_partition_ancestors takes no locks.
SELECT c.oid
FROM pg_catalog.pg_class c
WHERE c.oid = ANY (%(oids)s::oid[])
  AND (c.relkind = 'p' OR c.relreplident = 'f')
  AND NOT EXISTS (
    SELECT 1
    FROM pg_catalog.pg_class heap
    CROSS JOIN LATERAL pg_catalog.pg_partition_ancestors(heap.oid) ancestor
    WHERE heap.relispartition AND heap.relkind <> 'p' AND heap.relreplident <> 'f' AND ancestor.relid = c.oid
  )

-- name: primary_key
-- The position is read after the statement's snapshot was taken, so everything that the snapshot shows had
-- committed before that position.
SELECT coalesce(array_agg(a.attname::text ORDER BY a.attnum) FILTER (WHERE a.attnum IS NOT NULL), '{}'),
       pg_catalog.pg_current_wal_insert_lsn()::text
FROM pg_catalog.pg_class c
LEFT JOIN pg_catalog.pg_index i ON i.indrelid = c.oid AND i.indisprimary AND i.indimmediate
LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
WHERE c.oid = %(oid)s
GROUP BY c.oid

-- name: row_filter
-- Row filters exist since Postgres 15. A filter refers to the columns of the root; partitions have the same
-- columns.
WITH candidate (oid) AS (
  SELECT %(oid)s::oid
), published AS MATERIALIZED (
  -- include: published
)
SELECT pg_catalog.pg_get_expr(p.filter, p.oid)
FROM published p
WHERE p.filter IS NOT NULL

-- name: leaves
SELECT c.oid, n.nspname, c.relname, pg_catalog.pg_relation_size(c.oid), pg_catalog.pg_relation_filenode(c.oid)
FROM pg_catalog.pg_partition_tree(%(oid)s) t
JOIN pg_catalog.pg_class c ON c.oid = t.relid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE t.isleaf AND c.relkind = 'r'
UNION ALL
SELECT c.oid, n.nspname, c.relname, pg_catalog.pg_relation_size(c.oid), pg_catalog.pg_relation_filenode(c.oid)
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = %(oid)s AND c.relkind = 'r'
  AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_partition_tree(%(oid)s))
ORDER BY 4 DESC

-- name: filenodes
-- The current filenodes of some heaps, and those that the snapshot shows.
SELECT c.oid, pg_catalog.pg_relation_filenode(c.oid), c.relfilenode
FROM pg_catalog.pg_class c
WHERE c.oid = ANY (%(oids)s::oid[])

-- name: sizes
-- The sizes are from the catalog: reading the size of a file would wait for exclusive locks.
WITH RECURSIVE parts (root, oid) AS (
    SELECT o.oid, o.oid FROM pg_catalog.unnest(%(oids)s::oid[]) o (oid)
    UNION ALL
    SELECT p.root, i.inhrelid FROM parts p
    JOIN pg_catalog.pg_inherits i ON i.inhparent = p.oid
    JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition
)
SELECT p.root, sum(greatest(c.relpages, 0)::bigint * 8192)::bigint
FROM parts p
JOIN pg_catalog.pg_class c ON c.oid = p.oid
GROUP BY p.root

-- name: fingerprint
-- Everything that the rows of a table, or the published part of them, depend on. The statement reads only the
-- catalog, and waits for no locks.
WITH RECURSIVE parts (oid) AS (
    SELECT %(oid)s::oid
    UNION ALL
    SELECT i.inhrelid FROM parts p
    JOIN pg_catalog.pg_inherits i ON i.inhparent = p.oid
    JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition
)
SELECT pg_catalog.md5(pg_catalog.concat_ws('|',
  (SELECT string_agg(pg_catalog.concat_ws(':', a.attnum, a.attname, a.atttypid, a.atttypmod, a.attgenerated), ',' ORDER BY a.attnum)
   FROM pg_catalog.pg_attribute a WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped),
  (SELECT string_agg(pg_catalog.concat_ws(':', i.indkey, i.indisprimary, i.indisreplident, i.indimmediate), ',' ORDER BY i.indkey::text)
   FROM pg_catalog.pg_index i WHERE i.indrelid = %(oid)s AND (i.indisprimary OR i.indisreplident)),
  (SELECT string_agg(pg_catalog.concat_ws(':', c.oid, c.relnamespace, c.relname, c.relfilenode, c.relreplident), ',' ORDER BY c.oid)
   FROM parts p JOIN pg_catalog.pg_class c ON c.oid = p.oid),
  (SELECT string_agg(pg_catalog.to_jsonb(r)::text, ',' ORDER BY r.oid)
   FROM pg_catalog.pg_publication_rel r JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid
   WHERE p.pubname = %(publication)s AND r.prrelid = %(oid)s),
  (SELECT pg_catalog.concat_ws(':', p.oid, p.puballtables, pg_catalog.to_jsonb(p) ->> 'pubgencols')
   FROM pg_catalog.pg_publication p WHERE p.pubname = %(publication)s)
))

-- name: outside
-- Relations that look like tables but never enter the log.
SELECT n.nspname, c.relname, c.relkind::text, c.relpersistence::text
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE (c.relkind IN ('v', 'm', 'f') OR c.relkind IN ('r', 'p') AND c.relpersistence = 'u')
  AND NOT c.relispartition
  AND n.nspname <> 'information_schema'
  AND n.nspname !~ '^pg_'
  AND c.oid <> ALL (%(without)s::oid[])
ORDER BY n.nspname, c.relname

-- name: names
-- The current names of relations, by OID; dropped ones are missing.
SELECT c.oid, n.nspname::text, c.relname::text
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = ANY (%(oids)s::oid[])

-- name: name_bytes
-- In a SQL_ASCII database: the names of tables, partitions and columns that are not plain ASCII, as bytes.
-- The OID is that of the table; for a partition, of its root.
SELECT r.oid, pg_catalog.convert_to(rn.nspname::text, 'SQL_ASCII'), pg_catalog.convert_to(r.relname::text, 'SQL_ASCII'),
       pg_catalog.convert_to(pg_catalog.concat(n.nspname, '.', c.relname), 'SQL_ASCII'),
       ARRAY(SELECT pg_catalog.convert_to(a.attname::text, 'SQL_ASCII') FROM pg_catalog.pg_attribute a
             WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attname::text !~ '^[ -~]*$'),
       r.relkind IN ('r', 'p') AND r.relpersistence = 'p'
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_class r ON r.oid = CASE WHEN c.relispartition THEN pg_catalog.pg_partition_root(c.oid) ELSE c.oid END
JOIN pg_catalog.pg_namespace rn ON rn.oid = r.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname <> 'information_schema' AND n.nspname !~ '^pg_'
  AND (pg_catalog.concat(n.nspname, c.relname) !~ '^[ -~]*$' OR EXISTS (
    SELECT 1 FROM pg_catalog.pg_attribute a
    WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attname::text !~ '^[ -~]*$'
  ))
ORDER BY r.oid, c.oid
