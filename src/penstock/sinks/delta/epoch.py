"""Apply one epoch or one snapshot repair to a Delta table: plan tasks, run them on executors, commit the
files that they wrote.

Each task reads its part of the changes, reduces them, finds the rows to delete in the files of the table, and
writes the rows to add to a new file. Positions of deleted rows become deletion vectors. The driver commits
vectors, new files and the position in one commit. Before that commit the written files are not part of the
table. VACUUM removes files that a crash leaves behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock import storage
from penstock.change import EXACT, ChangeCounts
from penstock.position import Position
from penstock.schema import TableSchema
from penstock.sinks.base import ChangedRows, SnapshotFile, SnapshotPlace
from penstock.sinks.delta.commit import EPOCH, added, commit, commit_info, marked, removed, transaction
from penstock.sinks.delta.deletion_vectors import remove_vectors, vector_file
from penstock.sinks.delta.deletions import (
    REPORTED_BYTES,
    Deletions,
    RewriteTask,
    mark_files,
    of_file,
    remove_reports,
    report,
    run_rewrite,
)
from penstock.sinks.delta.lookup import (
    FoundRows,
    ScanFile,
    TableFiles,
    all_rows,
    find_counted,
    find_rows,
    read_rows,
    read_within,
)
from penstock.sinks.delta.state import (
    DeltaState,
    Unsupported,
    can_delete,
    check_writable,
    file_schema,
    load_state,
    load_version,
    table_schema,
)
from penstock.sinks.executors import Executors, are_light
from penstock.sinks.fold import COUNT, Outcome, expand_source_truncates, fold, source_column
from penstock.sinks.modes import Layout, known_columns
from penstock.sinks.repair_files import match_column, match_text_column
from penstock.sinks.row_chains import StoredRows, bools_of, ints_of
from penstock.sinks.row_files import new_attempt, remove_attempt, removed_on_failure, write_batches
from penstock.sinks.row_values import View, build_exact
from penstock.sinks.slice_reader import Part, plan_parts, read_groups, read_slices, share_files
from penstock.spool.reader import FileSlice


@dataclass(frozen=True, slots=True)
class EpochTask:
    """One part of an epoch. Sent to an executor."""

    slices: tuple[FileSlice, ...]
    part: Part | None
    layout: Layout
    adds_only: bool
    table: TableFiles
    place: SnapshotPlace
    index: int
    views: Mapping[TableSchema, View] = field(default_factory=dict)
    reported_bytes: int = REPORTED_BYTES
    """Maximum size of the positions of deleted rows that the task sends to the driver directly."""


@dataclass(frozen=True, slots=True)
class RepairTask:
    """A snapshot repair. Sent to an executor."""

    layout: Layout
    changed: ChangedRows
    table: TableFiles
    place: SnapshotPlace


@dataclass(frozen=True, slots=True)
class EpochPart:
    """The result of a task."""

    emptied: bool
    deletions: Deletions
    file: SnapshotFile


@dataclass(frozen=True)
class DeltaCommit:
    """One commit by Penstock to the table at `path`, which is in the state `state`. It applies the changes in
    `slices`, or a repair, and sets the position to `end`.
    """

    path: Path
    application: str
    layout: Layout
    state: DeltaState
    end: Position
    slices: Sequence[FileSlice] = ()
    views: Mapping[TableSchema, View] = field(default_factory=dict, kw_only=True)
    """How to read the changes of each schema version."""
    declared: tuple[dict[str, Any], ...] = field(default=(), kw_only=True)
    """Actions that change columns or properties. `state` already has the new columns and properties."""
    fills: Mapping[str, pa.Scalar] | None = field(default=None, kw_only=True)
    """The default values of added columns for existing rows. If it is not None, the existing files are
    rewritten with these values.

    Rows that are looked up get these values too, so the result does not depend on the size of an epoch.
    """
    attempt: str = field(default_factory=new_attempt, kw_only=True)
    """Part of the names of all files that are written for this commit, so that a failed attempt can remove
    them.
    """

    @cached_property
    def counts(self) -> ChangeCounts:
        return sum((slice.file.counts for slice in self.slices), ChangeCounts())

    @property
    def adds_only(self) -> bool:
        """Whether the changes can be added without reading the table."""
        return self.layout.mode.adds_only(self.counts)

    def apply(self, executors: Executors) -> bool:
        """Apply `slices`.

        Returns False if another writer committed first. Then nothing was changed, and the caller has to load
        the table again.
        """
        self.check(deletes=not self.adds_only)
        # Tasks of any other epoch read files of the table, whose size has no limit.
        light = self.adds_only and are_light(self.slices)
        try:
            parts = (
                executors.run(write_epoch, self.plan(executors.parallelism), light=light)
                if self.slices
                else []
            )
            rewritten = None if self.fills is None else self._rewrite(parts, executors)
        except Exception:
            self.remove_files()
            raise
        return self.commit(
            parts, executors, adds_only=self.adds_only and not self.declared, rewritten=rewritten
        )

    def repair(self, changed: ChangedRows, place: SnapshotPlace, executors: Executors) -> bool:
        """Replace the rows of `changed`. Returns False in the same case as `apply`."""
        self.check(deletes=True)
        task = RepairTask(self.layout, changed, self.table(scanned=True), place)
        return self.commit(executors.run(write_repair, [task]), executors, adds_only=False)

    def check(self, *, deletes: bool) -> None:
        """Raise `Unsupported` if only Delta itself can write to the table."""
        check_writable(self.state)
        if deletes and not can_delete(self.state):
            raise Unsupported("it has no deletion vectors")
        unknown = set(table_schema(self.state.metadata).names) - set(self.layout.schema.names)
        if deletes and unknown:
            # Deleting a row and adding its new version would lose the value of such a column. A MERGE keeps
            # it.
            raise Unsupported(f"it has a column {sorted(unknown)[0]!r} that the source does not have")

    def plan(self, parallelism: int) -> list[EpochTask]:
        table = self.table(scanned=not self.adds_only)
        place = SnapshotPlace(str(self.path), table.names, f"epoch-{self.end.value:016X}-{self.attempt}")
        shares: list[tuple[tuple[FileSlice, ...], Part | None]]
        if self.adds_only:
            shares = [(share, None) for share in share_files(self.slices, self.counts, parallelism)]
        else:
            looks_up = self.layout.mode.keeps_past_rows or source_column(self.views.values()) is not None
            parts = plan_parts(self.slices, self.counts, looks_up=looks_up, at_once=True)
            slices = tuple(self.slices)  # one object, so that `split_tasks` sends it once for all tasks
            shares = [(slices, part) for part in parts]
        reported_bytes = REPORTED_BYTES // max(len(shares), 1)
        return [
            EpochTask(
                share, part, self.layout, self.adds_only, table, place, index, self.views, reported_bytes
            )
            for index, (share, part) in enumerate(shares)
        ]

    def table(self, *, scanned: bool) -> TableFiles:
        """The description of the table for executors; with `scanned`, it includes the table's files."""
        names, own = file_schema(self.state.metadata), table_schema(self.state.metadata)
        key = self.layout.identity if scanned else ()
        fields = tuple(names.field(own.get_field_index(name)) for name in key)
        files = self.state.files.values() if scanned else ()
        scans = tuple(ScanFile(file.path, file.bounds(fields), file.vector) for file in files)
        return TableFiles(str(self.path), own, names, key, scans, self.fills or {})

    def commit(
        self,
        parts: Sequence[EpochPart],
        executors: Executors,
        *,
        adds_only: bool,
        rewritten: Mapping[str, SnapshotFile] | None = None,
    ) -> bool:
        """Commit the results of the tasks as the next version. Returns False if another writer has already
        committed that version.

        In that case, and after an error before the commit, all written files are removed. `rewritten` maps
        the path of each file of the table to the file that replaces it, without the deleted rows; it is empty
        if the table was emptied. If it is None, the files stay and their deleted rows are marked.
        """
        deletions = [part.deletions for part in parts]
        try:
            if rewritten is None:
                changed, written = self._mark_deleted(parts, executors)
            else:
                changed = [removed(file) for file in self.state.files.values()] + added(rewritten.values())
                written = {self.path / file.name for file in rewritten.values()}
        except Exception:
            _remove(self.path / part.file.name for part in parts)
            self.remove_files()
            raise
        finally:
            remove_reports(self.path, deletions)
        actions = [
            commit_info(EPOCH, {"position": str(self.end)}, adds_only=adds_only),
            transaction(self.application, self.end),
            *self.declared,
            *changed,
            *added(part.file for part in parts),
        ]
        is_ours = False
        try:
            is_ours = commit(self.path, self.state.version + 1, actions)
        except Unsupported:
            _remove([*written, *(self.path / part.file.name for part in parts)])
            raise
        if not is_ours:
            _remove([*written, *(self.path / part.file.name for part in parts)])
        return is_ours

    def remove_files(self) -> None:
        """Remove all files that were written for this commit. Call this only if the commit was not tried."""
        remove_attempt(self.path, self.attempt)
        remove_vectors(self.path, self.attempt)

    def _mark_deleted(
        self, parts: Sequence[EpochPart], executors: Executors
    ) -> tuple[list[dict[str, Any]], set[Path]]:
        """The actions for files that lose rows, and the files of the deletion vectors written for them."""
        files = self.state.files
        if any(part.emptied for part in parts):
            return [removed(file) for file in files.values()], set()
        if not any(part.deletions.count for part in parts):
            return [], set()  # so that the cost of inserts does not depend on the number of files
        scans = (ScanFile(file.path, (), file.vector) for file in files.values())
        marks = mark_files(self.path, scans, [part.deletions for part in parts], executors, self.attempt)
        actions: list[dict[str, Any]] = []
        for mark in marks:
            file = files[mark.path]
            actions += [removed(file)] if mark.vector is None else marked(file, mark.vector, mark.file_rows)
        return actions, {vector_file(self.path, mark.vector) for mark in marks if mark.vector is not None}

    def _rewrite(self, parts: Sequence[EpochPart], executors: Executors) -> dict[str, SnapshotFile]:
        """Rewrite every existing file with `fills` and without deleted rows. Returns the new files by the
        path of the old file.
        """
        if any(part.emptied for part in parts):
            return {}
        table, deletions = self.table(scanned=True), tuple(part.deletions for part in parts)
        place = SnapshotPlace(str(self.path), table.names, f"anew-{self.end.value:016X}-{self.attempt}")
        one = replace(table, files=())
        tasks = [
            RewriteTask(one, file, of_file(file.path, deletions), place, index)
            for index, file in enumerate(table.files)
        ]
        files = executors.run(run_rewrite, tasks) if tasks else []
        return {task.file.path: file for task, file in zip(tasks, files, strict=True)}


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        storage.delete(file)


def read_small(path: Path, version: int | None, limit_bytes: int) -> pa.Table | None:
    """Read one version of a small table, by default the newest.

    Returns None if the table is larger than the limit, or if only Delta itself can read it.
    """
    try:
        state = load_state(path) if version is None else load_version(path, version)
        if state is None or sum(file.bytes for file in state.files.values()) > limit_bytes:
            return None
        check_writable(state)
        files = tuple(ScanFile(file.path, (), file.vector) for file in state.files.values())
        return read_within(
            TableFiles(str(path), table_schema(state.metadata), file_schema(state.metadata), (), files),
            limit_bytes,
        )
    except Unsupported:
        return None


# --- tasks on executors ---


def write_epoch(task: EpochTask) -> EpochPart:
    """Reduce one part of an epoch, find the rows to delete, and write the rows to add."""
    if task.adds_only:
        return EpochPart(False, Deletions(), _write(task, read_groups(task.slices, task.layout, task.views)))
    lookup = partial(_look_up, task)
    found = read_slices(task.slices, task.layout, task.part, task.views)
    changes = expand_source_truncates(found, task.layout, source_column(task.views.values()), lookup)
    outcome = fold(changes, task.layout, lookup)
    deleted = [] if outcome.emptied else _find_deleted(task, outcome)
    file = _write(task, outcome.new.slices())
    with removed_on_failure(Path(task.place.directory) / file.name):
        return EpochPart(outcome.emptied, report(deleted, task.place, task.index, task.reported_bytes), file)


def _look_up(task: EpochTask, keys: pa.Table | None) -> StoredRows:
    """The `Lookup` of a task: reads the rows from the files of the table."""
    table, layout = task.table, task.layout
    asked = [] if keys is None else [name for name in layout.columns.names if name in keys.column_names]
    found = all_rows(table) if keys is None else find_rows(table, keys, asked)
    rows = read_rows(table, found, known_columns(layout, asked))
    flag = layout.mode.current_flag
    return rows if flag is None else rows.only(bools_of(rows.known.column(flag.column)) == flag.value)


def _find_deleted(task: EpochTask, outcome: Outcome) -> list[FoundRows]:
    identity = task.layout.identity
    if identity or not outcome.deleted.num_rows:
        return find_rows(task.table, outcome.deleted, identity)
    return find_counted(
        task.table, outcome.deleted, task.layout.columns.names, ints_of(outcome.deleted.column(COUNT))
    )


def _write(task: EpochTask, rows: Iterable[pa.Table]) -> SnapshotFile:
    batches = (batch for each in rows for batch in _completed(each, task.table.schema).to_batches())
    return write_batches(batches, task.place, task.index)


def _completed(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Rows with all columns of the table, in the table's order. Columns that other writers added are null."""
    columns = [
        rows.column(field.name)
        if field.name in rows.column_names
        else pa.chunked_array([pa.nulls(rows.num_rows, field.type)])
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def write_repair(task: RepairTask) -> EpochPart:
    """Find the rows of the changed keys, and write their current rows to a file."""
    deleted = find_rows(task.table, _keys(task), task.layout.key)
    file = write_batches(_rows(task), task.place, 0)
    with removed_on_failure(Path(task.place.directory) / file.name):
        return EpochPart(False, report(deleted, task.place, 0, REPORTED_BYTES), file)


def _keys(task: RepairTask) -> pa.Table:
    files = storage.list_paths(Path(task.changed.keys), "*.parquet")
    found = pa.concat_tables(
        [pq.ParquetFile(file, coerce_int96_timestamp_unit="us").read() for file in files]
    )
    columns = {
        name: found.column(match_column(at)).cast(task.layout.columns.field(name).type)
        for at, name in enumerate(task.layout.key)
    }
    texts = {name: found.column(match_text_column(at)) for at, name in enumerate(task.layout.key)}
    return pa.table({**columns, EXACT: build_exact(texts, found.num_rows)})


def _rows(task: RepairTask) -> Iterator[pa.RecordBatch]:
    for name in task.changed.rows:
        with pq.ParquetFile(name) as file:
            yield from file.iter_batches()
