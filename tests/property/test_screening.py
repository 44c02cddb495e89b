"""Random histories of which random changes are refused: what reaches the target is right at every moment, and a replay makes it whole."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given, settings

from penstock.change import CHANGE_TYPE, COMMIT_VERSION, EXACT, ORDINAL
from penstock.pipeline.letters.screening import Name, Refusal, Screened, screen
from penstock.schema import TableSchema
from penstock.sinks.fold import fold
from penstock.sinks.layout import CURRENT, DELETED, Layout, Mode
from penstock.sinks.slice_reader import named_changes
from tests.integration.sinks.history import BEYOND, ODD, PLAIN
from tests.integration.sinks.source import Transaction
from tests.property.chronicle import PlainTarget, Record, canonical, changes_table
from tests.property.test_fold import HEAP, KEYED, Sizes, chronicle, epochs, heap_of, layout_of, sizes

NO = Refusal("PEN-1411", "no")


class Desk:
    """A target, and the letters that it has not got."""

    def __init__(self, table: TableSchema, layout: Layout, rows: Sequence[Record]) -> None:
        self.table = table
        self.layout = layout
        self.target = PlainTarget(layout, rows)
        self.letters = changes_table(table, [])
        self.replayed: list[Name] = []

    def apply(self, epoch: Sequence[Transaction], refused: set[Name], *, replays: bool = False) -> Screened:
        changes = changes_table(self.table, epoch)
        screened = screen(changes, self.letters, self.layout, dict.fromkeys(refused, NO), replays=replays)
        both = pa.concat_tables([self.letters, changes])
        self.target.apply(fold(_without(both, screened.left_out), self.layout, self.target.lookup))
        assert screened.replayed.isdisjoint(self.replayed), "no letter is applied twice"
        self.replayed += screened.replayed
        kept = pa.concat_tables([self.letters, _only(changes, screened.refused)])
        self.letters = _without(kept, {*screened.superseded, *screened.replayed})
        return screened

    def live(self, rows: Sequence[Record]) -> list[str]:
        """What the target and the source have in common of `rows`: those that are there now, and have no letter."""
        held = {self.target.name(row, self.layout.key) for row in self.letters.to_pylist()}
        own = [*self.layout.columns.names, EXACT]
        wanted = [row for row in rows if not row.get(DELETED) and row.get(CURRENT, True)]
        free = [row for row in wanted if self.target.name(row, self.layout.key) not in held]
        return canonical([{name: row[name] for name in own} for row in free], Layout(self.layout.columns, self.layout.key, Mode.MIRROR))


def _without(changes: pa.Table, names: set[Name]) -> pa.Table:
    return changes.filter(pa.array(~named_changes(changes, names)))


def _only(changes: pa.Table, names: dict[Name, Refusal]) -> pa.Table:
    return changes.filter(pa.array(named_changes(changes, names)))


def some(epoch: Sequence[Transaction], draw: random.Random) -> set[Name]:
    chance = draw.choice([0.0, 0.1, 0.5])
    return {(each.position, change.ordinal) for each in epoch for change in each.changes if draw.random() < chance}


def names_of(changes: pa.Table) -> set[Name]:
    return set(zip(changes[COMMIT_VERSION].to_pylist(), changes[ORDINAL].to_pylist(), strict=True))


@pytest.mark.parametrize("mode", KEYED)
@pytest.mark.parametrize("table", [PLAIN, ODD, BEYOND], ids=lambda table: table.name.name[:6])
@settings(max_examples=12, deadline=None)
@given(sizes=sizes)
def test_C08_rows_without_a_letter_are_right_after_every_epoch_and_a_replay_brings_the_others(
    table: TableSchema, mode: Mode, sizes: Sizes
) -> None:
    for moves_leave_values in (False, True):
        source = chronicle(table, sizes, moves_leave_values=moves_leave_values)
        draw = random.Random(sizes.seed)
        desk = Desk(table, layout_of(table, mode), source.expected(mode, source.fence))
        for epoch in epochs(source.log, sizes.seed):
            lifted = {name for name in names_of(desk.letters) if draw.random() < 0.5}
            desk.apply(epoch, some(epoch, draw) | (names_of(desk.letters) - lifted), replays=draw.random() < 0.3)
            assert desk.live(desk.target.rows) == desk.live(source.expected(mode, epoch[-1].position))
            assert "delete" not in desk.letters[CHANGE_TYPE].to_pylist()
        desk.apply([], set(), replays=True)
        assert desk.live(desk.target.rows) == desk.live(source.expected(mode, source.position))
        assert moves_leave_values or desk.letters.num_rows == 0, "only values that went with a former key cannot be had again"


@settings(max_examples=40, deadline=None)
@given(sizes=sizes)
def test_C08_rows_without_key_are_in_the_target_or_have_a_letter_each(sizes: Sizes) -> None:
    heap = heap_of(sizes.seed, sizes.transactions, sizes.statements, sizes.truncates)
    layout = layout_of(HEAP, Mode.MIRROR)
    draw = random.Random(sizes.seed)
    desk = Desk(HEAP, layout, heap.expected(heap.fence))
    for epoch in epochs(heap.log, sizes.seed):
        lifted = {name for name in names_of(desk.letters) if draw.random() < 0.5}
        desk.apply(epoch, some(epoch, draw) | (names_of(desk.letters) - lifted), replays=draw.random() < 0.3)
        letters = desk.letters.select([*layout.columns.names, EXACT]).to_pylist()
        assert canonical([*desk.target.rows, *letters], layout) == canonical(heap.expected(epoch[-1].position), layout)
    desk.apply([], set(), replays=True)
    assert canonical(desk.target.rows, layout) == canonical(heap.expected(heap.position), layout)


@settings(max_examples=15, deadline=None)
@given(sizes=sizes)
def test_C08_a_log_lacks_just_its_letters_and_a_replay_adds_each_once(sizes: Sizes) -> None:
    source = chronicle(PLAIN, sizes)
    draw = random.Random(sizes.seed)
    desk = Desk(PLAIN, layout_of(PLAIN, Mode.APPEND), [])
    for epoch in epochs(source.log, sizes.seed):
        screened = desk.apply(epoch, some(epoch, draw) | names_of(desk.letters), replays=draw.random() < 0.3)
        assert not screened.superseded
    everything = [(each.position, change.ordinal) for each in source.log for change in each.changes]
    applied = [(row[COMMIT_VERSION], row[ORDINAL]) for row in desk.target.rows]
    assert sorted([*applied, *names_of(desk.letters)]) == everything
    desk.apply([], set(), replays=True)
    assert sorted((row[COMMIT_VERSION], row[ORDINAL]) for row in desk.target.rows) == everything
    assert desk.letters.num_rows == 0
