"""A Delta table that follows schema changes, without Spark: each epoch equals the source in one commit, or
needs a resync.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typing_extensions import override

from penstock.change import EXACT, ChangeType
from penstock.position import Position
from penstock.schema import TableSchema
from penstock.sinks.delta.definition import evolve_state
from penstock.sinks.delta.epoch import DeltaCommit
from penstock.sinks.evolution import ResyncRequired
from penstock.sinks.modes import CURRENT, DELETED, Layout, Mode
from penstock.spool import SpoolReader, SpoolWriter
from tests.support.delta_tables import APPLICATION, InlineExecutors, add_rows, create_table, rows_of, state_of
from tests.support.property.evolving import NAME, Act, Change, FollowingTarget, Source
from tests.support.sinks.source import Change as LogChange
from tests.support.sinks.source import Transaction, Value, whole

KINDS = {"insert": ChangeType.INSERT, "update": ChangeType.UPDATE_POSTIMAGE, "delete": ChangeType.DELETE}
acts = st.tuples(
    st.sampled_from(["write", "write", "write", "delete", "add", "add", "drop", "rename", "swap", "widen"]),
    st.integers(0, 5),
    st.sampled_from(["a", "b", "c"]),
)


class DeltaTarget:
    def __init__(self, root: Path, source: Source, mode: Mode = Mode.MIRROR) -> None:
        """A new copy."""
        self.path = root / "table"
        self.mode = mode
        self.known = FollowingTarget.copy(source)
        layout = self._layout()
        create_table(self.path, layout, mapped=True)
        added = {
            EXACT: None,
            **layout.mode.snapshot_values(Position.of(100), datetime.fromtimestamp(100, UTC)),
        }
        add_rows(
            self.path,
            pa.Table.from_pylist([{**row, **added} for row in source.table().values()], layout.schema),
        )
        self._writer = SpoolWriter(root / "spool", Position.of(100))
        self._reader = SpoolReader(root / "spool")
        self._position = 100

    def _layout(self) -> Layout:
        return Layout(self.known.columns, self.known.key, self.mode)

    def apply(self, changes: list[Change], source: Source) -> None:
        known, start = self.known, self._position
        for change in changes:
            self._position += 10
            row = {name: Value(value) for name, value in change.row.items()}
            self._writer.append(
                whole(change.schema, [Transaction(self._position, (LogChange(KINDS[change.kind], 0, row),))])
            )
        self._writer.seal()
        end = Position.of(self._position)
        slices = self._reader.read(Position.of(start), end).tables[NAME].slices
        state = state_of(self.path)
        views, evolution = known.follow(
            [version for version, _ in groupby(each.file.schema for each in slices)], source.shape()
        )
        if evolution is None:
            epoch = DeltaCommit(self.path, APPLICATION, self._layout(), state, end, slices, views=views)
        else:
            known.columns, known.key, known.origin = evolution.columns, evolution.key, evolution.origin
            evolved = evolve_state(state, evolution, self.mode, {})
            fills = evolved.fills if evolved.is_rewritten else None
            epoch = DeltaCommit(
                self.path,
                APPLICATION,
                self._layout(),
                evolved.state,
                end,
                slices,
                views=views,
                declared=evolved.actions,
                fills=fills,
            )
        assert epoch.apply(InlineExecutors())
        assert state_of(self.path).version == state.version + 1

    def rows(self, names: list[str]) -> dict[int, dict[str, object]]:
        return {row[self.known.key[0]]: {name: row[name] for name in names} for row in rows_of(self.path)}


@settings(deadline=None, max_examples=25)
@given(st.lists(st.lists(acts, max_size=4), min_size=1, max_size=4))
def test_S01_to_S06_a_delta_table_follows_in_the_commit_that_needs_it(plan: list[list[Act]]) -> None:
    source = Source()
    with tempfile.TemporaryDirectory() as directory:
        target = DeltaTarget(Path(directory) / "0", source)
        for number, some in enumerate(plan, 1):
            changes = [
                change
                for act in (*some, ("write", 50 + number, ""))
                if (change := source.do(act)) is not None
            ]
            try:
                target.apply(changes, source)
            except ResyncRequired:
                target = DeltaTarget(Path(directory) / str(number), source)
            names = [column.name for column in source.columns]
            assert target.rows(names) == source.table()


class FormerColumns:
    """Every version of every row, by column number. An added column is in all of them, with the value of the
    current row.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.versions = [(key, dict(row)) for key, row in source.rows.items()]
        self.current = {key: at for at, (key, _) in enumerate(self.versions)}

    def do(self, act: Act) -> Change | None:
        before = {column.number for column in self.source.columns}
        change = self.source.do(act)
        after = {column.number for column in self.source.columns}
        for _, row in self.versions:
            for number in before - after:
                del row[number]
            row.update(dict.fromkeys(after - before, 5 if act[1] % 3 == 1 else None))
        if change is not None:
            key = change.row[self.source.columns[0].name]
            self.current.pop(key, None)
            if key in self.source.rows:
                self.current[key] = len(self.versions)
                self.versions.append((key, dict(self.source.rows[key])))
        return change

    def expected(self, mode: Mode) -> Counter[tuple[object, ...]]:
        live = set(self.current.values())
        last = {key: at for at, (key, _) in enumerate(self.versions)}
        chosen = range(len(self.versions)) if mode is Mode.HISTORY else last.values()
        return Counter(
            (
                *(self.versions[at][1][column.number] for column in self.source.columns),
                (at in live) is (mode is Mode.HISTORY),
            )
            for at in chosen
        )


@pytest.mark.parametrize("mode", [Mode.HISTORY, Mode.SOFT_DELETE])
@settings(deadline=None, max_examples=25)
@given(st.lists(st.lists(acts, max_size=5), min_size=1, max_size=4))
@example([[("write", 1, "a"), ("add", 1, "b"), ("write", 1, "a"), ("delete", 2, "a")], [("delete", 1, "a")]])
@example([[("write", 1, "a"), ("delete", 2, "a")], [("add", 1, "b"), ("delete", 1, "a")]])
def test_S01_former_versions_get_an_added_column_however_large_an_epoch(
    mode: Mode, plan: list[list[Act]]
) -> None:
    past = FormerColumns(Source())
    with tempfile.TemporaryDirectory() as directory:
        target = DeltaTarget(Path(directory) / "0", past.source, mode)
        for number, some in enumerate(plan, 1):
            # A default that differs from row to row is known to the source only, and is never followed here.
            plain = [(kind, which % 2 if kind == "add" else which, name) for kind, which, name in some]
            changes = [
                change for act in (*plain, ("write", 50 + number, "")) if (change := past.do(act)) is not None
            ]
            try:
                target.apply(changes, past.source)
            except ResyncRequired:
                past = FormerColumns(past.source)
                target = DeltaTarget(Path(directory) / str(number), past.source, mode)
            names = [
                *(column.name for column in past.source.columns),
                CURRENT if mode is Mode.HISTORY else DELETED,
            ]
            assert Counter(
                tuple(row[name] for name in names) for row in rows_of(target.path)
            ) == past.expected(mode)


class Heap(Source):
    """Rows that are identified only by all of their columns."""

    @override
    def schema(self) -> TableSchema:
        return replace(super().schema(), key=())


def test_S01_a_row_identified_by_all_columns_is_found_by_a_column_that_was_just_added(tmp_path: Path) -> None:
    heap = Heap()
    target = DeltaTarget(tmp_path, heap)
    heap.do(("add", 1, "b"))
    gone = Change(heap.schema(), "delete", heap.table()[1])
    del heap.rows[1]
    target.apply([gone], heap)
    assert [{name: row[name] for name in ("id", "a", "b")} for row in rows_of(target.path)] == list(
        heap.table().values()
    )
