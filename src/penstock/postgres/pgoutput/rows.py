"""Read the tuples of row changes, and build the rows of one table's batch: the values of each row, and the
metadata columns.

The tuples of thousands of messages are read at once, column by column, as Arrow strings without copying. The
tuples are sorted by column count in descending order. So those that have a given column come first, and one
walk serves all tables of a call. Every length is read as unsigned, and the walk stops at the first column
that passes its message's end: damaged input cannot make it loop, read outside the buffer, or return a value
from another message. Decoding a column has a fixed cost that hardly depends on the number of rows. So the
columns of small batches are concatenated by type, decoded once per type, and split again.

If an update includes its old key, the old key is compared with the new one. With the same key, the update
becomes an `update_postimage`; with another key, a `delete` of the old key and an `insert` of the new one. A
delete has only the values of its key. In a table without a key, rows are identified by all of their values: a
delete has all values of the old row, and an update that includes the old row becomes a `delete` and an
`insert`. A delete of one of several equal rows affects only one of them.

If old rows are requested and the log contains whole old rows (replica identity FULL), a delete has all values
of the row, and the old rows of updates form a separate batch of `update_preimage` rows.

A Relation message describes the root of a partitioned table, but each partition logs old keys by its own
replica identity. So a change may lack columns of the root's key. Such a row lists the missing columns in
`_unchanged` and counts as unidentified; readers reject it (`spool.rows`). Identity columns are NOT NULL, so a
null in an old key always means that the column was not sent. In a whole old row of a table without a key, a
null is a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow import Ragged, as_arrow, as_bools, bitmap
from penstock.change import ChangeBatch, ChangeCounts, ChangeType, change_schema
from penstock.errors import ProtocolError, UnreadableTextError
from penstock.postgres.pgoutput.changes import Changes
from penstock.postgres.pgoutput.messages import (
    DELETE,
    INSERT,
    TRUNCATE,
    UPDATE,
    BoolArray,
    ByteArray,
    Frames,
    IntArray,
)
from penstock.postgres.pgoutput.transactions import Timeline
from penstock.postgres.types.column import DecodedColumn
from penstock.postgres.types.registry import builtin_reader, decode_column
from penstock.postgres.types.rows import DecodedRows, decode_rows, join_columns
from penstock.schema import Column, TableSchema

TEXT, NULL, UNCHANGED = b"tnu"

Spans = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class ColumnSpans:
    """The start and end of a column's value in each tuple. `kinds` is None if all values are text."""

    spans: Spans
    kinds: ByteArray | None

    def __getitem__(self, part: IntArray | slice) -> ColumnSpans:
        return ColumnSpans(self.spans[part], None if self.kinds is None else self.kinds[part])

    def kinds_or_text(self) -> ByteArray:
        return np.full(len(self.spans), TEXT, np.uint8) if self.kinds is None else self.kinds

    def strings(
        self, buffer: pa.Buffer, chosen: IntArray, hidden: npt.NDArray[np.bool_] | None = None
    ) -> pa.StringArray:
        """Return the values of the tuples `chosen`. A value is null if the tuple has no text, or if `hidden`
        marks it.
        """
        present = hidden if hidden is None else ~hidden
        if self.kinds is not None:
            is_text = self.kinds[chosen] == TEXT
            present = is_text if present is None else is_text & present
        if not len(chosen):
            return pa.array([], pa.string())
        # The interleaved starts and ends are the offsets of an array in which every second entry is a value.
        laid = pa.StringArray.from_buffers(2 * len(self.spans) - 1, pa.py_buffer(self.spans), buffer)
        mask = None if present is None or present.all() else bitmap(present)
        return laid.take(pa.Array.from_buffers(pa.int64(), len(chosen), [mask, pa.py_buffer(chosen * 2)]))


def join_spans(first: ColumnSpans, second: ColumnSpans) -> ColumnSpans:
    spans = np.concatenate([first.spans, second.spans])
    if first.kinds is None and second.kinds is None:
        return ColumnSpans(spans, None)
    return ColumnSpans(spans, np.concatenate([first.kinds_or_text(), second.kinds_or_text()]))


def walk(
    frames: Frames, messages: IntArray, at: IntArray, ends: IntArray, widths: IntArray
) -> tuple[list[ColumnSpans], IntArray]:
    """Read tuples that begin at `at`, after their column count, and end at or before `ends`. `widths` holds
    the column count of each. Returns the columns, and the end of each tuple.
    """
    columns: list[ColumnSpans] = []
    cursor = at.copy()
    for column in range(int(widths[0]) if len(widths) else 0):
        # Widths descend: the tuples that have this column come first.
        count = len(widths) if widths[-1] > column else int(np.searchsorted(-widths, -column))
        here = cursor[:count]
        kinds = frames.octets[here]
        is_text = kinds == TEXT
        spans = np.empty((count, 2), np.int32)
        if is_text.all():
            start = here + 5
            end = start + frames.u32(here + 1)
            columns.append(ColumnSpans(spans, None))
        else:
            frames.require(
                is_text | (kinds == NULL) | (kinds == UNCHANGED),
                messages[:count],
                "has a value of an unknown kind",
            )
            start = here + np.where(is_text, 5, 1)
            end = start + np.where(is_text, frames.u32(here + 1), 0)
            columns.append(ColumnSpans(spans, kinds))
        frames.require(end <= ends[:count], messages[:count], "ends inside a value")
        spans[:, 0] = start
        spans[:, 1] = end
        cursor[:count] = end
    return columns, cursor


SMALL_ROWS = 128
"""The maximum number of rows of a small batch. Batches with more rows are read one by one: they gain nothing
from being read together, and their values would be copied once more.
"""

_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A column of one batch. `chosen` has for each row the tuple with its values; rows in the mask `hidden`
    get no value.
    """

    column: Column
    spans: ColumnSpans
    chosen: IntArray
    hidden: BoolArray | None


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    texts: pa.StringArray
    decoded: DecodedColumn


def read_together(buffer: pa.Buffer, wanted: Sequence[Wanted]) -> list[Read] | None:
    """Return the texts and values of each column, in the order of `wanted`. Returns None if the columns must
    be read one by one: to report unreadable values, or because of their size.
    """
    found: dict[int, Read] = {}
    for places in _by_type(wanted):
        together = [wanted[at] for at in places]
        texts = _lay_out(buffer, together)
        if texts is None:
            return None
        try:
            decoded = decode_column(texts, together[0].column)
        except (ProtocolError, UnreadableTextError):
            return None
        found.update(zip(places, _cut(texts, decoded, [len(each.chosen) for each in together]), strict=True))
    return [found[at] for at in range(len(wanted))]


def _by_type(wanted: Sequence[Wanted]) -> list[list[int]]:
    """Group the columns that are decoded in the same way. Returns the column indices of each group."""
    places: dict[object, list[int]] = {}
    for at, each in enumerate(wanted):
        column = each.column
        places.setdefault((column.reader or builtin_reader(column.type_oid), column.arrow_type), []).append(
            at
        )
    return list(places.values())


def _lay_out(buffer: pa.Buffer, wanted: Sequence[Wanted]) -> pa.StringArray | None:
    """Concatenate the texts of all columns. Returns None if the result would be too large."""
    counts = [len(each.spans.spans) for each in wanted]
    bases = np.cumsum(counts) - counts
    chosen = np.concatenate([each.chosen for each in wanted]) + np.repeat(
        bases, [len(each.chosen) for each in wanted]
    )
    spans = np.concatenate([each.spans.spans for each in wanted])[chosen]
    if int((spans[:, 1] - spans[:, 0]).sum()) > _MAX_BYTES:
        return None
    # Arrow requires ascending offsets.
    order = np.argsort(spans[:, 0], kind="stable")
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    return ColumnSpans(spans[order], None).strings(buffer, places, _absent(wanted))


def _absent(wanted: Sequence[Wanted]) -> BoolArray | None:
    """Return a mask of the rows that have no text; None if all rows have one."""
    if all(each.hidden is None and each.spans.kinds is None for each in wanted):
        return None
    return np.concatenate([_absent_rows(each) for each in wanted])


def _absent_rows(wanted: Wanted) -> BoolArray:
    kinds = wanted.spans.kinds
    absent = np.zeros(len(wanted.chosen), np.bool_) if kinds is None else kinds[wanted.chosen] != TEXT
    return absent if wanted.hidden is None else absent | wanted.hidden


def _cut(texts: pa.StringArray, decoded: DecodedColumn, sizes: list[int]) -> Iterator[Read]:
    low = 0
    for size in sizes:
        inexact = None if decoded.inexact is None else decoded.inexact.slice(low, size)
        yield Read(texts.slice(low, size), DecodedColumn(decoded.values.slice(low, size), inexact))
        low += size


_CODES = (
    ChangeType.INSERT,
    ChangeType.UPDATE_POSTIMAGE,
    ChangeType.DELETE,
    ChangeType.TRUNCATE,
    ChangeType.UPDATE_PREIMAGE,
)
_INSERTED, _UPDATED, _DELETED, _TRUNCATED, _OLD = range(len(_CODES))
_NAMES = pa.array([str(name) for name in _CODES], pa.string())
_NAMES_TYPE = pa.list_(pa.string())
_POSITION = pa.int64()
_TIME = pa.timestamp("us", "UTC")
_CODE_OF_KIND = np.zeros(256, np.uint8)
_CODE_OF_KIND[[INSERT, UPDATE, DELETE, TRUNCATE]] = [_INSERTED, _UPDATED, _DELETED, _TRUNCATED]


@dataclass(frozen=True, slots=True, eq=False)
class Tuples:
    """For each column, the values in the first tuple of every change, and those in the second tuple of
    changes that have two.
    """

    first: list[ColumnSpans]
    second: list[ColumnSpans]


@dataclass(frozen=True, slots=True, eq=False)
class TablePart:
    """The changes of one table under one version of its schema, with their tuples."""

    table: TableSchema
    changes: Changes
    tuples: Tuples
    is_full: bool
    """Whether the Relation message announces whole old rows."""


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """For each row of a batch: the index of its change, its kind, its ordinal, and the index of the tuple
    with its values. Second tuples are numbered after all first ones.
    """

    changes: IntArray
    codes: ByteArray
    ordinals: IntArray
    tuples: IntArray
    moves: int = 0

    def __len__(self) -> int:
        return len(self.codes)


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """The data from which one batch is built."""

    table: TableSchema
    messages: IntArray
    """The index of each row's message."""
    rows: _Rows
    columns: list[Wanted]
    is_old: bool = False
    missing: Mapping[int, BoolArray] = field(default_factory=dict)
    """By column index, a mask of the rows in which an identifying value was not sent."""


def build_batches(
    frames: Frames, timeline: Timeline, parts: Sequence[TablePart], *, old_rows: bool = False
) -> list[list[ChangeBatch]]:
    """Build one batch of changes for each part. With `old_rows`, also build a batch with the old rows of its
    updates, if the server sent them.
    """
    buffer = pa.py_buffer(frames.buffer)
    planned = [_plan(buffer, part, old_rows=old_rows) for part in parts]
    built = iter(_build_all(frames, buffer, timeline, [plan for plans in planned for plan in plans]))
    return [[next(built) for _ in plans] for plans in planned]


def _build_all(
    frames: Frames, buffer: pa.Buffer, timeline: Timeline, plans: Sequence[_Plan]
) -> list[ChangeBatch]:
    decoded = _read_small(buffer, plans)
    metadata = _metadata(frames, timeline, plans)
    batches: list[ChangeBatch] = []
    low = 0
    for plan, together in zip(plans, decoded, strict=True):
        high = low + len(plan.rows)
        own = metadata if len(plans) == 1 else [column[low:high] for column in metadata]
        batches.append(_build(plan, together or _read(buffer, plan), own))
        low = high
    return batches


def _build(plan: _Plan, decoded: DecodedRows, metadata: list[pa.Array]) -> ChangeBatch:
    names, unchanged_count = _unchanged(plan)
    unidentified = (
        int(np.count_nonzero(np.logical_or.reduce([*plan.missing.values()]))) if plan.missing else 0
    )
    inserts, updates, deletes, truncates, old = np.bincount(plan.rows.codes, minlength=len(_CODES)).tolist()
    unreadable = sum(decoded.unreadable.values())
    counts = ChangeCounts(
        inserts,
        updates,
        deletes,
        truncates,
        plan.rows.moves,
        unchanged_count,
        decoded.inexact,
        unreadable,
        old,
        unidentified,
    )
    rows = pa.RecordBatch.from_arrays(
        [*decoded.columns, *metadata, names, decoded.exact], schema=change_schema(plan.table)
    )
    return ChangeBatch(plan.table, rows, counts, plan.is_old)


def _read_small(buffer: pa.Buffer, plans: Sequence[_Plan]) -> list[DecodedRows | None]:
    """Read the columns of all small batches together, if there are several of them. The result is None for
    each batch that was not read.
    """
    small = [plan for plan in plans if len(plan.rows) <= SMALL_ROWS and plan.columns]
    read = (
        read_together(buffer, [column for plan in small for column in plan.columns])
        if len(small) > 1
        else None
    )
    if read is None:
        return [None] * len(plans)
    each = iter(read)
    found: dict[int, DecodedRows] = {}
    for plan in small:
        own = [next(each) for _ in plan.columns]
        found[id(plan)] = join_columns(
            [column.decoded for column in own], [column.texts for column in own], plan.table, len(plan.rows)
        )
    return [found.get(id(plan)) for plan in plans]


def _read(buffer: pa.Buffer, plan: _Plan) -> DecodedRows:
    texts = [column.spans.strings(buffer, column.chosen, column.hidden) for column in plan.columns]
    return decode_rows(texts, plan.table, len(plan.rows))


def _plan(buffer: pa.Buffer, part: TablePart, *, old_rows: bool) -> list[_Plan]:
    table, changes = part.table, part.changes
    columns, rows = _choose(buffer, table, changes, part.tuples)
    shows_key = rows.codes == _DELETED
    if old_rows:
        shows_key &= ~changes.is_whole[rows.changes]
    any_key = bool(table.key) and bool(shows_key.any())
    wanted = [
        Wanted(column, spans, rows.tuples, shows_key if any_key and column.name not in table.key else None)
        for column, spans in zip(table.columns, columns, strict=True)
    ]
    missing = _missing(
        table,
        rows,
        wanted,
        changes.is_whole[rows.changes],
        promises_whole=part.is_full and (old_rows or not table.key),
    )
    plan = _Plan(table, changes.messages[rows.changes], rows, wanted, missing=missing)
    if not old_rows:
        return [plan]
    replaced = rows.changes[(rows.codes == _UPDATED) & (changes.has_old & changes.is_whole)[rows.changes]]
    return [plan, _plan_old(part, replaced)] if len(replaced) else [plan]


def _missing(
    table: TableSchema, rows: _Rows, wanted: Sequence[Wanted], is_whole: BoolArray, *, promises_whole: bool
) -> dict[int, BoolArray]:
    """Return by column index a mask of the rows whose identifying value was not sent; columns without such
    rows are omitted. The key identifies a row; in a table without a key, the whole old row does.

    `promises_whole` means that whole old rows are required and that the Relation message announces them. If
    it does not, a null may be a value: the server marks the old row of a partition with FULL as a key if the
    partition's root has another identity. In that case only the catalog shows whether the old row is whole
    (`membership.inspect_partition_identities`).
    """
    is_old = rows.codes == _DELETED
    found: dict[int, BoolArray] = {}
    for at, column in enumerate(wanted):
        kinds = column.spans.kinds
        if table.key and column.column.name not in table.key:
            lacking = is_old & ~is_whole if promises_whole else None
        elif kinds is None:
            lacking = None
        elif table.key:
            lacking = (kinds[rows.tuples] == UNCHANGED) | is_old & (kinds[rows.tuples] == NULL)
        else:
            lacking = is_old & ~is_whole & (kinds[rows.tuples] != TEXT) if promises_whole else None
        if lacking is not None and lacking.any():
            found[at] = lacking
    return found


def _plan_old(part: TablePart, replaced: IntArray) -> _Plan:
    """Plan the batch with the old rows of the updates `replaced`, which are their first tuples."""
    rows = _Rows(replaced, np.full(len(replaced), _OLD, np.uint8), part.changes.ordinals[replaced], replaced)
    wanted = [
        Wanted(column, spans, replaced, None)
        for column, spans in zip(part.table.columns, part.tuples.first, strict=True)
    ]
    return _Plan(part.table, part.changes.messages[replaced], rows, wanted, is_old=True)


def _choose(
    buffer: pa.Buffer, table: TableSchema, changes: Changes, given: Tuples
) -> tuple[list[ColumnSpans], _Rows]:
    """Plan the rows of a batch. Returns the tuples (the second ones after the first ones) and the rows."""
    codes = _CODE_OF_KIND[changes.kinds]
    each = np.arange(len(changes))
    two = np.flatnonzero(changes.has_old)
    if not len(two):
        return given.first, _Rows(each, codes, changes.ordinals, each)
    old = [column[two] for column in given.first]
    new = [_filled(before, after) for before, after in zip(old, given.second, strict=True)]
    moved = _moved(buffer, table, old, new) if table.key else np.ones(len(two), np.bool_)
    columns = [join_spans(first, second) for first, second in zip(given.first, new, strict=True)]

    is_move = np.zeros(len(changes), np.bool_)
    is_move[two[moved]] = True
    row_changes = np.repeat(each, 1 + is_move)
    is_half = is_move[row_changes]
    is_insert_half = is_half & (np.diff(row_changes, prepend=-1) == 0)
    codes = codes[row_changes]
    codes[is_half] = _DELETED
    codes[is_insert_half] = _INSERTED
    shows_second = changes.has_old[row_changes] & (~is_half | is_insert_half)
    seconds = np.zeros(len(changes), np.int64)
    seconds[two] = len(changes) + np.arange(len(two))
    row_tuples = np.where(shows_second, seconds[row_changes], row_changes)
    ordinals = changes.ordinals[row_changes] + shows_second
    return columns, _Rows(row_changes, codes, ordinals, row_tuples, int(np.count_nonzero(moved)))


def _filled(old: ColumnSpans, new: ColumnSpans) -> ColumnSpans:
    """Fill in unchanged TOAST values from the old tuple if it contains them."""
    if new.kinds is None:
        return new
    known = (new.kinds == UNCHANGED) & (old.kinds_or_text() == TEXT)
    if not known.any():
        return new
    kinds = np.where(known, np.uint8(TEXT), new.kinds)
    return ColumnSpans(np.where(known[:, np.newaxis], old.spans, new.spans), kinds)


def _moved(
    buffer: pa.Buffer, table: TableSchema, old: list[ColumnSpans], new: list[ColumnSpans]
) -> BoolArray:
    """Return a mask of the updates that changed the key. Keys are compared byte by byte."""
    count = len(old[0].spans)
    moved = np.zeros(count, np.bool_)
    each = np.arange(count)
    for column, before, after in zip(table.columns, old, new, strict=True):
        if column.name in table.key:
            moved |= before.kinds_or_text() != after.kinds_or_text()
            same = pc.equal(
                before.strings(buffer, each).cast(pa.binary()), after.strings(buffer, each).cast(pa.binary())
            )
            moved |= ~as_bools(pc.fill_null(same, True))
    return moved


def _unchanged_rows(column: Wanted, missing: BoolArray | None) -> IntArray:
    if column.spans.kinds is None:
        return np.empty(0, np.int64) if missing is None else np.flatnonzero(missing)
    unchanged = column.spans.kinds[column.chosen] == UNCHANGED
    if column.hidden is not None:
        unchanged &= ~column.hidden
    return np.flatnonzero(unchanged if missing is None else unchanged | missing)


def _unchanged(plan: _Plan) -> tuple[pa.ListArray, int]:
    """Return the column `_unchanged`, and the number of rows in which it is set."""
    named = ((at, _unchanged_rows(column, plan.missing.get(at))) for at, column in enumerate(plan.columns))
    rows = {at: found for at, found in named if len(found)}
    if not rows:
        return pa.nulls(len(plan.rows), _NAMES_TYPE), 0
    ragged = Ragged.plan(len(plan.rows), rows)
    names = pa.array(plan.table.column_names, pa.string()).take(as_arrow(ragged.columns, pa.int64()))
    return ragged.build(_NAMES_TYPE, names), ragged.filled_rows


def _metadata(frames: Frames, timeline: Timeline, plans: Sequence[_Plan]) -> list[pa.Array]:
    """Return the columns `_change_type` to `_xid`, for the rows of all batches in sequence."""
    messages = np.concatenate([plan.messages for plan in plans])
    codes = np.concatenate([plan.rows.codes for plan in plans])
    ordinals = np.concatenate([plan.rows.ordinals for plan in plans])
    transactions = timeline.of(messages)
    if timeline.commits is None:
        positions, times = pa.nulls(len(messages), _POSITION), pa.nulls(len(messages), _TIME)
    else:
        positions = as_arrow(timeline.commits.positions[transactions], _POSITION)
        times = as_arrow(timeline.commits.times[transactions], _TIME)
    xids = frames.xids(messages) if frames.xid_bytes else timeline.xids[transactions]
    names = _NAMES.take(as_arrow(codes, pa.uint8()))
    return [names, positions, times, as_arrow(ordinals, pa.int64()), as_arrow(xids, pa.int64())]
