"""Executor tasks of an Iceberg table: reduce an epoch's changes to data and equality delete files, and merge
small files.

An equality delete has values of some columns of the rows' identity, and Iceberg deletes every older row with
these values. A delete is exact if these columns identify rows. It is not exact for floats and nested values
in a key, which a delete cannot have; for a key value beyond its column's type, where the column is null and
only `_exact` differs; and for a table without a key. An inexact delete matches too many rows. The same commit
adds a copy of each row that should stay, so readers see no difference.

Inexact deletes, and values that only the target has, need rows of the target. A task that lacks such rows
returns a request for them, and runs again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock import storage
from penstock.change import EXACT, EXACT_TYPE
from penstock.schema import TableSchema
from penstock.sinks.base import ChangedRows, SnapshotFile, SnapshotPlace
from penstock.sinks.fold import COUNT, Outcome, expand_source_truncates, fold, source_column
from penstock.sinks.iceberg.schema import delete_columns, filled, fitted
from penstock.sinks.keys import key_codes
from penstock.sinks.modes import Layout, known_columns
from penstock.sinks.repair_files import match_column, match_text_column
from penstock.sinks.row_chains import NewRows, RowGroup, Sizes, StoredRows
from penstock.sinks.row_files import as_written, removed_on_failure, write_batches, writer_options
from penstock.sinks.row_values import View
from penstock.sinks.slice_reader import Part, read_groups, read_slices
from penstock.spool.reader import FileSlice

MERGED = "merged"
"""Prefix of the names of merged files."""
_BATCH_ROWS = 8192
"""Number of rows to read at a time: few, because a file that is small on disk may be large in memory."""


@dataclass(frozen=True, slots=True)
class MergeTask:
    files: tuple[str, ...]
    place: SnapshotPlace


def merge_files(task: MergeTask) -> SnapshotFile | None:
    """Merge files on an executor. Returns None if a file has other columns than the table has now, or if no
    file has rows.
    """
    wanted = as_written(task.place.schema).schema_arrow  # fields inside a map have other names in files
    if not all(_is_of(pq.read_schema(file), wanted) for file in task.files):
        return None
    made = write_batches(_batches(task), task.place, 0)
    storage.sync_directory(Path(task.place.directory))
    return made if made.rows else None


def _batches(task: MergeTask) -> Iterator[pa.RecordBatch]:
    for each in task.files:
        with pq.ParquetFile(each) as file:
            yield from file.iter_batches(_BATCH_ROWS)


def _is_of(found: pa.Schema, wanted: pa.Schema) -> bool:
    """Whether two schemas have the same names, types and field ids, at any depth."""
    return len(found) == len(wanted) and all(map(_is_same, found, wanted))


def _is_same(found: pa.Field, wanted: pa.Field) -> bool:
    return bool(found.equals(wanted, check_metadata=True))


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """Rows of the target in Parquet files, with a column `v_<i>` for each column of the layout's schema."""

    files: tuple[str, ...]
    fills: Mapping[str, pa.Scalar] = field(default_factory=dict)
    """The default values of these rows in the columns that this epoch adds."""

    def load(self, layout: Layout, asked: Sequence[str] = ()) -> StoredRows:
        """Load all rows. If there are many, only the columns that identify rows and the columns of the lookup
        (`asked`) are loaded now, and whole rows on demand.
        """
        groups = []
        for path in self.files:
            with pq.ParquetFile(path) as file:
                for number in range(file.num_row_groups):
                    group = file.metadata.row_group(number)
                    size = group.total_byte_size / max(group.num_rows, 1)
                    groups.append(
                        RowGroup(group.num_rows, size, partial(self._load, path, number, layout.schema))
                    )
        return StoredRows.load(groups, layout.schema, known_columns(layout, asked))

    def _load(self, path: str, number: int, schema: pa.Schema, names: Sequence[str]) -> pa.Table:
        columns = pa.schema([schema.field(name) for name in names])
        with pq.ParquetFile(path) as file:
            read = file.read_row_group(number, [f"v_{schema.get_field_index(name)}" for name in names])
        return filled(fitted(read.rename_columns(names), columns), self.fills)


@dataclass(frozen=True, slots=True)
class EpochTask:
    """A part of an epoch. `old`: the rows that were looked up for its reduction so far; `alike`: the rows
    that inexact deletes match.
    """

    slices: tuple[FileSlice, ...]
    layout: Layout
    place: SnapshotPlace
    scratch: str
    names: tuple[str, ...]
    """The columns that identify rows to delete."""
    part: Part | None = None
    views: Mapping[TableSchema, View] = field(default_factory=dict)
    adds_only: bool = False
    """Whether the changes only add rows and need no reduction."""
    old: tuple[StoredFiles, ...] = ()
    alike: StoredFiles | None = None


@dataclass(frozen=True, slots=True)
class RowRequest:
    """A request for the rows of the target whose values in `columns` are in the file `keys`; without `keys`,
    for all rows.
    """

    columns: tuple[str, ...]
    keys: str | None
    is_old: bool
    """Whether the reduction needs the rows (`EpochTask.old`). If not, they are requested because inexact
    deletes match them (`EpochTask.alike`).
    """


@dataclass(frozen=True, slots=True)
class WrittenFile:
    name: str
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class EpochFiles:
    """The result of a task: the files that it wrote; or, in `wanted`, a request for rows of the target, with
    which the task must be run again.
    """

    emptied: bool = False
    rows: WrittenFile | None = None
    deletes: WrittenFile | None = None
    wanted: RowRequest | None = None


def named_columns(layout: Layout) -> tuple[str, ...]:
    """The columns that identify a row of the target; without a key, all columns."""
    return layout.identity or tuple(layout.columns.names)


def write_epoch(task: EpochTask) -> EpochFiles:
    """Reduce one part of an epoch and write its files, on an executor."""
    names = task.layout.schema.names
    if task.adds_only:
        return EpochFiles(
            rows=_write(
                (rows.select(names) for rows in read_groups(task.slices, task.layout, task.views)),
                task,
                "rows",
            )
        )
    lookup = _Lookup(task)
    try:
        changes = read_slices(task.slices, task.layout, task.part, task.views)
        spelled = expand_source_truncates(changes, task.layout, source_column(task.views.values()), lookup)
        outcome = fold(spelled, task.layout, lookup)
    except _RowsNeededError as wanted:
        return EpochFiles(
            wanted=_request_rows(wanted.keys, task, _asked(wanted.keys, task.layout), is_old=True)
        )
    return write_outcome(outcome, task)


def write_outcome(outcome: Outcome, task: EpochTask) -> EpochFiles:
    names = task.names
    columns = delete_columns(task.place.schema, names)
    deleted, rows, emptied = outcome.deleted, outcome.new, outcome.emptied
    if emptied or not deleted.num_rows:
        deleted = deleted.slice(0, 0)
    elif columns != names or COUNT in deleted.column_names or _has_nulls(deleted, columns):
        if task.alike is None:
            return EpochFiles(wanted=_request_rows(deleted, task, names, is_old=False))
        stays = rows_to_keep(deleted, task.alike.load(task.layout), names, columns)
        rows += NewRows(rows.schema, ((stays.sizes, stays.take),) if len(stays.sizes) else ())
        emptied = not columns
    deletes = deleted.select(columns) if deleted.num_rows and columns else None
    return EpochFiles(
        emptied,
        _write(rows.slices(), task, "rows"),
        None if deletes is None else _write([_distinct(deletes)], task, "deletes"),
    )


def rows_to_keep(
    deleted: pa.Table, stored: StoredRows, names: Sequence[str], columns: Sequence[str]
) -> StoredRows:
    """The rows of `stored` that should stay, although deletes by `columns` would match them. `deleted` has
    the rows to delete, identified by `names`.
    """
    bare, found = key_codes([deleted.select(columns), stored.known.select(columns)], columns)
    touched = np.isin(found, bare) if columns else np.ones(stored.known.num_rows, np.bool_)
    whole, found = key_codes([deleted, stored.known], names)
    if COUNT in deleted.column_names:
        limit = np.zeros(max(int(whole.max(initial=-1)), int(found.max(initial=-1))) + 1, np.int64)
        limit[whole] = deleted.column(COUNT).to_numpy()
        deleted_rows = _occurrences(found) < limit[found]
    else:
        deleted_rows = np.isin(found, whole)
    return stored.only(touched & ~deleted_rows)


def _occurrences(codes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each row, the number of equal rows before it."""
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(codes) else np.zeros(0, np.int64)
    lengths = np.diff(np.r_[starts, len(codes)])
    turns = np.empty(len(codes), np.int64)
    turns[order] = np.arange(len(codes)) - np.repeat(starts, lengths)
    return turns


class _RowsNeededError(Exception):
    def __init__(self, keys: pa.Table | None) -> None:
        super().__init__()
        self.keys = keys


class _Lookup:
    """The `Lookup` of a task. Each run of the task makes the same lookups in the same order. The first
    lookups return the rows of `EpochTask.old`; the first one beyond them raises `_RowsNeededError`.
    """

    def __init__(self, task: EpochTask) -> None:
        self._task = task
        self._fetched = iter(task.old)

    def __call__(self, keys: pa.Table | None) -> StoredRows:
        fetched = next(self._fetched, None)
        if fetched is None:
            raise _RowsNeededError(keys)
        names = _asked(keys, self._task.layout)
        stored = fetched.load(self._task.layout, names)
        if keys is None:
            return stored
        asked, found = key_codes([keys, stored.known], names)
        return stored.only(np.isin(found, asked))


def _asked(keys: pa.Table | None, layout: Layout) -> tuple[str, ...]:
    return () if keys is None else tuple(name for name in layout.columns.names if name in keys.column_names)


def _request_rows(
    keys: pa.Table | None, task: EpochTask, names: Sequence[str], *, is_old: bool
) -> RowRequest:
    columns = delete_columns(task.place.schema, names)
    if keys is None or not columns:
        return RowRequest((), None, is_old)
    if not is_old and columns == tuple(names) and COUNT not in keys.column_names:
        keys = keys.filter(_any_null(keys, columns))
    storage.ensure_directory(Path(task.scratch))
    path = Path(task.scratch) / f"keys-{secrets.token_hex(8)}.parquet"
    values = fitted(
        _distinct(keys.select(columns)), pa.schema([task.place.schema.field(name) for name in columns])
    )
    with storage.open_new(path) as file:
        pq.write_table(values.rename_columns([f"k_{at}" for at in range(len(columns))]), file)
    return RowRequest(columns, str(path), is_old)


def _has_nulls(table: pa.Table, columns: Sequence[str]) -> bool:
    return any(table.column(name).null_count for name in columns)


def _any_null(table: pa.Table, columns: Sequence[str]) -> pa.ChunkedArray:
    found = pc.is_null(table.column(columns[0]))
    for name in columns[1:]:
        found = pc.or_(found, pc.is_null(table.column(name)))
    return found


def _distinct(table: pa.Table) -> pa.Table:
    return table.group_by(table.column_names, use_threads=False).aggregate([])


def _write(tables: Iterable[pa.Table], task: EpochTask, kind: str) -> WrittenFile | None:
    """Write the rows to a file; returns None, and writes no file, if there are no rows. Each attempt uses a
    new name, since the file of an earlier attempt may be part of the table.
    """
    rows, some = 0, (table for table in tables if table.num_rows)
    name = f"{task.place.prefix}-{secrets.token_hex(8)}-{kind}.parquet"
    path = Path(task.place.directory) / name
    table = next(some, None)
    if table is None:
        return None
    whole = _fitted(table, task)
    with removed_on_failure(path):
        with pq.ParquetWriter(path, whole.schema, **writer_options(whole)) as writer:
            while table is not None:
                writer.write_table(_fitted(table, task))
                rows += table.num_rows
                table = next(some, None)
        storage.sync_file(path)
        storage.sync_directory(path.parent)
        return WrittenFile(name, rows, storage.size_bytes(path))


def _fitted(table: pa.Table, task: EpochTask) -> pa.Table:
    return fitted(
        table, pa.schema([field for field in task.place.schema if field.name in table.column_names])
    )


# --- snapshot repairs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RepairTask:
    """Replace every row whose key is in `changed`. `task.slices` is not used."""

    changed: ChangedRows
    task: EpochTask


def write_repair(repair: RepairTask) -> EpochFiles:
    """Write the files of a snapshot repair, on an executor."""
    layout, changed = repair.task.layout, repair.changed
    keys = _read(sorted(map(str, storage.list_paths(Path(changed.keys), "*.parquet"))))
    deleted = pa.table(
        [
            *(
                keys.column(match_column(at)).cast(layout.columns.field(name).type)
                for at, name in enumerate(layout.key)
            ),
            _exact_keys([keys.column(match_text_column(at)) for at in range(len(layout.key))], layout.key),
        ],
        names=[*layout.key, EXACT],
    )
    return write_outcome(
        Outcome(False, deleted, NewRows(layout.schema, tuple(_repaired(repair)))), repair.task
    )


def _repaired(repair: RepairTask) -> Iterator[tuple[Sizes, Callable[[npt.NDArray[np.int64]], pa.Table]]]:
    """Yield the current rows of a repair: for each row group, the sizes of its rows, and a function that
    loads some of them.
    """
    layout = repair.task.layout

    def load(path: str, number: int, at: npt.NDArray[np.int64]) -> pa.Table:
        with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
            rows = (
                file.read_row_group(number)
                .rename_columns([*layout.columns.names, EXACT])
                .slice(int(at[0]), len(at))
            )
        for name, value in repair.task.place.values:
            rows = rows.append_column(
                name, pa.repeat(pa.scalar(value).cast(layout.schema.field(name).type), rows.num_rows)
            )
        return fitted(rows, layout.schema)

    for path in repair.changed.rows:
        with pq.ParquetFile(path) as file:
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                yield (
                    np.full(group.num_rows, group.total_byte_size / max(group.num_rows, 1)),
                    partial(load, path, number),
                )


def _read(files: Sequence[str]) -> pa.Table:
    return pa.concat_tables([pq.read_table(file, coerce_int96_timestamp_unit="us") for file in files])


def _exact_keys(texts: Sequence[pa.ChunkedArray], names: Sequence[str]) -> pa.Array:
    if all(column.null_count == len(column) for column in texts):
        return pa.nulls(len(texts[0]), EXACT_TYPE)
    rows = zip(*(column.to_pylist() for column in texts), strict=True)
    found = [
        [(name, text) for name, text in zip(names, row, strict=True) if text is not None] or None
        for row in rows
    ]
    return pa.array(found, EXACT_TYPE)


# --- rewriting existing files -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RewriteTask:
    """Rewrite `file` with the table's columns. Its column `v_<i>` is column number i of the table."""

    file: str
    place: SnapshotPlace
    fills: Mapping[str, pa.Scalar]
    """The default values of the columns that this epoch adds."""


def rewrite_file(task: RewriteTask) -> SnapshotFile:
    """Rewrite one file, on an executor."""
    place = replace(task.place, prefix=f"{task.place.prefix}-anew")
    with pq.ParquetFile(task.file, coerce_int96_timestamp_unit="us") as file:
        tables = (
            pa.Table.from_batches([batch]).rename_columns(place.schema.names) for batch in file.iter_batches()
        )
        rows = (
            batch
            for table in tables
            for batch in filled(fitted(table, place.schema), task.fills).to_batches()
        )
        return write_batches(rows, place, 0)
