"""The SQL of a poll, and the part of its result that the mark stores."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from penstock.capture.polling.tables import PollingState, TableState
from penstock.errors import SpoolCorruptError, UnsupportedTableError
from penstock.position import Position
from penstock.postgres.consistent_read import ConsistentRead
from penstock.postgres.polled_tables import (
    EVERYTHING,
    CursorColumn,
    PolledTable,
    Window,
    check_cursor,
    window_condition,
)
from penstock.schema import Column, TableName, TableSchema

SCHEMA = TableSchema(1, TableName("public", "t"), (Column("id", pa.int64(), 20),), ("id",))
BY_XMIN = PolledTable(SCHEMA, is_partitioned=False)
BY_COLUMN = PolledTable(SCHEMA, False, CursorColumn("changed at", "timestamp with time zone"))


def asked(table: PolledTable, window: Window, xmax: int = 1_000) -> str:
    moment = ConsistentRead(Position.of(1), xmax, xmax, datetime.now(UTC))
    return window_condition(table, window, moment).as_string(None)


def test_rows_are_selected_by_the_age_of_their_transaction() -> None:
    assert asked(BY_XMIN, Window(horizon=990)) == "age(t.xmin) BETWEEN 0 AND age('990'::xid)"
    assert asked(BY_XMIN, EVERYTHING) == "true"


def test_transaction_ids_of_later_epochs_are_selected_by_the_bits_that_rows_store() -> None:
    horizon = (3 << 32) + 17
    assert (
        asked(BY_XMIN, Window(horizon=horizon), xmax=horizon + 5)
        == "age(t.xmin) BETWEEN 0 AND age('17'::xid)"
    )


@pytest.mark.parametrize("distance", [1 << 31, 1 << 40, -1])
def test_indistinguishable_rows_select_everything(distance: int) -> None:
    assert asked(BY_XMIN, Window(horizon=1_000), xmax=1_000 + distance) == "true"


def test_column_is_selected_from_a_value_on_and_for_a_while_by_transaction_too() -> None:
    low = Window("2026-01-01 00:00:00+00")
    column = "t.\"changed at\" >= CAST('2026-01-01 00:00:00+00' AS timestamp with time zone)"
    assert asked(BY_COLUMN, low) == column
    assert (
        asked(BY_COLUMN, Window(low.low, 990)) == f"({column} OR age(t.xmin) BETWEEN 0 AND age('990'::xid))"
    )
    assert asked(BY_COLUMN, Window(None, 990)) == "true"


def test_columns_that_would_miss_rows_are_refused() -> None:
    assert check_cursor(SCHEMA.name, "v", ("bigint", True, True)) == CursorColumn("v", "bigint")
    with pytest.raises(UnsupportedTableError, match="has no column"):
        check_cursor(SCHEMA.name, "v", None)
    with pytest.raises(UnsupportedTableError, match="no order"):
        check_cursor(SCHEMA.name, "v", ("json", True, False))
    with pytest.raises(UnsupportedTableError, match="may be NULL") as refused:
        check_cursor(SCHEMA.name, "v", ("bigint", False, True))
    assert refused.value.hint == 'ALTER TABLE "public"."t" ALTER "v" SET NOT NULL;'


def test_state_survives_the_way_through_a_mark() -> None:
    known = TableState("xmin", Window(horizon=1 << 40), pa.array(["1(0,1):5"], pa.string()), Position.of(7))
    many = TableState("v bigint", Window("5", 3), pa.array([str(each) for each in range(2_000)], pa.string()))
    found = PollingState.parse(PollingState("1/1", Position.of(9), {1: known, 2: many}).to_text())
    assert (found.system, found.reached) == ("1/1", Position.of(9))
    assert (found.tables[1].how, found.tables[1].window, found.tables[1].keys) == (
        "xmin",
        known.window,
        Position.of(7),
    )
    assert found.tables[1].seen.to_pylist() == ["1(0,1):5"]
    assert found.tables[2].window == Window("5", 3)
    assert len(found.tables[2].seen) == 1_000, "of too many, the rest is read next; none is missed"
    with pytest.raises(SpoolCorruptError):
        PollingState.parse("{}")
