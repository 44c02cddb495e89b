"""Contract of change captures: the changes of a source, each with its acknowledgement.

A capture has two operations: `live` streams changes without end, `snapshot` reads the current rows. The
caller decides when to use each. Neither takes or returns a position. The capture stores its resume point
itself (a replication slot, a cursor table), and only acknowledgements move it. `ChangeCaptureConformance` in
`penstock.testing` checks implementations against these rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Protocol, TypeAlias, final, runtime_checkable

from typing_extensions import override

from penstock.position import Position
from penstock.schema import TableName

Key: TypeAlias = Mapping[str, object]
"""The key columns of a row, with their values. A value that its type cannot hold is given as its exact text,
so that two keys are equal only if they identify the same row.
"""


@dataclass(frozen=True, slots=True)
class Upsert:
    """A row was inserted or updated. `row` has its values.

    Usual mistake: replacing the whole row by `row`. A column with an unchanged TOAST value is listed in
    `unchanged` and is *not* in `row`; the target must keep its value.
    """

    table: TableName
    key: Key
    """The key of the row. Empty if the table has no key; the row is then added, without replacing another."""
    row: Mapping[str, object]
    """All columns except the unchanged ones. None is NULL, unless `exact` has the column."""
    unchanged: frozenset[str] = frozenset()
    """Columns with unchanged TOAST values, which Postgres did not send."""
    exact: Mapping[str, str] = field(default_factory=dict)
    """Texts of the values that a column's type cannot hold; `row` has None for them."""
    moved_from: Key | None = None
    """The old key, if an update changed the key of the row. The target has the unchanged values under this
    key. The delete of that key follows this change.
    """


@dataclass(frozen=True, slots=True)
class Delete:
    """A row was deleted. The target may not have the row; the delete then has no effect."""

    table: TableName
    key: Key
    """For a table without a key, the whole old row; delete one row that is equal to it."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """All rows of the table were removed; no deletes are delivered for them."""

    table: TableName


Event: TypeAlias = Upsert | Delete | Truncate


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit of a change, to order changes and to show it to people. No operation of this contract takes
    it as an argument.

    Changes are ordered by `(position, ordinal)`, and a change that is delivered again has the same pair. For
    a row of a snapshot, `position` is the fence: the snapshot contains all live changes at or before it.
    """

    position: Position
    time: datetime | None = None
    ordinal: int | None = None


class Ack(ABC):
    """Acknowledgement of one change."""

    @abstractmethod
    def confirm(self) -> None:
        """State that this change never has to be delivered again.

        Call it after the change is durable in the target. It may be called from any thread, in any order and
        more than once; only the first call counts. It returns at once and raises nothing. A call after the
        stream was closed may have no effect. Confirming a change does not confirm earlier ones: the resume
        point stays before the first unconfirmed change. Usual mistakes: confirming a change when it was
        *received*, and confirming every hundredth change as if that covered the others.
        """


@final
class UntrackedAck(Ack):
    """Acknowledgement without effect, for rows of a snapshot."""

    __slots__ = ()

    @override
    def confirm(self) -> None:
        """Do nothing."""


UNTRACKED: Final = UntrackedAck()


@dataclass(frozen=True, slots=True)
class Change:
    """One event and its acknowledgement. An unconfirmed change is delivered again after a restart."""

    event: Event
    ack: Ack
    commit: Commit | None = None
    """None if the source has no commits."""


@runtime_checkable
class ChangeStream(Protocol):
    """Changes in order, and the resources behind them. A generator qualifies, so
    `contextlib.closing(capture.live())` always works.

    Use it from one thread at a time. The stream owns its connection and threads. It releases them when it is
    closed, ends, raises an error, or is garbage collected, for example after a `break`. Acknowledgements that
    are still referenced do not keep the stream open.
    """

    def __iter__(self) -> ChangeStream: ...

    def __next__(self) -> Change: ...

    def close(self) -> None:
        """End the stream. Everything confirmed before the call is durable when it returns. May be called more
        than once.
        """


class ChangeCapture(ABC):
    """A capture method: logical replication, polling or triggers.

    An object of this class is a description without open resources; it can be created anywhere and any number
    of times. Streams own what they open. The resume point is not kept in memory: another object with the same
    settings, also in another process, continues after the changes that were confirmed before.
    """

    @abstractmethod
    def live(self) -> ChangeStream:
        """Stream changes from the resume point, without end.

        Called once per start, by the one process that captures. A second concurrent stream waits or fails.
        When the call returns, the resume point exists: every later commit will be delivered, even if the
        first change is read much later. Call it before `snapshot`, so that no change between snapshot and
        stream is lost.

        Delivery is at least once, in whole transactions in commit order. After a restart, delivery starts
        with the first transaction that has an unconfirmed change, even if later changes were confirmed. The
        resume point moves only over a run of confirmed changes without a gap, and only to the end of a
        transaction. While no change is unconfirmed, the resume point follows the source, even if no captured
        table changes. The stream retries temporary errors itself. `next` raises all other errors, and the
        stream ends.
        """

    def snapshot(self, tables: Sequence[TableName]) -> ChangeStream:
        """The current rows of `tables`, as upserts. The stream ends when the snapshot is complete; there is
        no other marker.

        Called when the caller has to fill a target, in the process that runs `live` or in another. All tables
        are read as of one moment. A snapshot cannot be resumed: after an error, start it again, which does no
        harm to a target that upserts. The acknowledgements of its rows have no effect and need not be
        confirmed. Usual mistake: taking an empty table for a failed snapshot. The default is an empty stream,
        for captures without snapshots.
        """
        yield from ()

    def lag(self) -> int | None:
        """Bytes between the resume point and the source's current position; None if unknown, for example
        before the first `live`.

        Called on a timer by monitoring, from any process, while a stream runs. It opens its own short-lived
        connection, and does not use that of the stream. The default is None.
        """
        return None
