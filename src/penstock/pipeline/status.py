"""The status of a pipeline, from its epoch log, spool, state directory and slot, whether or not the pipeline
runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from penstock.capture.factory import missing_capture
from penstock.config.model import PipelineConfig
from penstock.errors import PenstockError
from penstock.lag import describe_strain
from penstock.pipeline.dead_letters.store import DeadLetterStore
from penstock.pipeline.epoch_log import Epoch, EpochLog
from penstock.pipeline.retries import Retry, load_retries
from penstock.pipeline.snapshots.state import SnapshotProgress, load_all_progress
from penstock.pipeline.sources.adapter import source_adapter
from penstock.position import Position
from penstock.postgres.connection import connect
from penstock.postgres.slot import COPY_AGAIN, Slot, current_position, inspect_slot
from penstock.schema import TableName
from penstock.spool.ownership import is_spool_locked
from penstock.spool.reader import SpoolReader
from penstock.spool.retention import Consumer, inspect_consumers, spool_bytes
from penstock.spool.status import CaptureStatus, load_status

_INACTIVE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """The status of a pipeline at one moment.

    It has three lags: `lag_bytes`, the WAL that the server wrote after the last epoch; `lag_seconds`, the age
    of the last applied commit; and `retained_bytes`, the WAL that the server retains for the slot.
    """

    pipeline: str
    slot_name: str
    """Empty if the capture method uses no slot."""
    epoch: Epoch | None
    capture: CaptureStatus | None
    spool_bytes: int
    spool_segments: int
    spool_end: Position | None
    slot: Slot | None
    server: Position | None
    source_error: str | None
    """The reason why the server could not be queried; None if it could. Everything else is reported in both
    cases.
    """
    is_capturing: bool = True
    """Whether the process that wrote `capture` still holds the spool's lock."""
    consumers: tuple[Consumer, ...] = ()
    """The consumers of the spool, this pipeline included."""
    snapshots: Mapping[TableName, SnapshotProgress] = field(default_factory=dict)
    """Progress of the tables being copied."""
    missing: PenstockError | None = None
    """The reason why the separate capture does not run; None if it runs, or is embedded."""
    letters: Mapping[TableName, int] = field(default_factory=dict)
    """Number of open dead letters of each table."""
    retries: tuple[Retry, ...] = ()
    """The retries in progress, except for those of tables in the state `retrying`."""

    @property
    def capture_state(self) -> str | None:
        """The state in the capture's status file; `stopped` if the capture's process does not run, None if
        there is no file.
        """
        if self.capture is None:
            return None
        return self.capture.state if self.is_capturing else "stopped"

    @property
    def lag_bytes(self) -> int | None:
        if self.server is None or self.epoch is None:
            return None
        return max(0, self.server - self.epoch.position)

    @property
    def lag_seconds(self) -> float | None:
        """The age of the last applied transaction in seconds; 0 if no change waits in the spool, None if it
        is unknown.
        """
        if self.epoch is None or self.lag_bytes is None:
            return None
        if self.lag_bytes == 0 or self.spool_end is None or self.spool_end <= self.epoch.position:
            return 0.0
        return (
            (datetime.now(UTC) - self.epoch.commit_time).total_seconds() if self.epoch.commit_time else None
        )

    @property
    def retained_bytes(self) -> int | None:
        if self.slot is None or self.slot.restart is None or self.server is None:
            return None
        return max(0, self.server.lsn - self.slot.restart)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the operator."""
        capture = self.capture
        warnings = []
        if self.epoch is not None and self.slot is None and self.slot_name and self.source_error is None:
            warnings = [
                (
                    f"slot {self.slot_name} is gone, and the targets have only the changes up to "
                    f"{self.epoch.position}: {COPY_AGAIN}"
                )
            ]
        warnings += [f"{self.missing.message}: {self.missing.hint}"] if self.missing is not None else []
        warnings += [
            _inactive_warning(each)
            for each in self.consumers
            if each.age_seconds > _INACTIVE_SECONDS and len(self.consumers) > 1
        ]
        slot_warning = self._slot_warning
        warnings += [slot_warning] if slot_warning is not None else []
        if capture is None:
            return tuple(warnings)
        waits_for = capture.waits_for if self.is_capturing else ()
        waiting = [
            f"the slot is created once this transaction has ended: {each.describe()}" for each in waits_for
        ]
        return (*warnings, *waiting, *(capture.lag.held_up if capture.lag is not None else ()))

    @property
    def _slot_warning(self) -> str | None:
        """A warning about the WAL that the slot retains; None if there is no reason for one. If the server
        does not answer, the warning is based on the last value in the capture's status file.
        """
        if self.slot is not None:
            return describe_strain(self.slot.wal_status, self.slot.safe_wal_bytes, f"slot {self.slot.name}")
        lag = self.capture.lag if self.capture is not None else None
        return describe_strain(lag.wal_status, lag.safe_wal_bytes, "the slot") if lag is not None else None

    def as_document(self) -> dict[str, object]:
        """Return the status as a JSON document for programs. The names of its keys are stable."""
        epoch, slot, capture = self.epoch, self.slot, self.capture
        return {
            "pipeline": self.pipeline,
            "position": str(epoch.position) if epoch else None,
            "epoch": epoch.number if epoch else None,
            "commit_time": epoch.commit_time.isoformat() if epoch and epoch.commit_time else None,
            "lag_bytes": self.lag_bytes,
            "lag_seconds": self.lag_seconds,
            "retained_wal_bytes": self.retained_bytes,
            "safe_wal_bytes": slot.safe_wal_bytes if slot else None,
            "source_error": self.source_error,
            "slot": None
            if slot is None
            else {
                "name": slot.name,
                "active_pid": slot.active_pid,
                "confirmed": str(slot.confirmed),
                "wal_status": slot.wal_status,
            },
            "capture": None
            if capture is None
            else {
                "state": self.capture_state,
                "sealed": str(capture.sealed),
                "received": str(capture.received),
                "rows_total": capture.rows_total,
                "confirms": capture.confirms,
                "confirmed": str(capture.confirmed),
                "updated_at": capture.updated_at.isoformat(),
                "error": f"{capture.failure.code}: {capture.failure.message}" if capture.failure else None,
                "remedy": capture.failure.hint if capture.failure else None,
                "waits_for": [asdict(each) for each in capture.waits_for],
                "lag_bytes": capture.lag.behind_bytes if capture.lag else None,
                "lag_seconds": capture.lag.behind_seconds if capture.lag else None,
                "retained_wal_bytes": capture.lag.retained_bytes if capture.lag else None,
                "safe_wal_bytes": capture.lag.safe_wal_bytes if capture.lag else None,
                "open_transactions": [asdict(each) for each in capture.lag.holders] if capture.lag else [],
            },
            "consumers": {
                each.name: {"released": str(each.released), "age_seconds": round(each.age_seconds, 1)}
                for each in self.consumers
            },
            "warnings": list(self.warnings),
            "spool": {
                "bytes": self.spool_bytes,
                "segments": self.spool_segments,
                "end": str(self.spool_end) if self.spool_end else None,
            },
            "tables": {
                str(name): {
                    "state": status.state.value,
                    "applied": str(status.applied) if status.applied else None,
                    "reason": status.reason,
                    "remedy": status.remedy,
                }
                for name, status in sorted((epoch.tables if epoch else {}).items())
            },
            "retries": [each.as_document() for each in self.retries],
            "dead_letters": {str(name): count for name, count in sorted(self.letters.items())},
            "snapshots": {
                str(name): progress.as_document() for name, progress in sorted(self.snapshots.items())
            },
        }


def inspect_status(config: PipelineConfig) -> PipelineStatus:
    """Read epoch log, spool and server once. An unreachable server is part of the result, not an error."""
    reader = SpoolReader(config.spool)
    slot: Slot | None = None
    server: Position | None = None
    source_error: str | None = None
    try:
        with connect(config.source.address(), "penstock status") as connection:
            slot = inspect_slot(connection, config.slot)
            server = current_position(connection)
    except PenstockError as error:
        source_error = str(error)
    return PipelineStatus(
        config.pipeline,
        source_adapter(config).slot or "",
        EpochLog(config.sink.root, config.pipeline).last(),
        load_status(config.spool),
        spool_bytes(reader),
        len(reader.segments()),
        reader.end,
        slot,
        server,
        source_error,
        is_spool_locked(config.spool),
        tuple(inspect_consumers(config.spool)),
        load_all_progress(config.sink.root, config.pipeline),
        missing_capture(config.spool) if config.source.process == "separate" else None,
        DeadLetterStore(config.sink.root, config.pipeline).open_counts,
        load_retries(config.state),
    )


def _inactive_warning(consumer: Consumer) -> str:
    hours = consumer.age_seconds / 3600
    return (
        f"consumer {consumer.name} has released nothing for {hours:.0f} h, so the spool keeps all changes "
        f"after {consumer.released}: "
        f"start it, or remove it with `penstock capture CONFIG --forget {consumer.name}`"
    )
