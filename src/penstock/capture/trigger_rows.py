"""From what triggers wrote down to typed change batches: the columns, metadata and kinds of change that the stream of the log has too.

A change has the whole old row, the whole new row, or both, so no value is ever missing. An update that changes the key is a `delete` of the
old key and an `insert` of the new one; so is every update of a table whose rows nothing tells apart.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.change import REPLACED, ChangeBatch, ChangeCounts, ChangeType, change_schema
from penstock.errors import ProtocolError
from penstock.postgres.change_table import Shape
from penstock.postgres.types.arrays import Bools, as_arrow, as_bools, distinct
from penstock.postgres.types.column import DecodedColumn
from penstock.postgres.types.records import split_records
from penstock.postgres.types.resolver import TypeResolver
from penstock.postgres.types.rows import DecodedRows, decode_rows, join_columns
from penstock.schema import TableSchema

_log = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]

_KINDS = pa.array([str(kind) for kind in (ChangeType.INSERT, ChangeType.UPDATE_POSTIMAGE, ChangeType.DELETE, ChangeType.TRUNCATE)])
_INSERT, _UPDATE, _DELETE, _TRUNCATE = range(4)
_NOTED = pa.array(["I", "U", "D", "T"])
"""What triggers write for each of them."""
_SHAPE = 3
"""Its place among the columns that are read."""
_HALVES = 2
"""Numbers that a change takes: both halves of a key change have one."""


@dataclass(frozen=True, slots=True)
class CommitFacts:
    """What the rows of a transaction share."""

    xid: int
    at: datetime


@dataclass(frozen=True, slots=True, eq=False)
class NotedChanges:
    """Changes as they were written down, in order."""

    positions: Ints
    numbers: Ints
    """In their transactions; they go up, but not by one."""
    tables: Ints
    """By OID; of a partition, that of its root."""
    shapes: Ints
    codes: Ints
    old: pa.StringArray
    new: pa.StringArray

    @classmethod
    def of(cls, columns: Sequence[pa.StringArray]) -> NotedChanges:
        positions, numbers, tables, shapes, kinds, old_at, new_at, old, new = columns
        codes = _numbers(pc.index_in(kinds, value_set=_NOTED).cast(pa.int64()))
        noted = cls(_integers(positions), _integers(numbers), _integers(tables), _integers(shapes), codes, old, new)
        # A place that nobody found a row at is that of a row which somebody has locked, and that is all.
        late = np.flatnonzero(as_bools(pc.is_in(new_at, value_set=old_at.drop_null())))
        return noted if not len(late) else noted.only(true_order(noted, late, old_at, new_at), noted.numbers)

    def only(self, chosen: Ints, numbers: Ints | None = None) -> NotedChanges:
        """Some of them, or all in another order; with other numbers, if need be."""
        at = as_arrow(chosen, pa.int64())
        own = self.numbers[chosen] if numbers is None else numbers
        tables, shapes, codes = self.tables[chosen], self.shapes[chosen], self.codes[chosen]
        return NotedChanges(self.positions[chosen], own, tables, shapes, codes, self.old.take(at), self.new.take(at))

    @property
    def shape_ids(self) -> list[int]:
        return [int(each) for each in distinct(np.abs(self.shapes))]


def restored(columns: Sequence[pa.StringArray], find: Callable[[int, str], int | None]) -> list[pa.StringArray]:
    """The columns that `NotedChanges` are made of, with the shapes that rows have in place of those that were noted.

    A transaction that began before a table was altered notes what that looked like then, and the numbers of the columns that rows have. A
    shape that cannot be found by them is the negative of the one that was noted.
    """
    *facts, altered = columns
    if altered.null_count == len(altered):
        return facts
    noted = list(zip(facts[_SHAPE].to_pylist(), altered.to_pylist(), strict=True))
    known = {(shape, numbers): find(int(shape), numbers) or -int(shape) for shape, numbers in set(noted) if numbers is not None}
    facts[_SHAPE] = pa.array([str(known.get(each, each[0])) for each in noted], pa.string())
    return facts


def true_order(noted: NotedChanges, late: Ints, old_at: pa.StringArray, new_at: pa.StringArray) -> Ints:
    """With each of the `late` changes before the change that found the row where this one left it, if that was written down first.

    Triggers fire when a statement is over, one row after the other. One of the application's that changes a row of the same statement,
    which has not had its turn yet, is therefore written down before the change that it follows from. Within a transaction no two versions
    of rows have the same place in one file of their table, until it is emptied: a file that the transaction itself has begun is kept then,
    and filled from its beginning. So nothing is ever put on the other side of a truncate.
    """
    order = list(range(len(noted.codes)))
    places = old_at.to_pylist()
    for position in distinct(noted.positions[late]).tolist():
        members = np.flatnonzero(noted.positions == position).tolist()
        fillings = _fillings(noted, members)
        found = {(*fillings[at], places[at]): at for at in members if places[at] is not None}
        for at in late[noted.positions[late] == position].tolist():
            follower = found.get((*fillings[at], new_at[at].as_py()))
            if follower is not None and follower < at:
                order.remove(at)
                order.insert(order.index(follower), at)
    return np.array(order, np.int64)


def _fillings(noted: NotedChanges, members: Iterable[int]) -> dict[int, tuple[int, int]]:
    """For each of the changes of a transaction: its table, and how many times that was emptied before."""
    emptied: Counter[int] = Counter()
    fillings: dict[int, tuple[int, int]] = {}
    for at in members:
        table = int(noted.tables[at])
        emptied[table] += noted.codes[at] == _TRUNCATE
        fillings[at] = (table, emptied[table])
    return fillings


def table_schema(shape: Shape, types: TypeResolver) -> TableSchema:
    """Without generated columns, as a snapshot reads it; the columns of a partition in the order of its root."""
    kept = sorted((field for field in shape.fields if not field.is_generated), key=lambda field: field.rank)
    columns = tuple(types.column(field.name, field.type_oid, field.type_modifier) for field in kept)
    return TableSchema(shape.oid, shape.name, columns, ()).with_key(shape.key)


def build_batches(
    noted: NotedChanges, shapes: Mapping[int, tuple[Shape, TableSchema]], commits: Mapping[int, CommitFacts]
) -> tuple[ChangeBatch, ...]:
    """One batch for each table under each version of its schema, in the order of their first changes."""
    parts: dict[TableSchema, list[ChangeBatch]] = defaultdict(list)
    for shape_id in dict.fromkeys(noted.shapes.tolist()):
        shape, schema = shapes[abs(shape_id)]
        part = noted.only(np.flatnonzero(noted.shapes == shape_id))
        parts[schema].append(_build_lost(part, schema, commits) if shape_id < 0 else _build_safely(part, shape, schema, commits))
    return tuple(_joined(schema, batches) for schema, batches in parts.items())


def _build_safely(noted: NotedChanges, shape: Shape, schema: TableSchema, commits: Mapping[int, CommitFacts]) -> ChangeBatch:
    """Rows that are not what their shape says are the trouble of their table, and of no other."""
    try:
        return _build(noted, shape, schema, commits)
    except ProtocolError as error:
        _log.warning("changes cannot be read", extra={"table": str(schema.name), "code": error.code, "changes": len(noted.codes)})
        return _build_lost(noted, schema, commits)


def _build_lost(noted: NotedChanges, schema: TableSchema, commits: Mapping[int, CommitFacts]) -> ChangeBatch:
    """Changes whose columns nobody can tell: no value is there, and each is marked as a text that cannot be read."""
    rows = _Rows.plan(noted, np.zeros(len(noted.codes), np.bool_))
    texts = pc.binary_join_element_wise(pa.scalar(REPLACED), pc.coalesce(noted.new, noted.old), "")
    lost, count = texts.is_valid(), len(texts)
    fields = change_schema(schema)
    columns = [DecodedColumn(pa.nulls(count, fields.field(at).type), lost) for at in range(len(schema.columns))]
    unreadable = dict.fromkeys(schema.column_names, lost.true_count)
    decoded = join_columns(columns, [texts] * len(columns), schema, count, unreadable)
    return _batch(noted, rows, schema, commits, decoded, moves=0)


def _build(noted: NotedChanges, shape: Shape, schema: TableSchema, commits: Mapping[int, CommitFacts]) -> ChangeBatch:
    new, old = _Tuples.of(noted.new, shape), _Tuples.of(noted.old, shape)
    moved = _moved(noted, new, old, schema.key)
    rows = _Rows.plan(noted, moved)
    texts = [_texts(name, rows, new, old, is_key=not schema.key or name in schema.key) for name in schema.column_names]
    decoded = decode_rows(texts, schema, len(rows.codes))
    return _batch(noted, rows, schema, commits, decoded, moves=int(np.count_nonzero(moved)))


def _batch(
    noted: NotedChanges, rows: _Rows, schema: TableSchema, commits: Mapping[int, CommitFacts], decoded: DecodedRows, *, moves: int
) -> ChangeBatch:
    inserts, updates, deletes, truncates = np.bincount(rows.codes, minlength=len(_KINDS)).tolist()
    batch = pa.RecordBatch.from_arrays(
        [*decoded.columns, *_metadata(noted, rows, commits), decoded.exact],
        schema=change_schema(schema),
    )
    unreadable = sum(decoded.unreadable.values())
    return ChangeBatch(schema, batch, ChangeCounts(inserts, updates, deletes, truncates, moves, 0, decoded.inexact, unreadable))


@dataclass(frozen=True, slots=True, eq=False)
class _Tuples:
    """The rows that some of the changes have, by column; `places` says for each change which it is, -1 if it has none."""

    columns: Mapping[str, pa.StringArray]
    places: Ints

    @classmethod
    def of(cls, records: pa.StringArray, shape: Shape) -> _Tuples:
        present = as_bools(records.is_valid())
        places = np.where(present, np.cumsum(present) - 1, -1)
        try:
            columns = split_records(records.drop_null(), len(shape.fields))
        except ProtocolError as error:
            raise ProtocolError(f"a change of {shape.name} has {error.message} of {len(shape.fields)} columns") from None
        return cls({field.name: column for field, column in zip(shape.fields, columns, strict=True)}, places)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """For each row of a batch: its change, its kind, its number, and whether it shows the old row."""

    changes: Ints
    codes: Ints
    ordinals: Ints
    shows_old: Bools

    @classmethod
    def plan(cls, noted: NotedChanges, moved: Bools) -> _Rows:
        changes = np.repeat(np.arange(len(noted.codes)), np.where(moved, 2, 1))
        is_second = np.zeros(len(changes), np.bool_)
        is_second[1:] = changes[1:] == changes[:-1]
        is_first = moved[changes] & ~is_second
        codes = np.where(is_first, _DELETE, np.where(is_second, _INSERT, noted.codes[changes]))
        return cls(changes, codes, noted.numbers[changes] * _HALVES + is_second, codes == _DELETE)


def _moved(noted: NotedChanges, new: _Tuples, old: _Tuples, key: Iterable[str]) -> Bools:
    """Which updates changed the key, or any, where there is no key."""
    updates = np.flatnonzero(noted.codes == _UPDATE)
    moved = np.zeros(len(noted.codes), np.bool_)
    names = tuple(key)
    if not names:
        moved[updates] = True
    for name in names:
        before = old.columns[name].take(as_arrow(old.places[updates], pa.int64())).cast(pa.binary())
        after = new.columns[name].take(as_arrow(new.places[updates], pa.int64())).cast(pa.binary())
        moved[updates] |= ~as_bools(pc.fill_null(pc.equal(before, after), False))
    return moved


def _texts(name: str, rows: _Rows, new: _Tuples, old: _Tuples, *, is_key: bool) -> pa.StringArray:
    """A column of a batch. A delete shows the key alone; a truncate shows nothing."""
    ours, theirs = new.columns[name], old.columns[name]
    together = pa.concat_arrays([ours, theirs, pa.nulls(1, pa.string())])
    nothing = len(ours) + len(theirs)
    old_places = old.places[rows.changes] + len(ours) if is_key else np.full(len(rows.changes), nothing)
    places = np.where(rows.shows_old, old_places, new.places[rows.changes])
    places = np.where(rows.codes == _TRUNCATE, nothing, places)
    return together.take(as_arrow(places, pa.int64()))


def _metadata(noted: NotedChanges, rows: _Rows, commits: Mapping[int, CommitFacts]) -> list[pa.Array]:
    """`_change_type` to `_unchanged`."""
    positions = noted.positions[rows.changes]
    known, at = np.unique(positions, return_inverse=True)
    facts = [commits[int(position)] for position in known]
    places = as_arrow(at.astype(np.int64), pa.int64())
    times = pa.array([each.at for each in facts], pa.timestamp("us", "UTC")).take(places)
    xids = pa.array([each.xid for each in facts], pa.int64()).take(places)
    kinds = _KINDS.take(as_arrow(rows.codes, pa.int64()))
    nothing = pa.nulls(len(positions), pa.list_(pa.string()))
    return [kinds, as_arrow(positions, pa.int64()), times, as_arrow(rows.ordinals, pa.int64()), xids, nothing]


def _joined(schema: TableSchema, batches: Sequence[ChangeBatch]) -> ChangeBatch:
    """Changes of several partitions, in their order."""
    if len(batches) == 1:
        return batches[0]
    rows = pa.Table.from_batches([batch.rows for batch in batches]).combine_chunks()
    first = len(schema.columns)
    positions, ordinals = (_numbers(rows.column(first + at).chunk(0)) for at in (1, 3))
    order = as_arrow(np.lexsort((ordinals, positions)), pa.int64())
    counts = sum((batch.counts for batch in batches), ChangeCounts())
    return ChangeBatch(schema, rows.take(order).combine_chunks().to_batches()[0], counts)


def _integers(texts: pa.StringArray) -> Ints:
    return _numbers(texts.cast(pa.int64()))


def _numbers(values: pa.Int64Array) -> Ints:
    return np.frombuffer(values.buffers()[1], np.int64, count=len(values), offset=values.offset * 8)
