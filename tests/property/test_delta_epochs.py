"""Random histories, cut into random epochs and brought to a Delta table by our own commits: after each, it holds what the model says."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.position import Position
from penstock.schema import TableSchema
from penstock.sinks import gathering, shares, slice_reader
from penstock.sinks.layout import Layout, Mode
from penstock.sinks.slices import slices_after
from penstock.sinks.steps import slices_upto, step_ends
from penstock.spool import SpoolReader, SpoolWriter
from penstock.spool.range import FileSlice
from tests.delta_tables import (
    APPLICATION,
    InlineExecutors,
    add_rows,
    at_version,
    create_table,
    epoch,
    files_of,
    read_all,
    rows_of,
    state_of,
)
from tests.integration.sinks.history import ODD
from tests.integration.sinks.source import Transaction, whole
from tests.property.chronicle import Record, canonical
from tests.property.test_fold import HEAP, TABLES, Sizes, chronicle, epochs, heap_of, layout_of, sizes

MODES = (Mode.MIRROR, Mode.SOFT_DELETE, Mode.HISTORY)


class Lake:
    """One table, and the spool of its changes."""

    def __init__(self, root: Path, layout: Layout, fence: int, rows: Sequence[Record], *, mapped: bool) -> None:
        self.path = root / "table"
        self.layout = layout
        self.executors = InlineExecutors()
        create_table(self.path, layout, mapped=mapped)
        for half in (rows[::2], rows[1::2]):
            add_rows(self.path, pa.Table.from_pylist(list(half), layout.schema), fence)
        self._reached = fence
        self.writer = SpoolWriter(root / "spool", Position.of(fence))
        self.reader = SpoolReader(root / "spool")

    def spool(self, table: TableSchema, transactions: Sequence[Transaction]) -> Sequence[FileSlice]:
        self.writer.append(whole(table, transactions))
        self.writer.seal()
        start, self._reached = self._reached, transactions[-1].position
        found = self.reader.read(Position.of(start), Position.of(self._reached)).tables.get(table.name)
        return () if found is None else found.slices

    def apply(self, table: TableSchema, transactions: Sequence[Transaction]) -> None:
        slices = self.spool(table, transactions)
        assert epoch(self.path, self.layout, slices, self._reached).apply(self.executors)
        assert state_of(self.path).transactions == {APPLICATION: self._reached}

    def canonical(self) -> list[str]:
        return canonical(rows_of(self.path), self.layout)


@contextmanager
def lake(layout: Layout, fence: int, rows: Sequence[Record], *, mapped: bool = False) -> Iterator[Lake]:
    root = Path(tempfile.mkdtemp(prefix="penstock-lake-"))
    try:
        yield Lake(root, layout, fence, rows, mapped=mapped)
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name.name[:6])
@settings(max_examples=4, deadline=None)
@given(sizes=sizes)
def test_after_every_epoch_the_delta_table_is_what_the_model_says(table: TableSchema, mode: Mode, sizes: Sizes) -> None:
    source = chronicle(table, sizes)
    layout = layout_of(table, mode)
    with lake(layout, source.fence, source.expected(mode, source.fence), mapped=table is ODD) as target:
        versions = {}
        for each in epochs(source.log, sizes.seed):
            target.apply(table, each)
            expected = canonical(source.expected(mode, each[-1].position), layout)
            assert target.canonical() == expected
            versions[state_of(target.path).version] = expected
        for version, expected in versions.items():
            then = read_all(files_of(target.path, at_version(target.path, version))).to_pylist()
            assert canonical(then, layout) == expected, "every version stays as it was"


@pytest.mark.parametrize("mode", [Mode.MIRROR, Mode.SOFT_DELETE, Mode.HISTORY])
@settings(max_examples=4, deadline=None)
@given(sizes=sizes, size=st.integers(2000, 8000))
def test_an_epoch_cut_by_bytes_and_built_in_slices_comes_to_the_same(mode: Mode, sizes: Sizes, size: int) -> None:
    source = chronicle(ODD, sizes)
    layout = layout_of(ODD, mode)
    with (
        pytest.MonkeyPatch.context() as patch,
        lake(layout, source.fence, source.expected(mode, source.fence), mapped=True) as target,
    ):
        patch.setattr(shares, "BYTES_A_TASK", size)
        patch.setattr(slice_reader, "_PIECE_BYTES", size)
        patch.setattr(gathering, "SLICE_BYTES", size // 10)
        target.apply(ODD, source.log)
        assert target.canonical() == canonical(source.expected(mode, source.position), layout)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=4, deadline=None)
@given(sizes=sizes, rows=st.integers(1, 30))
def test_an_epoch_in_steps_comes_to_the_same_and_each_of_them_is_what_the_source_was(mode: Mode, sizes: Sizes, rows: int) -> None:
    source = chronicle(ODD, sizes)
    layout = layout_of(ODD, mode)
    with lake(layout, source.fence, source.expected(mode, source.fence), mapped=True) as target:
        slices = [slice for each in epochs(source.log, sizes.seed + 1) for slice in target.spool(ODD, each)]
        end = Position.of(source.position)
        ends = step_ends(slices, rows, end)
        assert ends == sorted({*ends})
        reached = Position.of(source.fence)
        for upto in ends:
            left = slices_upto(slices_after(slices, reached), upto)
            assert upto == end or sum(slice.file.rows for slice in left) >= rows
            assert epoch(target.path, layout, left, upto.value).apply(target.executors)
            assert target.canonical() == canonical(source.expected(mode, upto.value), layout)
            reached = upto


@settings(max_examples=12, deadline=None)
@given(sizes=sizes)
def test_R05_rows_without_key_go_one_by_one_duplicates_too(sizes: Sizes) -> None:
    heap = heap_of(sizes.seed, sizes.transactions, sizes.statements, sizes.truncates)
    layout = layout_of(HEAP, Mode.MIRROR)
    with lake(layout, heap.fence, heap.expected(heap.fence)) as target:
        for each in epochs(heap.log, sizes.seed):
            target.apply(HEAP, each)
            assert target.canonical() == canonical(heap.expected(each[-1].position), layout)


@settings(max_examples=4, deadline=None)
@given(sizes=sizes)
def test_K15_an_append_log_only_grows(sizes: Sizes) -> None:
    source = chronicle(ODD, sizes)
    layout = layout_of(ODD, Mode.APPEND)
    with lake(layout, source.fence, []) as target:
        for each in epochs(source.log, sizes.seed):
            files = set(state_of(target.path).files)
            target.apply(ODD, each)
            assert files <= set(state_of(target.path).files)
        found = [(row["_commit_version"], row["_ordinal"]) for row in rows_of(target.path)]
    assert sorted(found) == [(each.position, change.ordinal) for each in source.log for change in each.changes]
