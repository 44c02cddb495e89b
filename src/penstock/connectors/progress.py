"""Progress of a connector's consumer, its checkpoint format, and the position of each epoch.

The stream is delivered in ranges of whole transactions, table by table. A consumer has all changes of all
tables up to one position, the floor. Of some tables it also has later changes: up to a change within the
range, or up to the fence of the table's snapshot. Only the floor may be acknowledged.

In a checkpoint, `offsets` has the floor under `stream`, and an entry for each table of which the consumer has
later changes: `0/16B3748` if it has all commits up to that position, `0/16B3748+17` if it has only the first
17 changes of that commit. Changes are counted instead of identified by ordinals, because ordinals may differ
when a commit with a rollback to a savepoint is captured again. No table is called `stream`: table names
contain a dot.

The epoch is the number of times that the progress moved. Each move records the new epoch with its floor; the
acknowledgement of an epoch releases the floor of the last recorded epoch at or before it. Memory is bounded:
if there are too many records, every other one is dropped. An epoch whose record was dropped releases the
floor of the epoch before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.capture.watermark import CumulativeAcks
from penstock.contracts.connector import SourceCheckpoint
from penstock.errors import CheckpointError
from penstock.position import Position
from penstock.postgres.membership import Membership
from penstock.postgres.server import SystemIdentity
from penstock.schema import TableName

STREAM = "stream"

_OFFSET = re.compile(r"([0-9A-F]+/[0-9A-F]+)(?:\+(\d+))?")
_RESTART_HINT = "restore a checkpoint of this connector, or start without one, which copies the tables again"


@dataclass(frozen=True, slots=True)
class Offset:
    """Progress in a table: all commits up to `position`. If `rows` is set, only the first `rows` changes of
    the commit at `position`.
    """

    position: Position
    rows: int | None = None

    @classmethod
    def parse(cls, text: str) -> Offset:
        match = _OFFSET.fullmatch(text)
        if match is None:
            raise ValueError(f"not an offset: {text!r}")
        return cls(Position.parse(match[1]), None if match[2] is None else int(match[2]))

    def __str__(self) -> str:
        return str(self.position) if self.rows is None else f"{self.position}+{self.rows}"


@dataclass(frozen=True, slots=True)
class Progress:
    """Immutable progress; every step creates a new object."""

    floor: Position = Position.ZERO
    """The consumer has all changes up to this position, except those of tables in `to_copy`. Zero if nothing
    has been read.
    """
    ahead: Mapping[TableName, Offset] = field(default_factory=dict)
    """Progress of each table of which the consumer has changes after `floor`."""
    tables: tuple[TableName, ...] = ()
    """All captured tables; empty until they are known."""
    to_copy: tuple[TableName, ...] = ()
    """The tables whose snapshot is not complete, in order."""
    members: Mapping[TableName, Membership] = field(default_factory=dict)
    """Publication membership of each table. It includes the transaction that added the table, to detect
    interruptions.
    """

    def covering(self, tables: Sequence[TableName], *, copies: bool) -> Progress:
        """This progress, for exactly these tables. With `copies`, new tables are added to `to_copy`."""
        new = [table for table in tables if table not in self.tables and copies]
        return replace(
            self,
            tables=tuple(tables),
            to_copy=(*(table for table in self.to_copy if table in tables), *new),
            ahead={table: offset for table, offset in self.ahead.items() if table in tables},
            members={table: member for table, member in self.members.items() if table in tables},
        )

    def begun(self, floor: Position, members: Mapping[TableName, Membership]) -> Progress:
        """The progress when reading starts after `floor`."""
        return replace(self.reached(floor), members=dict(members))

    @property
    def followed(self) -> Mapping[TableName, Membership]:
        """The members whose changes must not be missed: all except tables that will be copied."""
        return {table: member for table, member in self.members.items() if table not in self.to_copy}

    def copied(self, table: TableName, fence: Position) -> Progress:
        """The progress after the snapshot of the table is complete: the consumer has all commits up to
        `fence`.
        """
        left = tuple(each for each in self.to_copy if each != table)
        return replace(self, to_copy=left, ahead={**self.ahead, table: Offset(fence)})

    def changed(self, table: TableName, position: Position, rows: int) -> Progress:
        """The progress after more changes of the table were delivered. The last `rows` of them belong to the
        commit at `position`.
        """
        before = self.ahead.get(table)
        if before is not None and before.position == position:
            rows += before.rows or 0
        return replace(self, ahead={**self.ahead, table: Offset(position, rows)})

    def reached(self, floor: Position) -> Progress:
        """The progress after all changes of all tables up to `floor` were delivered."""
        ahead = {table: offset for table, offset in self.ahead.items() if offset.position > floor}
        return replace(self, floor=max(self.floor, floor), ahead=ahead)

    # --- as a checkpoint ------------------------------------------------------------------------------------

    def to_checkpoint(self, epoch: int, slot: str, system: SystemIdentity | None) -> SourceCheckpoint:
        offsets = {
            STREAM: str(self.floor),
            **{str(table): str(offset) for table, offset in self.ahead.items()},
        }
        metadata = {"slot": slot}
        if system is not None:
            metadata["system"] = str(system)
        for name, tables in (("tables", self.tables), ("to_copy", self.to_copy)):
            if tables:
                metadata[name] = json.dumps([str(table) for table in tables])
        if self.members:
            members = {str(table): [member.oid, member.act] for table, member in sorted(self.members.items())}
            metadata["members"] = json.dumps(members)
        return SourceCheckpoint(offsets, epoch, metadata)

    @classmethod
    def from_checkpoint(cls, checkpoint: SourceCheckpoint) -> Progress:
        """Parse the result of `to_checkpoint`. An empty checkpoint is the beginning. Raises `CheckpointError`
        for a checkpoint of another kind of connector.
        """
        offsets, metadata = dict(checkpoint.offsets), checkpoint.metadata
        if not offsets:
            return cls()
        try:
            floor = Position.parse(offsets.pop(STREAM))
            ahead = {TableName.parse(table): Offset.parse(text) for table, text in offsets.items()}
            tables, to_copy = (
                tuple(map(TableName.parse, json.loads(metadata.get(name, "[]"))))
                for name in ("tables", "to_copy")
            )
            found = json.loads(metadata.get("members", "{}")).items()
            members = {TableName.parse(table): Membership(int(oid), str(act)) for table, (oid, act) in found}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                "the checkpoint is not one of a Postgres connector", hint=_RESTART_HINT
            ) from error
        return cls(floor, ahead, tables, to_copy, members)


def checkpoint_system(checkpoint: SourceCheckpoint) -> SystemIdentity | None:
    """The database system that a checkpoint names; None if it names none."""
    text = checkpoint.metadata.get("system")
    try:
        return None if text is None else SystemIdentity.parse(text)
    except ValueError as error:
        raise CheckpointError(
            "the checkpoint has an invalid system identifier", hint=_RESTART_HINT
        ) from error


def check_slot_of(checkpoint: SourceCheckpoint, slot: str) -> None:
    """Raise an error if the checkpoint belongs to another slot. Its positions would be comparable, but a
    connector with another slot may use another publication.
    """
    written = checkpoint.metadata.get("slot", slot)
    if written != slot:
        raise CheckpointError(
            f"the checkpoint is of slot {written}, and the connector reads slot {slot}", hint=_RESTART_HINT
        )


_MOST = 4096


class EpochLedger:
    """The floor of each epoch, for consumers that acknowledge epochs. Used by one thread at a time."""

    def __init__(self, epoch: int, floor: Position, most: int = _MOST) -> None:
        self._floors: CumulativeAcks[int, Position] = CumulativeAcks(most)
        self._floors.append(epoch, floor)
        self._last_floor = floor
        self._last = epoch

    @property
    def last(self) -> int:
        """The current epoch."""
        return self._last

    def move(self, floor: Position) -> None:
        """Begin the next epoch: all changes up to `floor` have been delivered."""
        self._last += 1
        if floor != self._last_floor:  # otherwise this epoch releases the same floor as the one before it
            self._floors.append(self._last, floor)
            self._last_floor = floor

    def floor_of(self, epoch: int) -> Position | None:
        """The floor to release when `epoch` is acknowledged. None if an equal or later floor was acknowledged
        before.
        """
        return self._floors.reached_by(epoch)

    def forget_before(self, epoch: int) -> None:
        """Drop the floors of epochs that will not be requested again."""
        self._floors.forget_before(epoch)

    def __len__(self) -> int:
        return len(self._floors)
