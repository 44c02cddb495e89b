"""Resync: a table is copied anew into a shadow beside its target, and the two change places when the shadow is level.

The target goes on meanwhile, so whoever reads it never sees it empty, half filled or going back in time. The shadow is a target like any
other, under a root of its own. The epoch that finds it copied brings the shadow to the epoch's end, and then, instead of applying that
epoch to the target, replaces what the target holds by what the shadow holds: one commit, with the same position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from penstock.change import ChangeCounts
from penstock.errors import PenstockError, Recovery
from penstock.pipeline.following.follower import Follower
from penstock.pipeline.letters.box import LetterBox, ShadowLetters
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.routing import gather
from penstock.pipeline.states import TableStatus
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.base import Sink, TableChanges, Target
from penstock.sinks.evolution import CopyAnew
from penstock.spool.reader import SpoolReader
from penstock.spool.values import check_identified


class Shadows:
    """The tables that are being copied anew. Holds and arrivals come from the copying threads, `swap` from the epoch."""

    def __init__(
        self,
        main: Sink,
        observer: PipelineObserver,
        on_done: Callable[[TableName, bool], None],
        follower: Follower | None = None,
        letters: LetterBox | None = None,
    ) -> None:
        """`on_done` is told that a table is renewed, once that is recorded, or (False) that it will not be."""
        self._main = main
        self._follower = follower
        self._letters = letters
        self._sinks: dict[TableName, Sink] = {}
        self._observer = observer
        self._on_done = on_done
        self._holds: dict[TableName, Position] = {}
        self._arrivals: deque[Target] = deque()
        self._ready: dict[TableName, Target] = {}

    @property
    def holds(self) -> list[Position]:
        return list(self._holds.copy().values())

    @property
    def copy_letters(self) -> ShadowLetters | None:
        """Who takes rows that are refused while shadows are copied."""
        return None if self._letters is None else ShadowLetters(self._letters)

    @property
    def is_waiting(self) -> bool:
        return bool(self._arrivals)

    @property
    def is_busy(self) -> bool:
        """Whether a table is still to be renewed."""
        return bool(self._sinks)

    def __contains__(self, name: TableName) -> bool:
        return name in self._sinks

    def begin(self, name: TableName, sink: Sink, position: Position) -> None:
        """`sink` is for this one copy; nothing after `position` is released from now on."""
        self._sinks[name] = sink
        self._holds[name] = position

    def hold(self, name: TableName, fence: Position) -> None:
        if name in self._sinks:
            self._holds[name] = fence

    def enter(self, target: Target) -> None:
        self._arrivals.append(target)

    def fail(self, name: TableName, error: PenstockError) -> None:
        """The copy cannot be made. The target is as it was."""
        if name in self._sinks:
            self._observer.table_failed(name, TableStatus.failed(error, None))
            self.abandon(name)

    def abandon(self, name: TableName) -> None:
        """Renew this one no more; what its threads still write goes nowhere."""
        if name in self._sinks:
            self._ready.pop(name, None)
            self._end(name)
            self._on_done(name, False)

    def take_in(self) -> bool:
        """At the beginning of an epoch: whether there are tables for it to replace."""
        while self._arrivals:
            target = self._arrivals.popleft()
            if target.table in self._sinks:
                self._ready[target.table] = target
        return bool(self._ready)

    def swap(self, reader: SpoolReader, end: Position) -> dict[TableName, Target]:
        """Bring the shadows that are copied to `end`, and put each in its target's place; gives back the targets as they are now.

        A target whose shadow cannot take its place is as it was, and has this epoch yet to come.
        """
        done: dict[TableName, Target] = {}
        for name, shadow in list(self._ready.items()):
            try:
                done[name] = self._swap(name, shadow, reader, end)
            except CopyAnew:
                # It was altered again, as a copy of it was made: whoever ordered this one finds that there is none, and begins another.
                self._ready.pop(name)
                self._end(name)
            except PenstockError as error:
                if error.recovery is not Recovery.OPERATOR:
                    raise
                if self._letters is not None:
                    self._letters.give_up_copy(self._main, name)
                self.fail(name, error)
        return done

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

    def _end(self, name: TableName) -> None:
        self._sinks.pop(name).drop(name)
        self._holds.pop(name, None)
