"""Resync: copy a table again into a shadow beside its target, and swap the two when the shadow is level.

The target goes on meanwhile, so a reader never sees it empty, half filled or going back in time. The shadow is a target like any other,
under a root of its own. An epoch brings the shadow to the epoch's end, and then, instead of applying that epoch to the target, replaces
what the target holds by what the shadow holds: one commit, with the same position.

All tables wait for that epoch. So the thread that copied the table first applies to the shadow what changed meanwhile, and has the sink
prepare the swap, until the shadow is about a second behind. Changes that are not plain (another shape, a truncate, values that may be
refused) it leaves to the epoch, as it does whatever goes wrong.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from penstock.change import ChangeCounts
from penstock.errors import PenstockError, SchemaChangedError
from penstock.pipeline.error_policy import USUAL_ATTEMPTS, Action, TableRetries, Verdict, decide, final
from penstock.pipeline.following.follower import Follower
from penstock.pipeline.letters.box import LetterBox, ShadowLetters
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.retries import RetryLog
from penstock.pipeline.routing import gather
from penstock.pipeline.states import TableStatus
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.base import Sink, TableChanges, Target
from penstock.sinks.evolution import CopyAnew
from penstock.spool.reader import SpoolReader
from penstock.spool.values import check_identified

_log = logging.getLogger(__name__)

_ROUNDS = 10
_LEVEL_SECONDS = 1.0
"""A shadow that caught up in less than that is level enough: an epoch can do the rest."""


class Shadows:
    """The tables that are being copied anew. Holds and arrivals come from the copying threads, `swap` from the epoch."""

    def __init__(
        self,
        main: Sink,
        observer: PipelineObserver,
        on_done: Callable[[TableName, bool], None],
        follower: Follower | None = None,
        letters: LetterBox | None = None,
        *,
        spool: Path | None = None,
        retries: RetryLog | None = None,
    ) -> None:
        """`on_done` is told that a table is renewed, once that is recorded, or (False) that it will not be.

        `spool` has the changes that shadows catch up with; without it, that is left to the epochs.
        """
        self._attempts = TableRetries()
        self._pausing: set[TableName] = set()
        """Tables of which another copy is to be made."""
        self._retries = retries or RetryLog()
        self._main = main
        self._follower = follower
        self._letters = letters
        self._sinks: dict[TableName, Sink] = {}
        self._observer = observer
        self._on_done = on_done
        self._holds: dict[TableName, Position] = {}
        self._arrivals: deque[Target] = deque()
        self._ready: dict[TableName, Target] = {}
        self._spool = spool
        self._recorded = Position.ZERO
        self._preparing = threading.Lock()
        """Held while a swap is prepared or a shadow is dropped: nothing of it is left behind."""

    @property
    def holds(self) -> list[Position]:
        return list(self._holds.copy().values())

    @property
    def copy_letters(self) -> ShadowLetters | None:
        """Who takes rows that are refused while shadows are copied."""
        return None if self._letters is None else ShadowLetters(self._letters)

    @property
    def is_waiting(self) -> bool:
        return bool(self._arrivals) or any(map(self._attempts.is_due, list(self._ready)))

    @property
    def is_busy(self) -> bool:
        """Whether a table is still to be renewed."""
        return bool(self._sinks or self._pausing)

    def __contains__(self, name: TableName) -> bool:
        return name in self._sinks

    def begin(self, name: TableName, sink: Sink, position: Position) -> None:
        """`sink` is for this one copy; nothing after `position` is released from now on."""
        self._pausing.discard(name)
        self._sinks[name] = sink
        self._holds[name] = position
        self.advance(position)

    def advance(self, position: Position) -> None:
        """An epoch that ends here is recorded: shadows may catch up to it."""
        self._recorded = max(self._recorded, position)

    def hold(self, name: TableName, fence: Position) -> None:
        if name in self._sinks:
            self._holds[name] = fence

    def enter(self, target: Target) -> None:
        """The shadow is copied. Runs in the thread that copied it, which brings it level before an epoch looks at it."""
        sink = self._sinks.get(target.table)
        try:
            for _ in range(_ROUNDS if sink is not None else 0):
                assert sink is not None
                began = time.monotonic()
                target, is_plain = self._catch_up(sink, target)
                self._prepare(target.table, sink)
                if not is_plain or time.monotonic() - began < _LEVEL_SECONDS:
                    break
        except Exception as error:  # noqa: BLE001 the epoch meets it again, and the error policy decides there
            _log.info("shadow is left to an epoch", extra={"table": str(target.table), "reason": type(error).__name__})
        self._arrivals.append(target)

    def _catch_up(self, sink: Sink, target: Target) -> tuple[Target, bool]:
        """Apply to a shadow what epochs have recorded; the shadow as it is then, and False if there are changes left for an epoch."""
        end, name = self._recorded, target.table
        assert target.applied is not None
        if self._spool is None or target.applied >= end:
            return target, True
        routed = {} if self._follower is None else self._follower.routed
        changes = gather(target, SpoolReader(self._spool).read(target.applied, end), routed)
        if changes is not None:
            check_identified(changes.slices)
        if changes is not None and self._follower is not None:
            changes = self._follower.follow_plain(target, changes)
            if changes is None or (self._letters is not None and not self._letters.is_clean(name, changes.slices)):
                return target, False
        if changes is not None:
            sink.apply(target, changes, end)
            target = replace(target, applied=end)
            self.hold(name, end)
        return target, True

    def _prepare(self, name: TableName, sink: Sink) -> None:
        with self._preparing:
            if self._sinks.get(name) is sink:
                self._main.prepare_replace(name, sink)

    def fail(self, name: TableName, error: PenstockError) -> None:
        """The copy cannot be made. The target is as it was."""
        if name in self._sinks:
            self._observer.table_failed(name, TableStatus.failed(error, None))
            self.abandon(name)

    def abandon(self, name: TableName) -> None:
        """End the resync of this table; what the threads of its copy still write goes nowhere."""
        self.stop_pausing(name)
        if name in self._sinks:
            self._ready.pop(name, None)
            self._end(name)
            self._on_done(name, False)

    def stop_pausing(self, name: TableName) -> None:
        """No other copy of the table is to be made, unless there is a new order. A copy that is being made is not affected."""
        if name in self._pausing:
            self._pausing.discard(name)
            self._forget_attempts(name)

    def take_in(self) -> bool:
        """At the beginning of an epoch: whether there are tables for it to replace."""
        while self._arrivals:
            target = self._arrivals.popleft()
            if target.table in self._sinks:
                self._ready[target.table] = target
        return any(map(self._attempts.is_due, self._ready))

    def swap(self, reader: SpoolReader, end: Position) -> dict[TableName, Target]:
        """Bring the shadows that are copied to `end`, and put each in its target's place; gives back the targets as they are now.

        A target whose shadow cannot take its place is as it was, and has this epoch yet to come. Unless the reason will not pass, the swap
        is tried again in a later epoch, a bounded number of times; the other tables do not wait for it.
        """
        done: dict[TableName, Target] = {}
        for name, shadow in [(name, shadow) for name, shadow in self._ready.items() if self._attempts.is_due(name)]:
            try:
                done[name] = self._swap(name, shadow, reader, end)
            except CopyAnew as reason:
                self._start_again(name, reason)
            except Exception as error:  # noqa: BLE001 the edge of one table's work: the error policy decides
                self._answer(name, error)
        return done

    def _start_again(self, name: TableName, reason: CopyAnew) -> None:
        """The table was altered again while it was copied. The order to resync it stays, and another copy is made after a pause."""
        altered = SchemaChangedError(f"table {name} was altered again while it was resynced: {reason}")
        pause = self._attempts.count(name, Verdict(Action.RETRY_TABLE, altered, USUAL_ATTEMPTS))
        if pause is None:
            self.fail(name, final(altered, name))
            return
        self._copy_again(name)
        self._retries.note(f"resync of {name}", altered, self._attempts.failures(name), pause)

    def _copy_again(self, name: TableName) -> None:
        """Drop the shadow. The order to resync the table stays, so that another one is begun after the pause."""
        self._ready.pop(name)
        self._drop(name)
        self._pausing.add(name)

    def may_begin(self, name: TableName) -> bool:
        """Whether there is no copy of this table yet, and no pause before the next one."""
        return name not in self._sinks and self._attempts.is_due(name)

    def _answer(self, name: TableName, error: Exception) -> None:
        verdict = decide(error, name, "putting the new copy in place of")
        if verdict.action is Action.STOP:
            raise verdict.error from error
        shown = verdict.error
        pause = None
        if verdict.action is Action.RETRY_TABLE:
            pause = self._attempts.count(name, verdict)
            shown = final(shown, name)
        if pause is not None:
            _log.warning("swap of a resync failed", extra={"table": str(name), "code": shown.code, "pause_seconds": pause})
            self._retries.note(f"resync of {name}", shown, self._attempts.failures(name), pause)
            self._observer.interrupted(f"{shown.code}: {shown.message}", pause)
            if self._letters is not None and self._letters.has_left_out(name):
                # The shadow may have this epoch without the rows that were refused, and the letters of these do not outlive the attempt.
                self._letters.give_up_copy(self._main, name)
                self._copy_again(name)
                return
            with suppress(Exception):  # it may have been brought further; else the next attempt finds out
                self._ready[name] = self._sinks[name].load_target(name) or self._ready[name]
            return
        if self._letters is not None:
            self._letters.give_up_copy(self._main, name)
        self.fail(name, shown)

    def recorded(self, names: Iterable[TableName]) -> None:
        """The epoch that put these in place is recorded."""
        for name in names:
            self._ready.pop(name, None)
            self._end(name)
            self._on_done(name, True)

    def _swap(self, name: TableName, shadow: Target, reader: SpoolReader, end: Position) -> Target:
        sink, applied = self._sinks[name], shadow.applied
        assert applied is not None
        routed = {} if self._follower is None else self._follower.routed
        found = gather(shadow, reader.read(applied, end), routed) if applied < end else None
        changes = TableChanges(name, (), ChangeCounts()) if found is None else found
        check_identified(changes.slices)
        if found is not None and self._follower is not None:
            changes = self._follower.follow(sink, shadow, changes)
        if self._letters is not None:
            changes = self._letters.renew(self._main, shadow, changes, max(applied, end))
        if found is not None:
            sink.apply(shadow, changes, end)
        self._main.replace(name, sink, max(applied, end))
        if self._letters is not None:
            self._letters.applied(name)
        target = self._main.load_target(name)
        assert target is not None
        return target

    def _drop(self, name: TableName) -> None:
        with self._preparing:
            sink = self._sinks.pop(name)
            with suppress(Exception):  # what is left of it is removed when the next run starts
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
