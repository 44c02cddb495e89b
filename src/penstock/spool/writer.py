"""Writes the spool: takes the steps of the log, gives segments.

Whole transactions wait in memory until the caller seals, or until there are too many bytes of them. Pieces of open transactions go to
disk as they come and become a segment of their own when their transaction commits. Logical messages stand in the manifests. What is not
sealed is forgotten at the end of the process and must be captured again; so only `end` may be confirmed to anyone.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import assert_never

import pyarrow as pa

from penstock.change import LogicalMessage, LogStep, PiecesAborted, PiecesCommitted, Quiet, TransactionPiece, Transactions
from penstock.errors import SpoolError, SpoolFullError
from penstock.position import Position
from penstock.spool import storage
from penstock.spool.buffer import TransactionBuffer
from penstock.spool.history import HistoryRecorder, SchemaVersion
from penstock.spool.layout import SpoolLayout
from penstock.spool.manifest import Manifest
from penstock.spool.pieces import OpenPieces
from penstock.spool.segment import remove_leftovers, seal_empty, seal_pieces, seal_transactions

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class SpoolWriter:
    """The one writer of a spool; hold `SpoolLock` while it lives. Not for use by several threads.

    `start` is where the log is captured from: the end of the spool as a rule, an earlier position to capture lost ground again. After an
    error a writer takes nothing more: its spool is sound, so open a new one at the spool's end.
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
        with self._failing():
            remove_leftovers(self._layout)
            storage.make_directory(self._layout.segments)
            storage.sync_directory(root)
            storage.sync_directory(root.absolute().parent)
            self._history = HistoryRecorder(root)

    @property
    def end(self) -> Position:
        """Everything up to here is sealed; the next segment starts here."""
        return self._buffer.start

    @property
    def pending_rows(self) -> int:
        """Rows that wait to be sealed, and logical messages."""
        return self._buffer.rows + len(self._buffer.messages)

    @property
    def pending_bytes(self) -> int:
        return self._buffer.bytes

    @property
    def oldest_pending_age_seconds(self) -> float:
        """How long the first unsealed row has been waiting; 0 if none is."""
        return 0.0 if self._pending_since is None else self._clock() - self._pending_since

    def append(self, step: LogStep) -> tuple[Manifest, ...]:
        """Take one step of the log; gives the segments that it sealed by itself, none as a rule."""
        with self._failing():
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
                    self._buffer.add_loose(step)
                case Quiet():
                    self.advance(step.position)
                case _:
                    assert_never(step)
        return ()

    def advance(self, position: Position) -> None:
        """Remember that nothing more commits up to `position`; `seal(quiet=True)` makes it durable.

        Transactions in pieces may be open then, and stay so: they commit after `position`. Nor are they lost if the process ends here. A
        slot keeps the WAL of every transaction that was open at the position confirmed to it, whichever that is, and a capture that
        starts at `position` is sent each transaction that commits after it, whole, from its first change.
        """
        self._quiet = max(self._quiet, position)

    def seal(self, *, quiet: bool = False) -> Manifest | None:
        """Make all whole transactions so far durable as one segment; None if no row is waiting.

        With `quiet`, ground without any row is sealed too, as an empty segment: up to the last transaction or quiet position. Ask for that
        now and then, not at every step: a busy database of which nothing is published would fill the spool with empty segments.
        """
        with self._failing():
            if self.pending_rows:
                return self._seal_transactions()
            reached = max(self._buffer.end, self._quiet)
            if not quiet or reached <= self.end:
                return None
            return self._sealed(seal_empty(self._layout, self._buffer, reached))

    def close(self) -> None:
        """Let go of all files. What is not sealed is dropped."""
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
        """The transaction becomes a segment of its own, or joins those in the buffer if it comes to no row."""
        if step.end <= self._buffer.end:
            raise SpoolError(f"transaction {step.xid} commits at {step.end}, but {self._buffer.end} was reached: the log goes forward")
        pieces = self._pieces.commit(step.xid)
        messages = tuple(replace(message, xid=step.xid, position=step.end) for message in pieces.messages)
        transaction = Transactions((), step.end, step.commit_time, 1, messages)
        if not pieces.files:
            storage.remove_tree(self._layout.open_transaction(step.xid))
            return self._append_transactions(transaction)
        for file in pieces.files:
            file.table = file.table.with_key(step.keys.get(file.table.oid, file.table.key))
        before = self.seal()
        self._history.record(SchemaVersion(step.end, file.table) for file in pieces.files)
        # Transactions left in the buffer have no rows; the segment covers their ground too.
        self._buffer.add(transaction)
        manifest = self._sealed(seal_pieces(self._layout, self._buffer, step, pieces.files))
        storage.remove_tree(self._layout.open_transaction(step.xid))
        return (manifest,) if before is None else (before, manifest)

    def _seal_transactions(self) -> Manifest:
        self._history.record(SchemaVersion(run.min_position, run.table) for run in self._buffer.runs)
        return self._sealed(seal_transactions(self._layout, self._buffer))

    def _sealed(self, manifest: Manifest) -> Manifest:
        self._buffer = TransactionBuffer(manifest.end, self._buffer.loose_from(manifest.end))
        self._pending_since = None
        return manifest

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn what the disk says into an error of ours, and take nothing more after it: half a step may have been taken."""
        if self._has_failed:
            raise SpoolError("this writer has failed or was closed; open a new one at the end of the spool")
        try:
            yield
        except OSError as error:
            self._has_failed = True
            if error.errno in _NO_ROOM:
                raise SpoolFullError(
                    f"there is no room for the spool: {os.strerror(error.errno)}",
                    hint=f"free space for {self._layout.root} and start again; nothing is lost, the slot still holds what is not sealed",
                ) from error
            raise SpoolError(f"the spool cannot be written: {error}") from error
        except pa.ArrowException as error:
            self._has_failed = True
            # Arrow may quote a value in its message.
            raise SpoolError(f"the spool cannot be written: {type(error).__name__}") from error
        except BaseException:
            self._has_failed = True
            raise
