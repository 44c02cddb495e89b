"""What is known of each table while a pipeline streams: its state, its target, and what of the log is kept for it.

Epochs, copies and the roster write from threads of their own; whoever reads `statuses` has one moment's view.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock.pipeline.states import TableState, TableStatus
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.base import Target
from penstock.spool.consumers import hold, release


class TableLedger:
    """One for each run. `statuses` is never changed in place."""

    def __init__(self, spool: Path, consumer: str, others: Callable[[], Sequence[Position]]) -> None:
        """`others` gives what is needed besides: the log from each of these positions on."""
        self._spool = spool
        self._consumer = consumer
        self._others = others
        self._holds: dict[TableName, Position] = {}
        self._writing = threading.Lock()
        self._releasing = threading.Lock()
        self.statuses: Mapping[TableName, TableStatus] = {}
        self.targets: dict[TableName, Target] = {}

    def write(self, statuses: Mapping[TableName, TableStatus]) -> None:
        """Put these in the place of what was known of their tables."""
        with self._writing:
            self.statuses = {**self.statuses, **statuses}

    def strike(self, name: TableName) -> None:
        """The table is nobody's from here on."""
        with self._writing:
            self.statuses = {each: status for each, status in self.statuses.items() if each != name}
        self.targets.pop(name, None)
        self.let_go(name)

    def live(self) -> list[TableName]:
        """Tables that an epoch brings on."""
        return [name for name, status in self.statuses.items() if status.is_applied]

    def committed(self, name: TableName) -> Position | None:
        """Where the last commit of its target stands. Also asked while tables leave."""
        status = self.statuses.get(name)
        return None if status is None else status.committed

    def oids(self) -> dict[TableName, int]:
        """By which each table is known that something may still come into."""
        statuses, targets = self.statuses, self.targets.copy()
        return {name: target.source_oid for name, target in targets.items() if name in statuses and not statuses[name].is_over}

    def mark_streaming(self, end: Position) -> None:
        """Every live table holds everything up to `end`."""
        live = {name: self.statuses[name] for name in self.live()}
        reached = {name: max(end, status.applied or end) for name, status in live.items()}
        self.write({name: status.streaming(reached[name]) for name, status in live.items()})

    @property
    def is_settled(self) -> bool:
        """Whether every table has been through an epoch of this run, or is not to."""
        settled = (TableState.STREAMING, TableState.PAUSED, TableState.FAILED, TableState.GONE)
        return all(status.state in settled for status in self.statuses.values())

    @property
    def is_copying(self) -> bool:
        """Whether a table still waits for its snapshot, or for the end of it."""
        return any(status.state in (TableState.PENDING, TableState.SNAPSHOTTING) for status in self.statuses.values())

    def keep(self, name: TableName, start: Position) -> None:
        """What comes after `start` is kept for this table, which nothing is applied to yet."""
        self._holds[name] = start

    def keep_unless_kept(self, name: TableName, start: Position) -> None:
        """As `keep`, but what a former run has begun to keep goes on from where that began."""
        self._holds.setdefault(name, start)

    def let_go(self, name: TableName) -> None:
        """Nothing is kept for this table but what its status says."""
        self._holds.pop(name, None)

    def claim(self) -> None:
        """Take back ground that was released before, if a table needs it."""
        with self._releasing:
            hold(self._spool, self._consumer, self._needed())

    def claim_for(self, name: TableName, start: Position) -> None:
        """The same, for a table that comes back and stands at `start`."""
        with self._releasing:
            self.keep(name, start)
            hold(self._spool, self._consumer, self._needed())

    def release(self) -> None:
        """Nobody who begins to hold something may come between finding out what is needed and saying so."""
        with self._releasing:
            release(self._spool, self._consumer, self._needed())

    def _needed(self) -> Position:
        """No table needs anything up to here any more."""
        held = [status.applied for status in self.statuses.values() if not status.is_over and status.applied is not None]
        return min([*held, *self._holds.copy().values(), *self._others()])
