"""Files of rows, written where the target wants them, by whoever runs on an executor; with what the target's log says about them."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.sinks.base import SnapshotFile, SnapshotPlace
from penstock.sinks.compression import writer_options

_ROW_GROUP_ROWS = 122_880
_ROW_GROUP_BYTES = 64 << 20
_LONGEST_STATISTIC = 64


def write_batches(batches: Iterator[pa.RecordBatch], place: SnapshotPlace, index: int) -> SnapshotFile:
    """Write rows to a file of the number `index`, and say what was written. No rows leave no file."""
    # Another attempt at the same chunk, late or speculative, must not touch a file that may already be part of the table.
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
                table = None  # before the next one is read
                table = next(groups, None)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return SnapshotFile(name, rows, path.stat().st_size, _statistics(path))


@contextmanager
def removed_on_failure(path: Path) -> Iterator[None]:
    """Remove a file that is no part of the table yet if the block fails: a disk that is full would stay full with every attempt."""
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _row_groups(batches: Iterator[pa.RecordBatch], place: SnapshotPlace) -> Iterator[pa.Table]:
    """Join small batches, so that a file has a few row groups and memory holds one."""
    held: list[pa.RecordBatch] = []
    count = size = 0
    for batch in batches:
        held.append(renamed(_completed(batch, place), place.schema))
        count += batch.num_rows
        size += batch.nbytes
        del batch  # or it would still be there when the next one is
        if count >= _ROW_GROUP_ROWS or size >= _ROW_GROUP_BYTES:
            yield pa.Table.from_batches(held, place.schema)
            held, count, size = [], 0, 0
    if count:
        yield pa.Table.from_batches(held, place.schema)


def _completed(batch: pa.RecordBatch, place: SnapshotPlace) -> list[pa.Array]:
    """The columns of `batch`, and among them those that are the same in every row."""
    values, given = dict(place.values), iter(batch.columns)
    return [
        pa.repeat(pa.scalar(values[field.name]).cast(field.type), batch.num_rows) if field.name in values else next(given)
        for field in place.schema
    ]


def renamed(columns: Sequence[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    """Columns under the names of `schema`, inside of structs too; number and order are the same, and types may be wider."""
    columns = [_as_type(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _as_type(column: pa.Array, arrow_type: pa.DataType) -> pa.Array:
    if column.type == arrow_type:
        return column
    try:
        return column.view(arrow_type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # not only names differ: a smallint is an int where there is no smaller one
        return column.cast(arrow_type)


def _statistics(path: Path) -> str:
    """Least and greatest values by column, from the file's own footer, for the types that have a plain order."""
    metadata = pq.read_metadata(path)
    found: dict[str, tuple[object, object, int]] = {}
    for column in range(metadata.num_columns):
        parts = [metadata.row_group(group).column(column) for group in range(metadata.num_row_groups)]
        name = parts[0].path_in_schema
        stats = [part.statistics for part in parts]
        if "." in name or any(each is None or not each.has_min_max or not each.has_null_count for each in stats):
            continue
        low, high = min(each.min for each in stats), max(each.max for each in stats)
        if _is_plain(low) and _is_plain(high):
            found[name] = (_plain(low), _plain(high), sum(each.null_count for each in stats))
    return file_stats(metadata.num_rows, found)


def file_stats(rows: int, columns: Mapping[str, tuple[object, object, int]]) -> str:
    """Statistics of one file as the log holds them: by physical name, least and greatest value and how many are null."""
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
