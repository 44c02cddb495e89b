"""How far an unfinished snapshot is, from what is durable: the same for the run that makes it and for anybody who looks from outside."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from penstock.pipeline.snapshots.state import SavedSnapshot, SnapshotStore
from penstock.position import Position
from penstock.schema import TableName

_RATE_WINDOW = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class SnapshotProgress:
    """Chunks, rows and bytes of one table. Bytes are those of the source's heap, of which the whole is known before it is read."""

    table: TableName
    fence: Position
    """The first: the spool must keep what comes after it."""
    chunks_done: int
    chunks_total: int
    rows: int
    heap_bytes_done: int
    heap_bytes_total: int
    target_bytes: int
    """Of the files written so far."""
    rows_per_second: float | None
    heap_bytes_per_second: float | None
    """Over the last minute in which chunks were finished; None before the first."""

    @property
    def seconds_left(self) -> float | None:
        if not self.heap_bytes_per_second:
            return None
        return (self.heap_bytes_total - self.heap_bytes_done) / self.heap_bytes_per_second

    def as_document(self) -> dict[str, object]:
        """For programs: plain, stable names."""
        left = self.seconds_left
        return {
            "fence": str(self.fence),
            "chunks_done": self.chunks_done,
            "chunks_total": self.chunks_total,
            "rows": self.rows,
            "heap_bytes_done": self.heap_bytes_done,
            "heap_bytes_total": self.heap_bytes_total,
            "target_bytes": self.target_bytes,
            "rows_per_second": None if self.rows_per_second is None else round(self.rows_per_second),
            "heap_bytes_per_second": None if self.heap_bytes_per_second is None else round(self.heap_bytes_per_second),
            "seconds_left": None if left is None else round(left, 1),
        }


def load_progress(root: Path, pipeline: str, table: TableName) -> SnapshotProgress | None:
    """Of one table; None if it has no snapshot under way."""
    saved = SnapshotStore(root, pipeline).load(table)
    return None if saved is None else measure(saved)


def load_all_progress(root: Path, pipeline: str) -> dict[TableName, SnapshotProgress]:
    """Of every table whose snapshot is under way."""
    found = {table: load_progress(root, pipeline, table) for table in SnapshotStore(root, pipeline).tables()}
    return {table: progress for table, progress in found.items() if progress is not None}


def measure(saved: SavedSnapshot) -> SnapshotProgress:
    plan, records = saved.plan, list(saved.records.values())
    rows_per_second, bytes_per_second = _rates(saved)
    return SnapshotProgress(
        plan.outline.schema.name,
        plan.fence,
        len(records),
        len(plan.chunks),
        sum(record.file.rows for record in records),
        sum(plan.chunks[record.number].heap_bytes for record in records),
        plan.heap_bytes,
        sum(record.file.bytes for record in records),
        rows_per_second,
        bytes_per_second,
    )


def _rates(saved: SavedSnapshot) -> tuple[float | None, float | None]:
    """Rows and heap bytes a second, between the first and the last of the chunks that were finished lately."""
    records = sorted(saved.records.values(), key=lambda record: record.finished_at)
    if not records:
        return None, None
    last = records[-1].finished_at
    recent = [record for record in records if record.finished_at >= last - _RATE_WINDOW]
    # What the first of them brought was read before it was finished.
    since, counted = (recent[0].finished_at, recent[1:]) if len(recent) > 1 else (saved.plan.planned_at, recent)
    seconds = (last - since).total_seconds()
    if seconds <= 0:
        return None, None
    heap_bytes = sum(saved.plan.chunks[record.number].heap_bytes for record in counted)
    return sum(record.file.rows for record in counted) / seconds, heap_bytes / seconds
