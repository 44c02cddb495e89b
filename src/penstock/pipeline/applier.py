"""Apply epochs: apply all changes up to a position to every table, then record the epoch and release the
spool.

Exactly-once delivery depends on this order. The commit of a table stores its applied position. The epoch is
recorded when every streaming table has reached the epoch's end. Only recorded positions are released, and
with `confirm: applied` only released positions are confirmed to the source. After a crash between two of
these steps, work is repeated, and each table skips the part that its applied position shows to be done.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

from penstock.errors import (
    ConnectionLostError,
    SchemaChangedError,
    SinkError,
    SpoolGapError,
    TargetRewoundError,
)
from penstock.pipeline.dead_letters.queue import DeadLetterQueue
from penstock.pipeline.epoch_log import Epoch, EpochLog
from penstock.pipeline.error_policy import Action, Verdict, decide, final
from penstock.pipeline.observer import EpochReport, PipelineObserver
from penstock.pipeline.routing import is_behind, plan_work
from penstock.pipeline.schema_changes.tracker import CatalogSnapshot, SchemaTracker
from penstock.pipeline.snapshots.resync import Resyncs
from penstock.pipeline.table_lifecycle import TableLifecycle
from penstock.pipeline.table_states import TableEvent, TableState, TableStatus
from penstock.position import Position
from penstock.postgres.publication import PREFIX
from penstock.retry import Backoff
from penstock.schema import TableName
from penstock.sinks.base import Sink, TableChanges, Target
from penstock.sinks.evolution import ResyncRequired
from penstock.sinks.lineage import AlterationReader
from penstock.spool.reader import SpoolRange, SpoolReader
from penstock.spool.rows import check_identified
from penstock.spool.status import wait_for_end

_log = logging.getLogger(__name__)

_QUICK_ATTEMPTS = 3
_QUICK_PAUSE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class TableApplier:
    """Apply one epoch to one table.

    The order matters: include the dead letters to replay, evolve the target schema, divert rejected rows to
    the dead-letter queue, write the rest. Runs on the epoch's worker threads; only one thread at a time works
    on a table.
    """

    sink: Sink
    tracker: SchemaTracker
    dead_letters: DeadLetterQueue

    def apply(self, target: Target, changes: TableChanges, end: Position) -> Target | None:
        """Call `apply_once`, and return its result. If it raises a plain `SinkError`, such as after a commit
        conflict, call it up to three times.
        """
        backoff = Backoff(_QUICK_PAUSE_SECONDS)
        while True:
            try:
                return self.apply_once(target, changes, end)
            except SinkError as error:
                pause = backoff.fail()
                if backoff.failures >= _QUICK_ATTEMPTS or type(error) is not SinkError:
                    raise
                time.sleep(pause)

    def apply_once(self, target: Target, changes: TableChanges, end: Position) -> Target | None:
        """Advance one table to `end`.

        Returns the target after the commit; None if there was nothing to apply.
        """
        check_identified(changes.slices)
        changes = self.dead_letters.include_due(
            target, changes, end, lambda slice: self.tracker.is_followed(target, slice)
        )
        changes = self.tracker.follow(self.sink, target, changes, end)
        if not changes.slices and changes.evolution is None and not self.dead_letters.is_due(changes.table):
            return None
        self.dead_letters.apply(self.sink, target, changes, end)
        if changes.evolution is None:
            return target
        return self.sink.load_target(changes.table) or target


_WORKERS = 4
_CATCH_UP_SECONDS = 3600.0
_IDLE_SECONDS = 1.0


class EpochApplier:
    """Applies epochs to all tables, one epoch at a time.

    Epochs run on the query's thread and, while the source is idle, on the main thread. A lock ensures that
    only one runs at a time.

    `tables` has the states of the tables. It also runs the requests of other threads, between two epochs.
    """

    def __init__(
        self,
        sink: Sink,
        log: EpochLog,
        tables: TableLifecycle,
        reader: SpoolReader,
        *,
        system: str,
        observer: PipelineObserver,
        tracker: SchemaTracker,
        dead_letters: DeadLetterQueue,
        resyncs: Resyncs,
        check_shared: Callable[[], None],
    ) -> None:
        """`check_shared` raises an error if Spark, the target or the source does not work, so that no table
        fails for a shared cause.
        """
        self._sink = sink
        self._log = log
        self.tables = tables
        self._reader = reader
        self._system = system
        self._observer = observer
        self._tracker = tracker
        self._dead_letters = dead_letters
        self._resyncs = resyncs
        self._table_applier = TableApplier(sink, tracker, dead_letters)
        self._failures = TableFailures(tables, sink, observer, check_shared)
        self._lock = threading.Lock()
        self._ended_at = time.monotonic()
        self.hints = AlterationReader(PREFIX)
        self.last = log.last()

    @property
    def position(self) -> Position:
        """The recorded position: every streaming table holds all changes up to it."""
        return self.tables.recorded

    # called by the main thread
    # --------------------------------------------------------------------------------------------------

    def replay(self, names: Iterable[TableName]) -> bool:
        """Make the next epoch apply the open dead letters of these tables. Returns `is_replaying`."""
        for name in names:
            self._dead_letters.order_replay(name)
        return self.is_replaying

    def apply_if_idle(self) -> None:
        """Apply an epoch in the calling thread if the source is idle, and if a request, a retry, a resync or
        a schema change that the catalog showed is pending.
        """
        waits = self.tables.has_requests or self.tables.retries.has_due or self._resyncs.is_waiting
        is_idle = time.monotonic() - self._ended_at > _IDLE_SECONDS
        if is_idle and (waits or self._has_catalog_changes(self.position)):
            self.apply(self.position)

    def observe_catalog(self, snapshot: CatalogSnapshot) -> None:
        """Store the result of a catalog query, and request the resyncs that it makes necessary."""
        # A copy, because the thread of an epoch may add and remove targets at the same time.
        found = self._tracker.observe_catalog(self.tables.targets.copy(), snapshot)
        for name, reason in found.items():
            status = self.tables.statuses.get(name)
            if status is not None and status.is_followed:
                self.tables.request_resync(name, reason)

    @property
    def is_stuck(self) -> bool:
        """Whether a schema change that only the catalog shows can be applied only by an epoch that ends after
        the target's last commit. If the source is idle, such an epoch requires new WAL (`nudge`).
        """
        for name in self.tables.live():
            target, committed = self.tables.targets.get(name), self.tables.committed(name)
            if (
                target is not None
                and committed is not None
                and self._tracker.ahead(target, committed) is not None
            ):
                return True
        return False

    @property
    def is_level(self) -> bool:
        """Whether no table waits for a copy, a retry or its first epoch of this run, and no schema change or
        drop that the catalog showed is left to apply.
        """
        return self.tables.is_settled and not self._has_catalog_changes(None)

    @property
    def is_replaying(self) -> bool:
        """Whether a table to which epochs apply changes still has dead letters to replay."""
        return any(self._dead_letters.is_due(name) for name in self.tables.live())

    # one epoch
    # --------------------------------------------------------------------------------------------------------

    def apply(self, end: Position) -> None:
        """Advance every table to `end`, or to the recorded position if that is later. Then record the
        position and release the spool. Idempotent.
        """
        with self._lock:
            self.tables.run_requests()
            self._failures.resume_due()
            self._apply(end)
            self._ended_at = time.monotonic()

    def _apply(self, end: Position) -> None:
        started = time.monotonic()
        is_new = end > self.position
        end = max(end, self.position)
        has_swaps = self._resyncs.collect_copies()
        behind = {status.applied for status in self.tables.statuses.values() if is_behind(status, end)}
        if not behind and not is_new and not has_swaps and not self._has_catalog_changes(end):
            self.tables.mark_applied(end)
            self.tables.release()
            self.record_states()
            return
        self._await_spool(end)
        ranges = self._read(behind, end)
        renamed = self._renamed(ranges, end)
        swapped = self._resyncs.swap(self._reader, end)
        self.tables.mark_resynced(swapped)
        late = {
            target.applied
            for target in swapped.values()
            if target.applied is not None and target.applied < end
        }
        ranges |= self._read(late - ranges.keys(), end)
        work = self._apply_to_tables(ranges, end)
        self._mark_dropped(renamed, end)
        commit_time = max((each.commit_time for each in ranges.values() if each.commit_time), default=None)
        rows = sum(changes.counts.rows for changes in work)
        self._record(
            Epoch(self._next_number(), end, commit_time, self._system), rows, time.monotonic() - started
        )
        if swapped:
            self._resyncs.recorded(swapped)
            self.tables.release()

    def _await_spool(self, end: Position) -> None:
        """Wait until the spool reaches `end`. After a restart, Spark may have planned an epoch to a position
        that the spool has not reached again yet.
        """
        reached = wait_for_end(self._reader, end, timeout_seconds=_CATCH_UP_SECONDS)
        if reached is None or reached < end:
            raise ConnectionLostError(
                f"the capture did not reach {end} again within {_CATCH_UP_SECONDS:.0f} s"
            )

    def _read(self, starts: Iterable[Position | None], end: Position) -> dict[Position, SpoolRange]:
        """Read the spool from each position in `starts` to `end`.

        If changes after one of these positions are missing, only the tables applied up to it fail.
        """
        ranges: dict[Position, SpoolRange] = {}
        for start in starts:
            if start is None:
                continue
            try:
                ranges[start] = self._reader.read(start, end)
            except SpoolGapError as error:
                for name, status in self.tables.statuses.items():
                    if status.is_applied and status.applied == start:
                        hint = f"penstock tables resync CONFIG {name}"
                        self.tables.fail(name, TargetRewoundError(error.message, hint=hint))
        return ranges

    def _apply_to_tables(
        self, ranges: Mapping[Position, SpoolRange], end: Position
    ) -> Sequence[TableChanges]:
        """Apply the changes of all tables in parallel, and handle the errors. Returns the changes of each
        table.
        """
        tables = self.tables
        due = [name for name in tables.live() if self._is_ahead(name, end) or self._dead_letters.is_due(name)]
        work, unplanned = plan_work(
            tables.targets, tables.statuses, ranges, self._tracker.routed, due, hints=self.hints
        )
        with ThreadPoolExecutor(_WORKERS, thread_name_prefix="penstock-apply") as pool:
            errors = list(pool.map(lambda changes: self._apply_one(changes, end), work))
        failed: dict[TableName, Exception] = dict(unplanned)
        for changes, error in zip(work, errors, strict=True):
            if isinstance(error, ResyncRequired):
                tables.require_resync(changes.table, str(error))
            elif error is not None:
                failed[changes.table] = error
        self._failures.handle(failed)
        return work

    def _apply_one(self, changes: TableChanges, end: Position) -> Exception | None:
        """Apply one table's changes; returns the error, so that the other tables of the epoch continue."""
        name = changes.table
        try:
            target = self._table_applier.apply(self.tables.targets[name], changes, end)
        except Exception as error:  # noqa: BLE001 the edge of one table's work: the error policy decides
            return error
        if target is not None:
            self.tables.targets[name] = target
            self._mark_streaming(name, end)
        self.tables.retries.succeed(name)
        return None

    def _mark_streaming(self, name: TableName, end: Position) -> None:
        """Set the status after a commit of the table. If a table feature makes its epochs slow, warn once."""
        warning = self._sink.slow_warning(name)
        status = TableStatus(TableState.STREAMING, end, end)
        if warning is not None:
            status = replace(status, reason=f"{warning.code}: {warning.message}", remedy=warning.hint)
            if self.tables.statuses[name].reason != status.reason:
                self._observer.warned(warning)
        self.tables.transition(name, TableEvent.APPLIED, lambda _: status)

    def _record(self, epoch: Epoch, rows: int, seconds: float) -> None:
        self.tables.mark_applied(epoch.position)
        recorded = replace(epoch, tables=dict(self.tables.statuses))
        self._log.record(recorded)
        self.last = recorded
        self.tables.recorded = epoch.position
        self._resyncs.advance(epoch.position)
        self.tables.release()
        statuses = dict(self.tables.statuses)
        self._observer.epoch_recorded(
            EpochReport(epoch.number, epoch.position, rows, epoch.commit_time, seconds, statuses)
        )

    def record_states(self) -> None:
        """Record the tables' states if they differ from those in the last epoch record. `penstock status`
        reads the states from that record.
        """
        if self.last is not None and self.last.tables != self.tables.statuses:
            self._record(
                Epoch(self._next_number(), self.position, self.last.commit_time, self._system), 0, 0.0
            )

    def _next_number(self) -> int:
        return self.last.number + 1 if self.last is not None else 1

    # schema changes in an epoch
    # -------------------------------------------------------------------------------------------------

    def _is_ahead(self, name: TableName, end: Position | None) -> bool:
        """Whether the epoch that ends at `end` can apply a schema change that only the catalog shows. With
        `end` None: whether any epoch can.
        """
        target, committed = self.tables.targets.get(name), self.tables.committed(name)
        if target is None or (end is not None and committed is not None and committed >= end):
            return False
        return self._tracker.ahead(target, end) is not None

    def _has_catalog_changes(self, end: Position | None) -> bool:
        """Whether the epoch that ends at `end` can apply a drop or a schema change that only the catalog
        shows. With `end` None: whether any epoch can.
        """
        live = self.tables.live()
        return any(self._tracker.gone(name, end) is not None or self._is_ahead(name, end) for name in live)

    def _renamed(self, ranges: Mapping[Position, SpoolRange], end: Position) -> dict[TableName, str]:
        """Return the tables whose changes arrive under another name, each with the reason.

        Before the epoch applies any change, orders a resync of those tables that are resynced automatically.
        """
        statuses, targets = self.tables.statuses, self.tables.targets
        live = {
            name: (targets[name].source_oid, statuses[name].applied)
            for name in self.tables.live()
            if name in targets
        }
        found = self._tracker.renamed(live, ranges, end)
        for name, reason in found.items():
            if self._tracker.auto_resync(name):
                self.tables.order_resync(name, reason)
        return found

    def _mark_dropped(self, renamed: Mapping[TableName, str], end: Position) -> None:
        """Handle tables whose last change was in this epoch. Dropped tables become `gone`. Renamed tables
        wait for their resync, or fail.
        """
        for name in self.tables.live():
            gone = self._tracker.gone(name, end)
            if gone is not None:
                self.tables.mark_dropped(name, gone)
            elif name in renamed and self._tracker.auto_resync(name):
                self.tables.await_resync(name, renamed[name])
            elif name in renamed:
                hint = f"if it still exists, penstock tables resync CONFIG {name} copies its current rows"
                self.tables.fail(
                    name, SchemaChangedError(f"table {name} was renamed: {renamed[name]}", hint=hint)
                )

    def truncates(self, name: TableName) -> Collection[int]:
        """The ids (low 32 bits) of the transactions with a TRUNCATE of the table that epochs of this run have
        processed.
        """
        return self._tracker.truncates(name)


@dataclass(slots=True)
class TableFailures:
    """Applies the error policy to the tables of an epoch.

    The epoch's thread calls `resume_due` before the changes of the tables are applied, and `handle`
    afterwards.
    """

    tables: TableLifecycle
    sink: Sink
    observer: PipelineObserver
    check_shared: Callable[[], None]

    def handle(self, failures: Mapping[TableName, Exception]) -> None:
        """Retry or fail each table. Raises an error if the cause is shared, for example if all targets
        disappeared at once.
        """
        gone = [error for error in failures.values() if isinstance(error, TargetRewoundError)]
        if gone and all(self.sink.load_target(name) is None for name in self.tables.live()):
            raise gone[0]
        verdicts = {name: decide(error, name) for name, error in failures.items()}
        for name, verdict in verdicts.items():
            if verdict.action is Action.STOP:
                raise verdict.error from failures[name]
        if any(verdict.action is Action.RETRY_TABLE for verdict in verdicts.values()):
            self.check_shared()
        for name in [name for name, error in failures.items() if isinstance(error, ConnectionLostError)][:1]:
            self.sink.load_target(name)  # raises the same error if the target cannot be read at all
        for name, verdict in verdicts.items():
            if verdict.action is Action.FAIL_TABLE:
                self.tables.fail(name, verdict.error)
            else:
                self._back_off(name, verdict, failures[name])

    def _back_off(self, name: TableName, verdict: Verdict, cause: Exception) -> None:
        """Schedule another attempt in a later epoch. If this was the last attempt, fail the table."""
        pause = self.tables.retries.count(name, verdict)
        shown = final(verdict.error, name)
        facts = {
            "table": str(name),
            "code": shown.code,
            "cause": type(cause).__name__,
            "pause_seconds": pause,
        }
        # The message of a foreign exception may quote rows.
        _log.warning(
            "applying changes to a table failed",
            extra=facts,
            exc_info=cause if _log.isEnabledFor(logging.DEBUG) else None,
        )
        if pause is None:
            self.tables.fail(name, shown)
            return
        failures = self.tables.retries.failures(name)
        reason = f"{shown.code}: {shown.message}"
        tried = f"failed {failures} times in a row, next attempt in about {pause:.0f} s"
        self.tables.transition(
            name,
            TableEvent.APPLY_FAILED,
            lambda status: TableStatus(
                status.state, status.applied, status.committed, f"{reason}; {tried}", shown.hint
            ),
        )
        self.observer.interrupted(reason, pause)

    def resume_due(self) -> None:
        """Resume tables whose next attempt is due. The position is read from the target, because a commit may
        have succeeded although it raised an error.
        """
        retrying = [
            name for name, status in self.tables.statuses.items() if status.state is TableState.RETRYING
        ]
        for name in filter(self.tables.retries.is_due, retrying):
            applied = self.tables.statuses[name].applied
            with suppress(Exception):  # the next attempt raises the error again
                target = self.sink.load_target(name)
                if target is not None and target.applied is not None and applied is not None:
                    self.tables.targets[name] = target
                    applied = max(applied, target.applied)
            self.tables.transition(name, TableEvent.RETRY_DUE, _applied_to(applied))


def _applied_to(applied: Position | None) -> Callable[[TableStatus], TableStatus]:
    return lambda status: replace(status, applied=applied)
