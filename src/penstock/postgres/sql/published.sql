-- The rows of the CTE `published`, of statements with a line `-- include: published` (`queries.publication_query`): the relations of the CTE
-- `candidate` that the publication lists under their own OID, each with its column list (`attributes`) and row filter (`filter`), or NULL.

-- name: catalog
-- Since Postgres 15 the view pg_publication_tables opens every table of the publication, so one locked table
-- would block reading all others. This reads the catalog alone, by the rules of the server's
-- pg_get_publication_tables: FOR ALL TABLES and TABLES IN SCHEMA include only permanent tables that initdb
-- did not create, without column lists and row filters; a listed table includes all its partitions.
SELECT c.oid, own.prattrs AS attributes, own.prqual AS filter
FROM candidate
JOIN pg_catalog.pg_class c ON c.oid = candidate.oid
JOIN pg_catalog.pg_publication p ON p.pubname = %(publication)s
CROSS JOIN LATERAL (
  SELECT COALESCE(pg_catalog.bool_or(l.oid = c.oid), false) AS itself, COALESCE(pg_catalog.bool_or(l.oid <> c.oid), false) AS ancestor
  FROM pg_catalog.pg_class l
  WHERE l.oid IN (SELECT c.oid UNION ALL SELECT a.relid FROM pg_catalog.pg_partition_ancestors(c.oid) a)
    AND (
      EXISTS (SELECT 1 FROM pg_catalog.pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = l.oid)
      OR l.relkind IN ('r', 'p') AND l.relpersistence = 'p' AND l.oid >= 16384
        AND EXISTS (SELECT 1 FROM pg_catalog.pg_publication_namespace s WHERE s.pnpubid = p.oid AND s.pnnspid = l.relnamespace)
    )
) listed
LEFT JOIN pg_catalog.pg_publication_rel own
  ON own.prpubid = p.oid AND own.prrelid = c.oid AND NOT p.puballtables
  AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_publication_namespace s WHERE s.pnpubid = p.oid AND s.pnnspid = c.relnamespace)
WHERE CASE
    WHEN p.puballtables THEN c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384
      AND CASE WHEN p.pubviaroot THEN NOT c.relispartition ELSE c.relkind = 'r' END
    WHEN p.pubviaroot THEN listed.itself AND NOT listed.ancestor
    ELSE c.relkind <> 'p' AND (listed.itself OR listed.ancestor)
  END

-- name: view
-- Postgres 14: the view opens no table, and there are no column lists, row filters or schemas in publications.
SELECT c.oid, NULL::pg_catalog.int2vector AS attributes, NULL::pg_catalog.pg_node_tree AS filter
FROM pg_catalog.pg_publication_tables t
JOIN pg_catalog.pg_namespace n ON n.nspname = t.schemaname
JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
WHERE t.pubname = %(publication)s AND c.oid IN (SELECT oid FROM candidate)
