"""Positions of records, as the Postgres source reads them.

`0/16B3748:3` is the change with ordinal 3 of the commit at that position, `0/16B3748` the end of everything that commits up to there, and
`snapshot:0/16B3748:17` the seventeenth row of a snapshot that is exact at that position.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.contracts.records import RecordPosition
from penstock.errors import RecordGoneError
from penstock.position import Position

_END = 1 << 62
"""Behind every change of a commit."""

_LSN = r"[0-9A-F]{1,8}/[0-9A-F]{1,8}"
_CHANGE = re.compile(rf"({_LSN})(?::([0-9]{{1,18}}))?")
_SNAPSHOT = re.compile(rf"snapshot:({_LSN}):([0-9]{{1,18}})")


@dataclass(frozen=True, order=True, slots=True)
class ChangePlace:
    """Of a change; without an ordinal, behind all changes of its commit."""

    position: Position
    ordinal: int = _END

    def render(self) -> RecordPosition:
        return RecordPosition(str(self.position) if self.ordinal == _END else f"{self.position}:{self.ordinal}")


@dataclass(frozen=True, slots=True)
class SnapshotPlace:
    """Of a row of a snapshot, but for the last one: that stands where the changes begin."""

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
        hint="give back the position of a record as it came, or None to begin anew",
    )
