"""Find rows of a Delta table by key, on executors. Files that cannot contain any of the keys, according to
the statistics in the log, are skipped; the other files are searched.

Only integers, dates, timestamps and texts are compared with the statistics, because writers format other
numbers differently, and some values have no common order. The comparison has a tolerance, because the log
truncates long texts and rounds timestamps. A file whose statistics cannot be compared is searched.

A search reads only the columns that are compared. Rows that a deletion vector removed are not found.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.arrow import as_arrow
from penstock.change import EXACT
from penstock.sinks.delta.deletion_vectors import DeletionVector, Positions, load_vector, table_file
from penstock.sinks.keys import key_codes
from penstock.sinks.row_chains import RowGroup, StoredRows, bools_of, take
from penstock.sinks.row_files import open_data_file

Bound: TypeAlias = int | str | None
"""A minimum or maximum that keys can be compared with; None if it is unknown."""
Bounds: TypeAlias = tuple[tuple[Bound, Bound], ...]
"""The minimum and maximum of each key column. Sent to the executors."""

_MANY = 10_000
_CUT_OFF = 32
"""A text of at least this length in the statistics may have been truncated."""
_ROUNDED_US = 60_001_000
"""Tolerance in microseconds: statistics have milliseconds, and Spark may write historical time zones without
their seconds.
"""
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def load_bounds(stats: str | None, fields: tuple[pa.Field, ...]) -> Bounds:
    """The bounds in the statistics of one file for `fields`, which have the physical names."""
    try:
        found = json.loads(stats) if stats else {}
        low, high = found.get("minValues") or {}, found.get("maxValues") or {}
        return tuple(
            (_low(low.get(field.name), field.type), _high(high.get(field.name), field.type))
            for field in fields
        )
    except (ValueError, AttributeError):
        return ((None, None),) * len(fields)


def _low(value: Any, kind: pa.DataType) -> Bound:
    bound = _bound(value, kind)
    return bound - _ROUNDED_US if isinstance(bound, int) and pa.types.is_timestamp(kind) else bound


def _high(value: Any, kind: pa.DataType) -> Bound:
    bound = _bound(value, kind)
    if isinstance(bound, str) and len(bound) >= _CUT_OFF:
        return None
    return bound + _ROUNDED_US if isinstance(bound, int) and pa.types.is_timestamp(kind) else bound


def _bound(value: Any, kind: pa.DataType) -> Bound:
    """Convert a value of the statistics to the form that `_probes` returns; None if it cannot be compared."""
    if pa.types.is_integer(kind):
        return value if type(value) is int else None
    if not isinstance(value, str):
        return None
    if pa.types.is_string(kind):
        return value
    try:
        if pa.types.is_date(kind):
            return date.fromisoformat(value).toordinal() - _EPOCH_DAY
        if pa.types.is_timestamp(kind):
            return _microseconds(datetime.fromisoformat(value), is_zoned=kind.tz is not None)
    except ValueError:  # a year outside of Python's range
        return None
    return None


def _microseconds(moment: datetime, *, is_zoned: bool) -> int | None:
    if moment.tzinfo is None and is_zoned:
        return None
    return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)


class Probes:
    """The keys of a lookup, in a form that can be compared with bounds."""

    def __init__(self, keys: pa.Table, names: Sequence[str]) -> None:
        self._columns = [_probes(keys.column(name)) for name in names]

    def may_be_within(self, bounds: Bounds) -> bool:
        return all(
            values is None or _may_contain(values, *bound)
            for values, bound in zip(self._columns, bounds, strict=True)
        )


def _probes(column: pa.ChunkedArray) -> list[Any] | None:
    """The values in ascending order. If there are more than `_MANY`: their minimum, None, and their maximum.
    None if the values cannot be compared with bounds.
    """
    kind = column.type
    if column.null_count:
        return None
    if pa.types.is_date32(kind):
        column = column.cast(pa.int32())
    elif pa.types.is_timestamp(kind) and kind.unit == "us":
        column = column.cast(pa.int64())
    elif not (pa.types.is_integer(kind) or pa.types.is_string(kind)):
        return None
    if len(column) > _MANY:
        ends = pc.min_max(column).as_py()
        return [ends["min"], None, ends["max"]]
    return sorted(column.to_pylist())


def _may_contain(values: list[Any], low: Bound, high: Bound) -> bool:
    """Whether one of the values can be within the bounds."""
    if not values:
        return False
    if len(values) == 3 and values[1] is None:
        return (low is None or values[2] >= low) and (high is None or values[0] <= high)
    at = 0 if low is None else bisect_left(values, low)
    return at < len(values) and (high is None or values[at] <= high)


Numbers = npt.NDArray[np.int64]

_AT_ONCE = 4
_NOWHERE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class ScanFile:
    """One file of the table. Sent to the executors."""

    path: str
    bounds: Bounds
    """The bounds of the columns in `TableFiles.key`."""
    vector: DeletionVector | None


@dataclass(frozen=True, slots=True)
class TableFiles:
    """The columns and files of one version of a table. Sent to the executors."""

    root: str
    schema: pa.Schema
    """The columns with their logical names."""
    names: pa.Schema
    """The same columns with their physical names."""
    key: tuple[str, ...]
    files: tuple[ScanFile, ...]
    fills: Mapping[str, pa.Scalar] = field(default_factory=dict)
    """The default values of the columns that this version adds, for existing rows. Columns whose default
    value is NULL are not included.
    """

    def field(self, name: str) -> pa.Field:
        """A column as the files have it, with its physical name."""
        return self.names.field(self.schema.get_field_index(name))


@dataclass(frozen=True, slots=True)
class FoundRows:
    """The rows that a lookup found in one file."""

    path: str
    file_rows: int
    """The number of rows in the file, including deleted ones."""
    positions: Positions


def find_rows(table: TableFiles, keys: pa.Table, names: Sequence[str]) -> list[FoundRows]:
    """Find the rows whose columns `names` equal one of `keys`, which are distinct. Returns one result for
    each file that has such rows.
    """
    return [found for found, _ in _find(table, keys, names)]


def find_counted(table: TableFiles, keys: pa.Table, names: Sequence[str], counts: Numbers) -> list[FoundRows]:
    """Like `find_rows`, but find at most as many rows for each of `keys` as `counts` says. The rows that
    equal one key are indistinguishable, so it does not matter which of them are found.
    """
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
    """Like `find_rows`, but also return, for each row, the number of its key in `keys`."""
    if not keys.num_rows:
        return []
    bounded = [name for name in table.key if name in names]
    probes = Probes(keys, bounded)
    places = [table.key.index(name) for name in bounded]
    files = [
        file for file in table.files if probes.may_be_within(tuple(file.bounds[place] for place in places))
    ]
    wanted = _Wanted(table, keys, names)
    with ThreadPoolExecutor(
        min(_AT_ONCE, os.cpu_count() or 1), thread_name_prefix="penstock-scan"
    ) as threads:
        return [found for found in threads.map(wanted.find, files) if found[1].size]


def read_rows(table: TableFiles, found: Sequence[FoundRows], known: Sequence[str]) -> StoredRows:
    """Load the rows `found`. If there are many, only the columns `known` are loaded now, and whole rows on
    demand.
    """
    groups = [group for each in found for group in _found_groups(table, each)]
    return StoredRows.load(groups, table.schema, known)


def all_rows(table: TableFiles) -> list[FoundRows]:
    """The positions of all rows of the table, without deleted rows."""
    found = []
    for file in table.files:
        with _open(table, file.path) as parquet:
            count = parquet.metadata.num_rows
        found.append(FoundRows(file.path, count, _without_deleted(table, file, np.arange(count))))
    return found


def read_within(table: TableFiles, limit_bytes: int) -> pa.Table | None:
    """Read all rows of the table. Returns None if they exceed `limit_bytes` of memory."""
    parts, size = [table.schema.empty_table()], 0
    for file in table.files:
        for rows in read_groups(table, file):
            size += rows.nbytes
            if size > limit_bytes:
                return None
            parts.append(rows)
    return pa.concat_tables(parts)


def read_groups(table: TableFiles, file: ScanFile, gone: Positions | None = None) -> Iterator[pa.Table]:
    """Yield the rows of a file, one row group at a time, without deleted rows and the rows at positions
    `gone`.
    """
    with _open(table, file.path) as parquet:
        for group, start, count in _groups(parquet.metadata):
            rows = _columns(table, parquet.read_row_group(group), table.schema.names)
            alive = _without_deleted(table, file, np.arange(start, start + count))
            yield take(
                rows, (alive if gone is None else np.setdiff1d(alive, gone, assume_unique=True)) - start
            )


def _found_groups(table: TableFiles, found: FoundRows) -> Iterator[RowGroup]:
    with _open(table, found.path) as parquet:
        metadata = parquet.metadata
    for group, start, count in _groups(metadata):
        low, high = np.searchsorted(found.positions, [start, start + count])
        if low < high:
            load = partial(_load_group, table, found.path, group, found.positions[low:high] - start)
            yield RowGroup(int(high - low), metadata.row_group(group).total_byte_size / count, load)


def _load_group(table: TableFiles, path: str, group: int, at: Positions, names: Sequence[str]) -> pa.Table:
    with _open(table, path) as parquet:
        columns = None if len(names) == len(table.schema) else [table.field(name).name for name in names]
        rows = parquet.read_row_group(group, columns)
    return take(_columns(table, rows, names), at)


class _Wanted:
    """Finds the rows of a file that have one of the keys of a lookup."""

    def __init__(self, table: TableFiles, keys: pa.Table, names: Sequence[str]) -> None:
        self._table = table
        self._keys = keys
        self._names = list(names)
        plain = [name for name in names if _has_plain_equality(table.schema.field(name).type)]
        self._sets = {name: keys.column(name).combine_chunks().unique() for name in plain}
        # If a column cannot hold a value, the column is null and `_exact` has the text, so read `_exact` too.
        self._read = [*names, EXACT] if any(keys.column(name).null_count for name in names) else self._names

    def find(self, file: ScanFile) -> tuple[FoundRows, Numbers]:
        places, asked = [_NOWHERE], [_NOWHERE]
        with _open(self._table, file.path) as parquet:
            for group, start, _ in _groups(parquet.metadata):
                if self._may_be_in(parquet.metadata.row_group(group)):
                    rows = parquet.read_row_group(
                        group, [self._table.field(name).name for name in self._read]
                    )
                    at, numbers = self._match(_columns(self._table, rows, self._read))
                    places.append(at + start)
                    asked.append(numbers)
            count = parquet.metadata.num_rows
        positions, numbers = np.concatenate(places), np.concatenate(asked)
        alive = np.isin(positions, _without_deleted(self._table, file, positions), assume_unique=True)
        return FoundRows(file.path, count, positions[alive]), numbers[alive]

    def _may_be_in(self, group: pq.RowGroupMetaData) -> bool:
        """Whether a row group can contain one of the keys, according to the file's own statistics of integer
        columns. Names with a dot are not checked, because they may be paths of nested columns.
        """
        wanted = {
            self._table.field(name).name: values
            for name, values in self._sets.items()
            if pa.types.is_integer(values.type)
        }
        wanted = {name: values for name, values in wanted.items() if "." not in name}
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

    def _match(self, rows: pa.Table) -> tuple[Positions, Numbers]:
        """Return the indexes of the rows that have one of the keys, and for each of them the number of its
        key. Comparing single columns first excludes most rows.
        """
        candidates = np.arange(rows.num_rows)
        for name, values in self._sets.items():
            column = rows.column(name)
            left = (
                column if candidates.size == rows.num_rows else column.take(as_arrow(candidates, pa.int64()))
            )
            candidates = np.compress(bools_of(pc.is_in(left, values)), candidates)
        if not candidates.size:
            return _NOWHERE, _NOWHERE
        ours, theirs = key_codes([self._keys.select(self._read), take(rows, candidates)], self._names)
        by_code = np.full(int(max(ours.max(), theirs.max())) + 1, -1)
        by_code[ours] = np.arange(ours.size)
        asked = by_code[theirs]
        return candidates[asked >= 0], asked[asked >= 0]


def _has_plain_equality(kind: pa.DataType) -> bool:
    """Whether Arrow's comparison of values of this type equals the comparison of keys. That is not so for
    floats, which have two zeros, and for nested types.
    """
    return not (pa.types.is_floating(kind) or pa.types.is_nested(kind))


def _without_deleted(table: TableFiles, file: ScanFile, positions: Positions) -> Positions:
    if file.vector is None or not positions.size:
        return positions
    return np.setdiff1d(positions, load_vector(Path(table.root), file.vector), assume_unique=True)


def _groups(metadata: pq.FileMetaData) -> Iterator[tuple[int, int, int]]:
    """Yield the number, the first row and the row count of each row group."""
    start = 0
    for group in range(metadata.num_row_groups):
        count = metadata.row_group(group).num_rows
        yield group, start, count
        start += count


def _open(table: TableFiles, path: str) -> AbstractContextManager[pq.ParquetFile]:
    return open_data_file(table_file(Path(table.root), path))


def _columns(table: TableFiles, rows: pa.Table, names: Sequence[str]) -> pa.Table:
    """Convert rows of a file to the table's columns `names`. A column that was added after the file was
    written is null, or has its default value.
    """
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
        columns.append(
            column
            if there.type == own.type
            else pa.chunked_array([chunk.view(own.type) for chunk in column.chunks], own.type)
        )
    return pa.table(columns, schema=pa.schema([table.schema.field(name) for name in names]))
