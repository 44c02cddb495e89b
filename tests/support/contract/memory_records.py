"""Records of an in-memory capture, read by the code that reads them from Postgres."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from typing_extensions import override

from examples.list_capture import Journal, Ledger, ListCapture
from penstock.contracts.capture import Change, Commit, Event, Upsert
from penstock.contracts.records import RecordSource
from penstock.errors import InvalidUrlError, NoTableError
from penstock.position import Position
from penstock.records.builder import RecordBuilder
from penstock.records.reader import RecordReading
from penstock.records.source import PostgresRecordSource
from penstock.records.stream import AckLedger
from penstock.schema import TableName
from penstock.testing.records_conformance import Config, RecordHarness

ELSEWHERE = TableName("public", "elsewhere")


class JournalStream:
    """The changes of a journal.

    Unlike a generator it can be closed by another thread while it waits, as that of a `WalCapture` can.
    """

    def __init__(self, journal: Journal, at: int) -> None:
        self._journal = journal
        self._ledger = Ledger(journal)
        self._at = at
        self._changes: deque[Change] = deque()
        self._is_closed = False

    def __iter__(self) -> JournalStream:
        return self

    def __next__(self) -> Change:
        with self._journal.changed:
            while not self._is_closed and not self._changes:
                if self._at < len(self._journal.transactions):
                    self._take(self._journal.transactions[self._at])
                else:
                    self._journal.changed.wait()
            if self._is_closed:
                raise StopIteration
            return self._changes.popleft()

    def close(self) -> None:
        with self._journal.changed:
            self._is_closed = True
            self._journal.changed.notify_all()

    def _take(self, events: tuple[Event, ...]) -> None:
        for ordinal, (event, ack) in enumerate(
            zip(events, self._ledger.deliver(self._at, len(events)), strict=True)
        ):
            self._changes.append(
                Change(
                    event, ack, Commit(Position.of(self._at), datetime.fromtimestamp(self._at, UTC), ordinal)
                )
            )
        self._at += 1


class MemoryCapture(ListCapture):
    """Adds the position at which a snapshot is exact."""

    @override
    def live(self) -> JournalStream:  # type: ignore[override]
        with self._journal.changed:
            if self._journal.resume is None:
                self._journal.resume = len(self._journal.transactions)
            return JournalStream(self._journal, self._journal.resume)

    @override
    def snapshot(self, tables: Sequence[TableName]) -> Generator[Change]:
        with self._journal.changed:
            commit = Commit(Position.of(len(self._journal.transactions) - 1))
            changes = list(super().snapshot(tables))
        yield from (replace(change, commit=commit) for change in changes)


class MemoryRecordSource(PostgresRecordSource):
    def __init__(self, journals: Mapping[str, Journal], spool: Path) -> None:
        super().__init__()
        self._journals = journals
        self._spool = spool

    @override
    def validate(self, config: Mapping[str, str]) -> None:
        if not config.get("table"):
            raise NoTableError("no table")
        if not config.get("url", "").startswith("memory:"):
            raise InvalidUrlError("not an address")

    def die(self) -> None:
        """Simulates SIGKILL: nothing is written, and threads and streams are gone."""
        assert self._reading is not None
        for each in (self._reading._stream, self._reading._live):
            if each is not None:
                each.close()

    @override
    def _begin(self, config: Mapping[str, str]) -> RecordReading:
        journal = self._journals.get(config["url"].removeprefix("memory:"))
        if journal is None:
            raise InvalidUrlError("no server is there")
        table = TableName.parse(config["table"])
        return RecordReading(
            MemoryCapture(journal, frozenset({table})),
            RecordBuilder(table),
            AckLedger(self._spool),
            Position.of(len(journal.transactions)),
            takes_snapshot=config.get("snapshot") != "never",
            wait_seconds=0.02,
        )


class MemoryRecordHarness(RecordHarness):
    deadline_seconds = 5.0

    def __init__(self, spool: Path) -> None:
        self.spool = spool
        self.journal = Journal()
        self.journal.commit(Upsert(ELSEWHERE, {"id": 0}, {"id": 0}))  # no commit is at position zero

    @override
    def commit(self, *events: Event) -> None:
        self.journal.commit(*events)

    @override
    def source(self) -> RecordSource:
        return MemoryRecordSource({"here": self.journal}, self.spool)

    @override
    def config(self) -> Config:
        return {"url": "memory:here", "table": str(self.table)}

    @override
    def config_without_table(self) -> Config:
        return {**self.config(), "table": ""}

    @override
    def config_without_address(self) -> Config:
        return {**self.config(), "url": "here"}

    @override
    def config_of_nobody(self) -> Config:
        return {**self.config(), "url": "memory:nowhere"}
