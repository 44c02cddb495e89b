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

from penstock.errors import ConnectionLostError, PenstockError, Recovery, SchemaChangedError, TargetRewoundError
from penstock.pipeline.epochs import Epoch, EpochLog
from penstock.pipeline.observer import EpochReport, PipelineObserver
from penstock.pipeline.states import TableState, TableStatus
from penstock.position import Position
from penstock.postgres.types.policy import TypePolicy
from penstock.schema import TableName
from penstock.sinks.base import Sink, TableChanges, Target
from penstock.spool.consumers import forget, release
from penstock.spool.range import SpoolRange
from penstock.spool.reader import SpoolReader
from penstock.spool.values import check_values
from penstock.spool.waiting import wait_for_end

_WORKERS = 4
_CATCH_UP_SECONDS = 3600.0
_ATTEMPTS = 3
_PAUSE_SECONDS = 0.5


class EpochApplier:
    """Owns the tables' states while the pipeline streams. Called by one thread at a time."""

    def __init__(
        self,
        sink: Sink,
        log: EpochLog,
        spool: Path,
        *,
        consumer: str,
        system: str,
        observer: PipelineObserver,
        types: TypePolicy = TypePolicy.DEFAULT,
    ) -> None:
        self._sink = sink
        self._log = log
        self._reader = SpoolReader(spool)
        self._consumer = consumer
        self._system = system
        self._observer = observer
        self._types = types
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
        # A target that was put back needs ground that was released before: begin with what all of them hold.
        held = [status.applied for status in statuses.values() if status.state is not TableState.FAILED and status.applied is not None]
        forget(self._reader.root, self._consumer)
        release(self._reader.root, self._consumer, min([self.position, *held]))

    def apply(self, end: Position) -> None:
        """Bring every table to `end`, or to what is recorded if that is further; record it, release it. Doing it twice changes nothing."""
        started = time.monotonic()
        is_new = end > self.position
        end = max(end, self.position)
        behind = {status.applied for status in self.statuses.values() if _is_behind(status, end)}
        if not behind and not is_new:
            self._mark_streaming(end)
            return
        reached = wait_for_end(self._reader, end, timeout_seconds=_CATCH_UP_SECONDS)
        if reached is None or reached < end:
            raise ConnectionLostError(f"the capture did not get back to {end} in {_CATCH_UP_SECONDS:.0f} s")
        ranges = {start: self._reader.read(start, end) for start in behind if start is not None}
        self._fail_renamed(ranges)
        work = self._plan(ranges)
        with ThreadPoolExecutor(_WORKERS, thread_name_prefix="penstock-apply") as pool:
            failures = dict(zip([changes.table for changes in work], pool.map(lambda each: self._apply_one(each, end), work), strict=True))
        self._take_failures({name: error for name, error in failures.items() if error is not None})
        commit_time = max((each.commit_time for each in ranges.values() if each.commit_time), default=None)
        rows = sum(changes.counts.rows for changes in work)
        self._record(Epoch(self._next_number(), end, commit_time, self._system), rows, time.monotonic() - started)

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
                for oid in {slice.file.oid for slice in found.slices}:
                    owner = owners.get(oid)
                    if owner is not None and owner != found.table and self.statuses[owner].applied == start:
                        hint = f"add {found.table} to the tables and remove {self._sink.describe(owner)}"
                        self._fail(owner, SchemaChangedError(f"table {owner} is now called {found.table}", hint=hint))

    def _apply_one(self, changes: TableChanges, end: Position) -> PenstockError | None:
        """One table; gives back what that table cannot do. What time can mend is tried again, then fails the epoch."""
        for attempt in range(_ATTEMPTS):
            try:
                check_values(changes.table, changes.slices, refuse_inexact=self._types.refuses_inexact)
                self._sink.apply(self._targets[changes.table], changes, end)
            except PenstockError as error:
                if error.recovery is not Recovery.RETRY:
                    return error
                if attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(_PAUSE_SECONDS * 2**attempt)
            else:
                self.statuses[changes.table] = TableStatus(TableState.STREAMING, end, end)
                break
        return None

    def _take_failures(self, failures: Mapping[TableName, PenstockError]) -> None:
        """Tables fail one by one; but if all targets are gone at once, the place where they stand is away, and no table is at fault."""
        gone = [error for error in failures.values() if isinstance(error, TargetRewoundError)]
        if gone and all(self._sink.load_target(name) is None for name in self._live()):
            raise gone[0]
        for name, error in failures.items():
            self._fail(name, error)

    def _live(self) -> list[TableName]:
        return [name for name, status in self.statuses.items() if status.state is not TableState.FAILED]

    def _fail(self, name: TableName, error: PenstockError) -> None:
        status = TableStatus.failed(error, self.statuses[name].applied)
        self.statuses[name] = status
        self._observer.table_failed(name, status)

    def _record(self, epoch: Epoch, rows: int, seconds: float) -> None:
        self._mark_streaming(epoch.position)
        recorded = replace(epoch, tables=dict(self.statuses))
        self._log.record(recorded)
        self.last = recorded
        release(self._reader.root, self._consumer, epoch.position)
        self._observer.epoch_recorded(EpochReport(epoch.number, epoch.position, rows, epoch.commit_time, seconds, dict(self.statuses)))

    def _mark_streaming(self, end: Position) -> None:
        for name in self._live():
            status = self.statuses[name]
            self.statuses[name] = replace(status, state=TableState.STREAMING, applied=max(end, status.applied or end))

    @property
    def is_level(self) -> bool:
        """Whether every table has been through an epoch of this run, or failed."""
        return all(status.state in (TableState.STREAMING, TableState.FAILED) for status in self.statuses.values())

    def _next_number(self) -> int:
        return self.last.number + 1 if self.last is not None else 1


def _is_behind(status: TableStatus, end: Position) -> bool:
    return status.state is not TableState.FAILED and status.applied is not None and status.applied < end
