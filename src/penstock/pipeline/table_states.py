"""States of a table, the events that change them, and the table of transitions.

`TRANSITIONS` is the only definition of the transitions, and `TableLifecycle` applies them. An event without a
transition from the current state has no effect: events arrive from several threads, and a table may have
failed or been removed before its event arrives. A test compares `TRANSITIONS` with the table in
docs/explanation/table-states.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from penstock.errors import PenstockError
from penstock.position import Position


class TableState(StrEnum):
    PENDING = "pending"
    """The table has no snapshot in the target yet. The spool keeps its changes until the snapshot."""
    SNAPSHOTTING = "snapshotting"
    """A snapshot or a resync is due or running. The target is incomplete, or holds the rows from before the
    resync.
    """
    CATCHING_UP = "catching_up"
    """The target is filled up to its applied position. The next epoch applies the changes after this
    position.
    """
    STREAMING = "streaming"
    """The target equals the source at the end of every epoch."""
    RETRYING = "retrying"
    """Applying changes failed.

    The spool keeps the changes, the other tables continue, and a later epoch retries after a backoff.
    """
    PAUSED = "paused"
    """An operator paused the table. The target stays as it is, and the spool keeps the changes after its
    applied position.
    """
    FAILED = "failed"
    """The table needs an operator.

    It stays failed across restarts until it is resynced or its target is removed.
    """
    GONE = "gone"
    """The source dropped the table and all its changes are applied. The target stays as it is."""


class TableEvent(StrEnum):
    FOUND = "found"
    ADOPTED = "adopted"
    SNAPSHOT_STARTED = "snapshot started"
    COPIED = "copied"
    APPLIED = "applied"
    APPLY_FAILED = "apply failed"
    RETRY_DUE = "retry due"
    RESYNC_REQUIRED = "resync required"
    RESYNCED = "resynced"
    PAUSED = "paused"
    RESUMED = "resumed"
    DROPPED = "dropped"
    FAILED = "failed"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of the table of transitions: in each state in `before`, the event leads to the state `after`.

    The state None means that the table does not belong to the pipeline.
    """

    before: frozenset[TableState | None]
    event: TableEvent
    after: TableState | None
    set_by: str


_APPLIED = frozenset({TableState.CATCHING_UP, TableState.STREAMING})
_FOLLOWED = _APPLIED | {TableState.RETRYING}
_WAITING = frozenset({TableState.PENDING, TableState.SNAPSHOTTING})
_NOT_OVER = _WAITING | _FOLLOWED | {TableState.PAUSED}
_ANY = _NOT_OVER | {TableState.FAILED, TableState.GONE}
_NEW: frozenset[TableState | None] = frozenset({None})

TRANSITIONS = (
    Transition(
        _NEW | {TableState.PENDING}, TableEvent.FOUND, TableState.PENDING, "start-up and the table reconciler"
    ),
    Transition(
        _NEW | {TableState.SNAPSHOTTING},
        TableEvent.ADOPTED,
        TableState.SNAPSHOTTING,
        "start-up and the table reconciler",
    ),
    Transition(
        _WAITING,
        TableEvent.SNAPSHOT_STARTED,
        TableState.SNAPSHOTTING,
        "the snapshot thread, once the fence is known",
    ),
    Transition(_WAITING, TableEvent.COPIED, TableState.CATCHING_UP, "the epoch after the last chunk"),
    Transition(_APPLIED, TableEvent.APPLIED, TableState.STREAMING, "the epoch"),
    Transition(_APPLIED, TableEvent.APPLY_FAILED, TableState.RETRYING, "the epoch"),
    Transition(
        frozenset({TableState.RETRYING}),
        TableEvent.RETRY_DUE,
        TableState.CATCHING_UP,
        "the first epoch after the pause",
    ),
    Transition(
        _FOLLOWED,
        TableEvent.RESYNC_REQUIRED,
        TableState.SNAPSHOTTING,
        "the epoch, after a change it cannot follow",
    ),
    Transition(_ANY, TableEvent.RESYNCED, TableState.CATCHING_UP, "the epoch that swaps the copy in"),
    Transition(
        _FOLLOWED | _NEW | {TableState.PAUSED},
        TableEvent.PAUSED,
        TableState.PAUSED,
        "an operator: `penstock tables pause`",
    ),
    Transition(
        frozenset({TableState.PAUSED}),
        TableEvent.RESUMED,
        TableState.CATCHING_UP,
        "an operator: `penstock tables resume`",
    ),
    Transition(_NOT_OVER, TableEvent.DROPPED, TableState.GONE, "the epoch with the table's last change"),
    Transition(
        _ANY | _NEW,
        TableEvent.FAILED,
        TableState.FAILED,
        "start-up, the reconciler, a snapshot, the epoch or maintenance",
    ),
    Transition(_ANY, TableEvent.REMOVED, None, "the epoch after the table was deselected"),
)

_AFTER: Mapping[tuple[TableState | None, TableEvent], TableState | None] = {
    (before, each.event): each.after for each in TRANSITIONS for before in each.before
}


def is_allowed(state: TableState | None, event: TableEvent) -> bool:
    """Whether the event is allowed for a table in this state."""
    return (state, event) in _AFTER


def next_state(state: TableState | None, event: TableEvent) -> TableState | None:
    """The state after an allowed event; None if the table leaves the pipeline."""
    return _AFTER[state, event]


@dataclass(frozen=True, slots=True)
class TableStatus:
    """The state and the applied position of a table. `reason` and `remedy` describe a failure, a retry or a
    warning.
    """

    state: TableState
    applied: Position | None = None
    """All changes of the table up to this position are in its target."""
    committed: Position | None = None
    """The position of the target's last commit. It is less than `applied` if the table had no changes since.
    """
    reason: str | None = None
    remedy: str | None = None

    def streaming(self, applied: Position) -> TableStatus:
        """Return this status with the state `streaming` and the applied position `applied`.

        A table that is already streaming keeps its warning; the reason of any other state is removed.
        """
        if self.state is TableState.STREAMING:
            return replace(self, applied=applied)
        return TableStatus(TableState.STREAMING, applied, self.committed)

    @property
    def is_applied(self) -> bool:
        """Whether the next epoch applies changes to this table."""
        return self.state in _APPLIED

    @property
    def is_followed(self) -> bool:
        """Whether epochs apply changes to this table now, or will do so after a retry."""
        return self.state in _FOLLOWED

    @property
    def is_over(self) -> bool:
        """Whether the table has failed or is gone, so that the target is no longer written."""
        return self.state in (TableState.FAILED, TableState.GONE)

    @classmethod
    def failed(cls, error: PenstockError, applied: Position | None) -> TableStatus:
        return cls(TableState.FAILED, applied, None, f"{error.code}: {error.message}", error.hint)
