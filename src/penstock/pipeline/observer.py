"""Who wants to know how a pipeline is doing: progress bars, the live line, tests. Every method does nothing by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from penstock.errors import PenstockError
from penstock.pipeline.snapshots.progress import SnapshotProgress
from penstock.pipeline.states import TableStatus
from penstock.position import Position
from penstock.schema import TableName


@dataclass(frozen=True, slots=True)
class EpochReport:
    """One finished epoch."""

    number: int
    position: Position
    rows: int
    commit_time: datetime | None
    seconds: float
    tables: Mapping[TableName, TableStatus]


class PipelineObserver:
    """Called from the pipeline's own threads; must not block."""

    def snapshot_planned(self, table: TableName, chunks: int, heap_bytes: int) -> None: ...

    def snapshot_advanced(self, table: TableName, chunks: int, rows: int, heap_bytes: int) -> None:
        """Some more chunks have been read."""

    def snapshot_resumed(self, table: TableName, done: int, chunks: int) -> None:
        """So many of the chunks were there already, from a former run or a former snapshot, and are not read again."""

    def snapshot_progressed(self, progress: SnapshotProgress) -> None:
        """Where a table stands after another chunk: rows, bytes, rate, time left."""

    def snapshot_finished(self, table: TableName, rows: int) -> None: ...

    def streaming_started(self) -> None:
        """Every table that the run began with is copied, or failed."""

    def epoch_recorded(self, report: EpochReport) -> None: ...

    def table_failed(self, table: TableName, status: TableStatus) -> None: ...

    def table_left(self, table: TableName) -> None:
        """It is no longer one of the pipeline's."""

    def warned(self, warning: PenstockError) -> None:
        """Nothing has stopped; somebody should act before it does."""

    def interrupted(self, reason: str, pause_seconds: float) -> None:
        """Something that time can mend went wrong; the pipeline tries again after the pause."""
