"""Letters and epochs: what of a table's epoch is put aside before the target sees it, and which letters go along with it.

Most epochs have nothing to do with letters, and pass at the price of a look at counts. Where values may be refused, or letters of the table
are open, an executor reads the epoch's changes once more than the sink does (`letters/task.py`).
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from penstock.errors import PenstockError, RowRefusedError, ValuesRefusedError, find_error
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.letters.copy import CopyLettersTask, RefusedRows, write_copy_letters
from penstock.pipeline.letters.files import leave_out
from penstock.pipeline.letters.policy import RefusedPolicy
from penstock.pipeline.letters.queries import answered
from penstock.pipeline.letters.screening import Name, Refusal
from penstock.pipeline.letters.store import LetterStore, Posting
from penstock.pipeline.letters.task import ScreeningReport, ScreeningTask, run_screening
from penstock.pipeline.orders import change_orders
from penstock.pipeline.spark_queries import SparkQueries
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import ChangedRows, Sink, TableChanges, Target, rewound
from penstock.sinks.executors import Executors, SparkExecutors
from penstock.sinks.layout import Layout, Mode
from penstock.sinks.slices import slices_after
from penstock.sinks.steps import slices_upto
from penstock.spool.range import FileSlice
from penstock.spool.values import check_values
from penstock.transforms.asking import Queries
from penstock.transforms.transform import Transform


class LetterBox:
    """Used by the threads of an epoch, each for tables of its own; replays are ordered by the pipeline's main thread."""

    def __init__(
        self,
        store: LetterStore,
        executors: Executors,
        *,
        policy_of: Callable[[TableName], RefusedPolicy],
        mode_of: Callable[[TableName], Mode],
        refuse_inexact: bool,
        on_replayed: Callable[[TableName], None] = lambda _: None,
        transform_of: Callable[[TableName], Transform | None] = lambda _: None,
        queries: Queries | None = None,
    ) -> None:
        """`on_replayed` is told that the letters of a table have been replayed, as far as they could be."""
        self.store = store
        self._executors = executors
        self._policy_of = policy_of
        self._mode_of = mode_of
        self._refuse_inexact = refuse_inexact
        self._on_replayed = on_replayed
        self._transform_of = transform_of
        self._queries = queries
        self._asked = store.pending / "asked"
        self._posted = {posting.table: posting for posting in store.postings()}
        self._due: set[TableName] = set()
        self._replaying: set[TableName] = set()
        """Of those, the ones whose epoch has the letters: an order may come at any moment."""
        self._of_shadows: dict[TableName, tuple[str, ...]] = {}
        """Files of letters of copies that are to take a table's place."""
        self._lock = threading.Lock()

    def order_replay(self, table: TableName) -> None:
        """With the next epoch that moves the table, apply its open letters."""
        with self._lock:
            self._due.add(table)

    def is_due(self, table: TableName) -> bool:
        """Whether letters wait to be applied. What has none is done."""
        if table not in self._due:
            return False
        if self.store.open_names(table) or table in self._posted:
            return True
        self._replayed(table)
        return False

    @property
    def due(self) -> set[TableName]:
        return set(self._due)

    def begin(self, targets: Mapping[TableName, Target]) -> None:
        """At the start of a run: what a former one did not get to say."""
        self.store.sweep()
        shutil.rmtree(self._asked, ignore_errors=True)
        for table, posting in list(self._posted.items()):
            if table in targets:
                self._settle(posting, counts=posting.counts_for(targets[table]))

    def void(self, table: TableName) -> None:
        """The table is to be copied from the beginning."""
        self._posted.pop(table, None)
        self.store.void(table)

    def with_letters(self, target: Target, changes: TableChanges, end: Position, follows: Callable[[FileSlice], bool]) -> TableChanges:
        """With the letters that are to be replayed before them; `follows`: whether they have the shape that the target has."""
        if target.table not in self._due:
            return changes
        self._replaying.add(target.table)
        letters = [slice for slice in self.store.slices(target.table, end) if follows(slice)]
        counts = sum((slice.file.counts for slice in letters), changes.counts)
        return replace(changes, slices=(*letters, *changes.slices), counts=counts)

    def puts_aside(self, table: TableName) -> bool:
        return self._policy_of(table) is RefusedPolicy.DEAD_LETTERS

    def apply(self, sink: Sink, target: Target, changes: TableChanges, end: Position) -> None:
        """Have the sink apply what is not refused; in its own steps, each of them with the letters that count with it."""
        ends = sink.steps(changes.slices, end) if changes.evolution is None else [end]
        for upto in ends:
            part = changes if len(ends) == 1 else replace(changes, slices=tuple(slices_upto(changes.slices, upto)))
            self._apply(sink, target, replace(part, at_once=True), upto)

    def _apply(self, sink: Sink, target: Target, changes: TableChanges, end: Position) -> None:
        """What the sink refuses is told by the transform, or asked of the target; without it, others may be refused in turn."""
        known: dict[Name, Refusal] | None = None
        while True:
            kept = self.screen(sink, target, changes, end, known)
            try:
                sink.apply(target, kept, end)
            except (RowRefusedError, ValuesRefusedError) as error:
                if not self.puts_aside(target.table):
                    raise
                found = sink.find_refused(target, kept, end) if isinstance(error, ValuesRefusedError) else {}
                if known is not None and found.keys() <= known.keys():
                    raise
                known = {**(known or {}), **{name: Refusal(error.code, reason) for name, reason in found.items()}}
            else:
                self.applied(target.table)
                return

    def screen(
        self, sink: Sink, target: Target, changes: TableChanges, end: Position, known: Mapping[Name, Refusal] | None = None
    ) -> TableChanges:
        """Without what is refused, which is durable when this returns. Raises what stops the table, if that is the policy.

        `known`: the sink refused some of the changes as they are; these among them, as far as is known.
        """
        table = target.table
        replayed = [slice for slice in changes.slices if self._is_letter(slice)]
        own = [slice for slice in changes.slices if not self._is_letter(slice)]
        is_refused = self._is_suspicious(table, own) or known is not None
        if not (is_refused or self.store.open_names(table) or table in self._posted):
            return changes
        reached = self._reached(sink, target)
        if reached >= end or not (is_refused or self.store.open_names(table)):
            return changes
        own = slices_after(own, reached)
        task = self._task(target, changes, own, replayed, end)
        report = self._run(replace(task, known={**task.known, **(known or {})}))
        screened = report.screened
        self._post(Posting(table, end, report.files, screened.superseded, frozenset(screened.replayed)))
        letters = [replace(slice, without=slice.without | screened.left_out) for slice in replayed]
        return replace(changes, slices=(*letters, *(leave_out(slice, screened.left_out) for slice in own)))

    def renew(self, main: Sink, shadow: Target, changes: TableChanges, end: Position) -> TableChanges:
        """The same for a copy that is about to take the place of what `main` has: the letters of that are settled by it."""
        table = shadow.table
        mine = main.load_target(table)
        if mine is not None and table in self._posted:
            self._settle(self._posted[table], counts=self._posted[table].counts_for(mine))
        copied = self._of_shadows.get(table, ())
        posting = Posting(table, end, copied, anew=True, copy=shadow.copy)
        if changes.slices and (copied or self._is_suspicious(table, changes.slices)):
            letters = tuple(self.store.pending_slices(copied, end))
            report = self._run(replace(self._task(shadow, changes, list(changes.slices), [], end), letters=letters))
            posting = replace(posting, files=(*copied, *report.files), superseded=report.screened.superseded)
            changes = replace(changes, slices=tuple(leave_out(slice, report.screened.left_out) for slice in changes.slices))
        if posting.files or self.store.open_names(table):
            self._post(posting)
        return changes

    def is_clean(self, table: TableName, slices: Iterable[FileSlice]) -> bool:
        """Whether neither a copy that is to take the table's place nor these changes to it have rows that may be refused."""
        return not self._of_shadows.get(table) and not self._is_suspicious(table, slices)

    def has_left_out(self, table: TableName) -> bool:
        """Whether the letters of the last epoch, or what it did to former ones, would be lost if its changes were not screened again."""
        posting = self._posted.get(table)
        return posting is not None and (bool(posting.superseded) or not set(posting.files) <= set(self._of_shadows.get(table, ())))

    def applied(self, table: TableName) -> None:
        """The target has the epoch that was screened last."""
        posting = self._posted.get(table)
        if posting is not None:
            self._settle(posting, counts=True)
            self.store.fold(table)
        if table in self._replaying:
            self._replayed(table)

    def take_copied(self, schema: TableSchema, refused: Sequence[RefusedRows], fence: Position, changed: ChangedRows | None) -> None:
        """What is refused of a table that is copied into its place: letters, if the target takes the copy."""
        files = self.write_copied(schema, refused, fence, changed)
        self._post(Posting(schema.name, fence, files, anew=True))

    def copied(self, table: TableName) -> None:
        posting = self._posted.get(table)
        if posting is not None:
            self._settle(posting, counts=True)

    def give_up_copy(self, main: Sink, table: TableName) -> None:
        """A copy did not get to take the place of what `main` has; or it did, and the answer was lost: that the table itself says."""
        self._of_shadows.pop(table, None)
        posting = self._posted.get(table)
        with suppress(PenstockError):  # then it is asked when its next epoch comes
            mine = main.load_target(table) if posting is not None else None
            if posting is not None and mine is not None:
                self._settle(posting, counts=posting.counts_for(mine))

    def keep_for_shadow(self, table: TableName, files: tuple[str, ...]) -> None:
        self._of_shadows[table] = files

    def write_copied(
        self, schema: TableSchema, refused: Sequence[RefusedRows], fence: Position, changed: ChangedRows | None
    ) -> tuple[str, ...]:
        if not refused:
            return ()
        table, stem = schema.name, self.store.new_stem(schema.name, fence)
        task = CopyLettersTask(table, schema, self._mode_of(table), fence, tuple(refused), changed, str(self.store.pending), stem)
        (stems,) = self._executors.run(write_copy_letters, [task])
        return stems

    def _task(self, target: Target, changes: TableChanges, own: list[FileSlice], replayed: list[FileSlice], end: Position) -> ScreeningTask:
        table, evolution = target.table, changes.evolution
        columns, key = (target.schema, target.key) if evolution is None else (evolution.columns, evolution.key)
        transform = self._transform_of(table)
        if transform is not None and changes.slices:
            # Only the sink sees what becomes of the rows: here they are still the source's.
            source = changes.slices[-1].file.schema
            columns, key = pa.schema([pa.field(column.name, column.arrow_type) for column in source.columns]), source.key
        letters = self.store.slices(table, end)
        others = [slice.path for slice in letters if slice.path not in {each.path for each in replayed}]
        task = ScreeningTask(
            table,
            tuple(own),
            tuple(letters),
            Layout(columns, key, self._mode_of(table)),
            changes.views if transform is None else {},
            self._refuse_inexact,
            bool(replayed),
            str(self.store.pending),
            self.store.new_stem(table, end),
            {name: _OF_OTHER_SHAPE for path in others for name in self.store.open_in(table, path)} if replayed else {},
        )
        if transform is None:
            return task
        return replace(task, fitted={slice.file.schema: transform.fit(slice.file.schema) for slice in task.applied})

    def _run(self, task: ScreeningTask) -> ScreeningReport:
        with answered(task, self._executors, self._queries, self._asked) as ready:
            (report,) = self._executors.run(run_screening, [ready])
        first = next(iter(report.screened.refused.values()), None)
        if first is not None and self._policy_of(task.table) is RefusedPolicy.STOP:
            raise (find_error(first.code) or PenstockError)(f"a change of {task.table} is refused: {first.reason}", hint=_GO_ON)
        return report

    def _post(self, posting: Posting) -> None:
        if not posting.is_empty:
            self.store.post(posting)
            self._posted[posting.table] = posting

    def _reached(self, sink: Sink, target: Target) -> Position:
        """How far the target is by its own word, which says too whether what was posted before counts."""
        now = sink.load_target(target.table)
        if now is None or now.applied is None or (target.applied is not None and now.applied < target.applied):
            raise rewound(sink.describe(target.table), target.table, None if now is None else now.applied, target.applied or Position.ZERO)
        posting = self._posted.get(target.table)
        if posting is not None:
            self._settle(posting, counts=posting.counts_for(now))
        return now.applied

    def _settle(self, posting: Posting, *, counts: bool) -> None:
        copied = self._of_shadows.get(posting.table, ())
        if not counts:  # a copy that is ready waits, and is tried again
            posting = replace(posting, files=tuple(stem for stem in posting.files if stem not in copied))
        elif posting.anew:
            self._of_shadows.pop(posting.table, None)
        self.store.settle(posting, counts=counts)
        self._posted.pop(posting.table, None)

    def _replayed(self, table: TableName) -> None:
        with self._lock:
            self._due.discard(table)
            self._replaying.discard(table)
        self._on_replayed(table)

    def _is_suspicious(self, table: TableName, slices: Iterable[FileSlice]) -> bool:
        """Whether some value may be refused. Raises if one is, and that stops the table."""
        if self._policy_of(table) is RefusedPolicy.STOP:
            check_values(table, slices, refuse_inexact=self._refuse_inexact)
            return False
        counts = [slice.file.counts for slice in slices]
        return any(each.unreadable or (self._refuse_inexact and each.inexact) for each in counts)

    def _is_letter(self, slice: FileSlice) -> bool:
        return slice.path.is_relative_to(self.store.directory.absolute())


@dataclass(frozen=True, slots=True)
class ShadowLetters:
    """The same for a copy that is to take the place of a table, whose own letters count until it does."""

    box: LetterBox

    def puts_aside(self, table: TableName) -> bool:
        return self.box.puts_aside(table)

    def take_copied(self, schema: TableSchema, refused: Sequence[RefusedRows], fence: Position, changed: ChangedRows | None) -> None:
        self.box.keep_for_shadow(schema.name, self.box.write_copied(schema, refused, fence, changed))

    def copied(self, table: TableName) -> None:
        """It counts when it is in place."""


_OF_OTHER_SHAPE = Refusal("PEN-1403", "the table has another shape now")
_GO_ON = "set refused: dead_letters to put such rows aside, or mend the row in the source and copy the table anew"


def open_letter_box(spark: SparkSession, config: Callable[[], PipelineConfig], mode_of: Callable[[TableName], Mode]) -> LetterBox:
    """The box of a pipeline; `config` gives the configuration as it is when it is asked."""
    state, root, name = config().state, config().sink.root, config().pipeline
    return LetterBox(
        LetterStore(root, name),
        SparkExecutors(spark),
        policy_of=lambda table: config().refused_policy(table),
        mode_of=mode_of,
        refuse_inexact=config().type_policy.refuses_inexact,
        on_replayed=lambda table: _replayed(state, table),
        transform_of=lambda table: config().transform_of(table),
        queries=SparkQueries(spark),
    )


def _replayed(state: Path, table: TableName) -> None:
    change_orders(state, lambda orders: orders.replayed(table))
