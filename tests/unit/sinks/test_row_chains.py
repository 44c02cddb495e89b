"""Rows gathered in slices: the same as all at once, and no slice above its bound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.change import ChangeCounts
from penstock.sinks import row_chains as gathering
from penstock.sinks import slice_reader as shares
from penstock.sinks.row_chains import NewRows, RowGroup, StoredRows, gather, row_sizes
from penstock.sinks.slice_reader import plan_parts
from penstock.spool.manifest import SegmentFile
from penstock.spool.reader import FileSlice
from tests.support.spool.builders import ITEMS, at

_TEXTS = st.lists(st.one_of(st.none(), st.text(max_size=20)), max_size=6)
_MB = 1 << 20


def changes_of(size: int) -> list[FileSlice]:
    return [FileSlice(Path(), SegmentFile(ITEMS, "", 1, size, ChangeCounts(), at(1), at(1)), None, None)]


def test_more_than_2_GiB_of_text_in_one_column_are_gathered() -> None:
    """The bytes are zeros that were never written, so they use no memory."""
    offsets = (np.arange(751) * _MB).astype(np.int32)
    zeros = np.zeros(750 * _MB, np.uint8)
    chunk = pa.Array.from_buffers(pa.string(), 750, [None, pa.py_buffer(offsets), pa.py_buffer(zeros)])
    column = pa.chunked_array([chunk] * 3)
    assert column.nbytes > 2 << 30
    assert [len(each.as_py()) for each in gather(column, np.array([2249, 0, 800]))] == [_MB] * 3


@given(st.lists(_TEXTS, min_size=1, max_size=4), st.data())
def test_values_gathered_into_several_arrays_are_the_same(
    chunks: list[list[str | None]], data: st.DataObject
) -> None:
    column = pa.chunked_array(chunks, pa.string())
    rows = data.draw(st.lists(st.integers(0, len(column) - 1), max_size=12)) if len(column) else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "_ARRAY_BYTES", 40)
        found = gather(column, np.array(rows, np.int64))
    assert found.to_pylist() == [column[row].as_py() for row in rows]
    assert all(
        len(chunk) == 1 or row_sizes(pa.table([chunk], names=["a"])).sum() <= 40
        for chunk in found.chunks
        if len(chunk)
    )


def test_a_large_value_that_is_gathered_twice_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_ARRAY_BYTES", 40)
    found = gather(pa.chunked_array([["a" * 5, "b" * 12]]), np.array([0, 1, 1]))
    assert [len(chunk) for chunk in found.chunks] == [2, 1]


def test_rows_are_built_in_slices_of_bounded_size_and_a_larger_row_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "SLICE_BYTES", 100)
    table = pa.table({"a": ["x" * size for size in (30, 30, 30, 500, 1, 1, 90, 90)]})
    slices = list(NewRows.of(table).slices())
    assert [[len(text) for text in each.column("a").to_pylist()] for each in slices] == [
        [30, 30],
        [30],
        [500],
        [1, 1],
        [90],
        [90],
    ]
    assert NewRows.of(table).whole().equals(table)


def test_rows_of_the_target_that_exceed_a_slice_are_read_when_they_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "SLICE_BYTES", 100)
    schema = pa.schema([("id", pa.int64()), ("body", pa.string())])
    read: list[tuple[int, Sequence[str]]] = []

    def group(number: int) -> RowGroup:
        def load(names: Sequence[str]) -> pa.Table:
            read.append((number, list(names)))
            return pa.table(
                {"id": [2 * number, 2 * number + 1], "body": [f"{number}a", f"{number}b"]}, schema=schema
            ).select(names)

        return RowGroup(2, 100.0, load)

    stored = StoredRows.load([group(0), group(1), group(2)], schema, ["id"])
    assert read == [(0, ["id"]), (1, ["id"]), (2, ["id"])]
    some = stored.only(np.array([False, True, False, True, True, False]))
    assert some.known.to_pylist() == [{"id": 1}, {"id": 3}, {"id": 4}]
    read.clear()
    assert some.take(np.array([1, 2])).column("body").to_pylist() == ["1b", "2a"]
    assert read == [(1, ["id", "body"]), (2, ["id", "body"])]
    few = StoredRows.load([RowGroup(2, 1.0, group(0).load)], schema, ["id"])
    assert few.known.column_names == ["id", "body"]


def test_an_epoch_has_more_tasks_the_more_bytes_or_rows_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = ChangeCounts(updates=2200)

    def count(size: int, counts: ChangeCounts = updates, *, looks_up: bool = False) -> int:
        return len(plan_parts(changes_of(size), counts, looks_up=looks_up))

    assert [count(size) for size in (1, 128 << 20, 129 << 20, 2200 << 20)] == [1, 1, 2, 18]
    assert count(1, ChangeCounts(updates=1_500_000)) == 3
    assert count(2200 << 20, ChangeCounts(inserts=2, deletes=2, moves=2, updates=2198, unchanged=3)) == 18
    assert count(2200 << 20, ChangeCounts(updates=1, truncates=1), looks_up=True) == 1
    monkeypatch.setattr(shares, "BYTES_A_TASK", 1 << 20)
    assert count(2200 << 20) == 2200
