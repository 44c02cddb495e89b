"""`penstock capture` as a process: the changes it captures, how it ends, and two of them on one slot."""

from __future__ import annotations

import os
import shutil
import time

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.errors import (
    CaptureMissingError,
    ConfigError,
    SlotMissingError,
    SpoolFormatError,
    SpoolLockedError,
)
from penstock.pipeline.checks.check import check_pipeline
from penstock.pipeline.epoch_log import Epoch, EpochLog
from penstock.pipeline.sources import capture_process as companion
from penstock.pipeline.sources.capture_process import CaptureMonitor, forget_consumer, plan_capture
from penstock.pipeline.status import inspect_status
from penstock.position import Position
from penstock.schema import TableName
from penstock.spool.manifest import SpoolLayout
from penstock.spool.ownership import is_spool_locked
from penstock.spool.reader import SpoolReader
from penstock.spool.retention import inspect_consumers, release, set_released
from penstock.spool.status import load_status
from tests.support.capture.process import SharedSlot
from tests.support.holding import locked_elsewhere
from tests.support.waiting import wait_for


def _table(shared: SharedSlot, name: str) -> None:
    shared.database.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)")


def _spooled_tables(shared: SharedSlot) -> set[TableName]:
    reader = SpoolReader(shared.spool)
    assert reader.start is not None
    assert reader.end is not None
    return set(reader.read(reader.start, reader.end).tables)


def test_it_captures_for_all_and_confirms_what_the_slowest_consumer_has_released(shared: SharedSlot) -> None:
    """It creates publication and slot for its own tables, continues when another pipeline adds one, and
    confirms at the end.
    """
    for name in ("a", "b"):
        _table(shared, name)
    path = shared.config("one", ["public.a"])
    capture = shared.start(path).wait_until_it_runs()
    shared.wait_for_spool(
        shared.execute("INSERT INTO a VALUES (1, 'x'); INSERT INTO b VALUES (1, 'not requested')")
    )
    shared.database.execute(f"ALTER PUBLICATION {shared.slot} ADD TABLE b")
    end = shared.wait_for_spool(
        shared.execute("INSERT INTO a VALUES (2, 'x'); INSERT INTO b VALUES (2, 'x')")
    )
    assert _spooled_tables(shared) == {TableName("public", "a"), TableName("public", "b")}
    slow = release(shared.spool, "slow", SpoolReader(shared.spool).start or Position.ZERO)
    release(shared.spool, "fast", end)
    last = shared.wait_for_spool(shared.execute("INSERT INTO a VALUES (3, 'x')"))
    wait_for(lambda: (_confirmed(shared) or slow) >= slow, "a confirmation", capture.log.read_text)
    assert shared.confirmed <= slow
    release(shared.spool, "slow", end)
    assert capture.stop() == 0
    assert shared.confirmed == end < last
    assert not is_spool_locked(shared.spool)
    assert shared.database.query(
        "SELECT active FROM pg_replication_slots WHERE slot_name = %s", shared.slot
    ) == [(False,)]
    assert f"confirmed {end}" in capture.log.read_text()


def _confirmed(shared: SharedSlot) -> Position | None:
    status = load_status(shared.spool)
    return status.confirmed if status is not None else None


def test_killed_and_started_again_it_misses_nothing(shared: SharedSlot) -> None:
    _table(shared, "a")
    path = shared.config("one", ["public.a"])
    shared.start(path).wait_until_it_runs().kill()
    shared.execute("INSERT INTO a VALUES (1, 'while it is away')")
    capture = shared.start(path).wait_until_it_runs()
    shared.wait_for_spool(shared.execute("INSERT INTO a VALUES (2, 'x')"))
    capture.kill()
    reader = SpoolReader(shared.spool)
    assert reader.start is not None
    assert reader.end is not None
    found = reader.read(reader.start, reader.end).tables[TableName("public", "a")]
    assert found.counts.rows == 2


def test_it_waits_while_no_pattern_matches_a_table_and_ends_when_it_is_stopped(shared: SharedSlot) -> None:
    capture = shared.start(shared.config("one", ["later.*"]))
    wait_for(
        lambda: "matches a pattern of tables: yet" in capture.log.read_text(),
        "a word about the wait",
        capture.log.read_text,
    )
    assert capture.stop() == 0
    assert not shared.spool.exists()


def test_a_second_capture_of_the_spool_ends_and_names_the_first(
    shared: SharedSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    _table(shared, "a")
    path = shared.config("one", ["public.a"])
    first = shared.start(path).wait_until_it_runs()
    second = shared.start(path)
    assert second.wait() == 1
    found = second.log.read_text()
    assert "PEN-2001" in found
    assert f"process {first.pid} writes to it" in found
    embedded = CaptureMonitor(shared.load(shared.config("embedded", ["public.a"], process="embedded")))
    monkeypatch.setattr(companion, "_END_SECONDS", 0.1)
    with pytest.raises(SpoolLockedError, match=f"process {first.pid} writes to it") as raised:
        embedded.check()
    assert "source.process: separate" in (raised.value.hint or "")
    other = shared.start(shared.config("other", ["public.a"], spool="spool_other"))
    wait_for(lambda: "PEN-1202" in other.log.read_text(), "a slot that is taken", other.log.read_text)


def test_status_and_check_say_whether_it_runs_and_who_reads(shared: SharedSlot) -> None:
    _table(shared, "a")
    path = shared.config("one", ["public.a"])
    warnings = inspect_status(shared.load(path)).warnings
    assert "is not running: start `penstock capture`" in warnings[0]
    assert "capture-not-running" in {each.code for each in check_pipeline(path).warnings}
    shared.start(path).wait_until_it_runs()
    release(shared.spool, "one", Position.of(7))
    status = inspect_status(shared.load(path))
    assert [each.name for each in status.consumers] == ["one"]
    assert status.missing is None
    printed = CliRunner().invoke(app, ["status", str(path)]).output
    assert "consumer   one, released 0/7, 0 s ago" in printed
    found = check_pipeline(path)
    assert "capture-not-running" not in {each.code for each in found.warnings}
    assert found.problems == []
    clashing = shared.config("two", ["public.a"], publication="other")
    assert [each.code for each in check_pipeline(clashing).problems] == ["PEN-2004"]


def test_a_retired_consumer_can_be_forgotten(shared: SharedSlot) -> None:
    _table(shared, "a")
    path = shared.config("one", ["public.a"])
    capture = shared.start(path).wait_until_it_runs()
    end = shared.wait_for_spool(shared.execute("INSERT INTO a VALUES (1, 'x')"))
    release(shared.spool, "here", end)
    set_released(shared.spool, "gone", Position.ZERO)
    config = shared.load(path)
    with pytest.raises(ConfigError, match="no consumer 'typo'"):
        forget_consumer(config, "typo")
    with pytest.raises(ConfigError, match="consumer gone is running"):
        forget_consumer(config, "gone")
    _grow_old(shared, "gone", hours=5)
    with (
        locked_elsewhere(SpoolLayout(shared.spool).consumer_lock("gone")),
        pytest.raises(ConfigError, match="consumer gone is running"),
    ):
        forget_consumer(config, "gone")  # one that says nothing may still run
    assert "gone has released nothing" in inspect_status(config).warnings[0]
    result = CliRunner().invoke(app, ["capture", str(path), "--forget", "gone"])
    assert (result.exit_code, result.output) == (0, f"removed consumer gone; remaining: here at {end}\n")
    assert [each.name for each in inspect_consumers(shared.spool)] == ["here"]
    wait_for(lambda: shared.confirmed >= end, f"a slot at {end}", capture.log.read_text)


def _grow_old(shared: SharedSlot, consumer: str, *, hours: int) -> None:
    then = time.time() - hours * 3600
    os.utime(SpoolLayout(shared.spool).consumer(consumer), (then, then))


def test_a_run_that_is_to_end_does_not_wait_for_a_capture_without_limit(
    shared: SharedSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = CaptureMonitor(shared.load(shared.config("one", ["public.a"])))
    alone.check_patience()
    assert "is not running" in (alone.trouble() or "")
    alone.check_patience()
    monkeypatch.setattr(companion, "_PATIENCE_SECONDS", -1.0)
    with pytest.raises(CaptureMissingError):
        alone.check_patience()


def test_pipelines_that_do_not_agree_with_the_capture_are_refused(shared: SharedSlot) -> None:
    _table(shared, "a")
    shared.start(shared.config("one", ["public.a"])).wait_until_it_runs()
    with pytest.raises(SpoolFormatError, match=r"not of other \("):
        CaptureMonitor(shared.load(shared.config("two", ["public.a"], slot="other"))).check()
    with pytest.raises(ConfigError, match=r"types\.numeric is string"):
        CaptureMonitor(shared.load(shared.config("two", ["public.a"], types={"numeric": "string"}))).check()
    CaptureMonitor(shared.load(shared.config("two", ["public.a"]))).check()


def test_a_configuration_with_embedded_capture_is_refused(shared: SharedSlot) -> None:
    _table(shared, "a")
    with pytest.raises(ConfigError, match=r"source\.process is embedded"):
        plan_capture(shared.load(shared.config("one", ["public.a"], process="embedded")))


def test_a_dropped_slot_is_not_recreated_silently(shared: SharedSlot) -> None:
    _table(shared, "a")
    path = shared.config("one", ["public.a"])
    capture = shared.start(path).wait_until_it_runs()
    shared.wait_for_spool(shared.execute("INSERT INTO a VALUES (1, 'x')"))
    assert capture.stop() == 0
    shared.database.execute("SELECT pg_drop_replication_slot(%s)", shared.slot)
    again = shared.start(path)
    assert again.wait() == 3
    assert SlotMissingError.code in again.log.read_text()
    shutil.rmtree(shared.spool)
    config = shared.load(path)
    assert plan_capture(config).tables == (TableName("public", "a"),), "no state of an earlier capture exists"
    config.sink.root.mkdir()
    EpochLog(config.sink.root, config.pipeline).record(Epoch(1, Position.of(1), None, "1/1"))
    with pytest.raises(SlotMissingError):
        plan_capture(config)
