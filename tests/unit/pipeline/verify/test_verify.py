"""Tables that `verify` does not compare, decided without Spark and without a source."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyspark.sql import SparkSession

from penstock.cli.verify import exit_code
from penstock.config.model import PipelineConfig
from penstock.errors import ConnectionLostError, EpochMissedError, SinkRefusedError, SnapshotLostError
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.pipeline.verify import verify
from penstock.pipeline.verify.alignment import AlignedSnapshot
from penstock.pipeline.verify.compare import Comparison
from penstock.pipeline.verify.verify import SideBySide, TableVerdict, VerifyReport, judge
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.snapshot_export import ExportedSnapshot
from penstock.schema import TableName
from penstock.sinks.delta.log import KEY, OWNER, SOURCE_OID, application_id, record_position
from penstock.storage.locks import is_locked_by_jvm
from tests.support.holding import locked_elsewhere

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


def _make_ours(path: Path) -> None:
    """delta-rs refuses to write properties that it does not know."""
    first = path / "_delta_log" / f"{0:020d}.json"
    properties = json.dumps({OWNER: "p", SOURCE_OID: "1", KEY: '["id"]'})
    first.write_text(
        first.read_text(encoding="utf-8").replace('"configuration":{}', f'"configuration":{properties}'),
        encoding="utf-8",
    )


def _meeting(*statuses: TableStatus) -> AlignedSnapshot:
    return AlignedSnapshot(
        ExportedSnapshot("none", FENCE), dict.fromkeys([TABLE], *statuses) if statuses else {}
    )


@pytest.mark.parametrize(
    "state",
    [
        TableState.PENDING,
        TableState.SNAPSHOTTING,
        TableState.CATCHING_UP,
        TableState.PAUSED,
        TableState.FAILED,
    ],
)
def test_a_table_that_does_not_stream_is_reported_as_it_is_and_not_as_equal(
    tmp_path: Path, state: TableState
) -> None:
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
    """A table that was copied at a later fence is marked as streaming by an epoch that ends before
    the fence.
    """
    side, table = _side(tmp_path), CatalogTable(1, TABLE)
    at_fence = _meeting(TableStatus(TableState.STREAMING, FENCE, FENCE))
    gone = judge(side, TABLE, table, at_fence)
    assert gone.comparison is None
    assert "is gone" in (gone.reason or "")
    assert "resync" in (gone.remedy or "")
    place = Path(side.targets.describe(TABLE))
    write_deltalake(place, pa.table({"id": [1]}))
    _make_ours(place)
    record_position(place, application_id("p", TABLE), FENCE)
    with pytest.raises(SnapshotLostError):
        judge(
            side,
            TABLE,
            table,
            _meeting(TableStatus(TableState.STREAMING, Position.of(101), Position.of(101))),
        )
    with pytest.raises(ConnectionLostError):  # it continues and compares
        judge(side, TABLE, table, at_fence)
    record_position(Path(side.targets.describe(TABLE)), application_id("p", TABLE), Position.of(200))
    # the pipeline has continued, and the earlier version still exists
    with pytest.raises(ConnectionLostError):
        judge(side, TABLE, table, at_fence)


def test_whether_a_pipeline_runs_is_known_without_a_jvm(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.lock"
    assert not is_locked_by_jvm(path)
    path.touch()
    assert not is_locked_by_jvm(path)
    with locked_elsewhere(path):
        assert is_locked_by_jvm(path)
    assert not is_locked_by_jvm(path)
    with path.open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the check left nothing behind


def _verify(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    outcomes: Mapping[str, Exception | None],
    meetings: int = 1,
    end: Exception | None = None,
) -> VerifyReport:
    """`verify_tables` on these tables; judging one raises its given error, and after a number of alignments
    there is none.

    An alignment ends with `end`.
    """
    monkeypatch.chdir(directory)
    side, left = _side(directory), [None] * meetings

    @contextmanager
    def meet(*_: object) -> Iterator[AlignedSnapshot]:
        if not left:
            raise EpochMissedError(
                "the pipeline passed the position of the snapshot", hint="see that it runs"
            )
        left.pop()
        yield _meeting()
        if end is not None:
            raise end

    def judged(_side: SideBySide, name: TableName, *_: object) -> TableVerdict:
        outcome = outcomes[name.name]
        if outcome is not None:
            raise outcome
        return TableVerdict(name, TableState.STREAMING, FENCE, Comparison(name, 1, 1))

    monkeypatch.setattr(verify, "align", meet)
    monkeypatch.setattr(verify, "judge", judged)
    monkeypatch.setattr(
        SideBySide,
        "inspect",
        lambda _: {TableName("public", name): CatalogTable(1, TABLE) for name in outcomes},
    )
    return verify.verify_tables(cast("SparkSession", None), side.config)


def test_finished_comparisons_are_reported_when_another_table_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused = SinkRefusedError("the table is odd", hint="look at it")
    outcomes = {"a": None, "b": MemoryError("with a value of a row"), "c": refused, "d": None}
    report = _verify(monkeypatch, tmp_path, outcomes)
    a, b, c, d = report.verdicts
    assert a.equal
    assert d.equal
    assert b.reason == "PEN-4011: comparing public.b ended with MemoryError", "no text that may hold values"
    assert "spark.driver.memory" in (b.remedy or "")
    assert (c.reason, c.remedy) == ("PEN-3003: the table is odd", "look at it")
    assert (report.equal, report.complete, exit_code(report)) == (False, False, 6)
    document = json.loads(json.dumps(report.as_document()))
    assert (
        document["complete"],
        document["tables"]["public.b"]["failed"],
        document["tables"]["public.a"]["failed"],
    ) == (
        False,
        True,
        False,
    )


def test_finished_comparisons_are_reported_when_the_other_tables_cannot_be_aligned_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = _verify(monkeypatch, tmp_path, {"a": None, "b": SnapshotLostError("it was rewritten")})
    assert [(str(each.table), each.equal) for each in report.verdicts] == [
        ("public.a", True),
        ("public.b", False),
    ]
    assert report.verdicts[1].reason == "PEN-4008: the pipeline passed the position of the snapshot"
    assert exit_code(report) == 6
    with pytest.raises(EpochMissedError):
        _verify(monkeypatch, tmp_path, {"a": None}, meetings=0)


def test_a_table_that_was_not_compared_stays_in_the_report_when_the_snapshot_cannot_be_released(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = ConnectionLostError("the source is gone")
    report = _verify(monkeypatch, tmp_path, {"a": None, "b": gone}, end=gone)
    assert [(str(each.table), each.equal) for each in report.verdicts] == [
        ("public.a", True),
        ("public.b", False),
    ]
    assert (report.equal, report.complete, exit_code(report)) == (False, False, 6)


def test_rows_of_the_source_that_verify_copies_itself_are_private(tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    wide.mkdir(mode=0o755)
    _side(tmp_path)._copy("snapshot", [], wide / "1", None, wide / "1" / "refused")
    assert [each.stat().st_mode & 0o777 for each in (wide / "1", wide / "1" / "refused")] == [0o700, 0o700]
