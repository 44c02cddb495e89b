"""The DDL event trigger: its messages, that it blocks no session, and which schema changes can be followed
only with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest

from penstock.change import ChangeCounts
from penstock.errors import PrivilegeError, UntrustedObjectError
from penstock.postgres.catalog import CatalogTable, inspect_shape
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.publication import (
    PREFIX,
    drop_trigger,
    ensure_trigger,
    install_statements,
    is_installed,
    load_key,
)
from penstock.schema import TableName
from penstock.sinks.base import TableChanges
from penstock.sinks.evolution import Evolution, ResyncRequired, plan_evolution
from penstock.sinks.lineage import Alteration, AlterationReader, DdlHint, Origin, resolve_attnums
from penstock.spool.reader import SpoolReader
from penstock.testing.streams import Background
from tests.support.fix_captured import Captured, capturing
from tests.support.fix_postgres import Database, PostgresServer
from tests.support.fix_roles import Roles
from tests.support.waiting import wait_for

pytestmark = pytest.mark.versions(14, 18)


@pytest.fixture
def admin(captured: Captured) -> Iterator[Connection]:
    captured.settings = replace(captured.settings, message_prefixes=(PREFIX,))
    with connect(captured.settings.address) as connection:
        ensure_trigger(connection)
        yield connection


def alterations(captured: Captured, table: str) -> list[Alteration]:
    oid = captured.oid(table)
    return [each for each in every_alteration(captured) if each.oid == oid]


def every_alteration(captured: Captured) -> list[Alteration]:
    """Those of all tables, and those that were dropped."""
    captured.drain()
    reader = SpoolReader(captured.spool)
    start, end = reader.start, reader.end
    assert start is not None
    assert end is not None
    with connect(captured.settings.address) as connection:
        key = load_key(connection)
    return AlterationReader(PREFIX, key).read(reader.read(start, end).messages)


class Followed:
    """A table and a target that was copied when it began."""

    def __init__(self, captured: Captured, admin: Connection, name: str) -> None:
        self._captured, self._admin, self.name = captured, admin, name
        captured.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, a text, b int)",
            f"INSERT INTO {name} VALUES (1, 'one', 1)",
        )
        captured.drain()
        self._table = CatalogTable(captured.oid(name), TableName("public", name))
        self._schema = inspect_shape(admin, self._table).schema
        self._copied_at = captured.position

    def plan(self, told: bool) -> Evolution:
        origin = Origin.of(self._schema)
        assert origin is not None
        slices = [
            each for each in self._captured.slices(self.name) if each.file.min_position > self._copied_at
        ]
        names = {number: column.name for number, column in origin.columns.items()}
        numbers: list[DdlHint] = (
            resolve_attnums(slices, alterations(self._captured, self.name), names) if told else []
        )
        columns = pa.schema([pa.field(column.name, column.arrow_type) for column in self._schema.columns])
        now = inspect_shape(self._admin, self._table)
        versions = TableChanges(self._table.name, slices, ChangeCounts()).schemas
        return plan_evolution(columns, self._schema.key, origin, versions, now, hints=numbers)


def test_S02_S03_a_drop_and_an_add_without_a_write_in_between_are_followed(
    captured: Captured, admin: Connection
) -> None:
    table = Followed(captured, admin, "s02_told")
    captured.execute(
        "ALTER TABLE s02_told DROP a",
        "ALTER TABLE s02_told ADD c text DEFAULT 'new'",
        "UPDATE s02_told SET b = 2",
        "ALTER TABLE s02_told RENAME b TO a",
        "ALTER TABLE s02_told DROP c, ADD d int",
        "UPDATE s02_told SET d = 3",
    )
    with pytest.raises(ResyncRequired):
        table.plan(told=False)
    followed = table.plan(told=True)
    assert followed.renamed == {"a": "a__dropped_1", "b": "a"}
    assert [(each.name, each.fill.as_py()) for each in followed.added] == [("d", None)]


def test_S05_intermediate_changes_of_a_transaction_are_reported_where_they_are_unambiguous(
    captured: Captured, admin: Connection
) -> None:
    table = Followed(captured, admin, "s05_told")
    with captured.transaction():
        captured.execute(
            "ALTER TABLE s05_told DROP b, ADD c int",
            "INSERT INTO s05_told VALUES (2, 'two', 2)",
            "SAVEPOINT s",
        )
        captured.execute("ALTER TABLE s05_told ADD lost int", "ROLLBACK TO s")
    assert [tuple(each.columns) for each in alterations(captured, "s05_told")] == [(1, 2, 4)] * 2, (
        "once as altered, once as dropped"
    )
    followed = table.plan(told=True)
    assert (followed.dropped, [each.name for each in followed.added]) == (("b",), ["c"])


def test_S03_a_column_made_again_in_the_transaction_that_writes_is_in_doubt(
    captured: Captured, admin: Connection
) -> None:
    table = Followed(captured, admin, "s03_doubt")
    captured.execute("INSERT INTO s03_doubt VALUES (2, 'two', 2)")
    with captured.transaction():
        captured.execute(
            "ALTER TABLE s03_doubt DROP b",
            "ALTER TABLE s03_doubt ADD b int",
            "INSERT INTO s03_doubt VALUES (3, 'three', 3)",
        )
    with pytest.raises(ResyncRequired):
        table.plan(told=True)


def test_S02_a_column_dropped_with_its_type_is_reported_too(captured: Captured, admin: Connection) -> None:
    captured.execute(
        "CREATE DOMAIN short AS text",
        "CREATE TABLE s02_type (id int PRIMARY KEY, a short, b int)",
        "DROP DOMAIN short CASCADE",
    )
    assert [dict(each.columns) for each in alterations(captured, "s02_type")] == [{1: "id", 3: "b"}]
    captured.execute(
        "CREATE TEMP TABLE passing (a int)",
        "ALTER TABLE passing ADD b int",
        "CREATE VIEW seen AS SELECT 1 AS one",
    )
    captured.execute("ALTER TABLE s02_type SET (fillfactor = 70)", "DROP VIEW seen")
    assert len(alterations(captured, "s02_type")) == 2


def test_altering_a_table_never_fails_because_of_the_trigger(captured: Captured, admin: Connection) -> None:
    captured.execute("CREATE ROLE altering", "GRANT CREATE, USAGE ON SCHEMA public TO altering")
    with captured.transaction():
        captured.execute("ALTER TABLE penstock_ddl.secret RENAME TO hidden")
        captured.execute(
            "SET LOCAL ROLE altering",
            "CREATE TABLE public.theirs (id int)",
            "ALTER TABLE public.theirs ADD a int",
        )
    assert captured.query("SELECT a FROM theirs") == []
    captured.execute("ALTER TABLE penstock_ddl.hidden RENAME TO secret")


def test_messages_that_any_role_can_emit_neither_end_the_capture_nor_count(
    captured: Captured, admin: Connection
) -> None:
    captured.execute("CREATE TABLE poisoned (id int PRIMARY KEY, a text)", "CREATE ROLE talking")
    oid = captured.oid("poisoned")
    forged = json.dumps({"oid": oid, "columns": [[1, "id"], [7, "a"]]})
    for content in ('{"oid":1e999}', "[" * 100_000, "", forged, f"{'0' * 64} {forged}", "x" * (2 << 20)):
        with captured.transaction():
            captured.execute("SET LOCAL ROLE talking")
            captured.query("SELECT pg_logical_emit_message(true, 'penstock.ddl', %s)", content)
            captured.query("SELECT pg_logical_emit_message(false, 'penstock.ddl', %s)", content)
    captured.execute("ALTER TABLE poisoned ADD b int")
    captured.query(
        "SELECT count(pg_logical_emit_message(true, 'penstock.ddl', repeat('x', 1000000))) "
        "FROM generate_series(1, 70)"
    )
    captured.execute("INSERT INTO poisoned VALUES (1, 'one', 1)")
    assert [row["id"] for row in captured.rows("poisoned")] == [1]
    found = [each for each in every_alteration(captured) if each.concerns(oid)]
    assert [dict(each.columns) for each in found if each.oid == oid] == [{1: "id", 2: "a", 3: "b"}]
    assert [each.oid for each in found] == [None, None, oid, None], (
        "an empty message, one too large, and a summary of many dropped columns"
    )


def test_signed_message_that_is_emitted_again_does_not_count(captured: Captured, admin: Connection) -> None:
    """A role with REPLICATION reads messages from the log.

    An old one would hide that a column was dropped and added again.
    """
    table = Followed(captured, admin, "replayed")
    captured.execute("ALTER TABLE replayed ADD c int")
    captured.drain()
    reader = SpoolReader(captured.spool)
    assert reader.start is not None
    assert reader.end is not None
    (told,) = [
        message
        for message in reader.read(reader.start, reader.end).messages
        if str(captured.oid("replayed")) in str(message.content)
    ]
    captured.execute("ALTER TABLE replayed DROP c", "ALTER TABLE replayed ADD c int")
    before = alterations(captured, "replayed")
    captured.query("SELECT pg_logical_emit_message(true, 'penstock.ddl', %s)", told.content)
    captured.execute("UPDATE replayed SET c = 2")
    assert alterations(captured, "replayed") == before
    numbers = [column for column, each in table.plan(told=True).origin.columns.items() if each.name == "c"]
    assert numbers == [5], "the column as it was made again"


def test_message_of_a_transaction_that_is_streamed_counts(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    with capturing(
        postgres_server, tmp_path / "spool", parameters={"options": "-c logical_decoding_work_mem=64kB"}
    ) as made:
        made.settings = replace(made.settings, message_prefixes=(PREFIX,))
        with connect(made.settings.address) as connection:
            ensure_trigger(connection)
        made.execute("CREATE TABLE streamed (id int PRIMARY KEY, a text)")
        with made.transaction():
            made.execute(
                "INSERT INTO streamed SELECT g, repeat('x', 100) FROM generate_series(1, 5000) g",
                "SAVEPOINT own",  # the event trigger and the log name the whole transaction
                "ALTER TABLE streamed ADD b int",
            )
            made.execute("INSERT INTO streamed SELECT g, repeat('x', 100) FROM generate_series(5001, 9000) g")
        assert [tuple(each.columns) for each in alterations(made, "streamed")] == [(1, 2, 3)]


def test_function_whose_messages_do_not_name_their_transaction_is_replaced(
    captured: Captured, admin: Connection
) -> None:
    named = "'xid', pg_current_xact_id()::text::bigint, "
    assert named in install_statements()
    drop_trigger(admin)
    admin.execute(install_statements().replace(named, "").encode())
    captured.execute("CREATE TABLE unnamed (id int PRIMARY KEY)", "ALTER TABLE unnamed ADD a int")
    assert alterations(captured, "unnamed") == []
    assert not is_installed(admin)
    ensure_trigger(admin)
    captured.execute("ALTER TABLE unnamed ADD b int")
    assert [tuple(each.columns) for each in alterations(captured, "unnamed")] == [(1, 2, 3)]


def test_error_for_a_role_without_the_key_names_the_grant(
    captured: Captured, admin: Connection, roles: Roles
) -> None:
    reader = roles.create("reader")
    with connect(captured.settings.address.with_parameters({"user": reader})) as connection:
        with pytest.raises(PrivilegeError) as refused:
            load_key(connection)
        admin.execute((refused.value.hint or "").encode())
        assert load_key(connection) == load_key(admin)
    admin.execute(f"DROP OWNED BY {reader}".encode())


def test_the_trigger_is_created_once_and_dropped_without_a_trace(
    captured: Captured, admin: Connection, roles: Roles
) -> None:
    ensure_trigger(admin)
    assert is_installed(admin)
    admin.execute("ALTER EVENT TRIGGER penstock_ddl_dropped DISABLE")
    assert not is_installed(admin)
    drop_trigger(admin)
    assert admin.execute("SELECT count(*) FROM pg_event_trigger").fetchone() == (0,)
    with psycopg.connect(captured.database.dsn, autocommit=True) as anyone:
        anyone.execute(install_statements().encode())
    assert is_installed(admin)
    drop_trigger(admin)
    with (
        connect(roles.address(roles.create("altering"))) as connection,
        pytest.raises(PrivilegeError) as refused,
    ):
        ensure_trigger(connection)
    assert refused.value.hint == install_statements()


def test_role_that_may_create_does_not_become_superuser_by_the_event_trigger(
    database: Database, roles: Roles
) -> None:
    """CREATE OR REPLACE keeps a function's owner, who may replace it again; every session's DDL runs it."""
    intruder = roles.create("intruder")
    database.execute(
        f"GRANT CREATE ON DATABASE {database.name} TO {intruder}; CREATE TABLE altered (id int PRIMARY KEY)"
    )
    function = (
        "CREATE OR REPLACE FUNCTION penstock_ddl.tell() RETURNS event_trigger LANGUAGE plpgsql "
        "AS $$ BEGIN {} END $$"
    )
    escalate = function.format(f"EXECUTE 'ALTER ROLE {intruder} SUPERUSER'; EXCEPTION WHEN OTHERS THEN NULL;")
    with connect(SourceAddress.parse(database.dsn)) as admin, connect(roles.address(intruder)) as session:
        session.execute("CREATE SCHEMA penstock_ddl")
        session.execute(function.format("").encode())
        with pytest.raises(UntrustedObjectError, match=f"of role {intruder}"):
            ensure_trigger(admin)
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match=intruder):
            admin.execute(install_statements().encode())
        assert not is_installed(admin)
        session.execute(escalate.encode())
        database.execute("ALTER TABLE altered ADD a int")
        assert database.query("SELECT rolsuper FROM pg_roles WHERE rolname = %s", intruder) == [(False,)]
        session.execute("DROP SCHEMA penstock_ddl CASCADE")
        ensure_trigger(admin)
        assert is_installed(admin)
        admin.execute(f"ALTER FUNCTION penstock_ddl.tell() OWNER TO {intruder}".encode())
        with pytest.raises(UntrustedObjectError, match="function tell of role"):
            ensure_trigger(admin)
        drop_trigger(admin)


@pytest.mark.parametrize(
    ("altered", "words"),
    [
        ("ALTER SCHEMA penstock_ddl OWNER TO {r}", "schema penstock_ddl of role"),
        ("ALTER FUNCTION penstock_ddl.tell() OWNER TO {r}", "function tell of role"),
        ("ALTER TABLE penstock_ddl.secret OWNER TO {r}", "table secret of role"),
    ],
    ids=["schema", "function", "table"],
)
def test_event_trigger_of_a_role_that_is_not_trusted_is_neither_installed_nor_used(
    database: Database, roles: Roles, altered: str, words: str
) -> None:
    intruder = roles.create("intruder")
    address = SourceAddress.parse(database.dsn)
    with connect(address) as admin, connect(address.trusting([intruder])) as trusting:
        ensure_trigger(admin)
        database.execute(f"GRANT ALL ON SCHEMA penstock_ddl TO {intruder}; {altered.format(r=intruder)}")
        for attempt in (ensure_trigger, load_key):
            with pytest.raises(UntrustedObjectError, match=words):
                attempt(admin)
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match=intruder):
            admin.execute(install_statements().encode())
        ensure_trigger(trusting)
        assert load_key(trusting) is not None
        trusting.execute(install_statements().encode())
        drop_trigger(admin)


def test_event_trigger_whose_function_lost_its_search_path_is_refused(database: Database) -> None:
    with connect(SourceAddress.parse(database.dsn)) as admin:
        ensure_trigger(admin)
        admin.execute("ALTER FUNCTION penstock_ddl.tell() RESET search_path")
        with pytest.raises(UntrustedObjectError, match="function tell without search_path"):
            ensure_trigger(admin)
        admin.execute(install_statements().encode())
        ensure_trigger(admin)
        drop_trigger(admin)


def test_secret_that_is_given_a_trigger_after_the_first_check_is_not_written(
    database: Database, roles: Roles
) -> None:
    """A sequence shows whether the trigger ran: its value is not rolled back."""
    intruder = roles.create("intruder")
    waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'pg_event_trigger'::regclass"
    with connect(SourceAddress.parse(database.dsn)) as admin, connect(roles.address(intruder)) as session:
        ensure_trigger(admin)
        database.execute(
            f"DROP EVENT TRIGGER penstock_ddl_dropped; GRANT CREATE ON DATABASE {database.name} TO {intruder}"
        )
        database.execute(
            f"GRANT USAGE ON SCHEMA penstock_ddl TO {intruder}; GRANT TRIGGER ON penstock_ddl.secret TO "
            f"{intruder}"
        )
        session.execute("CREATE SCHEMA planted; CREATE SEQUENCE planted.runs")
        session.execute(
            "CREATE FUNCTION planted.run() RETURNS trigger LANGUAGE plpgsql "
            "AS $$ BEGIN PERFORM nextval('planted.runs'); RETURN NEW; END $$"
        )
        with database.connect() as holder:
            holder.execute(
                "LOCK TABLE pg_event_trigger IN ACCESS EXCLUSIVE MODE"
            )  # which is read after the first check
            installing = Background(lambda: ensure_trigger(admin))
            wait_for(lambda: bool(database.query(waits)), "the installation to wait")
            session.execute(
                "CREATE TRIGGER late BEFORE INSERT "
                "ON penstock_ddl.secret FOR EACH ROW EXECUTE FUNCTION planted.run()"
            )
            holder.rollback()
        with pytest.raises(UntrustedObjectError, match="trigger late on table secret"):
            installing.result(20, "the installation")
        assert not is_installed(admin)
        assert database.query("SELECT is_called FROM planted.runs") == [(False,)]
        drop_trigger(admin)
