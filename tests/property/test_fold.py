"""Random histories, cut into random epochs: after each, a target of every mode holds what a plain model says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.change import UNCHANGED
from penstock.schema import Column, TableName, TableSchema
from penstock.sinks.fold import Outcome, fold
from penstock.sinks.gathering import NewRows
from penstock.sinks.layout import CURRENT, VALID_FROM, VALID_TO, Layout, Mode
from penstock.sinks.slice_reader import Part, parted
from tests.integration.sinks.history import BEYOND, FLOATS, ODD, PLAIN, History
from tests.integration.sinks.source import NULL, Row, Transaction, Value
from tests.property.chronicle import Chronicle, Heap, PlainTarget, Record, canonical, changes_table, record_of

TABLES = (PLAIN, ODD, BEYOND, FLOATS)
KEYED = (Mode.MIRROR, Mode.SOFT_DELETE, Mode.HISTORY)


@dataclass(frozen=True)
class Sizes:
    """Of a history."""

    seed: int
    transactions: int
    statements: int
    truncates: float


sizes = st.builds(Sizes, st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 25), st.sampled_from([0.0, 0.0, 0.3]))


def layout_of(table: TableSchema, mode: Mode) -> Layout:
    columns = pa.schema([pa.field(column.name, column.arrow_type) for column in table.columns])
    return Layout(columns, table.key, mode)


def chronicle(table: TableSchema, sizes: Sizes, *, moves_leave_values: bool = True) -> Chronicle:
    history = History(table, sizes.seed, groups=2, source=Chronicle)
    history.moves_leave_values = moves_leave_values
    history.statements = sizes.statements
    history.run(sizes.transactions, truncates=sizes.truncates)
    assert isinstance(history.source, Chronicle)
    return history.source


def epochs(log: Sequence[Transaction], seed: int) -> list[Sequence[Transaction]]:
    cuts = random.Random(seed).sample(range(len(log)), len(log) // 2)
    return [log[low:high] for low, high in pairwise(sorted({0, *cuts, len(log)}))]


@pytest.mark.parametrize("mode", KEYED)
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name.name[:6])
@settings(max_examples=25, deadline=None)
@given(sizes=sizes)
def test_after_every_epoch_the_target_is_what_the_model_says(table: TableSchema, mode: Mode, sizes: Sizes) -> None:
    source = chronicle(table, sizes)
    layout = layout_of(table, mode)
    target = PlainTarget(layout, source.expected(mode, source.fence))
    for epoch in epochs(source.log, sizes.seed):
        target.lookups = 0
        changes = changes_table(table, epoch)
        target.apply(fold(changes, layout, target.lookup))
        assert canonical(target.rows, layout) == canonical(source.expected(mode, epoch[-1].position), layout)
        assert target.lookups <= 1
        if mode is Mode.MIRROR and changes[UNCHANGED].null_count == changes.num_rows:
            assert target.lookups == 0, "all values travelled"
    whole = PlainTarget(layout, source.expected(mode, source.fence))
    whole.apply(fold(changes_table(table, source.log), layout, whole.lookup))
    assert canonical(whole.rows, layout) == canonical(target.rows, layout), "however it is cut into epochs"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name.name[:6])
@settings(max_examples=15, deadline=None)
@given(sizes=sizes)
def test_K16_a_history_has_no_overlap_no_gap_and_one_current_row_for_each_live_key(table: TableSchema, sizes: Sizes) -> None:
    source = chronicle(table, sizes)
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
            assert all(not before[CURRENT] and before[VALID_TO] <= after[VALID_FROM] for before, after in pairwise(rows))
    # Whoever asks for the rows as of any commit gets just those that the source had.
    for position, rows in source.states.items():
        valid = [row for row in target.rows if row[VALID_FROM] <= position and (row[CURRENT] or position < row[VALID_TO])]
        own = layout_of(table, Mode.MIRROR)
        assert canonical(_own(valid, own), own) == canonical([record_of(row) for row in rows], own)


def _own(rows: Sequence[Record], layout: Layout) -> list[Record]:
    return [{name: row[name] for name in layout.schema.names} for row in rows]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name.name[:6])
@settings(max_examples=10, deadline=None)
@given(sizes=sizes)
def test_K15_an_append_log_has_every_change_once_and_in_order(table: TableSchema, sizes: Sizes) -> None:
    source = chronicle(table, sizes)
    layout = layout_of(table, Mode.APPEND)
    target = PlainTarget(layout, [])
    for epoch in epochs(source.log, sizes.seed):
        changes = changes_table(table, epoch)
        half = changes.num_rows // 2
        outcome = fold(pa.concat_tables([changes.slice(half), changes.slice(0, half)]), layout, target.lookup)
        assert not outcome.gone.num_rows
        target.apply(outcome)
    assert repr(target.rows) == repr(changes_table(table, source.log).to_pylist())
    assert target.lookups == 0


@pytest.mark.parametrize("mode", KEYED)
@settings(max_examples=15, deadline=None)
@given(sizes=sizes, count=st.integers(2, 4))
def test_the_parts_of_an_epoch_come_to_the_same_as_the_whole(mode: Mode, sizes: Sizes, count: int) -> None:
    truncates = sizes.truncates if mode is Mode.MIRROR else 0.0
    source = chronicle(ODD, replace(sizes, truncates=truncates), moves_leave_values=False)
    layout = layout_of(ODD, mode)
    changes = changes_table(ODD, source.log)
    target = PlainTarget(layout, source.expected(mode, source.fence))
    outcomes = [fold(parted(changes, layout, Part(index, count)), layout, target.lookup) for index in range(count)]
    gone, rows = (pa.concat_tables([getattr(each, name) for each in outcomes]) for name in ("gone", "rows"))
    assert len({each.emptied for each in outcomes}) == 1
    target.apply(Outcome(outcomes[0].emptied, gone, NewRows.of(rows)))
    assert canonical(target.rows, layout) == canonical(source.expected(mode, source.position), layout)


HEAP = TableSchema(
    16405,
    TableName("public", "heap"),
    (
        Column("a", pa.float64(), 701),
        Column("b", pa.decimal128(10, 2), 1700),
        Column("c", pa.list_(pa.int32()), 1007),
        Column("d", pa.string(), 25),
    ),
    (),
)
CHOICES: dict[str, list[Value]] = {
    "a": [Value(float("nan")), Value(0.5), NULL],
    "b": [Value(None, "NaN"), Value(None, "1e40"), NULL],
    "c": [Value([1, None]), Value([]), NULL],
    "d": [Value("x"), Value(""), NULL],
}


def heap_of(seed: int, transactions: int, statements: int, truncates: float) -> Heap:
    """Few values, so that most rows have duplicates."""
    draw = random.Random(seed)
    choices = {name: values[: draw.randint(1, 3)] for name, values in CHOICES.items()}

    def row() -> Row:
        return {name: draw.choice(values) for name, values in choices.items()}

    heap = Heap(HEAP, [row() for _ in range(draw.randint(0, 12))])
    for _ in range(transactions):
        for _ in range(draw.randint(1, statements)):
            kind = draw.random()
            if not heap.rows or kind < 0.3:
                heap.insert(row())
            elif kind < 0.7:
                heap.delete(draw.randrange(len(heap.rows)))
            else:
                heap.update(draw.randrange(len(heap.rows)), row())
            if draw.random() < truncates / 10:
                heap.truncate()
        heap.commit()
    return heap


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
