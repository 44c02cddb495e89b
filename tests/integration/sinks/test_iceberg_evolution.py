"""Schema changes of Iceberg tables: in the commit with the first rows that need them, or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from penstock.change import EXACT, EXACT_TYPE, ChangeType
from penstock.errors import SinkError
from penstock.position import Position
from penstock.schema import TableSchema
from penstock.sinks.base import TableChanges, Target
from penstock.sinks.evolution import Evolution
from penstock.sinks.iceberg.catalog import IcebergCatalog
from penstock.sinks.iceberg.sink import IcebergSink
from penstock.sinks.iceberg.state import POSITION
from penstock.sinks.modes import CURRENT, Mode
from penstock.sinks.row_files import write_batches
from penstock.spool import SpoolReader, SpoolWriter
from tests.support.property.evolving import NAME, Act, FollowingTarget, Source
from tests.support.sinks.iceberg_lake import open_lake, summaries
from tests.support.sinks.source import Change as LogChange
from tests.support.sinks.source import Transaction, Value, whole

KINDS = {"insert": ChangeType.INSERT, "update": ChangeType.UPDATE_POSTIMAGE, "delete": ChangeType.DELETE}


class Followed:
    """A source that is altered, and its table in Iceberg."""

    def __init__(self, spark: SparkSession, root: Path, mode: Mode, format_version: int = 2) -> None:
        self.spark = spark
        self.source = Source()
        self.sink: IcebergSink = open_lake(spark, root, mode_of=lambda _: mode, format_version=format_version)
        self._writer, self._reader = (
            SpoolWriter(root / "spool", Position.of(100)),
            SpoolReader(root / "spool"),
        )
        self.position = 100
        self._copy(self.source.schema())

    def _copy(self, schema: TableSchema) -> None:
        place = self.sink.begin_snapshot(schema, Position.of(100))
        rows = list(self.source.table().values())
        own = [pa.array([row[column.name] for row in rows], column.arrow_type) for column in schema.columns]
        batch = pa.record_batch([*own, pa.nulls(len(rows), EXACT_TYPE)], names=[*schema.column_names, EXACT])
        self.sink.finish_snapshot(schema, [write_batches(iter([batch]), place, 0)], Position.of(100))

    def target(self) -> Target:
        target = self.sink.load_target(NAME)
        assert target is not None
        return target

    def plan(self, acts: list[Act]) -> tuple[Target, TableChanges, Evolution | None]:
        """Apply this to the source and return the resulting target."""
        start, target = self.position, self.target()
        for change in [change for act in acts if (change := self.source.do(act)) is not None]:
            self.position += 10
            row = {name: Value(value) for name, value in change.row.items()}
            self._writer.append(
                whole(change.schema, [Transaction(self.position, (LogChange(KINDS[change.kind], 0, row),))])
            )
        self._writer.seal()
        found = self._reader.read(Position.of(start), Position.of(self.position)).tables[NAME]
        assert target.origin is not None
        known = FollowingTarget(target.schema, target.key, target.origin, {})
        views, evolution = known.follow(
            TableChanges(NAME, found.slices, found.counts).schemas, self.source.shape()
        )
        return target, TableChanges(NAME, found.slices, found.counts, views, evolution), evolution

    def do(self, *acts: Act) -> None:
        target, changes, evolution = self.plan(list(acts))
        assert evolution is not None
        assert self.sink.can_evolve(target, evolution)
        self.sink.apply(target, changes, Position.of(self.position))
        self.check()

    def check(self) -> None:
        names = [column.name for column in self.source.columns]
        rows = [row for row in self.rows() if row.get(CURRENT, True)]
        assert {row[names[0]]: {name: row[name] for name in names} for row in rows} == self.source.table()
        assert self.target().applied == Position.of(self.position)

    def rows(self, version: int | None = None) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = self.sink.read(NAME, version).toArrow().to_pylist()
        return rows


@pytest.mark.parametrize(("mode", "format_version"), [(Mode.MIRROR, 3), (Mode.HISTORY, 2)])
def test_S01_to_S04_columns_and_rows_are_one_commit(
    spark: SparkSession, tmp_path: Path, mode: Mode, format_version: int
) -> None:
    followed = Followed(spark, tmp_path, mode, format_version)
    first = followed.sink.version_at(NAME, Position.of(100))
    # A column with a value for existing rows: one row is unchanged, one is updated, and one was never copied.
    followed.do(("write", 3, ""), ("write", 1, ""), ("add", 1, "b"), ("write", 4, ""), ("delete", 3, ""))
    steps = [(each["operation"], POSITION in each) for each in summaries(followed.sink, spark, NAME)]
    if format_version == 2:  # the old rows with the new column; then the epoch
        assert steps == [("append", True), ("overwrite", False), ("overwrite", True)]
    else:
        assert steps == [("append", True), ("overwrite", True)], (
            "the table records the default for existing rows"
        )
    if mode is Mode.HISTORY:
        past = [row for row in followed.rows() if not row[CURRENT]]
        assert past, "a version was closed"
        assert all(row["b"] == 5 for row in past), "as the server has it in all that was written before"
    # Two columns swap names, and a number becomes wider: no file is rewritten.
    followed.do(("swap", 1, ""), ("widen", 2, ""), ("write", 2, ""))
    # A name that is used again, for a column that is null in existing rows.
    followed.do(("drop", 0, ""), ("write", 5, ""), ("add", 0, "c"), ("write", 6, ""))
    assert len(summaries(followed.sink, spark, NAME)) == len(steps) + 2
    order = list(followed.rows()[0])
    assert order.index("c") < order.index(EXACT), "added columns are in the order of the source"
    then = followed.rows(first)
    assert [sorted(name for name in row if not name.startswith("_")) for row in then] == [["a", "id"]] * 2
    assert "c" in followed.rows(followed.sink.version_at(NAME, Position.of(followed.position)))[0], (
        "of the newest too"
    )


def test_S01_an_evolution_that_dies_is_repeated_and_one_whose_answer_is_lost_is_not(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed(spark, tmp_path, Mode.MIRROR)
    target, changes, evolution = followed.plan([("add", 1, "b"), ("rename", 1, "c"), ("write", 1, "")])
    assert evolution is not None
    end, commit = Position.of(followed.position), IcebergCatalog.commit

    def die(*_: object) -> None:
        raise SinkError("no")

    def die_later(*given: object) -> None:
        commit(*given)  # type: ignore[arg-type]
        die()

    for fault in (die, die_later):
        monkeypatch.setattr(IcebergCatalog, "commit", fault)
        with pytest.raises(SinkError):
            followed.sink.apply(target, changes, end)
        monkeypatch.undo()
    # The caller did not get the reply, and repeats the call with the initial target.
    assert followed.sink.can_evolve(target, evolution)
    count = len(summaries(followed.sink, spark, NAME))
    followed.sink.apply(target, changes, end)
    assert len(summaries(followed.sink, spark, NAME)) == count
    followed.check()
    other = replace(evolution, columns=pa.schema([*evolution.columns, ("d", pa.int32())]))
    assert not followed.sink.can_evolve(target, other), "another writer changed it differently"
