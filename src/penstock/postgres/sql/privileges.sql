-- The rights of the current role. Partitions are found in pg_inherits: pg_partition_tree would wait for locks
-- on them.

-- name: role
SELECT current_user::text, pg_catalog.current_database()::text,
       pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE'),
       pg_catalog.current_setting('transaction_read_only')::boolean, pg_catalog.pg_is_in_recovery(),
       ARRAY(
         SELECT r.rolname::text
         FROM pg_catalog.pg_roles r
         WHERE r.rolname IN ('rds_superuser', 'rds_replication', 'azure_pg_admin', 'cloudsqlsuperuser')
         ORDER BY 1
       )

-- name: unreadable
-- The heaps of some tables that this role cannot read completely, and why: the schema, the table, single
-- columns, or row-level policies. A snapshot reads partitions directly, so a grant on their root is not
-- sufficient; and it reads by ctid, which counts as a column.
WITH RECURSIVE parts (root, oid) AS (
    SELECT t.oid, t.oid FROM pg_catalog.unnest(%(oids)s::oid[]) t (oid)
    UNION ALL
    SELECT p.root, i.inhrelid FROM parts p
    JOIN pg_catalog.pg_inherits i ON i.inhparent = p.oid
    JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition
)
SELECT p.root, n.nspname, c.relname,
       pg_catalog.has_schema_privilege(n.oid, 'USAGE'),
       ARRAY(
         SELECT a.attname::text
         FROM pg_catalog.pg_attribute a
         WHERE a.attrelid = c.oid AND (a.attnum > 0 OR a.attname = 'ctid') AND NOT a.attisdropped
           AND NOT pg_catalog.has_column_privilege(c.oid, a.attnum, 'SELECT')
         ORDER BY a.attnum < 0, a.attnum
       ),
       pg_catalog.row_security_active(c.oid)
FROM parts p
JOIN pg_catalog.pg_class c ON c.oid = p.oid AND c.relkind = 'r'
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE NOT pg_catalog.has_schema_privilege(n.oid, 'USAGE')
  OR NOT pg_catalog.has_table_privilege(c.oid, 'SELECT')
  OR pg_catalog.row_security_active(c.oid)
ORDER BY n.nspname, c.relname

-- name: limits
-- Free capacity of the server, and settings that may cause problems later. A setting that this version does
-- not have is NULL.
SELECT pg_catalog.current_setting('server_version'),
       pg_catalog.current_setting('server_version_num')::int,
       pg_catalog.current_setting('max_replication_slots')::int,
       (SELECT pg_catalog.count(*) FROM pg_catalog.pg_replication_slots),
       pg_catalog.current_setting('max_wal_senders')::int,
       (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_replication),
       (SELECT s.setting::bigint FROM pg_catalog.pg_settings s WHERE s.name = 'max_slot_wal_keep_size'),
       (SELECT s.setting::bigint FROM pg_catalog.pg_settings s WHERE s.name = 'wal_sender_timeout'),
       (SELECT s.setting::bigint FROM pg_catalog.pg_settings s WHERE s.name = 'logical_decoding_work_mem'),
       (SELECT s.setting::bigint FROM pg_catalog.pg_settings s WHERE s.name = 'idle_replication_slot_timeout')

-- name: foreign_owners
-- If this role is a superuser: the owners of some tables and of their partitions who are not superusers.
WITH RECURSIVE parts (root, oid) AS (
    SELECT t.oid, t.oid FROM pg_catalog.unnest(%(oids)s::oid[]) t (oid)
    UNION ALL
    SELECT p.root, i.inhrelid FROM parts p
    JOIN pg_catalog.pg_inherits i ON i.inhparent = p.oid
    JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition
)
SELECT DISTINCT p.root, o.rolname::text
FROM parts p
JOIN pg_catalog.pg_class c ON c.oid = p.oid
JOIN pg_catalog.pg_roles o ON o.oid = c.relowner
WHERE NOT o.rolsuper
  AND EXISTS (SELECT 1 FROM pg_catalog.pg_roles r WHERE r.rolname = current_user AND r.rolsuper)
ORDER BY 1, 2

-- name: foreign_functions
-- Functions that the planner may call when it reads some tables: those in index expressions, predicates of
-- partial indexes and constraints, directly or through an operator. Those of superusers and of this role are
-- omitted.
WITH RECURSIVE parts (root, oid) AS (
    SELECT t.oid, t.oid FROM pg_catalog.unnest(%(oids)s::oid[]) t (oid)
    UNION ALL
    SELECT p.root, i.inhrelid FROM parts p
    JOIN pg_catalog.pg_inherits i ON i.inhparent = p.oid
    JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition
), used AS (
    SELECT h.root, d.refclassid, d.refobjid
    FROM parts h
    JOIN pg_catalog.pg_index i ON i.indrelid = h.oid
    JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = i.indexrelid
    UNION
    SELECT h.root, d.refclassid, d.refobjid
    FROM parts h
    JOIN pg_catalog.pg_constraint c ON c.conrelid = h.oid
    JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_constraint'::pg_catalog.regclass AND d.objid = c.oid
), called AS (
    SELECT u.root, u.refobjid AS function FROM used u WHERE u.refclassid = 'pg_catalog.pg_proc'::pg_catalog.regclass
    UNION
    SELECT u.root, o.oprcode::oid FROM used u JOIN pg_catalog.pg_operator o ON o.oid = u.refobjid
    WHERE u.refclassid = 'pg_catalog.pg_operator'::pg_catalog.regclass
)
SELECT c.root, c.function::pg_catalog.regprocedure::text, r.rolname::text
FROM called c
JOIN pg_catalog.pg_proc p ON p.oid = c.function
JOIN pg_catalog.pg_roles r ON r.oid = p.proowner
WHERE NOT r.rolsuper AND r.rolname <> current_user
ORDER BY 1, 2
