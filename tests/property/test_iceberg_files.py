"""Data and delete files of an Iceberg table, applied as the specification says: the rows left are those of
the epoch.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.change import EXACT, EXACT_TYPE
from penstock.sinks.base import SnapshotPlace
from penstock.sinks.fold import COUNT, Outcome
from penstock.sinks.iceberg.files import EpochTask, StoredFiles, WrittenFile, named_columns, write_outcome
from penstock.sinks.iceberg.schema import FIELD_ID, delete_columns
from penstock.sinks.modes import Layout, Mode
from penstock.sinks.row_chains import NewRows

PLAIN = Layout(pa.schema([("id", pa.int16()), ("note", pa.string())]), ("id",), Mode.MIRROR)
BEYOND = Layout(
    pa.schema([("day", pa.date32()), ("id", pa.int32()), ("note", pa.string())]), ("day", "id"), Mode.MIRROR
)
INEXACT = Layout(
    pa.schema([("share", pa.float64()), ("id", pa.int32()), ("note", pa.string())]),
    ("share", "id"),
    Mode.MIRROR,
)
NAMELESS = Layout(pa.schema([("share", pa.float64()), ("note", pa.string())]), ("share",), Mode.MIRROR)
NESTED = Layout(pa.schema([("list", pa.list_(pa.int32())), ("note", pa.string())]), ("list",), Mode.MIRROR)
KEYLESS = Layout(pa.schema([("id", pa.int32()), ("share", pa.float64())]), (), Mode.MIRROR)

_INT = st.tuples(st.integers(0, 1), st.none())
_DAY = st.sampled_from([(None, "infinity"), (None, "-infinity"), (0, None), (1, None)])
_FLOAT = st.tuples(st.sampled_from([0.0, 0.5, float("nan"), 2.5]), st.none())
_LIST = st.tuples(st.lists(st.integers(0, 1), max_size=2), st.none())
_NULLABLE = st.sampled_from([(None, None), (0, None), (1, None)])
KEYS = {
    id(PLAIN): (st.tuples(st.integers(0, 3), st.none()),),
    id(BEYOND): (_DAY, _INT),
    id(INEXACT): (_FLOAT, _INT),
    id(NAMELESS): (_FLOAT,),
    id(NESTED): (_LIST,),
}

Key = tuple[tuple[Any, str | None], ...]


def _files_schema(layout: Layout) -> pa.Schema:
    """The types of an Iceberg table, which has no int16."""
    types = [pa.int32() if each.type == pa.int16() else each.type for each in layout.schema]
    fields = zip(layout.schema.names, types, strict=True)
    return pa.schema(
        [
            pa.field(name, each, metadata={FIELD_ID: str(at).encode()})
            for at, (name, each) in enumerate(fields, 1)
        ]
    )


def _table(layout: Layout, rows: list[tuple[Key, str]], names: tuple[str, ...]) -> pa.Table:
    types = {each.name: each.type for each in layout.columns}
    columns = [pa.array([key[at][0] for key, _ in rows], types[name]) for at, name in enumerate(layout.key)]
    exact = [
        [(name, part[1]) for name, part in zip(layout.key, key, strict=True) if part[1] is not None] or None
        for key, _ in rows
    ]
    found = dict(zip(layout.key, columns, strict=True)) | {
        "note": pa.array([note for _, note in rows], pa.string()),
        EXACT: pa.array(exact, EXACT_TYPE),
    }
    return pa.table([found[name] for name in names], names=list(names))


def _shown(table: pa.Table) -> list[str]:
    return sorted(repr(row) for row in table.to_pylist())


class Lake:
    """An Iceberg table of one data file, and the result of one commit."""

    def __init__(self, layout: Layout, stored: pa.Table, directory: Path) -> None:
        self.layout = layout
        self.stored = stored
        self.directory = directory
        place = SnapshotPlace(str(directory), _files_schema(layout), "epoch")
        self.task = EpochTask((), layout, place, str(directory / "scratch"), named_columns(layout))

    def commit(self, outcome: Outcome) -> pa.Table:
        written = write_outcome(outcome, self.task)
        if written.wanted is not None:
            assert not list(self.directory.glob("*.parquet")), (
                "a task that is done again has written nothing yet"
            )
            held = (
                self.stored
                if written.wanted.keys is None
                else self._matching(pq.read_table(written.wanted.keys), written.wanted.columns)
            )
            path = self.directory / "scratch" / "rows.parquet"
            path.parent.mkdir(exist_ok=True)
            pq.write_table(held.rename_columns([f"v_{at}" for at in range(held.num_columns)]), path)
            written = write_outcome(outcome, replace(self.task, alike=StoredFiles((str(path),))))
            assert written.wanted is None
        left = self.stored.slice(0, 0) if written.emptied else self.stored
        if written.deletes is not None:
            deletes = self._read(written.deletes)
            columns = delete_columns(
                self.task.place.schema, self.layout.identity or self.layout.columns.names
            )
            assert tuple(deletes.column_names) == columns
            taken = self._keys(deletes, columns)
            left = left.filter(
                pa.array([key not in taken for key in self._keys(left, columns, as_list=True)], pa.bool_())
            )
        new = [self._read(written.rows).cast(self.layout.schema)] if written.rows is not None else []
        return pa.concat_tables([left, *new])

    def _matching(self, keys: pa.Table, columns: tuple[str, ...]) -> pa.Table:
        wanted = self._keys(keys, keys.column_names)
        return self.stored.filter(
            pa.array([key in wanted for key in self._keys(self.stored, columns, as_list=True)], pa.bool_())
        )

    def _read(self, file: WrittenFile) -> pa.Table:
        table = pq.read_table(self.directory / file.name)
        assert table.num_rows == file.rows > 0
        return table

    @staticmethod
    def _keys(table: pa.Table, columns: Any, *, as_list: bool = False) -> Any:
        found = [tuple(row.values()) for row in table.select(list(columns)).to_pylist()]
        return found if as_list else set(found)


@pytest.mark.parametrize(
    "layout",
    [PLAIN, BEYOND, INEXACT, NAMELESS, NESTED],
    ids=["plain", "beyond", "inexact", "nameless", "nested"],
)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_deleted_rows_are_removed_and_no_others(data: st.DataObject, layout: Layout) -> None:
    keys = st.tuples(*KEYS[id(layout)])
    held = data.draw(st.lists(keys, unique_by=repr, min_size=3, max_size=8))
    gone = data.draw(st.lists(st.sampled_from(held), unique_by=repr, max_size=4))
    gone += [
        key
        for key in data.draw(st.lists(keys, unique_by=repr, max_size=2))
        if repr(key) not in map(repr, [*held, *gone])
    ]
    back = [key for key in gone if data.draw(st.booleans())]
    names, named = tuple(layout.schema.names), (*layout.key, EXACT)
    stored = _table(layout, [(key, "old") for key in held], names).cast(layout.schema)
    new = _table(layout, [(key, "new") for key in back], names).cast(layout.schema)
    emptied = data.draw(st.sampled_from([False, False, False, True]))
    outcome = Outcome(emptied, _table(layout, [(key, "") for key in gone], named), NewRows.of(new))
    left = [] if emptied else [(key, "old") for key in held if repr(key) not in set(map(repr, gone))]
    expected = pa.concat_tables([_table(layout, left, names).cast(layout.schema), new])
    with tempfile.TemporaryDirectory() as directory:
        assert _shown(Lake(layout, stored, Path(directory)).commit(outcome)) == _shown(expected)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_of_equal_rows_without_key_so_many_go_as_went(data: st.DataObject) -> None:
    row = st.tuples(_NULLABLE, _FLOAT).map(lambda pair: (pair[0][0], pair[1][0]))
    held = data.draw(st.lists(row, max_size=8))
    gone = data.draw(st.lists(st.sampled_from(held), max_size=4)) if held else []
    while any(gone.count(each) > held.count(each) for each in gone):
        gone.pop()
    schema = KEYLESS.schema

    def table(rows: list[tuple[Any, Any]]) -> pa.Table:
        return pa.table(
            [[each[0] for each in rows], [each[1] for each in rows], [None] * len(rows)], schema=schema
        )

    single = list(dict.fromkeys(gone))
    counted = table(single).append_column(COUNT, pa.array([gone.count(each) for each in single], pa.int64()))
    left = list(held)
    for each in gone:
        left.remove(each)
    with tempfile.TemporaryDirectory() as directory:
        found = Lake(KEYLESS, table(held), Path(directory)).commit(Outcome(False, counted, NewRows(schema)))
    assert _shown(found) == _shown(table(left))
