"""One epoch of a table, as rows of a Delta table that go and rows that come: worked out by executors, committed here in one piece.

Each task reads its part of the changes, folds them, finds where the rows that go are, and writes the rows that come to a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import pyarrow as pa
from typing_extensions import override

from penstock.change import ChangeCounts
from penstock.schema import TableSchema
from penstock.sinks.base import SnapshotFile, SnapshotPlace
from penstock.sinks.delta.deletions import REPORTED_BYTES, of_file
from penstock.sinks.delta.rewrite import RewriteTask, run_rewrite
from penstock.sinks.delta.rows import TableFiles
from penstock.sinks.delta.step import DeltaStep
from penstock.sinks.delta.task import EpochPart, EpochTask, run_part
from penstock.sinks.executors import Executors, are_light
from penstock.sinks.layout import Mode
from penstock.sinks.shares import adds_only, plan_parts, share_files
from penstock.sinks.slice_reader import Part
from penstock.sinks.source_truncates import source_column
from penstock.sinks.views import View
from penstock.spool.range import FileSlice


@dataclass(frozen=True)
class DeltaEpoch(DeltaStep):
    slices: Sequence[FileSlice]
    views: Mapping[TableSchema, View] = field(default_factory=dict, kw_only=True)
    """How changes of each shape are read."""
    fills: Mapping[str, pa.Scalar] | None = field(default=None, kw_only=True)
    """The files that are there are written anew, with these values in columns that they do not have; None: they stay as they are.

    Rows that are kept of former times have them too, as the server has them in all that was written before: so it makes no difference how
    much an epoch holds.
    """

    @cached_property
    def counts(self) -> ChangeCounts:
        return sum((slice.file.counts for slice in self.slices), ChangeCounts())

    @property
    def adds_only(self) -> bool:
        """Whether it can be added without a look at what is there."""
        return adds_only(self.layout.mode, self.counts)

    def apply(self, executors: Executors) -> bool:
        """Work it out and commit it; see `commit`."""
        self.check(deletes=not self.adds_only)
        light = self.adds_only and are_light(self.slices)  # else it looks into the table, however large that is
        parts = executors.run(run_part, self.plan(executors.parallelism), light=light) if self.slices else []
        rewritten = None if self.fills is None else self._rewritten(parts, executors)
        return self.commit(parts, executors, adds_only=self.adds_only and not self.declared, rewritten=rewritten)

    @override
    def table(self, *, scanned: bool) -> TableFiles:
        return replace(super().table(scanned=scanned), fills=self.fills or {})

    def _rewritten(self, parts: Sequence[EpochPart], executors: Executors) -> dict[str, SnapshotFile]:
        """By the file that is there, the one that takes its place; nothing, if all rows go."""
        if any(part.emptied for part in parts):
            return {}
        table, deletions = self.table(scanned=True), tuple(part.deletions for part in parts)
        place = SnapshotPlace(str(self.path), table.names, f"anew-{self.end.value:016X}")
        one = replace(table, files=())
        tasks = [RewriteTask(one, file, of_file(file.path, deletions), place, index) for index, file in enumerate(table.files)]
        files = executors.run(run_rewrite, tasks) if tasks else []
        return {task.file.path: file for task, file in zip(tasks, files, strict=True)}

    def plan(self, parallelism: int) -> list[EpochTask]:
        table = self.table(scanned=not self.adds_only)
        place = SnapshotPlace(str(self.path), table.names, f"epoch-{self.end.value:016X}")
        shares: list[tuple[tuple[FileSlice, ...], Part | None]]
        if self.adds_only:
            shares = [(share, None) for share in share_files(self.slices, self.counts, parallelism)]
        else:
            looks_up = self.layout.mode is not Mode.MIRROR or source_column(self.views.values()) is not None
            shares = [(tuple(self.slices), part) for part in plan_parts(self.slices, self.counts, looks_up=looks_up)]
        return [
            EpochTask(share, part, self.layout, self.adds_only, table, place, index, self.views, REPORTED_BYTES // len(shares))
            for index, (share, part) in enumerate(shares)
        ]
