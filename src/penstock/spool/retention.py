"""Deleting segments that no consumer needs.

A segment goes by having its manifest renamed to a tombstone; then it is gone for everyone, and its files can be removed in peace. After
a crash in between, the next pass finds the tombstone and finishes. A directory with neither belongs to the writer and is left alone.
The newest segment always stays: it says how far the spool reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.position import Position
from penstock.spool import consumers, storage
from penstock.spool.layout import MANIFEST, TOMBSTONE, SpoolLayout, parse_segment_name
from penstock.spool.reader import SpoolReader


def delete_released(reader: SpoolReader) -> tuple[Position, ...]:
    """Delete the segments that every consumer has released; gives their ends. Safe beside the writer, readers and itself."""
    layout = SpoolLayout(reader.root)
    upto, newest = consumers.minimum(reader.root), reader.end
    if upto is None or newest is None:
        return ()
    ends = [parse_segment_name(entry.name) for entry in storage.list_directories(layout.segments)]
    return delete_segments(layout, sorted(end for end in ends if end is not None and end <= upto and end < newest))


def delete_segments(layout: SpoolLayout, ends: Sequence[Position]) -> tuple[Position, ...]:
    """Delete the segments with these ends, none of them the newest; gives the ends of those that were still there."""
    deleted = tuple(end for end in ends if _bury(layout.segment(end)))
    # All renames first, then all syncs.
    storage.sync_directories([layout.segment(end) for end in deleted])
    for end in ends:
        directory = layout.segment(end)
        if storage.mark(directory / TOMBSTONE) is not None and storage.mark(directory / MANIFEST) is None:
            _remove(directory)
    return deleted


def spool_bytes(reader: SpoolReader) -> int:
    """The size of all changes in the spool, sealed or open."""
    return sum(segment.bytes for segment in reader.segments()) + storage.size_bytes(SpoolLayout(reader.root).open)


def _bury(directory: Path) -> bool:
    try:
        storage.rename(directory / MANIFEST, directory / TOMBSTONE)
    except FileNotFoundError:
        return False
    return True


def _remove(directory: Path) -> None:
    """The tombstone goes last, so that a pass that ends in the middle is taken up again."""
    for name in storage.list_files(directory):
        if name != TOMBSTONE:
            storage.remove_file(directory / name)
    storage.remove_tree(directory)
