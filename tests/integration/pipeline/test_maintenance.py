"""Maintenance during epochs and reads: targets stay equal to the source."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from typing_extensions import override

from penstock.config.sink import MaintenanceConfig
from penstock.pipeline.table_states import TableState
from penstock.sinks.base import MaintenanceSettings
from penstock.sinks.delta.state import newest_checkpoint
from penstock.sinks.iceberg import maintenance as iceberg_maintenance
from penstock.sinks.iceberg.state import load_metadata
from tests.support.fix_pipeline import Mirror, MirrorFactory
from tests.support.fix_postgres import Database
from tests.support.pipeline.running import DEADLINE_SECONDS, running
from tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

TABLE = "public.items"
UPKEEP = MaintenanceSettings(
    compact_after=4, checkpoint_after=5, keep_seconds=10.0, versions=1000, hold_seconds=5.0
)


class Table:
    """The files that are or were in the directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._has_been: set[str] = set()

    @property
    def standing(self) -> dict[str, object]:
        raise NotImplementedError

    @property
    def is_kept(self) -> bool:
        """Whether both were seen, not necessarily at the same time, since the evidence may expire."""
        found = self.standing
        self._has_been |= {name for name in ("is_cut", "is_compacted") if found[name]}
        return len(self._has_been) == 2


class DeltaTable(Table):
    @property
    def commits(self) -> list[int]:
        return sorted(int(file.stem) for file in (self.path / "_delta_log").glob("*.json"))

    @property
    def behind(self) -> int:
        """The number of commits that a new reader has to read."""
        return self.commits[-1] - newest_checkpoint(self.path)

    @property
    @override
    def standing(self) -> dict[str, object]:
        commits, compacted = self.commits, list(self.path.glob("compact-*.parquet"))
        return {
            "is_cut": commits[0] > 0,
            "is_compacted": bool(compacted),
            "commits": (commits[0], commits[-1]),
            "behind": self.behind,
        }


class IcebergTable(Table):
    @property
    @override
    def standing(self) -> dict[str, object]:
        found = load_metadata(self.path) or {}
        snapshots = sorted(found.get("snapshots", ()), key=lambda each: int(each["sequence-number"]))
        return {
            "is_cut": bool(snapshots) and "parent-snapshot-id" in snapshots[0],
            "is_compacted": any(each["summary"]["operation"] == "replace" for each in snapshots),
            "snapshots": len(snapshots),
            "commits": found.get("last-sequence-number"),
        }


@pytest.fixture
def make(
    mirror_into: MirrorFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[[str], Mirror]]:
    """Maintenance with very short intervals.

    The end of the run may cut off a rewrite; nothing else may fail.
    """
    caplog.set_level(logging.WARNING, "penstock")
    monkeypatch.setattr(MaintenanceConfig, "delta", property(lambda _: UPKEEP))
    monkeypatch.setattr(iceberg_maintenance, "EXPIRE_EVERY", 5)
    yield lambda kind: mirror_into(
        kind, maintenance={"compact_after": 4, "keep": "4 seconds" if kind == "iceberg" else None}
    )
    assert not [record for record in caplog.get_records("call") if "maintenance failed" in record.message], (
        caplog.text
    )


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_table_under_constant_change_stays_small_current_and_readable(
    kind: str, database: Database, make: Callable[[str], Mirror], spark: SparkSession, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE items (id int PRIMARY KEY, n int, note text)")
    database.execute("INSERT INTO items SELECT i, 0, i FROM generate_series(1, 60) i")
    made = make(kind)
    place = made.config.sink.root / "public" / "items"
    table: Table = DeltaTable(place) if kind == "delta" else IcebergTable(place)

    def write() -> None:
        """Every row of every file may be deleted while its file is merged."""
        database.execute("UPDATE items SET n = n + 1 WHERE id % 7 = floor(random() * 7)")
        database.execute("DELETE FROM items WHERE id = 1 + floor(random() * 20)")
        database.execute("INSERT INTO items SELECT max(id) + 1, 0, max(id)::text FROM items")

    with running(made) as run:

        def is_kept() -> bool:
            write()
            return run.failure is not None or table.is_kept

        run.wait_for_state(TABLE, TableState.STREAMING)
        wait_for(is_kept, "maintenance", lambda: table.standing, DEADLINE_SECONDS)
        if isinstance(table, DeltaTable):
            _check_read_beside(spark, table, write)
        assert run.state(TABLE) is TableState.STREAMING
    made.run_once()
    made.assert_equal(TABLE)
    if isinstance(table, DeltaTable):
        _check_from_outside(spark, table, database, tmp_path / "copy")


def _check_read_beside(spark: SparkSession, table: DeltaTable, write: Callable[[], None]) -> None:
    """A reader keeps an old version open while newer ones are written; a new reader has few commits to
    read.
    """
    version = table.commits[-1]
    then = _rows(spark, table.path, version)

    def is_past() -> bool:
        write()
        return table.commits[-1] > version + 3

    wait_for(is_past, "epochs", lambda: table.standing, DEADLINE_SECONDS)
    assert _rows(spark, table.path, version) == then
    wait_for(
        lambda: table.behind < UPKEEP.checkpoint_after,
        "a checkpoint",
        lambda: table.standing,
        DEADLINE_SECONDS,
    )


def _check_from_outside(spark: SparkSession, table: DeltaTable, database: Database, copy: Path) -> None:
    """A reader without cached state, to which only the current log is available."""
    shutil.copytree(table.path, copy)
    found = DeltaTable(copy)
    commits = found.commits
    assert _rows(spark, copy, commits[-1]) == sorted(
        map(tuple, database.query("SELECT id, n, note FROM items"))
    )
    assert _rows(spark, copy, commits[0]), "the oldest that is kept is whole"
    assert found.behind <= UPKEEP.checkpoint_after + 2


def _rows(spark: SparkSession, path: Path, version: int) -> list[tuple[object, ...]]:
    found = (
        spark.read.format("delta").option("versionAsOf", version).load(str(path)).select("id", "n", "note")
    )
    return sorted(tuple(row) for row in found.collect())
