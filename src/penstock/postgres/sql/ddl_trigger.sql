-- The event trigger that puts into the log what becomes of columns, in the transaction and at the place where it happens.

-- name: install
-- Whoever alters a table must never fail because of it. Temporary tables are nobody's business.
CREATE SCHEMA IF NOT EXISTS penstock_ddl;
CREATE OR REPLACE FUNCTION penstock_ddl.tell() RETURNS event_trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
  altered oid[];
  told text;
BEGIN
  IF tg_event = 'sql_drop' THEN
    SELECT array_agg(DISTINCT d.objid) INTO altered FROM pg_event_trigger_dropped_objects() d WHERE d.object_type = 'table column';
  ELSE
    SELECT array_agg(DISTINCT d.objid) INTO altered FROM pg_event_trigger_ddl_commands() d WHERE d.classid = 'pg_catalog.pg_class'::regclass;
  END IF;
  FOR told IN
    SELECT json_build_object('oid', c.oid::bigint, 'columns', (
      SELECT json_agg(json_build_array(a.attnum, a.attname) ORDER BY a.attnum)
      FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    ))::text
    FROM pg_class c WHERE c.oid = ANY (altered) AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
  LOOP
    PERFORM pg_logical_emit_message(true, 'penstock.ddl', told);
  END LOOP;
EXCEPTION WHEN OTHERS THEN
  RAISE WARNING 'penstock_ddl.tell: %', SQLERRM;
END
$body$;
DO $body$
BEGIN
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
-- Whether each of the two is there and fires for everybody.
SELECT count(*) FILTER (WHERE e.evtenabled IN ('O', 'A')), count(*)
FROM pg_catalog.pg_event_trigger e
JOIN pg_catalog.pg_proc p ON p.oid = e.evtfoid
JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
WHERE n.nspname = 'penstock_ddl' AND p.proname = 'tell' AND e.evtname IN ('penstock_ddl_altered', 'penstock_ddl_dropped')
