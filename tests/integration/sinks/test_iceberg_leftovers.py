"""Files that epochs leave which do not get to their end: they go some day, and never one that is or may still become part of the table."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.errors import SinkError
from penstock.position import Position
from penstock.sinks.iceberg.catalog import LoadedTable, TableChange
from penstock.sinks.iceberg.maintenance import Maintenance
from tests.integration.sinks.source import Value
from tests.integration.sinks.test_delta_cases import at, item
from tests.integration.sinks.test_iceberg_commits import NAME, Lake

EAGER = Maintenance(delete_files=0, keep_seconds=600.0, expire_every=1, hold_seconds=0.0)


class Yard(Lake):
    """A table that is looked after with every epoch."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        super().__init__(spark, root, EAGER)
        self.directory = root / "warehouse" / "public" / "items" / "data"
        self._number = 100

    def work(self) -> None:
        self._number += 1
        self.source.insert(item(self._number))
        self.source.update(at(1), {"note": Value(f"as of {self._number}")})
        self.source.commit()
        self.mirror.spool()

    def follow(self) -> None:
        self.work()
        self.mirror.apply(self.mirror.reached, self.source.position)

    def files(self) -> set[Path]:
        return set(self.directory.glob("*.parquet"))

    def age(self) -> None:
        """An hour goes by for all files."""
        then = time.time() - 3600
        for path in self.files():
            os.utime(path, (then, then))


@pytest.fixture
def yard(spark: SparkSession, tmp_path: Path) -> Yard:
    return Yard(spark, tmp_path)


class Died(BaseException):
    pass


def test_what_an_epoch_left_that_died_is_removed_and_nothing_else(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise Died

    before = yard.files()
    with monkeypatch.context() as patch:
        patch.setattr(yard.sink._catalog, "commit", die)
        with pytest.raises(Died):
            yard.follow()
    left = yard.files() - before
    assert len(left) == 2, "a file of rows, and one of deletes"
    of_a_rewrite = yard.directory / "merged-000000-0f0f0f0f.parquet"
    of_a_rewrite.write_bytes(b"")
    left.add(of_a_rewrite)
    yard.mirror.apply(yard.mirror.reached, yard.source.position)
    (yard.directory / "of-somebody-else.parquet").write_bytes(b"")
    yard.age()
    young = yard.directory / "epoch-0000000000000FFF-rows.parquet"
    young.write_bytes(b"")
    yard.sink.maintain(NAME)
    others = yard.files() - left
    assert left <= yard.files(), "an attempt that is slow may still commit them"
    yard.follow()
    yard.sink.maintain(NAME)
    assert not left & yard.files()
    assert others <= yard.files()
    assert yard.mirror.rows() == yard.source.sorted_rows()
    versions = [row["snapshot_id"] for row in yard.spark.table(f"{yard.sink.sql_name(NAME)}.snapshots").collect()]
    assert [yard.sink.read(NAME, version).count() for version in versions] == [9, 10, 11]


@pytest.mark.parametrize("is_late", [False, True], ids=["it is in time", "another was first"])
def test_an_epoch_that_takes_very_long_keeps_its_files_or_loses_its_commit(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    slow, start = yard.again(), yard.mirror.target()
    yard.work()
    end, commit = yard.source.position, slow._catalog.commit
    changes = yard.mirror.changes(yard.source.fence, end)
    assert changes is not None

    def commit_late(loaded: LoadedTable, change: TableChange, position: Position) -> None:
        yard.age()
        yard.sink.maintain(NAME)
        if is_late:
            yard.mirror.apply(yard.source.fence, end)
        yard.sink.maintain(NAME)
        commit(loaded, change, position)

    monkeypatch.setattr(slow._catalog, "commit", commit_late)
    if is_late:
        with pytest.raises(SinkError, match="meanwhile"):
            slow.apply(start, changes, Position.of(end))
    else:
        slow.apply(start, changes, Position.of(end))
    yard.age()
    for _ in range(2):
        yard.follow()
        yard.sink.maintain(NAME)
    assert yard.mirror.rows() == yard.source.sorted_rows()
