"""Read changes with deadlines, for the conformance suites: a stream that hangs fails its test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from penstock.contracts.capture import Change, ChangeStream, Delete, Event, Truncate, Upsert
from penstock.schema import TableName

T = TypeVar("T")

Seen = tuple[TableName, str, object, object]
"""An event of the suite's tables: table, operation, `id`, `note`."""


class Background(Generic[T]):
    """Runs `call`, which may block, in a daemon thread."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._results: list[T] = []
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(
            target=self._run, args=(call,), name="penstock-conformance", daemon=True
        )
        self._thread.start()

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._results.append(call())
        except BaseException as error:  # noqa: BLE001 - the thread's edge: `result` raises it
            self._failures.append(error)

    def is_over(self, within_seconds: float) -> bool:
        self._thread.join(within_seconds)
        return not self._thread.is_alive()

    def result(self, deadline_seconds: float, what: str) -> T:
        self._thread.join(deadline_seconds)
        assert not self._thread.is_alive(), f"{what} did not come within {deadline_seconds:g} s"
        if self._failures:
            raise self._failures[0]
        return self._results[0]


def take(stream: ChangeStream, count: int, deadline_seconds: float) -> list[Change]:
    """Return the next `count` changes, without reading further."""
    taken: list[Change] = []

    def read() -> None:
        while len(taken) < count:
            taken.append(next(stream))

    try:
        Background(read).result(deadline_seconds, f"{count} changes" if count > 1 else "a change")
    except AssertionError as error:
        raise AssertionError(f"{error}; received before it: {[seen(change) for change in taken]}") from None
    except StopIteration:
        raise AssertionError(
            f"the stream ended after {[seen(change) for change in taken]}; a live stream must not end"
        ) from None
    return taken


def take_until(stream: ChangeStream, last: Event, deadline_seconds: float) -> list[Change]:
    """Return the next changes up to and including `last`, a marker that the caller has committed."""
    taken: list[Change] = []
    while not taken or seen(taken[-1]) != seen_event(last):
        taken += take(stream, 1, deadline_seconds)
    return taken


def wait_for(
    condition: Callable[[], bool], what: str, state: Callable[[], object], deadline_seconds: float
) -> None:
    deadline = time.monotonic() + deadline_seconds
    while not condition():
        assert time.monotonic() < deadline, (
            f"{what} was not reached within {deadline_seconds:g} s; at the end: {state()}"
        )
        time.sleep(0.02)


def seen(change: Change) -> Seen:
    return seen_event(change.event)


def seen_event(event: Event) -> Seen:
    match event:
        case Upsert():
            return event.table, "upsert", event.key["id"], event.row["note"]
        case Delete():
            return event.table, "delete", event.key["id"], None
        case Truncate():
            return event.table, "truncate", None, None


def check_same(found: Sequence[Change], expected: Sequence[Event], what: str) -> None:
    assert [seen(change) for change in found] == [seen_event(event) for event in expected], what


def check_same_set(found: Sequence[Change], expected: Sequence[Event], what: str) -> None:
    """Compare without regard to order."""
    assert sorted(map(seen, found), key=repr) == sorted(map(seen_event, expected), key=repr), what
