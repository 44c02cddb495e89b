"""Names that need quoting, and tables with similar names."""

from __future__ import annotations

import pytest

from penstock.change import METADATA_NAMES
from penstock.errors import TableWithoutKeyError, UnsupportedTableError
from penstock.postgres.catalog import (
    CatalogTable,
    check_mirrorable,
    inspect_keys,
    inspect_schema,
    inspect_tables,
)
from penstock.postgres.connection import connect
from penstock.schema import TableName, TableSchema
from tests.support.fix_captured import Captured, change

NAMES = {
    "quotes": 'a "quoted" name',
    "apostrophe": "it's",
    "dots": "a.b.c",
    "spaces": "  two  ends  ",
    "keyword": "select",
    "upper": "UPPER",
    "multibyte": "größe_日本語_" + "é" * 20,
    "longest": "é" * 31 + "x",
    "slashes": "a/b\\c",
    "wildcards": "a_b%c*d?[e]",
    "backticks": "`tick`",
    "digits": "1st",
    "newline": "two\nlines",
    "dollar": "$1 {0} %s",
}


def quoted(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def run(captured: Captured, statement: str) -> None:
    # Without arguments, psycopg leaves percent signs alone.
    captured.database.execute(statement)


def schema_now(captured: Captured, table: TableName) -> TableSchema:
    with connect(captured.settings.address) as connection:
        (found,) = [each for each in inspect_tables(connection) if each.name == table]
        return inspect_schema(connection, found)


@pytest.mark.parametrize("kind", NAMES)
def test_R15_every_name_of_schema_table_and_column_is_unchanged(captured: Captured, kind: str) -> None:
    name = NAMES[kind]
    table = TableName(name, name)
    path = f"{quoted(name)}.{quoted(name)}"
    run(captured, f"CREATE SCHEMA {quoted(name)}")
    run(captured, f"CREATE TABLE {path} ({quoted(name)} int PRIMARY KEY, note text)")
    run(captured, f"INSERT INTO {path} VALUES (1, 'x')")
    run(captured, f"UPDATE {path} SET {quoted(name)} = 2")
    assert captured.rows(table) == [
        {"_change_type": "insert", name: 1, "note": "x"},
        {"_change_type": "delete", name: 1, "note": None},
        {"_change_type": "insert", name: 2, "note": "x"},
    ]
    assert captured.schemas(table) == [schema_now(captured, table)]
    assert TableName.parse(str(table)) == table


def test_R15_a_table_without_columns_is_captured_and_cannot_be_mirrored(captured: Captured) -> None:
    captured.execute(
        "CREATE TABLE r15_zero ()",
        "INSERT INTO r15_zero DEFAULT VALUES",
        "INSERT INTO r15_zero DEFAULT VALUES",
        "TRUNCATE r15_zero",
    )
    assert captured.rows("r15_zero") == [change("insert"), change("insert"), change("truncate")]
    with pytest.raises(TableWithoutKeyError, match=r"public\.r15_zero"):
        check_mirrorable(schema_now(captured, TableName("public", "r15_zero")))
    with pytest.raises(UnsupportedTableError, match="no columns"):
        check_mirrorable(schema_now(captured, TableName("public", "r15_zero")), None)


def test_R15_columns_that_differ_only_in_case_are_captured_and_refused_by_a_mirror(
    captured: Captured,
) -> None:
    captured.execute(
        'CREATE TABLE r15_case (id int PRIMARY KEY, "Note" int, note int, "NOTE" int)',
        "INSERT INTO r15_case VALUES (1, 2, 3, 4)",
    )
    assert captured.rows("r15_case") == [change("insert", id=1, Note=2, note=3, NOTE=4)]
    with pytest.raises(UnsupportedTableError, match="'Note' and 'note'") as caught:
        check_mirrorable(schema_now(captured, TableName("public", "r15_case")))
    assert "rename one of them" in (caught.value.hint or "")


def test_R15_a_table_with_columns_named_like_ours_is_refused_by_a_mirror_and_others_continue(
    captured: Captured,
) -> None:
    columns = ", ".join(f"{name} text" for name in sorted(METADATA_NAMES))
    captured.execute(
        f"CREATE TABLE r15_ours (id int PRIMARY KEY, {columns})",
        "CREATE TABLE r15_beside (id int PRIMARY KEY)",
        "INSERT INTO r15_ours VALUES (1)",
        "INSERT INTO r15_beside VALUES (1)",
    )
    assert captured.rows("r15_beside") == [change("insert", id=1)]
    assert sum(each.file.rows for each in captured.slices("r15_ours")) == 1
    with pytest.raises(UnsupportedTableError, match="reserve"):
        check_mirrorable(schema_now(captured, TableName("public", "r15_ours")))


def test_R15_tables_that_differ_only_in_case_are_two_tables(captured: Captured) -> None:
    captured.execute(
        'CREATE TABLE "R15_Twins" (id int PRIMARY KEY)',
        "CREATE TABLE r15_twins (id int PRIMARY KEY)",
        'INSERT INTO "R15_Twins" VALUES (1)',
        "INSERT INTO r15_twins VALUES (2)",
    )
    assert captured.rows("R15_Twins") == [change("insert", id=1)]
    assert captured.rows("r15_twins") == [change("insert", id=2)]


def test_R17_names_that_match_each_other_as_patterns_are_not_mixed_up(captured: Captured) -> None:
    names = ["r17_a", "r17xa", "r17%", "r17\\_a", "r17\\"]
    for number, name in enumerate(names):
        run(captured, f"CREATE TABLE {quoted(name)} (id int, k{number} int PRIMARY KEY)")
        run(captured, f"ALTER TABLE {quoted(name)} REPLICA IDENTITY FULL")
        run(captured, f"INSERT INTO {quoted(name)} VALUES ({number}, {number})")
    assert [captured.rows(name) for name in names] == [
        [{"_change_type": "insert", "id": number, f"k{number}": number}] for number in range(len(names))
    ]
    with connect(captured.settings.address) as connection:
        tables = {each.name.name: each for each in inspect_tables(connection) if each.name.name in names}
        keys = inspect_keys(connection, [table.oid for table in tables.values()])
        assert sorted(tables) == sorted(names)
        for number, name in enumerate(names):
            assert keys[tables[name].oid].columns == (f"k{number}",)
            assert inspect_schema(
                connection, CatalogTable(tables[name].oid, tables[name].name)
            ).column_names == ("id", f"k{number}")
