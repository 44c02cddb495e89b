"""Align source and target: a source snapshot, and the targets at exactly the position of that snapshot.

The position is the consistent point of a temporary slot. No commit record spans this position. A transaction
is in the snapshot if its commit record ends at or before the position. It is not in the snapshot if the
record begins at or after the position. So an epoch may end at the position, and the slot may be confirmed up
to it: a stream that starts there has every later commit completely.

A barrier makes the running pipeline end an epoch at the position. If the pipeline does not run, this process
runs it up to the barrier, under the same lock. The comparison does not delay the pipeline: later epochs
create later versions of the tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from pyspark.sql import SparkSession

from penstock.config.model import PipelineConfig
from penstock.errors import ConfigError, EpochMissedError, PipelineBusyError
from penstock.lag import OpenTransaction
from penstock.pipeline.epoch_log import EpochLog
from penstock.pipeline.observer import EpochReport, PipelineObserver
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.sources.adapter import source_adapter
from penstock.pipeline.table_states import TableStatus
from penstock.position import Position
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.slot import OnWait, current_position
from penstock.postgres.snapshot_export import ExportedSnapshot
from penstock.schema import TableName
from penstock.spool.barriers import BarrierRequest
from penstock.storage.locks import is_locked_by_jvm

Tell = Callable[[str], None]

_ATTEMPTS = 5
_POLL_SECONDS = 0.1
_STANDSTILL_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class AlignedSnapshot:
    """A source snapshot, and the tables' states in the epoch that ended at the snapshot's fence."""

    snapshot: ExportedSnapshot
    tables: Mapping[TableName, TableStatus]


@contextmanager
def align(spark: SparkSession, config: PipelineConfig, tell: Tell) -> Iterator[AlignedSnapshot]:
    """Context manager that holds a source snapshot open. An epoch has ended at the position of the
    snapshot.
    """
    source = source_adapter(config)
    if not source.can_align:
        raise ConfigError(
            f"source and target cannot be compared at one position with capture: {config.source.capture}",
            hint="compare them while the source is not written to",
        )
    address = config.source.address()
    for _ in range(_ATTEMPTS):
        with ExitStack() as held:
            with BarrierRequest(config.barriers, _position(address)) as request:
                tell("taking a snapshot of the source")
                snapshot = held.enter_context(source.export(address, _advance(request, address, tell)))
                request.place(snapshot.fence)
                tables = _FenceWait(spark, config, snapshot.fence, tell).wait()
            if tables is not None:
                yield AlignedSnapshot(snapshot, tables)
                return
        tell("the pipeline passed the position of the snapshot; trying again")
    raise EpochMissedError(
        f"the pipeline passed the position of the snapshot {_ATTEMPTS} times without ending an epoch there",
        hint="check that the pipeline runs the same version of Penstock with the same state directory",
    )


def _position(address: SourceAddress) -> Position:
    with connect(address) as connection:
        return current_position(connection)


def _advance(request: BarrierRequest, address: SourceAddress, tell: Tell) -> OnWait:
    """Return a callback that moves the barrier forward while the snapshot waits for open transactions.

    As long as one of these transactions is open, the position of the snapshot will be after the end of the
    WAL at the previous call. So each call moves the barrier to that end.
    """
    reached = [_position(address)]

    def on_wait(blockers: Sequence[OpenTransaction]) -> None:
        if blockers:
            request.advance(reached[0])
            tell(f"the snapshot waits for {'; '.join(each.describe() for each in blockers)}")
        reached[0] = _position(address)

    return on_wait


class _FenceWait:
    """Waits until the pipeline ends an epoch at `fence`. Runs the pipeline if no other process does."""

    def __init__(self, spark: SparkSession, config: PipelineConfig, fence: Position, tell: Tell) -> None:
        self._spark = spark
        self._config = config
        self._fence = fence
        self._tell = tell
        self._log = EpochLog(config.sink.root, config.pipeline)

    def wait(self) -> Mapping[TableName, TableStatus] | None:
        """Return the tables' states at the fence; None if the pipeline passed the fence without ending an
        epoch there.
        """
        before, since = None, time.monotonic()
        while True:
            last = self._log.last()
            # Read after the last record: an epoch at the fence is recorded before any later one.
            found = self._log.at(self._fence)
            if found is not None:
                return found.tables
            if last is not None and last.position > self._fence:
                return None
            if not is_locked_by_jvm(self._config.lock):
                with suppress(PipelineBusyError):
                    return self._run()
            elif last != before:
                before, since = last, time.monotonic()
                self._tell(
                    f"the pipeline is at {last.position if last is not None else Position.ZERO}, on its "
                    f"way to {self._fence}"
                )
            elif time.monotonic() - since > _STANDSTILL_SECONDS:
                raise EpochMissedError(
                    f"the pipeline has made no progress towards {self._fence} for "
                    f"{_STANDSTILL_SECONDS:.0f} s",
                    hint="run penstock status CONFIG to see the reason",
                )
            time.sleep(_POLL_SECONDS)

    def _run(self) -> Mapping[TableName, TableStatus] | None:
        """Run the pipeline up to the fence, and return the tables' states there, or None as `wait` does.
        Raises `PipelineBusyError` if another process started the pipeline first.
        """
        self._tell(f"the pipeline does not run; running it up to {self._fence}")
        observer = _StopAt(self._fence, self._tell)
        pipeline = Pipeline(self._config, self._spark, observer)
        observer.stop = pipeline.stop
        result = pipeline.run(once=True)
        found = self._log.at(self._fence)
        if found is not None:
            return found.tables
        # If every table failed, no epoch is recorded; the result is then the tables' states.
        has_failed = len(result.failed) == len(result.tables)
        return (
            {TableName.parse(name): status for name, status in result.tables.items()} if has_failed else None
        )


class _StopAt(PipelineObserver):
    """Stops a run as soon as an epoch has reached the position."""

    def __init__(self, position: Position, tell: Tell) -> None:
        self._position = position
        self._tell = tell
        self.stop: Callable[[], None] = lambda: None

    def epoch_recorded(self, report: EpochReport) -> None:
        if report.position >= self._position:
            self.stop()

    def announced(self, message: str) -> None:
        self._tell(message)

    def interrupted(self, reason: str, pause_seconds: float) -> None:
        self._tell(f"interrupted: {reason}")
