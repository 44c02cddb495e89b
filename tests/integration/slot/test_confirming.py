"""Invariant 1: the capture never confirms a position that is not durable, with either `confirm` setting."""

from __future__ import annotations

import shutil
import threading
from typing import Self

from penstock.capture.settings import CaptureLimits, Confirm
from penstock.errors import PenstockError, PositionGapError
from penstock.position import Position
from penstock.spool.reader import SpoolReader
from penstock.spool.retention import release, released_by_all
from tests.support.slot.source import BEYOND, COPY_AGAIN, Source
from tests.support.waiting import DEADLINE_SECONDS, wait_for

MOVES = 5


class Load:
    """Inserts in a thread during a `with` block, to observe confirmed positions under load."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.rows = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with self._source.database.connect(autocommit=True) as connection:
            while not self._over.wait(0.005):
                low = self.rows + 1
                connection.execute(
                    "INSERT INTO public.t SELECT i, 'x' FROM generate_series(%s::bigint, %s) i",
                    [low, low + 99],
                )
                self.rows += 100


def test_applied_never_confirms_beyond_what_every_consumer_has_released(source: Source) -> None:
    before = slow = source.confirmed
    seen = {before}

    def has_moved_often() -> bool:
        nonlocal slow
        confirmed = source.confirmed
        assert confirmed <= max(before, released_by_all(source.spool) or Position.ZERO)
        seen.add(confirmed)
        if capture.wait_beyond(slow, 0.05) and capture.end is not None:
            release(source.spool, "slow", slow)  # a step behind
            slow = release(source.spool, "fast", capture.end)
        return len(seen) > MOVES

    with source.capture() as capture:
        with Load(source):
            wait_for(has_moved_often, "a slot that moves while we look", lambda: seen)
        assert capture.wait_until(source.position, DEADLINE_SECONDS)


def test_spooled_confirms_sealed_positions_and_never_more(source: Source) -> None:
    before = source.confirmed
    seen: list[Position] = [before]

    def has_moved_often() -> bool:
        confirmed = source.confirmed
        assert confirmed <= (SpoolReader(source.spool).end or before)
        seen.append(confirmed)
        return len(set(seen)) > MOVES

    with source.capture(confirm=Confirm.SPOOLED) as capture:
        with Load(source) as load:
            wait_for(has_moved_often, "a slot that moves while we look", lambda: seen)
        assert capture.wait_until(source.position, DEADLINE_SECONDS)
        end = capture.end
        assert end is not None
        wait_for(
            lambda: source.confirmed >= end,
            f"the slot at {end}, which is sealed, or on quiet ground after it",
            lambda: source.confirmed,
        )
        assert source.status is not None
        assert source.status.confirms == "spooled"
    assert seen == sorted(seen), "never backwards"
    assert source.ids() == list(range(1, load.rows + 1)), "unreleased segments stay in the spool"


def test_more_retained_log_than_allowed_switches_to_spooled_and_back(source: Source) -> None:
    """The consumer stops and the slot advances; the consumer catches up, and its applied position counts
    again.
    """
    limits = CaptureLimits(quiet_seconds=0.1, watch_seconds=0.1)
    with source.capture(limits, max_retained_bytes=4 << 20) as capture:
        first = source.insert(1, 10)
        assert capture.wait_until(first, DEADLINE_SECONDS)
        release(source.spool, "pipeline", first)
        wait_for(lambda: source.confirmed == first, "the consumer's position", lambda: source.confirmed)
        assert confirms(source) == "applied"
        for low in range(11, 40_011, 4000):
            source.insert(low, low + 3999, note="x" * 100)
        wait_for(lambda: confirms(source) == "spooled", "spooled", source.state)
        assert capture.wait_until(source.position, DEADLINE_SECONDS)
        wait_for_slot(source, capture.end)
        assert not capture.wait_until(BEYOND, 0.5)
        assert confirms(source) == "spooled", (
            "it stays while the consumer is behind, although the slot is not any more"
        )
        assert capture.end is not None
        level = release(source.spool, "pipeline", capture.end)
        # The restart point moves only to a logged list of running transactions.
        source.database.execute("CHECKPOINT")
        wait_for(lambda: confirms(source) == "applied", "applied", source.state)
        assert source.confirmed >= level
        before = source.confirmed
        assert capture.wait_until(source.insert(50_001, 50_010), DEADLINE_SECONDS)
        assert not capture.wait_until(BEYOND, 0.5)
        assert source.confirmed == before, "applied again: the new rows wait for the consumer"


def test_released_position_is_confirmed_by_a_capture_that_ends_while_it_waits_for_the_slot(
    source: Source,
) -> None:
    """After a crash the slot is taken until the server notices; a short run may be over before."""
    released = release(source.spool, "pipeline", source.capture_all(1, 10))
    before = source.confirmed
    with source.with_spool(source.spool.with_name("other")).capture() as other:
        wait_for(lambda: source.active_pid is not None, "a taken slot", source.state)
        with source.capture():
            source.trouble("PEN-1202")
            other.stop()
    assert before < released <= source.confirmed


def wait_for_slot(source: Source, end: Position | None) -> None:
    """At `end`, or after it if no transaction follows."""
    assert end is not None
    wait_for(lambda: source.confirmed >= end, f"the slot at {end}", lambda: source.confirmed)


def spool_beyond_applied(source: Source) -> Position:
    """Confirm more than the consumer has released; returns the released position."""
    applied = source.capture_all(1, 10)
    release(source.spool, "pipeline", applied)
    with source.capture(confirm=Confirm.SPOOLED) as capture:
        assert capture.wait_until(source.insert(11, 20), DEADLINE_SECONDS)
        wait_for_slot(source, capture.end)
    source.wait_idle()
    return applied


def confirms(source: Source) -> str | None:
    return source.status.confirms if source.status is not None else None


def test_a_spool_lost_after_spooled_is_a_hole_and_not_passed_over(source: Source) -> None:
    """The confirmed changes existed only in the spool."""
    applied = spool_beyond_applied(source)
    shutil.rmtree(source.spool)
    release(source.spool, "pipeline", applied)  # as every reader does before it starts a capture
    confirmed = source.confirmed
    for confirm in Confirm:
        error = source.failure(confirm=confirm)
        check_hole(error, source, confirmed, applied)
    assert source.confirmed == confirmed
    assert SpoolReader(source.spool).segments() == ()


def test_segments_lost_after_spooled_are_a_hole_too(source: Source) -> None:
    applied = spool_beyond_applied(source)
    shutil.rmtree(source.spool / "segments")
    confirmed = source.confirmed
    check_hole(source.failure(), source, confirmed, applied)
    assert source.confirmed == confirmed
    assert SpoolReader(source.spool).segments() == ()


def check_hole(error: PenstockError, source: Source, confirmed: Position, applied: Position) -> None:
    assert type(error) is PositionGapError
    assert str(error) == (
        f"PEN-1205: slot {source.slot} begins at {confirmed}, but its readers have only the commits up to "
        f"{applied}: "
        f"the {confirmed - applied} bytes of WAL in between can no longer be read\n  fix: {COPY_AGAIN}"
    )
