"""Maintenance between epochs: which tables, how often, how long, and that it disturbs no other work."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from typing_extensions import override

from penstock.errors import PenstockError, SinkError, TargetFileLostError
from penstock.pipeline import maintenance as upkeep
from penstock.pipeline.maintenance import Jobs, TableMaintenance
from penstock.pipeline.retries import RetryLog, load_retries
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.schema import TableName
from penstock.sinks.base import Cooldown
from penstock.sinks.delta.maintenance import remove_temporary
from tests.support.pipeline.position_sink import PositionSink
from tests.support.waiting import wait_for

NAMES = [TableName("public", name) for name in ("a", "b", "c")]


class Kept(PositionSink):
    """Counts the maintenance of each table."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[TableName] = []
        self.fails: set[TableName] = set()
        self.is_over = threading.Event()
        self.waits: set[TableName] = set()

    @override
    def maintain(self, table: TableName) -> None:
        self.looks.append(table)
        if table in self.waits:
            assert self.is_over.wait(60)
            raise SinkError("cut off")
        if table in self.fails:
            raise SinkError("no")


class Counted(Jobs):
    """Jobs that record their calls."""

    def __init__(self, sink: Kept) -> None:
        self.sink = sink
        self.cancels = 0

    @override
    def settle(self) -> None:
        return

    @override
    def cancel(self) -> None:
        self.cancels += 1
        self.sink.is_over.set()


@pytest.fixture
def sink() -> Kept:
    return Kept()


@pytest.fixture
def jobs(sink: Kept) -> Counted:
    return Counted(sink)


@pytest.fixture
def statuses() -> dict[TableName, TableStatus]:
    return {name: TableStatus(TableState.STREAMING) for name in NAMES}


@pytest.fixture
def kept(
    sink: Kept, jobs: Counted, statuses: dict[TableName, TableStatus], monkeypatch: pytest.MonkeyPatch
) -> Iterator[TableMaintenance]:
    monkeypatch.setattr(upkeep, "_QUERY_SECONDS", 0.01)
    kept = TableMaintenance(sink, lambda: statuses, 0.05, jobs)
    yield kept
    kept.stop()


def test_only_tables_that_stream_are_looked_after(
    sink: Kept, kept: TableMaintenance, statuses: dict[TableName, TableStatus]
) -> None:
    statuses[NAMES[0]] = TableStatus(TableState.SNAPSHOTTING)
    statuses[NAMES[2]] = TableStatus(TableState.PAUSED)
    kept.maintain_all()
    assert sink.looks == [NAMES[1]]


def test_a_table_that_cannot_be_looked_after_is_in_nobodys_way(
    sink: Kept, kept: TableMaintenance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_FIRST_REST_SECONDS", 0.01)
    sink.fails = {NAMES[0]}
    kept.start()
    wait_for(
        lambda: sink.looks.count(NAMES[0]) > 1 and sink.looks.count(NAMES[2]) > 1, "looks", lambda: sink.looks
    )
    assert set(sink.looks) == set(NAMES)


def test_the_log_has_the_type_of_the_error_and_quotes_no_row(
    sink: Kept, kept: TableMaintenance, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: TableName) -> None:
        raise ValueError("The value 'hunter2' of the type \"STRING\" cannot be cast")

    monkeypatch.setattr(sink, "maintain", fail)
    kept.maintain_all()
    (record,) = {
        record.message: record for record in caplog.records if record.levelno >= logging.WARNING
    }.values()
    assert "hunter2" not in caplog.text + str(vars(record))
    assert vars(record)["error"] == "ValueError"


def test_failed_work_waits_twice_as_long_each_time_until_it_succeeds(
    sink: Kept, kept: TableMaintenance, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    sink.fails = {NAMES[1]}
    for after, looks in ((0, 1), (9, 1), (2, 2), (18, 2), (3, 3)):
        now[0] += after
        kept.maintain_all()
        assert sink.looks.count(NAMES[1]) == looks
    sink.fails = set()
    now[0] += 41
    kept.maintain_all()
    sink.fails = {NAMES[1]}
    kept.maintain_all()
    now[0] += 11
    kept.maintain_all()
    assert sink.looks.count(NAMES[1]) == 6
    assert sink.looks.count(NAMES[0]) == 8, "the others had maintenance each time"


def test_maintenance_that_keeps_failing_is_shown_and_fails_a_table_only_if_a_file_of_it_is_lost(
    sink: Kept,
    jobs: Counted,
    statuses: dict[TableName, TableStatus],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, given_up = [100.0], dict[TableName, PenstockError]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    kept = TableMaintenance(
        sink,
        lambda: statuses,
        1e9,
        jobs,
        retries=RetryLog(tmp_path),
        give_up=lambda name, error: given_up.update({name: error}),
    )
    errors = {
        NAMES[0]: RuntimeError("the row is 'secret'"),
        NAMES[1]: TargetFileLostError("the file /lake/f.parquet is missing"),
    }

    def maintain(table: TableName) -> None:
        if table in errors:
            raise errors[table]

    monkeypatch.setattr(sink, "maintain", maintain)
    for _ in range(3):
        kept.maintain_all()
        now[0] += 3601
    (shown,) = load_retries(tmp_path)
    assert (shown.subject, shown.failures, "RuntimeError" in shown.reason, "secret" in shown.reason) == (
        "maintenance of public.a",
        3,
        True,
        False,
    )
    assert list(given_up) == [NAMES[1]]
    assert "penstock tables resync CONFIG public.b" in (given_up[NAMES[1]].hint or "")
    errors.clear()
    kept.maintain_all()
    assert load_retries(tmp_path) == ()


def test_work_that_took_a_second_waits_for_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    rest = Cooldown()
    assert rest.is_over
    with suppress(SinkError), rest.after():
        now[0] += 1
        raise SinkError("no")
    now[0] += 9.9
    assert not rest.is_over
    now[0] += 0.2
    assert rest.is_over


def test_work_other_than_tables_runs_once_a_minute(
    sink: Kept, jobs: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    done: list[str] = []

    def fail() -> None:
        done.append("fails")
        raise SinkError("no")

    kept = TableMaintenance(sink, dict, 1.0, jobs, [fail, lambda: done.append("done")])
    for _ in range(3):
        kept.maintain_all()
    assert done == ["fails", "done"]
    now[0] += 61
    kept.maintain_all()
    assert done == ["fails", "done"] * 2


def test_work_that_takes_too_long_is_cut_off_and_the_others_continue(
    sink: Kept, jobs: Counted, kept: TableMaintenance
) -> None:
    sink.waits = {NAMES[1]}
    kept.start()
    wait_for(lambda: NAMES[1] in sink.looks, "looks", lambda: sink.looks)

    def third() -> bool:
        kept.check()
        return NAMES[2] in sink.looks

    wait_for(third, "looks", lambda: sink.looks)
    assert jobs.cancels


def test_K07_the_end_of_a_run_cuts_off_running_work(
    sink: Kept, jobs: Counted, kept: TableMaintenance, caplog: pytest.LogCaptureFixture
) -> None:
    sink.waits = {NAMES[0]}
    kept.start()
    wait_for(lambda: sink.looks == NAMES[:1], "looks", lambda: sink.looks)
    kept.stop()
    assert jobs.cancels
    assert sink.looks == NAMES[:1]
    assert not caplog.records, "a requested stop is not logged"


def test_a_run_that_catches_up_and_ends_looks_once_at_every_table(
    sink: Kept, kept: TableMaintenance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_QUERY_SECONDS", 3600.0)
    kept.start()
    kept.stop(finish=True)
    assert sink.looks == NAMES


def test_commits_that_a_crash_left_unfinished_are_removed_once_they_are_old(tmp_path: Path) -> None:
    log = tmp_path / "_delta_log"
    log.mkdir()
    old, new, other = log / ".penstock-1.tmp", log / ".penstock-2.tmp", log / f"{0:020d}.json"
    for file in (old, new, other):
        file.touch()
    for file in (old, other):
        _age(file, 2 * 3600)
    remove_temporary(tmp_path)
    assert sorted(log.iterdir()) == sorted([new, other])


def _age(file: Path, seconds: float) -> None:
    os.utime(file, (time.time() - seconds,) * 2)
