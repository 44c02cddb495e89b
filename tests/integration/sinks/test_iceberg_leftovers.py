"""Files of failed Iceberg epochs are removed later, and never a file that is or may become part of the
table.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.errors import SinkError
from penstock.position import Position
from penstock.sinks import slice_reader as shares
from penstock.sinks.iceberg.catalog import LoadedTable, TableChange
from penstock.sinks.iceberg.maintenance import Maintenance
from tests.support.sinks.iceberg_lake import NAME, Lake
from tests.support.sinks.items import at, item
from tests.support.sinks.source import Value

EAGER = Maintenance(delete_files=0, keep_seconds=600.0, expire_every=1, hold_seconds=0.0)


class Yard(Lake):
    """A table with maintenance after every epoch."""

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
        """Make all files an hour older."""
        then = time.time() - 3600
        for path in self.files():
            os.utime(path, (then, then))


@pytest.fixture
def yard(spark: SparkSession, tmp_path: Path) -> Yard:
    return Yard(spark, tmp_path)


def test_files_of_finished_tasks_are_removed_if_another_task_of_the_epoch_fails(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.follow()
    before = yard.files()
    yard.work()
    finished: list[object] = []

    def run(function: Callable[..., object], tasks: Sequence[object], *, light: bool = False) -> list[object]:
        finished.extend(map(function, tasks[:-1]))
        raise SinkError("a task failed")

    with monkeypatch.context() as patch:
        patch.setattr(shares, "ROWS_A_TASK", 1)
        patch.setattr(yard.sink._executors, "run", run)
        with pytest.raises(SinkError, match="a task failed"):
            yard.mirror.apply(yard.mirror.reached, yard.source.position)
    assert finished
    assert yard.files() == before
    yard.mirror.apply(yard.mirror.reached, yard.source.position)
    assert yard.mirror.rows() == yard.source.sorted_rows()


class Died(BaseException):
    pass


def test_files_of_a_dead_epoch_are_removed_and_no_others(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
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
    (yard.directory / "of-another-program.parquet").write_bytes(b"")
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
    versions = [
        row["snapshot_id"] for row in yard.spark.table(f"{yard.sink.sql_name(NAME)}.snapshots").collect()
    ]
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
        with pytest.raises(SinkError, match="another writer"):
            slow.apply(start, changes, Position.of(end))
    else:
        slow.apply(start, changes, Position.of(end))
    yard.age()
    for _ in range(2):
        yard.follow()
        yard.sink.maintain(NAME)
    assert yard.mirror.rows() == yard.source.sorted_rows()
