"""`IcebergSink` in a catalog that is a database, described to one Spark session only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg.conninfo
import pytest
from pyspark.sql import SparkSession
from typing_extensions import override

from penstock.errors import SinkError
from penstock.position import Position
from penstock.sinks.base import TableChanges
from penstock.sinks.iceberg.catalog import IcebergCatalog
from tests.contract.test_iceberg_sink import IcebergHarness
from tests.fix_postgres import Database
from tests.integration.sinks.source import Value


class JdbcHarness(IcebergHarness):
    def __init__(self, root: Path, spark: SparkSession, database: Database) -> None:
        self._given = psycopg.conninfo.conninfo_to_dict(database.dsn)
        super().__init__(root, spark)

    @override
    def describe(self, name: str, warehouse: Path) -> None:
        given = self._given
        settings = {
            "": "org.apache.iceberg.spark.SparkCatalog",
            ".type": "jdbc",
            ".uri": f"jdbc:postgresql://{given['host']}:{given['port']}/{given['dbname']}",
            ".jdbc.user": str(given["user"]),
            ".jdbc.schema-version": "V1",
            ".warehouse": str(warehouse),
        }
        for key, value in settings.items():
            self.spark.conf.set(f"spark.sql.catalog.{name}{key}", value)


@pytest.fixture
def harness(spark: SparkSession, tmp_path: Path, shared_database: Database) -> JdbcHarness:
    return JdbcHarness(tmp_path, spark, shared_database)


def test_K01_to_K05_epochs_into_a_catalog_that_is_a_database(harness: JdbcHarness) -> None:
    """Values that only the target has are read by a session of their own, which must know the same catalog."""
    harness.copy()
    source = harness.source
    begun = harness.target()
    source.update(harness.at(1), {"size": Value("7")}, ["note"])
    source.delete(harness.at(2))
    end = harness.follow()
    assert harness.rows() == source.sorted_rows()
    harness.apply(harness.fence, end, begun)
    source.update(harness.at(3), {"size": Value("7")}, ["note"])
    harness.follow()
    assert harness.rows() == source.sorted_rows()


def test_K09_of_two_runs_that_commit_at_once_one_is_refused(harness: JdbcHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.copy()
    target = harness.target()
    harness.source.insert(harness.item(20))
    end = harness.commit()
    changes: TableChanges = harness.changes(harness.fence, end)
    other, commit = harness.open(), IcebergCatalog.commit

    def slow(self: IcebergCatalog, *given: Any) -> None:
        monkeypatch.undo()
        other.apply(target, changes, end)
        commit(self, *given)

    monkeypatch.setattr(IcebergCatalog, "commit", slow)
    with pytest.raises(SinkError, match="somebody else"):
        harness.sink.apply(target, changes, end)
    harness.sink.apply(target, changes, end)
    assert harness.rows() == harness.source.sorted_rows()
    assert harness.target().applied == end == Position.of(harness.source.position)
