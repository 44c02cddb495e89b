"""Deleting segments that no consumer needs.

A segment goes by having its manifest renamed to a tombstone; then it is gone for everyone, and its files can be removed in peace. What a
crash leaves in between is removed when the next writer starts, like any other directory without a manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.position import Position
from penstock.spool import storage
from penstock.spool.layout import MANIFEST, TOMBSTONE, SpoolLayout
from penstock.spool.reader import SpoolReader


def delete_segments(layout: SpoolLayout, ends: Sequence[Position]) -> None:
    """Delete the segments with these ends, as far as they are there. Safe beside readers; only for the one who holds the spool's lock."""
    buried = [directory for directory in map(layout.segment, ends) if _bury(directory)]
    # Durable before a file of theirs goes, or a crash might bring back a manifest without them.
    storage.sync_directories(buried)
    for directory in buried:
        storage.remove_tree(directory)


def spool_bytes(reader: SpoolReader) -> int:
    """The size of all changes in the spool, sealed or open."""
    return sum(segment.bytes for segment in reader.segments()) + storage.size_bytes(SpoolLayout(reader.root).open)


def _bury(directory: Path) -> bool:
    try:
        storage.rename(directory / MANIFEST, directory / TOMBSTONE)
    except FileNotFoundError:
        return False
    return True
