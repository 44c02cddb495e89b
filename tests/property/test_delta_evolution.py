"""A Delta table that follows its source, without Spark: after each epoch it equals the source, in one commit, or has to be copied anew."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.change import EXACT, ChangeType
from penstock.position import Position
from penstock.sinks.delta_epoch import DeltaEpoch
from penstock.sinks.delta_evolution import evolve_state
from penstock.sinks.evolution import CopyAnew
from penstock.sinks.layout import Layout, Mode
from penstock.spool import SpoolReader, SpoolWriter
from tests.delta_tables import APPLICATION, InlineExecutors, add_rows, create_table, rows_of, state_of
from tests.integration.sinks.source import Change as LogChange
from tests.integration.sinks.source import Transaction, Value, whole
from tests.property.evolving import NAME, Act, Change, FollowingTarget, Source

KINDS = {"insert": ChangeType.INSERT, "update": ChangeType.UPDATE_POSTIMAGE, "delete": ChangeType.DELETE}
acts = st.tuples(
    st.sampled_from(["write", "write", "write", "delete", "add", "add", "drop", "rename", "swap", "widen"]),
    st.integers(0, 5),
    st.sampled_from(["a", "b", "c"]),
)


class DeltaTarget:
    def __init__(self, root: Path, source: Source) -> None:
        """A new copy."""
        self.path = root / "table"
        self.known = FollowingTarget.copy(source)
        layout = self._layout()
        create_table(self.path, layout, mapped=True)
        add_rows(self.path, pa.Table.from_pylist([{**row, EXACT: None} for row in source.table().values()], layout.schema))
        self._writer = SpoolWriter(root / "spool", Position.of(100))
        self._reader = SpoolReader(root / "spool")
        self._position = 100

    def _layout(self) -> Layout:
        return Layout(self.known.columns, self.known.key, Mode.MIRROR)

    def apply(self, changes: list[Change], source: Source) -> None:
        known, start = self.known, self._position
        for change in changes:
            self._position += 10
            row = {name: Value(value) for name, value in change.row.items()}
            self._writer.append(whole(change.schema, [Transaction(self._position, (LogChange(KINDS[change.kind], 0, row),))]))
        self._writer.seal()
        end = Position.of(self._position)
        slices = self._reader.read(Position.of(start), end).tables[NAME].slices
        state = state_of(self.path)
        views, evolution = known.follow(list(dict.fromkeys(each.file.schema for each in slices)), source.shape())
        if evolution is None:
            epoch = DeltaEpoch(self.path, APPLICATION, self._layout(), state, end, slices, views=views)
        else:
            known.columns, known.key, known.origin = evolution.columns, evolution.key, evolution.origin
            evolved = evolve_state(state, evolution, Mode.MIRROR, {})
            fills = evolved.fills if evolved.is_rewritten else None
            epoch = DeltaEpoch(
                self.path, APPLICATION, self._layout(), evolved.state, end, slices, views=views, declared=evolved.actions, fills=fills
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
            changes = [change for act in (*some, ("write", 50 + number, "")) if (change := source.do(act)) is not None]
            try:
                target.apply(changes, source)
            except CopyAnew:
                target = DeltaTarget(Path(directory) / str(number), source)
            names = [column.name for column in source.columns]
            assert target.rows(names) == source.table()
