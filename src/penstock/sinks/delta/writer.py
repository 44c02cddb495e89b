"""Our own commits to Delta tables: looked at, worked out, made.

`Unsupported` says that a table is to be left to Delta itself.
"""

from __future__ import annotations

from pathlib import Path

from penstock.errors import SinkError
from penstock.position import Position
from penstock.sinks.base import ChangedRows
from penstock.sinks.delta.definition import snapshot_place
from penstock.sinks.delta.epoch import DeltaEpoch
from penstock.sinks.delta.log import load_applied
from penstock.sinks.delta.repair import DeltaRepair
from penstock.sinks.delta.state import DeltaState, DeltaStates, Unsupported
from penstock.sinks.executors import Executors
from penstock.sinks.layout import Layout

ATTEMPTS = 5
"""At a commit that others make first."""


class DeltaWriter:
    """Several threads at once, each with tables of its own."""

    def __init__(self, executors: Executors) -> None:
        self.executors = executors
        self._states = DeltaStates()

    def look(self, path: Path, application: str) -> tuple[DeltaState | None, Position | None]:
        """The table as it is now, and how far. No state: there is no table, or none whose log we read ourselves."""
        try:
            state = self._states.load(path)
        except Unsupported:
            return None, load_applied(path, application)
        if state is not None and application in state.restored:
            return state, load_applied(path, application)
        applied = 0 if state is None else state.transactions.get(application, 0)
        return state, Position.of(applied) if applied else None

    def apply(self, epoch: DeltaEpoch) -> bool:
        """False: somebody else committed meanwhile, and nothing is done."""
        return epoch.apply(self.executors)

    def repair(self, path: Path, application: str, layout: Layout, changed: ChangedRows, fence: Position) -> None:
        for _ in range(ATTEMPTS):
            state, place = self._states.load(path), snapshot_place(path, layout, fence)
            if state is None or place is None:
                break
            if DeltaRepair(path, application, layout, state, fence, changed, place).apply(self.executors):
                return
        raise SinkError(f"{path} is gone, or others commit to it faster than it can be repaired")
