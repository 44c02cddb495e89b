"""Edge cases of rows and sinks in Delta, each by its code."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from penstock.errors import ValuesMissingError
from penstock.position import Position
from penstock.schema import Column, TableName, TableSchema
from tests.support.sinks.items import ITEMS, at, item
from tests.support.sinks.mirror import Mirror
from tests.support.sinks.source import NULL, Source, Value

COMPOSITE = TableSchema(
    16402,
    TableName("public", "composite"),
    (Column("note", pa.string(), 25), Column("a", pa.int64(), 20), Column("b", pa.string(), 25)),
    ("a", "b"),
)


@pytest.fixture
def items(spark: SparkSession, tmp_path: Path) -> Mirror:
    """Rows 1 to 9. Each `note` is its own, and each `size` too large for its column."""
    return Mirror(
        spark,
        tmp_path,
        Source(ITEMS, [item(key, f"note {key}", Value(None, f"{key}e90")) for key in range(1, 10)]),
    )


def test_k01_an_epoch_applied_twice_or_an_older_one_changes_nothing(items: Mirror) -> None:
    source = items.source
    start = items.target()
    source.insert(item(20))
    appended = source.commit()
    items.follow()
    source.update(at(20), {"note": Value("second")})
    source.delete(at(1))
    merged = source.commit()
    items.follow()
    commits = len(items.commits())
    # Apply with the initial target, like a caller that did not get the reply.
    for first, end in [(source.fence, appended), (appended, merged)]:
        changes = items.changes(first, end)
        assert changes is not None
        items.sink.apply(start, changes, Position.of(end))
    assert len(items.commits()) == commits
    assert items.rows() == source.sorted_rows()
    # The same changes in an epoch that ends further on: only the position moves.
    changes = items.changes(source.fence, merged)
    assert changes is not None
    items.sink.apply(start, changes, Position.of(merged + 5))
    assert items.target().applied == Position.of(merged + 5)
    assert items.rows() == source.sorted_rows()


@pytest.mark.parametrize("kind", ["append", "merge"])
def test_k01_changes_that_the_target_has_are_left_out_of_a_longer_epoch(items: Mirror, kind: str) -> None:
    source = items.source
    start = items.target()
    source.insert(item(20))
    source.commit()
    items.follow()
    source.insert(item(21)) if kind == "append" else source.update(at(20), {"size": NULL}, ["note"])
    items.source.commit()
    items.spool()
    changes = items.changes(source.fence, source.position)
    assert changes is not None
    items.sink.apply(start, changes, Position.of(source.position))
    assert items.rows() == source.sorted_rows()


def test_k02_every_order_of_changes_of_one_key_ends_in_its_last_state(items: Mirror) -> None:
    source = items.source
    first = 100
    for is_there, steps in product([False, True], product("iud", repeat=4)):
        for length in range(1, 5):
            _play(source, first, is_there, steps[:length])
            first += 1
    source.commit()
    items.follow()
    assert items.rows() == source.sorted_rows()


def _play(source: Source, key: int, is_there: bool, steps: tuple[str, ...]) -> None:
    """Steps that the state of the key does not allow are left out."""
    if is_there:
        source.insert(item(key))
    for number, step in enumerate(steps):
        exists = at(key) in source.rows
        if step == "i" and not exists:
            source.insert(item(key, f"insert {number}"))
        elif step == "u" and exists:
            source.update(at(key), {"note": Value(f"update {number}")})
        elif step == "d" and exists:
            source.delete(at(key))


def test_k03_a_composite_key_that_is_not_first_deletes_exactly_its_row(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = [{"note": Value(None), "a": Value(a), "b": Value(b)} for a in (1, 2) for b in ("x", "y")]
    source = Source(COMPOSITE, rows)
    mirror = Mirror(spark, tmp_path, source)
    source.delete((Value(1), Value("y")))
    source.delete((Value(2), Value("x")))
    source.update((Value(2), Value("y")), {"note": Value("seen")})
    source.commit()
    mirror.follow()
    assert len(mirror.rows()) == 2


def test_k04_unchanged_toast_is_kept_by_the_target_or_carried_within_the_epoch(items: Mirror) -> None:
    """R11 too. Exact texts stay with the values that they belong to."""
    source = items.source
    source.update(at(1), {"note": Value("new")}, ["size"])
    source.update(at(2), {"size": NULL}, ["note"])
    source.update(at(3), {}, ["note", "size"])
    source.update(at(4), {"note": Value("set first"), "size": Value(None, "4e91")})
    source.update(at(4), {}, ["note", "size"])
    source.update(at(5), {"note": NULL}, ["size"])
    source.update(at(5), {"note": Value("after null")}, ["size"])
    source.insert(item(20, "inserted", Value(None, "2e99")))
    source.commit()
    source.update(at(20), {"note": Value("later")}, ["size"])
    source.update(at(6), {"note": Value("one")}, ["size"])
    source.update(at(6), {"size": Value(None, "6e91")}, ["note"])
    source.commit()
    items.follow()
    assert items.rows() == source.sorted_rows()


def test_k05_a_key_change_takes_unchanged_toast_along(items: Mirror) -> None:
    """R06 too: through chains, swaps, keys freed and taken again, and rows that end on the way."""
    source = items.source
    both = ["note", "size"]
    source.update(at(1), {"id": Value(11)}, both)
    source.update(at(11), {"id": Value(12)}, both)
    source.update(at(12), {"id": Value(13), "note": Value("moved thrice")}, ["size"])
    source.update(at(2), {"id": Value(99)}, both)
    source.update(at(3), {"id": Value(2)}, both)
    source.update(at(99), {"id": Value(3)}, both)
    source.update(at(4), {"id": Value(1)}, both)
    source.insert(item(4, "taken again"))
    source.update(at(5), {"id": Value(15)}, both)
    source.delete(at(15))
    source.insert(item(15, "another row"))
    source.update(at(6), {"id": Value(16)}, both)
    source.update(at(16), {"id": Value(6)}, both)
    source.commit()
    source.update(at(7), {"id": Value(17), "note": NULL, "size": NULL})
    source.update(at(17), {"id": Value(18)}, [])
    source.insert(item(7, "short-lived"))
    source.update(at(7), {"id": Value(19)}, ["note"])
    source.delete(at(19))
    source.commit()
    items.follow()
    assert items.rows() == source.sorted_rows()


def test_r12_a_truncate_empties_the_table_and_later_rows_stay(items: Mirror) -> None:
    source = items.source
    source.update(at(1), {"note": Value("gone soon")}, ["size"])
    source.truncate()
    source.insert(item(1, "new one"))
    source.insert(item(2, "new two", Value(None, "2e50")))
    source.commit()
    source.update(at(2), {"id": Value(3)}, ["note", "size"])
    source.commit()
    items.follow()
    assert items.operation() == "PENSTOCK EPOCH"
    for _ in range(2):
        # The second time, there is nothing to remove.
        source.truncate()
        source.commit()
        items.follow()
    assert items.rows() == []


def test_r12_a_truncate_beside_the_epoch_in_the_same_file_empties_nothing(items: Mirror) -> None:
    source = items.source
    source.insert(item(20))
    first = source.commit()
    source.truncate()
    second = source.commit()
    source.insert(item(21))
    source.commit()
    items.spool()
    items.apply(items.reached, first)
    assert items.rows() == source.states[first]
    assert len(items.rows()) == 10
    items.apply(first, second)
    assert items.rows() == []
    items.apply(second, source.position)
    assert items.rows() == source.sorted_rows()


def test_a_row_that_the_target_lost_is_not_replaced_by_nulls(spark: SparkSession, items: Mirror) -> None:
    spark.sql(f"DELETE FROM delta.`{items.path}` WHERE id = 1")
    items.source.update(at(1), {"note": Value("new")}, ["size"])
    items.source.commit()
    with pytest.raises(ValuesMissingError, match="PEN-3004"):
        items.follow()
