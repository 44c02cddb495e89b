"""Changes that a reference history refuses, and values that are equal although they are written
differently.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from penstock.change import EXACT, UNCHANGED, ChangeType
from penstock.contracts.reference import as_changes, as_truncate
from penstock.errors import ReferencePastError, ReferenceTableError
from penstock.reference.history import ReferenceHistory, RowPieces, family, key_values, row_schema

COLUMNS = pa.schema([pa.field("id", pa.int64()), pa.field("note", pa.string())])


def history_of(*ids: int | None) -> ReferenceHistory:
    history = ReferenceHistory(COLUMNS, ["id"], 5)
    history.load(pa.RecordBatch.from_pylist([{"id": key, "note": "x"} for key in ids], row_schema(COLUMNS)))
    return history


def test_a_time_before_the_floor_is_refused() -> None:
    history = history_of(1)
    assert history.find([(1,)], [5]).to_pylist() == [0]
    with pytest.raises(ReferencePastError):
        history.find([(1,)], [4])
    with pytest.raises(ReferencePastError):
        history.rows_at(4)


def test_two_rows_of_one_key_are_refused() -> None:
    with pytest.raises(ReferenceTableError, match="same id"):
        history_of(1, 2, 1)


def test_two_rows_of_one_key_in_one_version_are_refused() -> None:
    twice = pa.RecordBatch.from_pylist([{"id": key, "note": "y"} for key in (7, 8, 7)], COLUMNS)
    with pytest.raises(ReferenceTableError, match="same id"):
        history_of(1).apply(as_changes(twice, ChangeType.INSERT, 6))
    once = history_of(1)
    once.apply(as_changes(twice.slice(0, 2), ChangeType.INSERT, 6))
    once.apply(as_truncate(COLUMNS, 6, 2))
    once.apply(as_changes(twice.slice(1), ChangeType.INSERT, 6, 3))
    assert sorted(once.rows_at(6).column("id").to_pylist()) == [7, 8]


def test_row_without_key_is_refused() -> None:
    with pytest.raises(ReferenceTableError, match="no id"):
        history_of(1, None)


def test_values_that_stay_need_a_row_that_has_them() -> None:
    change = as_changes(
        pa.RecordBatch.from_pylist([{"id": 7, "note": None}], COLUMNS), ChangeType.UPDATE_POSTIMAGE, 6
    )
    change = change.set_column(
        change.schema.get_field_index(UNCHANGED), change.schema.field(UNCHANGED), pa.array([["note"]])
    )
    with pytest.raises(ReferenceTableError, match="that the reference table does not have"):
        history_of(1).apply(change)


def test_exact_text_of_a_value_that_stays_stays_too() -> None:
    history = ReferenceHistory(COLUMNS, ["id"], 5)
    history.load(
        pa.RecordBatch.from_pylist([{"id": 1, "note": None, EXACT: [("note", "1e999")]}], row_schema(COLUMNS))
    )
    change = as_changes(
        pa.RecordBatch.from_pylist([{"id": 1, "note": None}], COLUMNS), ChangeType.UPDATE_POSTIMAGE, 6
    )
    change = change.set_column(
        change.schema.get_field_index(UNCHANGED), change.schema.field(UNCHANGED), pa.array([["note"]])
    )
    history.apply(change)
    assert history.take(history.find([(1,)])).column(EXACT).to_pylist() == [[("note", "1e999")]]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (pa.array([1], pa.int32()), pa.array([1], pa.int64())),
        (pa.array([Decimal("1.00")]), pa.array([1], pa.int64())),
        (pa.array(["a"]), pa.array(["a"], pa.large_string())),
        (pa.array([math.nan]), pa.array([math.nan])),
        (pa.array([0.0]), pa.array([-0.0])),
        (
            pa.array([datetime(2024, 1, 1, tzinfo=UTC)], pa.timestamp("us", "UTC")),
            pa.array([datetime(2024, 1, 1, tzinfo=UTC)], pa.timestamp("us", "Europe/Berlin")),
        ),
        (pa.array([2**60], pa.timestamp("us")), pa.array([2**60], pa.timestamp("us"))),
    ],
    ids=lambda array: str(array.type),
)
def test_equal_values_have_equal_keys(ours: pa.Array, theirs: pa.Array) -> None:
    assert family(ours.type) == family(theirs.type)
    assert key_values([ours], ["k"]) == key_values([theirs], ["k"])
    assert len({*key_values([ours], ["k"]), *key_values([theirs], ["k"])}) == 1


def test_null_is_equal_to_nothing_and_exact_text_stands_for_its_value() -> None:
    exact = pa.array([None, [("a", "infinity")], [("other", "x")]], pa.map_(pa.string(), pa.string()))
    assert key_values([pa.array([1, None, None]), pa.array([1, 2, 3])], ["a", "b"], exact) == [
        (1, 1),
        ("infinity", 2),
        None,
    ]


@pytest.mark.parametrize(
    "arrow_type", [pa.list_(pa.int64()), pa.struct([("a", pa.int64())]), pa.map_(pa.string(), pa.string())]
)
def test_nested_values_cannot_be_looked_up(arrow_type: pa.DataType) -> None:
    assert family(arrow_type) is None


def test_rows_are_found_by_their_place_however_they_came() -> None:
    pieces = RowPieces(pa.schema([pa.field("n", pa.int64())]))
    count = 0
    for size in (1, 5, 0, 2, 100, 1, 1, 1, 3):
        assert pieces.add(pa.RecordBatch.from_arrays([pa.array(range(count, count + size))], ["n"])) == count
        count += size
    wanted = [113, None, 0, 7, 7, None, 108, 1]
    assert pieces.take(pa.array(wanted, pa.int64())).column("n").to_pylist() == wanted
    assert pieces.take(pa.array([], pa.int64())).num_rows == 0
    assert len(pieces) == count
