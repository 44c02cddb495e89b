"""Epochs with rejected values and an applier that may be killed at any moment: each dead letter once, no row
twice.
"""

from __future__ import annotations

import random
from contextlib import suppress
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings

from penstock.position import Position
from penstock.sinks.modes import Mode
from penstock.sinks.slice_reader import read_slices
from tests.support.memory_pipeline import Died, MemoryPipeline, dying_writes, memory_pipeline
from tests.support.property.histories import KEYED, Sizes, sizes, source_model
from tests.support.property.screening import RejectingTarget
from tests.support.property.source_model import SourceModel
from tests.support.sinks.history import PLAIN

_NEVER = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("mode", KEYED)
@settings(max_examples=3, deadline=None)
@given(sizes=sizes)
def test_C08_dead_letters_are_exact_whenever_the_pipeline_dies_and_a_replay_makes_the_table_equal(
    mode: Mode, sizes: Sizes
) -> None:
    source = source_model(PLAIN, sizes, moves_leave_values=False)
    draw = random.Random(sizes.seed)
    with memory_pipeline(source, mode, source.expected(mode, source.fence)) as made:
        for at, transaction in enumerate(source.log):
            made.spool(at, at + 1)
            made.sink.faults = iter(draw.choices(["", "before", "after"], k=3))
            with dying_writes(draw.randrange(8)), suppress(Died):
                made.applier.apply(Position.of(transaction.position))
                made.box.store.forget(_NEVER)
            made.open()
            made.apply(transaction.position)
            made.box.store.forget(_NEVER)
            names = [(each["commit_version"], each["ordinal"]) for each in made.box.store.load().to_pylist()]
            assert len(names) == len(set(names)), "each dead letter once"
            rejecting = RejectingTarget(PLAIN, made.sink.layout, [])
            rejecting.letters = read_slices(
                made.box.store.slices(made.name, Position.of(1)), made.sink.layout
            )
            assert rejecting.live(made.sink.list.rows) == rejecting.live(
                source.expected(mode, transaction.position)
            )
        _replay_all(made, source, mode, draw)


def _replay_all(made: MemoryPipeline, source: SourceModel, mode: Mode, draw: random.Random) -> None:
    made.refuses = False
    end = made.idle()
    made.sink.faults = iter(draw.choices(["", "before", "after"], k=3))
    for _ in range(5):
        made.open()
        made.box.order_replay(made.name)  # the request stays until the replay is done
        with suppress(Died):
            made.applier.apply(Position.of(end))
            break
    assert made.letters() == []
    rejecting = RejectingTarget(PLAIN, made.sink.layout, [])
    assert rejecting.live(made.sink.list.rows) == rejecting.live(source.expected(mode, source.position))
    assert not list(made.box.store.directory.glob("_changes/*")), (
        "dead letters that cannot be replayed are removed"
    )
