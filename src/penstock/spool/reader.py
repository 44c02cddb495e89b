"""Reads the spool: which segments there are, and what lies in `(start, end]`.

Any number of readers, in any process, beside the writer and retention. Looking costs one directory listing; only manifests not seen
before are parsed. Segments may vanish, and the whole spool may be deleted and captured again, at any time: what is used is checked first.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from penstock.errors import SpoolGapError
from penstock.position import Position
from penstock.spool import storage
from penstock.spool.layout import MANIFEST, SpoolLayout, parse_segment_name
from penstock.spool.manifest import Manifest, parse_manifest
from penstock.spool.range import FileSlice, Ground, SpoolRange, Stretch, TableRange, slice_range

__all__ = ["FileSlice", "SpoolRange", "SpoolReader", "TableRange"]


class _Known(NamedTuple):
    inode: int
    mark: storage.Mark
    manifest: Manifest


class SpoolReader:
    """A view of a spool. Every method looks anew. Not for use by several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._layout = SpoolLayout(root)
        self._known: dict[str, _Known] = {}
        self._segments: tuple[Manifest, ...] = ()
        self._ground = Ground(())
        self._is_stale = False

    def segments(self) -> tuple[Manifest, ...]:
        """All sealed segments by their end, those on re-captured ground among them."""
        self.refresh()
        return self._segments

    @property
    def start(self) -> Position | None:
        """Where the spool begins; None if it holds no segment."""
        self.refresh()
        return self._ground.start

    @property
    def end(self) -> Position | None:
        """How far the spool reaches; None if it holds no segment."""
        self.refresh()
        return self._ground.end

    @property
    def extent(self) -> tuple[Position, Position] | None:
        """From where to where the spool reaches, as of one look; None if it holds no segment."""
        self.refresh()
        start, end = self._ground.start, self._ground.end
        return None if start is None or end is None else (start, end)

    def read(self, start: Position, end: Position) -> SpoolRange:
        """The changes in `(start, end]`, each once. `SpoolGapError` if the spool does not hold all of that ground."""
        self.refresh()
        stretches = self._cover(start, end)
        while not self._are_current(stretches):
            self.refresh()
            stretches = self._cover(start, end)
        return slice_range(self._layout, start, end, stretches)

    def limit(
        self, start: Position, *, max_rows: int | None = None, max_bytes: int | None = None, max_transactions: int | None = None
    ) -> Position:
        """The furthest segment end after `start` up to which all counts stay within their limits; at least one segment.

        `start` itself if nothing is there after it. `SpoolGapError` if there is, but not from `start` on.
        """
        end = self.end
        if end is None or end <= start:
            return start
        self._cover(start, Position.of(start.value + 1))
        reached, counts = start, [0, 0, 0]
        limits = [math.inf if limit is None else limit for limit in (max_rows, max_bytes, max_transactions)]
        for stretch in self._ground.walk(start):
            found = (stretch.segment.rows, stretch.segment.bytes, stretch.segment.transactions)
            counts = [count + more for count, more in zip(counts, found, strict=True)]
            if reached > start and any(count > limit for count, limit in zip(counts, limits, strict=True)):
                break
            reached = stretch.segment.end
        return reached

    def refresh(self) -> None:
        """Look which segments there are now."""
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
            self._segments = tuple(sorted((each.manifest for each in known.values()), key=lambda manifest: manifest.end.value))
            self._ground = Ground(self._segments)

    def _cover(self, start: Position, end: Position) -> list[Stretch]:
        try:
            return self._ground.cover(start, end)
        except SpoolGapError:
            # A segment may have been replaced by one that reaches further back, unnoticed so far: look at every manifest again.
            self._known, self._is_stale = {}, True
            self.refresh()
            return self._ground.cover(start, end)

    def _load(self, name: str, inode: int) -> _Known | None:
        if parse_segment_name(name) is None:
            return None
        path = self._layout.segments / name / MANIFEST
        # The mark is taken first: if the file is replaced in between, it is loaded again rather than believed.
        mark = storage.mark(path)
        data = storage.read_bytes(path) if mark is not None else None
        if mark is None or data is None:
            return None
        return _Known(inode, mark, parse_manifest(data, where=f"segment {name}"))

    def _are_current(self, stretches: list[Stretch]) -> bool:
        """Check the segments that are about to be used, and forget those that are no longer what they were."""
        for stretch in stretches:
            path = self._layout.segment(stretch.segment.end) / MANIFEST
            held = self._known.get(path.parent.name)
            if held is None or storage.mark(path) != held.mark:
                self._known.pop(path.parent.name, None)
                self._is_stale = True
        return not self._is_stale
