"""Find rows of an Iceberg table by key, on executors.

First, only the columns of the lookup and of equality deletes are read, from files that may contain one of the
keys. Then each row group in which a row was found is read completely. Rows that a later equality delete
matches are left out. Columns are identified by field id, whatever their name was when the file was written.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock import storage
from penstock.arrow import as_arrow
from penstock.sinks.iceberg.schema import by_number, field_ids, numbers_of
from penstock.sinks.keys import key_codes
from penstock.sinks.modes import CURRENT
from penstock.sinks.row_chains import bools_of, take
from penstock.sinks.row_files import data_file_bytes, open_data_file

_AT_ONCE = 4
_DELETES_AT_ONCE = 1_000_000

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LakeFile:
    """A data or delete file of the table. A higher sequence number means a later commit."""

    path: str
    sequence: int
    columns: tuple[int, ...] = ()
    """The field ids of the columns of an equality delete."""


@dataclass(frozen=True, slots=True)
class FindTask:
    """Find the rows of `files` whose values in `columns` are one of the keys, and that no delete file in
    `deletes` matches. `keys` are files with the keys, in columns `k_<i>`.
    """

    files: tuple[LakeFile, ...]
    deletes: tuple[LakeFile, ...]
    columns: tuple[str, ...]
    keys: tuple[str, ...]
    schema: pa.Schema
    """The schema of the rows to write, with field ids."""
    directory: str
    is_current: bool = False
    """Whether to find only current versions, in a table of mode `history`."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file with the found rows, in columns `v_<i>`; its path is None if no row was found."""

    path: str | None
    is_known: bool = True
    """Whether all files could be read. False if a file lacks field ids."""


class _NotNumberedError(Exception):
    pass


def find_rows(task: FindTask) -> FoundFile:
    """Find rows and write them to a file, on an executor."""
    keys = pa.concat_tables([pq.read_table(file) for file in task.keys]).rename_columns(list(task.columns))
    finder = _Finder(task, keys)
    try:
        with ThreadPoolExecutor(
            min(_AT_ONCE, os.cpu_count() or 1), thread_name_prefix="penstock-find"
        ) as threads:
            found = list(threads.map(finder.find, task.files))
    except _NotNumberedError:
        return FoundFile(None, is_known=False)
    groups = [group for each in found for group in each]
    rows = pa.concat_tables([finder.known.empty_table(), *(group.rows for group in groups)])
    sequences = np.repeat(
        [group.file.sequence for group in groups], [group.at.size for group in groups]
    ).astype(np.int64)
    there = _is_there(rows, sequences, task.deletes)
    if task.is_current:
        there &= bools_of(rows.column(CURRENT))
    return FoundFile(_write_found(groups, there, task) if there.any() else None)


def _write_found(groups: Sequence[_FoundGroup], there: npt.NDArray[np.bool_], task: FindTask) -> str:
    """Write whole rows, one row group at a time, since they may be much larger than their keys."""
    storage.ensure_directory(Path(task.directory))
    path = Path(task.directory) / f"found-{secrets.token_hex(8)}.parquet"
    names = [f"v_{at}" for at in range(len(task.schema))]
    start = 0
    schema = task.schema.empty_table().rename_columns(names).schema
    with storage.open_new(path) as out, pq.ParquetWriter(out, schema) as writer:
        for group in groups:
            at = np.compress(there[start : start + group.at.size], group.at)
            start += group.at.size
            if at.size:
                with open_data_file(group.file.path) as file:
                    rows = by_number(file.read_row_group(group.number), task.schema)
                writer.write_table(take(rows, at).rename_columns(names))
    return str(path)


@dataclass(frozen=True, slots=True)
class _FoundGroup:
    """The rows of one row group that match a key: their indexes (`at`), and their values in the columns that
    keys and deletes have (`rows`).
    """

    file: LakeFile
    number: int
    at: Numbers
    rows: pa.Table


def read_all(
    files: Sequence[LakeFile], deletes: Sequence[LakeFile], schema: pa.Schema, limit_bytes: int
) -> pa.Table | None:
    """Read every row of `files` that no delete matches. Returns None if the rows exceed `limit_bytes`, or if
    a file lacks field ids.
    """
    if sum(data_file_bytes(held.path) for held in (*files, *deletes)) > limit_bytes:
        return None
    found, size = [schema.empty_table()], 0
    for held in files:
        with open_data_file(held.path) as file:
            if not numbers_of(file.schema_arrow):
                return None
            for group in range(file.num_row_groups):
                rows = by_number(file.read_row_group(group), schema)
                size += rows.nbytes
                if size > limit_bytes:
                    return None
                found.append(
                    take(
                        rows, np.flatnonzero(_is_there(rows, np.full(rows.num_rows, held.sequence), deletes))
                    )
                )
    return pa.concat_tables(found)


class _Finder:
    """Finds the rows of a file that match the keys of a task."""

    def __init__(self, task: FindTask, keys: pa.Table) -> None:
        self._task = task
        self._keys = keys
        self._columns = pa.schema([task.schema.field(name) for name in task.columns])
        numbers = {
            *field_ids(task.schema, task.columns),
            *(number for file in task.deletes for number in file.columns),
        }
        wanted = {
            name
            for name in task.schema.names
            if field_ids(task.schema, [name])[0] in numbers or (task.is_current and name == CURRENT)
        }
        self.known = pa.schema([field for field in task.schema if field.name in wanted])
        self._sets = {name: keys.column(name).combine_chunks().unique() for name in task.columns}

    def find(self, held: LakeFile) -> list[_FoundGroup]:
        found: list[_FoundGroup] = []
        with open_data_file(held.path) as file:
            known = numbers_of(file.schema_arrow)
            if not known:
                raise _NotNumberedError
            names = {number: file.schema_arrow.names[at] for number, at in known.items()}
            for group in range(file.num_row_groups):
                if self._may_be_in(file.metadata.row_group(group), names):
                    read = [
                        names[number] for number in field_ids(self.known, self.known.names) if number in names
                    ]
                    rows = by_number(file.read_row_group(group, read or None), self.known)
                    at = self._match(rows.select(self._task.columns))
                    if at.size:
                        found.append(_FoundGroup(held, group, at, take(rows, at)))
        return found

    def _may_be_in(self, group: pq.RowGroupMetaData, names: dict[int, str]) -> bool:
        """Whether a row group can contain one of the keys, according to the file's statistics of integer
        columns. Names with a dot are not checked, because they may be paths of nested columns.
        """
        numbers = field_ids(self._columns, self._task.columns)
        wanted = {
            names.get(number, "."): self._sets[name]
            for number, name in zip(numbers, self._task.columns, strict=True)
        }
        wanted = {
            name: values
            for name, values in wanted.items()
            if "." not in name and pa.types.is_integer(values.type)
        }
        for at in range(group.num_columns if wanted else 0):
            column = group.column(at)
            values = wanted.get(column.path_in_schema)
            stats = column.statistics
            if (
                values is None
                or values.null_count
                or stats is None
                or not stats.has_min_max
                or type(stats.min) is not int
            ):
                continue
            if not pc.any(
                pc.and_(pc.greater_equal(values, stats.min), pc.less_equal(values, stats.max))
            ).as_py():
                return False
        return True

    def _match(self, rows: pa.Table) -> Numbers:
        """The indexes of the rows that match a key. Comparing single columns first excludes most rows."""
        at = np.arange(rows.num_rows)
        for name, values in self._sets.items():
            column = rows.column(name)
            left = column if at.size == rows.num_rows else column.take(as_arrow(at, pa.int64()))
            at = np.compress(bools_of(pc.is_in(left, values)), at)
        if not at.size or len(self._sets) == 1:
            return at
        asked, found = key_codes([self._keys, take(rows, at)], self._task.columns)
        return np.compress(np.isin(found, asked), at)


def _is_there(rows: pa.Table, sequences: Numbers, deletes: Sequence[LakeFile]) -> npt.NDArray[np.bool_]:
    """A mask of the rows that no later delete matches."""
    there = np.ones(rows.num_rows, np.bool_)
    if not rows.num_rows:
        return there
    later = sorted(
        (file for file in deletes if file.sequence > sequences.min()), key=lambda file: file.columns
    )
    for columns, files in groupby(later, lambda file: file.columns):
        last = _last_deletes(rows, list(files), columns)
        there &= sequences >= last
    return there


def _last_deletes(rows: pa.Table, files: Sequence[LakeFile], columns: Sequence[int]) -> Numbers:
    """For each row, the sequence number of the last delete that matches it; -1 if none does."""
    names = [
        name for number in columns for name in rows.column_names if field_ids(rows.schema, [name]) == [number]
    ]
    found = np.full(rows.num_rows, -1, np.int64)
    for deletes, sequences in _read_deletes(files, pa.schema([rows.schema.field(name) for name in names])):
        own, gone = key_codes([rows.select(names), deletes], names)
        last = np.full(max(int(own.max(initial=-1)), int(gone.max(initial=-1))) + 1, -1, np.int64)
        np.maximum.at(last, gone, sequences)
        np.maximum(found, last[own], out=found)
    return found


def _read_deletes(files: Sequence[LakeFile], schema: pa.Schema) -> Iterator[tuple[pa.Table, Numbers]]:
    """Yield deletes and their sequence numbers in batches, because a table may have many more deletes than an
    epoch has changes.
    """
    held: list[pa.Table] = []
    sequences: list[int] = []
    for each in files:
        with open_data_file(each.path) as file:
            for group in range(file.num_row_groups):
                held.append(by_number(file.read_row_group(group), schema))
                sequences.append(each.sequence)
                if sum(table.num_rows for table in held) >= _DELETES_AT_ONCE:
                    yield _joined(held, sequences)
                    held, sequences = [], []
    if held:
        yield _joined(held, sequences)


def _joined(tables: Sequence[pa.Table], sequences: Sequence[int]) -> tuple[pa.Table, Numbers]:
    return pa.concat_tables(tables), np.repeat(sequences, [table.num_rows for table in tables]).astype(
        np.int64
    )
