"""The ack watermark against a model that keeps every change with an acknowledged flag."""

from __future__ import annotations

import sys
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.capture.watermark import AckWatermark
from penstock.contracts.capture import Ack
from penstock.position import Position


@dataclass
class Model:
    """A simple and slow model."""

    point: int
    ticks: list[bool] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)
    """This position is reached after this number of changes of complete transactions."""

    def resume(self) -> int:
        floor = next((at for at, tick in enumerate(self.ticks) if not tick), len(self.ticks))
        return max([self.point, *(position for count, position in self.ends if count <= floor)])


# A transaction with this number of changes, followed by this distance without changes, if given.
transactions = st.lists(st.tuples(st.integers(0, 4), st.none() | st.integers(0, 2)), max_size=8)


@settings(deadline=None)
@given(plan=transactions, data=st.data())
def test_resume_point_is_the_end_of_the_last_transaction_before_the_first_unconfirmed_change(
    plan: list[tuple[int, int | None]], data: st.DataObject
) -> None:
    model, watermark = Model(100), AckWatermark(Position.of(100))
    acks: list[Ack] = []
    position = 100
    for changes, quiet in plan:
        # The watermark learns that a transaction is complete from the first change of the next one, or from
        # `settle`.
        if changes:
            model.ends.append((len(acks), position))
        position += 10
        for _ in range(changes):
            acks.append(watermark.deliver(Position.of(position)))
            model.ticks.append(False)
            confirm_some(data, acks, model, watermark)
        if quiet is not None:
            position += quiet
            watermark.settle(Position.of(position))
            model.ends.append((len(acks), position))
        elif not changes:
            position -= 10
        confirm_some(data, acks, model, watermark)
    for ack in acks:
        ack.confirm()
    model.ticks = [True] * len(acks)
    assert watermark.resume.value == model.resume()


def confirm_some(data: st.DataObject, acks: list[Ack], model: Model, watermark: AckWatermark) -> None:
    before = watermark.resume
    assert before.value == model.resume()
    for at in data.draw(st.lists(st.integers(0, len(acks) - 1), max_size=4)) if acks else ():
        acks[at].confirm()
        model.ticks[at] = True
        assert watermark.resume.value == model.resume()
    assert watermark.resume >= before


@settings(deadline=None)
@given(st.permutations(range(30)), st.integers(1, 7))
def test_any_order_of_confirming_all_ends_at_the_end(order: list[int], size: int) -> None:
    watermark = AckWatermark(Position.ZERO)
    acks = [watermark.deliver(Position.of(1 + at // size)) for at in range(30)]
    watermark.settle(Position.of(99))
    for at in order:
        assert watermark.resume < Position.of(99)
        acks[at].confirm()
    assert (watermark.resume, watermark.runs) == (Position.of(99), 0)


def test_transaction_that_may_go_on_is_not_passed() -> None:
    watermark = AckWatermark(Position.of(5))
    watermark.deliver(Position.of(10)).confirm()
    assert watermark.resume == Position.of(5)
    following = watermark.deliver(Position.of(20))
    assert watermark.resume == Position.of(10)
    following.confirm()
    assert watermark.resume == Position.of(10)
    watermark.settle(Position.of(20))
    assert watermark.resume == Position.of(20)


def test_quiet_ground_counts_only_once_nothing_before_it_is_unconfirmed() -> None:
    watermark = AckWatermark(Position.of(5))
    watermark.settle(Position.of(7))
    assert watermark.resume == Position.of(7)
    ack = watermark.deliver(Position.of(10))
    watermark.settle(Position.of(50))
    watermark.settle(Position.of(60))
    assert watermark.resume == Position.of(7)
    ack.confirm()
    assert watermark.resume == Position.of(60)
    watermark.deliver(Position.of(70))
    assert watermark.resume == Position.of(60)


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads switch after every few instructions, so that unlocked code fails soon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
@pytest.mark.parametrize("_", range(4))
def test_confirming_from_many_threads_loses_and_doubles_nothing(_: int) -> None:
    watermark = AckWatermark(Position.ZERO)
    acks = [watermark.deliver(Position.of(1 + at)) for at in range(20_000)]
    watermark.settle(Position.of(30_000))

    def confirm(part: int) -> None:
        # Neighbouring changes belong to different threads, so that runs are merged constantly.
        for ack in acks[part % 4 :: 4]:
            ack.confirm()

    threads = [threading.Thread(target=confirm, args=(part,)) for part in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (watermark.resume, watermark.runs) == (Position.of(30_000), 0)


def test_unconfirmed_backlog_takes_no_extra_memory() -> None:
    watermark = AckWatermark(Position.ZERO)
    first = watermark.deliver(Position.of(1))
    tracemalloc.start()
    try:
        for at in range(2, 100_002):
            ack = watermark.deliver(Position.of(1 + at // 2))
            if at > 50_000:
                ack.confirm()
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 20_000
    assert watermark.runs == 1
    first.confirm()
    assert watermark.resume == Position.of(1)
