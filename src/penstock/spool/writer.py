"""Write the spool: buffer whole transactions by table, and seal them as segments.

Batches of one table under one schema version form a *run*. A schema change starts a new run, even if the
schema changes back later, so each run is ordered, and the runs of a table follow each other.

The order of writes makes a segment complete or absent, also after a power failure at any step: sync the
files, write and sync the manifest under a temporary name, sync the directory, rename the manifest, and sync
the directories again. Readers see the segment after the rename. The next writer removes unfinished segments.

Whole transactions are buffered in memory until the caller seals, or until they exceed a size. Pieces of open
transactions are written to disk as they arrive and become one segment when their transaction commits. Logical
messages are stored in the manifests. Unsealed changes are lost when the process ends and must be captured
again, so only `end` may be confirmed.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import assert_never

import pyarrow as pa

from penstock import storage
from penstock.change import (
    COMMIT_VERSION,
    ChangeBatch,
    Idle,
    LogicalMessage,
    LogStep,
    PiecesAborted,
    PiecesCommitted,
    TransactionPiece,
    Transactions,
    metadata_index,
)
from penstock.errors import SpoolError, SpoolFullError
from penstock.position import Position
from penstock.schema import TableSchema
from penstock.spool.history import HistoryRecorder, SchemaVersion
from penstock.spool.manifest import (
    MANIFEST,
    Manifest,
    SegmentFile,
    SpoolLayout,
    change_file_name,
    dump_manifest,
    parse_manifest,
    parse_segment_name,
)
from penstock.spool.open_transactions import ChangeFile, OpenPieces, PieceFile, check_batch

_log = logging.getLogger(__name__)

MAX_PENDING_MESSAGE_BYTES = 64 << 20
"""Limit for non-transactional messages that are not sealed yet."""
_MESSAGE_BYTES = 256
"""Memory of a message without its content."""


@dataclass(slots=True)
class Run:
    table: TableSchema
    min_position: Position
    max_position: Position
    batches: list[ChangeBatch] = field(default_factory=list)
    is_old: bool = False
    """Whether the run has old rows of updates, which are kept apart from the changes."""


class TransactionBuffer:
    """The transactions appended since `start`. Raises SpoolError if positions go backwards."""

    def __init__(self, start: Position, standalone: Iterable[LogicalMessage] = ()) -> None:
        """`standalone` are non-transactional messages at or after `start` that were received earlier."""
        self.start = start
        self.end = start
        self.commit_time: datetime | None = None
        self.transactions = 0
        self.rows = 0
        self.bytes = 0
        self.runs: list[Run] = []
        self.messages: list[LogicalMessage] = []
        """The transactional messages."""
        self.standalone: list[LogicalMessage] = list(standalone)
        self._standalone_bytes = sum(len(message.content) + _MESSAGE_BYTES for message in self.standalone)
        self._latest: dict[tuple[int, bool], Run] = {}

    def add(self, step: Transactions) -> None:
        if step.end <= self.end:
            raise SpoolError(
                f"transactions up to {step.end} were received after {self.end}: positions must increase"
            )
        added = [
            (batch, *_reach(batch, after=self.end, upto=step.end))
            for batch in step.batches
            if batch.rows.num_rows
        ]
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

    def add_message(self, message: LogicalMessage) -> None:
        """Add a non-transactional message. A message before `start` is ignored, since a segment already
        contains it.

        Any role may emit any number of such messages, so those beyond the limit are dropped.
        """
        if message.lsn < self.start.lsn:
            return
        size = len(message.content) + _MESSAGE_BYTES
        self._standalone_bytes += size
        if self._standalone_bytes <= MAX_PENDING_MESSAGE_BYTES:
            self.standalone.append(message)
            self.bytes += len(message.content)
        elif self._standalone_bytes - size <= MAX_PENDING_MESSAGE_BYTES:
            _log.warning("logical messages dropped", extra={"limit_bytes": MAX_PENDING_MESSAGE_BYTES})

    def messages_before(self, end: Position) -> tuple[LogicalMessage, ...]:
        """Return the messages of a segment that ends at `end`, in log order."""
        return tuple(
            sorted(
                [*self.messages, *(each for each in self.standalone if each.lsn < end.lsn)],
                key=lambda each: each.sort_key,
            )
        )

    def messages_from(self, end: Position) -> tuple[LogicalMessage, ...]:
        """Return the non-transactional messages for the segment that starts at `end`."""
        return tuple(each for each in self.standalone if each.lsn >= end.lsn)

    def _run(self, batch: ChangeBatch, first: Position) -> Run:
        table, which = batch.table, (batch.table.oid, batch.is_old)
        run = self._latest.get(which)
        if run is None or run.table != table:
            run = self._latest[which] = Run(table, first, first, is_old=batch.is_old)
            self.runs.append(run)
        return run


def _reach(batch: ChangeBatch, *, after: Position, upto: Position) -> tuple[Position, Position]:
    """Return the positions of the first and last row of a batch. Raises SpoolError if rows of another step
    are among them; since rows are ordered, checking these two is sufficient.
    """
    check_batch(batch)
    versions = batch.rows.column(metadata_index(batch.table, COMMIT_VERSION))
    if versions.null_count:
        raise SpoolError(
            f"a batch of {batch.table.name} has rows without a commit version outside a piece of an open "
            "transaction"
        )
    first, last = Position.of(versions[0].as_py()), Position.of(versions[-1].as_py())
    if not after < first <= last <= upto:
        raise SpoolError(
            f"a batch of {batch.table.name} holds changes of ({first}, {last}], its transactions are in "
            f"({after}, {upto}]"
        )
    return first, last


PlaceFiles = Callable[[Path], tuple[SegmentFile, ...]]
"""Function that writes or moves a segment's files into its directory."""


def load_segment(layout: SpoolLayout, end: Position) -> Manifest | None:
    path = layout.segment(end) / MANIFEST
    data = storage.read(path)
    return None if data is None else parse_manifest(data, where=f"segment {path.parent.name}")


def seal_transactions(layout: SpoolLayout, buffer: TransactionBuffer) -> Manifest:
    def place(directory: Path) -> tuple[SegmentFile, ...]:
        return tuple(_write_run(directory, buffer.start, index, run) for index, run in enumerate(buffer.runs))

    return _seal(layout, _draft(buffer, buffer.end), place)


def seal_pieces(
    layout: SpoolLayout, buffer: TransactionBuffer, step: PiecesCommitted, files: Sequence[PieceFile]
) -> Manifest:
    """Seal the files of a transaction that was sent in pieces.

    `buffer` has no rows and ends with that transaction.
    """

    def place(directory: Path) -> tuple[SegmentFile, ...]:
        return tuple(
            _move_piece(directory, buffer.start, index, piece, step) for index, piece in enumerate(files)
        )

    return _seal(layout, _draft(buffer, step.end), place)


def seal_empty(layout: SpoolLayout, buffer: TransactionBuffer, end: Position) -> Manifest:
    """Seal a segment without rows, up to `end`, which may be later than the buffer's last transaction."""
    return _seal(layout, _draft(buffer, end), lambda _: ())


def remove_leftovers(layout: SpoolLayout) -> None:
    """Remove the unfinished segments and pieces of a crashed writer. The caller holds the spool's lock."""
    for entry in storage.list_directories(layout.segments):
        directory = layout.segments / entry.name
        if parse_segment_name(entry.name) is not None and storage.file_version(directory / MANIFEST) is None:
            storage.delete_tree(directory)
    storage.delete_tree(layout.open)


def _draft(buffer: TransactionBuffer, end: Position) -> Manifest:
    return Manifest(
        buffer.start, end, buffer.transactions, buffer.commit_time, (), buffer.messages_before(end)
    )


def _seal(layout: SpoolLayout, draft: Manifest, place: PlaceFiles) -> Manifest:
    """Write and seal the segment that `draft` describes, with the files that `place` writes."""
    existing = load_segment(layout, draft.end)
    if existing is not None and existing.start <= draft.start:
        # The range was captured again. The existing segment holds the same transactions, and readers may be
        # reading it.
        return existing
    directory = layout.segment(draft.end)
    if existing is None:
        storage.delete_tree(directory)
    storage.ensure_directory(directory)
    manifest = replace(draft, files=place(directory))
    # The files are synced after all of them are written: syncing a thousand files together takes a fraction
    # of the time.
    storage.sync_files([directory / file.path for file in manifest.files])
    temporary = directory / f"{MANIFEST}.tmp"
    storage.write(temporary, dump_manifest(manifest))
    storage.sync_directory(directory)
    storage.rename(temporary, directory / MANIFEST)
    storage.sync_directory(directory)
    storage.sync_directory(layout.segments)
    return manifest


def _write_run(directory: Path, start: Position, index: int, run: Run) -> SegmentFile:
    path = directory / change_file_name(start, index, run.table.name)
    file = ChangeFile(path, run.table)
    file.write(run.batches)
    size_bytes = file.finish()
    return SegmentFile(
        run.table,
        path.name,
        file.rows,
        size_bytes,
        file.counts,
        run.min_position,
        run.max_position,
        is_old=run.is_old,
    )


def _move_piece(
    directory: Path, start: Position, index: int, piece: PieceFile, step: PiecesCommitted
) -> SegmentFile:
    path = directory / change_file_name(start, index, piece.table.name)
    storage.rename(piece.path, path)
    end, time = step.end, step.commit_time
    return SegmentFile(
        piece.table,
        path.name,
        piece.rows,
        piece.bytes,
        piece.counts,
        end,
        end,
        end,
        time,
        step.xid,
        piece.is_old,
    )


_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class SpoolWriter:
    """The only writer of a spool; the caller holds `SpoolLock`. Not thread-safe.

    `start` is the position where capture starts: usually the end of the spool, or an earlier position to
    capture lost changes again. After an error a writer rejects further steps. The spool stays consistent, so
    open a new writer at its end.
    """

    def __init__(
        self,
        root: Path,
        start: Position,
        *,
        max_segment_bytes: int = 256 << 20,
        piece_buffer_bytes: int = 32 << 20,
        max_open_files: int = 128,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = SpoolLayout(root)
        self._max_segment_bytes = max_segment_bytes
        self._clock = clock
        self._buffer = TransactionBuffer(start)
        self._pending_since: float | None = None
        self._quiet = start
        self._has_failed = False
        self._pieces = OpenPieces(self._layout, buffer_bytes=piece_buffer_bytes, max_files=max_open_files)
        with self._spool_errors():
            remove_leftovers(self._layout)
            storage.ensure_directory(self._layout.segments)
            storage.sync_directory(root)
            storage.sync_directory(root.absolute().parent)
            self._history = HistoryRecorder(root)

    @property
    def end(self) -> Position:
        """The sealed position, where the next segment starts."""
        return self._buffer.start

    @property
    def pending_rows(self) -> int:
        """Number of unsealed rows and transactional messages."""
        return self._buffer.rows + len(self._buffer.messages)

    @property
    def pending_bytes(self) -> int:
        return self._buffer.bytes

    @property
    def oldest_pending_age_seconds(self) -> float:
        """Age of the first unsealed row; 0 if there is none."""
        return 0.0 if self._pending_since is None else self._clock() - self._pending_since

    def append(self, step: LogStep) -> tuple[Manifest, ...]:
        """Append one step of the log. Returns the segments that were sealed by it, usually none."""
        with self._spool_errors():
            match step:
                case Transactions():
                    return self._append_transactions(step)
                case TransactionPiece():
                    self._pieces.add(step)
                case PiecesCommitted():
                    return self._append_commit(step)
                case PiecesAborted():
                    self._pieces.abort(step.xid, step.subxid)
                case LogicalMessage():
                    self._buffer.add_message(step)
                case Idle():
                    self.advance(step.position)
                case _:
                    assert_never(step)
        return ()

    def advance(self, position: Position) -> None:
        """Record that nothing more commits up to `position`; `seal(quiet=True)` makes that durable.

        Transactions that arrive in pieces may be open, and commit after `position`. They are not lost if the
        process ends: a slot retains the WAL of every transaction that was open at the confirmed position, and
        a capture that starts at `position` receives each transaction that commits later from its first
        change.
        """
        self._quiet = max(self._quiet, position)

    def seal(self, *, quiet: bool = False) -> Manifest | None:
        """Seal all buffered transactions as one durable segment, and return its manifest; None if there are
        no rows.

        With `quiet`, a range without rows is sealed as an empty segment, up to the last transaction or quiet
        position. Do this at intervals, not at every step: a busy database without published changes would
        fill the spool with empty segments.
        """
        with self._spool_errors():
            if self.pending_rows:
                return self._seal_transactions()
            reached = max(self._buffer.end, self._quiet)
            if not quiet or reached <= self.end:
                return None
            return self._sealed(seal_empty(self._layout, self._buffer, reached))

    def close(self) -> None:
        """Close all files. Unsealed changes are discarded."""
        for xid in self._pieces.xids:
            self._pieces.discard(xid)
        self._has_failed = True

    def _append_transactions(self, step: Transactions) -> tuple[Manifest, ...]:
        self._buffer.add(step)
        if self.pending_rows and self._pending_since is None:
            self._pending_since = self._clock()
        if self._buffer.bytes <= self._max_segment_bytes:
            return ()
        return (self._seal_transactions(),)

    def _append_commit(self, step: PiecesCommitted) -> tuple[Manifest, ...]:
        """Seal the transaction as one segment. If no row is left after rollbacks, add the transaction to the
        buffer instead.
        """
        if step.end <= self._buffer.end:
            raise SpoolError(
                f"transaction {step.xid} commits at {step.end}, but {self._buffer.end} was received: the "
                "positions must increase"
            )
        pieces = self._pieces.commit(step.xid)
        messages = tuple(replace(message, xid=step.xid, position=step.end) for message in pieces.messages)
        transaction = Transactions((), step.end, step.commit_time, 1, messages)
        if not pieces.files:
            storage.delete_tree(self._layout.open_transaction(step.xid))
            return self._append_transactions(transaction)
        for file in pieces.files:
            file.table = file.table.with_key(step.keys.get(file.table.oid, file.table.key))
        before = self.seal()
        self._history.record(SchemaVersion(step.end, file.table) for file in pieces.files)
        # Transactions that are still in the buffer have no rows; the segment covers their range too.
        self._buffer.add(transaction)
        manifest = self._sealed(seal_pieces(self._layout, self._buffer, step, pieces.files))
        storage.delete_tree(self._layout.open_transaction(step.xid))
        return (manifest,) if before is None else (before, manifest)

    def _seal_transactions(self) -> Manifest:
        self._history.record(SchemaVersion(run.min_position, run.table) for run in self._buffer.runs)
        return self._sealed(seal_transactions(self._layout, self._buffer))

    def _sealed(self, manifest: Manifest) -> Manifest:
        self._buffer = TransactionBuffer(manifest.end, self._buffer.messages_from(manifest.end))
        self._pending_since = None
        return manifest

    @contextmanager
    def _spool_errors(self) -> Iterator[None]:
        """Convert file errors to SpoolError. After an error, reject further steps, since the failed step may
        be half done.
        """
        if self._has_failed:
            raise SpoolError("this writer has failed or was closed; open a new one at the end of the spool")
        try:
            yield
        except OSError as error:
            self._has_failed = True
            if error.errno in _DISK_FULL:
                raise SpoolFullError(
                    f"the disk of the spool is full: {os.strerror(error.errno)}",
                    hint=f"free space for {self._layout.root} and start again; nothing is lost, since the "
                    "slot retains unsealed changes",
                ) from error
            raise SpoolError(f"the spool cannot be written: {error}") from error
        except pa.ArrowException as error:
            self._has_failed = True
            # Arrow may quote a value in its message, so only the class of the error is shown.
            raise SpoolError(f"the spool cannot be written: {type(error).__name__}") from error
        except BaseException:
            self._has_failed = True
            raise
