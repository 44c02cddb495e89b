"""Reading the rows of one spooled file: each with its commit, and only those that are wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.change import CHANGE_TYPE, COMMIT_TIMESTAMP, COMMIT_VERSION, EXACT, UNCHANGED, XID, ChangeType, metadata_place
from penstock.errors import SpoolCorruptError
from penstock.spool.range import FileSlice

_OLD = frozenset({ChangeType.DELETE.value, ChangeType.UPDATE_PREIMAGE.value})

ExactEntries: TypeAlias = Sequence[tuple[str, str]]
"""The entries of an `_exact` map: column names, and exact texts."""


def read_rows(slice: FileSlice, max_rows: int, max_bytes: int) -> Iterator[pa.RecordBatch]:
    """The wanted rows in order, in batches of at most so many rows, fewer of long ones; each has `change_schema` of the table."""
    with _opened(slice) as file:
        for batch in file.iter_batches(_batch_rows(slice, max_rows, max_bytes)):
            kept = _within(_with_commit(batch, slice), slice)
            if kept.num_rows:
                yield kept


def read_exact(slice: FileSlice) -> Iterator[tuple[int, ExactEntries]]:
    """The commit and the `_exact` entries of each wanted row that has some, in order. Other columns are not read.

    Of old rows, those of deletes too, only the key counts: what else they show came and was looked at before.
    """
    key = frozenset(slice.file.schema.key)
    for kind, version, entries in _read_filled(slice, EXACT):
        counted = [each for each in entries if each[0] in key] if key and kind in _OLD else entries
        if counted:
            yield version, counted


def read_unidentified(slice: FileSlice) -> Iterator[int]:
    """The commit of each wanted row that does not identify its row, in order: it names a key column in `_unchanged`, or it is a delete
    that names any column there."""
    key = frozenset(slice.file.schema.key)
    for kind, version, names in _read_filled(slice, UNCHANGED):
        if kind == ChangeType.DELETE or not key.isdisjoint(names):
            yield version


def _read_filled(slice: FileSlice, name: str) -> Iterator[tuple[str, int, Any]]:
    """Change type, commit and value of each wanted row in which the metadata column `name` is not null. Other columns are not read."""
    after = slice.after.value if slice.after is not None else None
    upto = slice.upto.value if slice.upto is not None else None
    wanted = (CHANGE_TYPE, COMMIT_VERSION, name)
    with _opened(slice) as file:
        for batch in file.iter_batches(columns=list(wanted)):
            # Columns of the table that have these names are read too: of each name, the metadata is the last.
            kinds, versions, values = (batch.column(max(batch.schema.get_all_field_indices(each))) for each in wanted)
            if slice.file.commit_version is not None:
                versions = pa.repeat(pa.scalar(slice.file.commit_version.value, pa.int64()), batch.num_rows)
            held = values.is_valid()
            for kind, version, value in zip(*(column.filter(held).to_pylist() for column in (kinds, versions, values)), strict=True):
                if (after is None or version > after) and (upto is None or version <= upto):
                    yield kind, version, value


def metadata_column(batch: pa.RecordBatch, slice: FileSlice, name: str) -> pa.Array:
    """By its place, since the table may have a column of the same name."""
    return batch.column(metadata_place(slice.file.schema, name))


@contextmanager
def _opened(slice: FileSlice) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(slice.path) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        # Arrow may quote a value in its message.
        raise SpoolCorruptError(
            f"{slice.path.parent.name}/{slice.path.name} cannot be read: {type(error).__name__}",
            hint="restore the file, or delete the spool; what the slot still holds is captured again",
        ) from error


def _batch_rows(slice: FileSlice, max_rows: int, max_bytes: int) -> int:
    row_bytes = max(1, slice.file.bytes // max(1, slice.file.rows))
    return max(1, min(max_rows, max_bytes // row_bytes))


def _with_commit(batch: pa.RecordBatch, slice: FileSlice) -> pa.RecordBatch:
    """Rows of a transaction that was open when they were written learn its commit and its xid from the manifest."""
    file = slice.file
    if file.commit_version is None:
        return batch
    known = {
        COMMIT_VERSION: pa.scalar(file.commit_version.value, pa.int64()),
        COMMIT_TIMESTAMP: pa.scalar(file.commit_timestamp, pa.timestamp("us", "UTC")),
    }
    if file.xid is not None:
        known[XID] = pa.scalar(file.xid, pa.int64())
    for name, value in known.items():
        place = metadata_place(file.schema, name)
        batch = batch.set_column(place, batch.schema.field(place), pa.repeat(value, batch.num_rows))
    return batch


def _within(batch: pa.RecordBatch, slice: FileSlice) -> pa.RecordBatch:
    if slice.after is not None:
        batch = batch.filter(pc.greater(metadata_column(batch, slice, COMMIT_VERSION), slice.after.value))
    if slice.upto is not None:
        batch = batch.filter(pc.less_equal(metadata_column(batch, slice, COMMIT_VERSION), slice.upto.value))
    return batch
