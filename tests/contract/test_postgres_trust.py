"""Objects in a Postgres target that another role created are not used: their code would run as Penstock's
role.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from penstock.errors import PipelineBusyError, UntrustedObjectError
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.ownership import Lease, Trust, check_target_table, lock_tables
from penstock.postgres.target.state import TargetLock, target_transaction
from penstock.schema import TableName
from penstock.testing.streams import Background
from tests.support.contract.postgres_harness import PostgresHarness
from tests.support.fix_postgres import Database
from tests.support.fix_roles import Roles
from tests.support.waiting import wait_for

ESCALATE = """
    CREATE FUNCTION {s}.escalate() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN
            EXECUTE 'ALTER ROLE {r} SUPERUSER'; RETURN NEW; EXCEPTION WHEN OTHERS THEN RETURN NEW;
        END $$;
    CREATE FUNCTION {s}.escalate(text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS
        $$ BEGIN EXECUTE 'ALTER ROLE {r} SUPERUSER'; RETURN $1; EXCEPTION WHEN OTHERS THEN RETURN $1; END $$;
"""
APPLIED = """
    CREATE TABLE penstock.applied (
        "schema" text NOT NULL, "table" text NOT NULL, pipeline text NOT NULL, source_schema text NOT NULL,
          source_table text NOT NULL,
        source_oid bigint NOT NULL, "columns" jsonb NOT NULL, "key" jsonb NOT NULL, mode text NOT NULL,
          "position" pg_lsn, staging text,
        relation regclass, origin text, copy text, PRIMARY KEY ("schema", "table")
    );
    CREATE TABLE penstock.chunks (staging text, number integer, fence pg_lsn, "rows" bigint,
      PRIMARY KEY (staging, number));
    CREATE TABLE penstock.leases (name text PRIMARY KEY, pid integer, role oid, started timestamptz);
"""
ITEMS = "CREATE TABLE copy_public.items (size numeric, id bigint PRIMARY KEY, note text)"
TRIGGER = "CREATE TRIGGER escalate BEFORE INSERT OR UPDATE ON {} FOR EACH ROW EXECUTE FUNCTION {}.escalate()"


class Intruder:
    """A role that may create objects in the target and has no other rights."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.name = f"intruder_{database.name}"
        database.execute(
            f"CREATE ROLE {self.name} LOGIN; GRANT CREATE ON DATABASE {database.name} TO {self.name}"
        )

    def execute(self, *statements: str) -> None:
        with psycopg.connect(
            self._database.dsn.replace("postgres@", f"{self.name}@"), autocommit=True
        ) as session:
            for each in statements:
                session.execute(each.encode())

    def plant(self, schema: str) -> None:
        """Functions that make this role a superuser if a superuser runs them."""
        self.execute(f"CREATE SCHEMA {schema}", ESCALATE.format(s=schema, r=self.name))

    @property
    def is_superuser(self) -> bool:
        return self._database.query("SELECT rolsuper FROM pg_roles WHERE rolname = %s", self.name) == [
            (True,)
        ]

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


ADDED = {
    "trigger": ((TRIGGER.format("penstock.applied", "planted"),), "trigger escalate on table applied"),
    "rule": (
        ("CREATE RULE planted AS ON INSERT TO penstock.applied DO ALSO SELECT planted.escalate('')",),
        "rule planted on",
    ),
    "default": (
        ("ALTER TABLE penstock.applied ALTER staging SET DEFAULT planted.escalate('')",),
        "default of column staging",
    ),
    "check": (
        ("ALTER TABLE penstock.applied ADD CHECK (planted.escalate(pipeline) IS NOT NULL)",),
        "check constraint on",
    ),
    "policy": (
        ("CREATE POLICY planted ON penstock.applied USING (planted.escalate(pipeline) IS NOT NULL)",),
        "policy planted on",
    ),
    "row-security": (("ALTER TABLE penstock.applied ENABLE ROW LEVEL SECURITY",), "row level security on"),
    "index-expression": (
        ("CREATE INDEX planted ON penstock.applied (planted.escalate(pipeline))",),
        "index planted on",
    ),
    "index-predicate": (
        ("CREATE INDEX planted ON penstock.applied (mode) WHERE planted.escalate(pipeline) IS NOT NULL",),
        "index planted on",
    ),
    "index-operators": (
        (
            (
                "CREATE OPERATOR CLASS planted.ops FOR TYPE text USING hash "
                "AS OPERATOR 1 =, FUNCTION 1 hashtext(text)"
            ),
            "CREATE INDEX planted ON penstock.applied USING hash (mode planted.ops)",
        ),
        "index planted on",
    ),
    "exclusion": (
        ("ALTER TABLE penstock.applied ADD CONSTRAINT planted EXCLUDE USING hash (copy WITH =)",),
        "constraint planted on",
    ),
    "generated": (
        (
            "ALTER TABLE penstock.applied DROP copy",
            (
                "ALTER TABLE penstock.applied ADD copy text GENERATED ALWAYS "
                "AS (planted.escalate(pipeline)) STORED"
            ),
        ),
        "generated column copy on",
    ),
    "column-added": (("ALTER TABLE penstock.applied ADD note text",), "column note of table applied"),
    "column-missing": (("ALTER TABLE penstock.applied DROP mode",), "table applied without column mode"),
    "column-type": (
        ("ALTER TABLE penstock.applied ALTER mode TYPE varchar",),
        "column mode of table applied, which is not of type text",
    ),
    "collation": (
        ('ALTER TABLE penstock.applied ALTER mode TYPE text COLLATE "C"',),
        "collation of column mode on",
    ),
    "heir": (
        ("CREATE TABLE planted.heir () INHERITS (penstock.applied)",),
        "inheritance with planted.heir on",
    ),
    "parent": (
        ("CREATE TABLE planted.parent ()", "ALTER TABLE penstock.applied INHERIT planted.parent"),
        "inheritance with planted.parent on",
    ),
    "partition": (
        (
            "CREATE TABLE planted.whole (LIKE penstock.chunks) PARTITION BY LIST (staging)",
            "ALTER TABLE planted.whole ATTACH PARTITION penstock.chunks DEFAULT",
        ),
        "chunks, which is not an ordinary table",
    ),
    "unlogged": (("ALTER TABLE penstock.applied SET UNLOGGED",), "applied, which is not an ordinary table"),
    "table-owner": (("ALTER TABLE penstock.applied OWNER TO {r}",), "table applied of role {r}"),
    "schema-owner": (("ALTER SCHEMA penstock OWNER TO {r}",), "schema penstock of role {r}"),
}


@pytest.mark.parametrize("added", ADDED)
def test_nothing_is_written_once_a_table_of_penstocks_own_was_altered(
    harness: PostgresHarness, intruder: Intruder, added: str
) -> None:
    """Created by a role that owns neither table nor schema but has the privileges, or by their new owner."""
    harness.copy()
    harness.sink.close()
    intruder.plant("planted")
    statements, words = ADDED[added]
    for statement in statements:
        harness.database.execute(statement.format(r=intruder.name))
    harness.sink = harness.open()
    leases = "SELECT name, xmin::text FROM penstock.leases"  # a run takes its lease first
    before = harness.database.query(leases)
    for attempt in (harness.copy, harness.target):
        with pytest.raises(UntrustedObjectError, match=words.format(r=intruder.name)):
            attempt()
    assert harness.database.query(leases) == before
    assert not intruder.is_superuser


def test_chunk_is_not_loaded_once_a_table_of_penstocks_own_was_given_a_trigger(
    harness: PostgresHarness, intruder: Intruder
) -> None:
    """Executors load chunks in separate transactions, long after the driver has inspected these tables."""
    place = harness.begin()
    rows = harness.source.sorted_rows()
    intruder.plant("planted")
    harness.database.execute(TRIGGER.format("penstock.chunks", "planted"))
    with pytest.raises(UntrustedObjectError, match="trigger escalate on table chunks"):
        harness.write(place, 0, rows)
    assert not intruder.is_superuser
    harness.database.execute("DROP TRIGGER escalate ON penstock.chunks")
    file, _ = harness.write(place, 0, rows)
    harness.sink.finish_snapshot(harness.table, [file], harness.fence)
    assert harness.rows() == rows


def test_view_in_the_place_of_a_table_of_the_target_is_not_read(
    harness: PostgresHarness, intruder: Intruder
) -> None:
    intruder.plant("planted")
    harness.copy()
    harness.sink.close()
    harness.database.execute(
        f"DROP TABLE penstock.applied; GRANT CREATE, USAGE ON SCHEMA penstock TO {intruder.name}"
    )
    intruder.execute(
        "CREATE VIEW penstock.applied AS SELECT planted.escalate('x') AS schema, ''::text AS table"
    )
    with pytest.raises(UntrustedObjectError, match="not an ordinary table"):
        harness.open().find_record(harness.table.name)
    assert not intruder.is_superuser


def test_adopted_table_runs_no_code_of_a_role_that_is_not_trusted(
    harness: PostgresHarness, intruder: Intruder
) -> None:
    intruder.plant("copy_public")
    intruder.execute(ITEMS, TRIGGER.format("copy_public.items", "copy_public"))
    with pytest.raises(UntrustedObjectError, match=f"belongs to role {intruder.name}"):
        harness.sink.adopt(harness.table)
    harness.database.execute(
        "ALTER SCHEMA copy_public OWNER TO postgres; ALTER TABLE copy_public.items OWNER TO postgres"
    )
    with pytest.raises(
        UntrustedObjectError, match=r"trigger escalate, which uses function copy_public.escalate\(\)"
    ):
        harness.sink.adopt(harness.table)
    harness.database.execute("DROP TRIGGER escalate ON copy_public.items")
    harness.database.execute(
        "ALTER TABLE copy_public.items ADD CHECK (copy_public.escalate(note) IS NOT NULL)"
    )
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
    database.execute(
        f"DROP TABLE IF EXISTS t CASCADE; {made}; {part}; ALTER TABLE part OWNER TO {intruder.name}"
    )
    intruder.execute(TRIGGER.format("public.part", "planted"))
    for found, mended in (
        ("partition or heir", "ALTER TABLE part OWNER TO postgres"),
        ("trigger escalate", "DROP TABLE part"),
    ):
        with (
            connect(harness.address) as connection,
            connection.transaction(),
            pytest.raises(UntrustedObjectError, match=found),
        ):
            check_target_table(connection, TableName("public", "t"))
        database.execute(mended)
    with connect(harness.address) as connection, connection.transaction():
        check_target_table(connection, TableName("public", "t"))
    database.execute("DROP TABLE t")


USED = {
    "table-owner": (("ALTER TABLE t OWNER TO {r}",), "the table belongs"),
    "schema-owner": (("ALTER TABLE t SET SCHEMA planted",), "the schema belongs"),
    "trigger": ((TRIGGER.format("t", "planted"),), "trigger escalate, which uses function"),
    "check": (
        ("ALTER TABLE t ADD CONSTRAINT c CHECK (planted.escalate(note) IS NOT NULL)",),
        "constraint c, which uses function",
    ),
    "default": (
        ("ALTER TABLE t ALTER note SET DEFAULT planted.escalate('')",),
        "the default of column note, which uses function",
    ),
    "index-expression": (("CREATE INDEX i ON t (planted.escalate(note))",), "index i, which uses function"),
    "index-operators": (
        (
            (
                "CREATE OPERATOR CLASS planted.ops FOR TYPE text USING hash "
                "AS OPERATOR 1 =, FUNCTION 1 hashtext(text)"
            ),
            "ALTER OPERATOR CLASS planted.ops USING hash OWNER TO {r}",
            "CREATE INDEX i ON t USING hash (note planted.ops)",
        ),
        "index i, which uses operator class",
    ),
    "rule": (
        ("CREATE RULE r AS ON INSERT TO t DO ALSO SELECT planted.escalate('')",),
        "rule r, which uses function",
    ),
    "policy": (
        ("CREATE POLICY p ON t USING (planted.escalate(note) IS NOT NULL)",),
        "policy p, which uses function",
    ),
    "operator": (
        (
            "CREATE OPERATOR planted.! (RIGHTARG = text, FUNCTION = planted.escalate)",
            "ALTER OPERATOR planted.! (NONE, text) OWNER TO {r}",
            "ALTER FUNCTION planted.escalate(text) OWNER TO postgres",
            "ALTER TABLE t ADD CONSTRAINT c CHECK ((OPERATOR(planted.!) note) IS NOT NULL)",
        ),
        "constraint c, which uses operator",
    ),
    "domain": (
        (
            "CREATE DOMAIN planted.word AS text CHECK (planted.escalate(VALUE) IS NOT NULL)",
            "ALTER DOMAIN planted.word OWNER TO {r}",
            "ALTER TABLE t ALTER note TYPE planted.word",
        ),
        "the table, which uses type planted.word",
    ),
}


@pytest.mark.parametrize("used", USED)
def test_table_of_a_target_is_not_written_if_code_of_a_role_that_is_not_trusted_would_run(
    harness: PostgresHarness, intruder: Intruder, used: str
) -> None:
    intruder.plant("planted")
    statements, words = USED[used]
    harness.database.execute("DROP TABLE IF EXISTS t CASCADE; CREATE TABLE t (id int, note text)")
    for statement in statements:
        harness.database.execute(statement.format(r=intruder.name))
    place = TableName("planted" if used == "schema-owner" else "public", "t")
    with (
        connect(harness.address) as connection,
        connection.transaction(),
        pytest.raises(UntrustedObjectError, match=words),
    ):
        check_target_table(connection, place)
    with connect(harness.address.trusting([intruder.name])) as connection, connection.transaction():
        check_target_table(connection, place)
    harness.database.execute("DROP TABLE IF EXISTS t CASCADE")
    assert not intruder.is_superuser


def test_checked_tables_get_no_trigger_before_the_end_of_the_transaction(
    harness: PostgresHarness, intruder: Intruder
) -> None:
    intruder.plant("planted")
    harness.copy()
    with harness.database.connect(autocommit=True) as other:
        other.execute("SET lock_timeout = '100ms'")

        def check_locked(table: str) -> None:
            with pytest.raises(psycopg.errors.LockNotAvailable):
                other.execute(TRIGGER.format(table, "planted").encode())

        with target_transaction(harness.address, "writing") as connection:
            for table in ("applied", "chunks", "leases"):
                check_locked(f"penstock.{table}")
            check_target_table(connection, TableName("copy_public", "items"))
            check_locked("copy_public.items")


def test_tables_are_not_put_into_a_schema_whose_owner_could_exchange_them(
    harness: PostgresHarness, intruder: Intruder
) -> None:
    intruder.execute("CREATE SCHEMA copy_public")
    with pytest.raises(UntrustedObjectError, match="schema copy_public belongs to role") as refused:
        harness.copy()
    assert "trusted_roles" in (refused.value.hint or "")
    assert [error.message for error in harness.sink.find_problems([harness.table.name])] == [
        refused.value.message
    ]
    assert harness.database.query("SELECT 1 FROM pg_tables WHERE schemaname = 'copy_public'") == []


def test_objects_of_a_trusted_role_are_used(harness: PostgresHarness, intruder: Intruder) -> None:
    intruder.execute("CREATE SCHEMA penstock", *APPLIED.split(";")[:-1], "CREATE SCHEMA copy_public")
    harness.address = harness.address.trusting(["another role", intruder.name])
    harness.sink = harness.open()
    harness.copy()
    assert harness.rows() == harness.source.sorted_rows()


def test_table_with_any_name_is_locked(database: Database) -> None:
    table = TableName("public", "a$body$'\"\\%s{} b")
    name = sql.Identifier(table.name).as_string()
    database.execute(f"CREATE TABLE {name} ()")
    with connect(SourceAddress.parse(database.dsn)) as connection, connection.transaction():
        lock_tables(connection, [TableName("public", "missing"), table])
        held = database.query(
            "SELECT relation::regclass::text FROM pg_locks "
            "WHERE mode = 'RowExclusiveLock' AND relation >= 16384"
        )
    assert held == [(name,)]


@pytest.mark.versions(14, 18)
def test_role_that_can_act_as_penstocks_role_is_trusted(database: Database, roles: Roles) -> None:
    """The administrator of a managed server can do this without being a superuser: with CREATEROLE before
    Postgres 16, with ADMIN OPTION since.
    """
    admin, stranger, owner, operator = (
        roles.create(*each) for each in (("admin", "CREATEROLE"), ("other",), ("dba",), ("operator",))
    )
    own = roles.create("own")
    database.execute(
        f"ALTER DATABASE {database.name} OWNER TO {owner}; GRANT {owner} TO {operator}; "
        f"GRANT {own} TO {operator}"
    )
    database.execute(f"GRANT {stranger} TO {own}")
    with connect(roles.address(own)) as connection:
        if connection.info.server_version >= 160000:
            # As the server grants it to a role without SUPERUSER that creates another one.
            database.execute(f"GRANT {own} TO {admin} WITH ADMIN TRUE, INHERIT FALSE, SET FALSE")
        trust = Trust.load(connection)
    database.execute(f"ALTER DATABASE {database.name} OWNER TO postgres")
    everybody = (admin, stranger, owner, operator, own, "postgres")
    assert [role for role in everybody if trust.covers(role)] == [admin, operator, own, "postgres"]
    assert [role for role in (stranger, owner, operator) if trust.covers_or_owns_database(role)] == [
        owner,
        operator,
    ]


def test_tables_of_an_earlier_version_are_upgraded(harness: PostgresHarness) -> None:
    harness.database.execute("CREATE SCHEMA penstock; " + APPLIED)
    harness.database.execute(
        "DROP TABLE penstock.leases; ALTER TABLE penstock.applied DROP relation, DROP origin, DROP copy"
    )
    harness.copy()
    assert harness.rows() == harness.source.sorted_rows()


def test_default_of_the_database_does_not_make_a_role_trusted(
    harness: PostgresHarness, intruder: Intruder
) -> None:
    intruder.execute("CREATE SCHEMA penstock")
    harness.database.execute(
        f"ALTER DATABASE {harness.database.name} SET penstock.trusted_roles = '{intruder.name}'"
    )
    with pytest.raises(UntrustedObjectError):
        harness.copy()
    harness.database.execute(f"ALTER DATABASE {harness.database.name} RESET penstock.trusted_roles")


def test_role_that_may_only_connect_does_not_hold_up_the_target(
    harness: PostgresHarness, intruder: Intruder
) -> None:
    """Earlier versions used advisory locks instead of leases."""
    with psycopg.connect(harness.database.dsn.replace("postgres@", f"{intruder.name}@")) as session:
        session.execute(
            "SELECT pg_advisory_lock(hashtextextended(name, 0)) "
            "FROM (VALUES ('penstock'), ('penstock/shop')) AS l (name)"
        )
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


def test_lease_names_the_session_that_keeps_it_from_being_taken(
    harness: PostgresHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.postgres.ownership.LOCK_SECONDS", 0.2)
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
        first.execute(
            "CREATE TABLE penstock.leases (name text PRIMARY KEY, pid integer, role oid, started timestamptz)"
        )
        lease = Lease(second, "penstock", "reader")
        created = Background(lease.ensure_table)
        wait_for(lambda: bool(database.query(waits)), "the second session to wait")
        first.commit()
        created.result(20, "the second session")
        assert lease.take() is None
