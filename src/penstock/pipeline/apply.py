"""Applying epochs: everything that committed up to a position, to every table, then the record of it, then the release.

The order of these three is the whole of exactly-once: a table's own commit holds its position; the epoch is recorded when every table is
there; only what is recorded is released, and only what is released is ever confirmed to the source. A crash between any two of them
repeats work that each table recognises as done.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from penstock.errors import ConnectionLostError, PenstockError, SchemaChangedError, SpoolGapError, TableFailedError, TargetRewoundError
from penstock.pipeline.bringing import Bringer
from penstock.pipeline.epoch_work import is_behind, plan_work
from penstock.pipeline.epochs import Epoch, EpochLog
from penstock.pipeline.error_policy import ResyncLimit
from penstock.pipeline.following.follower import Follower
from penstock.pipeline.following.sightings import Look
from penstock.pipeline.following.watch import CatalogWatch
from penstock.pipeline.ledger import TableLedger
from penstock.pipeline.letters.box import LetterBox
from penstock.pipeline.observer import EpochReport, PipelineObserver
from penstock.pipeline.snapshots.shadows import Shadows
from penstock.pipeline.states import TableState, TableStatus
from penstock.pipeline.table_failures import TableFailures
from penstock.position import Position
from penstock.postgres.ddl_trigger import PREFIX
from penstock.postgres.types.policy import TypePolicy
from penstock.schema import TableName
from penstock.sinks.alterations import AlterationReader
from penstock.sinks.base import Sink, TableChanges, Target
from penstock.sinks.evolution import CopyAnew
from penstock.spool.range import SpoolRange
from penstock.spool.reader import SpoolReader
from penstock.spool.waiting import wait_for_end

_WORKERS = 4
_CATCH_UP_SECONDS = 3600.0
_IDLE_SECONDS = 1.0


class EpochApplier:
    """Owns the tables' states while the pipeline streams.

    Epochs come from the query's thread. What other threads ask for waits until the next epoch begins, so that nobody who copies waits for
    an epoch, and no table changes its state in the middle of one.
    """

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
        shadows: Shadows | None = None,
        follower: Follower | None = None,
        letters: LetterBox | None = None,
        on_anew: Callable[[TableName, str], None] = lambda _name, _reason: None,
        check_shared: Callable[[], None] = lambda: None,
    ) -> None:
        """Without `follower`, what is not of the target's shape is for the sink to refuse; without `letters`, a refused row stops it.

        `on_anew` is told of tables that have to be resynced, and why; they are left as they are until a shadow takes their place.
        `check_shared` raises if something that all tables need does not work: a table is not blamed for that.
        """
        self._sink = sink
        self._log = log
        self._reader = SpoolReader(spool)
        self._system = system
        self._observer = observer
        self._bringer = Bringer(sink, types, follower, letters)
        self._shadows = shadows
        self._letters = letters
        self._on_anew = on_anew
        self._resyncs = ResyncLimit()
        self._anew: dict[TableName, str] = {}
        self._ledger = TableLedger(spool, consumer, self._needed_besides)
        self._failures = TableFailures(self._ledger, sink, observer, check_shared, self.fail)
        self._retries = self._failures.retries
        self._watch = CatalogWatch(follower, self._ledger)
        self._requests: deque[Callable[[], None]] = deque()
        self._turn = threading.Lock()
        self._ended_at = time.monotonic()
        self.hints = AlterationReader(PREFIX)
        self.last = log.last()

    @property
    def position(self) -> Position:
        """What is recorded: every streaming table holds everything up to here."""
        return self.last.position if self.last is not None else Position.ZERO

    @property
    def statuses(self) -> Mapping[TableName, TableStatus]:
        """The tables as they stand at this moment."""
        return self._ledger.statuses

    @property
    def oids(self) -> dict[TableName, int]:
        """By which each table is known that something may still come into."""
        return self._ledger.oids()

    def adopt(
        self,
        targets: Mapping[TableName, Target],
        statuses: Mapping[TableName, TableStatus],
        begun: Mapping[TableName, Position] = MappingProxyType({}),
    ) -> None:
        """Take over the tables as they stand after start-up; of those that a former run has begun to copy, from which fence on."""
        for name, fence in begun.items():
            self._ledger.keep(name, fence)
        self._ledger.targets = dict(targets)
        self._ledger.write(statuses)
        if self._letters is not None:
            self._letters.begin(self._ledger.targets)
        # A target that was put back needs ground that was released before: begin with what all of them hold.
        self._ledger.claim()

    def expect(self, name: TableName) -> None:
        """Keep the changes of a table that is about to be copied, from now on; so its fence cannot lie before what is kept.

        What a former run has begun to copy is held already, from its first fence on.
        """
        self._ledger.keep_unless_kept(name, self.position)
        self._ledger.write({name: TableStatus(TableState.PENDING)})
        if self._letters is not None:
            self._letters.void(name)

    def hold(self, name: TableName, fence: Position) -> None:
        """The table is being copied: what comes after its first fence is kept. One that was removed meanwhile is nobody's."""
        if name in self.statuses:
            self._ledger.keep(name, fence)
            self._ledger.write({name: TableStatus(TableState.SNAPSHOTTING)})
            self._requests.append(_nothing)  # perhaps something can be released

    def enter(self, target: Target) -> None:
        """Take over a table that has been copied. The next epoch brings it to where the others are."""
        self._requests.append(lambda: self._enter(target))

    def pause(self, name: TableName) -> None:
        """From the next epoch on, leave the table as it is, and keep its changes."""
        self._requests.append(lambda: self._change(name, TableState.PAUSED))

    def resume(self, name: TableName) -> None:
        """With the next epoch, bring a paused table to where the others are."""
        self._requests.append(lambda: self._change(name, TableState.CATCHING_UP))

    def replay(self, names: Iterable[TableName]) -> bool:
        """With the next epoch, apply the letters of these tables; whether there are some to wait for."""
        if self._letters is not None:
            for name in names:
                self._letters.order_replay(name)
        return self.is_replaying

    def leave(self, name: TableName, then: Callable[[], None] = lambda: None) -> None:
        """The table is no longer one of the pipeline's. `then` is done when no epoch touches it any more, before the next one begins."""

        def part() -> None:
            self._ledger.strike(name)
            self._retries.forget(name)
            then()

        self._requests.append(part)

    def admit(self, name: TableName, status: TableStatus) -> None:
        """Add a table that is not to be copied now: it failed, or was paused before it was copied."""
        self._ledger.write({name: status})

    def settle(self) -> None:
        """Where no epoch comes by itself, because the source is idle, make one for what waits."""
        waits = self._requests or self._retries.has_due or (self._shadows is not None and self._shadows.is_waiting)
        if (waits or self._watch.has_seen_more(self.position)) and time.monotonic() - self._ended_at > _IDLE_SECONDS:
            self.apply(self.position)

    def notice(self, look: Look) -> None:
        """What the catalog has now. Some of what happens to a table no change ever shows."""
        for name, reason in self._watch.notice(look).items():
            self._requests.append(partial(self._copy_anew, name, reason))

    def truncates(self, name: TableName) -> Collection[int]:
        """The transactions that epochs of this run have shown to empty the table, 32 bits of each."""
        return self._watch.truncates(name)

    def await_copy(self, name: TableName) -> None:
        """The table is as it was when the pipeline found it, and has never been the source's: a copy is to take its place."""
        self._ledger.write({name: TableStatus(TableState.SNAPSHOTTING)})
        self._anew[name] = "it was not written by this pipeline"

    @property
    def is_stuck(self) -> bool:
        """Whether a target has yet to become what the catalog was seen to have, and no epoch can do it."""
        return self._watch.is_stuck

    def lose(self, name: TableName, reason: str) -> None:
        """The source has this table no more, and its target all that there was of it."""
        self._requests.append(partial(self._lose, name, reason))

    def _lose(self, name: TableName, reason: str) -> None:
        status = self.statuses.get(name)
        if self._shadows is not None:
            self._shadows.stop_pausing(name)
        if status is not None and not status.is_over:
            self._anew.pop(name, None)
            self._retries.forget(name)
            remedy = f"penstock tables remove, if {name} is to be forgotten; its target stays as it is"
            self._ledger.write({name: TableStatus(TableState.GONE, status.applied, status.committed, reason, remedy)})
            self._observer.interrupted(f"{name} is gone: {reason}", 0.0)

    def give_up_copy(self, name: TableName, reason: str) -> None:
        """A table that had to be resynced cannot be."""
        if self._shadows is not None:
            self._shadows.stop_pausing(name)
        if name in self._anew:
            why = f"table {name} cannot be followed: {self._anew.pop(name)}; and it cannot be copied anew: {reason}"
            self.fail(name, SchemaChangedError(why, hint=f"penstock tables resync {name}, once that is mended"))

    def _copy_anew(self, name: TableName, reason: str) -> None:
        status = self.statuses.get(name)
        if status is None or not status.is_followed:
            return
        try:
            self._resyncs.check(name, reason)
        except TableFailedError as error:
            self.fail(name, error)
        else:
            self._on_anew(name, reason)
            self._await_copy(name, reason)

    def _await_copy(self, name: TableName, reason: str) -> None:
        """The target stays as it is until it is replaced. Its changes are kept meanwhile: a run that ends before begins from there."""
        self._ledger.write({name: replace(self.statuses[name], state=TableState.SNAPSHOTTING, reason=None, remedy=None)})
        self._retries.forget(name)
        self._anew[name] = reason

    def fail(self, name: TableName, error: PenstockError) -> None:
        """Give a table up, for a reason that is its own. The rest goes on."""
        if name not in self.statuses:
            return
        status = TableStatus.failed(error, self.statuses[name].applied)
        self._ledger.write({name: status})
        self._ledger.let_go(name)
        self._retries.forget(name)
        self._requests.append(_nothing)
        self._observer.table_failed(name, status)

    def give_up(self, name: TableName, error: PenstockError) -> None:
        """The same before the next epoch, for who is not in the middle of one."""

        def fail() -> None:
            if name in self.statuses and not self.statuses[name].is_over:
                self.fail(name, error)

        self._requests.append(fail)

    def rejoin(self, target: Target, *, paused: bool) -> None:
        """Add a table whose target is filled already. Until the next epoch takes it in, it is nobody's, and its changes are kept."""
        assert target.applied is not None
        self._ledger.write({target.table: TableStatus(TableState.PENDING)})
        self._ledger.claim_for(target.table, target.applied)
        self.enter(target)
        if paused:
            self.pause(target.table)

    def apply(self, end: Position) -> None:
        """Bring every table to `end`, or to what is recorded if that is further; record it, release it. Doing it twice changes nothing."""
        with self._turn:
            while self._requests:
                self._requests.popleft()()
            self._failures.take_up_due()
            self._apply(end)
            self._ended_at = time.monotonic()

    def _enter(self, target: Target) -> None:
        status = self.statuses.get(target.table)
        if status is None or status.state not in (TableState.PENDING, TableState.SNAPSHOTTING):
            # Removed while it was copied, and perhaps added again since: this copy is no one's.
            self._sink.disown(target.table)
        else:
            self._ledger.targets[target.table] = target
            self._ledger.write({target.table: TableStatus(TableState.CATCHING_UP, target.applied, target.applied)})
            self._ledger.let_go(target.table)

    def _change(self, name: TableName, state: TableState) -> None:
        status = self.statuses.get(name)
        if status is not None and (status.is_followed or status.state is TableState.PAUSED):
            self._ledger.write({name: replace(status, state=state, reason=None, remedy=None)})
            self._retries.forget(name)

    def _apply(self, end: Position) -> None:
        started = time.monotonic()
        is_new = end > self.position
        end = max(end, self.position)
        renews = self._shadows is not None and self._shadows.take_in()
        behind = {status.applied for status in self.statuses.values() if is_behind(status, end)}
        if not behind and not is_new and not renews and not self._watch.has_seen_more(end):
            self._mark_streaming(end)
            self._ledger.release()
            self._record_states()
            return
        reached = wait_for_end(self._reader, end, timeout_seconds=_CATCH_UP_SECONDS)
        if reached is None or reached < end:
            raise ConnectionLostError(f"the capture did not get back to {end} in {_CATCH_UP_SECONDS:.0f} s")
        ranges = self._read(behind, end)
        renamed = self._renamed(ranges, end)
        renewed = self._shadows.swap(self._reader, end) if self._shadows is not None else {}
        self._renew(renewed)
        due = [name for name in self._ledger.live() if self._watch.is_ahead(name, end) or self._bringer.is_due(name)]
        work, unplanned = plan_work(self._ledger.targets, self.statuses, ranges, self._watch.routed, due, hints=self.hints)
        with ThreadPoolExecutor(_WORKERS, thread_name_prefix="penstock-apply") as pool:
            failures = dict(zip([changes.table for changes in work], pool.map(lambda each: self._apply_one(each, end), work), strict=True))
        for name, reason in failures.items():
            if isinstance(reason, CopyAnew):
                self._copy_anew(name, str(reason))
        failed = {name: error for name, error in failures.items() if error is not None and not isinstance(error, CopyAnew)}
        self._failures.take({**unplanned, **failed})
        self._take_lost(renamed, end)
        commit_time = max((each.commit_time for each in ranges.values() if each.commit_time), default=None)
        rows = sum(changes.counts.rows for changes in work)
        self._record(Epoch(self._next_number(), end, commit_time, self._system), rows, time.monotonic() - started)
        if self._shadows is not None and renewed:
            self._shadows.recorded(renewed)
            self._ledger.release()

    def _read(self, starts: Iterable[Position | None], end: Position) -> dict[Position, SpoolRange]:
        """What the spool has for the tables that stand at each of `starts`. A table whose ground is gone fails alone."""
        ranges: dict[Position, SpoolRange] = {}
        for start in starts:
            if start is None:
                continue
            try:
                ranges[start] = self._reader.read(start, end)
            except SpoolGapError as error:
                for name, status in self.statuses.items():
                    if status.is_applied and status.applied == start:
                        self.fail(name, TargetRewoundError(error.message, hint=f"copy {name} anew: penstock tables resync"))
        return ranges

    def _renew(self, targets: Mapping[TableName, Target]) -> None:
        """These have been replaced by their shadows, whatever was the matter with them before, and hold this epoch already."""
        for name, target in targets.items():
            self._ledger.targets[name] = target
            self._anew.pop(name, None)
            self._retries.forget(name)
            self._ledger.write({name: TableStatus(TableState.STREAMING, target.applied, target.applied)})

    def _renamed(self, ranges: Mapping[Position, SpoolRange], end: Position) -> dict[TableName, str]:
        """Tables whose changes come under another name, and why. That they are to be copied anew is said first."""
        found = self._watch.renamed(ranges, end)
        for name, reason in found.items():
            if self._watch.renews(name):
                self._on_anew(name, reason)
        return found

    def _take_lost(self, renamed: Mapping[TableName, str], end: Position) -> None:
        """Tables of which this epoch had all that there was, or all under this name."""
        for name in self._ledger.live():
            gone = self._watch.gone(name, end)
            if gone is not None:
                self._lose(name, gone)
            elif name in renamed and self._watch.renews(name):
                self._await_copy(name, renamed[name])
            elif name in renamed:
                hint = f"penstock tables resync {name} copies it as it is now, if it is still there"
                self.fail(name, SchemaChangedError(f"table {name} was renamed: {renamed[name]}", hint=hint))

    def _apply_one(self, changes: TableChanges, end: Position) -> Exception | None:
        """One table; returns whatever kept it from `end`, so that the other tables of the epoch are not held up by it."""
        try:
            brought = self._bringer.bring_quickly(self._ledger.targets[changes.table], changes, end)
        except Exception as error:  # noqa: BLE001 the edge of one table's work: the error policy decides
            return error
        if brought is not None:
            self._ledger.targets[changes.table] = brought
            self._ledger.write({changes.table: self._streaming(changes.table, end)})
        self._retries.succeed(changes.table)
        return None

    def _streaming(self, name: TableName, end: Position) -> TableStatus:
        """The table's status after an epoch of its own; a reason that makes its epochs slow is reported once."""
        status, warning = TableStatus(TableState.STREAMING, end, end), self._sink.slowed(name)
        if warning is None:
            return status
        status = replace(status, reason=f"{warning.code}: {warning.message}", remedy=warning.hint)
        if self.statuses[name].reason != status.reason:
            self._observer.warned(warning)
        return status

    def _needed_besides(self) -> list[Position]:
        """What is recorded is what the next epoch begins from; shadows are copied beside the tables of the same name."""
        return [self.position, *(self._shadows.holds if self._shadows is not None else [])]

    def _record(self, epoch: Epoch, rows: int, seconds: float) -> None:
        self._mark_streaming(epoch.position)
        recorded = replace(epoch, tables=dict(self.statuses))
        self._log.record(recorded)
        self.last = recorded
        if self._shadows is not None:
            self._shadows.advance(epoch.position)
        self._ledger.release()
        self._observer.epoch_recorded(EpochReport(epoch.number, epoch.position, rows, epoch.commit_time, seconds, dict(self.statuses)))

    def _mark_streaming(self, end: Position) -> None:
        """Every live table holds everything up to `end`, also one that had nothing to take in at its last attempt."""
        self._ledger.mark_streaming(end)
        for name in self._ledger.live():
            self._retries.forget(name)

    def _record_states(self) -> None:
        """Where nothing moved but a table's state did, say so: status reads what is recorded."""
        if self.last is not None and self.last.tables != self.statuses:
            self._record(Epoch(self._next_number(), self.position, self.last.commit_time, self._system), 0, 0.0)

    @property
    def is_level(self) -> bool:
        """Whether every table has been through an epoch of this run, or is not to, and has become what the catalog was seen to have."""
        return self._ledger.is_settled and not self._watch.has_seen_more(None)

    @property
    def is_replaying(self) -> bool:
        """Whether letters of a table that goes on are still to be applied."""
        return any(self._bringer.is_due(name) for name in self._ledger.live())

    @property
    def is_copying(self) -> bool:
        """Whether a table still waits for its snapshot, or for the end of it."""
        return self._ledger.is_copying

    def _next_number(self) -> int:
        return self.last.number + 1 if self.last is not None else 1


def _nothing() -> None:
    """A request for an epoch, for its own sake."""
