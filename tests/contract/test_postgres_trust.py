"""Objects of a Postgres target that another role made first are not used: their code would run with the rights of Penstock's role."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from penstock.errors import PipelineBusyError, UntrustedObjectError
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.lease import Lease
from penstock.postgres.ownership import Trust, check_target_table, lock_tables
from penstock.postgres.target_lock import TargetLock
from penstock.schema import TableName
from penstock.testing.streams import Background
from tests.contract.test_postgres_sink import PostgresHarness
from tests.fix_postgres import Database
from tests.fix_roles import Roles
from tests.waiting import wait_for

ESCALATE = """
    CREATE FUNCTION {s}.escalate() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN EXECUTE 'ALTER ROLE {r} SUPERUSER'; RETURN NEW; EXCEPTION WHEN OTHERS THEN RETURN NEW; END $$;
    CREATE FUNCTION {s}.escalate(text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS
        $$ BEGIN EXECUTE 'ALTER ROLE {r} SUPERUSER'; RETURN $1; EXCEPTION WHEN OTHERS THEN RETURN $1; END $$;
"""
APPLIED = """
    CREATE TABLE penstock.applied (
        "schema" text NOT NULL, "table" text NOT NULL, pipeline text NOT NULL, source_schema text NOT NULL, source_table text NOT NULL,
        source_oid bigint NOT NULL, "columns" jsonb NOT NULL, "key" jsonb NOT NULL, mode text NOT NULL, "position" pg_lsn, staging text,
        relation regclass, origin text, copy text, PRIMARY KEY ("schema", "table")
    );
    CREATE TABLE penstock.chunks (staging text, number integer, fence pg_lsn, "rows" bigint, PRIMARY KEY (staging, number));
    CREATE TABLE penstock.leases (name text PRIMARY KEY, pid integer, role oid, started timestamptz);
"""
ITEMS = "CREATE TABLE copy_public.items (size numeric, id bigint PRIMARY KEY, note text)"
TRIGGER = "CREATE TRIGGER escalate BEFORE INSERT OR UPDATE ON {} FOR EACH ROW EXECUTE FUNCTION {}.escalate()"


class Intruder:
    """A role that may create objects in the target, and nothing else."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.name = f"intruder_{database.name}"
        database.execute(f"CREATE ROLE {self.name} LOGIN; GRANT CREATE ON DATABASE {database.name} TO {self.name}")

    def execute(self, *statements: str) -> None:
        with psycopg.connect(self._database.dsn.replace("postgres@", f"{self.name}@"), autocommit=True) as session:
            for each in statements:
                session.execute(each.encode())

    def plant(self, schema: str) -> None:
        """Functions that make this role a superuser if a superuser runs them."""
        self.execute(f"CREATE SCHEMA {schema}", ESCALATE.format(s=schema, r=self.name))

    @property
    def is_superuser(self) -> bool:
        return self._database.query("SELECT rolsuper FROM pg_roles WHERE rolname = %s", self.name) == [(True,)]

    def drop(self) -> None:
        self._database.execute(f"DROP OWNED BY {self.name} CASCADE; DROP ROLE {self.name}")


@pytest.fixture
def harness(shared_database: Database, tmp_path: Path) -> Iterator[PostgresHarness]:
    shared_database.execute("DROP SCHEMA IF EXISTS penstock, copy_public, planted CASCADE")
    made = PostgresHarness(tmp_path, shared_database)
    yield made
    made.sink.close()


@pytest.fixture
def intruder(harness: PostgresHarness) -> Iterator[Intruder]:
    made = Intruder(harness.database)
    yield made
    made.drop()


@pytest.mark.parametrize(
    "planted",
    [
        (TRIGGER.format("penstock.applied", "penstock"),),
        (TRIGGER.format("penstock.leases", "penstock"),),
        ("ALTER TABLE penstock.applied ADD CHECK (penstock.escalate(pipeline) IS NOT NULL)",),
        ("ALTER TABLE penstock.leases ALTER role SET DEFAULT length(penstock.escalate('1'))::oid",),
        ("CREATE INDEX planted ON penstock.applied (penstock.escalate(pipeline))",),
        ("CREATE RULE planted AS ON INSERT TO penstock.applied DO ALSO SELECT penstock.escalate('')",),
        (),
    ],
    ids=["trigger", "trigger-on-leases", "check", "default", "index", "rule", "owner-alone"],
)
def test_role_that_may_create_in_the_target_does_not_become_superuser_by_tables_made_beforehand(
    harness: PostgresHarness, intruder: Intruder, planted: tuple[str, ...]
) -> None:
    intruder.plant("penstock")
    intruder.execute(*APPLIED.split(";")[:-1], *planted)
    with pytest.raises(UntrustedObjectError, match=f"of role {intruder.name}"):
        harness.copy()
    with pytest.raises(UntrustedObjectError, match="schema penstock"):
        harness.open("other").find_record(harness.table.name)
    assert not intruder.is_superuser


def test_view_in_the_place_of_a_table_of_the_target_is_not_read(harness: PostgresHarness, intruder: Intruder) -> None:
    intruder.plant("planted")
    harness.copy()
    harness.sink.close()
    harness.database.execute(f"DROP TABLE penstock.applied; GRANT CREATE, USAGE ON SCHEMA penstock TO {intruder.name}")
    intruder.execute("CREATE VIEW penstock.applied AS SELECT planted.escalate('x') AS schema, ''::text AS table")
    with pytest.raises(UntrustedObjectError, match="not an ordinary table"):
        harness.open().find_record(harness.table.name)
    assert not intruder.is_superuser


def test_adopted_table_runs_no_code_of_a_role_that_is_not_trusted(harness: PostgresHarness, intruder: Intruder) -> None:
    intruder.plant("copy_public")
    intruder.execute(ITEMS, TRIGGER.format("copy_public.items", "copy_public"))
    with pytest.raises(UntrustedObjectError, match=f"belongs to role {intruder.name}"):
        harness.sink.adopt(harness.table)
    harness.database.execute("ALTER SCHEMA copy_public OWNER TO postgres; ALTER TABLE copy_public.items OWNER TO postgres")
    with pytest.raises(UntrustedObjectError, match=r"trigger escalate, which uses function copy_public.escalate\(\)"):
        harness.sink.adopt(harness.table)
    harness.database.execute("DROP TRIGGER escalate ON copy_public.items")
    harness.database.execute("ALTER TABLE copy_public.items ADD CHECK (copy_public.escalate(note) IS NOT NULL)")
    with pytest.raises(UntrustedObjectError, match=r"which uses function copy_public.escalate\(text\)"):
        harness.sink.adopt(harness.table)
    harness.database.execute("ALTER TABLE copy_public.items DROP CONSTRAINT items_note_check")
    assert harness.sink.adopt(harness.table) is False
    assert not intruder.is_superuser


@pytest.mark.parametrize(
    ("made", "part"),
    [
        ("CREATE TABLE t (id int) PARTITION BY LIST (id)", "CREATE TABLE part PARTITION OF t DEFAULT"),
        ("CREATE TABLE t (id int)", "CREATE TABLE part () INHERITS (t)"),
    ],
    ids=["partition", "heir"],
)
def test_table_whose_partition_runs_code_of_a_role_that_is_not_trusted_is_not_written(
    harness: PostgresHarness, intruder: Intruder, made: str, part: str
) -> None:
    intruder.plant("planted")
    database = harness.database
    database.execute(f"DROP TABLE IF EXISTS t CASCADE; {made}; {part}; ALTER TABLE part OWNER TO {intruder.name}")
    intruder.execute(TRIGGER.format("public.part", "planted"))
    for found, mended in (("partition or heir", "ALTER TABLE part OWNER TO postgres"), ("trigger escalate", "DROP TABLE part")):
        with connect(harness.address) as connection, connection.transaction(), pytest.raises(UntrustedObjectError, match=found):
            check_target_table(connection, TableName("public", "t"))
        database.execute(mended)
    with connect(harness.address) as connection, connection.transaction():
        check_target_table(connection, TableName("public", "t"))
    database.execute("DROP TABLE t")


def test_tables_are_not_put_into_a_schema_whose_owner_could_exchange_them(harness: PostgresHarness, intruder: Intruder) -> None:
    intruder.execute("CREATE SCHEMA copy_public")
    with pytest.raises(UntrustedObjectError, match="schema copy_public belongs to role") as refused:
        harness.copy()
    assert "trusted_roles" in (refused.value.hint or "")
    assert [error.message for error in harness.sink.find_problems([harness.table.name])] == [refused.value.message]
    assert harness.database.query("SELECT 1 FROM pg_tables WHERE schemaname = 'copy_public'") == []


def test_objects_of_a_trusted_role_are_used(harness: PostgresHarness, intruder: Intruder) -> None:
    intruder.execute("CREATE SCHEMA penstock", *APPLIED.split(";")[:-1], "CREATE SCHEMA copy_public")
    harness.address = harness.address.trusting(["somebody else", intruder.name])
    harness.sink = harness.open()
    harness.copy()
    assert harness.rows() == harness.source.sorted_rows()


def test_table_is_locked_whatever_it_is_called(database: Database) -> None:
    table = TableName("public", "a$body$'\"\\%s{} b")
    name = sql.Identifier(table.name).as_string()
    database.execute(f"CREATE TABLE {name} ()")
    with connect(SourceAddress.parse(database.dsn)) as connection, connection.transaction():
        lock_tables(connection, [TableName("public", "missing"), table])
        held = database.query("SELECT relation::regclass::text FROM pg_locks WHERE mode = 'RowExclusiveLock' AND relation >= 16384")
    assert held == [(name,)]


@pytest.mark.versions(14, 18)
def test_role_that_can_act_as_penstocks_role_is_trusted(database: Database, roles: Roles) -> None:
    """As the administrator of a managed server can, who is no superuser."""
    admin, stranger, owner, operator = (roles.create(*each) for each in (("admin", "CREATEROLE"), ("other",), ("dba",), ("operator",)))
    own = roles.create("own")
    database.execute(f"ALTER DATABASE {database.name} OWNER TO {owner}; GRANT {owner} TO {operator}; GRANT {own} TO {operator}")
    database.execute(f"GRANT {stranger} TO {own}; GRANT {own} TO {admin} WITH ADMIN OPTION")
    with connect(roles.address(own)) as connection:
        trust = Trust.load(connection)
    database.execute(f"ALTER DATABASE {database.name} OWNER TO postgres")
    assert [role for role in (admin, stranger, owner, operator, own) if trust.covers(role)] == [admin, operator, own]
    assert [role for role in (stranger, owner, operator) if trust.covers_or_owns_database(role)] == [owner, operator]


def test_tables_of_an_earlier_version_are_upgraded(harness: PostgresHarness) -> None:
    harness.database.execute("CREATE SCHEMA penstock; " + APPLIED)
    harness.database.execute("DROP TABLE penstock.leases; ALTER TABLE penstock.applied DROP relation, DROP origin, DROP copy")
    harness.copy()
    assert harness.rows() == harness.source.sorted_rows()


def test_default_of_the_database_does_not_make_a_role_trusted(harness: PostgresHarness, intruder: Intruder) -> None:
    intruder.execute("CREATE SCHEMA penstock")
    harness.database.execute(f"ALTER DATABASE {harness.database.name} SET penstock.trusted_roles = '{intruder.name}'")
    with pytest.raises(UntrustedObjectError):
        harness.copy()
    harness.database.execute(f"ALTER DATABASE {harness.database.name} RESET penstock.trusted_roles")


def test_role_that_may_only_connect_does_not_hold_up_the_target(harness: PostgresHarness, intruder: Intruder) -> None:
    """By the advisory locks that runs took before there were leases."""
    with psycopg.connect(harness.database.dsn.replace("postgres@", f"{intruder.name}@")) as session:
        session.execute("SELECT pg_advisory_lock(hashtextextended(name, 0)) FROM (VALUES ('penstock'), ('penstock/shop')) AS l (name)")
        Background(harness.copy).result(20, "a copy")
    assert harness.rows() == harness.source.sorted_rows()


def test_lease_is_free_once_its_session_has_ended_however_that_was(harness: PostgresHarness) -> None:
    first, second = (TargetLock(harness.address, "shop") for _ in range(2))
    first.ensure()
    with pytest.raises(PipelineBusyError, match=r"process \d+ \(role postgres, penstock target\)"):
        second.ensure()
    with pytest.raises(PipelineBusyError):
        second.ensure()
    ((pid,),) = harness.database.query("SELECT pid FROM penstock.leases")
    harness.database.execute("SELECT pg_terminate_backend(%s, 5000)", pid)
    second.ensure()
    with pytest.raises(PipelineBusyError):
        first.ensure()
    second.close()
    first.ensure()
    first.close()


def test_lease_names_the_session_that_keeps_it_from_being_taken(harness: PostgresHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.postgres.lease.LOCK_SECONDS", 0.2)
    TargetLock(harness.address, "shop").ensure()
    with harness.database.connect() as other, harness.database.connect(autocommit=True) as session:
        other.execute("LOCK TABLE penstock.leases IN SHARE UPDATE EXCLUSIVE MODE")
        with pytest.raises(Exception, match=f"process {other.info.backend_pid} .role postgres") as held:
            Lease(session, "penstock", "pipeline/other").take()
    assert getattr(held.value, "code", None) == "PEN-1107"


def test_table_of_leases_is_created_by_two_sessions_at_once(harness: PostgresHarness) -> None:
    database = harness.database
    database.execute("CREATE SCHEMA penstock")
    waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with database.connect() as first, connect(harness.address) as second:
        first.execute("CREATE TABLE penstock.leases (name text PRIMARY KEY, pid integer, role oid, started timestamptz)")
        lease = Lease(second, "penstock", "reader")
        created = Background(lease.ensure_table)
        wait_for(lambda: bool(database.query(waits)), "the second session to wait")
        first.commit()
        created.result(20, "the second session")
        assert lease.take() is None
