"""Transactions that are still open and too long to wait for: their rows go to `open/<xid>/` as they come.

Memory is bounded whatever the number of transactions and tables: rows wait for a row group's worth, all together at most `buffer_bytes`,
and at most `max_files` files are open at a time; beyond that the one written to longest ago is finished, and its table goes on in
another file. None of this survives a crash, nor has to: a transaction that has not committed is sent again.

A transaction that was rolled back is dropped at once. Of a rolled back part of one, four bytes are remembered, and at the commit those
files that hold rows of it are written anew without them.
"""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.change import ChangeBatch, ChangeCounts, LogicalMessage, TransactionPiece
from penstock.errors import SpoolError
from penstock.schema import TableSchema
from penstock.spool import storage
from penstock.spool.changefile import ChangeFile, check_batch
from penstock.spool.layout import SpoolLayout
from penstock.spool.pruning import prune

_log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
"""Of the logical messages of all open transactions: they wait in memory, and go into a manifest."""

_COLUMN_BYTES = 256
"""What a column of a waiting batch takes beside its values: batches of a row or two are mostly that."""


@dataclass(slots=True)
class PieceFile:
    """Rows of one table, schema version and open transaction: some written, some waiting; finished or not."""

    path: Path
    table: TableSchema
    waiting: list[ChangeBatch]
    writer: ChangeFile | None = None
    rows: int = 0
    bytes: int = 0
    counts: ChangeCounts = field(default_factory=ChangeCounts)
    is_finished: bool = False
    is_old: bool = False


@dataclass(slots=True)
class _Transaction:
    files: list[PieceFile] = field(default_factory=list)
    latest: dict[tuple[int, bool], PieceFile] = field(default_factory=dict)
    """By the table's OID, and whether it is an old row: where its next row goes."""
    messages: list[LogicalMessage] = field(default_factory=list)
    dropped: dict[str, LogicalMessage] = field(default_factory=dict)
    """By prefix, an empty message in the place of all that were dropped."""
    aborted: array[int] = field(default_factory=lambda: array("I"))
    """The xids of the parts that were rolled back."""


@dataclass(frozen=True, slots=True)
class CommittedPieces:
    """What a transaction comes to. The files, all with rows, still lie in `open/<xid>/`."""

    files: tuple[PieceFile, ...]
    messages: tuple[LogicalMessage, ...]


class OpenPieces:
    """All open transactions, by xid."""

    def __init__(self, layout: SpoolLayout, *, buffer_bytes: int, max_files: int) -> None:
        self._layout = layout
        self._buffer_bytes = buffer_bytes
        self._max_files = max_files
        self._waiting_bytes = 0
        self._message_bytes = 0
        self._transactions: dict[int, _Transaction] = {}
        self._writing: dict[Path, PieceFile] = {}

    @property
    def xids(self) -> tuple[int, ...]:
        return tuple(self._transactions)

    def add(self, piece: TransactionPiece) -> None:
        transaction = self._transactions.setdefault(piece.xid, _Transaction())
        for batch in piece.batches:
            if batch.rows.num_rows:
                check_batch(batch)
                self._file(piece.xid, transaction, batch).waiting.append(batch)
                self._waiting_bytes += _size(batch)
        self._add_messages(piece.xid, transaction, piece.messages)
        if self._waiting_bytes > self._buffer_bytes:
            self._write_all()

    def abort(self, xid: int, subxid: int) -> None:
        """Drop what a part of a transaction wrote, or the whole, if `subxid` is its own xid."""
        if subxid == xid:
            self.discard(xid)
        else:
            self._known(xid).aborted.append(subxid)

    def commit(self, xid: int) -> CommittedPieces:
        """Finish the files of a transaction and give them away."""
        transaction = self._known(xid)
        for file in transaction.files:
            self._write(file)
            self._finish(file)
        aborted = np.sort(np.array(transaction.aborted, np.int64))
        if len(aborted):
            for file in transaction.files:
                _prune(file, aborted)
        rolled_back = set(transaction.aborted) if transaction.messages else frozenset()
        self._forget(xid)
        return CommittedPieces(
            tuple(file for file in transaction.files if file.rows),
            (*(message for message in transaction.messages if message.xid not in rolled_back), *transaction.dropped.values()),
        )

    def discard(self, xid: int) -> None:
        """Drop everything that a transaction wrote; nothing happens if it is not known."""
        for file in self._transactions.get(xid, _Transaction()).files:
            self._waiting_bytes -= sum(map(_size, file.waiting))
            if file.writer is not None:
                file.writer.abandon()
                del self._writing[file.path]
        self._forget(xid)
        storage.remove_tree(self._layout.open_transaction(xid))

    def _known(self, xid: int) -> _Transaction:
        if xid not in self._transactions:
            raise SpoolError(f"transaction {xid} ended, but none of its pieces have been seen")
        return self._transactions[xid]

    def _forget(self, xid: int) -> None:
        transaction = self._transactions.pop(xid, None)
        if transaction is not None:
            self._message_bytes -= sum(map(_message_size, transaction.messages))

    def _add_messages(self, xid: int, transaction: _Transaction, messages: tuple[LogicalMessage, ...]) -> None:
        """Any role may emit messages, as many as it likes. Those beyond the limit are dropped; an empty one is kept in their place."""
        for message in messages:
            size = _message_size(message)
            if self._message_bytes + size <= MAX_MESSAGE_BYTES:
                transaction.messages.append(message)
                self._message_bytes += size
            else:
                if not transaction.dropped:
                    _log.warning("logical messages dropped", extra={"xid": xid, "limit_bytes": MAX_MESSAGE_BYTES})
                # Of the whole transaction: savepoints may be as many as messages.
                transaction.dropped.setdefault(message.prefix, replace(message, content=b"", xid=xid))

    def _file(self, xid: int, transaction: _Transaction, batch: ChangeBatch) -> PieceFile:
        table, which = batch.table, (batch.table.oid, batch.is_old)
        file = transaction.latest.get(which)
        if file is None or file.is_finished or file.table != table:
            directory = self._layout.open_transaction(xid)
            if not transaction.files:
                storage.remove_tree(directory)
                storage.make_directory(directory)
            file = PieceFile(directory / f"{len(transaction.files):06d}.parquet", table, [], is_old=batch.is_old)
            transaction.files.append(file)
            transaction.latest[which] = file
        return file

    def _write_all(self) -> None:
        for file in [file for transaction in self._transactions.values() for file in transaction.files if file.waiting]:
            self._write(file)

    def _write(self, file: PieceFile) -> None:
        """Write what waits as one row group."""
        if not file.waiting:
            return
        if file.writer is None:
            file.writer = ChangeFile(file.path, file.table)
        self._writing.pop(file.path, None)
        self._writing[file.path] = file
        file.writer.write(file.waiting)
        self._waiting_bytes -= sum(map(_size, file.waiting))
        file.waiting = []
        while len(self._writing) > self._max_files:
            self._finish(next(iter(self._writing.values())))

    def _finish(self, file: PieceFile) -> None:
        if file.writer is not None:
            file.bytes = file.writer.finish()
            file.rows, file.counts = file.writer.rows, file.writer.counts
            file.writer = None
            del self._writing[file.path]
        file.is_finished = True


def _prune(file: PieceFile, aborted: npt.NDArray[np.int64]) -> None:
    pruned = prune(file.path, file.table, file.counts, aborted)
    if pruned is not None:
        file.path, file.rows, file.bytes, file.counts = pruned.path, pruned.rows, pruned.bytes, pruned.counts


def _size(batch: ChangeBatch) -> int:
    values_bytes: int = batch.rows.nbytes
    return values_bytes + _COLUMN_BYTES * len(batch.rows.schema)


def _message_size(message: LogicalMessage) -> int:
    return len(message.content) + len(message.prefix) + _COLUMN_BYTES
