"""Rows of a Delta table found by key, by whoever runs on an executor: in which file, at which place, and what they are.

Only the key's columns are read, and only of files that may hold one of the keys. A row that a deletion vector has taken out is not there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.change import EXACT
from penstock.errors import SinkError
from penstock.postgres.types.arrays import as_arrow
from penstock.sinks.delta.bounds import Bounds, Probes
from penstock.sinks.delta.roaring import Positions
from penstock.sinks.delta.vectors import DeletionVector, load_vector, local_path
from penstock.sinks.gathering import RowGroup, StoredRows, take
from penstock.sinks.keys import key_codes
from penstock.sinks.lives import bools_of

Numbers = npt.NDArray[np.int64]

_AT_ONCE = 4
_NOWHERE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class ScanFile:
    """One file of the table. Travels to the executors."""

    path: str
    bounds: Bounds
    """Of the columns of `TableFiles.key`."""
    vector: DeletionVector | None


@dataclass(frozen=True, slots=True)
class TableFiles:
    """One version of a table. Travels to the executors."""

    root: str
    schema: pa.Schema
    """With the table's own names."""
    names: pa.Schema
    """The same columns with the names that the files carry."""
    key: tuple[str, ...]
    files: tuple[ScanFile, ...]
    fills: Mapping[str, pa.Scalar] = field(default_factory=dict)
    """What rows have in columns that are added to this version, where it is not null."""

    def field(self, name: str) -> pa.Field:
        """A column as the files have it."""
        return self.names.field(self.schema.get_field_index(name))


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Rows of one file."""

    path: str
    file_rows: int
    """How many rows the file has, those that are gone included."""
    positions: Positions


def find_rows(table: TableFiles, keys: pa.Table, names: Sequence[str]) -> list[FoundRows]:
    """The rows whose columns `names` are equal to a row of `keys`, which are all different; of each file that has any."""
    return [found for found, _ in _find(table, keys, names)]


def find_counted(table: TableFiles, keys: pa.Table, names: Sequence[str], counts: Numbers) -> list[FoundRows]:
    """Of those rows, as many as `counts` has for each of `keys`: rows that nothing tells apart, of which some go."""
    left = counts.copy()
    kept = []
    for found, numbers in _find(table, keys, names):
        order = np.argsort(numbers, kind="stable")
        asked = numbers[order]
        begins = np.concatenate([[True], asked[1:] != asked[:-1]])
        rank = np.arange(asked.size) - np.maximum.accumulate(np.where(begins, np.arange(asked.size), 0))
        chosen = np.sort(order[rank < left[asked]])
        np.subtract.at(left, numbers[chosen], 1)
        if chosen.size:
            kept.append(replace(found, positions=found.positions[chosen]))
    return kept


def _find(table: TableFiles, keys: pa.Table, names: Sequence[str]) -> list[tuple[FoundRows, Numbers]]:
    """And for each row which of the keys it has, by number."""
    if not keys.num_rows:
        return []
    bounded = [name for name in table.key if name in names]
    probes = Probes(keys, bounded)
    places = [table.key.index(name) for name in bounded]
    files = [file for file in table.files if probes.may_be_within(tuple(file.bounds[place] for place in places))]
    wanted = _Wanted(table, keys, names)
    with ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1), thread_name_prefix="penstock-scan") as threads:
        return [found for found in threads.map(wanted.find, files) if found[1].size]


def read_rows(table: TableFiles, found: Sequence[FoundRows], known: Sequence[str]) -> StoredRows:
    """These rows, with all columns of the table; of many only the columns `known` until they are needed."""
    groups = [group for each in found for group in _found_groups(table, each)]
    return StoredRows.load(groups, table.schema, known)


def all_rows(table: TableFiles) -> list[FoundRows]:
    """Every row that is there."""
    found = []
    for file in table.files:
        with _opened(table, file.path) as parquet:
            count = parquet.metadata.num_rows
        found.append(FoundRows(file.path, count, _alive(table, file, np.arange(count))))
    return found


def read_groups(table: TableFiles, file: ScanFile, gone: Positions | None = None) -> Iterator[pa.Table]:
    """The rows of a file that are there, but those at `gone`; a row group at a time."""
    with _opened(table, file.path) as parquet:
        for group, start, count in _groups(parquet.metadata):
            rows = _columns(table, parquet.read_row_group(group), table.schema.names)
            alive = _alive(table, file, np.arange(start, start + count))
            yield take(rows, (alive if gone is None else np.setdiff1d(alive, gone, assume_unique=True)) - start)


def _found_groups(table: TableFiles, found: FoundRows) -> Iterator[RowGroup]:
    with _opened(table, found.path) as parquet:
        metadata = parquet.metadata
    for group, start, count in _groups(metadata):
        low, high = np.searchsorted(found.positions, [start, start + count])
        if low < high:
            load = partial(_load_group, table, found.path, group, found.positions[low:high] - start)
            yield RowGroup(int(high - low), metadata.row_group(group).total_byte_size / count, load)


def _load_group(table: TableFiles, path: str, group: int, at: Positions, names: Sequence[str]) -> pa.Table:
    with _opened(table, path) as parquet:
        columns = None if len(names) == len(table.schema) else [table.field(name).name for name in names]
        rows = parquet.read_row_group(group, columns)
    return take(_columns(table, rows, names), at)


class _Wanted:
    """Keys, and how to meet them in a file."""

    def __init__(self, table: TableFiles, keys: pa.Table, names: Sequence[str]) -> None:
        self._table = table
        self._keys = keys
        self._names = list(names)
        plain = [name for name in names if _has_plain_equality(table.schema.field(name).type)]
        self._sets = {name: keys.column(name).combine_chunks().unique() for name in plain}
        # A value that its column cannot hold is null there, and has a text in `_exact`.
        self._read = [*names, EXACT] if any(keys.column(name).null_count for name in names) else self._names

    def find(self, file: ScanFile) -> tuple[FoundRows, Numbers]:
        places, asked = [_NOWHERE], [_NOWHERE]
        with _opened(self._table, file.path) as parquet:
            for group, start, _ in _groups(parquet.metadata):
                if self._may_be_in(parquet.metadata.row_group(group)):
                    rows = parquet.read_row_group(group, [self._table.field(name).name for name in self._read])
                    at, numbers = self._meet(_columns(self._table, rows, self._read))
                    places.append(at + start)
                    asked.append(numbers)
            count = parquet.metadata.num_rows
        positions, numbers = np.concatenate(places), np.concatenate(asked)
        alive = np.isin(positions, _alive(self._table, file, positions), assume_unique=True)
        return FoundRows(file.path, count, positions[alive]), numbers[alive]

    def _may_be_in(self, group: pq.RowGroupMetaData) -> bool:
        """By the file's own statistics, of whole numbers alone. A name with a dot may be that of a column inside of another."""
        wanted = {self._table.field(name).name: values for name, values in self._sets.items() if pa.types.is_integer(values.type)}
        wanted = {name: values for name, values in wanted.items() if "." not in name}
        for at in range(group.num_columns if wanted else 0):
            column = group.column(at)
            values = wanted.get(column.path_in_schema)
            stats = column.statistics
            if values is None or values.null_count or stats is None or not stats.has_min_max or type(stats.min) is not int:
                continue
            if not pc.any(pc.and_(pc.greater_equal(values, stats.min), pc.less_equal(values, stats.max))).as_py():
                return False
        return True

    def _meet(self, rows: pa.Table) -> tuple[Positions, Numbers]:
        """Places in `rows` that have one of the keys, and which. Most rows are ruled out by one column alone."""
        candidates = np.arange(rows.num_rows)
        for name, values in self._sets.items():
            column = rows.column(name)
            left = column if candidates.size == rows.num_rows else column.take(as_arrow(candidates, pa.int64()))
            candidates = np.compress(bools_of(pc.is_in(left, values)), candidates)
        if not candidates.size:
            return _NOWHERE, _NOWHERE
        ours, theirs = key_codes([self._keys.select(self._read), take(rows, candidates)], self._names)
        by_code = np.full(int(max(ours.max(), theirs.max())) + 1, -1)
        by_code[ours] = np.arange(ours.size)
        asked = by_code[theirs]
        return candidates[asked >= 0], asked[asked >= 0]


def _has_plain_equality(kind: pa.DataType) -> bool:
    """Not numbers with two zeros, and not what has an inside."""
    return not (pa.types.is_floating(kind) or pa.types.is_nested(kind))


def _alive(table: TableFiles, file: ScanFile, positions: Positions) -> Positions:
    if file.vector is None or not positions.size:
        return positions
    return np.setdiff1d(positions, load_vector(Path(table.root), file.vector), assume_unique=True)


def _groups(metadata: pq.FileMetaData) -> Iterator[tuple[int, int, int]]:
    """Number, first row and count of rows of each row group."""
    start = 0
    for group in range(metadata.num_row_groups):
        count = metadata.row_group(group).num_rows
        yield group, start, count
        start += count


@contextmanager
def _opened(table: TableFiles, path: str) -> Iterator[pq.ParquetFile]:
    try:
        # Spark writes times in a form that has no unit; nanoseconds would not hold all of them.
        with pq.ParquetFile(local_path(Path(table.root), path), coerce_int96_timestamp_unit="us") as parquet:
            yield parquet
    except (OSError, ValueError, pa.ArrowException) as error:
        raise SinkError(f"a file of the Delta table at {table.root} cannot be read: {error}") from error


def _columns(table: TableFiles, rows: pa.Table, names: Sequence[str]) -> pa.Table:
    """Columns as the table has them, of rows as the file has them. A column that was added later is null, or what was given to all rows."""
    found: Mapping[str, pa.ChunkedArray] = dict(zip(rows.column_names, rows.columns, strict=True))
    columns = []
    for name in names:
        there, own = table.field(name), table.schema.field(name)
        column = found.get(there.name)
        if column is None:
            fill = table.fills.get(name, pa.scalar(None, own.type))
            columns.append(pa.chunked_array([pa.repeat(fill, rows.num_rows)], own.type))
            continue
        column = column if column.type == there.type else column.cast(there.type)
        columns.append(column if there.type == own.type else pa.chunked_array([chunk.view(own.type) for chunk in column.chunks], own.type))
    return pa.table(columns, schema=pa.schema([table.schema.field(name) for name in names]))
