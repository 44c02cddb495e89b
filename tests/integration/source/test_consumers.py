"""Several queries, and queries beside a separate capture: consumer names, and errors without a running
capture.
"""

from __future__ import annotations

import logging

import pytest

from penstock.errors import CaptureMissingError, ConfigError, ConsumerBusyError, SlotMissingError
from penstock.position import Position
from penstock.postgres.types.column import TypePolicy
from penstock.spark import stream
from penstock.spool.manifest import SpoolLayout
from penstock.spool.ownership import ConsumerLock, SpoolLock
from penstock.spool.retention import released_positions
from tests.support.holding import locked_elsewhere
from tests.support.source.engine import Checkpoint, LocalSource
from tests.support.waiting import wait_for


def test_second_query_of_one_consumer_is_refused_and_others_are_not(
    local: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_ENDING_SECONDS", 0.3)
    local.insert(1, 3)
    with local.run() as first:
        first.until(lambda rows: len(rows) == 3, "rows")
        before = released_positions(local.spool)
        for start in ("snapshot", "0/100", "slot"):
            with local.run(startingPosition=start) as second, pytest.raises(ConsumerBusyError) as raised:
                second.step()
            assert 'option("consumer"' in str(raised.value.hint)
        assert released_positions(local.spool).keys() == before.keys()
        other = Checkpoint()
        with local.run(other, consumer="other") as second:
            second.until(lambda rows: len(rows) == 3, "rows of the other")
    # The first query has ended: here it was stopped, in production its process may have ended.
    with local.run() as again:
        assert again.step()


def test_query_waits_for_an_earlier_run_of_it_that_is_just_ending(local: LocalSource) -> None:
    lock = ConsumerLock(local.spool, "c")
    path = SpoolLayout(local.spool).consumer_lock("c")
    path.parent.mkdir(parents=True)
    with locked_elsewhere(path), pytest.raises(ConsumerBusyError):
        lock.wait(0.1)  # a pipeline of that name
    lock.wait(0.0)
    with pytest.raises(ConsumerBusyError):
        ConsumerLock(local.spool, "c").wait(0.1)
    lock.release()
    again = ConsumerLock(local.spool, "c")
    again.wait(0.0)
    again.wait(0.0)
    again.release()


def test_query_behind_a_separate_capture_reports_that_none_runs(
    local: LocalSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    local.provision()
    checkpoint = Checkpoint()
    with local.run(checkpoint, process="separate") as run, pytest.raises(CaptureMissingError) as raised:
        run.step()
    assert "penstock capture" in str(raised.value.hint)
    with SpoolLock(local.spool), local.run(checkpoint, process="separate") as run:
        assert run.step()
    # A query that has started waits, and logs that.
    with caplog.at_level(logging.WARNING), local.run(checkpoint, process="separate") as run:
        assert not run.step()
        assert not run.step()
    assert [record.message for record in caplog.records if record.name == stream.__name__] == [
        "capture is not running"
    ]
    # But a query with an end does not wait forever.
    monkeypatch.setattr(stream, "_PATIENCE_SECONDS", 0.2)
    with (
        local.run(checkpoint, process="separate", endingPosition="FF/0") as run,
        pytest.raises(CaptureMissingError),
    ):
        run.step()


def test_numeric_that_the_capture_writes_otherwise_is_named_before_the_first_batch(
    local: LocalSource,
) -> None:
    local.insert(1, 3)
    with local.run() as first:
        first.until(lambda rows: len(rows) == 3, "rows")
        wait_for((local.spool / "capture-status.json").exists, "status of the capture")
        with local.run(consumer="other", numeric="string") as second, pytest.raises(ConfigError) as raised:
            second.step()
    assert f'option("numeric", "{TypePolicy.DEFAULT.numeric}")' in str(raised.value.hint)
    assert "other" not in released_positions(local.spool)


def test_dropped_slot_error_names_the_files_to_delete(local: LocalSource) -> None:
    """Retiring a query drops its slot; the spool may stay."""
    local.insert(1, 3)
    with local.run() as run:
        run.until(lambda rows: len(rows) == 3, "rows")
    local.wait_until_free()
    local.database.execute("SELECT pg_drop_replication_slot(%s)", local.slot)
    with local.run(startingPosition="slot") as run, pytest.raises(SlotMissingError) as raised:
        wait_for(run.step, "an error")
    assert str(local.spool) in str(raised.value.hint)
    assert local.slot in str(raised.value.hint)
    assert released_positions(local.spool)["spark-public.orders"] > Position.ZERO
