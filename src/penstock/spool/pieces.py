"""Transactions that are still open and too long to wait for: their rows go to `open/<xid>/` as they come.

Memory is bounded whatever the number of transactions and tables: rows wait for a row group's worth, all together at most `buffer_bytes`,
and at most `max_files` files are open at a time; beyond that the one written to longest ago is finished, and its table goes on in
another file. None of this survives a crash, nor has to: a transaction that has not committed is sent again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from penstock.change import ChangeBatch, ChangeCounts, TransactionPiece
from penstock.errors import SpoolError
from penstock.schema import TableSchema
from penstock.spool import storage
from penstock.spool.changefile import ChangeFile, check_batch
from penstock.spool.layout import SpoolLayout


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


class OpenPieces:
    """All open transactions, by xid."""

    def __init__(self, layout: SpoolLayout, *, buffer_bytes: int, max_files: int) -> None:
        self._layout = layout
        self._buffer_bytes = buffer_bytes
        self._max_files = max_files
        self._waiting_bytes = 0
        self._files: dict[int, list[PieceFile]] = {}
        self._latest: dict[tuple[int, int], PieceFile] = {}
        self._writing: dict[Path, PieceFile] = {}

    def __len__(self) -> int:
        return len(self._files)

    @property
    def xids(self) -> tuple[int, ...]:
        return tuple(self._files)

    def add(self, piece: TransactionPiece) -> None:
        if piece.xid not in self._files:
            storage.remove_tree(self._layout.open_transaction(piece.xid))
            storage.make_directory(self._layout.open_transaction(piece.xid))
            self._files[piece.xid] = []
        for batch in piece.batches:
            if batch.rows.num_rows:
                check_batch(batch)
                self._file(piece.xid, batch.table).waiting.append(batch)
                self._waiting_bytes += batch.rows.nbytes
        if self._waiting_bytes > self._buffer_bytes:
            self._write_all()

    def commit(self, xid: int) -> list[PieceFile]:
        """Finish the files of a transaction, durably, and give them away: they still lie in `open/<xid>/`."""
        if xid not in self._files:
            raise SpoolError(f"transaction {xid} committed, but none of its pieces have been seen")
        files = self._files[xid]
        for file in files:
            self._write(file)
            self._finish(file)
        self._forget(xid)
        return files

    def discard(self, xid: int) -> None:
        """Drop what a rolled back transaction wrote; nothing happens if it wrote nothing."""
        for file in self._files.get(xid, ()):
            self._waiting_bytes -= _size(file.waiting)
            if file.writer is not None:
                file.writer.abandon()
                del self._writing[file.path]
        self._forget(xid)
        storage.remove_tree(self._layout.open_transaction(xid))

    def _forget(self, xid: int) -> None:
        self._files.pop(xid, None)
        self._latest = {key: file for key, file in self._latest.items() if key[0] != xid}

    def _file(self, xid: int, table: TableSchema) -> PieceFile:
        file = self._latest.get((xid, table.oid))
        if file is None or file.is_finished or file.table != table:
            name = f"{len(self._files[xid]):06d}.parquet"
            file = PieceFile(self._layout.open_transaction(xid) / name, table, [])
            self._files[xid].append(file)
            self._latest[xid, table.oid] = file
        return file

    def _write_all(self) -> None:
        for file in [file for files in self._files.values() for file in files if file.waiting]:
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
        self._waiting_bytes -= _size(file.waiting)
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


def _size(batches: list[ChangeBatch]) -> int:
    return sum(batch.rows.nbytes for batch in batches)
