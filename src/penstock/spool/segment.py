"""Sealing: how files become a segment.

The order makes it whole or absent, also when the power fails at any step: files and their directory reach the disk, then the manifest under
another name, then its rename, then the directories again. Until the rename nobody sees the segment; what is left of an unfinished one is
removed when the next writer starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.change import PiecesCommitted
from penstock.position import Position
from penstock.spool import storage
from penstock.spool.buffer import Run, TransactionBuffer
from penstock.spool.changefile import ChangeFile
from penstock.spool.layout import MANIFEST, SpoolLayout, change_file_name, parse_segment_name
from penstock.spool.manifest import Manifest, SegmentFile, dump_manifest, parse_manifest
from penstock.spool.pieces import PieceFile

PlaceFiles = Callable[[Path], tuple[SegmentFile, ...]]
"""Puts a segment's files into its directory."""


def load_segment(layout: SpoolLayout, end: Position) -> Manifest | None:
    path = layout.segment(end) / MANIFEST
    data = storage.read_bytes(path)
    return None if data is None else parse_manifest(data, where=f"segment {path.parent.name}")


def seal_transactions(layout: SpoolLayout, buffer: TransactionBuffer) -> Manifest:
    def place(directory: Path) -> tuple[SegmentFile, ...]:
        return tuple(_write_run(directory, buffer.start, index, run) for index, run in enumerate(buffer.runs))

    return _seal(layout, _draft(buffer, buffer.end), place)


def seal_pieces(layout: SpoolLayout, buffer: TransactionBuffer, step: PiecesCommitted, files: Sequence[PieceFile]) -> Manifest:
    """Seal the files of one transaction in pieces. `buffer` holds no rows and ends with that transaction."""

    def place(directory: Path) -> tuple[SegmentFile, ...]:
        return tuple(_move_piece(directory, buffer.start, index, piece, step) for index, piece in enumerate(files))

    return _seal(layout, _draft(buffer, step.end), place)


def seal_empty(layout: SpoolLayout, buffer: TransactionBuffer, end: Position) -> Manifest:
    """Seal ground without rows, up to `end`, which may lie beyond the buffer's last transaction."""
    return _seal(layout, _draft(buffer, end), lambda _: ())


def remove_leftovers(layout: SpoolLayout) -> None:
    """Remove what a writer that ended in the middle has left. Only for the one who holds the spool's lock."""
    for entry in storage.list_directories(layout.segments):
        directory = layout.segments / entry.name
        if parse_segment_name(entry.name) is not None and storage.mark(directory / MANIFEST) is None:
            storage.remove_tree(directory)
    storage.remove_tree(layout.open)


def _draft(buffer: TransactionBuffer, end: Position) -> Manifest:
    return Manifest(buffer.start, end, buffer.transactions, buffer.commit_time, (), buffer.messages_before(end))


def _seal(layout: SpoolLayout, draft: Manifest, place: PlaceFiles) -> Manifest:
    """Make `draft`, with the files that `place` puts there, a segment."""
    existing = load_segment(layout, draft.end)
    if existing is not None and existing.start <= draft.start:
        # Captured again: the sealed segment holds the same transactions, and readers may be reading it.
        return existing
    directory = layout.segment(draft.end)
    if existing is None:
        storage.remove_tree(directory)
    storage.make_directory(directory)
    manifest = replace(draft, files=place(directory))
    # Only now, when all are written: a thousand files become durable together in a fraction of the time.
    storage.sync_files([directory / file.path for file in manifest.files])
    temporary = directory / f"{MANIFEST}.tmp"
    storage.write_bytes(temporary, dump_manifest(manifest))
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
    return SegmentFile(run.table, path.name, file.rows, size_bytes, file.counts, run.min_position, run.max_position, is_old=run.is_old)


def _move_piece(directory: Path, start: Position, index: int, piece: PieceFile, step: PiecesCommitted) -> SegmentFile:
    path = directory / change_file_name(start, index, piece.table.name)
    storage.rename(piece.path, path)
    end, time = step.end, step.commit_time
    return SegmentFile(piece.table, path.name, piece.rows, piece.bytes, piece.counts, end, end, end, time, step.xid, piece.is_old)
