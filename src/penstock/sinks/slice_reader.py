"""Read spooled changes as one Arrow table, and split an epoch into steps and into tasks of bounded size. This
module does not use Spark.

All changes of a key are in one task, so tasks divide the keys by hash. Changes that only add rows are divided
by file.

A table that waited for its snapshot, or was paused, may have more changes than one epoch should hold. These
changes are applied in steps. After each step the target equals the source at the end position of the step,
and stores that position.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.arrow import Bools, as_bools, bitmap
from penstock.change import (
    CHANGE_TYPE,
    COMMIT_TIMESTAMP,
    COMMIT_VERSION,
    METADATA_FIELDS,
    METADATA_NAMES,
    ORDINAL,
    XID,
    ChangeCounts,
    ChangeType,
)
from penstock.errors import SchemaChangedError, SinkError
from penstock.foreign import describe
from penstock.position import Position
from penstock.schema import TableSchema
from penstock.sinks.key_moves import ConnectedLimit, JoinedKeys, find_needed, join_keys, with_helpers
from penstock.sinks.keys import Hashes, key_hashes
from penstock.sinks.modes import Layout
from penstock.sinks.row_chains import ints_of
from penstock.sinks.row_values import View
from penstock.spool.reader import FileSlice

_PIECE_BYTES = 64 << 20
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """One of `count` parts into which the changes of an epoch are divided. All changes of a key are in the
    same part.

    A truncate affects every key, so it is in every part. An epoch with truncates is not divided if rows have
    to be looked up. In an append table, a part is a run of consecutive changes instead.
    """

    index: int
    count: int
    follows_moves: bool = False
    """Whether the epoch has key changes with unchanged values, which need changes of other keys. If
    `by_chains` is false, all keys that such key changes connect are in the same part (see `join_keys`).
    """
    by_chains: bool = False
    """Whether connected keys may be in different parts. A part then also reads the changes of other keys from
    which values moved to its own keys, and marks these changes in the column `HELPER` (see `find_needed`).

    Allowed only for a mirror whose parts all look up rows in the target as it was before the epoch.
    """

    def owns(self, hashes: Hashes) -> Bools:
        """A mask of the keys that are in this part. `hashes` are the hashes of the keys."""
        owns: Bools = hashes % np.uint64(self.count) == self.index
        return owns


def read_slices(
    slices: Sequence[FileSlice],
    layout: Layout,
    part: Part | None = None,
    views: Mapping[TableSchema, View] = MappingProxyType({}),
) -> pa.Table:
    """Read the changes in `slices`, in the order of `slices`; with `part`, only the changes of that part. The
    columns are `layout.columns`, then `METADATA_FIELDS`. A column that a file lacks is null.

    `views` has a mapping to the target's columns for each schema version with other columns than the target.
    """
    schema = _schema(layout)
    if part is None or part.count == 1:
        read = [_wanted(_read(slice, schema, views), slice, schema, views) for slice in slices]
        if any(slice.file.is_old for slice in slices):
            return in_order(pa.concat_tables(read))
    elif layout.mode.is_log:
        read = list(_run(slices, schema, part, views))
    else:
        read = list(_read_part(slices, layout, part, views))
    return pa.concat_tables(read or [schema.empty_table()])


def _read_part(
    slices: Sequence[FileSlice], layout: Layout, part: Part, views: Mapping[TableSchema, View]
) -> Iterator[pa.Table]:
    """Yield the changes of a part, one row group at a time."""
    groups = read_groups(slices, layout, views)
    if not part.follows_moves:
        yield from (select_part(rows, layout, part) for rows in groups)
        return

    def read_keys() -> Iterator[pa.Table]:
        return _key_groups(slices, layout, views)

    limit = ConnectedLimit(slices[0].file.table if slices else None)
    if part.by_chains:
        needed = find_needed(read_keys, layout, part.owns, limit)
        found = (with_helpers(rows, layout, part.owns, needed) for rows in groups)
    else:
        joined = join_keys(read_keys, layout)
        found = (select_part(rows, layout, part, joined) for rows in groups)
    for rows in found:
        limit.hold(rows)
        yield rows


def _key_groups(
    slices: Sequence[FileSlice], layout: Layout, views: Mapping[TableSchema, View]
) -> Iterator[pa.Table]:
    """Like `read_groups`, but with only the key columns and the metadata columns."""
    return read_groups(
        slices, replace(layout, columns=pa.schema([layout.columns.field(name) for name in layout.key])), views
    )


def in_order(changes: pa.Table) -> pa.Table:
    """Sort changes into commit order. The old rows of updates are in separate files, so they are not in
    order.
    """
    return changes.sort_by([(COMMIT_VERSION, "ascending"), (ORDINAL, "ascending")])


def read_groups(
    slices: Sequence[FileSlice], layout: Layout, views: Mapping[TableSchema, View] = MappingProxyType({})
) -> Iterator[pa.Table]:
    """Like `read_slices`, but yield one row group at a time, and a large row group in several pieces."""
    schema = _schema(layout)
    for slice in slices:
        yield from (_wanted(rows, slice, schema, views) for rows in _row_groups(slice, schema, views))


def _schema(layout: Layout) -> pa.Schema:
    return pa.schema([*layout.columns, *(pa.field(field.name, field.type) for field in METADATA_FIELDS)])


def _run(
    slices: Sequence[FileSlice], schema: pa.Schema, part: Part, views: Mapping[TableSchema, View]
) -> Iterator[pa.Table]:
    """Yield the changes of one part of an append table. The bounds of the part are row numbers of the files,
    counted before rows outside of the slices are removed.
    """
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
        raise SinkError(
            f"the spooled changes of {slice.file.table} cannot be read: {describe(error)}"
        ) from error


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


def _names(
    file: pq.ParquetFile, slice: FileSlice, schema: pa.Schema, views: Mapping[TableSchema, View]
) -> list[str]:
    view = views.get(slice.file.schema)
    wanted = set(schema.names) if view is None or view.is_plain else {*view.names, *METADATA_NAMES}
    return [name for name in file.schema_arrow.names if name in wanted]


def _wanted(
    found: pa.Table, slice: FileSlice, schema: pa.Schema, views: Mapping[TableSchema, View]
) -> pa.Table:
    """The rows of a file that are in the slice, with the target's columns."""
    view = views.get(slice.file.schema)
    constants: dict[str, object] = _constants(slice)
    if view is not None and not view.is_plain:
        found = view.renamed(found)
        constants = {**constants, **view.fills}
    columns = [_column(found, field, constants) for field in schema]
    table = pa.table(columns, schema=schema)
    if slice.needs_filter and slice.file.commit_version is None:
        table = table.filter(_within(table.column(COMMIT_VERSION), slice))
    return table.filter(pa.array(~changes_at(table, slice.excluded))) if slice.excluded else table


def _constants(slice: FileSlice) -> dict[str, object]:
    """The metadata columns that are in the manifest instead of the file. A file that was written while its
    transaction was open lacks the position and the time of the commit.
    """
    file = slice.file
    if file.commit_version is None:
        return {}
    known: dict[str, object] = {
        COMMIT_VERSION: file.commit_version.value,
        COMMIT_TIMESTAMP: file.commit_timestamp,
    }
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
            f"values of the column {field.name!r} have type {column.type}, and the target's {field.type} "
            "cannot hold them",
            hint="remove the target table and restart the pipeline to copy it again",
        ) from error


def _within(versions: pa.ChunkedArray, slice: FileSlice) -> pa.ChunkedArray:
    low = 0 if slice.after is None else slice.after.value + 1
    wanted = pc.greater_equal(versions, pa.scalar(low, pa.int64()))
    if slice.upto is not None:
        wanted = pc.and_(wanted, pc.less_equal(versions, pa.scalar(slice.upto.value, pa.int64())))
    return wanted


def changes_at(changes: pa.Table, names: Collection[tuple[int, int]]) -> Bools:
    """A mask of the changes whose `_commit_version` and `_ordinal` are one of the pairs in `names`."""
    versions, ordinals = (ints_of(changes.column(name)) for name in (COMMIT_VERSION, ORDINAL))
    found = np.isin(versions, [version for version, _ in names])
    for row in np.flatnonzero(found).tolist():
        found[row] = (int(versions[row]), int(ordinals[row])) in names
    return found


def select_part(changes: pa.Table, layout: Layout, part: Part, joined: JoinedKeys | None = None) -> pa.Table:
    """Select the changes of one part. In an append table, `changes` must be all changes of the epoch."""
    if layout.mode.is_log:
        low, high = (changes.num_rows * at // part.count for at in (part.index, part.index + 1))
        return changes.slice(low, high - low)
    if not changes.num_rows:
        return changes
    hashes = key_hashes(changes, layout.key or layout.columns.names)
    hashes = hashes if joined is None else joined.replaced(hashes)
    truncates = pc.equal(changes.column(CHANGE_TYPE), ChangeType.TRUNCATE.value).combine_chunks()
    mine = part.owns(hashes) | as_bools(truncates)
    return changes.filter(pa.Array.from_buffers(pa.bool_(), len(mine), [None, bitmap(mine)]))


ROWS_A_TASK = 500_000
BYTES_A_TASK = 128 << 20
"""Maximum number and size of the changes for which one task is planned."""

_ADDED_ROWS_A_TASK = 100_000


def share_files(
    slices: Sequence[FileSlice], counts: ChangeCounts, parallelism: int
) -> list[tuple[FileSlice, ...]]:
    """Divide the files of changes that only add rows. Returns the files for each task."""
    wanted = max(min(-(-counts.rows // _ADDED_ROWS_A_TASK), parallelism), -(-counts.rows // ROWS_A_TASK), 1)
    count = min(wanted, len(slices))
    return [tuple(slices[at::count]) for at in range(count)]


def plan_parts(
    slices: Sequence[FileSlice], counts: ChangeCounts, *, looks_up: bool, at_once: bool = False
) -> list[Part | None]:
    """Divide the keys of an epoch into parts, one for each task. Returns `[None]` if one task should apply
    all changes. That is always the case if rows are looked up (`looks_up`) and the epoch has a truncate,
    because a truncate affects all keys.

    `at_once`: all parts see the target as it was before the epoch, so a part may need rows that another part
    deletes.
    """
    size = sum(
        slice.file.bytes for slice in slices
    )  # the files are not compressed, so this is also their size in memory
    count = (
        1
        if counts.truncates and looks_up
        else max(-(-counts.rows // ROWS_A_TASK), -(-size // BYTES_A_TASK), 1)
    )
    follows_moves = bool(counts.unchanged and counts.moves)
    by_chains = follows_moves and at_once and not looks_up
    return [Part(index, count, follows_moves, by_chains) for index in range(count)] if count > 1 else [None]


def step_ends(slices: Sequence[FileSlice], rows: int, end: Position) -> list[Position]:
    """Divide an epoch into steps of about `rows` rows. Returns the end position of each step; the last one is
    `end`. No step splits a transaction or a file.
    """
    found: list[Position] = []
    later = _least_after(slices)
    count, reached = 0, Position.ZERO
    for slice, least in zip(slices, later, strict=True):
        count += slice.file.rows
        reached = max(reached, slice.file.max_position)
        if count >= rows and least is not None and reached < least and reached < end:
            found.append(reached)
            count = 0
    return [*found, end]


def slices_upto(slices: Sequence[FileSlice], end: Position) -> list[FileSlice]:
    """The parts of `slices` at or before `end`."""
    wanted = [slice for slice in slices if slice.file.min_position <= end]
    return [
        replace(slice, upto=min(slice.upto or end, end)) if slice.file.max_position > end else slice
        for slice in wanted
    ]


def slices_after(slices: Sequence[FileSlice], position: Position) -> list[FileSlice]:
    """The parts of `slices` after `position`."""
    wanted = [slice for slice in slices if slice.file.max_position > position]
    return [
        replace(slice, after=max(slice.after or position, position))
        if slice.file.min_position <= position
        else slice
        for slice in wanted
    ]


def _least_after(slices: Sequence[FileSlice]) -> list[Position | None]:
    """For each slice, the smallest position of the following slices; None after the last."""
    least = list(accumulate((slice.file.min_position for slice in reversed(slices[1:])), min))
    return [*reversed(least), None][: len(slices)]
