"""Snapshots that are lost, held too long, blocked or unusable: the reaction, and the affected tables."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import sql

from penstock import storage
from penstock.pipeline import error_policy
from penstock.pipeline.retries import load_retries
from penstock.pipeline.snapshots import coordinator as snapshot_round
from penstock.pipeline.snapshots import copy as snapshot_copy
from penstock.position import Position
from penstock.postgres import snapshot_export as outline
from penstock.postgres.snapshot_export import ExportedSnapshot
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import SnapshotPlace
from penstock.spool.manifest import SpoolLayout
from tests.support.snapshot.copying import Copying, Watcher
from tests.support.snapshot.tables import WIDE, change, make
from tests.support.waiting import wait_for

_EXPORTERS = (
    "SELECT pid FROM pg_stat_activity "
    "WHERE backend_type = 'walsender' AND application_name = 'penstock snapshot'"
)


def test_N01_changes_before_between_and_after_chunks_are_counted_once(copying: Copying) -> None:
    name = make(copying, "n01")
    watcher = Watcher()
    watcher.after_chunk = lambda _: change(copying, "n01")
    copying.run("n01", watcher=watcher)
    assert list(copying.held) == [copying.fences[name]], "all of it under one snapshot"
    copying.assert_exact("n01")


def test_N02_a_transaction_that_is_open_when_the_snapshot_is_taken_is_in_it_once(copying: Copying) -> None:
    """Creating the snapshot waits for it."""
    name = make(copying, "n02")
    with copying.captured.database.connect() as held:
        held.execute(
            "UPDATE n02 SET v = 'during' WHERE id = 1; INSERT INTO n02 VALUES (1000, 'during'); "
            "DELETE FROM n02 WHERE id = 2"
        )
        thread = threading.Thread(target=copying.run, args=("n02",))
        thread.start()
        deadline = time.monotonic() + 60
        while not copying.captured.query(f"{_EXPORTERS} AND wait_event_type = 'Lock'"):
            assert time.monotonic() < deadline, "the snapshot does not wait for the transaction"
            time.sleep(0.02)
        held.commit()
    thread.join(60)
    copying.assert_exact("n02")
    assert sorted(row["id"] for row in copying.rows(name) if row["v"] == "during") == [1, 1000]


def test_N03_chunks_left_by_a_lost_snapshot_are_read_under_a_new_one(copying: Copying) -> None:
    """The server ends the connection that holds the snapshot, as a failing network does."""
    name = make(copying, "lost")
    watcher = Watcher()
    watcher.after_chunk = lambda read: _end_exporters(copying) if read in (2, 6) else change(copying, "lost")
    assert copying.run("lost", watcher=watcher)[1] == {}
    assert len(copying.held) == 3
    assert watcher.planned.count(name) == 3
    assert len(watcher.read) == watcher.resumed[name][1], "every chunk once"
    copying.assert_exact("lost")


def test_a_snapshot_is_given_up_when_it_has_been_held_long_enough(copying: Copying) -> None:
    name = make(copying, "held")
    watcher = Watcher()
    watcher.after_chunk = lambda _: change(copying, "held")
    assert copying.run("held", watcher=watcher, hold_seconds=0.0)[1] == {}
    assert len(copying.held) > 3, "a new snapshot each time"
    assert len(watcher.read) == watcher.resumed[name][1], "every chunk once"
    copying.assert_exact("held")
    assert not copying.captured.query(_EXPORTERS)


def test_N08_the_snapshot_is_released_before_the_last_commit(
    copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(copying, "released")
    seen: list[object] = []
    finish = type(copying.sink).finish_snapshot

    def look(*arguments: object) -> None:
        released.wait(60)
        deadline = time.monotonic() + 30  # a server process takes its time to end
        while (found := copying.captured.query(_EXPORTERS)) and time.monotonic() < deadline:
            time.sleep(0.02)
        seen.extend(found)
        finish(*arguments)  # type: ignore[arg-type]

    released = threading.Event()
    join = threading.Thread.join

    def leave(thread: threading.Thread, timeout: float | None = None) -> None:
        """Joining the threads means that the snapshot is closed."""
        released.set()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", leave)
    monkeypatch.setattr(type(copying.sink), "finish_snapshot", look)
    copying.run("released")
    assert released.is_set()
    assert seen == []


@pytest.mark.parametrize(
    "moment", ["before", "between"], ids=["before any table is opened", "between two chunks"]
)
def test_N08_a_table_that_is_locked_does_not_keep_the_others_waiting(
    copying: Copying, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Whether or not they were opened before."""
    monkeypatch.setattr(outline, "_LOCK_SECONDS", 1)
    locked, unlocked = (f"{name}_{moment}" for name in ("locked", "unlocked"))
    make(copying, locked)
    make(copying, unlocked)
    watcher = Watcher()
    with copying.captured.database.connect() as holder:
        lock = _Locking(holder, locked)
        if moment == "before":
            _before_opening(monkeypatch, lock)
        else:
            watcher.after_chunk = lambda _: lock() if TableName("public", locked) in watcher.read else None
        copying.run(
            locked,
            unlocked,
            watcher=watcher,
            is_stopping=lambda: len(watcher.finished) == 1 and bool(watcher.troubles),
        )
    assert [name.name for name in watcher.finished] == [unlocked]
    assert watcher.troubles
    assert all("PEN-1107" in trouble for trouble in watcher.troubles)
    assert [retry.describe().split(":", 1)[0] for retry in load_retries(copying.lake)] == [
        f"snapshot of public.{locked}"
    ]
    copying.run(locked)
    copying.assert_exact(locked, unlocked)


def test_a_table_that_stays_locked_makes_way_for_one_that_waits_for_the_next_snapshot(
    copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a slot: with one, creating a snapshot waits for the transaction that holds the lock."""
    monkeypatch.setattr(outline, "_LOCK_SECONDS", 1)
    monkeypatch.setattr(snapshot_round, "_LOCK_PAUSE_SECONDS", 0.1)
    make(copying, "stays_locked")
    rewritten = make(copying, "rewritten_beside")
    watcher = Watcher()

    def rewrite(_: int) -> None:
        if watcher.planned.count(rewritten) == 1:
            copying.captured.database.execute("VACUUM FULL rewritten_beside")

    watcher.after_chunk = rewrite
    deadline = time.monotonic() + 60
    with copying.captured.database.connect() as holder:
        lock = _Locking(holder, "stays_locked")
        _before_opening(monkeypatch, lock)
        # The oracle's own reads would wait for the lock.
        contents = copying._contents
        monkeypatch.setattr(
            copying,
            "_contents",
            lambda snapshot, tables: contents(snapshot, [each for each in tables if each.name == rewritten]),
        )
        copying.run(
            "stays_locked",
            "rewritten_beside",
            watcher=watcher,
            has_slot=False,
            is_stopping=lambda: rewritten in watcher.finished or time.monotonic() > deadline,
        )
    assert watcher.planned.count(rewritten) == 2
    assert watcher.finished == [rewritten]
    copying.assert_exact("rewritten_beside")


class _Locking:
    """Locks a table for itself, once, whichever thread calls it first."""

    def __init__(self, holder: psycopg.Connection, table: str) -> None:
        self._holder, self._table = holder, table
        self._once = threading.Lock()
        self._is_done = False

    def __call__(self) -> None:
        with self._once:
            if not self._is_done:
                self._holder.execute(
                    sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(sql.Identifier(self._table))
                )
                self._is_done = True


def _before_opening(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Run `act` after the snapshot was taken and before the next table is opened under it."""
    open_table = snapshot_copy.TableCopy.open

    def open_after(copy: snapshot_copy.TableCopy, exported: ExportedSnapshot) -> list[tuple[int, int]]:
        act()
        return open_table(copy, exported)

    monkeypatch.setattr(snapshot_copy.TableCopy, "open", open_after)


def test_a_rewrite_starts_that_one_table_again(copying: Copying) -> None:
    """Under the snapshot, between two chunks; the other table keeps its chunks."""
    other = make(copying, "untouched")
    copying.captured.execute("CREATE TABLE rewritten (id int PRIMARY KEY, v text, w text)")
    copying.captured.execute(f"INSERT INTO rewritten SELECT g, {WIDE}, 'w' FROM generate_series(1, 120) g")
    watcher = Watcher()
    watcher.after_chunk = lambda read: (
        copying.captured.execute("ALTER TABLE rewritten DROP COLUMN w") if read == 6 else None
    )
    assert copying.run("rewritten", "untouched", watcher=watcher)[1] == {}
    assert watcher.planned.count(other) == 1
    assert watcher.planned.count(TableName("public", "rewritten")) == 2
    copying.assert_exact("rewritten", "untouched")


RESTARTS = (
    "TRUNCATE {0}; INSERT INTO {0} VALUES (1)",
    "VACUUM FULL {0}",
    "ALTER TABLE {0} ADD COLUMN x int DEFAULT 5",
    "ALTER TABLE {0} DROP COLUMN v; ALTER TABLE {0} ADD COLUMN v text DEFAULT 'new'",
    "ALTER TABLE {0} DROP COLUMN w",
)


def test_chunks_are_not_reused_after_a_rewrite_between_two_runs(copying: Copying) -> None:
    names = [f"r{number}" for number in range(len(RESTARTS))]
    for name in names:
        copying.captured.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v text, w int)")
        copying.captured.execute(f"INSERT INTO {name} SELECT g, {WIDE}, 0 FROM generate_series(1, 60) g")
        copying.captured.start()
        copying.run(name, chunks=2)
    for name, statements in zip(names, RESTARTS, strict=True):
        for statement in statements.format(name).split("; "):
            copying.captured.execute(statement)
    watcher, failures = copying.run(*names)
    assert not failures
    assert watcher.resumed == {}
    assert len([trouble for trouble in watcher.troubles if "starts again" in trouble]) == len(names)
    copying.assert_exact(*names)


def test_a_table_altered_after_its_last_chunk_starts_again(
    copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dropped and recreated column looks the same, but rows read before and after differ."""
    name = make(copying, "altered", rows=60)
    watcher = Watcher()

    def alter(read: int) -> None:
        if read == 4:
            copying.captured.execute(
                "ALTER TABLE altered DROP COLUMN v; ALTER TABLE altered ADD COLUMN v text DEFAULT 'new'"
            )

    watcher.after_chunk = alter
    assert copying.run("altered", watcher=watcher)[1] == {}
    assert watcher.planned.count(name) == 2
    copying.assert_exact("altered")


class StagingJob:
    """Empties a table and fills it again in a loop, each time with rows of another generation."""

    def __init__(self, copying: Copying, table: str) -> None:
        self._database, self._table = copying.captured.database, table
        self._stopping = threading.Event()
        self.before: list[Position] = []
        """By generation, where the log was before its commit; `after`: after it."""
        self.after: list[Position] = []
        self._thread = threading.Thread(target=self._run, name="staging job")

    def __enter__(self) -> StagingJob:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the job waits for a lock that is never released"

    def await_next(self) -> None:
        """Wait until it has emptied the table once more."""
        wanted = len(self.after) + 2
        wait_for(lambda: len(self.after) >= wanted, "the staging job", lambda: len(self.after))

    def _run(self) -> None:
        with self._database.connect() as connection:
            while not self._stopping.is_set():
                generation = len(self.before)
                with connection.transaction():
                    connection.execute(f"TRUNCATE {self._table}")
                    connection.execute(
                        f"INSERT INTO {self._table} SELECT g, '{generation} ' || {WIDE} "
                        "FROM generate_series(1, 60) g"
                    )
                    self.before.append(self._position(connection))
                self.after.append(self._position(connection))
                connection.commit()
                time.sleep(0.1)

    def _position(self, connection: Any) -> Position:
        return Position.parse(connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()[0])

    def assert_exact(self, copying: Copying, name: TableName) -> None:
        """The copy is one generation, the last committed before the copy's position."""
        rows, target = copying.rows(name), copying.sink.load_target(name)
        assert target is not None
        assert target.applied is not None
        (generation,) = {int(row["v"].split()[0]) for row in rows}
        assert len(rows) == 60
        assert self.before[generation] <= target.applied
        assert generation + 1 == len(self.after) or self.after[generation + 1] > target.applied


def _disturb_once(watcher: Watcher, job: StagingJob) -> None:
    watcher.after_chunk = lambda read: job.await_next() if read == 1 else None


def test_a_small_table_that_is_constantly_truncated_and_refilled_is_copied_in_one_transaction(
    copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        snapshot_copy, "_LONGEST_RESTART_SECONDS", 1.0
    )  # a busy machine may need many attempts
    name = make(copying, "staging", rows=60)
    make(copying, "calm_beside_staging", rows=60)
    # The oracle would queue behind the TRUNCATE that waits for the copy.
    contents = copying._contents
    monkeypatch.setattr(
        copying,
        "_contents",
        lambda snapshot, tables: contents(snapshot, [each for each in tables if each.name != name]),
    )
    watcher = Watcher()
    with StagingJob(copying, "staging") as job:
        _disturb_once(watcher, job)
        _, failures = copying.run("staging", "calm_beside_staging", watcher=watcher)
    assert failures == {}
    assert watcher.planned.count(name) > 1, "it was disturbed"
    job.assert_exact(copying, name)
    copying.assert_exact("calm_beside_staging")
    assert load_retries(copying.lake) == ()


def test_a_large_table_that_is_emptied_while_it_is_copied_is_tried_again_visibly_until_that_stops(
    copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_copy, "_LOCKED_BYTES", -1)
    monkeypatch.setattr(snapshot_copy, "_LONGEST_RESTART_SECONDS", 0.1)
    name = make(copying, "vast", rows=60)
    watcher, seen = Watcher(), list[str]()

    def disturb(_: int) -> None:
        seen.extend(retry.describe() for retry in load_retries(copying.lake))
        if watcher.planned.count(name) <= 6:
            copying.captured.database.execute(
                f"TRUNCATE vast; INSERT INTO vast SELECT g, {WIDE} FROM generate_series(1, 60) g"
            )

    watcher.after_chunk = disturb
    _, failures = copying.run("vast", watcher=watcher)
    assert failures == {}
    assert watcher.planned.count(name) == 7
    assert "snapshot of public.vast: PEN-4005" in seen[0]
    assert "fix: pause the job that truncates or alters public.vast" in seen[0]
    assert load_retries(copying.lake) == ()
    copying.assert_exact("vast")


def test_a_table_that_is_disturbed_too_often_fails_alone_with_a_remedy(
    copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_copy, "_LOCKED_BYTES", -1)
    monkeypatch.setattr(snapshot_copy, "_LONGEST_RESTART_SECONDS", 0.01)
    monkeypatch.setattr(snapshot_round, "_RESTARTS", 3)
    make(copying, "churned", rows=60)
    make(copying, "calm_beside_churned", rows=60)
    watcher = Watcher()
    watcher.after_chunk = lambda _: copying.captured.database.execute("VACUUM FULL churned")
    _, failures = copying.run("churned", "calm_beside_churned", watcher=watcher)
    (failed,) = failures.items()
    assert (failed[0].name, failed[1].code) == ("churned", "PEN-4005")
    assert "penstock tables resync CONFIG public.churned" in (failed[1].hint or "")
    copying.assert_exact("calm_beside_churned")


def test_an_unknown_error_of_one_table_fails_it_alone_after_its_attempts(
    copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(error_policy, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(error_policy, "LONGEST_SECONDS", 0.02)
    name = make(copying, "broken", rows=60)
    make(copying, "calm_beside_broken", rows=60)
    begin = copying.sink.begin_snapshot

    def fail(schema: TableSchema, fence: Position) -> SnapshotPlace:
        if schema.name == name:
            raise RuntimeError("the row is 'secret'")
        return begin(schema, fence)

    monkeypatch.setattr(copying.sink, "begin_snapshot", fail)
    _, failures = copying.run("broken", "calm_beside_broken")
    assert {table.name: error.code for table, error in failures.items()} == {"broken": "PEN-1423"}
    assert "RuntimeError" in failures[name].message
    assert "secret" not in failures[name].message
    assert failures[name].hint
    copying.assert_exact("calm_beside_broken")


def test_a_spool_that_lost_the_changes_starts_the_table_again(copying: Copying) -> None:
    name = make(copying, "gap")
    copying.run("gap", chunks=2)
    change(copying, "gap")
    copying.captured.drain()
    copying.captured.execute("INSERT INTO gap (id) VALUES (-1)")  # in a separate segment, which remains
    copying.captured.drain()
    copying.captured.stop()
    layout = SpoolLayout(copying.captured.spool)
    segments = sorted(entry.name for entry in storage.list_directories(layout.segments))
    for segment in segments[:-1]:
        storage.delete_tree(layout.segments / segment)
    copying.captured.start()
    watcher, failures = copying.run("gap")
    assert not failures
    assert name not in watcher.resumed
    assert any("the spool no longer has the changes after" in trouble for trouble in watcher.troubles)
    copying.assert_exact("gap")


def test_files_that_vanished_from_the_target_are_not_believed(copying: Copying) -> None:
    name = make(copying, "vanished")
    copying.run("vanished", chunks=3)
    next(iter(copying.sink.path(name).glob("snapshot-*.parquet"))).unlink()  # type: ignore[attr-defined]
    watcher, _ = copying.run("vanished")
    assert name not in watcher.resumed
    copying.assert_exact("vanished")


def test_small_tables_are_finished_before_a_large_one(copying: Copying) -> None:
    make(copying, "huge", rows=400)
    for number in range(5):
        make(copying, f"small{number}", rows=1)
    names = ["huge", *(f"small{number}" for number in range(5))]
    watcher, _ = copying.run(*names)
    assert watcher.finished[-1].name == "huge"
    assert watcher.read.index(TableName("public", "huge")) < 4, (
        "and the large one is not left for the end either"
    )
    copying.assert_exact(*names)


def _end_exporters(copying: Copying) -> None:
    copying.captured.query(f"SELECT pg_terminate_backend(pid, 5000) FROM ({_EXPORTERS}) e")
