"""Altered types whose stored values get another text: the catalog evidence, and which tables are resynced."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pipeline.schema_changes.catalog_changes import (
    AlteredTypes,
    TypeWatch,
    inspect_table_types,
    remember_types,
)
from penstock.postgres.catalog import CatalogTable, inspect_schemas
from penstock.postgres.connection import SourceAddress, connect
from penstock.schema import TableName, TableSchema, joined_schema
from tests.support.fix_postgres import Database

NAME = TableName("public", "t")
COLUMNS = ("plain", "e", "d", "l", "p", "pl", "r", "m", "o")
RENAME = "ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'"


@pytest.fixture
def table(database: Database) -> Database:
    database.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'ok'); CREATE DOMAIN feeling AS mood; "
        "CREATE TYPE pair AS (a int, f feeling);"
        "CREATE TYPE span AS RANGE (subtype = mood, multirange_type_name = spans); "
        "CREATE TABLE other (x int, y int);"
        "CREATE TABLE t (id int PRIMARY KEY, plain text, e mood, d feeling, l mood[], p pair, pl pair[], "
        "r span, m spans, o other);"
        """INSERT INTO t VALUES (1, 'sad', 'sad', 'sad', '{sad}', '(1,sad)', '{"(1,sad)"}', '[sad,ok]',
        '{[sad,ok]}', '(1,2)')"""
    )
    return database


def _schema(database: Database, *names: str) -> dict[TableName, TableSchema]:
    tables = [
        CatalogTable(database.query("SELECT %s::regclass::oid::int8", name)[0][0], TableName("public", name))
        for name in names
    ]
    with connect(SourceAddress.parse(database.dsn)) as connection:
        return inspect_schemas(connection, tables)


def _texts(database: Database) -> dict[str, str]:
    (row,) = database.query(f"SELECT {', '.join(f'{name}::text' for name in COLUMNS)} FROM t")
    return dict(zip(COLUMNS, row, strict=True))


@pytest.mark.versions(14, 18)
@pytest.mark.parametrize(
    "statement",
    [
        RENAME,
        "ALTER TYPE mood ADD VALUE 'glad'",
        "ALTER TYPE mood ADD VALUE 'awful' BEFORE 'sad'",
        "ALTER TYPE mood RENAME TO temper",
        "ALTER TYPE pair ADD ATTRIBUTE c text",
        "ALTER TYPE pair DROP ATTRIBUTE a",
        "ALTER TYPE pair RENAME ATTRIBUTE a TO z",
        "ALTER DOMAIN feeling SET DEFAULT 'ok'",
        "ALTER TABLE other ADD z int",
        "ALTER TABLE other DROP x",
        "ALTER TABLE other RENAME x TO z",
    ],
)
def test_a_column_counts_as_altered_just_if_the_text_of_its_stored_values_is_another(
    table: Database, statement: str
) -> None:
    before = _texts(table)
    schemas = _schema(table, "t")
    with connect(SourceAddress.parse(table.dsn)) as connection:
        known = inspect_table_types(connection, schemas)[NAME].signatures
        table.execute(statement)
        found = inspect_table_types(connection, schemas)[NAME].altered(known)
    after = _texts(table)
    assert (() if found is None else found.columns) == tuple(
        name for name in COLUMNS if before[name] != after[name]
    )


class Watched:
    """A table that was inspected once."""

    def __init__(self, database: Database, state: Path) -> None:
        self.database, self.state = database, state
        self.auto_resync = True
        self.restart()
        assert self.find_altered() is None

    def restart(self) -> None:
        self.watch = TypeWatch(self.state, lambda _, __: self.auto_resync)

    def find_altered(self, *, is_applied: bool = True, is_resynced: bool = False) -> AlteredTypes | None:
        schemas = _schema(self.database, "t")
        with connect(SourceAddress.parse(self.database.dsn)) as connection:
            found = self.watch.find_altered(
                connection,
                schemas,
                [NAME] if is_applied and not is_resynced else [],
                [NAME] if is_resynced else [],
            )
        return found.get(NAME)


@pytest.fixture
def watched(table: Database, tmp_path: Path) -> Watched:
    return Watched(table, tmp_path)


def test_an_altered_type_is_noticed_until_its_table_is_resynced(watched: Watched) -> None:
    watched.database.execute(RENAME)
    for _ in range(2):
        watched.restart()
        found = watched.find_altered()
        assert found is not None
        assert not found.is_key
        assert watched.watch.open == frozenset({NAME})
    assert watched.find_altered(is_resynced=True) is None
    assert watched.watch.open == frozenset()
    assert watched.find_altered() is None


def test_a_type_that_is_altered_while_its_table_is_resynced_is_noticed_afterwards(watched: Watched) -> None:
    watched.find_altered(is_resynced=True)
    watched.database.execute(RENAME)
    watched.find_altered(is_resynced=True)
    assert watched.find_altered() is not None


def test_a_type_that_is_altered_while_its_table_is_not_applied_is_noticed_afterwards(
    watched: Watched,
) -> None:
    watched.find_altered(is_applied=False)
    watched.database.execute(RENAME)
    watched.restart()
    watched.find_altered(is_applied=False)
    assert watched.find_altered() is not None


def test_a_type_that_is_altered_during_the_first_copy_is_noticed(table: Database, tmp_path: Path) -> None:
    with connect(SourceAddress.parse(table.dsn)) as connection:
        remember_types(connection, tmp_path, _schema(table, "t"))
        table.execute(RENAME)
        remember_types(connection, tmp_path, _schema(table, "t"))
    watch = TypeWatch(tmp_path, lambda _, __: True)
    with connect(SourceAddress.parse(table.dsn)) as connection:
        assert watch.find_altered(connection, _schema(table, "t"), [NAME], []).keys() == {NAME}


def test_a_table_that_is_not_resynced_automatically_is_reported_once(watched: Watched) -> None:
    watched.auto_resync = False
    watched.database.execute(RENAME)
    assert watched.find_altered() is not None
    assert watched.watch.open == frozenset()
    assert watched.find_altered() is None


def test_a_state_without_definitions_takes_those_of_the_first_look(watched: Watched) -> None:
    (watched.state / "types.json").unlink()
    watched.database.execute(RENAME)
    assert watched.find_altered() is None
    watched.database.execute("ALTER TYPE mood RENAME VALUE 'blue' TO 'sad'")
    assert watched.find_altered() is not None


def test_a_type_of_one_member_concerns_the_table_that_it_is_routed_into(
    database: Database, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        database.execute(
            f"CREATE TYPE mood_{name} AS ENUM ('sad'); CREATE TABLE {name} (k mood_{name} PRIMARY KEY)"
        )
    members = list(_schema(database, "one", "two").values())
    schemas = {NAME: joined_schema(NAME, "source", members)}
    watch = TypeWatch(tmp_path, lambda _, __: True)
    with connect(SourceAddress.parse(database.dsn)) as connection:
        assert watch.find_altered(connection, schemas, [NAME], []) == {}
        database.execute("ALTER TYPE mood_two RENAME VALUE 'sad' TO 'blue'")
        assert watch.find_altered(connection, schemas, [NAME], []) == {
            NAME: AlteredTypes(("k",), is_key=True)
        }
