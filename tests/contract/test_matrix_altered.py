"""Unchanged TOAST values while columns are added, dropped or renamed (R09), in every table mode of every
sink.

The model uses the final column names from the start; the log uses the names at the time of each change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pytest
from typing_extensions import override

from penstock.change import COMMIT_VERSION
from penstock.config.policies import SchemaRule
from penstock.errors import Recovery, SchemaChangedError
from penstock.pipeline.schema_changes.tracker import CatalogSnapshot, SchemaTracker
from penstock.position import Position
from penstock.postgres.catalog import CatalogShape, MissingValue
from penstock.schema import Attributes, Column, TableName, TableSchema
from penstock.sinks.modes import Mode
from tests.support.contract.operations_run import TargetTable
from tests.support.contract.sink_setups import Cell, NewSinkSetup, SinkSetup, cells, parameters
from tests.support.property.source_model import Record, SourceModel
from tests.support.sinks.source import NULL, Key, Row, Transaction, Value, whole

NAME = TableName("public", "altered")
Numbered = Mapping[int, str]
"""Columns by their numbers."""
FIRST: Numbered = {1: "id", 2: "size", 3: "body", 4: "extra"}
ADDED = {**FIRST, 5: "note"}
RENAMED = {**ADDED, 3: "words"}
DROPPED = {number: name for number, name in RENAMED.items() if number != 4}
GIVEN = "given to those that are there"
"""The default value of rows older than the added column."""
NUMBERS = {"id", "size"}


class Altered(TargetTable):
    """A table whose columns and rows change, and the pipeline's reaction."""

    def __init__(self, place: SinkSetup, mode: Mode) -> None:
        self._texts = place.texts
        source = SourceModel(self._schema(RENAMED), [self.row(each) for each in range(1, 10)])
        super().__init__(place, place.open(mode), mode, source, place.root / "spool")
        self.rows = source
        self.now = FIRST
        self._noted_from = 0
        rule = SchemaRule(can_resync=mode.can_resync)
        self._follower = SchemaTracker(lambda _: rule, lambda _: self._catalog())
        self.copy()

    # --- changes ---

    @override
    def copy(self) -> None:
        fence = Position.of(self.rows.fence)
        first, rows = self._schema(FIRST), [self._as_now(row) for row in self.rows.sorted_rows()]
        place = self.setup.begin(self.sink, first, self.mode, fence)
        self.sink.finish_snapshot(first, self.write(first, place, rows), fence)

    def alter(self, columns: Numbered) -> None:
        self._noted_from = self.rows.position + 1 if self.now is FIRST else self._noted_from
        self.now = columns

    def row(self, number: int, note: str = GIVEN) -> Row:
        """Every row has a different long value."""
        return {
            "id": self._number(number),
            "size": self._number(number),
            "words": Value(f"words of {number}"),
            "extra": Value(f"extra of {number}"),
            "note": Value(note),
        }

    def insert(self, number: int) -> None:
        self.rows.insert({**self.row(number), **self._nothing_dropped()})

    def update(self, number: int, size: int, *unchanged: str, to: int | None = None, **values: str) -> None:
        row = {name: Value(value) for name, value in values.items()} | self._nothing_dropped()
        moved = {} if to is None else {"id": self._number(to)}
        self.rows.update(self._key(number), {**row, **moved, "size": self._number(size)}, unchanged)

    def delete(self, number: int) -> None:
        self.rows.delete(self._key(number))

    def commit(self) -> None:
        self.rows.commit()
        done = self.rows.log[-1]
        changes = tuple(
            replace(
                each,
                row=self._as_now(each.row),
                unchanged=tuple(self._names[name] for name in each.unchanged),
            )
            for each in done.changes
        )
        self.writer.append(whole(self._schema(self.now), [Transaction(done.position, changes)]))

    def follow_all(self) -> None:
        """The epoch with all changes since the last epoch."""
        self.writer.seal()
        target, end = self.target(), Position.of(self.rows.position)
        assert target.applied is not None
        assert not self._follower.observe_catalog(
            {NAME: target}, CatalogSnapshot({NAME: self._catalog().schema})
        )
        changes = self._follower.follow(self.sink, target, self.changes(target.applied, end))
        self.sink.apply(target, changes, end)

    # --- tables and rows ---

    def _number(self, number: int) -> Value:
        return Value(str(number) if self._texts else number)

    def _key(self, number: int) -> Key:
        return (self._number(number),)

    def _nothing_dropped(self) -> Row:
        """Rows older than a dropped column keep its value; new rows have NULL."""
        return {} if 4 in self.now else {"extra": NULL}

    @property
    def _names(self) -> dict[str, str]:
        """Values of the current columns, by the final column names."""
        return {name: self.now[number] for number, name in RENAMED.items() if number in self.now}

    def _as_now(self, row: Row) -> Row:
        return {now: row[name] for name, now in self._names.items() if name in row}

    def _schema(self, columns: Numbered) -> TableSchema:
        declared = [
            Column(name, *((pa.int64(), 20) if name in NUMBERS else (pa.string(), 25)))
            for name in columns.values()
        ]
        typed = (
            tuple(replace(each, arrow_type=pa.string()) for each in declared)
            if self._texts
            else tuple(declared)
        )
        return TableSchema(77, NAME, typed, ("id",), Attributes(tuple(columns), max(columns), "0"))

    def _catalog(self) -> CatalogShape:
        missing = {"note": MissingValue(GIVEN)} if 5 in self.now else {}
        return CatalogShape(self._schema(self.now), missing, 1 << 31, frozenset())

    @override
    def _logged(self, position: int) -> list[Record]:
        """An append log keeps the changes with the columns of their time."""
        return [
            {**row, "note": None} if row[COMMIT_VERSION] < self._noted_from else row
            for row in super()._logged(position)
        ]


@pytest.fixture
def altered(cell: Cell, new_setup: NewSinkSetup) -> Iterator[Altered]:
    made = Altered(new_setup(cell[0]), cell[1])
    yield made
    made.sink.close()


LONG = ("words", "extra")


def play_added_and_renamed(altered: Altered) -> None:
    altered.update(1, 11, *LONG)
    altered.update(2, 12, "extra", words="set before it is renamed")
    altered.insert(10)
    altered.commit()
    altered.alter(ADDED)
    altered.update(3, 13, *LONG)
    altered.update(4, 14, *LONG, note="its own")
    altered.commit()
    altered.alter(RENAMED)
    altered.update(1, 21, *LONG, "note")
    altered.update(2, 22, *LONG)
    altered.update(4, 24, *LONG, "note")
    altered.update(5, 25, *LONG, "note")
    altered.update(6, 26, *LONG, "note", to=16)
    altered.update(10, 30, *LONG)
    altered.commit()


def play_dropped(altered: Altered) -> None:
    altered.update(7, 27, *LONG)
    altered.delete(8)
    altered.update(5, 35, "extra", words="set before the other is dropped")
    altered.commit()
    altered.alter(DROPPED)
    altered.update(5, 45, "words", "note")
    altered.update(7, 37, "words", "note")
    altered.update(9, 29, "words")
    altered.update(16, 36, "words", "note", to=6)
    altered.insert(8)
    altered.commit()


def play_what_is_usual(altered: Altered) -> None:
    altered.update(1, 31, "words")
    altered.update(2, 32, "words", "note", to=12)
    altered.delete(3)
    altered.insert(3)
    altered.delete(4)
    altered.commit()


def every(wanted: Sequence[Cell]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cell", parameters(wanted))


@every([cell for cell in cells(*Mode) if cell[0] != "parquet"])
def test_R09_a_value_that_did_not_travel_is_kept_while_columns_come_change_their_names_and_go(
    altered: Altered,
) -> None:
    for run in (play_added_and_renamed, play_dropped, play_what_is_usual):
        run(altered)
        altered.follow_all()
        assert altered.target().applied == Position.of(altered.rows.position)
        altered.assert_exact()


@every(cells(Mode.APPEND, of=["parquet"]))
def test_R09_a_sink_with_fixed_columns_refuses_and_keeps_its_rows(altered: Altered) -> None:
    play_added_and_renamed(altered)
    with pytest.raises(SchemaChangedError) as refused:
        altered.follow_all()
    assert refused.value.recovery is Recovery.OPERATOR
    assert refused.value.hint
    assert altered.target().applied == Position.of(altered.rows.fence)
    assert len(altered.shown()) == 9
