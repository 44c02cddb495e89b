"""Build typed change batches from rows of the change table, with the same columns and metadata as the
replication stream. A recorded change has the whole old row, the whole new row, or both, so no value is
missing. An update that changes the key becomes a `delete` of the old key and an `insert` of the new one. In a
table without a key, every update becomes a `delete` and an `insert`.
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

from penstock.arrow import Bools, as_arrow, as_bools, distinct
from penstock.change import REPLACED, ChangeBatch, ChangeCounts, ChangeType, change_schema
from penstock.errors import ProtocolError
from penstock.postgres.change_table import Shape
from penstock.postgres.types.column import DecodedColumn
from penstock.postgres.types.quoting import split_records
from penstock.postgres.types.registry import TypeResolver
from penstock.postgres.types.rows import DecodedRows, decode_rows, join_columns
from penstock.schema import TableSchema

_log = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]

_KINDS = pa.array(
    [
        str(kind)
        for kind in (ChangeType.INSERT, ChangeType.UPDATE_POSTIMAGE, ChangeType.DELETE, ChangeType.TRUNCATE)
    ]
)
_INSERT, _UPDATE, _DELETE, _TRUNCATE = range(4)
_CODES = pa.array(["I", "U", "D", "T"])
"""The codes that triggers write for these kinds."""
_SHAPE = 3
"""The index of the shape id among the columns that are read from the change table."""
_HALVES = 2
"""Ordinals per change: an update that changes the key becomes two rows, which need one each."""


@dataclass(frozen=True, slots=True)
class CommitFacts:
    """Transaction id and commit time of one transaction."""

    xid: int
    at: datetime


@dataclass(frozen=True, slots=True, eq=False)
class RecordedChanges:
    """Rows of the change table in order, as one array per column."""

    positions: Ints
    numbers: Ints
    """The number of each change within its transaction. The numbers ascend, but have gaps."""
    tables: Ints
    """The OID of each change's table; for a partition, that of its root."""
    shapes: Ints
    codes: Ints
    old: pa.StringArray
    new: pa.StringArray

    @classmethod
    def of(cls, columns: Sequence[pa.StringArray]) -> RecordedChanges:
        positions, numbers, tables, shapes, kinds, old_at, new_at, old, new = columns
        codes = _numbers(pc.index_in(kinds, value_set=_CODES).cast(pa.int64()))
        recorded = cls(
            _integers(positions), _integers(numbers), _integers(tables), _integers(shapes), codes, old, new
        )
        # `new_at` is recorded if the new row is locked or was changed again. If no other change has this ctid
        # as `old_at`, the row was only locked.
        late = np.flatnonzero(as_bools(pc.is_in(new_at, value_set=old_at.drop_null())))
        return (
            recorded
            if not len(late)
            else recorded.only(causal_order(recorded, late, old_at, new_at), recorded.numbers)
        )

    def only(self, chosen: Ints, numbers: Ints | None = None) -> RecordedChanges:
        """Return the changes with the indices `chosen`, in that order. `numbers` replace their own numbers,
        if given.
        """
        at = as_arrow(chosen, pa.int64())
        own = self.numbers[chosen] if numbers is None else numbers
        tables, shapes, codes = self.tables[chosen], self.shapes[chosen], self.codes[chosen]
        return RecordedChanges(
            self.positions[chosen], own, tables, shapes, codes, self.old.take(at), self.new.take(at)
        )

    @property
    def shape_ids(self) -> list[int]:
        return [int(each) for each in distinct(np.abs(self.shapes))]


def restored(
    columns: Sequence[pa.StringArray], find: Callable[[int, str], int | None]
) -> list[pa.StringArray]:
    """Return the columns for `RecordedChanges`, with the actual shape of each row in place of the recorded
    one. A transaction that began before a table was altered records the old shape, although its rows have the
    new columns; it also records the numbers of those columns. If no shape with these numbers is known, the
    result is the negative id of the recorded shape.
    """
    *facts, altered = columns
    if altered.null_count == len(altered):
        return facts
    recorded = list(zip(facts[_SHAPE].to_pylist(), altered.to_pylist(), strict=True))
    known = {
        (shape, numbers): find(int(shape), numbers) or -int(shape)
        for shape, numbers in set(recorded)
        if numbers is not None
    }
    facts[_SHAPE] = pa.array([str(known.get(each, each[0])) for each in recorded], pa.string())
    return facts


def causal_order(
    recorded: RecordedChanges, late: Ints, old_at: pa.StringArray, new_at: pa.StringArray
) -> Ints:
    """Return the indices of the changes in the order in which they were made. Each change in `late` wrote a
    row version that another change then replaced or deleted. If the other change was recorded first, the
    change in `late` is moved before it. Two such changes are matched by the ctid of the row version.

    The order can differ because row triggers fire after the statement, one row after the other. A trigger of
    the application may change a row of the same statement whose own trigger has not fired yet; this later
    change is then recorded first.

    Within a transaction no two row versions have the same ctid in one file of the table. A TRUNCATE starts a
    new file, which reuses ctids from the beginning. So no change is moved across a truncate.
    """
    order = list(range(len(recorded.codes)))
    places = old_at.to_pylist()
    for position in distinct(recorded.positions[late]).tolist():
        members = np.flatnonzero(recorded.positions == position).tolist()
        fillings = _fillings(recorded, members)
        found = {(*fillings[at], places[at]): at for at in members if places[at] is not None}
        for at in late[recorded.positions[late] == position].tolist():
            follower = found.get((*fillings[at], new_at[at].as_py()))
            if follower is not None and follower < at:
                order.remove(at)
                order.insert(order.index(follower), at)
    return np.array(order, np.int64)


def _fillings(recorded: RecordedChanges, members: Iterable[int]) -> dict[int, tuple[int, int]]:
    """For each change of a transaction, by index: the table, and how often the transaction had truncated that
    table before the change.
    """
    emptied: Counter[int] = Counter()
    fillings: dict[int, tuple[int, int]] = {}
    for at in members:
        table = int(recorded.tables[at])
        emptied[table] += recorded.codes[at] == _TRUNCATE
        fillings[at] = (table, emptied[table])
    return fillings


def table_schema(shape: Shape, types: TypeResolver) -> TableSchema:
    """Return the table schema of a shape without generated columns, as a snapshot reads the table. Columns of
    a partition are in the order of its root.
    """
    kept = sorted((field for field in shape.fields if not field.is_generated), key=lambda field: field.rank)
    columns = tuple(types.column(field.name, field.type_oid, field.type_modifier) for field in kept)
    return TableSchema(shape.oid, shape.name, columns, ()).with_key(shape.key)


def build_batches(
    recorded: RecordedChanges,
    shapes: Mapping[int, tuple[Shape, TableSchema]],
    commits: Mapping[int, CommitFacts],
) -> tuple[ChangeBatch, ...]:
    """Build one batch for each table and schema version, in the order of the first changes of each."""
    parts: dict[TableSchema, list[ChangeBatch]] = defaultdict(list)
    for shape_id in dict.fromkeys(recorded.shapes.tolist()):
        shape, schema = shapes[abs(shape_id)]
        part = recorded.only(np.flatnonzero(recorded.shapes == shape_id))
        parts[schema].append(
            _build_lost(part, schema, commits)
            if shape_id < 0
            else _build_safely(part, shape, schema, commits)
        )
    return tuple(_joined(schema, batches) for schema, batches in parts.items())


def _build_safely(
    recorded: RecordedChanges, shape: Shape, schema: TableSchema, commits: Mapping[int, CommitFacts]
) -> ChangeBatch:
    """Build a batch. Rows that do not match their shape do not raise an error, but make the values
    unreadable, so that only their table fails.
    """
    try:
        return _build(recorded, shape, schema, commits)
    except ProtocolError as error:
        _log.warning(
            "changes unreadable",
            extra={"table": str(schema.name), "code": error.code, "changes": len(recorded.codes)},
        )
        return _build_lost(recorded, schema, commits)


def _build_lost(
    recorded: RecordedChanges, schema: TableSchema, commits: Mapping[int, CommitFacts]
) -> ChangeBatch:
    """Build a batch of changes whose columns are unknown. All values are NULL, and each is marked as an
    unreadable text.
    """
    rows = _Rows.plan(recorded, np.zeros(len(recorded.codes), np.bool_))
    texts = pc.binary_join_element_wise(pa.scalar(REPLACED), pc.coalesce(recorded.new, recorded.old), "")
    lost, count = texts.is_valid(), len(texts)
    fields = change_schema(schema)
    columns = [
        DecodedColumn(pa.nulls(count, fields.field(at).type), lost) for at in range(len(schema.columns))
    ]
    unreadable = dict.fromkeys(schema.column_names, lost.true_count)
    decoded = join_columns(columns, [texts] * len(columns), schema, count, unreadable)
    return _batch(recorded, rows, schema, commits, decoded, moves=0)


def _build(
    recorded: RecordedChanges, shape: Shape, schema: TableSchema, commits: Mapping[int, CommitFacts]
) -> ChangeBatch:
    new, old = _Tuples.of(recorded.new, shape), _Tuples.of(recorded.old, shape)
    moved = _moved(recorded, new, old, schema.key)
    rows = _Rows.plan(recorded, moved)
    texts = [
        _texts(name, rows, new, old, is_key=not schema.key or name in schema.key)
        for name in schema.column_names
    ]
    decoded = decode_rows(texts, schema, len(rows.codes))
    return _batch(recorded, rows, schema, commits, decoded, moves=int(np.count_nonzero(moved)))


def _batch(
    recorded: RecordedChanges,
    rows: _Rows,
    schema: TableSchema,
    commits: Mapping[int, CommitFacts],
    decoded: DecodedRows,
    *,
    moves: int,
) -> ChangeBatch:
    inserts, updates, deletes, truncates = np.bincount(rows.codes, minlength=len(_KINDS)).tolist()
    batch = pa.RecordBatch.from_arrays(
        [*decoded.columns, *_metadata(recorded, rows, commits), decoded.exact],
        schema=change_schema(schema),
    )
    unreadable = sum(decoded.unreadable.values())
    return ChangeBatch(
        schema,
        batch,
        ChangeCounts(inserts, updates, deletes, truncates, moves, 0, decoded.inexact, unreadable),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Tuples:
    """The old rows or the new rows of some changes, by column. `places` contains for each change the index of
    its row, or -1 if it has none.
    """

    columns: Mapping[str, pa.StringArray]
    places: Ints

    @classmethod
    def of(cls, records: pa.StringArray, shape: Shape) -> _Tuples:
        present = as_bools(records.is_valid())
        places = np.where(present, np.cumsum(present) - 1, -1)
        try:
            columns = split_records(records.drop_null(), len(shape.fields))
        except ProtocolError as error:
            raise ProtocolError(
                f"a change of {shape.name} has {error.message} of {len(shape.fields)} columns"
            ) from None
        return cls({field.name: column for field, column in zip(shape.fields, columns, strict=True)}, places)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """For each row of a batch: the index of its change, its kind, its ordinal, and whether its values are
    those of the old row.
    """

    changes: Ints
    codes: Ints
    ordinals: Ints
    shows_old: Bools

    @classmethod
    def plan(cls, recorded: RecordedChanges, moved: Bools) -> _Rows:
        changes = np.repeat(np.arange(len(recorded.codes)), np.where(moved, 2, 1))
        is_second = np.zeros(len(changes), np.bool_)
        is_second[1:] = changes[1:] == changes[:-1]
        is_first = moved[changes] & ~is_second
        codes = np.where(is_first, _DELETE, np.where(is_second, _INSERT, recorded.codes[changes]))
        return cls(changes, codes, recorded.numbers[changes] * _HALVES + is_second, codes == _DELETE)


def _moved(recorded: RecordedChanges, new: _Tuples, old: _Tuples, key: Iterable[str]) -> Bools:
    """Return for each change whether it is an update that changed the key. In a table without a key, every
    update counts as one.
    """
    updates = np.flatnonzero(recorded.codes == _UPDATE)
    moved = np.zeros(len(recorded.codes), np.bool_)
    names = tuple(key)
    if not names:
        moved[updates] = True
    for name in names:
        before = old.columns[name].take(as_arrow(old.places[updates], pa.int64())).cast(pa.binary())
        after = new.columns[name].take(as_arrow(new.places[updates], pa.int64())).cast(pa.binary())
        moved[updates] |= ~as_bools(pc.fill_null(pc.equal(before, after), False))
    return moved


def _texts(name: str, rows: _Rows, new: _Tuples, old: _Tuples, *, is_key: bool) -> pa.StringArray:
    """Return one column of a batch as texts. A delete has only the values of key columns, a truncate has no
    values.
    """
    ours, theirs = new.columns[name], old.columns[name]
    together = pa.concat_arrays([ours, theirs, pa.nulls(1, pa.string())])
    nothing = len(ours) + len(theirs)
    old_places = old.places[rows.changes] + len(ours) if is_key else np.full(len(rows.changes), nothing)
    places = np.where(rows.shows_old, old_places, new.places[rows.changes])
    places = np.where(rows.codes == _TRUNCATE, nothing, places)
    return together.take(as_arrow(places, pa.int64()))


def _metadata(recorded: RecordedChanges, rows: _Rows, commits: Mapping[int, CommitFacts]) -> list[pa.Array]:
    """Return the columns `_change_type` to `_unchanged`."""
    positions = recorded.positions[rows.changes]
    known, at = np.unique(positions, return_inverse=True)
    facts = [commits[int(position)] for position in known]
    places = as_arrow(at.astype(np.int64), pa.int64())
    times = pa.array([each.at for each in facts], pa.timestamp("us", "UTC")).take(places)
    xids = pa.array([each.xid for each in facts], pa.int64()).take(places)
    kinds = _KINDS.take(as_arrow(rows.codes, pa.int64()))
    nothing = pa.nulls(len(positions), pa.list_(pa.string()))
    return [kinds, as_arrow(positions, pa.int64()), times, as_arrow(rows.ordinals, pa.int64()), xids, nothing]


def _joined(schema: TableSchema, batches: Sequence[ChangeBatch]) -> ChangeBatch:
    """Join the batches of one schema, for example of several partitions, in the order of their changes."""
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
