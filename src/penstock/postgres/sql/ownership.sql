-- Owner and definition of database objects that Penstock finds instead of creating. These statements run no code of those objects.

-- name: trust
-- The current role, the owner of the database, all roles whose objects are trusted, and all roles that can act as the owner of the database.
-- A role that can SET ROLE to the current role, or grant itself that right, gains nothing if the current role runs its code. Such roles are
-- members, roles with ADMIN OPTION (since Postgres 16 the role that created it), and before version 16 every role with CREATEROLE. On managed
-- servers the administrator is such a role instead of a superuser. The setting comes from the configuration.
WITH RECURSIVE place AS (
  SELECT d.datdba FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()
), able (target, oid) AS (
  SELECT r.oid, r.oid FROM pg_catalog.pg_roles r WHERE r.rolname = current_user OR r.oid IN (SELECT datdba FROM place)
  UNION
  SELECT a.target, m.member
  FROM able a
  JOIN pg_catalog.pg_auth_members m ON m.roleid = a.oid
  JOIN pg_catalog.pg_roles r ON r.oid = m.roleid
  WHERE coalesce((pg_catalog.to_jsonb(m) ->> 'set_option')::boolean, true) OR m.admin_option AND NOT r.rolsuper
)
SELECT current_user::text AS role,
  (SELECT pg_catalog.pg_get_userbyid(datdba)::text FROM place) AS database_owner,
  ARRAY(
    SELECT r.rolname::text FROM pg_catalog.pg_roles r
    WHERE r.rolsuper OR r.oid IN (SELECT a.oid FROM able a JOIN pg_catalog.pg_roles own ON own.oid = a.target AND own.rolname = current_user)
      OR r.rolcreaterole AND pg_catalog.current_setting('server_version_num')::int < 160000
        AND EXISTS (SELECT 1 FROM pg_catalog.pg_roles own WHERE own.rolname = current_user AND NOT own.rolsuper)
      OR r.rolname = ANY (pg_catalog.string_to_array(pg_catalog.current_setting('penstock.trusted_roles', true), ','))
  ) AS roles,
  ARRAY(SELECT pg_catalog.pg_get_userbyid(a.oid)::text FROM able a JOIN place ON place.datdba = a.target) AS database_roles

-- name: schema
-- The owner of a schema; and for each of some tables and functions in it, everything that could run code of
-- other roles, or hide rows, when it is used.
SELECT pg_catalog.pg_get_userbyid(n.nspowner)::text AS owner,
  coalesce((
    SELECT pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object(
      'name', c.relname,
      'owner', pg_catalog.pg_get_userbyid(c.relowner),
      'is_plain', c.relkind = 'r' AND c.relpersistence = 'p' AND NOT c.relispartition,
      'columns', (
        SELECT pg_catalog.jsonb_object_agg(a.attname, pg_catalog.jsonb_build_array(
          pg_catalog.format_type(a.atttypid, a.atttypmod),
          (SELECT pg_catalog.pg_get_expr(d.adbin, d.adrelid) FROM pg_catalog.pg_attrdef d WHERE d.adrelid = c.oid AND d.adnum = a.attnum)
        ))
        FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
      ),
      'checks', ARRAY(
        SELECT pg_catalog.pg_get_constraintdef(k.oid) FROM pg_catalog.pg_constraint k WHERE k.conrelid = c.oid AND k.contype = 'c' ORDER BY 1
      ),
      'others', ARRAY(
        SELECT pg_catalog.format('trigger %%I', t.tgname) FROM pg_catalog.pg_trigger t WHERE t.tgrelid = c.oid
        UNION ALL
        SELECT pg_catalog.format('rule %%I', w.rulename) FROM pg_catalog.pg_rewrite w WHERE w.ev_class = c.oid
        UNION ALL
        SELECT pg_catalog.format('policy %%I', p.polname) FROM pg_catalog.pg_policy p WHERE p.polrelid = c.oid
        UNION ALL
        SELECT 'row level security' WHERE c.relrowsecurity
        UNION ALL
        SELECT pg_catalog.format('inheritance with %%s', CASE WHEN i.inhrelid = c.oid THEN i.inhparent ELSE i.inhrelid END::pg_catalog.regclass)
        FROM pg_catalog.pg_inherits i WHERE c.oid IN (i.inhrelid, i.inhparent)
        UNION ALL
        SELECT pg_catalog.format('constraint %%I', k.conname) FROM pg_catalog.pg_constraint k
        WHERE k.conrelid = c.oid AND k.contype NOT IN ('p', 'u', 'n', 'c')
        UNION ALL
        SELECT pg_catalog.format('generated column %%I', a.attname) FROM pg_catalog.pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND a.attgenerated <> ''
        UNION ALL
        SELECT pg_catalog.format('collation of column %%I', a.attname) FROM pg_catalog.pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attcollation NOT IN (0, 'pg_catalog."default"'::pg_catalog.regcollation)
        UNION ALL
        SELECT pg_catalog.format('index %%I', x.relname) FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class x ON x.oid = i.indexrelid
        WHERE i.indrelid = c.oid AND (i.indexprs IS NOT NULL OR i.indpred IS NOT NULL OR EXISTS (
          SELECT 1 FROM pg_catalog.pg_opclass o WHERE o.oid = ANY (i.indclass::oid[]) AND o.opcnamespace <> 'pg_catalog'::pg_catalog.regnamespace
        ))
        ORDER BY 1
      )
    ) ORDER BY c.relname)
    FROM pg_catalog.pg_class c WHERE c.relnamespace = n.oid AND c.relname = ANY (%(tables)s)
  ), '[]') AS tables,
  coalesce((
    SELECT pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object(
      'name', p.proname,
      'owner', pg_catalog.pg_get_userbyid(p.proowner),
      'is_pinned', coalesce('search_path=pg_catalog, pg_temp' = ANY (p.proconfig), false)
    ) ORDER BY p.oid)
    FROM pg_catalog.pg_proc p WHERE p.pronamespace = n.oid AND p.proname = ANY (%(functions)s)
  ), '[]') AS functions
FROM pg_catalog.pg_namespace n
WHERE n.nspname = %(schema)s

-- name: lock
-- The body of a DO statement. Prevents changes and new triggers on these tables until the end of the
-- transaction. Locking a table runs no code.
DECLARE
  name text;
BEGIN
  FOREACH name IN ARRAY ARRAY[{names}] LOOP
    IF pg_catalog.to_regclass(name) IS NOT NULL THEN
      EXECUTE 'LOCK TABLE ' || name || ' IN ROW EXCLUSIVE MODE';
    END IF;
  END LOOP;
END

-- name: table
-- For a table of a target: its owner, that of its schema, and every object whose code runs when rows are
-- written, with the owner of each. Rows written to a table are also written to its partitions, and deleted
-- from tables that inherit from it.
WITH RECURSIVE target (oid, relowner, nspowner, name) AS (
  SELECT c.oid, c.relowner, n.nspowner, 'the table'::text FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  WHERE n.nspname = %(schema)s AND c.relname = %(table)s
  UNION
  SELECT c.oid, c.relowner, NULL, pg_catalog.format('its partition or heir %%s', c.oid::pg_catalog.regclass)
  FROM target t JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
), part (classid, objid, what) AS (
  SELECT 'pg_catalog.pg_class'::pg_catalog.regclass, t.oid, t.name FROM target t
  UNION ALL
  SELECT 'pg_catalog.pg_trigger'::pg_catalog.regclass, g.oid, pg_catalog.format('trigger %%I', g.tgname)
  FROM pg_catalog.pg_trigger g JOIN target t ON t.oid = g.tgrelid
  UNION ALL
  SELECT 'pg_catalog.pg_constraint'::pg_catalog.regclass, k.oid, pg_catalog.format('constraint %%I', k.conname)
  FROM pg_catalog.pg_constraint k JOIN target t ON t.oid = k.conrelid
  UNION ALL
  SELECT 'pg_catalog.pg_attrdef'::pg_catalog.regclass, d.oid, pg_catalog.format('the default of column %%I', a.attname)
  FROM pg_catalog.pg_attrdef d JOIN target t ON t.oid = d.adrelid JOIN pg_catalog.pg_attribute a ON a.attrelid = d.adrelid AND a.attnum = d.adnum
  UNION ALL
  SELECT 'pg_catalog.pg_class'::pg_catalog.regclass, i.indexrelid, pg_catalog.format('index %%I', x.relname)
  FROM pg_catalog.pg_index i JOIN target t ON t.oid = i.indrelid JOIN pg_catalog.pg_class x ON x.oid = i.indexrelid
  UNION ALL
  SELECT 'pg_catalog.pg_rewrite'::pg_catalog.regclass, w.oid, pg_catalog.format('rule %%I', w.rulename)
  FROM pg_catalog.pg_rewrite w JOIN target t ON t.oid = w.ev_class
  UNION ALL
  SELECT 'pg_catalog.pg_policy'::pg_catalog.regclass, p.oid, pg_catalog.format('policy %%I', p.polname)
  FROM pg_catalog.pg_policy p JOIN target t ON t.oid = p.polrelid
)
SELECT 'the schema', pg_catalog.pg_get_userbyid(t.nspowner)::text, true FROM target t WHERE t.nspowner IS NOT NULL
UNION ALL
SELECT t.name, pg_catalog.pg_get_userbyid(t.relowner)::text, false FROM target t
UNION
SELECT pg_catalog.format('%%s, which uses %%s', p.what, pg_catalog.pg_describe_object(d.refclassid, d.refobjid, 0)),
  pg_catalog.pg_get_userbyid(coalesce(f.proowner, o.oprowner, y.typowner, q.opcowner))::text, false
FROM part p
JOIN pg_catalog.pg_depend d ON d.classid = p.classid AND d.objid = p.objid
LEFT JOIN pg_catalog.pg_proc f ON d.refclassid = 'pg_catalog.pg_proc'::pg_catalog.regclass AND f.oid = d.refobjid
LEFT JOIN pg_catalog.pg_operator o ON d.refclassid = 'pg_catalog.pg_operator'::pg_catalog.regclass AND o.oid = d.refobjid
LEFT JOIN pg_catalog.pg_type y ON d.refclassid = 'pg_catalog.pg_type'::pg_catalog.regclass AND y.oid = d.refobjid
LEFT JOIN pg_catalog.pg_opclass q ON d.refclassid = 'pg_catalog.pg_opclass'::pg_catalog.regclass AND q.oid = d.refobjid
WHERE coalesce(f.oid, o.oid, y.oid, q.oid) IS NOT NULL
ORDER BY 1
