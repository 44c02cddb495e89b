"""A reference table at any version that is still retained: row versions indexed by key.

Two keys are equal if they are equal in SQL, as far as the decoder can tell. A value that its type cannot hold
is represented by its exact text. Null equals nothing, so a key that contains a null is represented by None.

Rows are stored in a few Arrow pieces, each larger than all later ones together. So adding a row copies
little, and reading a few rows touches only their pieces. A key refers to its newest state, and each state to
the previous one, so the current row of a key is found in one step. This module does no I/O.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.change import CHANGE_TYPE, COMMIT_VERSION, EXACT, EXACT_TYPE, ORDINAL, UNCHANGED, ChangeType
from penstock.errors import ReferencePastError, ReferenceTableError

KeyValue: TypeAlias = tuple[object, ...]

_NAN = "nan"
"""NaN equals itself in Postgres, but not in Python."""


def key_values(
    columns: Sequence[pa.Array], names: Sequence[str], exact: pa.Array | None = None
) -> list[KeyValue | None]:
    """The key of each row; None if it contains a null. `names` are the names of `columns`. `exact` is the
    `_exact` column of the rows, if they have one.
    """
    values = [_comparable(column) for column in columns]
    if exact is not None and exact.null_count < len(exact):
        _insert_exact(values, names, exact)
    return [None if None in key else key for key in zip(*values, strict=True)]


def family(arrow_type: pa.DataType) -> str | None:
    """The name of the group of types whose values can be compared with those of this type; None if values of
    this type cannot be looked up.
    """
    kinds = {
        "number": pa.types.is_integer(arrow_type) or pa.types.is_decimal(arrow_type),
        "floating point": pa.types.is_floating(arrow_type),
        "text": pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type),
        "bytes": pa.types.is_binary(arrow_type) or pa.types.is_large_binary(arrow_type),
        "boolean": pa.types.is_boolean(arrow_type),
        "date": pa.types.is_date32(arrow_type),
        "time of day": pa.types.is_time(arrow_type),
        "instant": pa.types.is_timestamp(arrow_type) and arrow_type.tz is not None,
        "timestamp": pa.types.is_timestamp(arrow_type) and arrow_type.tz is None,
    }
    return next((name for name, is_it in kinds.items() if is_it), None)


def _comparable(column: pa.Array) -> list[Any]:
    """The values as Python values. Times become numbers, because Python's types have a smaller range than
    those of Postgres.
    """
    if pa.types.is_timestamp(column.type):
        return list(column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64()).to_pylist())
    if pa.types.is_date32(column.type):
        return list(column.cast(pa.int32()).to_pylist())
    if pa.types.is_time(column.type):
        return list(column.cast(pa.time64("us")).cast(pa.int64()).to_pylist())
    values = column.to_pylist()
    if pa.types.is_floating(column.type):
        return [_NAN if value is not None and math.isnan(value) else value for value in values]
    return list(values)


def _insert_exact(values: list[list[Any]], names: Sequence[str], exact: pa.Array) -> None:
    for row, entries in enumerate(exact.to_pylist()):
        for name, text in entries or ():
            for place, known in enumerate(names):
                if known == name:
                    values[place][row] = text


class RowPieces:
    """Rows of one schema, numbered from 0 in insertion order."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._pieces: list[pa.Table] = []
        self._starts: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, rows: pa.RecordBatch) -> int:
        """Append rows; returns the index of the first."""
        first = self._count
        if rows.num_rows:
            self._pieces.append(pa.Table.from_arrays(rows.columns, schema=self._schema))
            self._starts.append(first)
            self._count += rows.num_rows
            self._join()
        return first

    def take(self, places: pa.Int64Array) -> pa.Table:
        """The rows at these indexes, in this order; a row of nulls for a null index."""
        wanted = places.drop_null().to_numpy()
        owners = np.searchsorted(self._starts, wanted, side="right") - 1
        order = np.argsort(owners, kind="stable")
        found = [
            piece.take(pa.array(wanted[order][owners[order] == number] - start))
            for number, (piece, start) in enumerate(zip(self._pieces, self._starts, strict=True))
            if (owners == number).any()
        ]
        rows = pa.concat_tables([self._schema.empty_table(), *found]).combine_chunks()
        # Row i of `rows` belongs at index order[i]; null indexes stay null.
        where = np.full(len(places), -1, np.int64)
        at = np.empty(len(wanted), np.int64)
        at[order] = np.arange(len(wanted))
        where[~np.asarray(places.is_null(), dtype=bool)] = at
        return rows.take(pa.array(where, mask=where < 0))

    def _join(self) -> None:
        while len(self._pieces) > 1 and self._pieces[-2].num_rows <= 2 * self._pieces[-1].num_rows:
            last = self._pieces.pop()
            self._starts.pop()
            self._pieces[-1] = pa.concat_tables([self._pieces[-1], last]).combine_chunks()


class _State(NamedTuple):
    """State of a key since `(version, ordinal)`: `place` is the index of the key's row, or None if the key
    has no row.

    For a row that has not changed since the floor, a plain index is stored instead of a state, which saves
    memory for almost all rows.
    """

    version: int
    ordinal: int
    place: int | None
    before: _State | int | None


class ReferenceHistory:
    """Row versions by key. One thread applies the changes, in order."""

    def __init__(self, columns: pa.Schema, key: Sequence[str], floor: int) -> None:
        self.floor = floor
        """The version of the initial rows; earlier versions are unknown."""
        self.changes_total = 0
        """Number of changes after the initial rows. Memory use grows with it."""
        self._schema = row_schema(columns)
        self._key = tuple(key)
        self._newest: dict[KeyValue, _State | int] = {}
        self._emptied: list[tuple[int, int]] = []
        self._rows = RowPieces(self._schema)
        self._moved: tuple[int, int, int | None] | None = None
        """Version and ordinal of the last delete, and the index of the deleted row."""

    def load(self, rows: pa.RecordBatch) -> None:
        """Load the initial rows, as of the floor: the table's columns, then `_exact`. Call it before the
        first change.
        """
        first = self._rows.add(rows)
        for place, key in enumerate(self._keys(rows), first):
            if self._newest.setdefault(key, place) != place:
                raise twice(self._key)

    def apply(self, changes: pa.RecordBatch) -> None:
        """Apply changes of a reference table, in order."""
        start = 0
        unchanged = changes.column(UNCHANGED)
        if unchanged.null_count < len(unchanged):
            for at in pc.indices_nonzero(unchanged.is_valid()).to_pylist():
                self._apply(changes.slice(start, at - start))
                self._apply(self._filled(changes.slice(at, 1)))
                start = at + 1
        self._apply(changes.slice(start))

    def find(self, keys: Sequence[KeyValue | None], versions: Sequence[int] | None = None) -> pa.Int64Array:
        """For each key, the index of its row as of the given version, or the current one; null if there is
        none.
        """
        if versions is None:
            places = [self._place(key, None) for key in keys]
        else:
            if versions and min(versions) < self.floor:
                raise _too_old(min(versions), self.floor)
            places = [self._place(key, version) for key, version in zip(keys, versions, strict=True)]
        return pa.array(places, pa.int64())

    def take(self, places: pa.Int64Array) -> pa.Table:
        """The rows at these indexes: the table's columns, then `_exact`; all null for a null index."""
        return self._rows.take(places)

    def rows_at(self, version: int) -> pa.Table:
        """The whole table as of a version."""
        if version < self.floor:
            raise _too_old(version, self.floor)
        places = (self._place(key, version) for key in self._newest)
        return self._rows.take(pa.array([place for place in places if place is not None], pa.int64()))

    def _place(self, key: KeyValue | None, version: int | None) -> int | None:
        state = self._newest.get(key) if key is not None else None
        if version is not None:
            while isinstance(state, _State) and state.version > version:
                state = state.before
        place, since = (state.place, state[:2]) if isinstance(state, _State) else (state, (self.floor, -1))
        if place is None or not self._emptied:
            return place
        at = (
            len(self._emptied)
            if version is None
            else bisect_right(self._emptied, version, key=lambda place: place[0])
        )
        return None if at > 0 and self._emptied[at - 1] > since else place

    def _apply(self, changes: pa.RecordBatch) -> None:
        if not changes.num_rows:
            return
        names = (CHANGE_TYPE, COMMIT_VERSION, ORDINAL)
        kinds, versions, ordinals = (changes.column(name).to_pylist() for name in names)
        rows = changes.select(self._schema.names)
        place = self._rows.add(rows)
        self.changes_total += changes.num_rows
        keys = key_values([rows.column(name) for name in self._key], self._key, rows.column(EXACT))
        for kind, version, ordinal, key in zip(kinds, versions, ordinals, keys, strict=True):
            if kind == ChangeType.TRUNCATE:
                self._emptied.append((version, ordinal))
            elif key is None:
                raise _without_key(self._key)
            elif kind == ChangeType.DELETE:
                self._moved = (version, ordinal, self._place(key, None))
                self._newest[key] = _State(version, ordinal, None, self._newest.get(key))
            else:
                if kind == ChangeType.INSERT and self._is_inserted(key, version):
                    raise twice(self._key)
                self._newest[key] = _State(version, ordinal, place, self._newest.get(key))
            place += 1

    def _is_inserted(self, key: KeyValue, version: int) -> bool:
        """Whether the current transaction already wrote a row of that key."""
        state = self._newest.get(key)
        return isinstance(state, _State) and state.version == version and self._place(key, None) is not None

    def _filled(self, change: pa.RecordBatch) -> pa.RecordBatch:
        """One change, with its unchanged TOAST values filled in from the earlier row."""
        names = frozenset(change.column(UNCHANGED)[0].as_py())
        place = self._place_before(change)
        if place is None:
            raise ReferenceTableError(
                "a change has unchanged TOAST values of a row that the reference table does not have",
                hint="remove the directory of the stored table, so that it is copied again",
            )
        before = self._rows.take(pa.array([place], pa.int64())).to_batches()[0]
        columns = [
            before.column(field.name) if field.name in names else change.column(at)
            for at, field in enumerate(change.schema)
        ]
        kept = [entry for entry in before.column(EXACT)[0].as_py() or () if entry[0] in names]
        texts = [*(change.column(EXACT)[0].as_py() or ()), *kept]
        columns[change.schema.get_field_index(EXACT)] = pa.array([texts or None], EXACT_TYPE)
        return pa.RecordBatch.from_arrays(columns, schema=change.schema)

    def _place_before(self, change: pa.RecordBatch) -> int | None:
        """Index of the row that has the unchanged values of `change`: the row with the same key or, after a
        key change, the row that the preceding change deleted. None if there is no such row.
        """
        version, ordinal = (change.column(name)[0].as_py() for name in (COMMIT_VERSION, ORDINAL))
        if (
            self._moved is not None
            and self._moved[:2] == (version, ordinal - 1)
            and change.column(CHANGE_TYPE)[0].as_py() == "insert"
        ):
            return self._moved[2]
        (key,) = key_values([change.column(name) for name in self._key], self._key, change.column(EXACT))
        return self._place(key, None)

    def _keys(self, rows: pa.RecordBatch) -> list[KeyValue]:
        keys = key_values([rows.column(name) for name in self._key], self._key, rows.column(EXACT))
        known = [key for key in keys if key is not None]
        if len(known) < len(keys):
            raise _without_key(self._key)
        return known


def row_schema(columns: pa.Schema) -> pa.Schema:
    """A table's own columns, then `_exact`."""
    return pa.schema([*columns, pa.field(EXACT, EXACT_TYPE)])


def _too_old(version: int, floor: int) -> ReferencePastError:
    return ReferencePastError(
        f"a change of version {version} is older than the history of the reference table, which starts at "
        f"version {floor}",
        hint="start `keep` first, then the query with a new checkpoint; to continue from its old checkpoint, "
        "the query needs the directory of the earlier copy",
    )


def _without_key(key: Sequence[str]) -> ReferenceTableError:
    return ReferenceTableError(
        f"a row of the reference table has no {' and '.join(key)}",
        hint="choose key columns that are never null",
    )


def twice(key: Sequence[str]) -> ReferenceTableError:
    return ReferenceTableError(
        f"two rows of the reference table have the same {' and '.join(key)}",
        hint="choose key columns that identify its rows, or remove duplicate rows",
    )
