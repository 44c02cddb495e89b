"""Where source and target meet: a snapshot of the source, and the targets as of the very position at which it is exact.

The position comes with the snapshot, from the consistent point of a temporary slot. No commit record lies across such a point: each ends at
or before it, and is in the snapshot, or begins at or after it, and is not. So an epoch may end there as it may at the end of a commit, and
the slot may be confirmed there: a server that is asked to go on from it sends every transaction that commits later, whole.

A barrier has the pipeline end an epoch there, whoever runs it. If nobody does, it is run from here, by the same code and under the same
lock, until it is there. The pipeline is not held up: what it applies afterwards is in later versions of the tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from pyspark.sql import SparkSession

from penstock.errors import ConfigError, EpochMissedError, PipelineBusyError
from penstock.lag import OpenTransaction
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.epochs import EpochLog
from penstock.pipeline.observer import EpochReport, PipelineObserver
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.sides import side_of
from penstock.pipeline.states import TableStatus
from penstock.position import Position
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.exported import ExportedSnapshot
from penstock.postgres.slot import OnWait, current_position
from penstock.schema import TableName
from penstock.spark.lock import is_locked
from penstock.spool.barriers import BarrierRequest

Tell = Callable[[str], None]

_ATTEMPTS = 5
_POLL_SECONDS = 0.1
_STANDSTILL_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """The snapshot, and the tables as they stood in the epoch that ended at its fence."""

    snapshot: ExportedSnapshot
    tables: Mapping[TableName, TableStatus]


@contextmanager
def meet(spark: SparkSession, config: PipelineConfig, tell: Tell) -> Iterator[Meeting]:
    """Hold a snapshot of the source for the length of the block; the pipeline has been, or is, at the same position."""
    if config.polling_rules is not None:
        raise ConfigError(
            "source and target cannot be brought to one position while changes are learned of by polling",
            hint="compare them while nobody writes to the source",
        )
    address = config.source.address()
    for _ in range(_ATTEMPTS):
        with ExitStack() as held:
            with BarrierRequest(config.barriers, _position(address)) as request:
                tell("taking a snapshot of the source")
                snapshot = held.enter_context(side_of(config).export(address, _advance(request, address, tell)))
                request.place(snapshot.fence)
                tables = _Approach(spark, config, snapshot.fence, tell).wait()
            if tables is not None:
                yield Meeting(snapshot, tables)
                return
        tell("the pipeline went past the snapshot; trying again")
    raise EpochMissedError(
        f"the pipeline went past the snapshot without ending an epoch at it, {_ATTEMPTS} times",
        hint="see that the pipeline runs the same version of Penstock, and with the same state directory",
    )


def _position(address: SourceAddress) -> Position:
    with connect(address) as connection:
        return current_position(connection)


def _advance(request: BarrierRequest, address: SourceAddress, tell: Tell) -> OnWait:
    """Let the pipeline go on while the snapshot waits for transactions that are open.

    As long as it waits for one, its position comes after all that was in the log when it was last asked: whatever the server has written
    since lies beyond what the transaction's end will bring.
    """
    reached = [_position(address)]

    def on_wait(blockers: Sequence[OpenTransaction]) -> None:
        if blockers:
            request.advance(reached[0])
            tell(f"the snapshot waits for {'; '.join(each.describe() for each in blockers)}")
        reached[0] = _position(address)

    return on_wait


class _Approach:
    """Waiting for an epoch that ends at `fence`, by whoever runs the pipeline."""

    def __init__(self, spark: SparkSession, config: PipelineConfig, fence: Position, tell: Tell) -> None:
        self._spark = spark
        self._config = config
        self._fence = fence
        self._tell = tell
        self._log = EpochLog(config.sink.root, config.pipeline)

    def wait(self) -> Mapping[TableName, TableStatus] | None:
        """The tables at the fence; None if the pipeline is past it and was never there."""
        before, since = None, time.monotonic()
        while True:
            last = self._log.last()
            # Asked after the last one: an epoch at the fence is recorded before any that lies beyond it.
            found = self._log.at(self._fence)
            if found is not None:
                return found.tables
            if last is not None and last.position > self._fence:
                return None
            if not is_locked(self._config.lock):
                with suppress(PipelineBusyError):
                    return self._run()
            elif last != before:
                before, since = last, time.monotonic()
                self._tell(f"the pipeline is at {last.position if last is not None else Position.ZERO}, on its way to {self._fence}")
            elif time.monotonic() - since > _STANDSTILL_SECONDS:
                raise EpochMissedError(
                    f"the pipeline has not come any closer to {self._fence} for {_STANDSTILL_SECONDS:.0f} s",
                    hint="see what it waits for with penstock status",
                )
            time.sleep(_POLL_SECONDS)

    def _run(self) -> Mapping[TableName, TableStatus] | None:
        """Nobody runs the pipeline: bring it to the fence. `PipelineBusyError` if somebody was quicker."""
        self._tell(f"the pipeline does not run; applying what there is up to {self._fence}")
        observer = _StopAt(self._fence, self._tell)
        pipeline = Pipeline(self._config, self._spark, observer)
        observer.stop = pipeline.stop
        result = pipeline.run(once=True)
        found = self._log.at(self._fence)
        if found is not None:
            return found.tables
        # If no table can go on, there is no epoch; that is an answer too.
        has_failed = len(result.failed) == len(result.tables)
        return {TableName.parse(name): status for name, status in result.tables.items()} if has_failed else None


class _StopAt(PipelineObserver):
    """Ends a run as soon as it has got somewhere."""

    def __init__(self, position: Position, tell: Tell) -> None:
        self._position = position
        self._tell = tell
        self.stop: Callable[[], None] = lambda: None

    def epoch_recorded(self, report: EpochReport) -> None:
        if report.position >= self._position:
            self.stop()

    def interrupted(self, reason: str, pause_seconds: float) -> None:
        self._tell(f"interrupted: {reason}")
