"""What an executor does for an epoch of an Iceberg table: fold the changes, write a file of rows and one of equality deletes.

An equality delete names rows by columns of their identity, and Iceberg takes away every older row that has these values. That is the whole
answer where these columns tell rows apart. They do not where a key holds numbers that are not exact, or nested values, which a delete may
not name; nor where a key is beyond its column's type, so that the column is null and only `_exact` tells; nor in a table without key. A
delete then takes more than it should, and the rows that were to stay come back with the rows of the epoch: in the same commit, so nobody
sees the difference. For that, and for values that only the target has, the rows that the target holds are needed; a task that lacks them
says which, and is done again.
"""

from __future__ import annotations

import os
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

from penstock.change import EXACT, EXACT_TYPE
from penstock.schema import TableSchema
from penstock.sinks.base import ChangedRows, SnapshotFile, SnapshotPlace
from penstock.sinks.collapse import match_column, match_text_column
from penstock.sinks.compression import writer_options
from penstock.sinks.fold import COUNT, Outcome, fold
from penstock.sinks.gathering import NewRows, RowGroup, Sizes, StoredRows
from penstock.sinks.iceberg.schema import delete_columns, filled, fitted
from penstock.sinks.keys import key_codes
from penstock.sinks.layout import Layout, known_columns
from penstock.sinks.row_files import removed_on_failure, write_batches
from penstock.sinks.slice_reader import Part, read_groups, read_slices
from penstock.sinks.source_truncates import source_column, spelled_by_source
from penstock.sinks.views import View
from penstock.spool import storage
from penstock.spool.range import FileSlice


@dataclass(frozen=True, slots=True)
class Stored:
    """Rows that the target holds, in Parquet files whose columns are called `v_<i>`, for each column of the layout's schema."""

    files: tuple[str, ...]
    fills: Mapping[str, pa.Scalar] = field(default_factory=dict)
    """What they have in columns that are only now added."""

    def load(self, layout: Layout, asked: Sequence[str] = ()) -> StoredRows:
        """All of them; of many only the columns that tell them apart, and those of a lookup, until they are needed."""
        groups = []
        for path in self.files:
            with pq.ParquetFile(path) as file:
                for number in range(file.num_row_groups):
                    group = file.metadata.row_group(number)
                    size = group.total_byte_size / max(group.num_rows, 1)
                    groups.append(RowGroup(group.num_rows, size, partial(self._load, path, number, layout.schema)))
        return StoredRows.load(groups, layout.schema, known_columns(layout, asked))

    def _load(self, path: str, number: int, schema: pa.Schema, names: Sequence[str]) -> pa.Table:
        columns = pa.schema([schema.field(name) for name in names])
        with pq.ParquetFile(path) as file:
            read = file.read_row_group(number, [f"v_{schema.get_field_index(name)}" for name in names])
        return filled(fitted(read.rename_columns(names), columns), self.fills)


@dataclass(frozen=True, slots=True)
class EpochTask:
    """A part of an epoch. `old`: rows that were looked up, one time after the other; `alike`: those that deletes may take without need."""

    slices: tuple[FileSlice, ...]
    layout: Layout
    place: SnapshotPlace
    scratch: str
    names: tuple[str, ...]
    """The columns by which rows that go are told from others."""
    part: Part | None = None
    views: Mapping[TableSchema, View] = field(default_factory=dict)
    adds_only: bool = False
    """The changes are rows as they are; there is nothing to be folded."""
    old: tuple[Stored, ...] = ()
    alike: Stored | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows of the target are needed: those that have the values in the file `keys` in `columns`, or all."""

    columns: tuple[str, ...]
    keys: str | None
    is_old: bool


@dataclass(frozen=True, slots=True)
class WrittenFile:
    name: str
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class EpochFiles:
    """What became of a task: its files; or, with `wanted`, what it needs to be done again."""

    emptied: bool = False
    rows: WrittenFile | None = None
    deletes: WrittenFile | None = None
    wanted: Wanted | None = None


def named_columns(layout: Layout) -> tuple[str, ...]:
    """What tells one row of the target from others; without a key, all that it has."""
    return layout.identity or tuple(layout.columns.names)


def write_epoch(task: EpochTask) -> EpochFiles:
    """The function that travels to the executors."""
    names = task.layout.schema.names
    if task.adds_only:
        return EpochFiles(rows=_write((rows.select(names) for rows in read_groups(task.slices, task.layout, task.views)), task, "rows"))
    lookup = _Lookup(task)
    try:
        changes = read_slices(task.slices, task.layout, task.part, task.views)
        spelled = spelled_by_source(changes, task.layout, source_column(task.views.values()), lookup)
        outcome = fold(spelled, task.layout, lookup)
    except _RowsWantedError as wanted:
        return EpochFiles(wanted=_wanted(wanted.keys, task, _asked(wanted.keys, task.layout), is_old=True))
    return write_outcome(outcome, task)


def write_outcome(outcome: Outcome, task: EpochTask) -> EpochFiles:
    names = task.names
    columns = delete_columns(task.place.schema, names)
    gone, rows, emptied = outcome.gone, outcome.new, outcome.emptied
    if emptied or not gone.num_rows:
        gone = gone.slice(0, 0)
    elif columns != names or COUNT in gone.column_names or _has_nulls(gone, columns):
        if task.alike is None:
            return EpochFiles(wanted=_wanted(gone, task, names, is_old=False))
        stays = staying(gone, task.alike.load(task.layout), names, columns)
        rows += NewRows(rows.schema, ((stays.sizes, stays.take),) if len(stays.sizes) else ())
        emptied = not columns
    deletes = gone.select(columns) if gone.num_rows and columns else None
    return EpochFiles(
        emptied, _write(rows.slices(), task, "rows"), None if deletes is None else _write([_distinct(deletes)], task, "deletes")
    )


def staying(gone: pa.Table, stored: StoredRows, names: Sequence[str], columns: Sequence[str]) -> StoredRows:
    """The rows of `stored` that deletes by `columns` would take, and that are not `gone` by `names`."""
    bare, found = key_codes([gone.select(columns), stored.known.select(columns)], columns)
    touched = np.isin(found, bare) if columns else np.ones(stored.known.num_rows, np.bool_)
    whole, found = key_codes([gone, stored.known], names)
    if COUNT in gone.column_names:
        limit = np.zeros(max(int(whole.max(initial=-1)), int(found.max(initial=-1))) + 1, np.int64)
        limit[whole] = gone.column(COUNT).to_numpy()
        going = _turns(found) < limit[found]
    else:
        going = np.isin(found, whole)
    return stored.only(touched & ~going)


def _turns(codes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each row, how many equal ones stand before it."""
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(codes) else np.zeros(0, np.int64)
    lengths = np.diff(np.r_[starts, len(codes)])
    turns = np.empty(len(codes), np.int64)
    turns[order] = np.arange(len(codes)) - np.repeat(starts, lengths)
    return turns


class _RowsWantedError(Exception):
    def __init__(self, keys: pa.Table | None) -> None:
        super().__init__()
        self.keys = keys


class _Lookup:
    """What is asked for, always the same and in the same order. The rows are those that have been fetched for it, or none have been."""

    def __init__(self, task: EpochTask) -> None:
        self._task = task
        self._fetched = iter(task.old)

    def __call__(self, keys: pa.Table | None) -> StoredRows:
        fetched = next(self._fetched, None)
        if fetched is None:
            raise _RowsWantedError(keys)
        names = _asked(keys, self._task.layout)
        stored = fetched.load(self._task.layout, names)
        if keys is None:
            return stored
        asked, found = key_codes([keys, stored.known], names)
        return stored.only(np.isin(found, asked))


def _asked(keys: pa.Table | None, layout: Layout) -> tuple[str, ...]:
    return () if keys is None else tuple(name for name in layout.columns.names if name in keys.column_names)


def _wanted(keys: pa.Table | None, task: EpochTask, names: Sequence[str], *, is_old: bool) -> Wanted:
    columns = delete_columns(task.place.schema, names)
    if keys is None or not columns:
        return Wanted((), None, is_old)
    if not is_old and columns == tuple(names) and COUNT not in keys.column_names:
        keys = keys.filter(_any_null(keys, columns))
    storage.make_directory(Path(task.scratch))
    path = Path(task.scratch) / f"keys-{secrets.token_hex(8)}.parquet"
    values = fitted(_distinct(keys.select(columns)), pa.schema([task.place.schema.field(name) for name in columns]))
    with storage.create_file(path) as file:
        pq.write_table(values.rename_columns([f"k_{at}" for at in range(len(columns))]), file)
    return Wanted(columns, str(path), is_old)


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
    """No rows leave no file. The name is new each time: another attempt must not touch what may already be part of the table."""
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
        with path.open("rb") as file:
            os.fsync(file.fileno())
        storage.sync_directory(path.parent)
        return WrittenFile(name, rows, path.stat().st_size)


def _fitted(table: pa.Table, task: EpochTask) -> pa.Table:
    return fitted(table, pa.schema([field for field in task.place.schema if field.name in table.column_names]))


# --- what changed while a table was being copied ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RepairTask:
    """Every row under the keys of `changed` is replaced; of `task`, all counts but the slices."""

    changed: ChangedRows
    task: EpochTask


def write_repair(repair: RepairTask) -> EpochFiles:
    """The function that travels to the executors."""
    layout, changed = repair.task.layout, repair.changed
    keys = _read(sorted(map(str, Path(changed.keys).glob("*.parquet"))))
    gone = pa.table(
        [
            *(keys.column(match_column(at)).cast(layout.columns.field(name).type) for at, name in enumerate(layout.key)),
            _exact_keys([keys.column(match_text_column(at)) for at in range(len(layout.key))], layout.key),
        ],
        names=[*layout.key, EXACT],
    )
    return write_outcome(Outcome(False, gone, NewRows(layout.schema, tuple(_repaired(repair)))), repair.task)


def _repaired(repair: RepairTask) -> Iterator[tuple[Sizes, Callable[[npt.NDArray[np.int64]], pa.Table]]]:
    """The rows that were read again, a row group at a time."""
    layout = repair.task.layout

    def load(path: str, number: int, at: npt.NDArray[np.int64]) -> pa.Table:
        with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
            rows = file.read_row_group(number).rename_columns([*layout.columns.names, EXACT]).slice(int(at[0]), len(at))
        for name, value in repair.task.place.values:
            rows = rows.append_column(name, pa.repeat(pa.scalar(value).cast(layout.schema.field(name).type), rows.num_rows))
        return fitted(rows, layout.schema)

    for path in repair.changed.rows:
        with pq.ParquetFile(path) as file:
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                yield np.full(group.num_rows, group.total_byte_size / max(group.num_rows, 1)), partial(load, path, number)


def _read(files: Sequence[str]) -> pa.Table:
    return pa.concat_tables([pq.read_table(file, coerce_int96_timestamp_unit="us") for file in files])


def _exact_keys(texts: Sequence[pa.ChunkedArray], names: Sequence[str]) -> pa.Array:
    if all(column.null_count == len(column) for column in texts):
        return pa.nulls(len(texts[0]), EXACT_TYPE)
    rows = zip(*(column.to_pylist() for column in texts), strict=True)
    found = [[(name, text) for name, text in zip(names, row, strict=True) if text is not None] or None for row in rows]
    return pa.array(found, EXACT_TYPE)


# --- tables that are written anew ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnewTask:
    """A file of rows with all columns of the table, which are called `v_<i>`."""

    file: str
    place: SnapshotPlace
    fills: Mapping[str, pa.Scalar]
    """What they have in columns that are only now added."""


def write_anew(task: AnewTask) -> SnapshotFile:
    """The function that travels to the executors."""
    place = replace(task.place, prefix=f"{task.place.prefix}-anew")
    with pq.ParquetFile(task.file, coerce_int96_timestamp_unit="us") as file:
        tables = (pa.Table.from_batches([batch]).rename_columns(place.schema.names) for batch in file.iter_batches())
        rows = (batch for table in tables for batch in filled(fitted(table, place.schema), task.fills).to_batches())
        return write_batches(rows, place, 0)
