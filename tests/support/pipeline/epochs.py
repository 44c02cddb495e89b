"""The collaborators of the epoch loop, built as a pipeline builds them, with tasks that run in the test's own
thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.config.policies import RefusedPolicy, SchemaRule
from penstock.pipeline.applier import EpochApplier
from penstock.pipeline.dead_letters.queue import DeadLetterQueue
from penstock.pipeline.dead_letters.store import DeadLetterStore
from penstock.pipeline.epoch_log import EpochLog
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.retries import RetryLog
from penstock.pipeline.schema_changes.tracker import SchemaTracker
from penstock.pipeline.snapshots.resync import Resyncs
from penstock.pipeline.table_lifecycle import TableLifecycle
from penstock.position import Position
from penstock.postgres.catalog import CatalogShape, CatalogTable
from penstock.schema import TableName
from penstock.sinks.base import Sink
from penstock.sinks.modes import Mode
from penstock.spool.reader import SpoolReader
from tests.support.delta_tables import InlineExecutors


def no_catalog(table: CatalogTable) -> CatalogShape:
    raise AssertionError(f"nothing about {table.name} is new")


def open_tracker(rule: SchemaRule | None = None) -> SchemaTracker:
    """A tracker for changes without a new schema."""
    return SchemaTracker(lambda _: rule or SchemaRule(), no_catalog)


def open_dead_letters(
    root: Path, pipeline: str = "p", policy: RefusedPolicy = RefusedPolicy.STOP, mode: Mode = Mode.MIRROR
) -> DeadLetterQueue:
    """A queue in the lake below `root`."""
    return DeadLetterQueue(
        DeadLetterStore(root / "lake", pipeline),
        InlineExecutors(),
        policy_of=lambda _: policy,
        mode_of=lambda _: mode,
        reject_inexact=False,
    )


@dataclass(frozen=True)
class Epochs:
    applier: EpochApplier
    tables: TableLifecycle
    resyncs: Resyncs
    tracker: SchemaTracker
    dead_letters: DeadLetterQueue


def open_resyncs(
    sink: Sink,
    root: Path,
    *,
    tracker: SchemaTracker | None = None,
    dead_letters: DeadLetterQueue | None = None,
    on_done: Callable[[TableName, str | None], None] = lambda _name, _failure: None,
) -> Resyncs:
    return Resyncs(
        sink,
        PipelineObserver(),
        on_done,
        tracker or open_tracker(),
        dead_letters or open_dead_letters(root),
        spool=root / "spool",
        retries=RetryLog(),
    )


def open_epochs(
    sink: Sink,
    root: Path,
    *,
    pipeline: str = "p",
    log: EpochLog | None = None,
    tracker: SchemaTracker | None = None,
    dead_letters: DeadLetterQueue | None = None,
    on_done: Callable[[TableName, str | None], None] = lambda _name, _failure: None,
    order_resync: Callable[[TableName, str], None] = lambda _name, _reason: None,
) -> Epochs:
    """Epochs of the spool below `root`, recorded in the lake below it, or in `log`."""
    log = log or EpochLog(root / "lake", pipeline)
    tracker = tracker or open_tracker()
    dead_letters = dead_letters or open_dead_letters(root, pipeline)
    observer, last = PipelineObserver(), log.last()
    resyncs = open_resyncs(sink, root, tracker=tracker, dead_letters=dead_letters, on_done=on_done)
    tables = TableLifecycle(
        sink,
        root / "spool",
        pipeline,
        resyncs=resyncs,
        dead_letters=dead_letters,
        observer=observer,
        order_resync=order_resync,
        recorded=Position.ZERO if last is None else last.position,
    )
    applier = EpochApplier(
        sink,
        log,
        tables,
        SpoolReader(root / "spool"),
        system="1/1",
        observer=observer,
        tracker=tracker,
        dead_letters=dead_letters,
        resyncs=resyncs,
        check_shared=lambda: None,
    )
    return Epochs(applier, tables, resyncs, tracker, dead_letters)
