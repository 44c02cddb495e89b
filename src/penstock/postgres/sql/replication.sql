-- The slot and the server's WAL position.

-- name: server
SELECT current_setting('wal_level'), current_setting('server_version_num')::int,
       pg_catalog.current_database(),
       pg_catalog.pg_is_in_recovery()

-- name: current_lsn
SELECT pg_catalog.pg_current_wal_flush_lsn()::text

-- name: insert_lsn
SELECT pg_catalog.pg_current_wal_insert_lsn()::text

-- name: snapshot_xmin
SELECT pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::text::bigint & 4294967295

-- name: chunk_readers
SELECT count(*)
FROM pg_catalog.pg_stat_activity a
WHERE a.datname = pg_catalog.current_database() AND a.usename = current_user AND a.application_name = %(application)s

-- name: slot
-- Columns that were added after Postgres 14 are read through JSON, where a missing one is NULL.
SELECT s.restart_lsn::text, s.confirmed_flush_lsn::text, d.newer ->> 'invalidation_reason',
       coalesce((d.newer ->> 'conflicting')::boolean, false),
       s.active_pid, a.application_name, pg_catalog.host(a.client_addr), a.backend_start,
       s.slot_name, s.plugin, s.slot_type, s.database, s.wal_status, s.safe_wal_size, s.temporary,
       s.two_phase, coalesce((d.newer ->> 'failover')::boolean, false), coalesce((d.newer ->> 'synced')::boolean, false)
FROM pg_catalog.pg_replication_slots s
CROSS JOIN LATERAL (SELECT pg_catalog.to_jsonb(s) AS newer) d
LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = s.active_pid
WHERE s.slot_name = %(slot)s

-- name: health
SELECT pg_catalog.clock_timestamp(), pg_catalog.pg_current_wal_flush_lsn()::text,
       s.restart_lsn::text, s.wal_status, s.safe_wal_size, pg_catalog.age(s.catalog_xmin),
       (SELECT max(pg_catalog.age(a.backend_xmin)) FROM pg_catalog.pg_stat_activity a)
FROM (SELECT 1) always
LEFT JOIN pg_catalog.pg_replication_slots s ON s.slot_name = %(slot)s

-- name: open_transactions
-- Only transactions with an id hold a slot back. All databases are included, since they share the WAL.
SELECT a.pid, a.application_name, a.datname::text, a.state, extract(epoch FROM pg_catalog.now() - a.xact_start)::float8 AS age
FROM pg_catalog.pg_stat_activity a
WHERE a.backend_xid IS NOT NULL AND a.xact_start <= pg_catalog.now() - pg_catalog.make_interval(secs => %(long_seconds)s)
UNION ALL
SELECT NULL, p.gid, p.database::text, 'prepared', extract(epoch FROM pg_catalog.now() - p.prepared)::float8
FROM pg_catalog.pg_prepared_xacts p
WHERE p.prepared <= pg_catalog.now() - pg_catalog.make_interval(secs => %(long_seconds)s)
ORDER BY age DESC
LIMIT 10

-- name: blockers
-- Prepared transactions have no process; their pid is 0.
SELECT a.pid, a.application_name, a.datname::text, coalesce(a.state, 'unknown'),
       extract(epoch FROM pg_catalog.now() - a.xact_start)::float8 AS age
FROM pg_catalog.pg_stat_activity a
WHERE a.pid = ANY (pg_catalog.pg_blocking_pids(%(pid)s))
UNION ALL
SELECT NULL, p.gid, p.database::text, 'prepared', extract(epoch FROM pg_catalog.now() - p.prepared)::float8
FROM pg_catalog.pg_prepared_xacts p
WHERE 0 = ANY (pg_catalog.pg_blocking_pids(%(pid)s))
ORDER BY age DESC NULLS LAST

-- name: nudge
-- The message is not transactional, so that it is in the WAL at once. No reader requests messages with this
-- prefix.
SELECT pg_catalog.pg_logical_emit_message(false, 'penstock.nudge', '')

-- name: drop_slot
SELECT pg_catalog.pg_drop_replication_slot(%(slot)s)

-- name: other_slots
SELECT s.slot_name::text
FROM pg_catalog.pg_replication_slots s
WHERE s.database = pg_catalog.current_database() AND s.plugin = 'pgoutput' AND NOT s.temporary AND s.slot_name <> %(slot)s
ORDER BY 1
