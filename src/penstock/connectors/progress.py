"""How far a consumer of the Postgres connector has come, and that as a checkpoint.

The stream is given out in ranges of whole transactions, table by table. So a consumer has everything up to one position, the floor, and of
some tables more: up to a change inside the range, or up to the fence of their snapshot. Only the floor may ever be acknowledged.

As a checkpoint, `offsets` has the floor under `stream`, and under a table's name where that is further: `0/16B3748` for all that commits up
to there, `0/16B3748+17` if of that commit only the table's first 17 changes have been given out. They are counted, and not told by their
ordinals: where a commit with a rollback to a savepoint is captured again, those may differ. No table is called `stream`: their names have
a dot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.contracts.connector import SourceCheckpoint
from penstock.errors import CheckpointError
from penstock.position import Position
from penstock.postgres.membership import Member
from penstock.postgres.timeline import SystemIdentity
from penstock.schema import TableName

STREAM = "stream"

_OFFSET = re.compile(r"([0-9A-F]+/[0-9A-F]+)(?:\+(\d+))?")
_ANEW = "restore a checkpoint of this connector, or start without one, which copies the tables anew"


@dataclass(frozen=True, slots=True)
class Offset:
    """How far a table has been given out: all that commits up to `position`, or of that commit only the table's first `rows` changes."""

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
    """A value: every step gives another one."""

    floor: Position = Position.ZERO
    """Every table has all that commits up to here, those aside that are still to be copied. Zero: nothing has been read yet."""
    ahead: Mapping[TableName, Offset] = field(default_factory=dict)
    """Tables that have more than that."""
    tables: tuple[TableName, ...] = ()
    """All that are captured; none while nobody has said which."""
    to_copy: tuple[TableName, ...] = ()
    """Those of them whose snapshot has not been given out whole, in order."""
    members: Mapping[TableName, Member] = field(default_factory=dict)
    """Which tables they are, and which act put each into the publication, so that a break can be told."""

    def covering(self, tables: Sequence[TableName], *, copies: bool) -> Progress:
        """Of these tables, and no others. Of one that was not among them before nothing is known, so it is to be copied."""
        new = [table for table in tables if table not in self.tables and copies]
        return replace(
            self,
            tables=tuple(tables),
            to_copy=(*(table for table in self.to_copy if table in tables), *new),
            ahead={table: offset for table, offset in self.ahead.items() if table in tables},
            members={table: member for table, member in self.members.items() if table in tables},
        )

    def begun(self, floor: Position, members: Mapping[TableName, Member]) -> Progress:
        """Reading starts, behind `floor`."""
        return replace(self.reached(floor), members=dict(members))

    @property
    def followed(self) -> Mapping[TableName, Member]:
        """Those of the members whose changes must not be missed: all but what will be copied anyway."""
        return {table: member for table, member in self.members.items() if table not in self.to_copy}

    def copied(self, table: TableName, fence: Position) -> Progress:
        """Its snapshot has been given out whole: it has all that commits up to `fence`."""
        left = tuple(each for each in self.to_copy if each != table)
        return replace(self, to_copy=left, ahead={**self.ahead, table: Offset(fence)})

    def changed(self, table: TableName, position: Position, rows: int) -> Progress:
        """Further changes of it have been given out; the last `rows` of them are of the commit at `position`."""
        before = self.ahead.get(table)
        if before is not None and before.position == position:
            rows += before.rows or 0
        return replace(self, ahead={**self.ahead, table: Offset(position, rows)})

    def reached(self, floor: Position) -> Progress:
        """Everything that commits up to `floor` has been given out."""
        ahead = {table: offset for table, offset in self.ahead.items() if offset.position > floor}
        return replace(self, floor=max(self.floor, floor), ahead=ahead)

    # --- as a checkpoint ------------------------------------------------------------------------------------------------

    def to_checkpoint(self, epoch: int, slot: str, system: SystemIdentity | None) -> SourceCheckpoint:
        offsets = {STREAM: str(self.floor), **{str(table): str(offset) for table, offset in self.ahead.items()}}
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
        """What `to_checkpoint` wrote; an empty checkpoint is the beginning. `CheckpointError` for what it did not write."""
        offsets, metadata = dict(checkpoint.offsets), checkpoint.metadata
        if not offsets:
            return cls()
        try:
            floor = Position.parse(offsets.pop(STREAM))
            ahead = {TableName.parse(table): Offset.parse(text) for table, text in offsets.items()}
            tables, to_copy = (tuple(map(TableName.parse, json.loads(metadata.get(name, "[]")))) for name in ("tables", "to_copy"))
            found = json.loads(metadata.get("members", "{}")).items()
            members = {TableName.parse(table): Member(int(oid), str(act)) for table, (oid, act) in found}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError("the checkpoint is not one of a Postgres connector", hint=_ANEW) from error
        return cls(floor, ahead, tables, to_copy, members)


def checkpoint_system(checkpoint: SourceCheckpoint) -> SystemIdentity | None:
    """The database system that a checkpoint is of; None if it does not say."""
    text = checkpoint.metadata.get("system")
    try:
        return None if text is None else SystemIdentity.parse(text)
    except ValueError as error:
        raise CheckpointError("the checkpoint names a database system that cannot be one", hint=_ANEW) from error


def check_slot_of(checkpoint: SourceCheckpoint, slot: str) -> None:
    """Positions of one server are the same for all slots, but what a slot lets through is not."""
    written = checkpoint.metadata.get("slot", slot)
    if written != slot:
        raise CheckpointError(f"the checkpoint is of slot {written}, and the connector reads slot {slot}", hint=_ANEW)
