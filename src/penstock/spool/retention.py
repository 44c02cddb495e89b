"""Retention: positions released by consumers, disk usage of the spool, and deletion of released segments.

A segment may be deleted when every consumer has released it. A spool without consumers keeps everything.

Each consumer writes its own file. Its first release creates the file, with the position from which the
consumer needs changes. A consumer must release before it reads, and before it takes the fence of a snapshot.
The capture may run at the same time: each update of a file is one rename, so the capture always finds the
file.

To delete a segment, its manifest is renamed to a tombstone, which hides the segment from every reader; then
its files are removed. After a crash, the next writer removes the remaining files, as in any directory without
a manifest.

Only the writer adds and deletes segments. It lists the directory when it starts and then counts, so an idle
capture lists no directory. It scans again periodically, in case the spool was deleted by hand.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock import storage
from penstock.errors import SpoolCorruptError
from penstock.position import Position
from penstock.spool.manifest import (
    FORMAT,
    MANIFEST,
    TOMBSTONE,
    Manifest,
    SpoolLayout,
    consumer_name,
    parse_document,
)
from penstock.spool.reader import SpoolReader


@dataclass(frozen=True, slots=True)
class Consumer:
    """A consumer and the content of its file."""

    name: str
    released: Position
    """The consumer needs no change up to this position."""
    age_seconds: float
    """Age of its last release. A running consumer releases every few seconds."""


def release(root: Path, consumer: str, position: Position) -> Position:
    """Release the changes up to `position`. Returns the released position, which never moves backwards."""
    path = SpoolLayout(root).consumer(consumer)
    current = _load(path)
    if current is not None and current >= position:
        storage.touch(path)  # shows that the consumer runs, although there is nothing to release
        return current
    return set_released(root, consumer, position)


def set_released(root: Path, consumer: str, position: Position) -> Position:
    """Set the released position. It may be earlier than the current one, since the consumer's target may have
    been restored from a backup.
    """
    document = {"format": FORMAT, "consumer": consumer, "released": str(position)}
    storage.ensure_directory(root)
    storage.put(SpoolLayout(root).consumer(consumer), json.dumps(document).encode())
    return position


def remove_consumer(root: Path, consumer: str) -> bool:
    """Remove a consumer. Returns whether it existed."""
    path = SpoolLayout(root).consumer(consumer)
    is_known = storage.file_version(path) is not None
    storage.delete(path)
    return is_known


def inspect_consumers(root: Path) -> list[Consumer]:
    """Return all consumers, sorted by name."""
    layout = SpoolLayout(root)
    found = []
    for name, position in sorted(released_positions(root).items()):
        mark = storage.file_version(layout.consumer(name))
        if mark is not None:
            found.append(Consumer(name, position, max(0.0, time.time() - mark.modified_ns / 1e9)))
    return found


def released_positions(root: Path) -> dict[str, Position]:
    """Return the released position of every consumer."""
    layout = SpoolLayout(root)
    found: dict[str, Position] = {}
    for file_name in storage.list_files(layout.consumers):
        name = consumer_name(file_name)
        position = None if name is None else _load(layout.consumers / file_name)
        if name is not None and position is not None:
            found[name] = position
    return found


def released_by_all(root: Path) -> Position | None:
    """Return the position that all consumers have released; None if there is no consumer."""
    return min(released_positions(root).values(), default=None)


def _load(path: Path) -> Position | None:
    data = storage.read(path)
    if data is None:
        return None
    document = parse_document(data, where=f"consumers/{path.name}")
    try:
        return Position.parse(document["released"])
    except (KeyError, TypeError, ValueError) as error:
        raise SpoolCorruptError(
            f"consumers/{path.name} holds no position",
            hint="restart that consumer: it rewrites the file. If you delete the file, the capture deletes "
            "changes that the consumer needs",
        ) from error


def delete_segments(layout: SpoolLayout, ends: Sequence[Position]) -> None:
    """Delete the segments with these ends, if they exist.

    Readers may run; the caller holds the spool's lock.
    """
    hidden = [directory for directory in map(layout.segment, ends) if _hide(directory)]
    # The directories are synced before the files are deleted: a crash must not bring back a manifest without
    # its files.
    storage.sync_directories(hidden)
    for directory in hidden:
        storage.delete_tree(directory)


def spool_bytes(reader: SpoolReader) -> int:
    """Return the size of all changes in the spool, in segments and open transactions."""
    return sum(segment.bytes for segment in reader.segments()) + storage.tree_size_bytes(
        SpoolLayout(reader.root).open
    )


def _hide(directory: Path) -> bool:
    try:
        storage.rename(directory / MANIFEST, directory / TOMBSTONE)
    except FileNotFoundError:
        return False
    return True


RESUME_AT = 0.9
"""A paused capture continues when the spool is smaller than this fraction of the limit, so that it does not
alternate between pausing and continuing at the limit.
"""


DELETE_AT_ONCE = 50
"""The maximum number of segments that are deleted in one call. Deleting one durably takes milliseconds, in
which the writer does nothing else.
"""


class SegmentUsage:
    """Number and size of the sealed segments. Used by the writer's thread, which calls `scan` first."""

    def __init__(
        self, reader: SpoolReader, *, scan_seconds: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.root = reader.root
        self._reader = reader
        self._scan_seconds = scan_seconds
        self._clock = clock
        self._next_check = 0.0
        self._ends: list[int] = []
        self._bytes: dict[int, int] = {}

    def scan(self) -> None:
        """Count the segments on disk."""
        self._next_check = self._clock() + self._scan_seconds
        self._bytes = {segment.end.value: segment.bytes for segment in self._reader.segments()}
        self._ends = sorted(self._bytes)

    def add(self, manifest: Manifest) -> None:
        """Add a sealed segment. A segment that was captured again counts once."""
        end = manifest.end.value
        if end not in self._bytes:
            insort(self._ends, end)
        self._bytes[end] = manifest.bytes

    def waiting(self, released: Position | None) -> int:
        """Return the number of segments that are not released; all of them if there is no consumer."""
        return len(self._ends) - self._count(released)

    def waiting_bytes(self, released: Position | None) -> int:
        return sum(self._bytes[end] for end in self._ends[self._count(released) :])

    def delete_released(self, released: Position | None) -> None:
        """Delete released segments, at most DELETE_AT_ONCE. If there are none, it accesses no file, except
        for the periodic scan.

        The newest segment stays, because its end is the end of the spool.
        """
        if self._clock() >= self._next_check:
            self.scan()
        count = min(self._count(released), len(self._ends) - 1, DELETE_AT_ONCE)
        if count > 0:
            delete_segments(SpoolLayout(self.root), [Position.of(end) for end in self._ends[:count]])
            for end in self._ends[:count]:
                del self._bytes[end]
            del self._ends[:count]

    def _count(self, released: Position | None) -> int:
        return 0 if released is None else bisect_right(self._ends, released.value)


class SpoolBudget:
    """Pauses the capture while the spool is larger than its limit.

    A pause only helps if consumers can release segments. If all segments are released, the capture continues,
    even if one open transaction is larger than the limit: that transaction must end before it can be
    released.
    """

    def __init__(
        self,
        usage: SegmentUsage,
        max_bytes: int,
        *,
        interval_seconds: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._usage = usage
        self._max_bytes = max_bytes
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._next_check = clock()
        self._is_paused = False

    def must_pause(self) -> bool:
        """Whether the capture must pause.

        The size is measured at most once in `interval_seconds`, so this may be called at every step.
        """
        if self._clock() >= self._next_check:
            self._next_check = self._clock() + self._interval_seconds
            self._is_paused = self._measure()
        return self._is_paused

    def _measure(self) -> bool:
        held_bytes = self._usage.waiting_bytes(released_by_all(self._usage.root))
        used_bytes = held_bytes + storage.tree_size_bytes(SpoolLayout(self._usage.root).open)
        return held_bytes > 0 and used_bytes > self._max_bytes * (RESUME_AT if self._is_paused else 1)
