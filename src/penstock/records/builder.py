"""Build records from captured events, with positions that the Postgres source can parse.

`0/16B3748:3` is the change with ordinal 3 of the commit at position 0/16B3748. `0/16B3748` is the end of that
commit. `snapshot:0/16B3748:17` is the 17th row of a snapshot with the fence 0/16B3748.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from penstock.contracts.capture import Change, Commit, Delete, Truncate, Upsert
from penstock.contracts.records import (
    EXACT,
    MOVED_FROM,
    OPERATION,
    TABLE,
    UNCHANGED,
    Operation,
    Record,
    RecordPosition,
)
from penstock.errors import ConfigError, RecordGoneError
from penstock.position import Position
from penstock.schema import TableName

_END = 1 << 62
"""The ordinal that stands for the end of a commit. It is greater than that of any change."""

_LSN = r"[0-9A-F]{1,8}/[0-9A-F]{1,8}"
_CHANGE = re.compile(rf"({_LSN})(?::([0-9]{{1,18}}))?")
_SNAPSHOT = re.compile(rf"snapshot:({_LSN}):([0-9]{{1,18}})")


@dataclass(frozen=True, order=True, slots=True)
class ChangePlace:
    """Position of a change; without an ordinal, the end of its commit."""

    position: Position
    ordinal: int = _END

    def render(self) -> RecordPosition:
        return RecordPosition(
            str(self.position) if self.ordinal == _END else f"{self.position}:{self.ordinal}"
        )


@dataclass(frozen=True, slots=True)
class SnapshotPlace:
    """Position of a row of a snapshot. The last row has the fence as its position instead."""

    fence: Position
    number: int

    def render(self) -> RecordPosition:
        return RecordPosition(f"snapshot:{self.fence}:{self.number}")


def parse_place(position: RecordPosition) -> ChangePlace | SnapshotPlace:
    if match := _CHANGE.fullmatch(position.text):
        return ChangePlace(Position.parse(match[1]), _END if match[2] is None else int(match[2]))
    if match := _SNAPSHOT.fullmatch(position.text):
        return SnapshotPlace(Position.parse(match[1]), int(match[2]))
    raise RecordGoneError(
        f"{position.text[:80]!r} is not a position of this source",
        hint="pass the position of a record unchanged, or None to start again",
    )


@dataclass(frozen=True, slots=True)
class RecordBuilder:
    """Builds the records of one table, with all columns or the given ones."""

    table: TableName
    columns: tuple[str, ...] = ()

    def row(self, event: Upsert, operation: Operation, position: RecordPosition, time: datetime) -> Record:
        self._check_columns(event)
        metadata: dict[str, object] = {OPERATION: operation.value, TABLE: str(self.table)}
        if unchanged := [name for name in sorted(event.unchanged) if self._wants(name)]:
            metadata[UNCHANGED] = unchanged
        if exact := self._chosen(event.exact):
            metadata[EXACT] = exact
        if event.moved_from is not None:
            metadata[MOVED_FROM] = dict(event.moved_from)
        return Record(position, event.key, self._chosen(event.row), metadata, time)

    def record(self, change: Change) -> Record:
        """The record of a change of the live stream.

        If a change is delivered again, its record has the same position.
        """
        position, time = place_of(change).render(), commit_of(change).time or datetime.now(UTC)
        event = change.event
        match event:
            case Upsert():
                return self.row(event, Operation.UPSERT, position, time)
            case Delete():
                return Record(
                    position,
                    event.key,
                    None,
                    {OPERATION: Operation.DELETE.value, TABLE: str(self.table)},
                    time,
                )
            case Truncate():
                return Record(
                    position, {}, None, {OPERATION: Operation.TRUNCATE.value, TABLE: str(self.table)}, time
                )

    def _wants(self, column: str) -> bool:
        return not self.columns or column in self.columns

    def _chosen(self, values: Mapping[str, object]) -> dict[str, object]:
        return {name: value for name, value in values.items() if self._wants(name)}

    def _check_columns(self, event: Upsert) -> None:
        lacking = [name for name in self.columns if name not in event.row and name not in event.unchanged]
        if lacking:
            raise ConfigError(
                f"{self.table} has no column {', '.join(lacking)}",
                hint=f"the table has {', '.join(sorted(event.row))}",
            )


def commit_of(change: Change) -> Commit:
    """The commit of a change, from which the record's position is derived. Raises if the capture does not
    report it.
    """
    if change.commit is None:
        raise _unplaced("the commit of a change")
    return change.commit


def place_of(change: Change) -> ChangePlace:
    commit = commit_of(change)
    if commit.ordinal is None:
        raise _unplaced("the ordinal of a change within its commit")
    return ChangePlace(commit.position, commit.ordinal)


def _unplaced(what: str) -> ConfigError:
    return ConfigError(
        f"the capture does not report {what}, which positions of records require", hint="use a WalCapture"
    )
