"""What a capture promises: the changes of a source, each with its acknowledgement.

A capture has two capabilities, and the caller decides when to use which: `live` follows the source without end, `snapshot` reads what is
there now. No position is passed in or out: where to resume is the capture's own affair, kept durably where it likes (a replication slot, a
cursor table), and moved by acknowledgements alone. `ChangeCaptureConformance` in `penstock.testing` holds an implementation to these rules.
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
"""The columns that tell the rows of a table apart, with their values. One that its type cannot hold stands here as its exact text, so that
two keys are equal only if the rows are the same."""


@dataclass(frozen=True, slots=True)
class Upsert:
    """The row is there now, and these are its values, whether it was there before or not.

    The usual mistake is to replace the whole row by `row`: a column whose value did not travel is named in `unchanged` and is *not* in
    `row`, and what stands in the target must stay.
    """

    table: TableName
    key: Key
    """Empty if nothing tells the table's rows apart; then the row is one more."""
    row: Mapping[str, object]
    """All columns but the unchanged ones. None is NULL, unless `exact` names the column."""
    unchanged: frozenset[str] = frozenset()
    """Columns that keep their value, which did not travel (large values that an update left alone)."""
    exact: Mapping[str, str] = field(default_factory=dict)
    """Texts of the values that a column's type cannot hold; `row` has None in their place."""
    moved_from: Key | None = None
    """Where the unchanged values stand, if not under `key`: an update changed the key too. The delete of that key follows this change."""


@dataclass(frozen=True, slots=True)
class Delete:
    """The row is not there any more. Of a row that was never seen this may come too, and then means nothing."""

    table: TableName
    key: Key
    """The whole old row if nothing tells the table's rows apart; then one row that is equal to it goes."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """No row of the table is there any more; no deletes come for them."""

    table: TableName


Event: TypeAlias = Upsert | Delete | Truncate


@dataclass(frozen=True, slots=True)
class Commit:
    """Which commit a change belongs to. For people and for ordering; nothing in this contract takes it back.

    Changes come in the order of `(position, ordinal)`, and a change that is delivered again has the same pair. For a row of a snapshot,
    `position` is where the snapshot is exact: a live change at or before it is already in.
    """

    position: Position
    time: datetime | None = None
    ordinal: int | None = None


class Ack(ABC):
    """The right to say that a change has been dealt with for good."""

    @abstractmethod
    def confirm(self) -> None:
        """Never ask for this change to be delivered again.

        Call it once the change is durable where it was going, from any thread, in any order, as often as one likes: only the first call
        counts. It returns at once and raises nothing; after its stream was closed it may come too late to count. Confirming a change says
        nothing about the ones before it: the resume point waits for the first that is not confirmed. The usual mistakes are to confirm a
        change when it was *received*, and to confirm every hundredth one as if that covered the rest.
        """


@final
class UntrackedAck(Ack):
    """For changes that move nothing: those of a snapshot."""

    __slots__ = ()

    @override
    def confirm(self) -> None:
        """Nothing to move."""


UNTRACKED: Final = UntrackedAck()


@dataclass(frozen=True, slots=True)
class Change:
    """One event and the right to confirm it. Never confirmed, it is delivered again after a restart."""

    event: Event
    ack: Ack
    commit: Commit | None = None
    """None where the source has no such thing."""


@runtime_checkable
class ChangeStream(Protocol):
    """Changes in order, and the resources behind them. A generator is one; so `contextlib.closing(capture.live())` always works.

    For one thread at a time. It owns its connection and its threads and lets go of them when it is closed, when it ends, when it raises,
    and when the last reference to it goes, as after a `break`; acknowledgements that are still held do not keep it alive.
    """

    def __iter__(self) -> ChangeStream: ...

    def __next__(self) -> Change: ...

    def close(self) -> None:
        """End the stream; what has been confirmed so far, and counts, is durable when this returns. May be called more than once."""


class ChangeCapture(ABC):
    """A way of learning what changes in a source: logical replication, polling, triggers.

    An object of this kind is a description and holds nothing open; make it anywhere, and any number of times. What it opens belongs to
    the streams that it gives out. It keeps no resume point in memory: another object with the same settings, in another process, goes on
    where the last one's confirmed changes end.
    """

    @abstractmethod
    def live(self) -> ChangeStream:
        """Follow the source from the resume point on, without end.

        Called once at each start, by the one process that captures; a second stream beside the first waits, or fails. When it returns, the
        resume point exists: whatever commits from then on will be delivered, however late the first change is asked for. So call it first,
        then `snapshot`, and no change falls between the two.

        Delivery is at least once: whole transactions in the order of their commits, and after a restart everything again from the first
        transaction of which a change was not confirmed, also if later ones were. The resume point moves only over a run of confirmed
        changes without a hole, and only to where a transaction ends. With nothing unconfirmed it follows the source, also when nothing that
        concerns us happens there. Trouble that passes is waited out inside; everything else is raised by `next`, and ends the stream.
        """

    def snapshot(self, tables: Sequence[TableName]) -> ChangeStream:
        """The rows that `tables` have now, as upserts; the end of the stream is the end of the snapshot, and no other mark is given.

        Called when a target has to be filled, which the caller knows and the capture does not; in the same process as `live`, or another.
        All tables are read as of one moment. It cannot be resumed: if it breaks off, start it again, which does no harm to a target that
        upserts. Its acknowledgements move nothing, and need not be confirmed. The usual mistake is to take an empty table for a snapshot
        that failed. By default it is empty, for captures that cannot read what is there.
        """
        yield from ()

    def lag(self) -> int | None:
        """How many bytes the resume point is behind the source; None if that cannot be said, as before the first `live`.

        Called on a timer by whoever watches, from any process, beside a running stream. It opens a connection of its own for a moment and
        never touches the stream's. By default None.
        """
        return None
