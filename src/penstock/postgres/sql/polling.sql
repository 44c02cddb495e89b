-- Polling: find changed rows without logical replication.

-- name: consistent_read
-- The WAL position is read after the statement's snapshot was taken, so everything that the snapshot shows
-- had committed before that position.
SELECT pg_catalog.pg_current_wal_insert_lsn()::text,
       pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::text::bigint,
       pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint,
       pg_catalog.clock_timestamp()

-- name: position
SELECT pg_catalog.pg_current_wal_insert_lsn()::text

-- name: is_flushed
SELECT pg_catalog.pg_current_wal_flush_lsn() >= %(position)s::pg_catalog.pg_lsn

-- name: flush
-- Runs in a separate transaction, whose commit flushes all earlier WAL.
SELECT pg_catalog.set_config('synchronous_commit', 'local', true),
       pg_catalog.pg_logical_emit_message(true, 'penstock.nudge', '')

-- name: system
-- This needs no replication connection, which the role may not be allowed. A standby does not report its WAL
-- file.
SELECT s.system_identifier::text,
       CASE WHEN NOT pg_catalog.pg_is_in_recovery()
            THEN pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 8) END
FROM pg_catalog.pg_control_system() s

-- name: open_transactions
-- Every transaction holds a lock on its virtual id from its beginning, before it has an id; all roles may see
-- these locks. A session that ends between the two parts of the query is kept: one too many does no harm.
SELECT l.virtualxid
FROM pg_catalog.pg_locks l
LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'virtualxid' AND l.mode = 'ExclusiveLock' AND l.pid <> pg_catalog.pg_backend_pid()
  AND (a.datid IS NULL OR a.datid = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()))

-- name: prepared
SELECT pg_catalog.count(*) FROM pg_catalog.pg_prepared_xacts p WHERE p.database = pg_catalog.current_database()

-- name: cursor_columns
-- The catalog's definition of possible cursor columns. For a domain, the base type is returned, so that the
-- domain's checks do not run.
SELECT a.attrelid, a.attname::text, pg_catalog.format_type(b.oid, -1), a.attnotnull,
       EXISTS (SELECT 1 FROM pg_catalog.pg_opclass o JOIN pg_catalog.pg_am m ON m.oid = o.opcmethod
               WHERE m.amname = 'btree' AND o.opcintype = b.oid)
FROM pg_catalog.pg_attribute a
CROSS JOIN LATERAL (
    WITH RECURSIVE base (oid, below) AS (
        SELECT t.oid, t.typbasetype FROM pg_catalog.pg_type t WHERE t.oid = a.atttypid
        UNION ALL
        SELECT t.oid, t.typbasetype FROM base JOIN pg_catalog.pg_type t ON t.oid = base.below
    )
    SELECT oid FROM base WHERE below = 0
) b
WHERE a.attrelid = ANY (%(oids)s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped

-- name: tables
SELECT c.oid, n.nspname::text, c.relname::text, c.relkind = 'p'
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = ANY (%(oids)s::oid[])

-- name: create_resume_schema
CREATE SCHEMA penstock;

-- name: create_resume
CREATE TABLE penstock.polling (
    name text PRIMARY KEY,
    position pg_lsn NOT NULL,
    state text NOT NULL,
    confirmed_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE penstock.polled_tables (
    name text NOT NULL,
    oid oid NOT NULL,
    state text NOT NULL,
    PRIMARY KEY (name, oid)
);

-- name: load_resume
SELECT position::text, state FROM penstock.polling WHERE name = %(name)s

-- name: begin_resume
INSERT INTO penstock.polling (name, position, state) VALUES (%(name)s, %(position)s::pg_lsn, %(state)s) ON CONFLICT (name) DO NOTHING

-- name: save_resume
INSERT INTO penstock.polling (name, position, state) VALUES (%(name)s, %(position)s::pg_lsn, %(state)s)
ON CONFLICT (name) DO UPDATE SET position = excluded.position, state = excluded.state, confirmed_at = now()

-- name: load_polled
SELECT oid::bigint, state FROM penstock.polled_tables WHERE name = %(name)s

-- name: save_polled
INSERT INTO penstock.polled_tables (name, oid, state) VALUES (%(name)s, %(oid)s, %(state)s)
ON CONFLICT (name, oid) DO NOTHING

-- name: remove_polled
DELETE FROM penstock.polled_tables WHERE name = %(name)s AND oid = ANY (%(oids)s::oid[])
