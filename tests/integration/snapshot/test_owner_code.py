"""Functions of a table's owner are not run by the role that reads the table, where Postgres leaves a
choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
import pyarrow as pa
import pytest

from penstock.errors import PenstockError, TableRewrittenError
from penstock.postgres import chunks
from penstock.postgres.catalog import CatalogTable, inspect_schema, inspect_tables
from penstock.postgres.chunks import Chunk, has_older_row, plan_chunks, read_chunk
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.consistent_read import hold_consistent_read
from penstock.postgres.polled_tables import (
    PolledTable,
    Window,
    check_cursor,
    inspect_cursors,
    inspect_highest,
    read_window,
)
from penstock.postgres.rows_by_key import KeyBatch, read_keys
from penstock.postgres.snapshot_export import inspect_outline
from penstock.schema import TableName
from tests.support.fix_postgres import Database
from tests.support.fix_roles import Roles

SPY = """
CREATE FUNCTION own.spy(text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS
    $$BEGIN IF current_user LIKE 'reader%' THEN RAISE EXCEPTION 'run by the reader'; END IF; RETURN $1; END$$;
"""
VIEW = """
ALTER TABLE own.t RENAME TO kept;
CREATE VIEW own.t AS SELECT id, own.spy(v) AS v, kept.ctid, kept.xmin, kept.tableoid FROM own.kept;
GRANT SELECT ON own.t TO PUBLIC
"""


@dataclass
class Owned:
    """A schema `own` of one role, whose tables another one reads."""

    owner: SourceAddress
    reader: SourceAddress

    def do(self, *statements: str) -> None:
        with psycopg.connect(self.owner.conninfo("owner"), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def table(self, name: str) -> CatalogTable:
        with connect(self.reader) as connection:
            return next(table for table in inspect_tables(connection) if table.name == TableName("own", name))

    def chunk(self, name: str) -> Chunk:
        table = self.table(name)
        with connect(self.reader) as connection:
            return plan_chunks(connection, table, inspect_schema(connection, table), 1 << 30, None)[0]


@pytest.fixture
def owned(database: Database, roles: Roles) -> Owned:
    owner, reader = roles.create("owner"), roles.create("reader")
    database.execute(f"CREATE SCHEMA own AUTHORIZATION {owner}; GRANT USAGE ON SCHEMA own TO {reader}")
    database.execute(
        f"ALTER DEFAULT PRIVILEGES FOR ROLE {owner} IN SCHEMA own GRANT SELECT ON TABLES TO {reader}"
    )
    made = Owned(roles.address(owner), roles.address(reader))
    made.do(SPY, "CREATE TABLE own.t (id int PRIMARY KEY, v text)", "INSERT INTO own.t VALUES (1, 'one')")
    return made


def read_chunks(owned: Owned, chunk: Chunk) -> None:
    for _ in read_chunk(owned.reader, None, chunk):
        pass


@pytest.mark.versions(14, 17)
def test_a_view_in_the_place_of_a_table_is_not_read_as_its_chunk(owned: Owned) -> None:
    chunk = owned.chunk("t")
    read_chunks(owned, chunk)
    owned.do(VIEW)
    with pytest.raises(TableRewrittenError, match="renamed or replaced"):
        read_chunks(owned, chunk)


def test_a_view_in_the_place_of_a_table_is_not_read_by_key_nor_as_a_partition(
    owned: Owned, database: Database
) -> None:
    table = owned.table("t")
    with connect(owned.reader) as connection:
        outline = inspect_outline(connection, table).outline
    one = KeyBatch((pa.array(["1"]),), (pa.array([None], pa.string()),))
    assert sum(batch.num_rows for batch in read_keys(owned.reader, None, outline, [one])) == 1
    owned.do(VIEW)
    with pytest.raises(TableRewrittenError, match="renamed or replaced"):
        list(read_keys(owned.reader, None, outline, [one]))
    owned.do(
        "ALTER TABLE own.kept RENAME TO other", "ALTER VIEW own.t RENAME TO kept"
    )  # as between two catalog reads
    with connect(owned.reader) as connection:
        connection.execute("SELECT 1")
        assert has_older_row(connection, table.oid, table.oid, 1 << 40) in (None, False)


def test_a_view_created_after_the_lock_is_refused_by_the_server(
    owned: Owned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of the schema can rename it without a lock on the table."""
    chunk = owned.chunk("t")
    owned.do(VIEW)
    monkeypatch.setattr(chunks, "lock_table", lambda *_, **__: None)
    with pytest.raises(PenstockError, match="non-system view"):
        read_chunks(owned, chunk)


@pytest.fixture
def typed(owned: Owned) -> Owned:
    owned.do(
        "CREATE TYPE own.mood AS ENUM ('bad', 'good')",
        "CREATE DOMAIN own.code AS text CHECK (own.spy(VALUE) <> '')",
        "CREATE DOMAIN own.deep AS own.code CHECK (own.spy(VALUE) <> 'no')",
        "CREATE TABLE own.k (m own.mood, d own.deep, v text, c own.code NOT NULL, PRIMARY KEY (m, d))",
        "INSERT INTO own.k VALUES ('good', 'x', 'found', 'x'), ('bad', 'x', 'not asked for', 'x')",
        "CREATE FUNCTION own.to_mood(text) RETURNS own.mood LANGUAGE plpgsql "
        "AS $$BEGIN PERFORM own.spy($1); RETURN 'bad'; END$$",
        "CREATE FUNCTION own.to_text(own.mood) RETURNS text LANGUAGE plpgsql "
        "AS $$BEGIN RETURN own.spy('good'); END$$",
        "CREATE CAST (text AS own.mood) WITH FUNCTION own.to_mood(text)",
        "CREATE CAST (own.mood AS text) WITH FUNCTION own.to_text(own.mood)",
    )
    return owned


def test_rows_are_read_by_key_without_casts_and_checks_of_the_types_owner(typed: Owned) -> None:
    with connect(typed.reader) as connection:
        outline = inspect_outline(connection, typed.table("k")).outline
    keys = KeyBatch(
        (pa.array(["good"]), pa.array(["x"])), (pa.array([None], pa.string()), pa.array([None], pa.string()))
    )
    (row,) = [row for batch in read_keys(typed.reader, None, outline, [keys]) for row in batch.to_pylist()]
    assert row["v"] == "found"


@pytest.mark.versions(14, 18)
@pytest.mark.parametrize(
    ("type_name", "key"),
    [("own.pair", "(1,x)"), ("own.span", "[x,y)"), ("own.spans", "{[x,y)}"), ("own.wrapped", "(1,x)")],
)
def test_rows_are_read_by_key_without_checks_of_domains_inside_of_their_types(
    typed: Owned, type_name: str, key: str
) -> None:
    typed.do(
        "CREATE TYPE own.pair AS (n int, c own.code)",
        "CREATE TYPE own.span AS RANGE (subtype = own.code, multirange_type_name = own.spans)",
        "CREATE DOMAIN own.wrapped AS own.pair",
        f"CREATE TABLE own.n (k {type_name} PRIMARY KEY, v text)",
        f"INSERT INTO own.n VALUES ('{key}', 'found')",
    )
    with connect(typed.reader) as connection:
        outline = inspect_outline(connection, typed.table("n")).outline
    keys = KeyBatch((pa.array([key, "other"]),), (pa.array([None, None], pa.string()),))
    assert [
        row["v"] for batch in read_keys(typed.reader, None, outline, [keys]) for row in batch.to_pylist()
    ] == ["found"]


def test_a_table_is_polled_without_checks_of_the_types_owner(typed: Owned) -> None:
    table = typed.table("k")
    with connect(typed.reader) as connection:
        cursor = check_cursor(table.name, "c", inspect_cursors(connection, [table.oid]).get((table.oid, "c")))
        polled = PolledTable(inspect_schema(connection, table), False, cursor)
        with hold_consistent_read(connection, [table.name]) as moment:
            assert inspect_highest(connection, polled) == "x"
            window = Window(low="x")
            assert (
                sum(len(block.versions) for block in read_window(connection, polled, window, window, moment))
                == 2
            )
