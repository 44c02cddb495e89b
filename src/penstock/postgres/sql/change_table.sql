-- Trigger capture: recorded changes, their order, and the confirmed position. One schema per capture.

-- name: create_schema
CREATE SCHEMA {schema}

-- name: install
-- Triggers insert a row here in the transaction that changes a table, with the rights of the schema's owner.
-- All objects are created here, or none: an object that another role had created before could run code with
-- the rights of the roles that use it. `changes.seq` ascends in the order in which triggers fire: of two
-- changes of one row the later one has the greater number, since the row is locked until the first has
-- committed.
CREATE TABLE {schema}.shapes (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    relation oid NOT NULL,
    root oid NOT NULL,
    space text NOT NULL,
    name text NOT NULL,
    index oid NOT NULL,
    numbers int2[] NOT NULL,
    names text[] NOT NULL,
    types oid[] NOT NULL,
    modifiers int4[] NOT NULL,
    generated boolean[] NOT NULL,
    key text[] NOT NULL,
    columns text[] NOT NULL
);
CREATE INDEX shapes_relation ON {schema}.shapes (relation);
CREATE TABLE {schema}.changes (
    seq bigint GENERATED ALWAYS AS IDENTITY,
    xid pg_catalog.xid8 NOT NULL,
    root oid NOT NULL,
    shape bigint NOT NULL,
    op "char" NOT NULL,
    node oid,
    old_at tid,
    new_at tid,
    old text,
    new text,
    altered int2[],
    PRIMARY KEY (xid, seq)
-- Truncating the table's empty end would make vacuum block all writers.
) WITH (autovacuum_vacuum_scale_factor = 0.02, vacuum_truncate = false);
CREATE TABLE {schema}.commits (
    "position" bigint PRIMARY KEY,
    xid pg_catalog.xid8 NOT NULL UNIQUE,
    first bigint NOT NULL,
    last bigint NOT NULL,
    changes bigint NOT NULL,
    bytes bigint NOT NULL,
    at timestamptz NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02);
CREATE TABLE {schema}.horizon (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    snapshot pg_catalog.pg_snapshot NOT NULL,
    "position" bigint NOT NULL,
    system_identifier text NOT NULL,
    timeline text NOT NULL,
    inherited bigint NOT NULL
) WITH (fillfactor = 10);
CREATE TABLE {schema}.resume (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    "position" bigint NOT NULL
) WITH (fillfactor = 10);
-- Transactions that are open now count as not ordered yet.
INSERT INTO {schema}.horizon (snapshot, "position", system_identifier, timeline, inherited)
SELECT pg_catalog.format('%1$s:%1$s:', pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot()))::pg_catalog.pg_snapshot,
    pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_current_wal_insert_lsn(), '0/0')::bigint,
    (SELECT s.system_identifier::text FROM pg_catalog.pg_control_system() s),
    pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 8), 0;
INSERT INTO {schema}.resume ("position") SELECT h."position" FROM {schema}.horizon h;
-- Values are written in the format of the capture's sessions, whatever the settings of the changing session.
CREATE FUNCTION {schema}.note() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET "TimeZone" = 'UTC' SET "DateStyle" = 'ISO, YMD' SET "IntervalStyle" = 'iso_8601' SET bytea_output = 'hex' SET extra_float_digits = 1
SET lc_monetary = 'C' SET xmlbinary = 'base64'
AS $body$
DECLARE
  own_root oid := coalesce(pg_catalog.pg_partition_root(TG_RELID)::oid, TG_RELID);
  own_space text := TG_TABLE_SCHEMA;
  own_name text := TG_TABLE_NAME;
  own_index oid := pg_catalog.pg_get_replica_identity_index(own_root);
  own_numbers int2[];
  own_names text[];
  own_types oid[];
  own_modifiers int4[];
  own_generated boolean[];
  own_shape bigint;
  is_replaced boolean;
  own_altered int2[];
BEGIN
  IF own_root <> TG_RELID THEN
    -- The name is qualified, since only pg_catalog is in the search path.
    own_space := (pg_catalog.parse_ident(own_root::regclass::text))[1];
    own_name := (pg_catalog.parse_ident(own_root::regclass::text))[2];
  END IF;
  IF own_index IS NULL THEN
    SELECT i.indexrelid INTO own_index FROM pg_catalog.pg_class c JOIN pg_catalog.pg_index i ON i.indrelid = c.oid
    WHERE c.oid = own_root AND c.relreplident = 'f' AND i.indisprimary AND i.indimmediate;
  END IF;
  own_index := coalesce(own_index, 0);
  SELECT array_agg(a.attnum), array_agg(a.attname::text), array_agg(a.atttypid), array_agg(a.atttypmod), array_agg(a.attgenerated <> ''),
    bool_or(a.xmax <> '0'::xid)
  INTO own_numbers, own_names, own_types, own_modifiers, own_generated, is_replaced
  FROM (
    SELECT attnum, attname, atttypid, atttypmod, attgenerated, xmax FROM pg_catalog.pg_attribute
    WHERE attrelid = TG_RELID AND attnum > 0 AND NOT attisdropped ORDER BY attnum
  ) a;
  SELECT s.id INTO own_shape FROM {schema}.shapes s
  WHERE s.relation = TG_RELID AND s.root = own_root AND s.space = own_space AND s.name = own_name AND s.index = own_index AND s.numbers = own_numbers AND s.names = own_names AND s.types = own_types
    AND s.modifiers = own_modifiers AND s.generated = own_generated
  ORDER BY s.id LIMIT 1;
  IF own_shape IS NULL THEN
    -- Temporary tables are not captured.
    IF EXISTS (SELECT 1 FROM pg_catalog.pg_class c WHERE c.oid = TG_RELID AND c.relpersistence <> 'p') THEN
      RETURN NULL;
    END IF;
    -- Two sessions that find a new shape at the same time both store it: neither waits for the other or fails.
    INSERT INTO {schema}.shapes (relation, root, space, name, index, numbers, names, types, modifiers, generated, key, columns)
    SELECT TG_RELID, own_root, own_space, own_name, own_index, coalesce(own_numbers, ARRAY[]::int2[]), coalesce(own_names, ARRAY[]::text[]),
      coalesce(own_types, ARRAY[]::oid[]), coalesce(own_modifiers, ARRAY[]::int4[]), coalesce(own_generated, ARRAY[]::boolean[]),
      ARRAY(
        SELECT k.attname::text FROM pg_catalog.pg_index i JOIN pg_catalog.pg_attribute k ON k.attrelid = i.indrelid
          AND k.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
        WHERE i.indexrelid = own_index ORDER BY k.attnum
      ),
      ARRAY(
        SELECT r.attname::text FROM pg_catalog.pg_attribute r WHERE r.attrelid = own_root AND r.attnum > 0 AND NOT r.attisdropped ORDER BY r.attnum
      )
    RETURNING id INTO own_shape;
  END IF;
  -- Under REPEATABLE READ and SERIALIZABLE, catalog queries show the table as of the transaction's snapshot, but rows are written with the
  -- table's current columns. If the catalog row was replaced since, the current columns are found by has_column_privilege, which reads the
  -- current catalog and returns NULL for a column that no longer exists.
  IF pg_catalog.current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
    AND (is_replaced OR EXISTS (SELECT 1 FROM pg_catalog.pg_class c WHERE c.oid = TG_RELID AND c.xmax <> '0'::xid)) THEN
    own_altered := ARRAY(
      SELECT n::int2 FROM pg_catalog.generate_series(1, 1600) AS n
      WHERE pg_catalog.has_column_privilege(TG_RELID, n::int2, 'SELECT') IS NOT NULL ORDER BY n
    );
  END IF;
  -- The rows are written without a cast to text. The owner of the table could have defined the cast, and it would run with the rights of
  -- this function's owner. A new row with an xmax is locked, or was changed again by a trigger of the application that fired before this
  -- one. If it was changed again, that change has this row's `new_at` as its `old_at`, and is the later one, although it was recorded
  -- first. `node` is recorded because ctids identify rows within one file only: a table that is truncated or rewritten gets a new file.
  INSERT INTO {schema}.changes (xid, root, shape, op, node, old_at, new_at, old, new, altered)
  VALUES (
    pg_catalog.pg_current_xact_id(), own_root, own_shape, pg_catalog.left(TG_OP, 1)::"char", pg_catalog.pg_relation_filenode(TG_RELID),
    OLD.ctid, CASE WHEN NEW.xmax <> '0'::xid THEN NEW.ctid END,
    pg_catalog.textin(pg_catalog.record_out(OLD)), pg_catalog.textin(pg_catalog.record_out(NEW)), own_altered
  );
  RETURN NULL;
END
$body$;
REVOKE ALL ON FUNCTION {schema}.note() FROM PUBLIC

-- name: grant
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}

-- name: grant_attaching
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT EXECUTE ON FUNCTION {schema}.note() TO {role}

-- name: attach
-- The triggers fire in every session, also in one that applies changes of another server. They fire before
-- all other triggers, whose changes are consequences of the recorded change. The last statement has the same
-- effect for future partitions.
DROP TRIGGER IF EXISTS {rows} ON {table};
DROP TRIGGER IF EXISTS {truncates} ON {table};
CREATE TRIGGER {rows} AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION {schema}.note();
CREATE TRIGGER {truncates} AFTER TRUNCATE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION {schema}.note();
ALTER TABLE {table} ENABLE ALWAYS TRIGGER {rows}, ENABLE ALWAYS TRIGGER {truncates}

-- name: has_triggers
SELECT EXISTS (
  SELECT 1 FROM unnest(%(schemas)s::text[], %(names)s::text[]) AS r (nspname, relname)
  JOIN pg_catalog.pg_namespace n ON n.nspname = r.nspname
  JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = r.relname
  JOIN pg_catalog.pg_trigger t ON t.tgrelid = c.oid AND t.tgname IN (%(rows)s, %(truncates)s)
)

-- name: detach
DROP TRIGGER IF EXISTS {rows} ON {table};
DROP TRIGGER IF EXISTS {truncates} ON {table}

-- name: tables_with_triggers
-- All tables with triggers of the capture. Partitions are omitted: their triggers are removed with those of
-- the root.
SELECT DISTINCT n.nspname::text, c.relname::text
FROM pg_catalog.pg_trigger t
JOIN pg_catalog.pg_proc f ON f.oid = t.tgfoid AND f.proname = 'note'
JOIN pg_catalog.pg_namespace own ON own.oid = f.pronamespace AND own.nspname = %(schema)s
JOIN pg_catalog.pg_class c ON c.oid = t.tgrelid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE t.tgparentid = 0 ORDER BY 1, 2

-- name: remove
-- Drops all triggers and all unread changes too.
DROP SCHEMA IF EXISTS {schema} CASCADE

-- name: inspect
-- Whether this role may act for the owner of the schema, is the owner itself, and may read and write the
-- tables.
SELECT pg_catalog.pg_has_role(n.nspowner, 'USAGE'), n.nspowner = (SELECT r.oid FROM pg_catalog.pg_roles r WHERE r.rolname = current_user),
  pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND NOT EXISTS (
    SELECT 1 FROM pg_catalog.pg_class c, pg_catalog.unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS w (privilege)
    WHERE c.relnamespace = n.oid AND c.relkind = 'r' AND c.relname = ANY (%(tables)s) AND NOT pg_catalog.has_table_privilege(c.oid, w.privilege)
  )
FROM pg_catalog.pg_namespace n
WHERE n.nspname = %(schema)s

-- name: relations
-- The requested tables, each with the facts that decide whether its changes are recorded, or can be recorded.
-- Row triggers are copied to partitions. Here and in `memberships`, partitions are found in pg_inherits:
-- pg_partition_tree would wait for locks on them.
SELECT r.nspname, r.relname, c.oid, c.relkind::text, c.relpersistence::text,
  CASE WHEN c.relispartition THEN root_space.nspname END, CASE WHEN c.relispartition THEN root.relname END,
  (
    SELECT count(*) FROM pg_catalog.pg_trigger t
    WHERE t.tgrelid = c.oid AND t.tgfoid = f.oid AND t.tgenabled = 'A' AND t.tgname IN (%(rows)s, %(truncates)s)
  ) = 2 AND NOT leaves.lack_triggers,
  leaves.apart,
  pg_catalog.pg_get_userbyid(c.relowner), pg_catalog.pg_has_role(c.relowner, 'USAGE'), pg_catalog.has_schema_privilege(n.oid, 'USAGE')
FROM unnest(%(schemas)s::text[], %(names)s::text[]) AS r (nspname, relname)
LEFT JOIN pg_catalog.pg_namespace n ON n.nspname = r.nspname
LEFT JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = r.relname
LEFT JOIN pg_catalog.pg_class root ON root.oid = CASE WHEN c.relispartition THEN pg_catalog.pg_partition_root(c.oid) END
LEFT JOIN pg_catalog.pg_namespace root_space ON root_space.oid = root.relnamespace
LEFT JOIN (
  pg_catalog.pg_proc f JOIN pg_catalog.pg_namespace own ON own.oid = f.pronamespace AND own.nspname = %(schema)s
) ON f.proname = 'note'
CROSS JOIN LATERAL (
  WITH RECURSIVE parts (oid) AS (
    SELECT c.oid WHERE c.relkind = 'p'
    UNION ALL
    SELECT i.inhrelid FROM parts p
    JOIN pg_catalog.pg_inherits i ON i.inhparent = p.oid
    JOIN pg_catalog.pg_class part ON part.oid = i.inhrelid AND part.relispartition
  )
  SELECT COALESCE(pg_catalog.bool_or(NOT EXISTS (
           SELECT 1 FROM pg_catalog.pg_trigger t WHERE t.tgrelid = leaf.oid AND t.tgfoid = f.oid AND t.tgenabled = 'A'
         )), false) AS lack_triggers,
         COALESCE(pg_catalog.array_agg(leaf.oid::regclass::text ORDER BY leaf.oid::regclass::text)
           FILTER (WHERE leaf.relkind = 'f' OR leaf.relpersistence <> 'p'), '{}') AS apart
  FROM parts p
  JOIN pg_catalog.pg_class leaf ON leaf.oid = p.oid AND leaf.relkind <> 'p'
) leaves
ORDER BY r.nspname, r.relname

-- name: memberships
-- The catalog entries of the triggers of each table (OID and xmin) and, after a `|`, those of its partitions.
-- After an interruption, a table has other triggers, or the same triggers with another xmin.
SELECT r.nspname, r.relname, c.oid, pg_catalog.string_agg(t.oid::text || '/' || t.xmin::text, '/' ORDER BY t.tgname) || coalesce((
  SELECT '|' || pg_catalog.string_agg(p.oid::text || '/' || p.xmin::text, ',' ORDER BY p.oid)
  FROM (
    WITH RECURSIVE parts (oid) AS (
      SELECT c.oid
      UNION ALL
      SELECT i.inhrelid FROM parts p
      JOIN pg_catalog.pg_inherits i ON i.inhparent = p.oid
      JOIN pg_catalog.pg_class part ON part.oid = i.inhrelid AND part.relispartition
    )
    SELECT p.oid FROM parts p WHERE p.oid <> c.oid
  ) leaf
  JOIN pg_catalog.pg_trigger p ON p.tgrelid = leaf.oid AND p.tgname = %(rows)s AND p.tgenabled = 'A'
), '')
FROM unnest(%(schemas)s::text[], %(names)s::text[]) AS r (nspname, relname)
JOIN pg_catalog.pg_namespace n ON n.nspname = r.nspname
JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = r.relname
JOIN pg_catalog.pg_trigger t ON t.tgrelid = c.oid AND t.tgname IN (%(rows)s, %(truncates)s) AND t.tgenabled = 'A'
GROUP BY r.nspname, r.relname, c.oid

-- name: require_durable_commit
-- Positions are returned at once, so neither they nor the changes may be lost in a crash. The commit of this
-- transaction is durable even for a role with asynchronous commits, and flushes everything before it in the
-- WAL.
SELECT pg_catalog.set_config('synchronous_commit', 'local', true) WHERE pg_catalog.current_setting('synchronous_commit') = 'off'

-- name: lock_horizon
-- The lock is held until the end of the transaction. The statement takes no snapshot, so the next statement
-- has a later one.
LOCK TABLE {schema}.horizon IN SHARE UPDATE EXCLUSIVE MODE

-- name: state
-- How far changes have been ordered and confirmed, and the identity of the server.
SELECT h."position", r."position", h.system_identifier, (SELECT s.system_identifier::text FROM pg_catalog.pg_control_system() s),
  pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_current_wal_insert_lsn(), '0/0')::bigint,
  h.timeline, pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 8), h.inherited
FROM {schema}.horizon h, {schema}.resume r

-- name: accept
-- Executed after a promotion, if the server has every position that was ever returned. The ordered position
-- is kept.
UPDATE {schema}.horizon h SET timeline = pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 8), inherited = h."position"
WHERE h.timeline <> pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 8)

-- name: has_unordered
-- Whether a committed transaction has not been ordered: one that was open at the horizon, or began later.
SELECT EXISTS (SELECT 1 FROM {schema}.changes c, {schema}.horizon h WHERE c.xid >= pg_catalog.pg_snapshot_xmax(h.snapshot))
  OR EXISTS (
    SELECT 1 FROM {schema}.horizon h CROSS JOIN LATERAL pg_catalog.pg_snapshot_xip(h.snapshot) AS x (xid)
    JOIN {schema}.changes c ON c.xid = x.xid
  )

-- name: order_commits
-- Order the transactions that have committed since the horizon, and move the horizon, in one statement and so
-- in one snapshot. They are ordered by their last change. If a transaction saw or overwrote changes of
-- another one, its last change is after all changes of the other, and it is in the same snapshot or a later
-- one. So this is a possible commit order. Each transaction gets a position after all assigned ones, and
-- after the current WAL position; storing the order advances the WAL past the assigned positions. On a
-- promoted server nothing is done until it is accepted: only the ordered position shows whether changes were
-- lost.
WITH before AS MATERIALIZED (
  SELECT h.snapshot, greatest(h."position", pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_current_wal_insert_lsn(), '0/0')::bigint) AS base
  FROM {schema}.horizon h WHERE h.timeline = pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 8)
), fresh AS MATERIALIZED (
  SELECT c.xid, min(c.seq) AS first, max(c.seq) AS last, count(*) AS changes,
    sum(coalesce(pg_catalog.octet_length(c.old), 0) + coalesce(pg_catalog.octet_length(c.new), 0) + 64) AS bytes
  FROM {schema}.changes c
  WHERE c.xid >= (SELECT pg_catalog.pg_snapshot_xmax(b.snapshot) FROM before b)
    OR c.xid = ANY (ARRAY(SELECT pg_catalog.pg_snapshot_xip(b.snapshot) FROM before b))
  GROUP BY c.xid
), ordered AS (
  INSERT INTO {schema}.commits ("position", xid, first, last, changes, bytes, at)
  SELECT b.base + pg_catalog.row_number() OVER (ORDER BY f.last), f.xid, f.first, f.last, f.changes, f.bytes, pg_catalog.clock_timestamp()
  FROM fresh f, before b
  RETURNING "position"
)
UPDATE {schema}.horizon h
SET snapshot = pg_catalog.pg_current_snapshot(), "position" = greatest(b.base, (SELECT max(o."position") FROM ordered o))
FROM before b
RETURNING h."position"

-- name: commits
-- The next transactions in order.
SELECT "position", xid::text::bigint, first, last, changes, bytes, at
FROM {schema}.commits WHERE "position" > %(after)s ORDER BY "position" LIMIT %(limit)s

-- name: end_of_part
-- The end of a part of a long transaction: the number of the last change that fits, or that of the first
-- change if even this one does not fit.
SELECT coalesce(max(w.seq) FILTER (WHERE w.total <= %(bytes)s), min(w.seq)) FROM (
  SELECT c.seq, sum(coalesce(pg_catalog.octet_length(c.old), 0) + coalesce(pg_catalog.octet_length(c.new), 0) + 64) OVER (ORDER BY c.seq) AS total
  FROM (
    SELECT * FROM {schema}.changes WHERE xid = %(xid)s::text::pg_catalog.xid8 AND seq > %(after)s ORDER BY seq LIMIT %(limit)s
  ) c
) w

-- name: read_commits
SELECT o."position", c.seq - o.first, c.root, c.shape, c.op, c.node::text || c.old_at::text, c.node::text || c.new_at::text, c.old, c.new, c.altered
FROM {schema}.commits o JOIN {schema}.changes c ON c.xid = o.xid
WHERE o."position" > {after} AND o."position" <= {upto} ORDER BY o."position", c.seq

-- name: read_part
SELECT o."position", c.seq - o.first, c.root, c.shape, c.op, c.node::text || c.old_at::text, c.node::text || c.new_at::text, c.old, c.new, c.altered
FROM {schema}.commits o JOIN {schema}.changes c ON c.xid = o.xid
WHERE o."position" = {position} AND c.seq > {after} AND c.seq <= {upto} ORDER BY c.seq

-- name: shapes
SELECT s.id, s.root, s.space, s.name, s.names, s.types::bigint[], s.modifiers, s.generated, s.key, s.columns
FROM {schema}.shapes s WHERE s.id = ANY (%(ids)s)

-- name: find_shape
-- The shape with exactly these columns of a relation whose changes were recorded with another shape: the
-- current one of the catalog, or the one recorded last.
WITH told AS (
  SELECT s.relation, s.root, s.space, s.name, s.index, s.key FROM {schema}.shapes s WHERE s.id = %(id)s
), made AS (
  INSERT INTO {schema}.shapes (relation, root, space, name, index, numbers, names, types, modifiers, generated, key, columns)
  SELECT t.relation, t.root, t.space, t.name, t.index, array_agg(a.attnum ORDER BY a.attnum), array_agg(a.attname::text ORDER BY a.attnum),
    array_agg(a.atttypid ORDER BY a.attnum), array_agg(a.atttypmod ORDER BY a.attnum), array_agg(a.attgenerated <> '' ORDER BY a.attnum),
    coalesce((
      SELECT array_agg(k.attname::text ORDER BY k.attnum) FROM pg_catalog.pg_index i JOIN pg_catalog.pg_attribute k ON k.attrelid = i.indrelid
        AND k.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]) WHERE i.indexrelid = t.index
    ), t.key),
    ARRAY(SELECT r.attname::text FROM pg_catalog.pg_attribute r WHERE r.attrelid = t.root AND r.attnum > 0 AND NOT r.attisdropped ORDER BY r.attnum)
  FROM told t JOIN pg_catalog.pg_attribute a ON a.attrelid = t.relation AND a.attnum > 0 AND NOT a.attisdropped
  GROUP BY t.relation, t.root, t.space, t.name, t.index, t.key HAVING array_agg(a.attnum ORDER BY a.attnum) = %(numbers)s::int2[]
  RETURNING id
)
SELECT coalesce(
  (SELECT m.id FROM made m),
  (SELECT max(s.id) FROM {schema}.shapes s JOIN told t ON s.relation = t.relation AND s.root = t.root WHERE s.numbers = %(numbers)s::int2[])
)

-- name: confirm
UPDATE {schema}.resume SET "position" = greatest("position", %(position)s)

-- name: confirmed_commits
-- The oldest confirmed transactions, with at most about `limit` changes. Transactions up to `after` have been
-- deleted. The scan must not begin with them: deleted rows slow it down while an old snapshot could still
-- show them.
SELECT w."position", w.xid FROM (
  SELECT o."position", o.xid::text AS xid, sum(o.changes) OVER (ORDER BY o."position") - o.changes AS before
  FROM (
    SELECT * FROM {schema}.commits WHERE "position" > %(after)s AND "position" <= (SELECT r."position" FROM {schema}.resume r)
    ORDER BY "position" LIMIT %(limit)s
  ) o
) w WHERE w.before < %(limit)s

-- name: delete_changes
DELETE FROM {schema}.changes WHERE ctid = ANY (ARRAY(
  SELECT c.ctid FROM {schema}.changes c WHERE c.xid = ANY (%(xids)s::text[]::pg_catalog.xid8[]) LIMIT %(limit)s
))

-- name: delete_commits
DELETE FROM {schema}.commits WHERE "position" > %(after)s AND "position" <= %(position)s
