"""The states of a table, who sets each and what it waits for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from penstock.errors import PenstockError
from penstock.position import Position


class TableState(StrEnum):
    PENDING = "pending"
    """Set when a table is found that the target does not have yet. Its changes are kept while it waits for its snapshot."""
    SNAPSHOTTING = "snapshotting"
    """Set by the coordinator once it has a fence. Chunks are being read; the target is not complete."""
    CATCHING_UP = "catching_up"
    """Set by the coordinator after the last chunk. Changes after the fence are about to be applied."""
    STREAMING = "streaming"
    """Set by the first epoch after that. The target equals the source at the end of every epoch."""
    RETRYING = "retrying"
    """Set by an epoch that could not apply its changes to the table. They are kept, the other tables continue, and a later epoch tries
    again: after a pause that grows, and a bounded number of times."""
    PAUSED = "paused"
    """Set by a person. The target stays as it is, and the spool keeps the changes after that."""
    FAILED = "failed"
    """Set by whoever found that the table cannot go on. It stays so, across restarts, until its target is removed, or it is copied anew."""
    GONE = "gone"
    """Set by an epoch that has all that there was of a table which the source has no more. The target stays as it is."""


@dataclass(frozen=True, slots=True)
class TableStatus:
    """A state, how far the table is, and, when it failed or is being tried again, why and what to do."""

    state: TableState
    applied: Position | None = None
    """All of the table's changes up to here are in its target."""
    committed: Position | None = None
    """What the target itself said when last asked. Less than `applied` while the table has no changes of its own."""
    reason: str | None = None
    remedy: str | None = None

    def streaming(self, applied: Position) -> TableStatus:
        """Streaming at `applied`. A table that was streaming keeps its warning; the reason for another state ends with that state."""
        if self.state is TableState.STREAMING:
            return replace(self, applied=applied)
        return TableStatus(TableState.STREAMING, applied, self.committed)

    @property
    def is_applied(self) -> bool:
        """Whether epochs are for this table."""
        return self.state in (TableState.CATCHING_UP, TableState.STREAMING)

    @property
    def is_followed(self) -> bool:
        """Whether epochs are for this table, now or after its next attempt."""
        return self.is_applied or self.state is TableState.RETRYING

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come into the target."""
        return self.state in (TableState.FAILED, TableState.GONE)

    @classmethod
    def failed(cls, error: PenstockError, applied: Position | None) -> TableStatus:
        return cls(TableState.FAILED, applied, None, f"{error.code}: {error.message}", error.hint)
