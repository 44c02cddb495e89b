"""Faults in a running pipeline: it names the error, loses nothing, and other tables continue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

from penstock.errors import (
    AuthenticationError,
    NoTablesError,
    PipelineBusyError,
    PositionGapError,
    SlotMissingError,
    SystemChangedError,
)
from penstock.pipeline import pipeline
from penstock.pipeline.checks.check import check_pipeline
from penstock.pipeline.epoch_log import EpochLog
from penstock.pipeline.observer import EpochReport, PipelineObserver
from penstock.pipeline.pipeline import RunResult
from penstock.pipeline.status import inspect_status
from penstock.pipeline.table_overrides import change_overrides
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.delta.sink import DeltaSink
from penstock.spool.manifest import SpoolLayout
from tests.support.fix_pipeline import Mirror, MirrorFactory, two_tables
from tests.support.fix_postgres import Database
from tests.support.holding import locked_elsewhere

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_the_slot_is_not_confirmed_before_the_sink_commit_is_durable(
    database: Database, mirror: MirrorFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 1: at every moment, the slot is at or behind the position of every target."""
    two_tables(database)
    both = mirror()
    both.run_once()
    before = both.confirmed()
    database.execute("INSERT INTO good VALUES (2, 'b'); INSERT INTO bad VALUES (2, 'b')")
    seen: list[tuple[Position, Position]] = []

    def fail(self: DeltaSink, *_: object) -> None:
        seen.append((both.confirmed(), EpochLog(both.config.sink.root, both.config.pipeline).last().position))  # type: ignore[union-attr]
        raise AuthenticationError("the sink is down")  # of what all tables share: the run ends

    monkeypatch.setattr(DeltaSink, "apply", fail)
    with pytest.raises(Exception, match="the sink is down"):
        both.run_once()
    monkeypatch.undo()
    assert seen
    assert all(confirmed <= recorded for confirmed, recorded in seen)
    assert both.confirmed() <= EpochLog(both.config.sink.root, both.config.pipeline).last().position  # type: ignore[union-attr]
    result = both.run_once()
    both.assert_equal("public.good", "public.bad")
    assert before < both.confirmed() <= result.position, "it follows the recorded epoch"


def test_K06_one_bad_table_does_not_stop_the_others(database: Database, mirror: MirrorFactory) -> None:
    """Invariant 10, K06: a schema change that the policy forbids fails that table only, and it stays failed.

    S07: only the OID distinguishes the table from the former one of the same name, and an idle table sends no
    change.
    """
    two_tables(database)
    for name in ("recreated", "moved"):
        database.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, v text); INSERT INTO {name} VALUES (1, 'a')"
        )
    made = mirror(
        schema_changes="stop",
        tables=[f"public.{name}" for name in ("good", "bad", "recreated", "moved", "typo")],
    )
    assert set(made.run_once().failed) == {"public.typo"}, "it is named and not there"
    database.execute(
        "ALTER TABLE bad ADD COLUMN extra int DEFAULT 5; INSERT INTO bad VALUES (2, 'b', 6); "
        "INSERT INTO good VALUES (2, 'b')"
    )
    database.execute(
        "DROP TABLE recreated; CREATE TABLE recreated (id int PRIMARY KEY, v text); "
        "INSERT INTO recreated VALUES (9, 'z')"
    )
    database.execute("ALTER TABLE moved RENAME TO elsewhere; INSERT INTO elsewhere VALUES (2, 'b')")
    expected = {"public.bad": "PEN-1403", "public.recreated": "PEN-1403"}
    for key in (2, 3):
        result = made.run_once()
        assert {
            name: (status.reason or "")[:8] for name, status in result.failed.items() if name != "public.typo"
        } == expected
        assert all(status.remedy for status in result.failed.values())
        assert result.tables["public.moved"].state == "gone", "it is not left behind in silence"
        assert max(row["id"] for row in made.rows("public.good")) == key
        database.execute(f"INSERT INTO good VALUES ({key + 1}, 'c')")
    for name in ("bad", "recreated"):
        _remove_target(made, name)
    made.run_once()
    made.assert_equal("public.good", "public.bad", "public.recreated")


def test_a_table_taken_out_of_the_publication_for_a_while_is_not_trusted(
    database: Database, mirror: MirrorFactory
) -> None:
    """P08, invariant 11: its changes in between are in no log."""
    two_tables(database)
    both = mirror()
    both.run_once()
    publication = both.config.publication
    database.execute(f"ALTER PUBLICATION {publication} DROP TABLE bad")
    database.execute("INSERT INTO bad VALUES (2, 'unseen')")
    _assert_only_bad_failed(both.run_once(), "PEN-3002")
    _remove_target(both, "bad")
    both.run_once()
    both.assert_equal("public.good", "public.bad")
    database.execute(f"ALTER PUBLICATION {publication} DROP TABLE bad")
    database.execute("INSERT INTO bad VALUES (3, 'unseen')")
    database.execute(f"ALTER PUBLICATION {publication} ADD TABLE bad")
    _assert_only_bad_failed(both.run_once(), "PEN-3002")


def test_the_comparison_sees_rows_that_are_missing_extra_different_or_there_twice(
    database: Database, mirror: MirrorFactory, spark: SparkSession
) -> None:
    """The oracle of the recovery tests must be able to fail."""
    two_tables(database)
    both = mirror()
    both.run_once()
    both.assert_equal("public.good", "public.bad")
    database.execute(
        "INSERT INTO good VALUES (2, 'missing'); UPDATE good SET v = NULL WHERE id = 1; DELETE FROM bad"
    )
    bad, good = both.compare()
    assert (good.missing, good.extra, good.different, good.equal) == (1, 0, 1, False)
    assert (bad.missing, bad.extra, bad.different, bad.equal) == (0, 1, 0, False)
    database.execute("DELETE FROM good WHERE id = 2; UPDATE good SET v = 'a'")
    target = str(both.config.sink.root / "public" / "good")
    spark.read.format("delta").load(target).write.format("delta").mode("append").save(target)
    (good,) = both.compare({"public.good"})
    assert (good.source_rows, good.target_rows, good.equal) == (1, 2, False)


def test_tables_that_cannot_be_mirrored_are_named_with_their_remedy(
    database: Database, mirror: MirrorFactory
) -> None:
    two_tables(database)
    database.execute("DROP TABLE bad; CREATE TABLE bad (v text)")
    database.execute('CREATE TABLE cased (id int PRIMARY KEY, a int, "A" int)')
    database.execute('CREATE TABLE taken (id int PRIMARY KEY, "_ordinal" int)')
    result = mirror().run_once()
    assert {name: (status.reason or "")[:8] for name, status in result.failed.items()} == {
        "public.bad": "PEN-1402",
        "public.cased": "PEN-1404",
        "public.taken": "PEN-1404",
    }
    assert all(status.remedy for status in result.failed.values())
    assert result.tables["public.good"].state == "streaming"


def test_no_table_selected_is_an_error(database: Database, mirror: MirrorFactory) -> None:
    two_tables(database)
    with pytest.raises(NoTablesError):
        mirror(tables=["elsewhere.*"]).run_once()


def test_a_missing_slot_stops_the_pipeline_before_the_first_row(
    database: Database, mirror: MirrorFactory
) -> None:
    """Invariant 11, L04. And L10: so does another database system."""
    two_tables(database)
    both = mirror()
    both.run_once()
    records = {
        path: path.read_text()
        for path in (both.config.sink.root / "penstock_epochs" / both.config.pipeline).glob("*.json")
    }
    for path, text in records.items():
        path.write_text(text.replace('"system": "', '"system": "1'))
    with pytest.raises(SystemChangedError):
        both.run_once()
    for path, text in records.items():
        path.write_text(text)
    database.execute("SELECT pg_drop_replication_slot(%s)", both.slot)
    database.execute("INSERT INTO good VALUES (2, 'lost')")
    with pytest.raises(SlotMissingError, match="PEN-1201"):
        both.run_once()
    assert [row["id"] for row in both.rows("public.good")] == [1]


def test_a_slot_recreated_ahead_of_the_targets_is_detected(database: Database, mirror: MirrorFactory) -> None:
    """Invariant 11, L05."""
    two_tables(database)
    both = mirror()
    both.run_once()
    database.execute("SELECT pg_drop_replication_slot(%s)", both.slot)
    database.execute("INSERT INTO good VALUES (2, 'lost')")
    database.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", both.slot)
    database.execute("INSERT INTO good VALUES (3, 'not lost')")
    with pytest.raises(PositionGapError, match="PEN-1205"):
        both.run_once()
    assert [row["id"] for row in both.rows("public.good")] == [1]


def test_N10_a_removed_target_is_resynced_and_a_new_table_added_while_the_others_continue(
    database: Database, mirror: MirrorFactory
) -> None:
    two_tables(database)
    both, copied = mirror(), Copied()
    both.run_once(copied)
    assert copied.taken() == ["public.bad", "public.good"]
    _remove_target(both, "bad")
    database.execute("INSERT INTO good VALUES (2, 'b'); INSERT INTO bad VALUES (2, 'b')")
    database.execute("CREATE TABLE late (id int PRIMARY KEY); INSERT INTO late VALUES (1), (2)")
    both.run_once(copied)
    assert copied.taken() == ["public.bad", "public.late"], "the other targets record a copy"
    database.execute("INSERT INTO late VALUES (3)")
    both.run_once(copied)
    assert copied.taken() == []
    both.assert_equal("public.good", "public.bad", "public.late")


class Copied(PipelineObserver):
    """The tables that are copied."""

    def __init__(self) -> None:
        self._tables: set[str] = set()

    @override
    def snapshot_planned(self, table: TableName, chunks: int, heap_bytes: int) -> None:
        self._tables.add(str(table))

    def taken(self) -> list[str]:
        """Tables since the last call."""
        tables, self._tables = self._tables, set()
        return sorted(tables)


def test_a_table_that_a_run_left_out_is_resynced_when_it_returns(
    database: Database, mirror: MirrorFactory
) -> None:
    two_tables(database)
    both, bad = mirror(), TableName("public", "bad")
    both.run_once()
    change_overrides(both.config.state, lambda orders: orders.remove([bad]))
    database.execute("INSERT INTO good VALUES (2, 'b'); INSERT INTO bad VALUES (2, 'b')")
    both.run_once()
    assert len(both.rows("public.bad")) == 1, "its rows stay"
    change_overrides(both.config.state, lambda orders: orders.add([bad]))
    both.run_once()
    both.assert_equal("public.good", "public.bad")


def test_two_pipelines_of_one_name_do_not_share_a_spool(
    database: Database, mirror: MirrorFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_tables(database)
    both = mirror()
    both.run_once()
    monkeypatch.setattr(pipeline, "_LOCK_SECONDS", 0.2)
    with (
        locked_elsewhere(SpoolLayout(both.config.spool).consumer_lock(both.config.pipeline)),
        pytest.raises(PipelineBusyError),
    ):
        both.run_once()


def test_an_idle_pipeline_moves_its_position_forward(database: Database, mirror: MirrorFactory) -> None:
    """H01, H02: other tables are busy; the slot advances without any change of the pipeline's tables."""
    two_tables(database)
    good = mirror(tables=["public.good"])
    first = good.run_once().position
    database.execute("INSERT INTO bad SELECT g, repeat('x', 1000) FROM generate_series(10, 2000) g")
    second = good.run_once().position
    assert second > first
    assert good.confirmed() > first


class _Reports(PipelineObserver):
    def __init__(self) -> None:
        self.reports: list[EpochReport] = []

    def epoch_recorded(self, report: EpochReport) -> None:
        self.reports.append(report)


def test_status_shows_all_positions(database: Database, mirror: MirrorFactory) -> None:
    two_tables(database)
    both = mirror()
    before = inspect_status(both.config)
    assert before.epoch is None
    assert before.slot is None
    reports = _Reports()
    result = both.run_once(reports)
    status = inspect_status(both.config)
    assert status.epoch is not None
    assert status.epoch.position == result.position == reports.reports[-1].position
    document = status.as_document()
    assert document["tables"]["public.good"]["state"] == "streaming"  # type: ignore[index]
    assert document["slot"]["wal_status"] == "reserved"  # type: ignore[index]
    assert status.lag_bytes is not None
    assert (status.capture_state, status.warnings) == ("stopped", ())
    assert check_pipeline(both.path).problems == []
    database.query("SELECT pg_drop_replication_slot(%s)", both.slot)
    assert "is gone" in inspect_status(both.config).warnings[0]
    assert [finding.code for finding in check_pipeline(both.path).problems] == ["PEN-1201"]


def _assert_only_bad_failed(result: RunResult, code: str) -> None:
    assert set(result.failed) == {"public.bad"}
    assert (result.failed["public.bad"].reason or "").startswith(code)
    assert result.failed["public.bad"].remedy


def _remove_target(mirror: Mirror, name: str) -> None:
    import shutil

    shutil.rmtree(mirror.config.sink.root / "public" / name)
