"""Read the spool: list its segments, and find the files that contain the changes in `(start, end]`.

Each change is returned exactly once. `SpoolRange` lists the file slices of a range by table.

Segments may overlap if a range was captured again with other boundaries. Both segments contain the same
transactions of the common range, so either may be used. A file that extends beyond the wanted range has a
filter.

Any number of readers may run, in any process, while the writer and retention run. A refresh costs one
directory listing; only new manifests are parsed. Segments may disappear, and the spool may be deleted and
captured again, at any time, so manifests are checked before their files are used.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from penstock import storage
from penstock.change import ChangeCounts, LogicalMessage
from penstock.errors import SpoolGapError
from penstock.position import Position
from penstock.schema import TableName
from penstock.spool.manifest import (
    MANIFEST,
    Manifest,
    SegmentFile,
    SpoolLayout,
    parse_manifest,
    parse_segment_name,
)


@dataclass(frozen=True, slots=True)
class FileSlice:
    """A file with a filter: `_commit_version > after` and `<= upto`, if these are set.

    Files with a constant `commit_version` need no filter: they are used as a whole or not at all.
    """

    path: Path
    file: SegmentFile
    after: Position | None
    upto: Position | None
    excluded: frozenset[tuple[int, int]] = frozenset()
    """Changes to leave out, each by its `_commit_version` and `_ordinal`."""

    @property
    def needs_filter(self) -> bool:
        return self.after is not None or self.upto is not None


@dataclass(frozen=True, slots=True)
class TableRange:
    """Changes of one table name.

    After a rename or re-creation, its files may differ in `oid` and `schema`.
    """

    table: TableName
    slices: tuple[FileSlice, ...]
    """The slices in the order of their changes."""
    counts: ChangeCounts
    """The numbers of changes. They are exact if no slice needs a filter, otherwise upper bounds. Old rows are
    not counted.
    """
    old: tuple[FileSlice, ...] = ()
    """Slices with the old rows of updates, if the capture keeps them."""

    @property
    def with_old(self) -> tuple[FileSlice, ...]:
        """All slices; old rows follow the changes of the same schema.

        To order the rows, use their `_commit_version` and `_ordinal`.
        """
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
    """Commit time of the last transaction in the segments that end in the range; None if there is none."""
    messages: tuple[LogicalMessage, ...] = ()
    """Logical messages in log order, each once."""

    @property
    def counts(self) -> ChangeCounts:
        return sum((table.counts for table in self.tables.values()), ChangeCounts())


@dataclass(frozen=True, slots=True)
class Extent:
    """The part `(after, segment.end]` of a segment; `after` is not before the segment's start."""

    segment: Manifest
    after: Position


class Coverage:
    """The range of the log that the segments cover. Ignores segments that are inside another one."""

    def __init__(self, segments: Iterable[Manifest]) -> None:
        self._segments: list[Manifest] = []
        reached = -1
        for segment in sorted(segments, key=lambda each: (each.start.value, -each.end.value)):
            if segment.end.value > reached:
                reached = segment.end.value
                self._segments.append(segment)
        # Starts and ends are both ascending now: of the segments that start at or before a position, the last
        # one ends last.
        self._starts = [segment.start.value for segment in self._segments]

    @property
    def start(self) -> Position | None:
        return self._segments[0].start if self._segments else None

    @property
    def end(self) -> Position | None:
        return self._segments[-1].end if self._segments else None

    def walk(self, start: Position) -> Iterator[Extent]:
        """Yield the extents from `start` up to the first hole."""
        while (at := bisect_right(self._starts, start.value) - 1) >= 0:
            segment = self._segments[at]
            if segment.end <= start:
                return
            yield Extent(segment, start)
            start = segment.end

    def cover(self, start: Position, end: Position) -> list[Extent]:
        """Return the extents that cover `(start, end]`. Raises SpoolGapError if there is a hole."""
        found: list[Extent] = []
        reached = start
        for extent in self.walk(start):
            if reached >= end:
                break
            found.append(extent)
            reached = extent.segment.end
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
            hint="if the slot still holds them, start the capture at that position; "
            "otherwise resync the tables whose applied position is earlier",
        )


def slice_range(layout: SpoolLayout, start: Position, end: Position, extents: Iterable[Extent]) -> SpoolRange:
    slices: dict[TableName, list[FileSlice]] = {}
    messages: list[LogicalMessage] = []
    commit_time: datetime | None = None
    for extent in extents:
        messages += (message for message in extent.segment.messages if _is_within(message, extent.after, end))
        for file in extent.segment.files:
            if file.max_position > extent.after and file.min_position <= end:
                after = extent.after if file.min_position <= extent.after else None
                upto = end if file.max_position > end else None
                path = layout.segment(extent.segment.end) / file.path
                slices.setdefault(file.table, []).append(FileSlice(path.absolute(), file, after, upto))
        if extent.segment.end <= end:
            commit_time = extent.segment.commit_time or commit_time
    tables = {table: _table_range(table, found) for table, found in slices.items()}
    return SpoolRange(start, end, tables, commit_time, tuple(messages))


def _is_within(message: LogicalMessage, after: Position, end: Position) -> bool:
    if message.position is not None:
        return after < message.position <= end
    return after.lsn <= message.lsn < end.lsn


def _table_range(table: TableName, slices: list[FileSlice]) -> TableRange:
    changes, old = (tuple(each for each in slices if each.file.is_old == is_old) for is_old in (False, True))
    return TableRange(table, changes, sum((each.file.counts for each in changes), ChangeCounts()), old)


__all__ = ["FileSlice", "SpoolRange", "SpoolReader", "TableRange"]


class _Known(NamedTuple):
    inode: int
    version: storage.FileVersion
    manifest: Manifest


class SpoolReader:
    """A view of a spool. Every method refreshes it first. Not thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._layout = SpoolLayout(root)
        self._known: dict[str, _Known] = {}
        self._segments: tuple[Manifest, ...] = ()
        self._coverage = Coverage(())
        self._is_stale = False

    def segments(self) -> tuple[Manifest, ...]:
        """Return all segments in order of their ends, including overlapping ones."""
        self.refresh()
        return self._segments

    @property
    def start(self) -> Position | None:
        """The start of the first segment; None for an empty spool."""
        self.refresh()
        return self._coverage.start

    @property
    def end(self) -> Position | None:
        """The end of the last segment; None for an empty spool."""
        self.refresh()
        return self._coverage.end

    @property
    def extent(self) -> tuple[Position, Position] | None:
        """Start and end of the spool, from one refresh; None for an empty spool."""
        self.refresh()
        start, end = self._coverage.start, self._coverage.end
        return None if start is None or end is None else (start, end)

    def read(self, start: Position, end: Position) -> SpoolRange:
        """Return the changes in `(start, end]`, each once.

        Raises SpoolGapError if the spool does not cover that range.
        """
        self.refresh()
        extents = self._cover(start, end)
        while not self._are_current(extents):
            self.refresh()
            extents = self._cover(start, end)
        return slice_range(self._layout, start, end, extents)

    def limit(
        self,
        start: Position,
        *,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        max_transactions: int | None = None,
    ) -> Position:
        """Return the end of the last segment up to which all counts since `start` are within their limits,
        but at least the end of the first segment after `start`.

        Returns `start` if there is no segment after it. Raises SpoolGapError if there is a hole right after
        `start`.
        """
        end = self.end
        if end is None or end <= start:
            return start
        self._cover(start, Position.of(start.value + 1))
        reached, counts = start, [0, 0, 0]
        limits = [math.inf if limit is None else limit for limit in (max_rows, max_bytes, max_transactions)]
        for extent in self._coverage.walk(start):
            found = (extent.segment.rows, extent.segment.bytes, extent.segment.transactions)
            counts = [count + more for count, more in zip(counts, found, strict=True)]
            if reached > start and any(count > limit for count, limit in zip(counts, limits, strict=True)):
                break
            reached = extent.segment.end
        return reached

    def refresh(self) -> None:
        """List the segments, and load new manifests."""
        known: dict[str, _Known] = {}
        is_changed = self._is_stale
        for name, inode in storage.list_directories(self._layout.segments):
            held = self._known.get(name)
            if held is None or held.inode != inode:
                held = self._load(name, inode)
                is_changed = is_changed or held is not None
            if held is not None:
                known[name] = held
        is_changed = is_changed or len(known) != len(self._known)
        self._known, self._is_stale = known, False
        if is_changed:
            self._segments = tuple(
                sorted((each.manifest for each in known.values()), key=lambda manifest: manifest.end.value)
            )
            self._coverage = Coverage(self._segments)

    def _cover(self, start: Position, end: Position) -> list[Extent]:
        try:
            return self._coverage.cover(start, end)
        except SpoolGapError:
            # A segment may have been replaced by one with an earlier start, and may have the same inode. So
            # load every manifest again.
            self._known, self._is_stale = {}, True
            self.refresh()
            return self._coverage.cover(start, end)

    def _load(self, name: str, inode: int) -> _Known | None:
        if parse_segment_name(name) is None:
            return None
        path = self._layout.segments / name / MANIFEST
        # The version is read first: if the file is replaced in between, the next check loads it again.
        version = storage.file_version(path)
        data = storage.read(path) if version is not None else None
        if version is None or data is None:
            return None
        return _Known(inode, version, parse_manifest(data, where=f"segment {name}"))

    def _are_current(self, extents: list[Extent]) -> bool:
        """Whether the manifests of `extents` are unchanged on disk. Changed ones are forgotten, so that the
        next refresh loads them again.
        """
        for extent in extents:
            path = self._layout.segment(extent.segment.end) / MANIFEST
            held = self._known.get(path.parent.name)
            if held is None or storage.file_version(path) != held.version:
                self._known.pop(path.parent.name, None)
                self._is_stale = True
        return not self._is_stale
