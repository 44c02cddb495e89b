"""How an epoch is cut into tasks: by rows and by bytes, so that a task needs no more memory for a larger epoch.

The changes of a key are in one task, so tasks share the keys out by their hashes; changes that need not meet are shared out file by file.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.change import ChangeCounts
from penstock.sinks.layout import Mode
from penstock.sinks.slice_reader import Part
from penstock.spool.range import FileSlice

ROWS_A_TASK = 500_000
BYTES_A_TASK = 128 << 20
"""Of changes that a task holds at once."""

_ADDED_ROWS_A_TASK = 100_000


def adds_only(mode: Mode, counts: ChangeCounts) -> bool:
    """Inserts alone cannot meet a row that is there: the target equals the source just before them, and the key is unique there."""
    if mode is Mode.MIRROR:
        return not (counts.updates or counts.deletes or counts.moves or counts.truncates)
    return mode is Mode.APPEND


def share_files(slices: Sequence[FileSlice], counts: ChangeCounts, parallelism: int) -> list[tuple[FileSlice, ...]]:
    """Changes that need not meet: each task streams some of the files."""
    wanted = max(min(-(-counts.rows // _ADDED_ROWS_A_TASK), parallelism), -(-counts.rows // ROWS_A_TASK), 1)
    count = min(wanted, len(slices))
    return [tuple(slices[at::count]) for at in range(count)]


def plan_parts(slices: Sequence[FileSlice], counts: ChangeCounts, *, looks_up: bool) -> list[Part | None]:
    """Parts of the keys, one for each task. A truncate of a mode that looks rows up concerns all keys at once, and is for one task."""
    size = sum(slice.file.bytes for slice in slices)  # as long as what is read of it: it is not compressed
    count = 1 if counts.truncates and looks_up else max(-(-counts.rows // ROWS_A_TASK), -(-size // BYTES_A_TASK), 1)
    follows_moves = bool(counts.unchanged and counts.moves)
    return [Part(index, count, follows_moves=follows_moves) for index in range(count)] if count > 1 else [None]
