"""Changed `types:` settings: a target never holds two representations of one column."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from penstock.cli.table_commands import order
from penstock.errors import SchemaChangedError
from penstock.pipeline.checks.check import check_pipeline
from penstock.pipeline.table_states import TableState
from penstock.schema import TableName
from tests.support.fix_pipeline import MirrorFactory
from tests.support.fix_postgres import Database
from tests.support.pipeline.altering import Telling
from tests.support.pipeline.running import running
from tests.support.types.every_type import create_every, insert_every
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.mark.parametrize("sink", ["delta", "iceberg"])
def test_a_table_is_resynced_when_its_column_type_in_the_target_changes(
    database: Database, mirror_into: MirrorFactory, sink: str
) -> None:
    database.execute(
        "CREATE TABLE prices (id int PRIMARY KEY, amount numeric); INSERT INTO prices VALUES (1, 1.50)"
    )
    database.execute("CREATE TABLE names (id int PRIMARY KEY, name text); INSERT INTO names VALUES (1, 'a')")
    mirror_into(sink, types={"numeric": "string"}).run_once()
    database.execute("INSERT INTO prices VALUES (2, 2.50)")
    lake = mirror_into(sink, types={"numeric": "decimal(20,4)"})
    result = lake.run_once()
    assert not result.failed, result.failed
    lake.assert_equal("public.names", "public.prices")
    assert {str(row.amount) for row in lake.rows("public.prices")} == {"1.5000", "2.5000"}


def test_values_that_fit_only_the_wider_type_are_read_again(
    database: Database, mirror: MirrorFactory
) -> None:
    """The target has null for them, and their exact text; as keys, later changes would not find them."""
    database.execute(
        "CREATE TABLE wide (id numeric PRIMARY KEY, v numeric); "
        "INSERT INTO wide VALUES (12345678901234567890, 1), (1, 12345678901234567890)"
    )
    mirror(types={"numeric": "decimal(20,4)"}).run_once()
    database.execute("UPDATE wide SET v = 2 WHERE id > 1")
    lake = mirror(types={"numeric": "decimal(38,4)"})
    assert not lake.run_once().failed
    lake.assert_equal("public.wide")
    assert {(row.id, row.v) for row in lake.rows("public.wide")} == {
        (Decimal("12345678901234567890"), 2),
        (1, Decimal("12345678901234567890")),
    }


def test_hashes_and_casts_of_a_column_that_is_read_otherwise_are_made_again(
    database: Database, mirror: MirrorFactory
) -> None:
    """The columns of the target keep their type; their values do not."""
    database.execute("CREATE TABLE prices (id int PRIMARY KEY, amount numeric)")
    database.execute("INSERT INTO prices VALUES (1, 1.50)")
    rule = {"table": "public.prices", "columns": {"cast": {"amount": "string"}}}
    mirror(tables=[rule], types={"numeric": "decimal(20,4)"}).run_once()
    lake = mirror(tables=[rule], types={"numeric": "string"})
    assert not lake.run_once().failed
    assert [row.amount for row in lake.rows("public.prices")] == ["1.50"]


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"types": {"numeric": "decimal(20,4)"}}, "types:"),
        (
            {"tables": [{"match": "public.*", "columns": {"drop": ["note"]}}]},
            "columns:, where:, sql: or hash_key:",
        ),
    ],
)
def test_a_changed_setting_that_would_discard_history_stops_the_run_before_its_first_row(
    database: Database, mirror: MirrorFactory, changes: dict[str, Any], setting: str
) -> None:
    database.execute("CREATE TABLE prices (id int PRIMARY KEY, amount numeric, note text)")
    database.execute("INSERT INTO prices VALUES (1, 1.50, 'a')")
    given = {"mode": "history", "types": {"numeric": "string"}}
    mirror(**given).run_once()
    database.execute("INSERT INTO prices VALUES (2, 2.50, 'b')")
    altered = mirror(**{**given, **changes})
    assert [each.code for each in check_pipeline(altered.path).problems] == ["PEN-1403"]
    with pytest.raises(SchemaChangedError, match=setting) as raised:
        altered.run_once()
    assert "penstock tables resync CONFIG public.prices" in (raised.value.hint or "")
    same = mirror(**given)
    assert not same.run_once().failed
    assert {(row.id, row.amount) for row in same.rows("public.prices")} == {(1, "1.50"), (2, "2.50")}
    ordered = mirror(**{**given, **changes})
    order(ordered.path, ["public.prices"], "resync")
    assert not ordered.run_once().failed
    assert ordered.open_sink().read(TableName("public", "prices")).count() == 2


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "history", "tables": [{"match": "public.*", "into": "public.prices"}]},
        {"sink": {"parquet": {"path": "lake"}}, "mode": "append"},
    ],
    ids=["routed", "parquet"],
)
def test_another_type_stops_the_run_where_columns_have_no_numbers(
    database: Database, mirror: MirrorFactory, given: dict[str, Any]
) -> None:
    database.execute("CREATE TABLE prices (id int PRIMARY KEY, amount numeric)")
    database.execute("INSERT INTO prices VALUES (1, 1.50)")
    mirror(**given, types={"numeric": "string"}).run_once()
    database.execute("INSERT INTO prices VALUES (2, 2.50)")
    with pytest.raises(SchemaChangedError, match=r"types: of table public\.prices changed"):
        mirror(**given, types={"numeric": "decimal(20,4)"}).run_once()
    same = mirror(**given, types={"numeric": "string"})
    assert not same.run_once().failed
    assert {row.amount for row in same.rows("public.prices")} == {"1.50", "2.50"}


def test_a_reloaded_rule_that_would_discard_history_is_not_applied(
    database: Database, mirror: MirrorFactory
) -> None:
    database.execute(
        "CREATE TABLE prices (id int PRIMARY KEY, note text); INSERT INTO prices VALUES (1, 'a')"
    )
    made = mirror(mode="history")
    observer = Telling()
    with running(made, observer) as run:
        run.wait_for_state("public.prices", TableState.STREAMING)
        mirror(mode="history", tables=[{"match": "public.*", "columns": {"drop": ["note"]}}])
        wait_for(lambda: any("is not applied" in each for each in observer.results), "announcement")
        database.execute("INSERT INTO prices VALUES (2, 'b')")
        run.wait_for_rows("public.prices", 2)
    assert {row.note for row in made.rows("public.prices")} == {"a", "b"}


@pytest.mark.parametrize("sink", ["delta", "iceberg", "postgres"])
def test_a_restart_with_the_same_types_resyncs_nothing(
    database: Database, mirror_into: MirrorFactory, sink: str
) -> None:
    create_every(database)
    insert_every(database, 1)
    lake = mirror_into(sink)
    copies = []
    for first in (5, 9):
        assert not lake.run_once().failed
        copies.append(lake.open_sink().load_target(TableName("public", "every")))
        insert_every(database, first)
    before, after = copies
    assert before is not None
    assert after is not None
    assert before.copy is not None
    assert (after.copy, after.schema) == (before.copy, before.schema)
