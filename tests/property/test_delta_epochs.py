"""Random histories in random epochs, committed to a Delta table by our own code: each epoch equals the
model.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.position import Position
from penstock.schema import TableSchema
from penstock.sinks import row_chains as gathering
from penstock.sinks import slice_reader
from penstock.sinks import slice_reader as shares
from penstock.sinks.modes import Mode
from penstock.sinks.slice_reader import slices_after, slices_upto, step_ends
from tests.support.delta_tables import (
    at_version,
    epoch,
    files_of,
    read_all,
    rows_of,
    state_of,
)
from tests.support.property.delta_lake import MODES, lake
from tests.support.property.histories import (
    HEAP,
    TABLES,
    Sizes,
    epochs,
    heap_of,
    layout_of,
    sizes,
    source_model,
)
from tests.support.property.source_model import canonical
from tests.support.sinks.history import ODD


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name.name[:6])
@settings(max_examples=4, deadline=None)
@given(sizes=sizes)
def test_after_every_epoch_the_delta_table_equals_the_model(
    table: TableSchema, mode: Mode, sizes: Sizes
) -> None:
    source = source_model(table, sizes)
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
def test_an_epoch_cut_by_bytes_and_built_in_slices_gives_the_same_rows(
    mode: Mode, sizes: Sizes, size: int
) -> None:
    source = source_model(ODD, sizes)
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
def test_an_epoch_in_steps_gives_the_same_rows_and_each_step_equals_the_source(
    mode: Mode, sizes: Sizes, rows: int
) -> None:
    source = source_model(ODD, sizes)
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
    source = source_model(ODD, sizes)
    layout = layout_of(ODD, Mode.APPEND)
    with lake(layout, source.fence, []) as target:
        for each in epochs(source.log, sizes.seed):
            files = set(state_of(target.path).files)
            target.apply(ODD, each)
            assert files <= set(state_of(target.path).files)
        found = [(row["_commit_version"], row["_ordinal"]) for row in rows_of(target.path)]
    assert sorted(found) == [
        (each.position, change.ordinal) for each in source.log for change in each.changes
    ]
