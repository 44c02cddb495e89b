"""The smallest implementation of the change capture contract: a list of transactions, and a number.

`Journal` represents the source and its durable state; everything else may be lost at any time. Run it to see
changes, or use it as a template for your own capture: `tests/contract/test_list_capture.py` runs
`ChangeCaptureConformance` against it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from datetime import UTC, datetime

from typing_extensions import override

from penstock import Ack, Change, ChangeCapture, Delete, Position, TableName, Truncate, Upsert
from penstock.contracts.capture import UNTRACKED, Commit, Event, Key


class Journal:
    """Committed transactions, and how many of them were confirmed; None until the first `live`."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.transactions: list[tuple[Event, ...]] = []
        self.resume: int | None = None

    def commit(self, *events: Event) -> None:
        with self.changed:
            self.transactions.append(events)
            self.changed.notify_all()


class Ledger:
    """The delivered but unconfirmed transactions of one stream, each with its unconfirmed changes."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._waiting: deque[tuple[int, set[int]]] = deque()

    def deliver(self, at: int, changes: int) -> list[ListAck]:
        """Add a whole transaction before its first change is delivered, so that it cannot count as confirmed
        too early.
        """
        unconfirmed = set(range(changes))
        with self._journal.changed:
            self._waiting.append((at, unconfirmed))
            self._advance()
        return [ListAck(self, unconfirmed, ordinal) for ordinal in range(changes)]

    def confirm(self, unconfirmed: set[int], ordinal: int) -> None:
        with self._journal.changed:
            unconfirmed.discard(ordinal)
            self._advance()

    def _advance(self) -> None:
        """Advance over whole transactions, oldest first, up to the first one with an unconfirmed change."""
        while self._waiting and not self._waiting[0][1]:
            self._journal.resume = self._waiting.popleft()[0] + 1


class ListAck(Ack):
    """Refers to one change only, so it may be confirmed in any order, from any thread, any number
    of times.
    """

    def __init__(self, ledger: Ledger, unconfirmed: set[int], ordinal: int) -> None:
        self._ledger = ledger
        self._unconfirmed = unconfirmed
        self._ordinal = ordinal

    @override
    def confirm(self) -> None:
        self._ledger.confirm(self._unconfirmed, self._ordinal)


class ListCapture(ChangeCapture):
    """Captures some tables of a journal."""

    def __init__(self, journal: Journal, tables: frozenset[TableName]) -> None:
        self._journal = journal
        self._tables = tables

    @override
    def live(self) -> Generator[Change]:
        # Not in the generator: it starts only at the first `next`, and commits before that could be missed.
        with self._journal.changed:
            if self._journal.resume is None:
                self._journal.resume = len(self._journal.transactions)
            return self._follow(self._journal.resume)

    def _follow(self, at: int) -> Generator[Change]:
        journal, ledger = self._journal, Ledger(self._journal)
        while True:
            with journal.changed:
                while len(journal.transactions) <= at:
                    journal.changed.wait()
                events = [event for event in journal.transactions[at] if event.table in self._tables]
            for ordinal, (event, ack) in enumerate(zip(events, ledger.deliver(at, len(events)), strict=True)):
                yield Change(event, ack, Commit(Position.of(at), datetime.now(UTC), ordinal))
            at += 1

    @override
    def snapshot(self, tables: Sequence[TableName]) -> Generator[Change]:
        rows: dict[tuple[TableName, tuple[object, ...]], Upsert] = {}
        with self._journal.changed:
            transactions = list(self._journal.transactions)
        for event in (event for events in transactions for event in events if event.table in tables):
            match event:
                case Upsert():
                    rows[event.table, _values(event.key)] = event
                case Delete():
                    rows.pop((event.table, _values(event.key)), None)
                case Truncate():
                    rows = {place: row for place, row in rows.items() if place[0] != event.table}
        for row in rows.values():
            yield Change(row, UNTRACKED)

    @override
    def lag(self) -> int | None:
        """The lag in transactions, because a list has no bytes."""
        with self._journal.changed:
            return (
                None
                if self._journal.resume is None
                else len(self._journal.transactions) - self._journal.resume
            )


def _values(key: Key) -> tuple[object, ...]:
    return tuple(key.values())


def main() -> None:
    table = TableName("public", "t")
    journal = Journal()
    capture = ListCapture(journal, frozenset({table}))
    with closing(capture.live()) as changes:
        journal.commit(Upsert(table, {"id": 1}, {"id": 1, "note": "hello"}))
        journal.commit(Delete(table, {"id": 1}))
        for change in changes:
            print(change.event)
            change.ack.confirm()
            if isinstance(change.event, Delete):
                break
    print("behind by", capture.lag())


if __name__ == "__main__":
    main()
