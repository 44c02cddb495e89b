"""`penstock check` of Iceberg pipelines: a warehouse whose tables it reads, and a catalog that only Spark can
read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.pipeline.checks.findings import CheckReport, StepState
from penstock.pipeline.epoch_log import Epoch, EpochLog
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.postgres.server import identify_system
from penstock.postgres.slot import current_position
from penstock.schema import TableName
from penstock.sinks.iceberg.state import identity_properties, position_properties
from penstock.sinks.modes import Layout, Mode
from tests.support.fix_check import Checker
from tests.support.fix_postgres import Database

ORDERS = TableName("public", "orders")
WAREHOUSE: dict[str, Any] = {"sink": {"iceberg": {"warehouse": "lake"}}}
BY_SPARK: dict[str, Any] = {
    **WAREHOUSE,
    "spark": {"conf": {"spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog"}},
}
both = pytest.mark.parametrize("config", [WAREHOUSE, BY_SPARK], ids=["warehouse", "catalog of Spark's"])


class Lake:
    """The table `orders` as an earlier run left it, with its slot and the record of its epoch."""

    def __init__(self, database: Database, root: Path) -> None:
        self.pipeline = f"check_{database.name.rsplit('_', 1)[-1]}"
        self.slot = f"penstock_{self.pipeline}"
        self._database = database
        database.execute(
            f"CREATE PUBLICATION {self.slot} FOR ALL TABLES WITH (publish_via_partition_root = true)"
        )
        database.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", self.slot)
        with database.connect() as connection:
            self.position = current_position(connection)
        self.epochs = EpochLog(root, self.pipeline)
        ((oid,),) = database.query("SELECT 'orders'::regclass::oid")
        layout = Layout(pa.schema([("id", pa.int32()), ("v", pa.string())]), ("id",), Mode.MIRROR)
        properties = {
            **identity_properties(self.pipeline, layout, oid, None),
            **position_properties(self.position, 1),
        }
        snapshot = {"snapshot-id": 1, "summary": {"penstock.position": str(self.position)}}
        metadata = root / "public" / "orders" / "metadata"
        metadata.mkdir(parents=True)
        document = {"properties": properties, "current-snapshot-id": 1, "snapshots": [snapshot]}
        (metadata / "v1.metadata.json").write_text(json.dumps(document), encoding="utf-8")
        self.record(str(identify_system(SourceAddress.parse(database.dsn))))

    def record(self, system: str, status: TableStatus | None = None) -> None:
        streaming = TableStatus(TableState.STREAMING, self.position, self.position)
        self.epochs.record(Epoch(1, self.position, None, system, {ORDERS: status or streaming}))

    def drop_slot(self) -> None:
        self._database.query(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s",
            self.slot,
        )


@pytest.fixture
def lake(shop: Database, tmp_path: Path) -> Iterator[Lake]:
    made = Lake(shop, tmp_path / "lake")
    yield made
    made.drop_slot()


def problems(report: CheckReport) -> list[tuple[str, str]]:
    return [(finding.step, finding.code) for finding in report.problems]


def test_a_warehouse_is_checked_without_spark(check: Checker, lake: Lake) -> None:
    report = check(**WAREHOUSE)
    (step,) = [step for step in report.steps if step.name == "continuity"]
    assert (report.exit_code, step.state, step.detail) == (
        0,
        StepState.OK,
        f"1 tables are filled, recorded up to {lake.position}",
    )


def test_untested_part_of_a_catalog_that_only_spark_can_read_is_a_warning(check: Checker, lake: Lake) -> None:
    report = check(**BY_SPARK)
    (step,) = [step for step in report.steps if step.name == "continuity"]
    assert (report.exit_code, step.state, step.detail) == (
        0,
        StepState.WARNING,
        f"recorded up to {lake.position}",
    )
    (warning,) = step.warnings
    assert (warning.code, warning.what, warning.fix) == (
        "targets-not-asked",
        "the catalog lake can be queried only with Spark: its tables were not checked",
        "penstock verify starts Spark and compares them, once they have been copied",
    )


def test_a_new_pipeline_into_a_catalog_of_sparks_is_ready_with_the_same_warning(check: Checker) -> None:
    report = check(**BY_SPARK)
    assert (report.exit_code, {step.name: step.detail for step in report.steps}["continuity"]) == (
        0,
        "no epoch is recorded",
    )
    assert "targets-not-asked" in {finding.code for finding in report.warnings}


@both
def test_L04_a_slot_that_is_gone_under_filled_tables_is_a_problem(
    check: Checker, lake: Lake, config: dict[str, Any]
) -> None:
    lake.drop_slot()
    report = check(**config)
    assert (report.exit_code, problems(report)) == (3, [("continuity", "PEN-1201")])


@both
def test_L05_a_slot_that_is_past_the_tables_is_a_problem(
    shop: Database, check: Checker, lake: Lake, config: dict[str, Any]
) -> None:
    shop.execute("INSERT INTO items VALUES (7)")
    shop.query("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", lake.slot)
    assert problems(check(**config)) == [("continuity", "PEN-1205")]


@both
def test_L10_tables_of_another_system_are_a_problem(
    check: Checker, lake: Lake, config: dict[str, Any]
) -> None:
    lake.record("7/1")
    assert problems(check(**config)) == [("continuity", "PEN-1206")]


@both
def test_P08_a_table_that_left_the_publication_is_a_problem(
    shop: Database, check: Checker, lake: Lake, config: dict[str, Any]
) -> None:
    shop.execute(
        f"DROP PUBLICATION {lake.slot}; "
        f"CREATE PUBLICATION {lake.slot} FOR TABLE items WITH (publish_via_partition_root = true)"
    )
    assert problems(check(**config)) == [("continuity", "PEN-3002")]


def test_a_table_that_has_failed_is_a_problem_where_only_the_record_says_so(
    check: Checker, lake: Lake
) -> None:
    lake.record(
        str(lake.epochs.last().system),  # type: ignore[union-attr]
        TableStatus(
            TableState.FAILED, Position.ZERO, None, "PEN-3001: it was changed by others", "remove it"
        ),
    )
    (problem,) = check(**BY_SPARK).problems
    assert (problem.code, problem.what, problem.fix, problem.tables) == (
        "PEN-3001",
        "it was changed by others",
        "remove it",
        (ORDERS,),
    )
