-- Leases: ownership by one session, for example of a change table. A row in a table that Penstock owns names
-- the session.

-- name: create
CREATE TABLE IF NOT EXISTS {schema}.leases (
    name text PRIMARY KEY,
    pid integer,
    role oid,
    started timestamptz
)

-- name: lock
LOCK TABLE {schema}.leases IN SHARE UPDATE EXCLUSIVE MODE

-- name: refresh
-- Within a transaction, the server shows the sessions as of the first query.
SELECT pg_catalog.pg_stat_clear_snapshot()

-- name: take
-- Returns no row if another session holds the lease. A session whose start time this role may not see counts
-- as the holder.
INSERT INTO {schema}.leases AS l (name, pid, role, started)
SELECT %(name)s, a.pid, a.usesysid, a.backend_start FROM pg_catalog.pg_stat_activity a WHERE a.pid = pg_catalog.pg_backend_pid()
ON CONFLICT (name) DO UPDATE SET pid = excluded.pid, role = excluded.role, started = excluded.started
WHERE NOT EXISTS (
  SELECT 1 FROM pg_catalog.pg_stat_activity a
  WHERE a.pid = l.pid AND a.usesysid = l.role AND a.pid <> pg_catalog.pg_backend_pid() AND coalesce(a.backend_start = l.started, true)
)
RETURNING name

-- name: keep_alive
-- With these settings the server ends a session without a client within a minute.
SELECT pg_catalog.set_config('tcp_keepalives_idle', '30', false),
       pg_catalog.set_config('tcp_keepalives_interval', '10', false),
       pg_catalog.set_config('tcp_keepalives_count', '3', false)

-- name: release
UPDATE {schema}.leases SET pid = NULL, role = NULL, started = NULL WHERE name = %(name)s AND pid = pg_catalog.pg_backend_pid()

-- name: holder
SELECT a.pid, a.usename::text, a.application_name FROM {schema}.leases l JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
WHERE l.name = %(name)s

-- name: lock_holders
-- Sessions that hold a lock on one of these tables which prevents others from locking it or from writing.
SELECT DISTINCT a.pid, a.usename::text, a.application_name
FROM pg_catalog.pg_locks l
JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
WHERE l.granted AND l.pid <> pg_catalog.pg_backend_pid()
  AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
  AND l.relation = ANY (%(oids)s::oid[])
  AND l.mode IN ('ShareUpdateExclusiveLock', 'ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
ORDER BY a.pid
