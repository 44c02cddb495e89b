"""Whole transactions that wait to be sealed, by table.

Batches of one table under one schema version make a *run*. When a table's schema changes, a new run begins, even if it later changes back:
so each run is in order, and the runs of a table follow each other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from penstock.change import COMMIT_VERSION, ChangeBatch, LogicalMessage, Transactions, metadata_place
from penstock.errors import SpoolError
from penstock.position import Position
from penstock.schema import TableSchema
from penstock.spool.changefile import check_batch

_log = logging.getLogger(__name__)

MAX_LOOSE_BYTES = 64 << 20
"""Of the messages outside of transactions that wait for a segment."""
_MESSAGE_BYTES = 256
"""The memory that a message takes beside its content."""


@dataclass(slots=True)
class Run:
    table: TableSchema
    min_position: Position
    max_position: Position
    batches: list[ChangeBatch] = field(default_factory=list)
    is_old: bool = False
    """Whether these are rows as they were before updates; their runs stand beside those of the changes."""


class TransactionBuffer:
    """What has been appended since `start`. Positions only go up; a step that says otherwise is refused."""

    def __init__(self, start: Position, loose: Iterable[LogicalMessage] = ()) -> None:
        """`loose` are messages outside of transactions that stand at `start` or after it, and came before."""
        self.start = start
        self.end = start
        self.commit_time: datetime | None = None
        self.transactions = 0
        self.rows = 0
        self.bytes = 0
        self.runs: list[Run] = []
        self.messages: list[LogicalMessage] = []
        """Of the transactions."""
        self.loose: list[LogicalMessage] = list(loose)
        self._loose_bytes = sum(len(message.content) + _MESSAGE_BYTES for message in self.loose)
        self._latest: dict[tuple[int, bool], Run] = {}

    def add(self, step: Transactions) -> None:
        if step.end <= self.end:
            raise SpoolError(f"transactions up to {step.end} come after {self.end} was reached: the log does not go backward")
        added = [(batch, *_reach(batch, after=self.end, upto=step.end)) for batch in step.batches if batch.rows.num_rows]
        for batch, first, last in added:
            run = self._run(batch, first)
            run.batches.append(batch)
            run.max_position = last
            self.rows += batch.rows.num_rows
            self.bytes += batch.rows.nbytes
        self.messages += step.messages
        self.bytes += sum(len(message.content) for message in step.messages)
        self.end = step.end
        self.commit_time = step.commit_time
        self.transactions += step.count

    def add_loose(self, message: LogicalMessage) -> None:
        """Take a message outside of transactions. One from before `start` is in a segment already.

        Any role may emit such messages, as many as it likes. Those beyond the limit are dropped.
        """
        if message.lsn < self.start.lsn:
            return
        size = len(message.content) + _MESSAGE_BYTES
        self._loose_bytes += size
        if self._loose_bytes <= MAX_LOOSE_BYTES:
            self.loose.append(message)
            self.bytes += len(message.content)
        elif self._loose_bytes - size <= MAX_LOOSE_BYTES:
            _log.warning("logical messages dropped", extra={"limit_bytes": MAX_LOOSE_BYTES})

    def messages_before(self, end: Position) -> tuple[LogicalMessage, ...]:
        """What a segment that ends there holds, in the order of the log."""
        return tuple(sorted([*self.messages, *(each for each in self.loose if each.lsn < end.lsn)], key=lambda each: each.place))

    def loose_from(self, end: Position) -> tuple[LogicalMessage, ...]:
        """What is left for the segment that starts there."""
        return tuple(each for each in self.loose if each.lsn >= end.lsn)

    def _run(self, batch: ChangeBatch, first: Position) -> Run:
        table, which = batch.table, (batch.table.oid, batch.is_old)
        run = self._latest.get(which)
        if run is None or run.table != table:
            run = self._latest[which] = Run(table, first, first, is_old=batch.is_old)
            self.runs.append(run)
        return run


def _reach(batch: ChangeBatch, *, after: Position, upto: Position) -> tuple[Position, Position]:
    """The positions of the first and last row. Rows are in order, so a transaction of another step would show here."""
    check_batch(batch)
    versions = batch.rows.column(metadata_place(batch.table, COMMIT_VERSION))
    if versions.null_count:
        raise SpoolError(f"a batch of {batch.table.name} has rows without a commit version outside a piece of an open transaction")
    first, last = Position.of(versions[0].as_py()), Position.of(versions[-1].as_py())
    if not after < first <= last <= upto:
        raise SpoolError(f"a batch of {batch.table.name} holds changes of ({first}, {last}], its transactions lie in ({after}, {upto}]")
    return first, last
