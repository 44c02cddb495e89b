"""Many changes of one table brought to it in several steps, so that what one of them needs is bounded: each ends at a commit of the source.

A table that waited for its copy, or was paused, may have more to take in than an epoch ever holds. In between it is what the source was at
that position, and says so itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from penstock.position import Position
from penstock.spool.range import FileSlice


def step_ends(slices: Sequence[FileSlice], rows: int, end: Position) -> list[Position]:
    """Where steps of some `rows` end, the last at `end`. A transaction is never cut, however large, nor a file."""
    found: list[Position] = []
    later = _least_after(slices)
    count, reached = 0, Position.ZERO
    for slice, least in zip(slices, later, strict=True):
        count += slice.file.rows
        reached = max(reached, slice.file.max_position)
        if count >= rows and least is not None and reached < least and reached < end:
            found.append(reached)
            count = 0
    return [*found, end]


def slices_upto(slices: Sequence[FileSlice], end: Position) -> list[FileSlice]:
    """What of `slices` lies at `end` or before it."""
    wanted = [slice for slice in slices if slice.file.min_position <= end]
    return [replace(slice, upto=min(slice.upto or end, end)) if slice.file.max_position > end else slice for slice in wanted]


def _least_after(slices: Sequence[FileSlice]) -> list[Position | None]:
    """For each slice, where those after it begin; None after the last."""
    least = list(accumulate((slice.file.min_position for slice in reversed(slices[1:])), min))
    return [*reversed(least), None][: len(slices)]
