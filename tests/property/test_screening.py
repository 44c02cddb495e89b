"""Random histories with randomly rejected changes: the target is right at every moment, and a replay
completes it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given, settings

from penstock.change import CHANGE_TYPE, COMMIT_VERSION, EXACT, ORDINAL
from penstock.pipeline.dead_letters.rejections import Name
from penstock.schema import TableSchema
from penstock.sinks.modes import Mode
from tests.support.property.histories import (
    HEAP,
    KEYED,
    Sizes,
    epochs,
    heap_of,
    layout_of,
    sizes,
    source_model,
)
from tests.support.property.screening import RejectingTarget
from tests.support.property.source_model import canonical
from tests.support.sinks.history import BEYOND, ODD, PLAIN
from tests.support.sinks.source import Transaction


def some(epoch: Sequence[Transaction], draw: random.Random) -> set[Name]:
    chance = draw.choice([0.0, 0.1, 0.5])
    return {
        (each.position, change.ordinal) for each in epoch for change in each.changes if draw.random() < chance
    }


def names_of(changes: pa.Table) -> set[Name]:
    return set(zip(changes[COMMIT_VERSION].to_pylist(), changes[ORDINAL].to_pylist(), strict=True))


@pytest.mark.parametrize("mode", KEYED)
@pytest.mark.parametrize("table", [PLAIN, ODD, BEYOND], ids=lambda table: table.name.name[:6])
@settings(max_examples=12, deadline=None)
@given(sizes=sizes)
def test_C08_rows_without_a_dead_letter_are_right_after_every_epoch_and_a_replay_writes_the_others(
    table: TableSchema, mode: Mode, sizes: Sizes
) -> None:
    for moves_leave_values in (False, True):
        source = source_model(table, sizes, moves_leave_values=moves_leave_values)
        draw = random.Random(sizes.seed)
        rejecting = RejectingTarget(table, layout_of(table, mode), source.expected(mode, source.fence))
        for epoch in epochs(source.log, sizes.seed):
            lifted = {name for name in names_of(rejecting.letters) if draw.random() < 0.5}
            rejecting.apply(
                epoch, some(epoch, draw) | (names_of(rejecting.letters) - lifted), replays=draw.random() < 0.3
            )
            assert rejecting.live(rejecting.target.rows) == rejecting.live(
                source.expected(mode, epoch[-1].position)
            )
            assert "delete" not in rejecting.letters[CHANGE_TYPE].to_pylist()
        rejecting.apply([], set(), replays=True)
        assert rejecting.live(rejecting.target.rows) == rejecting.live(source.expected(mode, source.position))
        assert moves_leave_values or rejecting.letters.num_rows == 0, (
            "only values of a former key cannot be recovered"
        )


@settings(max_examples=40, deadline=None)
@given(sizes=sizes)
def test_C08_rows_without_key_are_in_the_target_or_have_a_dead_letter_each(sizes: Sizes) -> None:
    heap = heap_of(sizes.seed, sizes.transactions, sizes.statements, sizes.truncates)
    layout = layout_of(HEAP, Mode.MIRROR)
    draw = random.Random(sizes.seed)
    rejecting = RejectingTarget(HEAP, layout, heap.expected(heap.fence))
    for epoch in epochs(heap.log, sizes.seed):
        lifted = {name for name in names_of(rejecting.letters) if draw.random() < 0.5}
        rejecting.apply(
            epoch, some(epoch, draw) | (names_of(rejecting.letters) - lifted), replays=draw.random() < 0.3
        )
        letters = rejecting.letters.select([*layout.columns.names, EXACT]).to_pylist()
        assert canonical([*rejecting.target.rows, *letters], layout) == canonical(
            heap.expected(epoch[-1].position), layout
        )
    rejecting.apply([], set(), replays=True)
    assert canonical(rejecting.target.rows, layout) == canonical(heap.expected(heap.position), layout)


@settings(max_examples=15, deadline=None)
@given(sizes=sizes)
def test_C08_a_log_lacks_exactly_its_dead_letters_and_a_replay_adds_each_once(sizes: Sizes) -> None:
    source = source_model(PLAIN, sizes)
    draw = random.Random(sizes.seed)
    rejecting = RejectingTarget(PLAIN, layout_of(PLAIN, Mode.APPEND), [])
    for epoch in epochs(source.log, sizes.seed):
        screened = rejecting.apply(
            epoch, some(epoch, draw) | names_of(rejecting.letters), replays=draw.random() < 0.3
        )
        assert not screened.superseded
    everything = [(each.position, change.ordinal) for each in source.log for change in each.changes]
    applied = [(row[COMMIT_VERSION], row[ORDINAL]) for row in rejecting.target.rows]
    assert sorted([*applied, *names_of(rejecting.letters)]) == everything
    rejecting.apply([], set(), replays=True)
    assert sorted((row[COMMIT_VERSION], row[ORDINAL]) for row in rejecting.target.rows) == everything
    assert rejecting.letters.num_rows == 0
