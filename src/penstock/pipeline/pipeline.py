"""`Pipeline`: keep target tables equal to their source, from one configuration.

A run first takes the pipeline's lock, inspects source and targets, and creates publication and slot if they
are missing. Then a streaming query over `ControlSource` triggers epochs, and its `foreachBatch` applies them.
Background threads copy new tables at the same time. Spark's checkpoint only triggers epochs; the applied
positions are in the targets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

from pyspark.sql import SparkSession

from penstock import storage
from penstock.config.model import PipelineConfig
from penstock.config.policies import SchemaRule
from penstock.errors import CaptureFailedError, ConfigError, PenstockError, PrivilegeError, Recovery
from penstock.lag import OpenTransaction
from penstock.pipeline.applier import EpochApplier
from penstock.pipeline.control_query import SharedHealth, await_end, is_spark_alive, spark_lost, start_query
from penstock.pipeline.dead_letters.queue import DeadLetterQueue, open_dead_letter_queue
from penstock.pipeline.epoch_log import EpochLog
from penstock.pipeline.error_policy import UnreadableStarts
from penstock.pipeline.maintenance import Jobs, TableMaintenance, cleanup_jobs
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.retries import PIPELINE, RetryLog
from penstock.pipeline.schema_changes.catalog_changes import include_dropped, remember_types
from penstock.pipeline.schema_changes.tracker import CatalogSnapshot, SchemaTracker
from penstock.pipeline.sink_factory import open_sink
from penstock.pipeline.snapshots.background import BackgroundSnapshots, SnapshotListener
from penstock.pipeline.snapshots.coordinator import SnapshotCoordinator
from penstock.pipeline.snapshots.copy import SnapshotDeadLetters
from penstock.pipeline.snapshots.executors import SparkSnapshotExecutors
from penstock.pipeline.snapshots.resync import ResyncListener, Resyncs
from penstock.pipeline.snapshots.state import SnapshotStore, load_all_progress
from penstock.pipeline.sources.adapter import source_adapter
from penstock.pipeline.sources.capture_process import CaptureMonitor
from penstock.pipeline.sources.resume_checks import over_holes, update_memberships
from penstock.pipeline.table_lifecycle import TableLifecycle
from penstock.pipeline.table_overrides import change_overrides, load_overrides, with_overrides
from penstock.pipeline.table_reconciler import TableReconciler, mark_adopted, take_over
from penstock.pipeline.table_selection import (
    await_tables,
    check_configuration,
    check_selected,
    inspect_pipeline,
    is_any_selected,
    select_tables,
)
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.pipeline.tables import Tables, pause_ordered
from penstock.pipeline.transform_sink import transforming
from penstock.position import Position
from penstock.postgres.catalog import CatalogShape, CatalogTable, inspect_shape
from penstock.postgres.connection import connect
from penstock.postgres.membership import Membership
from penstock.postgres.publication import ensure_trigger, load_key
from penstock.postgres.server import SystemIdentity
from penstock.retry import Backoff
from penstock.schema import TableName
from penstock.sinks.base import SHADOWS, Sink
from penstock.sinks.modes import Mode
from penstock.spark.session import jvm_lock
from penstock.spool.manifest import SpoolLayout
from penstock.spool.reader import SpoolReader
from penstock.transforms.transform import Transform

_LOCK_SECONDS = 60.0
_POLL_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 30.0
_SETTLED_SECONDS = 5.0
"""After the stream has run this long, the `RetryLog` entry of an earlier interruption is removed."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run: the recorded position, and the tables' states."""

    position: Position
    tables: dict[str, TableStatus]

    @property
    def failed(self) -> dict[str, TableStatus]:
        return {name: status for name, status in self.tables.items() if status.state is TableState.FAILED}


@dataclass(frozen=True, slots=True)
class _EpochParts:
    """The objects that each attempt of a run creates."""

    applier: EpochApplier
    resyncs: Resyncs
    dead_letters: DeadLetterQueue


class Pipeline:
    """One configuration on one Spark session.

    Call `run` only once. `stop` may be called from any thread, or from a signal handler.
    """

    def __init__(
        self,
        config: PipelineConfig,
        spark: SparkSession,
        observer: PipelineObserver | None = None,
        reload: Callable[[], PipelineConfig] | None = None,
    ) -> None:
        """`reload` reads the configuration again, and is called about once a second. Tables added to the
        configuration are added to the run, and tables removed from it are removed from the run.
        """
        self._config = config
        self._spark = spark
        self._observer = observer or PipelineObserver()
        self._address = config.source.address()
        self._root = config.sink.root
        self._reconciler: TableReconciler | None = None
        self._sink = transforming(
            open_sink(config, spark, self._mode_of), spark, config.state, self._transform_of
        )
        self._shadow_root = self._root / SHADOWS / config.pipeline
        self._reload = reload
        self._unfinished = SnapshotStore(self._root, config.pipeline)
        self._stopping = threading.Event()
        self._applier: EpochApplier | None = None
        self._acts: dict[TableName, Mapping[TableName, Membership]] = {}
        self._capture = CaptureMonitor(config)
        self._trouble: str | None = None
        self._retries = RetryLog(config.state)
        self._shared = SharedHealth(spark, self._root, self._address)
        self._unreadable_starts = UnreadableStarts()

    def _mode_of(self, table: TableName) -> Mode:
        """The table mode in the current configuration."""
        return (self._config if self._reconciler is None else self._reconciler.config).mode_of(table)

    def _transform_of(self, table: TableName) -> Transform | None:
        return self._config.transform_of(table)

    def stop(self) -> None:
        """Ask the run to end, after the current epoch."""
        self._stopping.set()

    @property
    def position(self) -> Position:
        """The recorded position: every streaming table holds all changes up to it."""
        return self._applier.position if self._applier is not None else Position.ZERO

    @property
    def statuses(self) -> Mapping[TableName, TableStatus]:
        """The current states of the tables."""
        return self._applier.tables.statuses if self._applier is not None else {}

    def run(self, *, once: bool = False) -> RunResult:
        """Run until `stop` is called; with `once`, until everything committed before the start is applied."""
        try:
            return self._run(once=once)
        except Exception as error:
            if isinstance(error, PenstockError) or is_spark_alive(self._spark):
                raise
            raise spark_lost() from error

    def _run(self, *, once: bool) -> RunResult:
        """Repeat the attempt after transient errors. An error of a single table does not end the attempt;
        `error_policy` handles it.
        """
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
        """Wait until the configuration names a table, or a pattern matches one. Returns False if the run is
        stopped while it waits.
        """
        with connect(self._address) as connection:
            source_adapter(self._config).check_server(connection)
            if self._reconciler is not None and is_any_selected(connection, self._config):
                return True  # the reconciler reads the file again, and rejects changes that discard rows
        found = await_tables(self._reloaded, self._observer.announced, self._stopping.wait)
        self._config = found or self._config
        return found is not None

    def _reloaded(self) -> PipelineConfig:
        """Return the configuration with the tables that the file has now. Returns it unchanged if the file is
        not valid.
        """
        with suppress(ConfigError):
            return (
                self._config
                if self._reload is None
                else self._config.model_copy(update={"tables": self._reload().tables})
            )
        return self._config

    def _may_pass(self, error: PenstockError) -> bool:
        """Whether to retry after the error. A separate capture that failed may be restarted by its
        supervisor.
        """
        return error.recovery is Recovery.RETRY or (
            isinstance(error, CaptureFailedError) and self._capture.is_separate
        )

    def _find_goal(self) -> Position | None:
        with connect(self._address) as connection:
            return source_adapter(self._config).goal(connection)

    def _attempt(self, goal: Position | None, *, once: bool) -> RunResult:
        """Make one attempt, from start-up to the end of the stream."""
        self._capture.check()
        system = source_adapter(self._config).identify()
        self._sink.drop_shadows()
        storage.discard_tree(self._shadow_root)
        parts = self._open_applier(str(system))
        applier, running = parts.applier, parts.applier.tables
        tables = self._prepare(applier, system)
        if once and goal is None:
            goal = self._find_goal()
        running.start(tables.targets, tables.statuses, self._unfinished_fences(tables))
        for name in tables.adopted:
            running.add_adopted(name)
        applier.observe_catalog(CatalogSnapshot(tables.schemas, tables.seen_at, tables.gone))
        self._applier = applier
        if (tables.capturable or load_overrides(self._config.state).resync) and not self._stopping.is_set():
            self._stream(parts, tables, goal)
        elif tables.unreadable:
            applier.record_states()
        return RunResult(applier.position, {str(name): status for name, status in running.statuses.items()})

    def _open_applier(self, system: str) -> _EpochParts:
        config = self._config
        tracker = SchemaTracker(self._rule, self._inspect)
        dead_letters = open_dead_letter_queue(self._spark, lambda: self._config, self._mode_of)
        resyncs = Resyncs(
            self._sink,
            self._observer,
            self._resync_ended,
            tracker,
            dead_letters,
            spool=config.spool,
            retries=self._retries,
        )
        log = EpochLog(self._root, config.pipeline)
        last = log.last()
        tables = TableLifecycle(
            self._sink,
            config.spool,
            config.pipeline,
            resyncs=resyncs,
            dead_letters=dead_letters,
            observer=self._observer,
            order_resync=self._order_resync,
            recorded=Position.ZERO if last is None else last.position,
        )
        applier = EpochApplier(
            self._sink,
            log,
            tables,
            SpoolReader(config.spool),
            system=system,
            observer=self._observer,
            tracker=tracker,
            dead_letters=dead_letters,
            resyncs=resyncs,
            check_shared=self._shared.check,
        )
        return _EpochParts(applier, resyncs, dead_letters)

    def _prepare(self, applier: EpochApplier, system: SystemIdentity) -> Tables:
        """Inspect source and targets, provision the capture, and return the tables with their states. Every
        problem is reported before the first row is read.
        """
        config, last = self._config, applier.last
        source = source_adapter(config)
        with connect(self._address) as connection:
            source.check_server(connection)
            selection = select_tables(connection, config, seen=source.seen)
            self._unreadable_starts.begin()
            tables = inspect_pipeline(
                selection,
                self._sink,
                last,
                config.schema_rule,
                config.existing_policy,
                on_none_readable=self._none_readable,
            )
            check_configuration(tables, load_overrides(config.state).resync)
            include_dropped(connection, tables, self._sink, last, with_overrides(config))
            pause_ordered(tables, load_overrides(config.state))
            source.check_origin(connection, tables, last, system)
            for risk in source.inspect_risks(connection):
                self._observer.warned(risk)
            check_selected(selection, self._address.describe())
            remember_types(connection, config.state, selection.schemas)
        for name in tables.returned:
            self._sink.release_ownership(name)
        if config.source.event_trigger:
            self._ensure_trigger(applier)
        if tables.capturable:
            source.ensure(tables, self._sink.describe, is_alone=True, on_wait=self._announce_wait)
        take_over(tables, self._sink, config.state)
        mark_adopted(tables, self._sink, load_overrides(config.state))
        for name, status in tables.statuses.items():
            if status.state is TableState.FAILED:
                self._observer.table_failed(name, status)
        return tables

    def _none_readable(self, errors: Mapping[TableName, PenstockError]) -> None:
        """Raise the first error to start the run again, or return to fail the tables. Called if no target can
        be read.
        """
        self._shared.check()
        if self._unreadable_starts.may_retry(errors, load_overrides(self._config.state).resync):
            raise next(iter(errors.values()))

    def _ensure_trigger(self, applier: EpochApplier) -> None:
        """Create the event trigger if possible. Without it, more schema changes need a resync."""
        try:
            with connect(self._address) as connection:
                ensure_trigger(connection)
                applier.hints.key = load_key(connection)
        except PrivilegeError as error:
            self._observer.announced(f"{error.message}; penstock check prints the required SQL")

    def _unfinished_fences(self, tables: Tables) -> dict[TableName, Position]:
        """Return the first fences of snapshots that an earlier run did not finish.

        Deletes the stored progress of all other snapshots. These are finished, or their table was removed, or
        changes after their fence are lost.
        """
        found = load_all_progress(self._root, self._config.pipeline)
        for name in (
            found.keys() & tables.filled.keys() | found.keys() - tables.statuses.keys() | tables.unpublished
        ):
            self._unfinished.forget(name)
        waiting = {table.name for table in tables.pending if table.name not in tables.unpublished}
        begun = {name: progress.fence for name, progress in found.items() if name in waiting}
        if begun:
            with connect(self._address) as connection:
                gone = over_holes(source_adapter(self._config).begins_at(connection), self._config, begun)
            for name in gone:
                self._unfinished.forget(name)
                del begun[name]
        return begun

    def _resync_ended(self, name: TableName, failure: str | None) -> None:
        act = self._acts.pop(name, {})
        if failure is None:
            update_memberships(self._config.state, act)
        change_overrides(self._config.state, lambda orders: orders.clear_resync(name))
        if failure is not None and self._applier is not None:
            self._applier.tables.resync_failed(name, failure)

    def _order_resync(self, name: TableName, reason: str) -> None:
        """Order a resync, as `penstock tables resync` does."""
        self._observer.announced(f"{name} is resynced: {reason}")
        change_overrides(self._config.state, lambda orders: orders.request_resync([name]))

    def _rule(self, name: TableName) -> SchemaRule:
        """The schema rule in the current configuration."""
        return self._config.schema_rule(name)

    def _inspect(self, table: CatalogTable) -> CatalogShape:
        with connect(self._address) as connection:
            return inspect_shape(connection, table, self._config.type_policy, self._config.published_by)

    def _announce_wait(self, blockers: Sequence[OpenTransaction]) -> None:
        """Announce the open transactions that delay the creation of a slot. Every snapshot creates a slot."""
        reason = (
            f"a slot is created once these transactions have ended: "
            f"{'; '.join(each.describe() for each in blockers)}"
        )
        if blockers and reason.partition(",")[0] != (self._trouble or "").partition(",")[0]:
            self._observer.announced(reason)
            self._trouble = reason

    def _snapshots(
        self,
        sink: Sink,
        listener: SnapshotListener,
        unfinished: SnapshotStore,
        dead_letters: SnapshotDeadLetters,
    ) -> BackgroundSnapshots:
        source = source_adapter(self._config)
        coordinator = SnapshotCoordinator(
            SparkSnapshotExecutors(self._spark),
            self._address,
            sink,
            self._observer,
            self._config.snapshot_chunk_bytes,
            self._config.type_policy,
            source.publication,
            store=unfinished,
            spool=self._config.spool,
            slot=source.slot,
            export=source.export,
            positions_are_polls=source.positions_are_polls,
            max_hold_seconds=self._config.max_snapshot_hold_seconds,
            on_wait=self._announce_wait,
            dead_letters=dead_letters,
            retries=self._retries,
        )
        return BackgroundSnapshots(coordinator, listener, self._observer)

    def _stream(self, parts: _EpochParts, tables: Tables, goal: Position | None) -> None:
        applier, running = parts.applier, parts.applier.tables
        with ExitStack() as ending:
            snapshots = self._start_snapshots(parts, tables)
            resyncs: list[BackgroundSnapshots] = []
            stop = partial(_stop_all, snapshots, resyncs)
            ending.callback(stop)
            query = start_query(self._spark, self._config, applier.apply, once=goal is not None)
            ending.callback(self._capture.settle)
            ending.callback(query.stop)
            ending.callback(stop)  # runs before query.stop, because a snapshot may wait for the query

            resync = partial(self._start_resync, parts, resyncs)
            reconciler = TableReconciler(
                self._config,
                self._sink,
                applier,
                snapshots,
                resync,
                parts.resyncs.abandon,
                self._observer,
                self._reload,
                self._retries,
            )
            reconciler.remove_deselected(
                applier.last.tables if applier.last is not None else (), tables.sources
            )
            self._reconciler = reconciler
            reconciler.reconcile()
            maintenance = self._maintenance(parts)
            ending.callback(maintenance.stop)
            maintenance.start()
            copying, settled_at = True, time.monotonic() + _SETTLED_SECONDS
            while not self._stopping.is_set() and not (_is_reached(goal, parts) and reconciler.is_settled):
                self._announce_capture_trouble()
                if goal is not None:
                    self._capture.check_patience()
                for each in (snapshots, *resyncs):
                    each.check()
                resyncs[:] = [
                    each for each in resyncs if not each.is_over
                ]  # frees its sink and Spark sessions
                if time.monotonic() >= settled_at:
                    self._retries.clear(PIPELINE)
                maintenance.check()
                applier.apply_if_idle()
                reconciler.reconcile()
                self._config = reconciler.config  # the next attempt starts with the current tables
                if copying and not running.is_copying:
                    copying = False
                    self._observer.streaming_started()
                if not query.isActive:
                    await_end(query)
                    break
                self._stopping.wait(_POLL_SECONDS)
            maintenance.stop(finish=goal is not None and not self._stopping.is_set())

    def _start_snapshots(self, parts: _EpochParts, tables: Tables) -> BackgroundSnapshots:
        running = parts.applier.tables
        snapshots = self._snapshots(self._sink, running, self._unfinished, parts.dead_letters)
        for table in tables.pending:
            running.add_pending(table.name)
        if tables.pending:
            snapshots.start(tables.pending)
        return snapshots

    def _maintenance(self, parts: _EpochParts) -> TableMaintenance:
        running = parts.applier.tables
        return TableMaintenance(
            self._sink,
            lambda: running.statuses,
            self._config.maintenance.limit_seconds,
            Jobs(self._spark),
            cleanup_jobs(self._config, parts.dead_letters.store),
            retries=self._retries,
            give_up=running.request_failure,
        )

    def _start_resync(
        self,
        parts: _EpochParts,
        running: list[BackgroundSnapshots],
        table: CatalogTable,
        act: Mapping[TableName, Membership],
    ) -> None:
        """Copy a table again beside its target, unless a copy is in progress or waits for its retry."""
        resyncs = parts.resyncs
        if not resyncs.may_begin(table.name):
            return
        self._acts[table.name] = act
        copy = uuid4().hex
        sink = self._sink.shadow(copy)
        resyncs.begin(table.name, sink, parts.applier.position)
        unfinished = SnapshotStore(self._shadow_root / copy, self._config.pipeline)
        listener = ResyncListener(resyncs, sink)
        running.append(self._snapshots(sink, listener, unfinished, resyncs.dead_letters))
        running[-1].start([table])

    def _announce_capture_trouble(self) -> None:
        """Announce each new reason why no changes arrive. The capture retries, so the run continues."""
        reason = self._capture.trouble()
        if reason is not None and reason != self._trouble:
            self._observer.announced(reason)
        self._trouble = reason


def _is_reached(goal: Position | None, parts: _EpochParts) -> bool:
    if goal is None or parts.applier.position < goal:
        return False
    return parts.applier.is_level and not parts.resyncs.is_busy and not parts.applier.is_replaying


def _stop_all(snapshots: BackgroundSnapshots, resyncs: list[BackgroundSnapshots]) -> None:
    for each in (snapshots, *resyncs):
        each.stop()
