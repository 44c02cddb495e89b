"""Observers of a pipeline: progress display, logs, tests. By default, an event that is not logged elsewhere is logged."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from penstock.errors import PenstockError
from penstock.pipeline.snapshots.progress import SnapshotProgress
from penstock.pipeline.states import TableStatus
from penstock.position import Position
from penstock.schema import TableName

_log = logging.getLogger(__name__)


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

    def epoch_recorded(self, report: EpochReport) -> None:
        facts = {"epoch": report.number, "position": str(report.position), "rows": report.rows, "seconds": round(report.seconds, 3)}
        _log.info("epoch recorded", extra=facts)

    def table_failed(self, table: TableName, status: TableStatus) -> None:
        _log.error("table failed", extra={"table": str(table), "reason": status.reason, "fix": status.remedy})

    def table_left(self, table: TableName) -> None:
        """It is no longer one of the pipeline's."""

    def warned(self, warning: PenstockError) -> None:
        """Nothing has stopped, but an operator should act before it does."""
        _log.warning("operator needed", extra={"code": warning.code, "reason": warning.message, "fix": warning.hint})

    def interrupted(self, reason: str, pause_seconds: float) -> None:
        """A transient error; the pipeline retries after the pause. Without a pause: a notice about a table."""
        _log.warning("pipeline interrupted", extra={"reason": reason, "pause_seconds": round(pause_seconds, 1)})
