"""Life cycle of the running pipeline's tables: their states, their targets, and the positions from which the
spool keeps their changes.

States change only by the transitions of `table_states`. Snapshot threads and the main thread may call the
methods of `TableLifecycle` at any time. A change that must not happen during an epoch is queued, and the next
epoch runs the queue first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from penstock.errors import PenstockError, SchemaChangedError, TableFailedError
from penstock.pipeline.dead_letters.queue import DeadLetterQueue
from penstock.pipeline.error_policy import ResyncLimit, TableRetries
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.snapshots.resync import Resyncs
from penstock.pipeline.table_states import TableEvent, TableState, TableStatus, is_allowed, next_state
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.base import Sink, Target
from penstock.spool.retention import release, set_released

_SETTLED = (TableState.STREAMING, TableState.PAUSED, TableState.FAILED, TableState.GONE)


class TableLifecycle:
    """The tables of one attempt of a run.

    `statuses` is replaced, never changed in place, so every thread reads a consistent view.
    """

    def __init__(
        self,
        sink: Sink,
        spool: Path,
        consumer: str,
        *,
        resyncs: Resyncs,
        dead_letters: DeadLetterQueue,
        observer: PipelineObserver,
        order_resync: Callable[[TableName, str], None],
        recorded: Position,
    ) -> None:
        """`order_resync` is called with a table whose changes cannot be applied to its target, and with the
        reason. It orders a resync of the table. `recorded` is the position of the last recorded epoch.
        """
        self._sink = sink
        self._spool = spool
        self._consumer = consumer
        self._resyncs = resyncs
        self._dead_letters = dead_letters
        self._observer = observer
        self.order_resync = order_resync
        self.recorded = recorded
        self.statuses: Mapping[TableName, TableStatus] = {}
        self.targets: dict[TableName, Target] = {}
        self.retries = TableRetries()
        self._limit = ResyncLimit()
        self._resync_reasons: dict[TableName, str] = {}
        self._kept: dict[TableName, Position] = {}
        self._requests: deque[Callable[[], None]] = deque()
        self._writing = threading.Lock()
        self._releasing = threading.Lock()

    # states
    # --------------------------------------------------------------------------------------------------------

    def transition(
        self, name: TableName, event: TableEvent, update: Callable[[TableStatus], TableStatus] | None = None
    ) -> bool:
        """Apply an event to a table. Returns whether the event is allowed in the table's state. If it is not,
        nothing changes.

        `update` computes the new status. It gets the old status with the new state already set. Without
        `update`, the new status is this one without reason and remedy.
        """
        with self._writing:
            known = self.statuses.get(name)
            before = None if known is None else known.state
            if not is_allowed(before, event):
                return False
            after = next_state(before, event)
            statuses = dict(self.statuses)
            if after is None:
                del statuses[name]
            else:
                status = TableStatus(after) if known is None else replace(known, state=after)
                status = _without_reason(status) if update is None else update(status)
                statuses[name] = replace(status, state=after)
            self.statuses = statuses
            return True

    def mark_applied(self, end: Position) -> None:
        """Set the state `streaming` for every table to which epochs apply changes, with `end` as the applied
        position unless the table has a later one.
        """
        with self._writing:
            live = {name: self.statuses[name] for name in self.live()}
            reached = {name: max(end, status.applied or end) for name, status in live.items()}
            self.statuses = {
                **self.statuses,
                **{name: status.streaming(reached[name]) for name, status in live.items()},
            }
        for name in live:
            self.retries.forget(name)

    def live(self) -> list[TableName]:
        """The tables to which the next epoch applies changes."""
        return [name for name, status in self.statuses.items() if status.is_applied]

    def committed(self, name: TableName) -> Position | None:
        """The position of the target's last commit."""
        status = self.statuses.get(name)
        return None if status is None else status.committed

    @property
    def oids(self) -> dict[TableName, int]:
        """The source OID of each table to which changes may still be applied."""
        statuses, targets = self.statuses, self.targets.copy()
        return {
            name: target.source_oid
            for name, target in targets.items()
            if name in statuses and not statuses[name].is_over
        }

    @property
    def is_settled(self) -> bool:
        """Whether every table is streaming, paused, failed or gone: none waits for a copy, a retry or an
        epoch.
        """
        return all(status.state in _SETTLED for status in self.statuses.values())

    @property
    def is_copying(self) -> bool:
        """Whether a table waits for the start or the end of its snapshot."""
        return any(
            status.state in (TableState.PENDING, TableState.SNAPSHOTTING) for status in self.statuses.values()
        )

    # adding and removing tables
    # ----------------------------------------------------------------------------------------------------

    def start(
        self,
        targets: Mapping[TableName, Target],
        statuses: Mapping[TableName, TableStatus],
        fences: Mapping[TableName, Position] = MappingProxyType({}),
    ) -> None:
        """Add the tables in the states that start-up determined. `fences` are the first fences of snapshots
        that an earlier run began.
        """
        self._kept.update(fences)
        self.targets = dict(targets)
        with self._writing:
            self.statuses = {**self.statuses, **statuses}
        self._dead_letters.begin(self.targets)
        # A target restored from a backup needs spool positions that were released before.
        self._keep_needed()

    def add_pending(self, name: TableName) -> None:
        """Add a table that waits for its snapshot. The spool keeps the table's changes from the recorded
        position on, so that it has all changes after the fence.

        If an earlier run began the snapshot, the spool keeps the changes from the snapshot's first fence on.
        """
        self._kept.setdefault(name, self.recorded)
        self.transition(name, TableEvent.FOUND, lambda status: TableStatus(status.state))
        self._dead_letters.supersede_all(name)

    def set_fence(self, name: TableName, fence: Position) -> None:
        """Set the fence of the table's snapshot. From then on, the spool keeps only the changes after the
        fence. Does nothing if the table was removed or has failed.
        """
        if self.transition(name, TableEvent.SNAPSHOT_STARTED, lambda status: TableStatus(status.state)):
            self._kept[name] = fence
            self.request_epoch()  # the epoch releases the changes before the fence

    def add_copied(self, target: Target) -> None:
        """Hand over a table whose snapshot is complete. The next epoch applies its changes."""
        self._requests.append(lambda: self._add_copied(target))

    def _add_copied(self, target: Target) -> None:
        name, applied = target.table, target.applied
        if self.transition(
            name, TableEvent.COPIED, lambda status: TableStatus(status.state, applied, applied)
        ):
            self.targets[name] = target
            self._kept.pop(name, None)
        else:
            # The table was removed while it was copied, and perhaps added again.
            self._sink.release_ownership(name)

    def add_filled(self, target: Target, *, paused: bool) -> None:
        """Add a table that already has a complete target.

        The spool keeps its changes until the next epoch applies them.
        """
        assert target.applied is not None
        self.transition(target.table, TableEvent.FOUND, lambda status: TableStatus(status.state))
        with self._releasing:
            self._kept[target.table] = target.applied
            set_released(self._spool, self._consumer, self._needed())
        self.add_copied(target)
        if paused:
            self.pause(target.table)

    def add_inactive(self, name: TableName, status: TableStatus) -> None:
        """Add a table that failed, or was paused before its snapshot."""
        event = TableEvent.PAUSED if status.state is TableState.PAUSED else TableEvent.FAILED
        self.transition(name, event, lambda _: status)

    def add_adopted(self, name: TableName) -> None:
        """Add a table whose target was written by another program. The target keeps its rows until a resync
        replaces them.
        """
        self.transition(name, TableEvent.ADOPTED, lambda status: TableStatus(status.state))
        self._resync_reasons[name] = "it was not written by this pipeline"

    def remove(self, name: TableName, then: Callable[[], None] = lambda: None) -> None:
        """Remove the table at the start of the next epoch, and then call `then`. Neither that epoch nor a
        later one writes to its target.
        """

        def part() -> None:
            self.transition(name, TableEvent.REMOVED)
            self.targets.pop(name, None)
            self._kept.pop(name, None)
            self._resync_reasons.pop(name, None)
            self.retries.forget(name)
            then()

        self._requests.append(part)

    # operator requests
    # --------------------------------------------------------------------------------------------------------

    def pause(self, name: TableName) -> None:
        """Pause the table. From the next epoch on, its target does not change, and the spool keeps its
        changes.
        """
        self._requests.append(lambda: self._pause_or_resume(name, TableEvent.PAUSED))

    def resume(self, name: TableName) -> None:
        """Resume the table. The next epoch applies the changes that the spool kept."""
        self._requests.append(lambda: self._pause_or_resume(name, TableEvent.RESUMED))

    def _pause_or_resume(self, name: TableName, event: TableEvent) -> None:
        if name in self.statuses and self.transition(name, event):
            self.retries.forget(name)

    # resyncs and failures
    # --------------------------------------------------------------------------------------------------------

    def request_resync(self, name: TableName, reason: str) -> None:
        """Order a resync of the table before the next epoch."""
        self._requests.append(lambda: self.require_resync(name, reason))

    def require_resync(self, name: TableName, reason: str) -> None:
        """Order a resync of a table whose changes cannot be applied to its target. After too many resyncs
        within an hour (`ResyncLimit`), the table fails instead.
        """
        status = self.statuses.get(name)
        if status is None or not status.is_followed:
            return
        try:
            self._limit.check(name, reason)
        except TableFailedError as error:
            self.fail(name, error)
        else:
            self.order_resync(name, reason)
            self.await_resync(name, reason)

    def await_resync(self, name: TableName, reason: str) -> None:
        """Stop applying changes to the table until the ordered resync replaces its target. The spool keeps
        the changes.
        """
        if self.transition(name, TableEvent.RESYNC_REQUIRED):
            self.retries.forget(name)
            self._resync_reasons[name] = reason

    def mark_resynced(self, targets: Mapping[TableName, Target]) -> None:
        """Continue with the new targets of resynced tables, and clear the tables' errors."""
        for name, target in targets.items():
            self.targets[name] = target
            self._resync_reasons.pop(name, None)
            self.retries.forget(name)
            self.transition(name, TableEvent.RESYNCED, _at(target.applied))

    def resync_failed(self, name: TableName, reason: str) -> None:
        """Handle the end of a resync that did not replace the target. Fails the table if it cannot continue
        without a resync.
        """
        self._resyncs.stop_pausing(name)
        if name in self._resync_reasons:
            why = (
                f"table {name} needs a resync: {self._resync_reasons.pop(name)}; and its resync failed: "
                f"{reason}"
            )
            self.fail(
                name,
                SchemaChangedError(why, hint=f"remove the cause, then penstock tables resync CONFIG {name}"),
            )

    def request_dropped(self, name: TableName, reason: str) -> None:
        """Mark the table as dropped at the source, before the next epoch."""
        self._requests.append(lambda: self.mark_dropped(name, reason))

    def mark_dropped(self, name: TableName, reason: str) -> None:
        """Mark a table as dropped at the source. The target has all changes of the table."""
        self._resyncs.stop_pausing(name)
        remedy = f"penstock tables remove CONFIG {name} removes it from the pipeline and keeps its target"
        if self.transition(
            name, TableEvent.DROPPED, lambda status: replace(status, reason=reason, remedy=remedy)
        ):
            self._resync_reasons.pop(name, None)
            self.retries.forget(name)
            self._observer.announced(f"{name} is gone: {reason}")

    def fail(self, name: TableName, error: PenstockError) -> None:
        """Fail the table and report it; the other tables continue."""
        before = self.statuses.get(name)
        if before is None:
            return
        failed = TableStatus.failed(error, before.applied)
        self.transition(name, TableEvent.FAILED, lambda _: failed)
        self._kept.pop(name, None)
        self.retries.forget(name)
        self.request_epoch()
        self._observer.table_failed(name, failed)

    def request_failure(self, name: TableName, error: PenstockError) -> None:
        """Fail the table before the next epoch, unless it is failed or gone at that time."""

        def fail() -> None:
            if name in self.statuses and not self.statuses[name].is_over:
                self.fail(name, error)

        self._requests.append(fail)

    # the epoch's side
    # --------------------------------------------------------------------------------------------------------

    def request_epoch(self) -> None:
        """Request an epoch, even if the source is idle."""
        self._requests.append(lambda: None)

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def run_requests(self) -> None:
        """Run the queued requests. Called at the start of an epoch, by its thread."""
        while self._requests:
            self._requests.popleft()()

    # spool positions
    # --------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Release the spool up to the first position that a table needs. The lock keeps other threads from
        adding a table with an earlier position at the same time.
        """
        with self._releasing:
            release(self._spool, self._consumer, self._needed())

    def _keep_needed(self) -> None:
        """Keep the spool from the first position that a table needs, even if the spool was released up to a
        later position before.
        """
        with self._releasing:
            set_released(self._spool, self._consumer, self._needed())

    def _needed(self) -> Position:
        """The position up to which no table needs changes. It is the lowest of the recorded position, the
        applied positions, and the positions kept for snapshots and resyncs.
        """
        held = [
            status.applied
            for status in self.statuses.values()
            if not status.is_over and status.applied is not None
        ]
        return min([*held, *self._kept.copy().values(), self.recorded, *self._resyncs.holds])


def _without_reason(status: TableStatus) -> TableStatus:
    return replace(status, reason=None, remedy=None)


def _at(applied: Position | None) -> Callable[[TableStatus], TableStatus]:
    return lambda status: TableStatus(status.state, applied, applied)
