"""Random histories in random epochs: after each, a target of every mode equals a plain model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.change import UNCHANGED
from penstock.schema import TableSchema
from penstock.sinks.fold import Outcome, fold
from penstock.sinks.modes import CURRENT, VALID_FROM, VALID_TO, Layout, Mode
from penstock.sinks.row_chains import NewRows
from penstock.sinks.slice_reader import Part, select_part
from tests.support.property.histories import (
    HEAP,
    KEYED,
    TABLES,
    Sizes,
    epochs,
    heap_of,
    layout_of,
    sizes,
    source_model,
)
from tests.support.property.source_model import PlainTarget, Record, canonical, changes_table, record_of
from tests.support.sinks.history import ODD


@pytest.mark.parametrize("mode", KEYED)
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name.name[:6])
@settings(max_examples=25, deadline=None)
@given(sizes=sizes)
def test_after_every_epoch_the_target_equals_the_model(table: TableSchema, mode: Mode, sizes: Sizes) -> None:
    source = source_model(table, sizes)
    layout = layout_of(table, mode)
    target = PlainTarget(layout, source.expected(mode, source.fence))
    for epoch in epochs(source.log, sizes.seed):
        target.lookups = 0
        changes = changes_table(table, epoch)
        target.apply(fold(changes, layout, target.lookup))
        assert canonical(target.rows, layout) == canonical(source.expected(mode, epoch[-1].position), layout)
        assert target.lookups <= 1
        if mode is Mode.MIRROR and changes[UNCHANGED].null_count == changes.num_rows:
            assert target.lookups == 0, "no unchanged TOAST values"
    whole = PlainTarget(layout, source.expected(mode, source.fence))
    whole.apply(fold(changes_table(table, source.log), layout, whole.lookup))
    assert canonical(whole.rows, layout) == canonical(target.rows, layout), "for any split into epochs"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name.name[:6])
@settings(max_examples=15, deadline=None)
@given(sizes=sizes)
def test_K16_a_history_has_no_overlap_no_gap_and_one_current_row_for_each_live_key(
    table: TableSchema, sizes: Sizes
) -> None:
    source = source_model(table, sizes)
    layout = layout_of(table, Mode.HISTORY)
    target = PlainTarget(layout, source.expected(Mode.HISTORY, source.fence))
    for epoch in epochs(source.log, sizes.seed):
        target.apply(fold(changes_table(table, epoch), layout, target.lookup))
        live = {target.name(row, table.key) for row in source.expected(Mode.MIRROR, epoch[-1].position)}
        versions: dict[object, list[Record]] = {}
        for row in sorted(target.rows, key=lambda row: row[VALID_FROM]):
            versions.setdefault(target.name(row, table.key), []).append(row)
        assert live == {key for key, rows in versions.items() if rows[-1][CURRENT]}
        for rows in versions.values():
            assert all(row[VALID_TO] is None for row in rows if row[CURRENT])
            assert all(row[VALID_FROM] < row[VALID_TO] for row in rows if not row[CURRENT])
            assert all(
                not before[CURRENT] and before[VALID_TO] <= after[VALID_FROM]
                for before, after in pairwise(rows)
            )
    # A query as of any commit returns exactly the rows of the source.
    for position, rows in source.states.items():
        valid = [
            row
            for row in target.rows
            if row[VALID_FROM] <= position and (row[CURRENT] or position < row[VALID_TO])
        ]
        own = layout_of(table, Mode.MIRROR)
        assert canonical(_own(valid, own), own) == canonical([record_of(row) for row in rows], own)


def _own(rows: Sequence[Record], layout: Layout) -> list[Record]:
    return [{name: row[name] for name in layout.schema.names} for row in rows]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name.name[:6])
@settings(max_examples=10, deadline=None)
@given(sizes=sizes)
def test_K15_an_append_log_has_every_change_once_and_in_order(table: TableSchema, sizes: Sizes) -> None:
    source = source_model(table, sizes)
    layout = layout_of(table, Mode.APPEND)
    target = PlainTarget(layout, [])
    for epoch in epochs(source.log, sizes.seed):
        changes = changes_table(table, epoch)
        half = changes.num_rows // 2
        outcome = fold(pa.concat_tables([changes.slice(half), changes.slice(0, half)]), layout, target.lookup)
        assert not outcome.deleted.num_rows
        target.apply(outcome)
    assert repr(target.rows) == repr(changes_table(table, source.log).to_pylist())
    assert target.lookups == 0


@pytest.mark.parametrize("mode", KEYED)
@settings(max_examples=15, deadline=None)
@given(sizes=sizes, count=st.integers(2, 4))
def test_the_parts_of_an_epoch_give_the_same_rows_as_the_whole(mode: Mode, sizes: Sizes, count: int) -> None:
    truncates = sizes.truncates if mode is Mode.MIRROR else 0.0
    source = source_model(ODD, replace(sizes, truncates=truncates), moves_leave_values=False)
    layout = layout_of(ODD, mode)
    changes = changes_table(ODD, source.log)
    target = PlainTarget(layout, source.expected(mode, source.fence))
    outcomes = [
        fold(select_part(changes, layout, Part(index, count)), layout, target.lookup)
        for index in range(count)
    ]
    deleted, rows = (
        pa.concat_tables([getattr(each, name) for each in outcomes]) for name in ("deleted", "rows")
    )
    assert len({each.emptied for each in outcomes}) == 1
    target.apply(Outcome(outcomes[0].emptied, deleted, NewRows.of(rows)))
    assert canonical(target.rows, layout) == canonical(source.expected(mode, source.position), layout)


@settings(max_examples=60, deadline=None)
@given(sizes=sizes)
def test_R05_rows_without_key_are_counted_duplicates_too(sizes: Sizes) -> None:
    heap = heap_of(sizes.seed, sizes.transactions, sizes.statements, sizes.truncates)
    layout = layout_of(HEAP, Mode.MIRROR)
    target = PlainTarget(layout, heap.expected(heap.fence))
    for epoch in epochs(heap.log, sizes.seed):
        target.apply(fold(changes_table(HEAP, epoch), layout, target.lookup))
        assert canonical(target.rows, layout) == canonical(heap.expected(epoch[-1].position), layout)
    assert target.lookups == 0
