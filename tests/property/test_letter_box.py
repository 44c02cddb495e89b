"""Epochs of which some values are refused, and an applier that dies at any moment: each letter is there once, and no row twice."""

from __future__ import annotations

import random
from contextlib import suppress
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings

from penstock.position import Position
from penstock.sinks.layout import Mode
from penstock.sinks.slice_reader import read_slices
from tests.integration.sinks.history import PLAIN
from tests.letter_office import Died, Office, dying_writes, office
from tests.property.chronicle import Chronicle
from tests.property.test_fold import KEYED, Sizes, chronicle, sizes
from tests.property.test_screening import Desk

_NEVER = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("mode", KEYED)
@settings(max_examples=3, deadline=None)
@given(sizes=sizes)
def test_C08_letters_are_exact_whenever_the_pipeline_dies_and_a_replay_makes_the_table_equal(mode: Mode, sizes: Sizes) -> None:
    source = chronicle(PLAIN, sizes, moves_leave_values=False)
    draw = random.Random(sizes.seed)
    with office(source, mode, source.expected(mode, source.fence)) as made:
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
            assert len(names) == len(set(names)), "each letter once"
            desk = Desk(PLAIN, made.sink.layout, [])
            desk.letters = read_slices(made.box.store.slices(made.name, Position.of(1)), made.sink.layout)
            assert desk.live(made.sink.list.rows) == desk.live(source.expected(mode, transaction.position))
        _replay_all(made, source, mode, draw)


def _replay_all(made: Office, source: Chronicle, mode: Mode, draw: random.Random) -> None:
    made.refuses = False
    end = made.idle()
    made.sink.faults = iter(draw.choices(["", "before", "after"], k=3))
    for _ in range(5):
        made.open()
        made.box.order_replay(made.name)  # the order stands until it was carried out
        with suppress(Died):
            made.applier.apply(Position.of(end))
            break
    assert made.letters() == []
    desk = Desk(PLAIN, made.sink.layout, [])
    assert desk.live(made.sink.list.rows) == desk.live(source.expected(mode, source.position))
    assert not list(made.box.store.directory.glob("_changes/*")), "what cannot be replayed any more is not kept"
