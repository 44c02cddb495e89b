-- The event trigger that logs changes of columns, in the transaction and at the position of the change.

-- name: install
-- An ALTER TABLE never fails because of the trigger. Temporary tables are ignored. CREATE OR REPLACE keeps
-- the owner of an existing function, who could replace its body later, and every session that runs DDL would
-- execute it, a superuser's too. So the event triggers are created only if schema and function belong to the
-- current role, a superuser or a trusted role.
CREATE SCHEMA IF NOT EXISTS penstock_ddl;
-- Every role may emit messages under any prefix, so the trigger signs its messages. The key can be read by the owner of the schema, and by
-- roles to which the owner grants that; the function runs with the owner's rights to read it. A role with REPLICATION can read messages from
-- the WAL and emit one again, so each message names its transaction, and is ignored in any other transaction.
CREATE OR REPLACE FUNCTION penstock_ddl.tell() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
  altered oid[];
  told bytea;
  own_key bytea;
BEGIN
  SELECT convert_to(s.key, 'UTF8') INTO STRICT own_key FROM penstock_ddl.secret s;
  IF tg_event = 'sql_drop' THEN
    SELECT array_agg(DISTINCT d.objid) INTO altered FROM pg_event_trigger_dropped_objects() d WHERE d.object_type = 'table column';
  ELSE
    SELECT array_agg(DISTINCT d.objid) INTO altered FROM pg_event_trigger_ddl_commands() d WHERE d.classid = 'pg_catalog.pg_class'::regclass;
  END IF;
  FOR told IN
    SELECT convert_to(json_build_object('oid', c.oid::bigint, 'xid', pg_current_xact_id()::text::bigint, 'columns', (
      SELECT json_agg(json_build_array(a.attnum, a.attname) ORDER BY a.attnum)
      FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    ))::text, 'UTF8')
    FROM pg_class c WHERE c.oid = ANY (altered) AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
  LOOP
    PERFORM pg_logical_emit_message(
      true, 'penstock.ddl', convert_to(encode(sha256(own_key || told || own_key), 'hex') || ' ', 'UTF8') || told
    );
  END LOOP;
EXCEPTION WHEN OTHERS THEN
  RAISE WARNING 'penstock_ddl.tell: %', SQLERRM;
END
$body$;
DO $body$
DECLARE
  owner name;
BEGIN
  SELECT r.rolname INTO owner
  FROM pg_catalog.pg_namespace n
  JOIN pg_catalog.pg_proc p ON p.pronamespace = n.oid AND p.proname = 'tell'
  LEFT JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = 'secret'
  JOIN pg_catalog.pg_roles r ON r.oid IN (n.nspowner, p.proowner, c.relowner)
  WHERE n.nspname = 'penstock_ddl' AND NOT r.rolsuper AND r.rolname <> current_user
    AND r.rolname <> ALL (pg_catalog.string_to_array(coalesce(pg_catalog.current_setting('penstock.trusted_roles', true), ''), ','));
  IF FOUND THEN
    RAISE insufficient_privilege USING MESSAGE = pg_catalog.format('schema penstock_ddl or its function belongs to role %s', owner),
      HINT = 'Find out who made it, then DROP SCHEMA penstock_ddl CASCADE and run this again.';
  END IF;
  CREATE TABLE IF NOT EXISTS penstock_ddl.secret (one boolean PRIMARY KEY, key text NOT NULL);
  INSERT INTO penstock_ddl.secret VALUES (true, pg_catalog.gen_random_uuid()::text || pg_catalog.gen_random_uuid()::text) ON CONFLICT DO NOTHING;
  IF NOT EXISTS (SELECT FROM pg_catalog.pg_event_trigger WHERE evtname = 'penstock_ddl_altered') THEN
    CREATE EVENT TRIGGER penstock_ddl_altered ON ddl_command_end WHEN TAG IN ('ALTER TABLE') EXECUTE FUNCTION penstock_ddl.tell();
  END IF;
  IF NOT EXISTS (SELECT FROM pg_catalog.pg_event_trigger WHERE evtname = 'penstock_ddl_dropped') THEN
    CREATE EVENT TRIGGER penstock_ddl_dropped ON sql_drop EXECUTE FUNCTION penstock_ddl.tell();
  END IF;
END
$body$

-- name: remove
DROP SCHEMA IF EXISTS penstock_ddl CASCADE

-- name: inspect
-- How many of the two event triggers exist, fire in every session, and sign messages that name their transaction.
SELECT count(*) FILTER (WHERE e.evtenabled IN ('O', 'A')), count(*)
FROM pg_catalog.pg_event_trigger e
JOIN pg_catalog.pg_proc p ON p.oid = e.evtfoid
JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
WHERE n.nspname = 'penstock_ddl' AND p.proname = 'tell' AND p.prosecdef
  AND p.prosrc LIKE '%pg_current_xact_id()%' AND e.evtname IN ('penstock_ddl_altered', 'penstock_ddl_dropped')

-- name: key
SELECT s.key FROM penstock_ddl.secret s
