"""What is not compared, decided without Spark and without a source."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path
from typing import cast

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyspark.sql import SparkSession

from penstock.errors import ConnectionLostError, SnapshotLostError
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.meeting import Meeting
from penstock.pipeline.states import TableState, TableStatus
from penstock.pipeline.verify import SideBySide, judge
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.exported import ExportedSnapshot
from penstock.schema import TableName
from penstock.sinks.delta_log import application_id, record_position
from penstock.spark.lock import is_locked

TABLE = TableName("public", "t")
FENCE = Position.of(100)


def _side(directory: Path) -> SideBySide:
    document = {
        "pipeline": "p",
        "source": {"dsn": "postgresql://x@127.0.0.1:1/x?connect_timeout=2"},
        "tables": ["public.*"],
        "sink": {"delta": {"path": str(directory / "lake")}},
    }
    return SideBySide(cast("SparkSession", None), PipelineConfig.model_validate(document), directory)


def _meeting(*statuses: TableStatus) -> Meeting:
    return Meeting(ExportedSnapshot("none", FENCE), dict.fromkeys([TABLE], *statuses) if statuses else {})


@pytest.mark.parametrize(
    "state", [TableState.PENDING, TableState.SNAPSHOTTING, TableState.CATCHING_UP, TableState.PAUSED, TableState.FAILED]
)
def test_a_table_that_does_not_stream_is_reported_as_it_is_and_not_as_equal(tmp_path: Path, state: TableState) -> None:
    status = TableStatus(state, FENCE, FENCE, "why", "what to do")
    verdict = judge(_side(tmp_path), TABLE, CatalogTable(1, TABLE), _meeting(status))
    assert (verdict.state, verdict.comparison, verdict.equal) == (state, None, False)
    assert (verdict.reason, verdict.remedy) == ("why", "what to do")


def test_tables_that_only_one_side_knows_are_not_equal(tmp_path: Path) -> None:
    new = judge(_side(tmp_path), TABLE, CatalogTable(1, TABLE), _meeting())
    gone = judge(_side(tmp_path), TABLE, None, _meeting(TableStatus(TableState.STREAMING, FENCE, FENCE)))
    assert (new.state, new.equal, gone.equal) == (TableState.PENDING, False, False)
    assert new.reason
    assert gone.reason


def test_a_table_whose_target_was_never_at_the_snapshot_is_met_again(tmp_path: Path) -> None:
    """One that was copied at a later fence is marked as streaming by an epoch that ends before it."""
    side, table = _side(tmp_path), CatalogTable(1, TABLE)
    at_fence = _meeting(TableStatus(TableState.STREAMING, FENCE, FENCE))
    with pytest.raises(SnapshotLostError):  # there is no target at all
        judge(side, TABLE, table, at_fence)
    write_deltalake(Path(side.targets.describe(TABLE)), pa.table({"id": [1]}))
    record_position(Path(side.targets.describe(TABLE)), application_id("p", TABLE), FENCE)
    with pytest.raises(SnapshotLostError):
        judge(side, TABLE, table, _meeting(TableStatus(TableState.STREAMING, Position.of(101), Position.of(101))))
    with pytest.raises(ConnectionLostError):  # it goes on to compare
        judge(side, TABLE, table, at_fence)
    record_position(Path(side.targets.describe(TABLE)), application_id("p", TABLE), Position.of(200))
    with pytest.raises(ConnectionLostError):  # the pipeline has gone on since, and the version before that is still there
        judge(side, TABLE, table, at_fence)


_HOLD = "import fcntl, sys; file = open(sys.argv[1], 'r+b'); fcntl.lockf(file, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"


def test_whether_a_pipeline_runs_is_known_without_a_jvm(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.lock"
    assert not is_locked(path)
    path.touch()
    assert not is_locked(path)
    with subprocess.Popen([sys.executable, "-c", _HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert is_locked(path)
        holder.communicate()
    assert not is_locked(path)
    with path.open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # asking has left nothing behind
