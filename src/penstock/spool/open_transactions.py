"""Rows of transactions that are too large to buffer until they commit, written to `open/<xid>/` as they
arrive.

Files are uncompressed, because the JVM reads that fastest. Only the change type, with its five values, has a
dictionary, which saves ten bytes per row for the same CPU. The Arrow schema is always `change_schema(table)`,
so files of one schema version can be read together.

Memory is bounded for any number of transactions and tables. Rows are buffered up to a row group, at most
`buffer_bytes` for all files. At most `max_files` files are open; beyond that, the least recently written file
is finished, and its table continues in another file. The files need not survive a crash: the server sends an
uncommitted transaction again.

If a transaction is rolled back, its files are deleted at once. If a subtransaction is rolled back, only its
xid is stored (four bytes). At the commit of the whole transaction, files that contain rows of the
subtransaction are rewritten without them, one row group at a time.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock import storage
from penstock.change import (
    CHANGE_TYPE,
    EXACT,
    UNCHANGED,
    XID,
    ChangeBatch,
    ChangeCounts,
    ChangeType,
    LogicalMessage,
    TransactionPiece,
    change_schema,
    metadata_index,
)
from penstock.errors import SpoolError
from penstock.schema import TableSchema
from penstock.spool.manifest import SpoolLayout

ROW_GROUP_ROWS = 1 << 20


class ChangeFile:
    """A Parquet file of changes.

    `finish` returns its size. The file is not durable yet: sealing the segment syncs it.
    """

    def __init__(self, path: Path, table: TableSchema) -> None:
        self.path = path
        self.table = table
        self.rows = 0
        self.counts = ChangeCounts()
        self._schema = change_schema(table)
        self._sink = storage.open_new(path)
        self._writer = pq.ParquetWriter(
            self._sink,
            self._schema,
            compression="none",
            use_dictionary=[CHANGE_TYPE],
            write_statistics=True,
            version="2.6",
        )

    def write(self, batches: Sequence[ChangeBatch]) -> None:
        """Append the batches as one row group, or as several if they are very long."""
        rows = pa.Table.from_batches([batch.rows for batch in batches], schema=self._schema)
        self._writer.write_table(rows, row_group_size=ROW_GROUP_ROWS)
        self.rows += rows.num_rows
        for batch in batches:
            self.counts += batch.counts

    def finish(self) -> int:
        self._writer.close()
        size_bytes: int = self._sink.tell()
        self._sink.close()
        return size_bytes

    def abandon(self) -> None:
        """Close the descriptor without finishing the file, which the caller deletes."""
        self._sink.close()
        self._writer.is_open = False


def check_batch(batch: ChangeBatch) -> None:
    """Raise SpoolError if the rows do not have the schema of their table."""
    if not batch.rows.schema.equals(change_schema(batch.table)):
        raise SpoolError(f"a batch of {batch.table.name} does not have the columns of its table")


_COUNTED = (
    ChangeType.INSERT,
    ChangeType.UPDATE_POSTIMAGE,
    ChangeType.DELETE,
    ChangeType.TRUNCATE,
    ChangeType.UPDATE_PREIMAGE,
)


@dataclass(frozen=True, slots=True)
class PrunedFile:
    """The rewritten file. If it has no rows, the file does not exist."""

    path: Path
    rows: int
    bytes: int
    counts: ChangeCounts


def prune(
    path: Path, table: TableSchema, counts: ChangeCounts, aborted: npt.NDArray[np.int64]
) -> PrunedFile | None:
    """Rewrite a file under another name without the rows of the subtransactions `aborted`.

    Returns None if the file has no such row.

    `aborted` is sorted. `counts` are those of the whole file. The new counts of moved rows and unreadable
    texts are upper bounds, because the remaining rows do not show which deletes and inserts were moves, and
    which nulls were unreadable texts.
    """
    with pq.ParquetFile(path) as file:
        groups = range(file.num_row_groups)
        # The table may have a column of the same name; the metadata column is the last one.
        kept = [~_are_in(file.read_row_group(group, columns=[XID]).columns[-1], aborted) for group in groups]
        if all(mask.all() for mask in kept):
            return None
        pruned = _copy(file, kept, path.with_suffix(".pruned.parquet"), table, counts)
    storage.delete(path)
    return pruned


def _are_in(xids: pa.ChunkedArray, aborted: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    values = xids.to_numpy()
    at = np.minimum(np.searchsorted(aborted, values), len(aborted) - 1)
    found: npt.NDArray[np.bool_] = aborted[at] == values
    return found


def _copy(
    file: pq.ParquetFile,
    kept: list[npt.NDArray[np.bool_]],
    target: Path,
    table: TableSchema,
    whole: ChangeCounts,
) -> PrunedFile:
    copy: ChangeFile | None = None
    for group, mask in enumerate(kept):
        if mask.any():
            copy = copy or ChangeFile(target, table)
            rows = file.read_row_group(group).filter(pa.array(mask))
            copy.write([_batch(table, batch) for batch in rows.to_batches()])
    if copy is None:
        return PrunedFile(target, 0, 0, ChangeCounts())
    size_bytes = copy.finish()
    moves = min(whole.moves, copy.counts.inserts, copy.counts.deletes)
    return PrunedFile(
        target,
        copy.rows,
        size_bytes,
        replace(copy.counts, moves=moves, unreadable=whole.unreadable, unidentified=whole.unidentified),
    )


def _batch(table: TableSchema, rows: pa.RecordBatch) -> ChangeBatch:
    return ChangeBatch(
        table, pa.RecordBatch.from_arrays(rows.columns, schema=change_schema(table)), _count(table, rows)
    )


def _count(table: TableSchema, rows: pa.RecordBatch) -> ChangeCounts:
    kinds = rows.column(metadata_index(table, CHANGE_TYPE))
    inserts, updates, deletes, truncates, old = (
        pc.sum(pc.equal(kinds, str(kind))).as_py() for kind in _COUNTED
    )
    unchanged, inexact = (
        rows.num_rows - rows.column(metadata_index(table, name)).null_count for name in (UNCHANGED, EXACT)
    )
    return ChangeCounts(
        inserts, updates, deletes, truncates, unchanged=unchanged, inexact=inexact, preimages=old
    )


_log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
"""Limit for the logical messages of all open transactions, which are kept in memory."""

_COLUMN_BYTES = 256
"""The memory that a column of a buffered batch needs in addition to its values. In batches of a few rows it
is most of the memory.
"""


@dataclass(slots=True)
class PieceFile:
    """A file of one table, schema version and open transaction, with its buffered rows."""

    path: Path
    table: TableSchema
    buffered: list[ChangeBatch]
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
    """The file for the next row, by the table's OID and `is_old`."""
    messages: list[LogicalMessage] = field(default_factory=list)
    dropped: dict[str, LogicalMessage] = field(default_factory=dict)
    """By prefix, one empty message that replaces all dropped messages with that prefix."""
    aborted: array[int] = field(default_factory=lambda: array("I"))
    """The xids of rolled back subtransactions."""


@dataclass(frozen=True, slots=True)
class CommittedPieces:
    """The files and messages of a committed transaction. All of the files have rows, and are still in
    `open/<xid>/`.
    """

    files: tuple[PieceFile, ...]
    messages: tuple[LogicalMessage, ...]


class OpenPieces:
    """The pieces of all open transactions, by xid."""

    def __init__(self, layout: SpoolLayout, *, buffer_bytes: int, max_files: int) -> None:
        self._layout = layout
        self._buffer_bytes = buffer_bytes
        self._max_files = max_files
        self._buffered_bytes = 0
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
                self._file(piece.xid, transaction, batch).buffered.append(batch)
                self._buffered_bytes += _size(batch)
        self._add_messages(piece.xid, transaction, piece.messages)
        if self._buffered_bytes > self._buffer_bytes:
            self._write_all()

    def abort(self, xid: int, subxid: int) -> None:
        """Drop the rows of a subtransaction, or of the whole transaction if `subxid` equals `xid`."""
        if subxid == xid:
            self.discard(xid)
        else:
            self._known(xid).aborted.append(subxid)

    def commit(self, xid: int) -> CommittedPieces:
        """Finish the files of a transaction and hand them over to the caller."""
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
            (
                *(message for message in transaction.messages if message.xid not in rolled_back),
                *transaction.dropped.values(),
            ),
        )

    def discard(self, xid: int) -> None:
        """Drop a transaction, if it is known."""
        for file in self._transactions.get(xid, _Transaction()).files:
            self._buffered_bytes -= sum(map(_size, file.buffered))
            if file.writer is not None:
                file.writer.abandon()
                del self._writing[file.path]
        self._forget(xid)
        storage.delete_tree(self._layout.open_transaction(xid))

    def _known(self, xid: int) -> _Transaction:
        if xid not in self._transactions:
            raise SpoolError(f"transaction {xid} ended, but none of its pieces have been seen")
        return self._transactions[xid]

    def _forget(self, xid: int) -> None:
        transaction = self._transactions.pop(xid, None)
        if transaction is not None:
            self._message_bytes -= sum(map(_message_size, transaction.messages))

    def _add_messages(
        self, xid: int, transaction: _Transaction, messages: tuple[LogicalMessage, ...]
    ) -> None:
        """Add logical messages.

        Any role may emit any number of messages. So messages beyond the limit are dropped, and replaced by
        one empty message per prefix.
        """
        for message in messages:
            size = _message_size(message)
            if self._message_bytes + size <= MAX_MESSAGE_BYTES:
                transaction.messages.append(message)
                self._message_bytes += size
            else:
                if not transaction.dropped:
                    _log.warning(
                        "logical messages dropped", extra={"xid": xid, "limit_bytes": MAX_MESSAGE_BYTES}
                    )
                # The empty message gets the top-level xid, since the dropped messages may be of as many
                # subtransactions.
                transaction.dropped.setdefault(message.prefix, replace(message, content=b"", xid=xid))

    def _file(self, xid: int, transaction: _Transaction, batch: ChangeBatch) -> PieceFile:
        table, key = batch.table, (batch.table.oid, batch.is_old)
        file = transaction.latest.get(key)
        if file is None or file.is_finished or file.table != table:
            directory = self._layout.open_transaction(xid)
            if not transaction.files:
                storage.delete_tree(directory)
                storage.ensure_directory(directory)
            file = PieceFile(
                directory / f"{len(transaction.files):06d}.parquet", table, [], is_old=batch.is_old
            )
            transaction.files.append(file)
            transaction.latest[key] = file
        return file

    def _write_all(self) -> None:
        for file in [
            file for transaction in self._transactions.values() for file in transaction.files if file.buffered
        ]:
            self._write(file)

    def _write(self, file: PieceFile) -> None:
        """Write the buffered rows as one row group."""
        if not file.buffered:
            return
        if file.writer is None:
            file.writer = ChangeFile(file.path, file.table)
        self._writing.pop(file.path, None)
        self._writing[file.path] = file
        file.writer.write(file.buffered)
        self._buffered_bytes -= sum(map(_size, file.buffered))
        file.buffered = []
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
