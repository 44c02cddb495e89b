"""Applying epochs: everything that committed up to a position, to every table, then the record of it, then the release.

The order of these three is the whole of exactly-once: a table's own commit holds its position; the epoch is recorded when every table is
there; only what is recorded is released, and only what is released is ever confirmed to the source. A crash between any two of them
repeats work that each table recognises as done.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from penstock.errors import ConnectionLostError, PenstockError, Recovery, SchemaChangedError
from penstock.pipeline.epochs import Epoch, EpochLog
from penstock.pipeline.observer import EpochReport, PipelineObserver
from penstock.pipeline.states import TableState, TableStatus
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.base import Sink, TableChanges, Target
from penstock.spool.consumers import release
from penstock.spool.range import SpoolRange
from penstock.spool.reader import SpoolReader
from penstock.spool.waiting import wait_for_end

_WORKERS = 4
_CATCH_UP_SECONDS = 3600.0
_ATTEMPTS = 3


class EpochApplier:
    """Owns the tables' states while the pipeline streams. Called by one thread at a time."""

    def __init__(
        self, sink: Sink, log: EpochLog, spool: Path, *, consumer: str, system_identifier: str, observer: PipelineObserver
    ) -> None:
        self._sink = sink
        self._log = log
        self._reader = SpoolReader(spool)
        self._consumer = consumer
        self._system_identifier = system_identifier
        self._observer = observer
        self._targets: dict[TableName, Target] = {}
        self.statuses: dict[TableName, TableStatus] = {}
        self.last = log.last()

    @property
    def position(self) -> Position:
        """What is recorded: every streaming table holds everything up to here."""
        return self.last.position if self.last is not None else Position.ZERO

    def adopt(self, targets: Mapping[TableName, Target], statuses: Mapping[TableName, TableStatus]) -> None:
        """Take over the tables as they stand after start-up."""
        self._targets = dict(targets)
        self.statuses = dict(statuses)
        release(self._reader.root, self._consumer, self.position)

    def apply(self, end: Position) -> None:
        """Bring every table to `end`, or to what is recorded if that is further; record it, release it. Doing it twice changes nothing."""
        started = time.monotonic()
        is_new = end > self.position
        end = max(end, self.position)
        behind = {status.applied for status in self.statuses.values() if _is_behind(status, end)}
        if not behind and not is_new:
            return
        reached = wait_for_end(self._reader, end, timeout_seconds=_CATCH_UP_SECONDS)
        if reached is None or reached < end:
            raise ConnectionLostError(f"the capture did not get back to {end} in {_CATCH_UP_SECONDS:.0f} s")
        ranges = {start: self._reader.read(start, end) for start in behind if start is not None}
        self._fail_renamed(ranges)
        work = self._plan(ranges)
        with ThreadPoolExecutor(_WORKERS, thread_name_prefix="penstock-apply") as pool:
            list(pool.map(lambda changes: self._apply_one(changes, end), work))
        commit_time = max((each.commit_time for each in ranges.values() if each.commit_time), default=None)
        rows = sum(changes.counts.rows for changes in work)
        self._record(Epoch(self._next_number(), end, commit_time, self._system_identifier), rows, time.monotonic() - started)

    def _plan(self, ranges: Mapping[Position, SpoolRange]) -> list[TableChanges]:
        """What each table has to take in, read from where that table stands; the largest first."""
        work = []
        for name, status in self.statuses.items():
            if status.state is not TableState.FAILED and status.applied is not None and status.applied in ranges:
                found = ranges[status.applied].tables.get(name)
                if found is not None:
                    work.append(TableChanges(name, found.slices, found.counts))
        return sorted(work, key=lambda changes: -changes.counts.rows)

    def _fail_renamed(self, ranges: Mapping[Position, SpoolRange]) -> None:
        """A table is its OID: changes that come under another name belong to a target that would silently fall behind."""
        owners = {target.source_oid: name for name, target in self._targets.items()}
        for start, each in ranges.items():
            for found in each.tables.values():
                owner = owners.get(found.slices[0].file.oid)
                if owner is not None and owner != found.table and self.statuses[owner].applied == start:
                    hint = f"rename it back, or add {found.table} to the tables and remove {self._sink.describe(owner)}"
                    self._fail(owner, SchemaChangedError(f"table {owner} is now called {found.table}", hint=hint))

    def _apply_one(self, changes: TableChanges, end: Position) -> None:
        """One table. What the table itself cannot do fails it alone; what time can mend is tried again, then fails the epoch."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._sink.apply(self._targets[changes.table], changes, end)
            except PenstockError as error:
                if error.recovery is Recovery.RETRY and attempt < _ATTEMPTS:
                    continue
                if error.recovery is Recovery.RETRY:
                    raise
                self._fail(changes.table, error)
                return
            self.statuses[changes.table] = TableStatus(TableState.STREAMING, end, end)
            return

    def _fail(self, name: TableName, error: PenstockError) -> None:
        status = TableStatus.failed(error, self.statuses[name].applied)
        self.statuses[name] = status
        self._observer.table_failed(name, status)

    def _record(self, epoch: Epoch, rows: int, seconds: float) -> None:
        for name, status in self.statuses.items():
            if status.state is not TableState.FAILED:
                applied = max(epoch.position, status.applied or epoch.position)
                self.statuses[name] = replace(status, state=TableState.STREAMING, applied=applied)
        recorded = replace(epoch, tables=dict(self.statuses))
        self._log.record(recorded)
        self.last = recorded
        release(self._reader.root, self._consumer, epoch.position)
        self._observer.epoch_recorded(EpochReport(epoch.number, epoch.position, rows, epoch.commit_time, seconds, dict(self.statuses)))

    def _next_number(self) -> int:
        return self.last.number + 1 if self.last is not None else 1


def _is_behind(status: TableStatus, end: Position) -> bool:
    return status.state is not TableState.FAILED and status.applied is not None and status.applied < end
