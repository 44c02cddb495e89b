"""Tables that are added, removed, paused and resynced while the pipeline runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
import yaml
from typing_extensions import override

from penstock.capture.trigger.provision import ensure_trigger_coverage
from penstock.cli.table_commands import order
from penstock.errors import NoTablesError, SinkRefusedError
from penstock.pipeline import table_reconciler as roster
from penstock.pipeline import table_selection as tables
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.table_states import TableState
from penstock.postgres.capture_triggers import detach
from penstock.postgres.connection import connect
from penstock.schema import TableName
from penstock.sinks.delta.sink import DeltaSink
from penstock.testing.streams import wait_for
from tests.support.fix_pipeline import Mirror, MirrorFactory
from tests.support.fix_postgres import Database
from tests.support.pipeline.running import DEADLINE_SECONDS, Running, running

pytestmark = pytest.mark.spark


@contextmanager
def begun_before_any_table(
    database: Database, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Running]:
    """No pattern matches yet: the run waits, and says so. Then the first table is created."""
    told: list[str] = []
    observer = PipelineObserver()
    monkeypatch.setattr(observer, "announced", told.append)
    monkeypatch.setattr(tables, "_QUERY_SECONDS", 0.2)
    with running(mirror, observer) as run:
        wait_for(
            lambda: bool(told) or run.failure is not None,
            "a word about the wait",
            lambda: run.failure,
            DEADLINE_SECONDS,
        )
        assert run.failure is None, run.failure
        assert "matches a pattern of tables: yet" in told[0]
        database.execute("CREATE TABLE a (id int PRIMARY KEY, v text); INSERT INTO a VALUES (1, 'a')")
        yield run


def test_N11_N14_tables_join_rest_and_leave_while_the_others_go_on(
    database: Database, mirror: MirrorFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute(
        "CREATE SCHEMA later; CREATE TABLE later.extra (id int PRIMARY KEY); "
        "INSERT INTO later.extra SELECT generate_series(1, 500)"
    )
    made = mirror(tables=["public.*"])
    with begun_before_any_table(database, made, monkeypatch) as run:
        run.wait_for_state("public.a", TableState.STREAMING)
        # a table that is created later and matches a pattern
        database.execute("CREATE TABLE b (id int PRIMARY KEY, v text); INSERT INTO b VALUES (1, 'b')")
        # an ordered one, during writes
        with pytest.raises(NoTablesError, match=r"later\.missing"):
            run.order("add", "later.missing")
        run.order("add", "later.extra")
        database.execute("INSERT INTO later.extra SELECT generate_series(501, 600)")
        run.wait_for_state("public.b", TableState.STREAMING)
        run.wait_for_state("later.extra", TableState.STREAMING)
        database.execute("DELETE FROM later.extra WHERE id <= 100; UPDATE b SET v = 'c'")
        run.wait_for_rows("later.extra", 500)
        # one is paused, and its changes are kept
        run.order("pause", "public.a")
        run.wait_for_state("public.a", TableState.PAUSED)
        database.execute("INSERT INTO a VALUES (2, 'paused'); INSERT INTO b VALUES (2, 'goes on')")
        run.wait_for_rows("public.b", 2)
        assert len(made.rows("public.a")) == 1
    assert run.result is not None
    paused = made.run_once()
    assert paused.tables["public.a"].state is TableState.PAUSED, "an order outlives the run"
    assert len(made.rows("public.a")) == 1
    with running(made) as run:
        run.order("resume", "public.a")
        run.wait_for_rows("public.a", 2)
        # one is removed, and added again as a new table
        run.order("remove", "later.extra")
        run.wait_for_state("later.extra", None)
        database.execute("INSERT INTO later.extra VALUES (1000)")
        run.order("add", "later.extra")
        run.wait_for_state("later.extra", TableState.STREAMING)
        run.wait_for_rows("later.extra", 501)
        # the configuration file has it too
        document = yaml.safe_load(made.path.read_text(encoding="utf-8"))
        made.path.write_text(yaml.safe_dump({**document, "tables": ["public.a"]}), encoding="utf-8")
        run.wait_for_state("public.b", None)
        made.path.write_text(
            yaml.safe_dump({**document, "tables": ["public.a", "public.b"]}), encoding="utf-8"
        )
        run.wait_for_state("public.b", TableState.STREAMING)
    made.run_once()
    made.assert_equal("public.a", "public.b", "later.extra")


def test_P08_a_table_that_leaves_the_publication_of_a_running_pipeline_fails_alone(
    database: Database, mirror: MirrorFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its changes while it was unpublished are in no log, whether or not it is published again at the next
    check.
    """
    monkeypatch.setattr(roster, "_QUERY_SECONDS", 1.0)
    for name in ("good", "out", "back"):
        database.execute(f"CREATE TABLE {name} (id int PRIMARY KEY); INSERT INTO {name} VALUES (1)")
    made = mirror()
    publication = made.config.publication
    with running(made) as run:
        for name in ("good", "out", "back"):
            run.wait_for_state(f"public.{name}", TableState.STREAMING)
        with closing(database.connect()) as connection, connection.transaction():
            connection.execute(f"ALTER PUBLICATION {publication} DROP TABLE out, back")
            connection.execute("INSERT INTO back VALUES (2)")
            connection.execute(f"ALTER PUBLICATION {publication} ADD TABLE back")
        database.execute(
            "INSERT INTO good VALUES (2); INSERT INTO back VALUES (3); INSERT INTO out VALUES (2)"
        )
        for name, words in (("out", "was taken out of the publication, so"), ("back", "and put in again")):
            run.wait_for_state(f"public.{name}", TableState.FAILED)
            status = run.pipeline.statuses[TableName("public", name)]
            assert words in (status.reason or "")
            assert f"penstock tables resync CONFIG public.{name}" in (status.remedy or "")
        run.wait_for_rows("public.good", 2)
        # as the remedy says
        for name in ("out", "back"):
            run.order("resync", f"public.{name}")
            run.wait_for_state(f"public.{name}", TableState.STREAMING)
        database.execute("INSERT INTO out VALUES (4); INSERT INTO back VALUES (4)")
        run.wait_for_rows("public.out", 3)
        run.wait_for_rows("public.back", 4)
    made.run_once()
    made.assert_equal("public.good", "public.out", "public.back")


def _refuse(*_: object) -> None:
    raise SinkRefusedError("no", hint="no")


def test_N11_N13_a_table_is_renewed_beside_its_target_and_takes_its_place(
    database: Database, mirror: MirrorFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text); "
        "INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 200) g"
    )
    database.execute("CREATE TABLE broken (id int PRIMARY KEY); INSERT INTO broken VALUES (1)")
    made = mirror(schema_changes="stop")
    made.run_once()
    made.damage("public.t", "DELETE FROM {} WHERE id = 7")
    database.execute("ALTER TABLE broken ADD COLUMN extra int DEFAULT 5; INSERT INTO broken VALUES (2, 6)")
    with running(made) as run:
        run.wait_for_state("public.broken", TableState.FAILED)
        database.execute("INSERT INTO t VALUES (201, 'new')")
        run.wait_for_rows("public.t", 200)
        # a failed swap does not change the target
        with monkeypatch.context() as patch:
            patch.setattr(DeltaSink, "replace", _refuse)
            run.order("resync", "public.t")
            database.execute("INSERT INTO t VALUES (202, 'beside'); DELETE FROM t WHERE id = 1")
            wait_for(
                lambda: not made.orders().resync,
                "the order to be given up",
                lambda: run.pipeline.statuses,
                DEADLINE_SECONDS,
            )
        run.wait_for_rows("public.t", 200)
        assert {202, 2} <= {row["id"] for row in made.rows("public.t")}
        run.order("resync", "public.t")
        run.order("resync", "public.broken")
        database.execute("UPDATE t SET v = 'changed' WHERE id = 3; DELETE FROM t WHERE id = 4")
        wait_for(
            lambda: not made.orders().resync,
            "the orders to be carried out",
            lambda: run.pipeline.statuses,
            DEADLINE_SECONDS,
        )
        run.wait_for_state("public.broken", TableState.STREAMING)
        database.execute("INSERT INTO broken VALUES (3, 7); INSERT INTO t VALUES (4, 'again')")
        run.wait_for_rows("public.broken", 3)
    made.run_once()
    made.assert_equal("public.t", "public.broken")
    assert not list((made.config.sink.root / "penstock_shadows").rglob("*.parquet"))


class _RemovedWhileCopied(PipelineObserver):
    """Removes a table after its first chunk, which returns only when the table has left."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._left = threading.Event()
        self.on_left: Callable[[], None] = lambda: None
        self.resumed: list[TableName] = []

    @override
    def table_left(self, table: TableName) -> None:
        self._left.set()

    @override
    def snapshot_resumed(self, table: TableName, done: int, chunks: int) -> None:
        self.resumed.append(table)

    @override
    def snapshot_advanced(self, table: TableName, chunks: int, rows: int, heap_bytes: int) -> None:
        if table.name == "big" and not self._left.is_set():
            order(self._mirror.path, [str(table)], "remove")
            assert self._left.wait(DEADLINE_SECONDS)
            self.on_left()


@pytest.mark.parametrize(("capture", "stops"), [("wal", False), ("wal", True), ("trigger", True)])
def test_a_table_that_is_removed_and_added_again_during_its_first_copy_has_all_changes(
    database: Database, mirror: MirrorFactory, *, capture: str, stops: bool
) -> None:
    database.execute("CREATE TABLE small (id int PRIMARY KEY); INSERT INTO small VALUES (1)")
    made = mirror(snapshot_chunk_bytes=65536, source={"dsn": database.dsn, "capture": capture})
    made.run_once()
    order(made.path, ["public.small"], "pause")  # so that the slot keeps the log from before the copy
    database.execute("INSERT INTO small VALUES (2); CREATE TABLE big (id int PRIMARY KEY, v text)")
    database.execute("INSERT INTO big SELECT g, repeat('x', 200) FROM generate_series(1, 3000) g")
    observer = _RemovedWhileCopied(made)

    def come_back() -> None:
        database.execute(
            "DELETE FROM big WHERE id <= 10; UPDATE big SET v = 'y' WHERE id > 2990"
        )  # while it is not captured
        order(made.path, ["public.big"], "add")
        if not stops:
            order(made.path, ["public.big"], "resync")

    with running(made, observer) as run:
        observer.on_left = run.pipeline.stop if stops else come_back
        if stops:
            wait_for(lambda: run.result is not None, "the run to end", lambda: run.failure, DEADLINE_SECONDS)
        else:
            run.wait_for_state("public.big", TableState.STREAMING)
            wait_for(
                lambda: not made.orders().resync, "the order to be carried out", made.orders, DEADLINE_SECONDS
            )
            run.wait_for_state("public.big", TableState.STREAMING)
    if stops:
        come_back()
    order(made.path, ["public.small"], "resume")
    assert not made.run_once(observer).failed
    assert not observer.resumed
    made.assert_equal("public.small", "public.big")


class _StoppedWhileCopied(PipelineObserver):
    """Stops the run after the first chunk of a table."""

    def __init__(self) -> None:
        self.stop: Callable[[], None] = lambda: None
        self.resumed: list[TableName] = []

    @override
    def snapshot_resumed(self, table: TableName, done: int, chunks: int) -> None:
        self.resumed.append(table)

    @override
    def snapshot_advanced(self, table: TableName, chunks: int, rows: int, heap_bytes: int) -> None:
        if table.name == "big":
            self.stop()


def test_P08_a_table_that_lost_its_triggers_between_two_parts_of_its_snapshot_is_copied_from_the_start(
    database: Database, mirror: MirrorFactory
) -> None:
    """They were created again before the next run, so that the table looks as if it always had them."""
    database.execute("CREATE TABLE small (id int PRIMARY KEY); INSERT INTO small VALUES (1)")
    made = mirror(snapshot_chunk_bytes=65536, source={"dsn": database.dsn, "capture": "trigger"})
    made.run_once()
    order(made.path, ["public.small"], "pause")  # so that the change table keeps what is before the copy
    database.execute("INSERT INTO small VALUES (2); CREATE TABLE big (id int PRIMARY KEY, v text)")
    database.execute("INSERT INTO big SELECT g, repeat('x', 200) FROM generate_series(1, 3000) g")
    observer = _StoppedWhileCopied()
    with running(made, observer) as run:
        observer.stop = run.pipeline.stop
        wait_for(lambda: run.result is not None, "the run to end", lambda: run.failure, DEADLINE_SECONDS)
    address, big = made.config.source.address(), [TableName("public", "big")]
    with connect(address) as connection:
        detach(connection, made.slot, big)
    database.execute("DELETE FROM big WHERE id <= 10; UPDATE big SET v = 'y' WHERE id > 2990")
    ensure_trigger_coverage(address, made.slot, big, manage=True)
    observer.stop = lambda: None
    order(made.path, ["public.small"], "resume")
    assert not made.run_once(observer).failed
    assert not observer.resumed
    made.assert_equal("public.small", "public.big")


def test_changes_of_partitions_with_different_keys_are_recorded_if_the_table_needs_no_key(
    database: Database, mirror: MirrorFactory
) -> None:
    database.execute(
        "CREATE TABLE log (id int, ts int) PARTITION BY RANGE (ts); "
        "CREATE TABLE log_a PARTITION OF log DEFAULT"
    )
    database.execute("ALTER TABLE log_a ADD PRIMARY KEY (id); INSERT INTO log VALUES (1, 1)")
    made = mirror(tables=[{"table": "public.log", "mode": "append"}])
    assert not made.run_once().failed
    database.execute(
        "INSERT INTO log VALUES (2, 2); UPDATE log SET ts = 3 WHERE id = 2; DELETE FROM log WHERE id = 1"
    )
    assert not made.run_once().failed
    rows = sorted((row["id"], row["_change_type"]) for row in made.rows("public.log"))
    assert rows == [(1, "delete"), (1, "snapshot"), (2, "insert"), (2, "update_postimage")]


def test_a_table_whose_partition_logs_another_key_than_its_root_fails_alone(
    database: Database, mirror: MirrorFactory
) -> None:
    """If the catalog no longer shows it, a change does; if no change shows it, the catalog does: a key update
    has no old key.
    """
    database.execute("CREATE TABLE good (id int PRIMARY KEY); INSERT INTO good VALUES (1)")
    database.execute(
        "CREATE TABLE bad (id int, code text NOT NULL, ts int NOT NULL, PRIMARY KEY (id, ts)) "
        "PARTITION BY RANGE (ts)"
    )
    database.execute(
        "CREATE UNIQUE INDEX by_code ON bad (code, ts); ALTER TABLE bad REPLICA IDENTITY USING INDEX by_code"
    )
    database.execute("CREATE TABLE bad_a PARTITION OF bad FOR VALUES FROM (0) TO (10)")
    mended = "ALTER TABLE bad_a REPLICA IDENTITY USING INDEX bad_a_code_ts_idx"
    database.execute(f"{mended}; INSERT INTO bad VALUES (1, 'a', 1), (2, 'b', 2)")
    made = mirror()
    made.run_once()
    database.execute(
        f"ALTER TABLE bad_a REPLICA IDENTITY DEFAULT; DELETE FROM bad WHERE id = 1; {mended}; "
        "INSERT INTO good VALUES (2)"
    )
    tables = made.run_once().tables
    assert (tables["public.bad"].state, tables["public.good"].state) == (
        TableState.FAILED,
        TableState.STREAMING,
    )
    assert "PEN-1417" in (tables["public.bad"].reason or "")
    assert (len(made.rows("public.bad")), len(made.rows("public.good"))) == (2, 2), (
        "nothing of the refused change is applied"
    )
    order(made.path, ["public.bad"], "resync")
    with running(made) as run:
        run.wait_for_rows("public.bad", 1)
        run.wait_for_state("public.bad", TableState.STREAMING)
        database.execute(
            "CREATE TABLE bad_b PARTITION OF bad FOR VALUES FROM (10) TO (20); "
            "INSERT INTO bad VALUES (3, 'c', 11)"
        )
        run.wait_for_state("public.bad", TableState.FAILED)
        status = run.pipeline.statuses[TableName.parse("public.bad")]
        assert "PEN-1418" in (status.reason or "")
        assert (
            status.remedy == 'ALTER TABLE "public"."bad_b" REPLICA IDENTITY USING INDEX "bad_b_code_ts_idx";'
        )
        database.execute("INSERT INTO good VALUES (3)")
        run.wait_for_rows("public.good", 3)
        assert run.state("public.good") is TableState.STREAMING
