"""Read the rows of a spool file with their commits, and detect rejected rows.

A row is rejected if it has an invalid text, if it does not have its complete key, or if a value is out of
range and the configuration asks for an error. The capture writes such rows to the spool, because other tables
share its stream and other readers may accept NULL. Manifests count such rows, so only files that contain some
are opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.change import (
    CHANGE_TYPE,
    COMMIT_TIMESTAMP,
    COMMIT_VERSION,
    EXACT,
    REPLACED,
    UNCHANGED,
    XID,
    ChangeType,
    metadata_index,
)
from penstock.errors import (
    PenstockError,
    RowUnidentifiedError,
    SpoolCorruptError,
    UnreadableTextError,
    UnrepresentableError,
)
from penstock.schema import TableName
from penstock.spool.reader import FileSlice

_OLD = frozenset({ChangeType.DELETE.value, ChangeType.UPDATE_PREIMAGE.value})

ExactEntries: TypeAlias = Sequence[tuple[str, str]]
"""The entries of an `_exact` map: column name and exact text."""


def read_rows(slice: FileSlice, max_rows: int, max_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a slice in order, in batches of at most `max_rows` and about `max_bytes`, with
    `change_schema` of the table.
    """
    with _opened(slice) as file:
        for batch in file.iter_batches(_batch_rows(slice, max_rows, max_bytes)):
            kept = _within(_with_commit(batch, slice), slice)
            if kept.num_rows:
                yield kept


def read_exact(slice: FileSlice) -> Iterator[tuple[int, ExactEntries]]:
    """Yield the commit and the `_exact` entries of each row that has some, in order. Other columns are not
    read.

    In old rows and deletes only key columns count, since the other values were checked when they were
    inserted.
    """
    key = frozenset(slice.file.schema.key)
    for kind, version, entries in _read_filled(slice, EXACT):
        counted = [each for each in entries if each[0] in key] if key and kind in _OLD else entries
        if counted:
            yield version, counted


def read_unidentified(slice: FileSlice) -> Iterator[int]:
    """Yield the commit of each row without a complete identity, in order.

    A row counts if `_unchanged` names a key column or, for a delete, any column.
    """
    key = frozenset(slice.file.schema.key)
    for kind, version, names in _read_filled(slice, UNCHANGED):
        if kind == ChangeType.DELETE or not key.isdisjoint(names):
            yield version


def _read_filled(slice: FileSlice, name: str) -> Iterator[tuple[str, int, Any]]:
    """Yield change type, commit and value of each row of the slice in which the metadata column `name` is not
    null.
    """
    after = slice.after.value if slice.after is not None else None
    upto = slice.upto.value if slice.upto is not None else None
    wanted = (CHANGE_TYPE, COMMIT_VERSION, name)
    with _opened(slice) as file:
        for batch in file.iter_batches(columns=list(wanted)):
            # Table columns with these names are read too; the metadata column is the last of its name.
            kinds, versions, values = (
                batch.column(max(batch.schema.get_all_field_indices(each))) for each in wanted
            )
            if slice.file.commit_version is not None:
                versions = pa.repeat(pa.scalar(slice.file.commit_version.value, pa.int64()), batch.num_rows)
            held = values.is_valid()
            for kind, version, value in zip(
                *(column.filter(held).to_pylist() for column in (kinds, versions, values)), strict=True
            ):
                if (after is None or version > after) and (upto is None or version <= upto):
                    yield kind, version, value


def metadata_column(batch: pa.RecordBatch, slice: FileSlice, name: str) -> pa.Array:
    """Return a metadata column by its index, since the table may have a column of that name."""
    return batch.column(metadata_index(slice.file.schema, name))


@contextmanager
def _opened(slice: FileSlice) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(slice.path) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        # Arrow may quote a value in its message, so only the class of the error is shown.
        raise SpoolCorruptError(
            f"{slice.path.parent.name}/{slice.path.name} cannot be read: {type(error).__name__}",
            hint="restore the file, or delete the spool; changes that the slot still holds are captured "
            "again",
        ) from error


def _batch_rows(slice: FileSlice, max_rows: int, max_bytes: int) -> int:
    row_bytes = max(1, slice.file.bytes // max(1, slice.file.rows))
    return max(1, min(max_rows, max_bytes // row_bytes))


def _with_commit(batch: pa.RecordBatch, slice: FileSlice) -> pa.RecordBatch:
    """Fill commit and xid from the manifest, for rows that were written while their transaction was open."""
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
        place = metadata_index(file.schema, name)
        batch = batch.set_column(place, batch.schema.field(place), pa.repeat(value, batch.num_rows))
    return batch


def _within(batch: pa.RecordBatch, slice: FileSlice) -> pa.RecordBatch:
    if slice.after is not None:
        batch = batch.filter(pc.greater(metadata_column(batch, slice, COMMIT_VERSION), slice.after.value))
    if slice.upto is not None:
        batch = batch.filter(pc.less_equal(metadata_column(batch, slice, COMMIT_VERSION), slice.upto.value))
    return batch


@dataclass(frozen=True, slots=True)
class RejectedChange:
    """A rejected change: its commit, and the error that names its table or column."""

    version: int
    error: PenstockError


def check_values(table: TableName, slices: Iterable[FileSlice], *, reject_inexact: bool) -> None:
    """Raise the error of the first rejected change, if there is one."""
    refused = first_rejected(table, slices, reject_inexact=reject_inexact)
    if refused is not None:
        raise refused.error


def check_identified(slices: Iterable[FileSlice]) -> None:
    """Raise if a change does not identify its row.

    Such a change is neither applied nor made a dead letter, whatever the policy.
    """
    for each in slices:
        for refused in _unidentified(each):
            raise refused.error


def first_rejected(
    table: TableName, slices: Iterable[FileSlice], *, reject_inexact: bool
) -> RejectedChange | None:
    """Return the first rejected change in log order; None if there is none."""
    for each in slices:
        found = [
            next(_unidentified(each), None),
            next(_refused(table, each, reject_inexact=reject_inexact), None),
        ]
        stops = [refused for refused in found if refused is not None]
        if stops:
            return min(stops, key=attrgetter("version"))
    return None


def _unidentified(slice: FileSlice) -> Iterator[RejectedChange]:
    if slice.file.counts.unidentified:
        for version in read_unidentified(slice):
            yield RejectedChange(version, RowUnidentifiedError.of(slice.file.table))


def _refused(table: TableName, slice: FileSlice, *, reject_inexact: bool) -> Iterator[RejectedChange]:
    counts = slice.file.counts
    if counts.unreadable or (reject_inexact and counts.inexact):
        for version, entries in read_exact(slice):
            error = _refusal(
                table, entries, has_unreadable=counts.unreadable > 0, reject_inexact=reject_inexact
            )
            if error is not None:
                yield RejectedChange(version, error)


def _refusal(
    table: TableName, entries: ExactEntries, *, has_unreadable: bool, reject_inexact: bool
) -> PenstockError | None:
    for column, text in entries:
        if has_unreadable and REPLACED in text:
            return UnreadableTextError.of(table, column)
    for column, _ in entries:
        if reject_inexact:
            return UnrepresentableError.of(table, column)
    return None
