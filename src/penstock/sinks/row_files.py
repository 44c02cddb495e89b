"""Parquet data files of a target. Files are written with statistics, and with a compression that is chosen
for each column. Errors in reading a file never quote its contents.

zstd at level 1 is as fast as snappy and needs half the space. But compressing a column without repetitions,
such as UUIDs or encrypted values, takes longer than compressing all other columns together. Such columns are
written without compression, because snappy would not make them smaller either.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock import storage
from penstock.errors import SinkError, TargetFileLostError
from penstock.foreign import describe
from penstock.sinks.base import SnapshotFile, SnapshotPlace

_SAMPLE_BYTES = 64 << 10
_WORTH_IT = 0.9

# A column whose dictionary would exceed this size is written without one: a dictionary of more than a few
# thousand values costs much time and saves little space.
_DICTIONARY_BYTES = 32 << 10


def writer_options(sample: pa.Table) -> dict[str, Any]:
    """Options for a `ParquetWriter`, chosen from the first rows."""
    plain = {name for name in sample.column_names if _repeats_nothing(sample.column(name))}
    compressed = [path for path in _leaf_paths(sample.schema) if path not in plain]
    return {
        "compression": dict.fromkeys(compressed, "zstd") | dict.fromkeys(plain, "none"),
        "compression_level": dict.fromkeys(compressed, 1),
        "dictionary_pagesize_limit": _DICTIONARY_BYTES,
    }


def _repeats_nothing(column: pa.ChunkedArray) -> bool:
    """Whether a column has no repetitions. lz4, which is very fast and finds only repetitions, then does not
    shrink the column's first values.
    """
    if not (pa.types.is_string(column.type) or pa.types.is_binary(column.type)) or not column.num_chunks:
        return False
    octets = column.chunk(0).buffers()[2]
    if octets is None or octets.size < _SAMPLE_BYTES:
        return False
    sample = octets.slice(0, _SAMPLE_BYTES)
    return bool(pa.compress(sample, "lz4_raw").size > _WORTH_IT * sample.size)


def _leaf_paths(schema: pa.Schema) -> list[str]:
    """The paths of the leaf columns, as Parquet counts them. Each part of a nested column is a leaf."""
    leaves = as_written(schema).schema
    return [leaves.column(index).path for index in range(len(leaves.names))]


def as_written(schema: pa.Schema) -> pq.ParquetFile:
    """An empty Parquet file in memory with the columns of `schema`, as pyarrow writes them."""
    file = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), file)
    return pq.ParquetFile(pa.BufferReader(file.getvalue()))


@contextmanager
def open_data_file(path: str | Path) -> Iterator[pq.ParquetFile]:
    """Open a data file of the target. Raises `TargetFileLostError` if the file is missing or is not Parquet,
    and `SinkError` for other errors during the block.
    """
    file: pq.ParquetFile | None = None
    try:
        # Spark writes INT96 times, which have no unit. pyarrow would read them as nanoseconds, which cannot
        # represent all of them.
        with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
            yield file
    except FileNotFoundError as error:
        raise TargetFileLostError(f"the file {path} of the target is missing") from error
    except (OSError, ValueError, pa.ArrowException) as error:
        is_damaged = file is None and not (isinstance(error, OSError) and error.errno is not None)
        kind = TargetFileLostError if is_damaged else SinkError
        raise kind(f"the file {path} of the target cannot be read: {describe(error)}") from error


def data_file_bytes(path: str | Path) -> int:
    """The size of the file; raises `TargetFileLostError` if it is missing."""
    try:
        return storage.size_bytes(Path(path))
    except FileNotFoundError as error:
        raise TargetFileLostError(f"the file {path} of the target is missing") from error


_ROW_GROUP_ROWS = 122_880
_ROW_GROUP_BYTES = 64 << 20
_LONGEST_STATISTIC = 64


def write_batches(batches: Iterator[pa.RecordBatch], place: SnapshotPlace, index: int) -> SnapshotFile:
    """Write rows to a new file whose name contains the number `index`. Without rows, no file is written."""
    # Each attempt needs its own name: a late or speculative attempt must not touch a file that may already be
    # part of the table.
    name = f"{place.prefix}-{index:06d}-{secrets.token_hex(4)}.parquet"
    path = Path(place.directory) / name
    groups = _row_groups(batches, place)
    table = next(groups, None)
    if table is None:
        return SnapshotFile(name, 0, 0, "{}")
    rows = 0
    with removed_on_failure(path):
        with pq.ParquetWriter(path, place.schema, **writer_options(table)) as writer:
            while table is not None:
                writer.write_table(table)
                rows += table.num_rows
                table = None  # release it before the next one is read
                table = next(groups, None)
        storage.sync_file(path)
        return SnapshotFile(name, rows, storage.size_bytes(path), _statistics(path))


@contextmanager
def removed_on_failure(path: Path) -> Iterator[None]:
    """Remove an uncommitted file if the block fails. Otherwise every attempt would leave a file on a full
    disk.
    """
    try:
        yield
    except BaseException:
        storage.delete(path)
        raise


def new_attempt() -> str:
    """Return a random name for one attempt at an epoch, which is part of the names of all files that it
    writes.
    """
    return secrets.token_hex(8)


def remove_attempt(directory: Path, attempt: str) -> None:
    """Remove the Parquet files of an attempt that did not reach its commit, including those of finished
    tasks.

    A cancelled Spark task may still write for a moment; its file is left to VACUUM.
    """
    for file in storage.list_paths(directory, f"*-{attempt}-*.parquet"):
        storage.delete(file)


def _row_groups(batches: Iterator[pa.RecordBatch], place: SnapshotPlace) -> Iterator[pa.Table]:
    """Join small batches, so that a file has few row groups. Memory holds one row group at a time."""
    held: list[pa.RecordBatch] = []
    count = size = 0
    for batch in batches:
        held.append(renamed(_completed(batch, place), place.schema))
        count += batch.num_rows
        size += batch.nbytes
        del batch  # otherwise it stays in memory during the next read
        if count >= _ROW_GROUP_ROWS or size >= _ROW_GROUP_BYTES:
            yield pa.Table.from_batches(held, place.schema)
            held, count, size = [], 0, 0
    if count:
        yield pa.Table.from_batches(held, place.schema)


def _completed(batch: pa.RecordBatch, place: SnapshotPlace) -> list[pa.Array]:
    """The columns of `place.schema`, from `batch` and from the constants in `place.values`."""
    values, given = dict(place.values), iter(batch.columns)
    return [
        pa.repeat(pa.scalar(values[field.name]).cast(field.type), batch.num_rows)
        if field.name in values
        else next(given)
        for field in place.schema
    ]


def renamed(columns: Sequence[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    """Give `columns` the names of `schema`, also inside structs, and its types, which may be wider. The
    number and the order of the columns are the same.
    """
    columns = [_as_type(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _as_type(column: pa.Array, arrow_type: pa.DataType) -> pa.Array:
    if column.type == arrow_type:
        return column
    try:
        return column.view(arrow_type)
    except (
        pa.ArrowInvalid,
        pa.ArrowNotImplementedError,
    ):  # types differ, not only names: a smallint is written as int where there is no smaller type
        return column.cast(arrow_type)


def _statistics(path: Path) -> str:
    """The statistics of a file in the format of the Delta log, from the file's footer. Only columns with
    integer, date or short text bounds are included.
    """
    metadata = pq.read_metadata(path)
    found: dict[str, tuple[object, object, int]] = {}
    for column in range(metadata.num_columns):
        parts = [metadata.row_group(group).column(column) for group in range(metadata.num_row_groups)]
        name = parts[0].path_in_schema
        stats = [part.statistics for part in parts]
        if "." in name or any(
            each is None or not each.has_min_max or not each.has_null_count for each in stats
        ):
            continue
        low, high = min(each.min for each in stats), max(each.max for each in stats)
        if _is_plain(low) and _is_plain(high):
            found[name] = (_plain(low), _plain(high), sum(each.null_count for each in stats))
    return file_stats(metadata.num_rows, found)


def file_stats(rows: int, columns: Mapping[str, tuple[object, object, int]]) -> str:
    """File statistics in the format of the Delta log: minimum, maximum and null count by physical column
    name.
    """
    return json.dumps(
        {
            "numRecords": rows,
            "minValues": {name: low for name, (low, _, _) in columns.items()},
            "maxValues": {name: high for name, (_, high, _) in columns.items()},
            "nullCount": {name: nulls for name, (_, _, nulls) in columns.items()},
        }
    )


def _is_plain(value: object) -> bool:
    return type(value) in (int, date) or (type(value) is str and len(value) <= _LONGEST_STATISTIC)


def _plain(value: object) -> object:
    return value.isoformat() if isinstance(value, date) else value
