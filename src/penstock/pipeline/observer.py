"""`PipelineObserver`: receives the events of a run, for a progress display, logs or tests. Its methods log
events that no other module logs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from penstock.errors import PenstockError
from penstock.pipeline.snapshots.state import SnapshotProgress
from penstock.pipeline.table_states import TableStatus
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
    """Receives the events of a run. Threads of the pipeline call its methods, which must not block."""

    def snapshot_planned(self, table: TableName, chunks: int, heap_bytes: int) -> None: ...

    def snapshot_advanced(self, table: TableName, chunks: int, rows: int, heap_bytes: int) -> None:
        """Called when further chunks of a snapshot have been read."""

    def snapshot_resumed(self, table: TableName, done: int, chunks: int) -> None:
        """Called when a snapshot continues. `done` of its `chunks` chunks were read by an earlier run, or
        under an earlier exported snapshot.
        """

    def snapshot_progressed(self, progress: SnapshotProgress) -> None:
        """Called after each chunk, with the progress of the table's snapshot: rows, bytes, rate, time
        left.
        """

    def snapshot_finished(self, table: TableName, rows: int) -> None: ...

    def streaming_started(self) -> None:
        """Called when every table that the run started with has been copied or has failed."""

    def epoch_recorded(self, report: EpochReport) -> None:
        facts = {
            "epoch": report.number,
            "position": str(report.position),
            "rows": report.rows,
            "seconds": round(report.seconds, 3),
        }
        _log.info("epoch recorded", extra=facts)

    def table_failed(self, table: TableName, status: TableStatus) -> None:
        _log.error("table failed", extra={"table": str(table), "reason": status.reason, "fix": status.remedy})

    def table_left(self, table: TableName) -> None:
        """Called when the table has been removed from the pipeline."""

    def warned(self, warning: PenstockError) -> None:
        """Called when an operator should act, although nothing has stopped yet."""
        _log.warning(
            "operator needed", extra={"code": warning.code, "reason": warning.message, "fix": warning.hint}
        )

    def announced(self, message: str) -> None:
        """Called with a message for operators that requires no action, such as that a resync starts by
        itself.
        """
        _log.warning("pipeline announcement", extra={"reason": message})

    def interrupted(self, reason: str, pause_seconds: float) -> None:
        """Called after a transient error. The pipeline, or the part of it that failed, tries again after the
        pause.
        """
        _log.warning(
            "pipeline interrupted", extra={"reason": reason, "pause_seconds": round(pause_seconds, 1)}
        )
