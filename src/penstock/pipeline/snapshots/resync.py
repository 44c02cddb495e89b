"""Resync tables: copy a table again beside its target, and swap the copy in with one commit.

Readers never see the target empty, half filled or at an earlier position. The copy (the shadow) is a target
like any other, under its own root. When the shadow is complete, an epoch applies its changes to the shadow
instead of the target, and then swaps the shadow in.

All tables wait for that epoch, so it should have little to do. Therefore the thread that copied the table
first applies the changes made during the copy to the shadow, until one iteration takes less than a second. It
also lets the sink prepare the swap. The epoch applies changes that need the catalog (a new schema, a
truncate) or that may be rejected. It also repeats steps in which the thread had an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from penstock.change import ChangeCounts
from penstock.errors import PenstockError, SchemaChangedError
from penstock.pipeline.dead_letters.queue import DeadLetterQueue, ResyncDeadLetters
from penstock.pipeline.error_policy import USUAL_ATTEMPTS, Action, TableRetries, Verdict, decide, final
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.retries import RetryLog
from penstock.pipeline.routing import gather
from penstock.pipeline.schema_changes.tracker import SchemaTracker
from penstock.pipeline.table_states import TableStatus
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.base import Sink, TableChanges, Target, apply_in_steps
from penstock.sinks.evolution import ResyncRequired
from penstock.spool.reader import SpoolReader
from penstock.spool.rows import check_identified

_log = logging.getLogger(__name__)

_ROUNDS = 10
_LEVEL_SECONDS = 1.0
"""The thread that applies changes to a shadow stops after an iteration that took less time than this. The
epoch applies the remaining changes.
"""


class Resyncs:
    """The resyncs in progress.

    Copying threads call `set_fence`, `add_copied` and `fail`; the epoch calls `collect_copies` and `swap`.
    """

    def __init__(
        self,
        main: Sink,
        observer: PipelineObserver,
        on_done: Callable[[TableName, str | None], None],
        tracker: SchemaTracker,
        dead_letters: DeadLetterQueue,
        *,
        spool: Path,
        retries: RetryLog,
    ) -> None:
        """`on_done` is called when the resync of a table has ended: with the table and None when the epoch of
        the swap is recorded, otherwise with the table and the reason why its copy was not swapped in.
        """
        self._attempts = TableRetries()
        self._pausing: set[TableName] = set()
        """Tables whose shadow was dropped. They are copied again after a pause."""
        self._retries = retries
        self._main = main
        self._tracker = tracker
        self._dead_letters = dead_letters
        self._sinks: dict[TableName, Sink] = {}
        self._observer = observer
        self._on_done = on_done
        self._holds: dict[TableName, Position] = {}
        self._arrivals: deque[tuple[Target, Sink]] = deque()
        self._ready: dict[TableName, Target] = {}
        self._tried: dict[TableName, Position] = {}
        """For each table, the position of the last attempt to swap in its shadow. The attempt may have been
        committed even if it raised an error.
        """
        self._spool = spool
        self._recorded = Position.ZERO
        self._preparing = threading.Lock()
        """Held while a swap is prepared or a shadow is dropped, so that no preparation continues after its
        shadow was dropped.
        """

    @property
    def holds(self) -> list[Position]:
        """The positions after which the spool keeps the changes, one for each resync."""
        return list(self._holds.copy().values())

    @property
    def dead_letters(self) -> ResyncDeadLetters:
        """Takes the rows that are rejected while shadows are copied."""
        return ResyncDeadLetters(self._dead_letters)

    @property
    def is_waiting(self) -> bool:
        """Whether a completed shadow waits for an epoch to swap it in."""
        return bool(self._arrivals) or any(map(self._attempts.is_due, list(self._ready)))

    @property
    def is_busy(self) -> bool:
        """Whether a resync is in progress, or waits for the pause before its next copy."""
        return bool(self._sinks or self._pausing)

    def __contains__(self, name: TableName) -> bool:
        return name in self._sinks

    def is_current(self, name: TableName, sink: Sink) -> bool:
        """Whether the resync whose copy is written to `sink` is still in progress."""
        return self._sinks.get(name) is sink

    def begin(self, name: TableName, sink: Sink, position: Position) -> None:
        """Start a resync whose copy is written to `sink`. The spool keeps all changes after `position` until
        `set_fence` is called.
        """
        self._pausing.discard(name)
        self._sinks[name] = sink
        self._holds[name] = position
        self.advance(position)

    def advance(self, position: Position) -> None:
        """Allow shadows to apply changes up to `position`. Called when the epoch that ends there is
        recorded.
        """
        self._recorded = max(self._recorded, position)

    def set_fence(self, name: TableName, fence: Position) -> None:
        """Set the fence of the copy: the spool keeps the changes after it."""
        if name in self._sinks:
            self._holds[name] = fence

    def add_copied(self, target: Target) -> None:
        """Called by the copying thread when the copy is complete. Applies the changes after the fence to the
        shadow, then hands the shadow over to the epochs.
        """
        sink = self._sinks.get(target.table)
        if sink is None:
            return
        try:
            for _ in range(_ROUNDS):
                began = time.monotonic()
                target, is_plain = self._catch_up(sink, target)
                self._prepare(target.table, sink)
                if not is_plain or time.monotonic() - began < _LEVEL_SECONDS:
                    break
        except Exception as error:  # noqa: BLE001 the epoch repeats the step under the error policy
            _log.info(
                "shadow is left to an epoch",
                extra={"table": str(target.table), "reason": type(error).__name__},
            )
        self._arrivals.append((target, sink))

    def _catch_up(self, sink: Sink, target: Target) -> tuple[Target, bool]:
        """Apply to a shadow the changes up to the last recorded epoch. Returns the shadow at its new
        position, and whether this was possible. If it was not, an epoch has to apply the changes.
        """
        end, name = self._recorded, target.table
        assert target.applied is not None
        if target.applied >= end:
            return target, True
        changes = gather(target, SpoolReader(self._spool).read(target.applied, end), self._tracker.routed)
        if changes is None:
            return target, True
        check_identified(changes.slices)
        plain = self._tracker.follow_plain(target, changes)
        if plain is None or not self._dead_letters.is_clean(name, plain.slices):
            return target, False
        apply_in_steps(sink, plain, end, partial(sink.apply, target))
        self.set_fence(name, end)
        return replace(target, applied=end), True

    def _prepare(self, name: TableName, sink: Sink) -> None:
        with self._preparing:
            if self.is_current(name, sink):
                self._main.prepare_replace(name, sink)

    def fail(self, name: TableName, error: PenstockError) -> None:
        """End the resync of a table that cannot be copied. Its target does not change."""
        if name in self._sinks:
            self._observer.table_failed(name, TableStatus.failed(error, None))
            self.abandon(name, f"{error.code}: {error.message}")

    def abandon(self, name: TableName, reason: str = "it was abandoned") -> None:
        """End the resync of this table and drop its shadow. A thread may still copy the table; its reports
        are ignored (see `ResyncListener`).
        """
        self.stop_pausing(name)
        if name in self._sinks:
            self._ready.pop(name, None)
            self._end(name)
            self._on_done(name, reason)

    def stop_pausing(self, name: TableName) -> None:
        """Cancel the next copy of a table that waits for a pause to end. A copy in progress is not
        affected.
        """
        if name in self._pausing:
            self._pausing.discard(name)
            self._forget_attempts(name)

    def collect_copies(self) -> bool:
        """Collect the completed shadows. Called at the start of an epoch. Returns whether any shadow can be
        swapped in now.
        """
        while self._arrivals:
            target, sink = self._arrivals.popleft()
            if self.is_current(target.table, sink):
                self._ready[target.table] = target
        return any(map(self._attempts.is_due, self._ready))

    def swap(self, reader: SpoolReader, end: Position) -> dict[TableName, Target]:
        """Apply the changes up to `end` to the completed shadows, and swap each shadow in. Returns the new
        targets.

        The result includes targets whose swap was committed in an earlier epoch although its reply was lost.
        Such a target is at the end of that epoch or later. A target whose swap fails does not change, so the
        epoch must still be applied to it. Later epochs retry a transient failure a limited number of times.
        Other tables do not wait for this.
        """
        done: dict[TableName, Target] = {}
        for name, shadow in [
            (name, shadow) for name, shadow in self._ready.items() if self._attempts.is_due(name)
        ]:
            try:
                done[name] = self._swap(name, shadow, reader, end)
            except ResyncRequired as reason:
                self._copy_again_after(name, reason)
            except Exception as error:  # noqa: BLE001 the edge of one table's work: the error policy decides
                swapped = None
                with suppress(Exception):  # the next attempt loads the target again
                    swapped = self._find_swapped(name, shadow)
                if swapped is None:
                    self._handle(name, error)
                else:
                    done[name] = swapped
        return done

    def _find_swapped(self, name: TableName, shadow: Target) -> Target | None:
        """Return the target if an earlier attempt swapped `shadow` in and only its reply was lost; otherwise
        None. The target may be at a position before the end of the current epoch.
        """
        tried = self._tried.get(name)
        if tried is None or shadow.copy is None:
            return None
        target = self._main.load_target(name)
        if target is None or target.copy != shadow.copy or target.applied is None or target.applied < tried:
            return None
        _log.info("swap of a resync had been committed", extra={"table": str(name)})
        self._dead_letters.abandon_copy(self._main, name)
        return target

    def _copy_again_after(self, name: TableName, reason: ResyncRequired) -> None:
        """Copy a table again after a pause, because it was altered during its copy. After too many attempts
        the resync fails.
        """
        altered = SchemaChangedError(f"table {name} was altered again while it was resynced: {reason}")
        pause = self._attempts.count(name, Verdict(Action.RETRY_TABLE, altered, USUAL_ATTEMPTS))
        if pause is None:
            self.fail(name, final(altered, name))
            return
        self._copy_again(name)
        self._retries.note(f"resync of {name}", altered, self._attempts.failures(name), pause)

    def _copy_again(self, name: TableName) -> None:
        """Drop the shadow.

        The request for the resync remains, so another copy starts after the pause.
        """
        self._ready.pop(name)
        self._drop(name)
        self._pausing.add(name)

    def may_begin(self, name: TableName) -> bool:
        """Whether a copy of this table may start: no copy is in progress, and no pause is active."""
        return name not in self._sinks and self._attempts.is_due(name)

    def _handle(self, name: TableName, error: Exception) -> None:
        verdict = decide(error, name, "swapping in the new copy of")
        if verdict.action is Action.STOP:
            raise verdict.error from error
        shown = verdict.error
        pause = None
        if verdict.action is Action.RETRY_TABLE:
            pause = self._attempts.count(name, verdict)
            shown = final(shown, name)
        if pause is not None:
            _log.warning(
                "swap of a resync failed",
                extra={"table": str(name), "code": shown.code, "pause_seconds": pause},
            )
            self._retries.note(f"resync of {name}", shown, self._attempts.failures(name), pause)
            self._observer.interrupted(f"{shown.code}: {shown.message}", pause)
            if self._dead_letters.has_exclusions(name):
                # The shadow may already contain this epoch without its rejected rows, and `abandon_copy`
                # discards their dead letters.
                self._dead_letters.abandon_copy(self._main, name)
                self._copy_again(name)
                return
            with suppress(
                Exception
            ):  # load the shadow's new position; if this fails, the next attempt raises the error
                self._ready[name] = self._sinks[name].load_target(name) or self._ready[name]
            return
        self._dead_letters.abandon_copy(self._main, name)
        self.fail(name, shown)

    def recorded(self, names: Iterable[TableName]) -> None:
        """Clean up after the swaps of these tables. Called when the epoch of the swaps is recorded."""
        for name in names:
            self._ready.pop(name, None)
            self._end(name)
            self._on_done(name, None)

    def _swap(self, name: TableName, shadow: Target, reader: SpoolReader, end: Position) -> Target:
        swapped = self._find_swapped(name, shadow)
        if swapped is not None:
            return swapped
        sink, applied = self._sinks[name], shadow.applied
        assert applied is not None
        found = gather(shadow, reader.read(applied, end), self._tracker.routed) if applied < end else None
        changes = TableChanges(name, (), ChangeCounts()) if found is None else found
        check_identified(changes.slices)
        if found is not None:
            changes = self._tracker.follow(sink, shadow, changes)
        changes = self._dead_letters.screen_resync(self._main, shadow, changes, max(applied, end))
        if found is not None:
            apply_in_steps(sink, changes, end, partial(sink.apply, shadow))
        self._tried[name] = max(applied, end)
        self._main.replace(name, sink, max(applied, end))
        self._dead_letters.applied(name)
        target = self._main.load_target(name)
        assert target is not None
        return target

    def _drop(self, name: TableName) -> None:
        with self._preparing:
            sink = self._sinks.pop(name)
            self._tried.pop(name, None)
            with suppress(Exception):  # leftovers are removed when the next run starts
                self._main.cancel_replace(name, sink)
        with suppress(Exception):
            sink.drop(name)
        self._holds.pop(name, None)

    def _end(self, name: TableName) -> None:
        self._drop(name)
        self._forget_attempts(name)

    def _forget_attempts(self, name: TableName) -> None:
        self._attempts.forget(name)
        self._retries.clear(f"resync of {name}")


@dataclass(frozen=True, slots=True)
class ResyncListener:
    """Receives the reports of the thread that copies one resync into `sink`.

    The thread may still copy after its resync has ended, even after another resync of the same table has
    begun. Its reports are then ignored.
    """

    resyncs: Resyncs
    sink: Sink

    def set_fence(self, name: TableName, fence: Position) -> None:
        if self.resyncs.is_current(name, self.sink):
            self.resyncs.set_fence(name, fence)

    def add_copied(self, target: Target) -> None:
        if self.resyncs.is_current(target.table, self.sink):
            self.resyncs.add_copied(target)

    def fail(self, name: TableName, error: PenstockError) -> None:
        if self.resyncs.is_current(name, self.sink):
            self.resyncs.fail(name, error)
