"""A reference table as of any version since its floor: every row's last states, found by key and version.

Pure: batches in, places out. A key leads to its newest state, and each state to the one before it, so that a change of now finds its row in
one step, and one of a moment ago in two. Rows stay in Arrow; a state holds the place of its row, and what is looked up is taken from there
all at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from penstock.change import CHANGE_TYPE, COMMIT_VERSION, EXACT, EXACT_TYPE, ORDINAL, UNCHANGED, ChangeType
from penstock.errors import ReferencePastError, ReferenceTableError
from penstock.reference.keys import KeyValue, key_values
from penstock.reference.pieces import RowPieces


class _State(NamedTuple):
    """From `(version, ordinal)` on, the row is the one at `place`; None: there is none.

    What was there at the floor, and has not changed since, is a bare place: almost all rows are that.
    """

    version: int
    ordinal: int
    place: int | None
    before: _State | int | None


class ReferenceHistory:
    """Filled by one thread, in the order of the changes."""

    def __init__(self, columns: pa.Schema, key: Sequence[str], floor: int) -> None:
        self.floor = floor
        """The version at which the first rows are exact; nothing is known of what was before."""
        self.changes_total = 0
        """How many changes came after the first rows: what memory goes by, beside them."""
        self._schema = row_schema(columns)
        self._key = tuple(key)
        self._newest: dict[KeyValue, _State | int] = {}
        self._emptied: list[tuple[int, int]] = []
        self._rows = RowPieces(self._schema)
        self._moved: tuple[int, int, int | None] | None = None
        """Version, ordinal and place of the row that the last change deleted."""

    def load(self, rows: pa.RecordBatch) -> None:
        """Rows as they are at the floor: the table's columns, then `_exact`. All of them come before the first change."""
        first = self._rows.add(rows)
        for place, key in enumerate(self._keys(rows), first):
            if self._newest.setdefault(key, place) != place:
                raise twice(self._key)

    def apply(self, changes: pa.RecordBatch) -> None:
        """Changes after all that came before, in order; as a reference table delivers them."""
        start = 0
        unchanged = changes.column(UNCHANGED)
        if unchanged.null_count < len(unchanged):
            for at in pc.indices_nonzero(unchanged.is_valid()).to_pylist():
                self._apply(changes.slice(start, at - start))
                self._apply(self._filled(changes.slice(at, 1)))
                start = at + 1
        self._apply(changes.slice(start))

    def find(self, keys: Sequence[KeyValue | None], versions: Sequence[int] | None = None) -> pa.Int64Array:
        """For each key, the place of its row as of the version beside it, or as of now; null where there is none."""
        if versions is None:
            places = [self._place(key, None) for key in keys]
        else:
            if versions and min(versions) < self.floor:
                raise _too_old(min(versions), self.floor)
            places = [self._place(key, version) for key, version in zip(keys, versions, strict=True)]
        return pa.array(places, pa.int64())

    def take(self, places: pa.Int64Array) -> pa.Table:
        """The rows at these places, the table's columns and then `_exact`; all null where the place is."""
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
        at = len(self._emptied) if version is None else bisect_right(self._emptied, version, key=lambda place: place[0])
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
        """Whether this very transaction has left a row of that key."""
        state = self._newest.get(key)
        return isinstance(state, _State) and state.version == version and self._place(key, None) is not None

    def _filled(self, change: pa.RecordBatch) -> pa.RecordBatch:
        """One change, with the values that it leaves as they were."""
        names = frozenset(change.column(UNCHANGED)[0].as_py())
        place = self._place_before(change)
        if place is None:
            raise ReferenceTableError(
                "a change leaves values of a row as they were, and the reference table does not have that row",
                hint="remove the directory in which the table is kept, so that it is copied anew",
            )
        before = self._rows.take(pa.array([place], pa.int64())).to_batches()[0]
        columns = [before.column(field.name) if field.name in names else change.column(at) for at, field in enumerate(change.schema)]
        kept = [entry for entry in before.column(EXACT)[0].as_py() or () if entry[0] in names]
        texts = [*(change.column(EXACT)[0].as_py() or ()), *kept]
        columns[change.schema.get_field_index(EXACT)] = pa.array([texts or None], EXACT_TYPE)
        return pa.RecordBatch.from_arrays(columns, schema=change.schema)

    def _place_before(self, change: pa.RecordBatch) -> int | None:
        """Where the row stands whose values stay: under its key, or under the one that the change right before this deleted."""
        version, ordinal = (change.column(name)[0].as_py() for name in (COMMIT_VERSION, ORDINAL))
        if self._moved is not None and self._moved[:2] == (version, ordinal - 1) and change.column(CHANGE_TYPE)[0].as_py() == "insert":
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
        f"a change of version {version} is to be joined with a reference table of which nothing is known before version {floor}",
        hint="start the query anew, with a new checkpoint, after the reference table has been kept; "
        "a query that goes on needs the directory in which the table was kept before",
    )


def _without_key(key: Sequence[str]) -> ReferenceTableError:
    return ReferenceTableError(
        f"a row of the reference table has no {' and '.join(key)}", hint="name columns as the key of which none is ever null"
    )


def twice(key: Sequence[str]) -> ReferenceTableError:
    return ReferenceTableError(
        f"two rows of the reference table have the same {' and '.join(key)}",
        hint="name the columns by which its rows can be told apart, or take out the rows that are there twice",
    )
