"""Find row changes and logical messages among the decoded frames, number them, and group changes by table and
schema version.

An update with an old tuple reserves two ordinals, since it may become a delete and an insert if the key
changed. If the key did not change, the first ordinal belongs to the old row, even if old rows are not
requested.

A transactional logical message has an ordinal in its transaction, like a change. A non-transactional one
takes effect when it is sent and belongs to no transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

import numpy as np

from penstock.change import LogicalMessage
from penstock.postgres.pgoutput.messages import (
    DELETE,
    INSERT,
    MESSAGE,
    TRUNCATE,
    UPDATE,
    BoolArray,
    ByteArray,
    Frames,
    IntArray,
    decode_message,
    decode_truncate,
)
from penstock.postgres.pgoutput.relations import Version, Versions
from penstock.postgres.pgoutput.transactions import BETWEEN, Timeline
from penstock.schema import TableSchema

NEW, OLD_KEY, OLD_ROW = b"NKO"
COUNT_BYTES = 2

_OID_BYTES = 4
_HEAD_BYTES = _OID_BYTES + 1 + COUNT_BYTES
"""Table OID, marker of the first tuple, and its column count."""

_ROW_KINDS = np.zeros(256, np.bool_)
_ROW_KINDS[[INSERT, UPDATE, DELETE]] = True
_MARKERS = np.zeros((256, 256), np.bool_)
_MARKERS[INSERT, NEW] = True
_MARKERS[UPDATE, [NEW, OLD_KEY, OLD_ROW]] = True
_MARKERS[DELETE, [OLD_KEY, OLD_ROW]] = True


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """One entry for each insert, update and delete message, and for each table of a truncate message, in log
    order.
    """

    messages: IntArray
    kinds: ByteArray
    oids: IntArray
    ordinals: IntArray
    tuples: IntArray
    """Offset of the first tuple's values. A truncate has no tuple and reads nulls from the padding."""
    has_old: BoolArray
    """Whether the change is an update with an old tuple before the new one."""
    is_whole: BoolArray
    """Whether the change is an update or delete whose old tuple is the whole old row, not only its key."""

    def __len__(self) -> int:
        return len(self.messages)

    def __getitem__(self, part: IntArray | slice) -> Changes:
        return Changes(
            self.messages[part],
            self.kinds[part],
            self.oids[part],
            self.ordinals[part],
            self.tuples[part],
            self.has_old[part],
            self.is_whole[part],
        )


@dataclass(frozen=True, slots=True, eq=False)
class TableChanges:
    """The changes of one table under one version of its schema, as indices into `Changes`."""

    table: TableSchema
    members: IntArray
    is_full: bool
    """Whether the table's replica identity is FULL."""


def find_changes(frames: Frames, timeline: Timeline) -> tuple[Changes, int]:
    """Return the changes, and the ordinal of the next change in the last transaction."""
    messages = np.flatnonzero(_ROW_KINDS[frames.kinds])
    fields = frames.starts[messages] + frames.fields_at
    frames.require(frames.ends[messages] - fields >= _HEAD_BYTES, messages, "is too short")
    kinds = frames.kinds[messages]
    markers = frames.octets[fields + _OID_BYTES]
    frames.require(_MARKERS[kinds, markers], messages, "has an unexpected tuple")
    has_old = (kinds == UPDATE) & (markers != NEW)

    ordinals = np.zeros(len(messages), np.int64)
    changes = Changes(
        messages, kinds, frames.u32(fields), ordinals, fields + _HEAD_BYTES, has_old, markers == OLD_ROW
    )
    if (frames.kinds == TRUNCATE).any():
        changes = _with_truncates(frames, changes)
    weights = np.bincount(changes.messages, minlength=len(frames))
    weights[messages] += has_old
    before = np.cumsum(weights) - weights
    skipped = np.where(timeline.begins < 0, 0, before[timeline.begins]) - timeline.first_ordinal
    changes.ordinals[:] += before[changes.messages] - skipped[timeline.of(changes.messages)]
    return changes, int(weights.sum()) + timeline.first_ordinal


def _with_truncates(frames: Frames, changes: Changes) -> Changes:
    """Add an entry for each truncated table, numbered within its message."""
    truncates = {int(index): decode_truncate(frames, int(index)) for index in frames.where(TRUNCATE)}
    sizes = [len(oids) for oids in truncates.values()]
    count = sum(sizes)
    messages = np.concatenate([changes.messages, np.repeat(np.fromiter(truncates, np.int64), sizes)])
    joined = Changes(
        messages,
        np.concatenate([changes.kinds, np.full(count, TRUNCATE, np.uint8)]),
        np.concatenate(
            [changes.oids, np.array([oid for oids in truncates.values() for oid in oids], np.int64)]
        ),
        np.concatenate([changes.ordinals, *(np.arange(size) for size in sizes)]),
        np.concatenate([changes.tuples, np.full(count, frames.padding_at, np.int64)]),
        np.concatenate([changes.has_old, np.zeros(count, np.bool_)]),
        np.concatenate([changes.is_whole, np.zeros(count, np.bool_)]),
    )
    return joined[np.argsort(messages, kind="stable")]


def group(frames: Frames, changes: Changes, versions: Versions) -> list[TableChanges]:
    """Group the changes by table and by the schema in effect when they were made. Wide tables come first, as
    `rows.walk` requires.
    """
    order = np.argsort(changes.oids, kind="stable")
    oids = changes.oids[order]
    bounds = np.flatnonzero(np.diff(oids, prepend=-1, append=-1))
    groups: list[TableChanges] = []
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        groups += _by_version(frames, changes, order[low:high], versions.of(int(oids[low])))
    return sorted(groups, key=lambda group: -len(group.table.columns))


def _by_version(
    frames: Frames, changes: Changes, members: IntArray, versions: list[Version]
) -> list[TableChanges]:
    messages = changes.messages[members]
    if not versions or messages[0] < versions[0].index:
        raise frames.fault(int(messages[0]), "changes a table that no Relation message has described")
    cuts = [*np.searchsorted(messages, [version.index for version in versions]).tolist(), len(members)]
    parts = zip(versions, cuts[:-1], cuts[1:], strict=True)
    return [
        TableChanges(version.schema, members[low:high], version.is_full)
        for version, low, high in parts
        if low < high
    ]


MAX_CONTENT_BYTES = 1 << 20
"""The maximum size of a message's content. A larger content is replaced by an empty one, since any role can
emit a message of a gigabyte under any prefix.
"""


def find_loose_messages(frames: Frames, places: ByteArray, prefixes: Set[str]) -> Iterator[LogicalMessage]:
    """Yield the non-transactional messages with one of `prefixes`. `places` has, for every message, the log
    state after it.
    """
    for index in map(int, frames.where(MESSAGE)):
        message = decode_message(frames, index)
        if message.is_transactional == (places[index] == BETWEEN):
            raise frames.fault(index, "is on the wrong side of Begin and Commit")
        if not message.is_transactional and message.prefix in prefixes:
            yield LogicalMessage(message.prefix, _bounded(message.content), message.lsn)


def find_messages(
    frames: Frames, timeline: Timeline, changes: Changes, prefixes: Set[str]
) -> tuple[LogicalMessage, ...]:
    """Return the transactional messages with one of `prefixes`."""
    found: list[LogicalMessage] = []
    for index in map(int, frames.where(MESSAGE)):
        message = decode_message(frames, index)
        if message.is_transactional and message.prefix in prefixes:
            transaction = int(timeline.of(np.array([index]))[0])
            xid = (
                int(frames.xids(np.array([index]))[0])
                if frames.xid_bytes
                else int(timeline.xids[transaction])
            )
            position = None if timeline.commits is None else timeline.commits.position(transaction)
            ordinal = _next_ordinal(timeline, changes, index, transaction)
            found.append(
                LogicalMessage(message.prefix, _bounded(message.content), message.lsn, xid, ordinal, position)
            )
        elif frames.xid_bytes and not message.is_transactional:
            raise frames.fault(index, "is not transactional, but inside the block of a transaction")
    return tuple(found)


def _bounded(content: bytes) -> bytes:
    return content if len(content) <= MAX_CONTENT_BYTES else b""


def _next_ordinal(timeline: Timeline, changes: Changes, index: int, transaction: int) -> int:
    """Return the ordinal of the change that follows the message, or that a change after the message would
    have.
    """
    last = int(np.searchsorted(changes.messages, index)) - 1
    if last < 0 or int(timeline.of(changes.messages[last : last + 1])[0]) != transaction:
        return timeline.first_ordinal
    return int(changes.ordinals[last]) + 1 + int(changes.has_old[last])
