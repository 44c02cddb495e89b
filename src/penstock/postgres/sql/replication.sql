-- The slot and the server's place in its log.

-- name: server
SELECT current_setting('wal_level'), current_setting('server_version_num')::int,
       pg_catalog.current_database(),
       pg_catalog.pg_is_in_recovery()

-- name: current_lsn
SELECT pg_catalog.pg_current_wal_flush_lsn()::text

-- name: slot
SELECT s.slot_name, s.plugin, s.slot_type, s.database, s.active_pid, s.restart_lsn::text, s.confirmed_flush_lsn::text, s.wal_status,
       s.safe_wal_size, s.temporary
FROM pg_catalog.pg_replication_slots s
WHERE s.slot_name = %(slot)s
