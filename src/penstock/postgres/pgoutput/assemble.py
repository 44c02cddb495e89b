"""From the changes of a run of messages to one typed batch for each table and schema version.

All tuples of the run are walked together; what remains for each table is to choose, for every row, the tuple that it shows.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from penstock.change import ChangeBatch, LogicalMessage
from penstock.postgres.pgoutput.changes import COUNT_BYTES, NEW, Changes, TableChanges, find_changes, group
from penstock.postgres.pgoutput.framing import TRUNCATE, Frames, IntArray
from penstock.postgres.pgoutput.logical import find_messages
from penstock.postgres.pgoutput.relations import Versions
from penstock.postgres.pgoutput.rows import TablePart, Tuples, build_batches
from penstock.postgres.pgoutput.transactions import Timeline
from penstock.postgres.pgoutput.tuples import walk


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    batches: tuple[ChangeBatch, ...]
    """In the order of the log."""
    messages: tuple[LogicalMessage, ...]
    next_ordinal: int
    """The number that the next change of the last transaction would get."""


def assemble(
    frames: Frames, timeline: Timeline, versions: Versions, prefixes: Set[str] = frozenset(), *, old_rows: bool = False
) -> Assembled:
    """Decode a run of messages of whole transactions, or of one that is open."""
    changes, next_ordinal = find_changes(frames, timeline)
    messages = find_messages(frames, timeline, changes, prefixes) if prefixes else ()
    if not len(changes):
        return Assembled((), messages, next_ordinal)
    groups = group(frames, changes, versions)
    ordered = changes[np.concatenate([item.members for item in groups])]
    widths = np.repeat([len(item.table.columns) for item in groups], [len(item.members) for item in groups])
    tuples = _walk_all(frames, ordered, widths)
    batches = build_batches(frames, timeline, _split(groups, ordered, tuples), old_rows=old_rows)
    in_order = np.argsort([item.members[0] for item in groups], kind="stable").tolist()
    return Assembled(tuple(batch for at in in_order for batch in batches[at]), messages, next_ordinal)


def _walk_all(frames: Frames, changes: Changes, widths: IntArray) -> Tuples:
    is_truncate = changes.kinds == TRUNCATE
    ends = np.where(is_truncate, changes.tuples + widths, frames.ends[changes.messages])
    counted = frames.u16(changes.tuples - COUNT_BYTES) == widths
    frames.require(counted | is_truncate, changes.messages, "has another number of columns than its table")
    first, after = walk(frames, changes.messages, changes.tuples, ends, widths)
    if is_truncate.any():
        # Their nulls were read from the padding, but Arrow wants the offsets of a column in order.
        for column in first:
            own = is_truncate[: len(column.spans)]
            column.spans[own] = frames.starts[changes.messages[: len(own)][own], np.newaxis]
    two = np.flatnonzero(changes.has_old)
    if not len(two):
        frames.require(after == ends, changes.messages, "is longer than its tuple")
        return Tuples(first, [])
    frames.require((after == ends) | changes.has_old, changes.messages, "is longer than its tuple")
    messages, at, ends, widths = changes.messages[two], after[two], ends[two], widths[two]
    frames.require(at + 1 + COUNT_BYTES <= ends, messages, "ends before its new tuple")
    frames.require((frames.octets[at] == NEW) & (frames.u16(at + 1) == widths), messages, "has an unexpected new tuple")
    second, after = walk(frames, messages, at + 1 + COUNT_BYTES, ends, widths)
    frames.require(after == ends, messages, "is longer than its tuples")
    return Tuples(first, second)


def _split(groups: Sequence[TableChanges], changes: Changes, tuples: Tuples) -> list[TablePart]:
    """What belongs to each group: a run of the changes, of the first tuples and of the second ones."""
    parts: list[TablePart] = []
    low = second_low = 0
    for item in groups:
        width = len(item.table.columns)
        high = low + len(item.members)
        own = changes[low:high]
        second_high = second_low + int(np.count_nonzero(own.has_old))
        first = [column[low:high] for column in tuples.first[:width]]
        second = [column[second_low:second_high] for column in tuples.second[:width]] if second_low < second_high else []
        parts.append(TablePart(item.table, own, Tuples(first, second), item.is_full))
        low, second_low = high, second_high
    return parts
