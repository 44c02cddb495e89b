"""`Pipeline`: from a configuration to tables that equal their source.

Start-up: lock, look at source and target, publication, slot. Then one streaming query over the control stream, whose `foreachBatch` applies
the epochs, and beside it the snapshots of the tables that have none. Spark's checkpoint is only a clock here: what is applied, and from
where, the targets say.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.errors import CaptureFailedError, ConfigError, PenstockError, PrivilegeError, Recovery
from penstock.lag import OpenTransaction
from penstock.pipeline.apply import EpochApplier
from penstock.pipeline.clock import await_end, planned_end
from penstock.pipeline.companion import CaptureCompanion
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.epochs import EpochLog
from penstock.pipeline.existing import await_copies, take_over
from penstock.pipeline.following.follower import Follower
from penstock.pipeline.following.gone import keep_gone
from penstock.pipeline.following.sightings import Look
from penstock.pipeline.following.type_watch import remember_types
from penstock.pipeline.letters.box import LetterBox, open_letter_box
from penstock.pipeline.membership import load_memberships, save_memberships
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.orders import change_orders, load_orders, with_orders
from penstock.pipeline.retries import PIPELINE, RetryLog
from penstock.pipeline.roster import Roster
from penstock.pipeline.schema_policy import SchemaRule
from penstock.pipeline.shared_health import SharedHealth, is_spark_alive, spark_lost
from penstock.pipeline.sides import begins_at, check_fit, side_of
from penstock.pipeline.sinks import open_sink
from penstock.pipeline.snapshots.background import BackgroundSnapshots, Door
from penstock.pipeline.snapshots.coordinator import SnapshotCoordinator
from penstock.pipeline.snapshots.copy import CopyLetters
from penstock.pipeline.snapshots.executors import SparkSnapshotExecutors
from penstock.pipeline.snapshots.progress import load_all_progress
from penstock.pipeline.snapshots.shadows import Shadows
from penstock.pipeline.snapshots.state import SnapshotStore
from penstock.pipeline.standing import over_holes
from penstock.pipeline.states import TableState, TableStatus
from penstock.pipeline.tables import Tables, await_tables, check_selected, inspect_pipeline, pause_ordered, select_tables
from penstock.pipeline.transforming import transforming
from penstock.pipeline.upkeep import Jobs, TableUpkeep, forgetting
from penstock.position import Position
from penstock.postgres.attributes import CatalogShape, inspect_shape
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.connection import connect
from penstock.postgres.ddl_trigger import ensure_trigger, load_key
from penstock.postgres.timeline import SystemIdentity
from penstock.retry import Backoff
from penstock.schema import TableName
from penstock.sinks.base import SHADOWS, Sink
from penstock.sinks.layout import Mode
from penstock.spark.control import CONTROL_FORMAT, ControlSource
from penstock.spark.lock import jvm_lock
from penstock.spool.layout import SpoolLayout
from penstock.transforms.transform import Transform

_LOCK_SECONDS = 60.0
_POLL_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 30.0
_ONCE_QUIET_SECONDS = 0.2
_SETTLED_SECONDS = 5.0
"""A run that lasts so long after an interruption is no longer interrupted."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended: what was recorded, and the tables as they stand."""

    position: Position
    tables: dict[str, TableStatus]

    @property
    def failed(self) -> dict[str, TableStatus]:
        return {name: status for name, status in self.tables.items() if status.state is TableState.FAILED}


class Pipeline:
    """One configuration on one Spark session. `run` may be called once; `stop` from any thread, or from a signal handler."""

    def __init__(
        self,
        config: PipelineConfig,
        spark: SparkSession,
        observer: PipelineObserver | None = None,
        reload: Callable[[], PipelineConfig] | None = None,
    ) -> None:
        """`reload` reads the configuration again, and is called all the while: tables that it names later join, others leave."""
        self._config = config
        self._spark = spark
        self._observer = observer or PipelineObserver()
        self._address = config.source.address()
        self._root = config.sink.root
        self._roster: Roster | None = None
        self._sink = transforming(open_sink(config, spark, self._mode_of), spark, config.state, self._transform_of)
        self._shadow_root = self._root / SHADOWS / config.pipeline
        self._reload = reload
        self._unfinished = SnapshotStore(self._root, config.pipeline)
        self._stopping = threading.Event()
        self._applier: EpochApplier | None = None
        self._acts: dict[TableName, Mapping[TableName, str]] = {}
        self._capture = CaptureCompanion(config)
        self._trouble: str | None = None
        self._retries = RetryLog(config.state)

    def _mode_of(self, table: TableName) -> Mode:
        """As the configuration has it now."""
        return (self._config if self._roster is None else self._roster.config).mode_of(table)

    def _transform_of(self, table: TableName) -> Transform | None:
        return self._config.transform_of(table)

    def stop(self) -> None:
        """Ask the run to end. The epoch that is being applied is finished first."""
        self._stopping.set()

    @property
    def position(self) -> Position:
        """What is recorded so far: every streaming table holds everything up to here."""
        return self._applier.position if self._applier is not None else Position.ZERO

    @property
    def statuses(self) -> Mapping[TableName, TableStatus]:
        """The tables as they stand at this moment."""
        return self._applier.statuses if self._applier is not None else {}

    def run(self, *, once: bool = False) -> RunResult:
        """Mirror until stopped. With `once`: until everything that had committed at the start is in the targets."""
        try:
            return self._run(once=once)
        except Exception as error:
            if isinstance(error, PenstockError) or is_spark_alive(self._spark):
                raise
            raise spark_lost() from error

    def _run(self, *, once: bool) -> RunResult:
        """Start again after errors that pass. What follows an error of one table is decided elsewhere (`error_policy`)."""
        reader = SpoolLayout(self._config.spool).consumer_lock(self._config.pipeline)
        with (
            jvm_lock(self._spark, self._config.lock, _LOCK_SECONDS),
            jvm_lock(self._spark, reader, _LOCK_SECONDS),
            self._retries.running(),
            closing(self._sink),
        ):
            backoff = Backoff(longest_seconds=_LONGEST_PAUSE_SECONDS)
            goal: Position | None = None
            while True:
                started = time.monotonic()
                try:
                    if once and goal is None:
                        goal = self._find_goal()
                    if not once and not self._await_tables():
                        return RunResult(Position.ZERO, {})
                    return self._attempt(goal, once=once)
                except PenstockError as error:
                    never_connected = once and goal is None
                    if not self._may_pass(error) or self._stopping.is_set() or never_connected:
                        raise
                    if time.monotonic() - started > _LONGEST_PAUSE_SECONDS:
                        backoff.reset()
                    pause = backoff.fail()
                    self._retries.note(PIPELINE, error, backoff.failures, pause)
                    self._observer.interrupted(str(error), pause)
                    self._stopping.wait(pause)

    def _await_tables(self) -> bool:
        """Whether there are tables to mirror by now; False if the run is stopped before."""
        with connect(self._address) as connection:
            check_fit(self._config, connection)
        found = await_tables(self._reloaded, lambda reason: self._observer.interrupted(reason, 0.0), self._stopping.wait)
        self._config = found or self._config
        return found is not None

    def _reloaded(self) -> PipelineConfig:
        """With the tables that the file names by now. A file that cannot be read changes nothing."""
        with suppress(ConfigError):
            return self._config if self._reload is None else self._config.model_copy(update={"tables": self._reload().tables})
        return self._config

    def _may_pass(self, error: PenstockError) -> bool:
        """A capture of its own that has failed is waited for: it is started again, or not, by somebody else."""
        return error.recovery is Recovery.RETRY or (isinstance(error, CaptureFailedError) and self._capture.is_separate)

    def _find_goal(self) -> Position | None:
        with connect(self._address) as connection:
            return side_of(self._config).goal(connection)

    def _attempt(self, goal: Position | None, *, once: bool) -> RunResult:
        """From looking around to the end of the stream."""
        self._capture.check()
        system = side_of(self._config).identify()
        self._sink.drop_shadows()
        shutil.rmtree(self._shadow_root, ignore_errors=True)
        follower = Follower(self._rule, self._inspect)
        letters = open_letter_box(self._spark, lambda: self._config, self._mode_of)
        shadows = Shadows(self._sink, self._observer, self._renewed, follower, letters, spool=self._config.spool, retries=self._retries)
        applier = EpochApplier(
            self._sink,
            EpochLog(self._root, self._config.pipeline),
            self._config.spool,
            consumer=self._config.pipeline,
            system=str(system),
            observer=self._observer,
            types=self._config.type_policy,
            shadows=shadows,
            follower=follower,
            letters=letters,
            on_anew=self._order_anew,
            check_shared=SharedHealth(self._spark, self._root, self._address).check,
        )
        tables = self._prepare(applier, system)
        if once and goal is None:
            goal = self._find_goal()
        applier.adopt(tables.targets, tables.statuses, self._begun(tables))
        for name in tables.awaiting:
            applier.await_copy(name)
        applier.notice(Look(tables.schemas, tables.seen_at, tables.gone))
        self._applier = applier
        if (tables.capturable or load_orders(self._config.state).resync) and not self._stopping.is_set():
            self._stream(applier, tables, shadows, letters, goal)
        return RunResult(applier.position, {str(name): status for name, status in applier.statuses.items()})

    def _prepare(self, applier: EpochApplier, system: SystemIdentity) -> Tables:
        """Everything that can be wrong is found here, before the first row."""
        config, last = self._config, applier.last
        side = side_of(config)
        with connect(self._address) as connection:
            check_fit(config, connection)
            selection = select_tables(connection, config, seen=side.seen)
            tables = inspect_pipeline(selection, self._sink, last, config.schema_rule, config.existing_policy)
            keep_gone(connection, tables, self._sink, last, with_orders(config))
            pause_ordered(tables, load_orders(config.state))
            side.check_origin(connection, tables, last, system)
            for danger in side.inspect_dangers(connection):
                self._observer.warned(danger)
            check_selected(selection, self._address.describe())
            remember_types(connection, config.state, selection.schemas)
        for name in tables.returned:
            self._sink.disown(name)
        if config.source.event_trigger:
            self._ensure_trigger(applier)
        if tables.capturable:
            side.ensure(tables, self._sink.describe, is_alone=True, on_wait=self._tell_wait)
        take_over(tables, self._sink, config.state)
        await_copies(tables, self._sink, load_orders(config.state))
        for name, status in tables.statuses.items():
            if status.state is TableState.FAILED:
                self._observer.table_failed(name, status)
        return tables

    def _ensure_trigger(self, applier: EpochApplier) -> None:
        """Without it the pipeline runs as well, and resyncs tables more often."""
        try:
            with connect(self._address) as connection:
                ensure_trigger(connection)
                applier.hints.key = load_key(connection)
        except PrivilegeError as error:
            self._observer.interrupted(f"{error.message}; penstock check prints it", 0.0)

    def _begun(self, tables: Tables) -> dict[TableName, Position]:
        """Tables that a former run did not finish copying need what changed since their first fence. What is finished is forgotten."""
        found = load_all_progress(self._root, self._config.pipeline)
        for name in found.keys() & tables.filled.keys():
            self._unfinished.forget(name)
        waiting = {table.name for table in tables.pending}
        begun = {name: progress.fence for name, progress in found.items() if name in waiting}
        if begun:
            with connect(self._address) as connection:
                gone = over_holes(begins_at(self._config, connection), self._config, begun)
            for name in gone:
                self._unfinished.forget(name)
                del begun[name]
        return begun

    def _renewed(self, name: TableName, is_done: bool) -> None:
        act = self._acts.pop(name, {})
        if is_done:
            save_memberships(self._config.state, {**load_memberships(self._config.state), **act})
        change_orders(self._config.state, lambda orders: orders.renewed(name))
        if not is_done and self._applier is not None:
            self._applier.give_up_copy(name, "see what was said of it before")

    def _order_anew(self, name: TableName, reason: str) -> None:
        """As if somebody had said `penstock tables resync`."""
        self._observer.interrupted(f"{name} is copied anew: {reason}", 0.0)
        change_orders(self._config.state, lambda orders: orders.renew([name]))

    def _rule(self, name: TableName) -> SchemaRule:
        """By the configuration as it is by then."""
        return self._config.schema_rule(name)

    def _inspect(self, table: CatalogTable) -> CatalogShape:
        with connect(self._address) as connection:
            return inspect_shape(connection, table, self._config.type_policy, self._config.published_by)

    def _tell_wait(self, blockers: Sequence[OpenTransaction]) -> None:
        """The creation of a slot, which every snapshot needs too, waits for transactions that were open before it."""
        reason = f"a slot is created once these have ended: {'; '.join(each.describe() for each in blockers)}"
        if blockers and reason.partition(",")[0] != (self._trouble or "").partition(",")[0]:
            self._observer.interrupted(reason, 0.0)
            self._trouble = reason

    def _copies(self, sink: Sink, door: Door, unfinished: SnapshotStore, letters: CopyLetters | None) -> BackgroundSnapshots:
        side = side_of(self._config)
        coordinator = SnapshotCoordinator(
            SparkSnapshotExecutors(self._spark),
            self._address,
            sink,
            self._observer,
            self._config.snapshot_chunk_bytes,
            self._config.type_policy,
            side.publication,
            store=unfinished,
            spool=self._config.spool,
            slot=side.slot,
            export=side.export,
            is_by_looks=side.is_by_looks,
            max_hold_seconds=self._config.max_snapshot_hold_seconds,
            on_wait=self._tell_wait,
            letters=letters,
            retries=self._retries,
        )
        return BackgroundSnapshots(coordinator, door, self._observer)

    def _stream(self, applier: EpochApplier, tables: Tables, shadows: Shadows, letters: LetterBox, goal: Position | None) -> None:
        with ExitStack() as ending:
            snapshots = self._start_snapshots(applier, tables, letters)
            renewals: list[BackgroundSnapshots] = []
            stop = partial(_stop_all, snapshots, renewals)
            ending.callback(stop)
            query = self._start_query(applier, goal)
            ending.callback(self._capture.settle)
            ending.callback(query.stop)
            ending.callback(stop)  # what is being copied may wait for the stream, so it is asked first

            renew = partial(self._renew, applier, shadows, renewals)
            roster = Roster(
                self._config, self._sink, applier, snapshots, renew, shadows.abandon, self._observer, self._reload, self._retries
            )
            roster.part_with(applier.last.tables if applier.last is not None else (), tables.sources)
            self._roster = roster
            roster.keep()
            upkeep = self._upkeep(applier, letters)
            ending.callback(upkeep.stop)
            upkeep.start()
            copying, settled_at = True, time.monotonic() + _SETTLED_SECONDS
            while not self._stopping.is_set() and not (_is_reached(goal, applier, shadows) and roster.is_settled):
                self._tell_trouble()
                if goal is not None:
                    self._capture.check_patience()
                for each in (snapshots, *renewals):
                    each.check()
                renewals[:] = [each for each in renewals if not each.is_over]  # with its sink, and the sessions of that
                if time.monotonic() >= settled_at:
                    self._retries.clear(PIPELINE)
                upkeep.check()
                applier.settle()
                roster.keep()
                self._config = roster.config  # an attempt after this one begins with the tables that the file names by now
                if copying and not applier.is_copying:
                    copying = False
                    self._observer.streaming_started()
                if not query.isActive:
                    await_end(query)
                    break
                self._stopping.wait(_POLL_SECONDS)
            upkeep.stop(finish=goal is not None and not self._stopping.is_set())

    def _start_snapshots(self, applier: EpochApplier, tables: Tables, letters: LetterBox) -> BackgroundSnapshots:
        snapshots = self._copies(self._sink, applier, self._unfinished, letters)
        for table in tables.pending:
            applier.expect(table.name)
        if tables.pending:
            snapshots.start(tables.pending)
        return snapshots

    def _upkeep(self, applier: EpochApplier, letters: LetterBox) -> TableUpkeep:
        return TableUpkeep(
            self._sink,
            lambda: applier.statuses,
            self._config.maintenance.limit_seconds,
            Jobs(self._spark),
            forgetting(self._config, letters.store),
            retries=self._retries,
            give_up=applier.give_up,
        )

    def _renew(
        self,
        applier: EpochApplier,
        shadows: Shadows,
        renewals: list[BackgroundSnapshots],
        table: CatalogTable,
        act: Mapping[TableName, str],
    ) -> None:
        """Begin to copy a table anew, beside the one that is there."""
        if shadows.may_begin(table.name):
            self._acts[table.name] = act
            copy = uuid4().hex
            sink = self._sink.shadow(copy)
            shadows.begin(table.name, sink, applier.position)
            unfinished = SnapshotStore(self._shadow_root / copy, self._config.pipeline)
            renewals.append(self._copies(sink, shadows, unfinished, shadows.copy_letters))
            renewals[-1].start([table])

    def _tell_trouble(self) -> None:
        """The capture lives in another process and tries again by itself; say why nothing comes."""
        reason = self._capture.trouble()
        if reason is not None and reason != self._trouble:
            self._observer.interrupted(reason, 0.0)
        self._trouble = reason

    def _start_query(self, applier: EpochApplier, goal: Position | None) -> StreamingQuery:
        config = self._config
        quiet = None if goal is None else _ONCE_QUIET_SECONDS
        options = config.capture_settings(quiet_seconds=quiet).to_options()
        checkpoint = config.checkpoint

        def apply(_: DataFrame, batch: int) -> None:
            applier.apply(planned_end(checkpoint, batch))

        self._spark.dataSource.register(ControlSource)
        stream = self._spark.readStream.format(CONTROL_FORMAT).options(**options)
        stream = stream.option("maxRowsPerBatch", str(config.max_rows_per_epoch)).option("run", uuid4().hex)
        stream = stream.option("barriers", str(config.barriers))
        writer = stream.load().writeStream.foreachBatch(apply).queryName(f"penstock {config.pipeline}")
        trigger = f"{int(config.trigger_seconds * 1000)} milliseconds"
        return writer.option("checkpointLocation", str(checkpoint)).trigger(processingTime=trigger).start()


def _is_reached(goal: Position | None, applier: EpochApplier, shadows: Shadows) -> bool:
    return goal is not None and applier.position >= goal and applier.is_level and not shadows.is_busy and not applier.is_replaying


def _stop_all(snapshots: BackgroundSnapshots, renewals: list[BackgroundSnapshots]) -> None:
    for each in (snapshots, *renewals):
        each.stop()
