"""Spooled changes as one Arrow table, read where they are applied: in a task on an executor, without Spark."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.change import (
    CHANGE_TYPE,
    COMMIT_TIMESTAMP,
    COMMIT_VERSION,
    METADATA_FIELDS,
    METADATA_NAMES,
    ORDINAL,
    UNCHANGED,
    XID,
    ChangeType,
)
from penstock.errors import SchemaChangedError, SinkError
from penstock.postgres.types.arrays import Bools, as_bools, bitmap
from penstock.schema import TableSchema
from penstock.sinks.gathering import take
from penstock.sinks.key_hashes import Hashes, key_hashes
from penstock.sinks.layout import Layout, Mode
from penstock.sinks.lives import bools_of, ints_of, is_kind
from penstock.sinks.views import View
from penstock.spool.range import FileSlice

_PIECE_BYTES = 64 << 20
_BUFFER_BYTES = 1 << 20
_PLACE_FACTOR = 0x9E37_79B9_7F4A_7C15


@dataclass(frozen=True, slots=True)
class Part:
    """One of `count` parts of an epoch, which together hold each change once, and all changes of a key in the same.

    A truncate concerns every key, so every part has it; but not of an append log, which is cut into runs of changes. An epoch of a mode
    that looks rows up is not parted if `truncate` is among its changes.
    """

    index: int
    count: int
    follows_moves: bool = False
    """Keys that are connected by key changes which leave values behind are in the same part."""


@dataclass(frozen=True, slots=True, eq=False)
class JoinedKeys:
    """Hashes of keys that are to be in one part with others, ascending, and the hash that stands for them."""

    hashes: Hashes
    roots: Hashes

    def replaced(self, hashes: Hashes) -> Hashes:
        if not len(self.hashes):
            return hashes
        at = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return np.where(self.hashes[at] == hashes, self.roots[at], hashes)


def read_slices(
    slices: Sequence[FileSlice], layout: Layout, part: Part | None = None, views: Mapping[TableSchema, View] = MappingProxyType({})
) -> pa.Table:
    """What is wanted of `slices`, in their order: `layout.columns`, then `METADATA_FIELDS`. A column that a file lacks is null.

    `views`: how to read the files of a shape, where not by the same names.
    """
    schema = _schema(layout)
    if part is None or part.count == 1:
        read = [_wanted(_read(slice, schema, views), slice, schema, views) for slice in slices]
        if any(slice.file.is_old for slice in slices):
            return in_order(pa.concat_tables(read))
    elif layout.mode is Mode.APPEND:
        read = list(_run(slices, schema, part, views))
    else:
        joined = join_keys(lambda: _key_groups(slices, layout, views), layout) if part.follows_moves else None
        read = [parted(rows, layout, part, joined) for rows in read_groups(slices, layout, views)]
    return pa.concat_tables([schema.empty_table(), *read])


def _key_groups(slices: Sequence[FileSlice], layout: Layout, views: Mapping[TableSchema, View]) -> Iterator[pa.Table]:
    """The changes without the values that are not part of the key."""
    return read_groups(slices, replace(layout, columns=pa.schema([layout.columns.field(name) for name in layout.key])), views)


def join_keys(read: Callable[[], Iterable[pa.Table]], layout: Layout) -> JoinedKeys:
    """Find the keys that key changes connect: an insert that leaves values behind, and the delete with the ordinal before it.

    The changes are read twice, so that no more of them are held than such inserts.
    """
    inserts = []
    for rows in read():
        moved = is_kind(rows, ChangeType.INSERT) & bools_of(rows.column(UNCHANGED).is_valid())
        inserts.append(_places(rows, layout, moved, 1))
    places, hashes = _concatenated(inserts)
    order = np.argsort(places)
    places, hashes = places[order], hashes[order]
    deletes = []
    for rows in read() if len(places) else ():
        own, others = _places(rows, layout, is_kind(rows, ChangeType.DELETE), 0)
        at = np.minimum(np.searchsorted(places, own), len(places) - 1)
        met = places[at] == own
        deletes.append((others[met], hashes[at[met]]))
    return _joined(*_concatenated(deletes))


def _places(rows: pa.Table, layout: Layout, chosen: Bools, before: int) -> tuple[Hashes, Hashes]:
    """Numbers for version and ordinal of the change that is so many `before` each of these, and the hashes of their keys."""
    some = take(rows, np.flatnonzero(chosen))
    versions, ordinals = (ints_of(some.column(name)).astype(np.uint64) for name in (COMMIT_VERSION, ORDINAL))
    # Two places with one number would only put more keys together.
    return versions * np.uint64(_PLACE_FACTOR) + ordinals - np.uint64(before), key_hashes(some, layout.key)


def _concatenated(pairs: Sequence[tuple[Hashes, Hashes]]) -> tuple[Hashes, Hashes]:
    empty = np.empty(0, np.uint64)
    return np.concatenate([empty, *(one for one, _ in pairs)]), np.concatenate([empty, *(other for _, other in pairs)])


def _joined(ones: Hashes, others: Hashes) -> JoinedKeys:
    """Connected components of these pairs, each known by its least hash."""
    known, numbers = np.unique(np.concatenate([ones, others]), return_inverse=True)
    one, other = numbers[: len(ones)], numbers[len(ones) :]
    label = np.arange(len(known))
    while not np.array_equal(label[one], label[other]):
        low = np.minimum(label[one], label[other])
        for end in (label[one], label[other]):
            np.minimum.at(label, end, low)
        while not np.array_equal(label, label[label]):
            label = label[label]
    return JoinedKeys(known, known[label])


def in_order(changes: pa.Table) -> pa.Table:
    """In the order of the log, which slices of old rows are out of."""
    return changes.sort_by([(COMMIT_VERSION, "ascending"), (ORDINAL, "ascending")])


def read_groups(
    slices: Sequence[FileSlice], layout: Layout, views: Mapping[TableSchema, View] = MappingProxyType({})
) -> Iterator[pa.Table]:
    """The same, a row group at a time, or a part of a large one: more need not be held."""
    schema = _schema(layout)
    for slice in slices:
        yield from (_wanted(rows, slice, schema, views) for rows in _row_groups(slice, schema, views))


def _schema(layout: Layout) -> pa.Schema:
    return pa.schema([*layout.columns, *(pa.field(field.name, field.type) for field in METADATA_FIELDS)])


def _run(slices: Sequence[FileSlice], schema: pa.Schema, part: Part, views: Mapping[TableSchema, View]) -> Iterator[pa.Table]:
    """Some of the changes of an append log, one after the other; counted as they stand in the files, wanted or not."""
    counts = [_count(slice) for slice in slices]
    low, high = (sum(counts) * at // part.count for at in (part.index, part.index + 1))
    start = 0
    for slice, count in zip(slices, counts, strict=True):
        end = start
        for rows in _row_groups(slice, schema, views) if start < high and start + count > low else ():
            first, last = max(low - end, 0), min(high - end, rows.num_rows)
            if first < last:
                yield _wanted(rows.slice(first, last - first), slice, schema, views)
            end += rows.num_rows
        start += count


@contextmanager
def _opened(slice: FileSlice) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(slice.path, buffer_size=_BUFFER_BYTES) as file:
            yield file
    except (OSError, pa.ArrowInvalid) as error:
        raise SinkError(f"the spooled changes of {slice.file.table} cannot be read: {error}") from error


def _count(slice: FileSlice) -> int:
    with _opened(slice) as file:
        return int(file.metadata.num_rows)


def _read(slice: FileSlice, schema: pa.Schema, views: Mapping[TableSchema, View]) -> pa.Table:
    with _opened(slice) as file:
        return file.read(columns=_names(file, slice, schema, views))


def _row_groups(slice: FileSlice, schema: pa.Schema, views: Mapping[TableSchema, View]) -> Iterator[pa.Table]:
    with _opened(slice) as file:
        names = _names(file, slice, schema, views)
        for group in range(file.num_row_groups):
            found = file.metadata.row_group(group)
            if found.total_byte_size <= _PIECE_BYTES:
                yield file.read_row_group(group, columns=names)
                continue
            rows = max(1, found.num_rows * _PIECE_BYTES // found.total_byte_size)
            for batch in file.iter_batches(rows, row_groups=[group], columns=names):
                yield pa.Table.from_batches([batch])


def _names(file: pq.ParquetFile, slice: FileSlice, schema: pa.Schema, views: Mapping[TableSchema, View]) -> list[str]:
    view = views.get(slice.file.schema)
    wanted = set(schema.names) if view is None or view.is_plain else {*view.names, *METADATA_NAMES}
    return [name for name in file.schema_arrow.names if name in wanted]


def _wanted(found: pa.Table, slice: FileSlice, schema: pa.Schema, views: Mapping[TableSchema, View]) -> pa.Table:
    """Rows of a file as the target has them, without those that are not wanted of it."""
    view = views.get(slice.file.schema)
    constants: dict[str, object] = _constants(slice)
    if view is not None and not view.is_plain:
        found = view.renamed(found)
        constants = {**constants, **view.fills}
    columns = [_column(found, field, constants) for field in schema]
    table = pa.table(columns, schema=schema)
    if slice.needs_filter and slice.file.commit_version is None:
        table = table.filter(_within(table.column(COMMIT_VERSION), slice))
    return table.filter(pa.array(~named_changes(table, slice.without))) if slice.without else table


def _constants(slice: FileSlice) -> dict[str, object]:
    """What the manifest says of a transaction that was still open when its rows were written."""
    file = slice.file
    if file.commit_version is None:
        return {}
    known: dict[str, object] = {COMMIT_VERSION: file.commit_version.value, COMMIT_TIMESTAMP: file.commit_timestamp}
    return known if file.xid is None else {**known, XID: file.xid}


def _column(found: pa.Table, field: pa.Field, constants: dict[str, object]) -> pa.ChunkedArray:
    if field.name in constants:
        value = constants[field.name]
        scalar = value.cast(field.type) if isinstance(value, pa.Scalar) else pa.scalar(value, field.type)
        return pa.chunked_array([pa.repeat(scalar, found.num_rows)])
    if field.name not in found.column_names:
        return pa.chunked_array([pa.nulls(found.num_rows, field.type)])
    column = found.column(field.name)
    try:
        return column if column.type.equals(field.type) else column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaChangedError(
            f"values of the column {field.name!r} are of type {column.type} now, and the target's {field.type} cannot hold them",
            hint="remove the target table and run again to copy it anew",
        ) from error


def _within(versions: pa.ChunkedArray, slice: FileSlice) -> pa.ChunkedArray:
    low = 0 if slice.after is None else slice.after.value + 1
    wanted = pc.greater_equal(versions, pa.scalar(low, pa.int64()))
    if slice.upto is not None:
        wanted = pc.and_(wanted, pc.less_equal(versions, pa.scalar(slice.upto.value, pa.int64())))
    return wanted


def named_changes(changes: pa.Table, names: Collection[tuple[int, int]]) -> Bools:
    """Which of `changes` are among `names`, each of them a `_commit_version` and an `_ordinal`."""
    versions, ordinals = (ints_of(changes.column(name)) for name in (COMMIT_VERSION, ORDINAL))
    found = np.isin(versions, [version for version, _ in names])
    for row in np.flatnonzero(found).tolist():
        found[row] = (int(versions[row]), int(ordinals[row])) in names
    return found


def parted(changes: pa.Table, layout: Layout, part: Part, joined: JoinedKeys | None = None) -> pa.Table:
    """One part of the changes of an epoch, or of any of them; but of an append log only of all."""
    if layout.mode is Mode.APPEND:
        low, high = (changes.num_rows * at // part.count for at in (part.index, part.index + 1))
        return changes.slice(low, high - low)
    if not changes.num_rows:
        return changes
    hashes = key_hashes(changes, layout.key or layout.columns.names)
    hashes = hashes if joined is None else joined.replaced(hashes)
    truncates = pc.equal(changes.column(CHANGE_TYPE), ChangeType.TRUNCATE.value).combine_chunks()
    mine = (hashes % np.uint64(part.count) == part.index) | as_bools(truncates)
    return changes.filter(pa.Array.from_buffers(pa.bool_(), len(mine), [None, bitmap(mine)]))
