"""What a reader gets for `(start, end]`: by table, the files that hold its changes, each change once.

Segments may overlap after lost ground was captured again with other boundaries. Both hold the same transactions, so either will do; a
file that reaches over what is wanted from it comes with a filter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path

from penstock.change import ChangeCounts, LogicalMessage
from penstock.errors import SpoolGapError
from penstock.position import Position
from penstock.schema import TableName
from penstock.spool.layout import SpoolLayout
from penstock.spool.manifest import Manifest, SegmentFile


@dataclass(frozen=True, slots=True)
class FileSlice:
    """A file, and which of its rows are wanted: `_commit_version > after` and `<= upto`, where these are given.

    Files with a constant `commit_version` are never filtered: they are wanted as a whole or not at all.
    """

    path: Path
    file: SegmentFile
    after: Position | None
    upto: Position | None
    without: frozenset[tuple[int, int]] = frozenset()
    """Changes that are not wanted all the same, each by its `_commit_version` and `_ordinal`."""

    @property
    def needs_filter(self) -> bool:
        return self.after is not None or self.upto is not None


@dataclass(frozen=True, slots=True)
class TableRange:
    """Changes of one table name. After a rename or a re-creation, files of one name may differ in `oid` and `schema`."""

    table: TableName
    slices: tuple[FileSlice, ...]
    """In the order of the changes."""
    counts: ChangeCounts
    """Exact when no slice needs a filter, else an upper bound. Old rows are not among them."""
    old: tuple[FileSlice, ...] = ()
    """Rows as they were before updates, for those who want them; where the capture keeps them."""

    @property
    def with_old(self) -> tuple[FileSlice, ...]:
        """All slices: those of old rows right behind the changes of the same shape. The order of their rows is only in its columns."""
        found: list[FileSlice] = []
        waiting = list(self.old)
        for schema, slices in groupby(self.slices, lambda each: each.file.schema):
            found += [*slices, *(each for each in waiting if each.file.schema == schema)]
            waiting = [each for each in waiting if each.file.schema != schema]
        return (*found, *waiting)


@dataclass(frozen=True, slots=True)
class SpoolRange:
    start: Position
    end: Position
    tables: dict[TableName, TableRange]
    commit_time: datetime | None
    """Of the last transaction in the last segment that lies wholly in the range; None if there is none."""
    messages: tuple[LogicalMessage, ...] = ()
    """Logical messages, each once, in the order of the log."""

    @property
    def counts(self) -> ChangeCounts:
        return sum((table.counts for table in self.tables.values()), ChangeCounts())


@dataclass(frozen=True, slots=True)
class Stretch:
    """One segment's part of a range: `(after, segment.end]`, where `after` is not before the segment's start."""

    segment: Manifest
    after: Position


class Ground:
    """The segments as one stretch of the log, without those that lie wholly inside another."""

    def __init__(self, segments: Iterable[Manifest]) -> None:
        self._segments: list[Manifest] = []
        reached = -1
        for segment in sorted(segments, key=lambda each: (each.start.value, -each.end.value)):
            if segment.end.value > reached:
                reached = segment.end.value
                self._segments.append(segment)
        # Starts and ends both go up now, so the last segment that starts at or before a position reaches furthest from it.
        self._starts = [segment.start.value for segment in self._segments]

    @property
    def start(self) -> Position | None:
        return self._segments[0].start if self._segments else None

    @property
    def end(self) -> Position | None:
        return self._segments[-1].end if self._segments else None

    def walk(self, start: Position) -> Iterator[Stretch]:
        """From `start` on without a hole, as far as that goes."""
        while (at := bisect_right(self._starts, start.value) - 1) >= 0:
            segment = self._segments[at]
            if segment.end <= start:
                return
            yield Stretch(segment, start)
            start = segment.end

    def cover(self, start: Position, end: Position) -> list[Stretch]:
        """The stretches of `(start, end]`, or `SpoolGapError`."""
        found: list[Stretch] = []
        reached = start
        for stretch in self.walk(start):
            if reached >= end:
                break
            found.append(stretch)
            reached = stretch.segment.end
        if reached < end:
            raise self._gap(reached)
        return found

    def _gap(self, at: Position) -> SpoolGapError:
        held = "is empty" if self.start is None else f"reaches from {self.start} to {self.end}"
        following = bisect_right(self._starts, at.value)
        if 0 < following < len(self._starts):
            held += f" with a hole up to {self._segments[following].start}"
        return SpoolGapError(
            f"the changes right after {at} are not in the spool, which {held}",
            hint="if the slot still holds them, start the capture at that position; otherwise resync the tables that stand before it",
        )


def slice_range(layout: SpoolLayout, start: Position, end: Position, stretches: Iterable[Stretch]) -> SpoolRange:
    slices: dict[TableName, list[FileSlice]] = {}
    messages: list[LogicalMessage] = []
    commit_time: datetime | None = None
    for stretch in stretches:
        messages += (message for message in stretch.segment.messages if _is_within(message, stretch.after, end))
        for file in stretch.segment.files:
            if file.max_position > stretch.after and file.min_position <= end:
                after = stretch.after if file.min_position <= stretch.after else None
                upto = end if file.max_position > end else None
                path = layout.segment(stretch.segment.end) / file.path
                slices.setdefault(file.table, []).append(FileSlice(path.absolute(), file, after, upto))
        if stretch.segment.end <= end:
            commit_time = stretch.segment.commit_time or commit_time
    tables = {table: _table_range(table, found) for table, found in slices.items()}
    return SpoolRange(start, end, tables, commit_time, tuple(messages))


def _is_within(message: LogicalMessage, after: Position, end: Position) -> bool:
    if message.position is not None:
        return after < message.position <= end
    return after.lsn <= message.lsn < end.lsn


def _table_range(table: TableName, slices: list[FileSlice]) -> TableRange:
    changes, old = (tuple(each for each in slices if each.file.is_old == is_old) for is_old in (False, True))
    return TableRange(table, changes, sum((each.file.counts for each in changes), ChangeCounts()), old)
