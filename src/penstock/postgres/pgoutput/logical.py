"""Logical messages, those of `pg_logical_emit_message`: one at a time, since they are few, and only if somebody asked for their prefix.

A transactional one stands in its transaction like a change; any other stands between transactions, at once when it was sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

import numpy as np

from penstock.change import LogicalMessage
from penstock.postgres.pgoutput.changes import Changes
from penstock.postgres.pgoutput.framing import MESSAGE, ByteArray, Frames
from penstock.postgres.pgoutput.messages import decode_message
from penstock.postgres.pgoutput.transactions import BETWEEN, Timeline

MAX_CONTENT_BYTES = 1 << 20
"""Any role can emit a message of a gigabyte under any prefix. One that is larger than this is given out empty."""


def find_loose_messages(frames: Frames, places: ByteArray, prefixes: Set[str]) -> Iterator[LogicalMessage]:
    """The messages outside of transactions; `places` tells for every message where the log is after it."""
    for index in map(int, frames.where(MESSAGE)):
        message = decode_message(frames, index)
        if message.is_transactional == (places[index] == BETWEEN):
            raise frames.fault(index, "stands on the wrong side of Begin and Commit")
        if not message.is_transactional and message.prefix in prefixes:
            yield LogicalMessage(message.prefix, _bounded(message.content), message.lsn)


def find_messages(frames: Frames, timeline: Timeline, changes: Changes, prefixes: Set[str]) -> tuple[LogicalMessage, ...]:
    """The messages inside of transactions."""
    found: list[LogicalMessage] = []
    for index in map(int, frames.where(MESSAGE)):
        message = decode_message(frames, index)
        if message.is_transactional and message.prefix in prefixes:
            transaction = int(timeline.of(np.array([index]))[0])
            xid = int(frames.xids(np.array([index]))[0]) if frames.xid_bytes else int(timeline.xids[transaction])
            position = None if timeline.commits is None else timeline.commits.position(transaction)
            ordinal = _next_ordinal(timeline, changes, index, transaction)
            found.append(LogicalMessage(message.prefix, _bounded(message.content), message.lsn, xid, ordinal, position))
        elif frames.xid_bytes and not message.is_transactional:
            raise frames.fault(index, "is of no transaction, but stands in a block of one")
    return tuple(found)


def _bounded(content: bytes) -> bytes:
    return content if len(content) <= MAX_CONTENT_BYTES else b""


def _next_ordinal(timeline: Timeline, changes: Changes, index: int, transaction: int) -> int:
    """The number of the change that follows the message, or would follow it."""
    last = int(np.searchsorted(changes.messages, index)) - 1
    if last < 0 or int(timeline.of(changes.messages[last : last + 1])[0]) != transaction:
        return timeline.first_ordinal
    return int(changes.ordinals[last]) + 1 + int(changes.has_old[last])
