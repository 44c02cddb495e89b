"""`DeadLetterQueue`: diverts rejected changes of an epoch before the target sees them, and replays dead
letters with an epoch.

For most epochs it is sufficient to check the counts in the spool (`ChangeCounts`). If values may be rejected,
or the table has open dead letters, an executor reads the changes before the sink does
(`dead_letters/task.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
from pyspark.sql import SparkSession

from penstock import storage
from penstock.config.model import PipelineConfig
from penstock.config.policies import RefusedPolicy
from penstock.errors import PenstockError, RowRefusedError, ValuesRefusedError, find_error
from penstock.pipeline.dead_letters.files import exclude
from penstock.pipeline.dead_letters.rejections import Name, Rejection
from penstock.pipeline.dead_letters.snapshot_rejections import (
    RejectedRows,
    SnapshotRejectionsTask,
    write_snapshot_rejections,
)
from penstock.pipeline.dead_letters.store import DeadLetterStore, PendingBatch
from penstock.pipeline.dead_letters.task import ScreeningReport, ScreeningTask, ask_screening, run_screening
from penstock.pipeline.table_overrides import change_overrides
from penstock.pipeline.transform_sink import SparkQueries
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import ChangedRows, Sink, TableChanges, Target, apply_in_steps, rewound_error
from penstock.sinks.executors import Executors, SparkExecutors
from penstock.sinks.modes import Layout, Mode
from penstock.sinks.slice_reader import slices_after
from penstock.spool.reader import FileSlice
from penstock.spool.rows import check_values
from penstock.transforms.spark_exchange import Queries
from penstock.transforms.transform import Transform


@contextmanager
def answered(
    task: ScreeningTask, executors: Executors, queries: Queries | None, directory: Path
) -> Iterator[ScreeningTask]:
    """Context manager: evaluate the Spark expressions of `task`, and yield the task with the results. The
    results are in files under `directory`, which are removed at the end of the block.
    """
    if all(fitted.query is None for fitted in task.fitted.values()):
        yield task
        return
    assert queries is not None, "a pipeline always has Spark queries"
    place = directory / uuid4().hex
    storage.ensure_directory(place)
    try:
        task = replace(task, answers=str(place))
        (asked,) = executors.run(ask_screening, [task])
        for number, fitted, path in asked:
            queries.answer(fitted, [path], str(place / str(number)))
        yield task
    finally:
        storage.discard_tree(place)


class DeadLetterQueue:
    """Diverts rejected rows of a pipeline, and replays them. Used by the worker threads of an epoch, one
    thread per table; the pipeline's main thread orders replays.
    """

    def __init__(
        self,
        store: DeadLetterStore,
        executors: Executors,
        *,
        policy_of: Callable[[TableName], RefusedPolicy],
        mode_of: Callable[[TableName], Mode],
        reject_inexact: bool,
        on_replayed: Callable[[TableName], None] = lambda _: None,
        transform_of: Callable[[TableName], Transform | None] = lambda _: None,
        queries: Queries | None = None,
    ) -> None:
        """`on_replayed` is called after a replay of a table's dead letters. The replay may have rejected some
        of them again.
        """
        self.store = store
        self._executors = executors
        self._policy_of = policy_of
        self._mode_of = mode_of
        self._reject_inexact = reject_inexact
        self._on_replayed = on_replayed
        self._transform_of = transform_of
        self._queries = queries
        self._asked = store.pending / "asked"
        self._pending_batches = {batch.table: batch for batch in store.pending_batches()}
        self._due: set[TableName] = set()
        self._replaying: set[TableName] = set()
        """Tables among `_due` whose dead letters are part of the current epoch. Tables may be added to `_due`
        during an epoch.
        """
        self._resync_files: dict[TableName, tuple[str, ...]] = {}
        """Files of dead letters of resync copies that are not swapped in yet."""
        self._lock = threading.Lock()

    def order_replay(self, table: TableName) -> None:
        """Request a replay: the table's next epoch also applies the table's open dead letters."""
        with self._lock:
            self._due.add(table)

    def is_due(self, table: TableName) -> bool:
        """Whether a replay of the table is requested and has something to do. If the table has no open dead
        letters, this method ends the replay at once.
        """
        if table not in self._due:
            return False
        if self.store.open_names(table) or table in self._pending_batches:
            return True
        self._replayed(table)
        return False

    @property
    def due(self) -> set[TableName]:
        return set(self._due)

    def begin(self, targets: Mapping[TableName, Target]) -> None:
        """Apply or discard the pending batches of the previous run. Called at the start of a run."""
        self.store.sweep()
        storage.discard_tree(self._asked)
        for table, batch in list(self._pending_batches.items()):
            if table in targets:
                self._settle(batch, counts=batch.counts_for(targets[table]))

    def supersede_all(self, table: TableName) -> None:
        """Supersede all dead letters of a table that is copied from the start."""
        self._pending_batches.pop(table, None)
        self.store.supersede_all(table)

    def include_due(
        self, target: Target, changes: TableChanges, end: Position, follows: Callable[[FileSlice], bool]
    ) -> TableChanges:
        """Return the changes with the dead letters in front of them, if a replay of the table is requested.
        Leaves out dead letters for which `follows` returns False, because they have another schema than the
        target.
        """
        if target.table not in self._due:
            return changes
        self._replaying.add(target.table)
        letters = [slice for slice in self.store.slices(target.table, end) if follows(slice)]
        counts = sum((slice.file.counts for slice in letters), changes.counts)
        return replace(changes, slices=(*letters, *changes.slices), counts=counts)

    def diverts(self, table: TableName) -> bool:
        return self._policy_of(table) is RefusedPolicy.DEAD_LETTERS

    def apply(self, sink: Sink, target: Target, changes: TableChanges, end: Position) -> None:
        """Apply the changes to the sink in one or more steps (see `apply_in_steps`). The rejected changes of
        a step become dead letters when the sink has committed the step.
        """
        apply_in_steps(sink, changes, end, lambda part, upto: self._apply(sink, target, part, upto))

    def _apply(self, sink: Sink, target: Target, changes: TableChanges, end: Position) -> None:
        """Apply one step. If the sink rejects rows, find these rows and repeat the step without them, until
        no row is rejected.
        """
        known: dict[Name, Rejection] | None = None
        while True:
            kept = self.screen(sink, target, changes, end, known)
            try:
                sink.apply(target, kept, end)
            except (RowRefusedError, ValuesRefusedError) as error:
                if not self.diverts(target.table):
                    raise
                found = sink.find_rejected(target, kept, end) if isinstance(error, ValuesRefusedError) else {}
                if known is not None and found.keys() <= known.keys():
                    raise
                known = {
                    **(known or {}),
                    **{name: Rejection(error.code, reason) for name, reason in found.items()},
                }
            else:
                self.applied(target.table)
                return

    def screen(
        self,
        sink: Sink,
        target: Target,
        changes: TableChanges,
        end: Position,
        known: Mapping[Name, Rejection] | None = None,
    ) -> TableChanges:
        """Return the changes without the rejected ones. When this method returns, the rejected changes are
        durable in a pending batch. Raises an error for a rejected change if the table's policy is `stop`.

        `known`: the rejections found so far, if the sink has rejected a write; otherwise None.
        """
        table = target.table
        replayed = [slice for slice in changes.slices if self._is_dead_letter(slice)]
        own = [slice for slice in changes.slices if not self._is_dead_letter(slice)]
        is_refused = self._is_suspicious(table, own) or known is not None
        if not (is_refused or self.store.open_names(table) or table in self._pending_batches):
            return changes
        reached = self._reached(sink, target)
        if reached >= end or not (is_refused or self.store.open_names(table)):
            return changes
        own = slices_after(own, reached)
        task = self._task(target, changes, own, replayed, end)
        report = self._run(replace(task, known={**task.known, **(known or {})}))
        screened = report.screened
        self._add_pending(
            PendingBatch(table, end, report.files, screened.superseded, frozenset(screened.replayed))
        )
        letters = [replace(slice, excluded=slice.excluded | screened.excluded) for slice in replayed]
        return replace(changes, slices=(*letters, *(exclude(slice, screened.excluded) for slice in own)))

    def screen_resync(self, main: Sink, shadow: Target, changes: TableChanges, end: Position) -> TableChanges:
        """Do what `screen` does, for a shadow that is about to be swapped in. The swap supersedes the earlier
        dead letters of the table.
        """
        table = shadow.table
        mine = main.load_target(table)
        if mine is not None and table in self._pending_batches:
            self._settle(self._pending_batches[table], counts=self._pending_batches[table].counts_for(mine))
        copied = self._resync_files.get(table, ())
        batch = PendingBatch(table, end, copied, is_resync=True, copy=shadow.copy)
        if changes.slices and (copied or self._is_suspicious(table, changes.slices)):
            letters = tuple(self.store.pending_slices(copied, end))
            report = self._run(
                replace(self._task(shadow, changes, list(changes.slices), [], end), letters=letters)
            )
            batch = replace(batch, files=(*copied, *report.files), superseded=report.screened.superseded)
            changes = replace(
                changes, slices=tuple(exclude(slice, report.screened.excluded) for slice in changes.slices)
            )
        if batch.files or self.store.open_names(table):
            self._add_pending(batch)
        return changes

    def is_clean(self, table: TableName, slices: Iterable[FileSlice]) -> bool:
        """Whether no row of the table's shadow was rejected, and no value of these changes can be
        rejected.
        """
        return not self._resync_files.get(table) and not self._is_suspicious(table, slices)

    def has_exclusions(self, table: TableName) -> bool:
        """Whether the table's pending batch rejects changes or supersedes dead letters, in addition to the
        rejected rows of the resync's copy.
        """
        batch = self._pending_batches.get(table)
        return batch is not None and (
            bool(batch.superseded) or not set(batch.files) <= set(self._resync_files.get(table, ()))
        )

    def applied(self, table: TableName) -> None:
        """Apply the table's pending batch. Called after the target has committed the epoch of this batch."""
        batch = self._pending_batches.get(table)
        if batch is not None:
            self._settle(batch, counts=True)
            self.store.compact(table)
        if table in self._replaying:
            self._replayed(table)

    def store_copied(
        self,
        schema: TableSchema,
        refused: Sequence[RejectedRows],
        fence: Position,
        changed: ChangedRows | None,
    ) -> None:
        """Store the rejected rows of a snapshot; they become dead letters when the target commits the
        copy.
        """
        files = self.write_copied(schema, refused, fence, changed)
        self._add_pending(PendingBatch(schema.name, fence, files, is_resync=True))

    def copied(self, table: TableName) -> None:
        batch = self._pending_batches.get(table)
        if batch is not None:
            self._settle(batch, counts=True)

    def abandon_copy(self, main: Sink, table: TableName) -> None:
        """Discard the rejected rows of a copy that was not swapped in. If the target shows that the swap was
        committed and only its reply was lost, the rows become dead letters instead.
        """
        self._resync_files.pop(table, None)
        batch = self._pending_batches.get(table)
        with suppress(PenstockError):  # after an error, the table's next epoch settles the batch
            mine = main.load_target(table) if batch is not None else None
            if batch is not None and mine is not None:
                self._settle(batch, counts=batch.counts_for(mine))

    def hold_for_resync(self, table: TableName, files: tuple[str, ...]) -> None:
        self._resync_files[table] = files

    def write_copied(
        self,
        schema: TableSchema,
        refused: Sequence[RejectedRows],
        fence: Position,
        changed: ChangedRows | None,
    ) -> tuple[str, ...]:
        if not refused:
            return ()
        table, stem = schema.name, self.store.new_stem(schema.name, fence)
        task = SnapshotRejectionsTask(
            table, schema, self._mode_of(table), fence, tuple(refused), changed, str(self.store.pending), stem
        )
        (stems,) = self._executors.run(write_snapshot_rejections, [task])
        return stems

    def _task(
        self,
        target: Target,
        changes: TableChanges,
        own: list[FileSlice],
        replayed: list[FileSlice],
        end: Position,
    ) -> ScreeningTask:
        table, evolution = target.table, changes.evolution
        columns, key = (
            (target.schema, target.key) if evolution is None else (evolution.columns, evolution.key)
        )
        transform = self._transform_of(table)
        if transform is not None and changes.slices:
            # the sink transforms the rows later, so they still have the source's columns here
            source = changes.slices[-1].file.schema
            columns, key = (
                pa.schema([pa.field(column.name, column.arrow_type) for column in source.columns]),
                source.key,
            )
        letters = self.store.slices(table, end)
        others = [slice.path for slice in letters if slice.path not in {each.path for each in replayed}]
        task = ScreeningTask(
            table,
            tuple(own),
            tuple(letters),
            Layout(columns, key, self._mode_of(table)),
            changes.views if transform is None else {},
            self._reject_inexact,
            bool(replayed),
            str(self.store.pending),
            self.store.new_stem(table, end),
            {name: _OF_OTHER_SHAPE for path in others for name in self.store.open_in(table, path)}
            if replayed
            else {},
        )
        if transform is None:
            return task
        return replace(
            task, fitted={slice.file.schema: transform.fit(slice.file.schema) for slice in task.applied}
        )

    def _run(self, task: ScreeningTask) -> ScreeningReport:
        with answered(task, self._executors, self._queries, self._asked) as ready:
            (report,) = self._executors.run(run_screening, [ready])
        first = next(iter(report.screened.refused.values()), None)
        if first is not None and self._policy_of(task.table) is RefusedPolicy.STOP:
            raise (find_error(first.code) or PenstockError)(
                f"a change of {task.table} is rejected: {first.reason}", hint=_GO_ON
            )
        return report

    def _add_pending(self, batch: PendingBatch) -> None:
        if not batch.is_empty:
            self.store.add_pending(batch)
            self._pending_batches[batch.table] = batch

    def _reached(self, sink: Sink, target: Target) -> Position:
        """Return the applied position that the target has now. Also settles the pending batch: applies it if
        the target has committed it, and otherwise discards it.
        """
        now = sink.load_target(target.table)
        if (
            now is None
            or now.applied is None
            or (target.applied is not None and now.applied < target.applied)
        ):
            raise rewound_error(
                sink.describe(target.table),
                target.table,
                None if now is None else now.applied,
                target.applied or Position.ZERO,
            )
        batch = self._pending_batches.get(target.table)
        if batch is not None:
            self._settle(batch, counts=batch.counts_for(now))
        return now.applied

    def _settle(self, batch: PendingBatch, *, counts: bool) -> None:
        copied = self._resync_files.get(batch.table, ())
        if not counts:  # keep the rejected rows of a completed copy for the next attempt to swap it in
            batch = replace(batch, files=tuple(stem for stem in batch.files if stem not in copied))
        elif batch.is_resync:
            self._resync_files.pop(batch.table, None)
        self.store.settle(batch, counts=counts)
        self._pending_batches.pop(batch.table, None)

    def _replayed(self, table: TableName) -> None:
        with self._lock:
            self._due.discard(table)
            self._replaying.discard(table)
        self._on_replayed(table)

    def _is_suspicious(self, table: TableName, slices: Iterable[FileSlice]) -> bool:
        """Whether the counts of the slices show values that may be rejected. With the policy `stop`, raises
        an error if they show a rejected value, and otherwise returns False.
        """
        if self._policy_of(table) is RefusedPolicy.STOP:
            check_values(table, slices, reject_inexact=self._reject_inexact)
            return False
        counts = [slice.file.counts for slice in slices]
        return any(each.unreadable or (self._reject_inexact and each.inexact) for each in counts)

    def _is_dead_letter(self, slice: FileSlice) -> bool:
        return slice.path.is_relative_to(self.store.directory.absolute())


@dataclass(frozen=True, slots=True)
class ResyncDeadLetters:
    """Takes the rejected rows of a shadow. The rows become the table's dead letters when the shadow is
    swapped in.
    """

    queue: DeadLetterQueue

    def diverts(self, table: TableName) -> bool:
        return self.queue.diverts(table)

    def store_copied(
        self,
        schema: TableSchema,
        refused: Sequence[RejectedRows],
        fence: Position,
        changed: ChangedRows | None,
    ) -> None:
        self.queue.hold_for_resync(schema.name, self.queue.write_copied(schema, refused, fence, changed))

    def copied(self, table: TableName) -> None:
        """Do nothing: the dead letters take effect with the swap."""


_OF_OTHER_SHAPE = Rejection("PEN-1403", "the table has another schema now")
_GO_ON = (
    "set refused: dead_letters to divert such rows, or correct the row in the source and resync the table"
)


def open_dead_letter_queue(
    spark: SparkSession, config: Callable[[], PipelineConfig], mode_of: Callable[[TableName], Mode]
) -> DeadLetterQueue:
    """Create the dead-letter queue of a pipeline. `config` returns the current configuration."""
    state, root, name = config().state, config().sink.root, config().pipeline
    return DeadLetterQueue(
        DeadLetterStore(root, name),
        SparkExecutors(spark),
        policy_of=lambda table: config().refused_policy(table),
        mode_of=mode_of,
        reject_inexact=config().type_policy.rejects_inexact,
        on_replayed=lambda table: _replayed(state, table),
        transform_of=lambda table: config().transform_of(table),
        queries=SparkQueries(spark),
    )


def _replayed(state: Path, table: TableName) -> None:
    change_overrides(state, lambda orders: orders.replayed(table))
