"""The changes of letters, kept as they were spooled, so that they can be read and applied like any others."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.change import CHANGE_TYPE, COMMIT_VERSION, ORDINAL, UNCHANGED, ChangeCounts, ChangeType, metadata_place
from penstock.errors import SpoolCorruptError
from penstock.pipeline.letters.screening import Name
from penstock.position import Position
from penstock.schema import TableSchema
from penstock.spool import storage
from penstock.spool.manifest import SegmentFile, parse_schema, schema_document
from penstock.spool.range import FileSlice

_SCHEMA = b"penstock.table"


def write_durably(path: Path, rows: pa.Table) -> None:
    with storage.create_file(path) as file:
        pq.write_table(rows, file)
    storage.sync_file(path)


def write_changes(path: Path, schema: TableSchema, batches: list[pa.RecordBatch]) -> None:
    """`batches` as they were spooled. The shape of the table goes with them."""
    rows = pa.Table.from_batches(batches)
    write_durably(path, rows.replace_schema_metadata({_SCHEMA: json.dumps(schema_document(schema)).encode()}))


def shape_of(path: Path) -> bytes:
    """Tells files apart whose changes are not of the same shape."""
    return bytes((pq.read_schema(path).metadata or {}).get(_SCHEMA, b""))


def read_changes(path: Path) -> tuple[TableSchema, pa.Table]:
    """What `write_changes` wrote."""
    try:
        with pq.ParquetFile(path) as file:
            schema = parse_schema(json.loads((file.schema_arrow.metadata or {})[_SCHEMA]))
            return schema, file.read()
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        hint = "restore the file; without it these letters cannot be replayed, and `penstock tables resync` copies the table anew"
        raise SpoolCorruptError(f"{path} cannot be read", hint=hint) from error


def load_slice(path: Path, wanted: Collection[Name] | None, end: Position) -> FileSlice:
    """The letters `wanted` of a file, or all, as if they had come at `end`: they are behind the target's position otherwise."""
    schema, rows = read_changes(path)
    kinds, unchanged, versions, ordinals = (
        rows.column(metadata_place(schema, name)) for name in (CHANGE_TYPE, UNCHANGED, COMMIT_VERSION, ORDINAL)
    )
    names = list(zip(versions.to_pylist(), ordinals.to_pylist(), strict=True))
    counts = ChangeCounts(
        inserts=pc.sum(pc.equal(kinds, ChangeType.INSERT.value)).as_py() or 0,
        updates=pc.sum(pc.not_equal(kinds, ChangeType.INSERT.value)).as_py() or 0,
        unchanged=len(unchanged) - unchanged.null_count,
        inexact=rows.num_rows,
        unreadable=rows.num_rows,
    )
    file_of = SegmentFile(schema, path.name, rows.num_rows, path.stat().st_size, counts, end, end)
    return FileSlice(path.absolute(), file_of, None, None, frozenset(name for name in names if wanted is not None and name not in wanted))


def leave_out(slice: FileSlice, names: Collection[Name]) -> FileSlice:
    """Without these, as far as they can be in it."""
    low, high = slice.file.min_position.value, slice.file.max_position.value
    within = frozenset(name for name in names if low <= name[0] <= high)
    return replace(slice, without=slice.without | within) if within else slice
