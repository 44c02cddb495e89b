"""Which tables of a real source are routed into one target, and the errors for tables that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.table_commands import order, print_tables
from penstock.config.model import load_config
from penstock.errors import NoTablesError
from penstock.pipeline.table_overrides import load_overrides
from penstock.pipeline.table_selection import Selection, select_tables
from penstock.postgres.connection import SourceAddress, connect
from penstock.schema import TableName
from tests.support.fix_postgres import Database

INTO = TableName("lake", "orders")


@pytest.fixture
def path(database: Database, tmp_path: Path) -> Path:
    for number in (1, 2, 3):
        database.execute(f"CREATE SCHEMA s{number}; CREATE TYPE s{number}.mood AS ENUM ('fine')")
        database.execute(
            f"CREATE TABLE s{number}.orders (id int PRIMARY KEY, at s{number}.mood, v varchar(9))"
        )
    database.execute("CREATE TABLE plain (id int PRIMARY KEY)")
    return _write(tmp_path, database, [{"match": "s*.orders", "into": "lake.orders"}, "public.plain"])


def _write(tmp_path: Path, database: Database, rules: list[Any]) -> Path:
    document = {
        "pipeline": "p",
        "source": {"dsn": database.dsn},
        "tables": rules,
        "sink": {"delta": {"path": "lake"}},
    }
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return tmp_path / "p.yaml"


def _selected(path: Path) -> Selection:
    config = load_config(path)
    with connect(SourceAddress.parse(config.source.dsn)) as connection:
        return select_tables(connection, config)


def test_members_are_found_by_their_rule_and_are_no_tables_by_themselves(
    path: Path, database: Database
) -> None:
    selection = _selected(path)
    assert selection.refused == {}
    assert selection.tables.keys() == {INTO, TableName("public", "plain")}
    assert [str(source.name) for source in selection.tables[INTO].sources] == [
        "s1.orders",
        "s2.orders",
        "s3.orders",
    ]
    schema = selection.schemas[INTO]
    assert (schema.column_names, schema.key) == (("id", "at", "v", "_source"), ("id", "_source"))

    before = schema.oid
    database.execute(
        "CLUSTER s1.orders USING orders_pkey; TRUNCATE s2.orders; "
        "ALTER TABLE s3.orders ALTER v SET DEFAULT 'x'"
    )
    assert _selected(path).schemas[INTO].oid == before, "none of that changes its members"
    database.execute("ALTER TABLE s1.orders DROP v, ADD v varchar(9)")
    assert _selected(path).schemas[INTO].oid != before, "a recreated column has other values"


def test_a_named_but_missing_member_is_reported(tmp_path: Path, path: Path, database: Database) -> None:
    rules = [{"match": "s*.orders", "into": "lake.orders"}, {"table": "s9.orders", "into": "lake.orders"}]
    selection = _selected(_write(tmp_path, database, rules))
    assert selection.tables == {}
    assert (
        "s9.orders, which is routed into lake.orders, cannot be mirrored" in selection.refused[INTO].message
    )


def test_a_column_of_a_mode_cannot_be_the_source_column(
    tmp_path: Path, path: Path, database: Database
) -> None:
    rules = [
        {"match": "s*.orders", "into": "lake.orders", "source_column": "_Deleted", "mode": "soft_delete"}
    ]
    selection = _selected(_write(tmp_path, database, rules))
    assert "which the mode soft_delete adds" in selection.refused[INTO].message
    rules = [{"match": "s*.orders", "into": "lake.orders", "source_column": "_exact"}]
    assert "'_exact'" in _selected(_write(tmp_path, database, rules)).refused[INTO].message


def test_orders_are_about_the_table_that_others_go_into(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order(path, ["lake.orders"], "pause")
    assert load_overrides(load_config(path).state).paused == {INTO}
    with pytest.raises(NoTablesError, match=r"s1\.orders is routed into lake\.orders") as raised:
        order(path, ["s1.orders"], "resync")
    assert raised.value.hint == "use lake.orders instead"
    order(path, ["s3.orders"], "remove")
    assert [str(source.name) for source in _selected(path).tables[INTO].sources] == ["s1.orders", "s2.orders"]
    capsys.readouterr()
    print_tables(path, as_json=True)
    shown = {each["table"]: each for each in json.loads(capsys.readouterr().out)}
    assert shown["lake.orders"] == {
        "table": "lake.orders",
        "state": "pending",
        "ordered": ["paused"],
        "members": ["s1.orders", "s2.orders"],
    }
    assert "members" not in shown["public.plain"]
    order(path, ["lake.orders"], "remove")
    assert _selected(path).tables.keys() == {TableName("public", "plain")}
    order(path, ["lake.orders"], "add")
    assert INTO in _selected(path).tables


def test_S13_routed_tables_are_neither_transformed_silently_nor_left_untransformed(
    tmp_path: Path, path: Path, database: Database
) -> None:
    """Whichever rule sets it: a column that a rule drops must not be in the target."""
    for first, second in (({}, {"columns": {"drop": ["v"]}}), ({"columns": {"drop": ["v"]}}, {})):
        rules = [{"match": "s*.*", **first}, {"match": "s*.orders", "into": "lake.orders", **second}]
        selection = _selected(_write(tmp_path, database, rules))
        assert selection.tables == {}
        assert (
            "a rule transforms its columns or rows; these cannot be combined"
            in selection.refused[INTO].message
        )


def test_differing_members_exist_and_a_table_without_members_is_gone(path: Path, database: Database) -> None:
    assert _selected(path).knows(INTO)
    database.execute("ALTER TABLE s2.orders ADD more int")
    assert INTO not in _selected(path).tables
    assert _selected(path).knows(INTO), "it is not dropped because its members differ"
    database.execute("DROP TABLE s1.orders, s2.orders, s3.orders")
    assert not _selected(path).knows(INTO)
