"""`SpoolCapture` against a real server: no change is lost or repeated, whatever fails: connection, slot or
spool.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.capture import slot_capture as spooling
from penstock.capture.settings import CaptureLimits
from penstock.change import LogStep, TransactionPiece
from penstock.errors import PositionGapError, SlotMissingError
from penstock.position import Position
from penstock.postgres.pgoutput.decoder import PIECE_MESSAGES, PgOutputDecoder
from penstock.postgres.pgoutput.messages import Payload
from penstock.spool.reader import SpoolReader
from penstock.spool.retention import release
from penstock.spool.status import load_status
from tests.support.fix_postgres import Database
from tests.support.fix_proxy import ProxyFactory
from tests.support.slot.source import Source, through
from tests.support.waiting import DEADLINE_SECONDS, wait_for


@pytest.fixture
def source(database: Database, tmp_path: Path) -> Source:
    return Source(database, tmp_path / "spool")


# --- trouble that time mends --------------------------------------------------------------------------------


def test_capture_resumes_after_cut_connections_with_no_row_lost_or_doubled(
    source: Source, proxy: ProxyFactory
) -> None:
    network, address = through(source, proxy)
    with source.capture(address=address) as capture:
        assert capture.wait_beyond(Position.ZERO, DEADLINE_SECONDS)
        for part in range(4):
            source.insert(part * 5000 + 1, part * 5000 + 5000)
            network.cut()
        assert capture.wait_until(source.position, DEADLINE_SECONDS), source.state()
    assert source.ids() == list(range(1, 20_001))


def test_capture_waits_for_a_busy_slot_until_it_is_free(source: Source, tmp_path: Path) -> None:
    with ExitStack() as second:
        with source.capture() as first:
            end = source.insert(1, 10)
            assert first.wait_until(end, DEADLINE_SECONDS)
            rival = source.with_spool(tmp_path / "rival")
            waiting = second.enter_context(rival.capture())
            wait_for(
                lambda: failure_code(rival.spool) == "PEN-1202",
                "a capture that waits for the slot",
                rival.state,
            )
        assert waiting.wait_until(end, DEADLINE_SECONDS), rival.state()
        assert rival.ids() == list(range(1, 11))
    ended = load_status(rival.spool)
    assert ended is not None
    assert ended.state == "stopped", "a capture that had to wait ends normally"


def failure_code(spool: Path) -> str | None:
    status = load_status(spool)
    return status.failure.code if status is not None and status.failure is not None else None


# --- trouble that it does not -------------------------------------------------------------------------------


def test_missing_slot_ends_the_capture_without_a_retry(source: Source) -> None:
    with source.capture() as capture:
        assert capture.wait_until(source.insert(1, 10), DEADLINE_SECONDS)
    wait_for(lambda: source.active_pid is None, "a free slot", lambda: source.active_pid)
    source.database.execute("SELECT pg_drop_replication_slot(%s)", source.slot)
    assert isinstance(source.failure(), SlotMissingError)
    assert source.database.query(
        "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", source.slot
    ) == [(0,)]
    assert failure_code(source.spool) == "PEN-1201"


def test_slot_ahead_of_a_consumer_and_of_the_spool_is_a_gap(source: Source) -> None:
    with source.capture() as capture:
        end = source.insert(1, 10)
        assert capture.wait_until(end, DEADLINE_SECONDS)
    release(source.spool, "pipeline", end)
    wait_for(lambda: source.active_pid is None, "a free slot", lambda: source.active_pid)
    source.insert(11, 20)
    source.database.execute(
        "SELECT pg_replication_slot_advance(%s, pg_current_wal_insert_lsn())", source.slot
    )
    assert isinstance(source.failure(), PositionGapError)
    assert source.ids() == list(range(1, 11))


# --- quiet --------------------------------------------------------------------------------------------------


def test_spool_and_slot_advance_while_only_other_tables_are_busy(source: Source) -> None:
    with source.capture() as capture:
        assert capture.wait_until(source.insert(1, 10), DEADLINE_SECONDS)
        source.database.execute("INSERT INTO public.other SELECT generate_series(1, 50000)")
        end = source.position
        assert capture.wait_until(end, DEADLINE_SECONDS), source.state()
        before = source.confirmed
        assert before < end
        release(source.spool, "pipeline", end)
        wait_for(lambda: source.confirmed >= end, f"the slot at {end}", lambda: source.confirmed)
        assert capture.wait_until(source.insert(11, 20), DEADLINE_SECONDS)
        segments = SpoolReader(source.spool).segments()
        assert len(segments) < 50, "quiet ground is sealed now and then, not at every step"


def test_slot_is_not_confirmed_while_no_consumer_has_released_anything(source: Source) -> None:
    before = source.confirmed
    with source.capture() as capture:
        assert capture.wait_until(source.insert(1, 10), DEADLINE_SECONDS)
        source.database.execute("INSERT INTO public.other SELECT generate_series(1, 1000)")
        assert capture.wait_until(source.position, DEADLINE_SECONDS)
    wait_for(lambda: source.active_pid is None, "a free slot", lambda: source.active_pid)
    assert source.confirmed == before


# --- bounds -------------------------------------------------------------------------------------------------


def test_capture_pauses_at_the_spool_limit_and_resumes_after_a_release(source: Source) -> None:
    limits = CaptureLimits(spool_bytes=200_000, segment_rows=1000, quiet_seconds=0.1)
    with source.capture(limits) as capture:
        source.insert(1, 10_000, note="x" * 100)
        wait_for(lambda: state_of(source.spool) == "full", "a full spool", source.state)
        for low in range(10_001, 50_001, 1000):
            source.insert(low, low + 999, note="x" * 100)
        assert not capture.wait_until(source.position, 1.0)
        assert capture.end is not None
        seen: list[int] = []
        done: Position | None = None
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(seen) < 50_000 and time.monotonic() < deadline:
            upto = capture.end
            seen += source.ids(done, upto)
            done = release(source.spool, "pipeline", upto)
            capture.wait_beyond(done, 1.0)
    assert seen == list(range(1, 50_001))


def state_of(spool: Path) -> str | None:
    status = load_status(spool)
    return None if status is None else status.state


def test_long_transaction_is_captured_in_bounded_pieces(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[int] = []
    carried: list[int] = []

    class WatchedDecoder(PgOutputDecoder):
        def decode(self, messages: Sequence[Payload]) -> list[LogStep]:
            steps = super().decode(messages)
            carried.append(self.carried_messages)
            pieces.extend(
                sum(batch.rows.num_rows for batch in step.batches)
                for step in steps
                if isinstance(step, TransactionPiece)
            )
            return steps

    monkeypatch.setattr(spooling, "PgOutputDecoder", WatchedDecoder)
    with source.capture() as capture:
        assert capture.wait_until(source.insert(1, 300_000), DEADLINE_SECONDS), source.state()
    assert source.ids() == list(range(1, 300_001))
    assert len(pieces) >= 300_000 // PIECE_MESSAGES
    assert max(pieces) <= PIECE_MESSAGES
    assert max(carried) <= 50_000
    assert sum(1 for segment in SpoolReader(source.spool).segments() if segment.rows) == 1


# --- the end ------------------------------------------------------------------------------------------------


def test_stop_releases_the_slot_and_the_lock_at_once(source: Source) -> None:
    with source.capture() as capture:
        assert capture.wait_until(source.insert(1, 10), DEADLINE_SECONDS)
        assert source.active_pid is not None
        started = time.monotonic()
        capture.stop()
        assert "penstock-capture" not in {thread.name for thread in threading.enumerate()}
        wait_for(lambda: source.active_pid is None, "a free slot", lambda: source.active_pid)
        assert time.monotonic() - started < 3.0
    with source.capture() as again:
        assert again.wait_until(source.insert(11, 20), DEADLINE_SECONDS)
    assert source.ids() == list(range(1, 21))


def test_stop_wakes_who_waits(source: Source) -> None:
    with source.capture() as capture:
        assert capture.wait_until(source.insert(1, 1), DEADLINE_SECONDS)
        answers: list[bool] = []
        waiting = threading.Thread(
            target=lambda: answers.append(capture.wait_until(Position.of((1 << 64) - 1), DEADLINE_SECONDS))
        )
        waiting.start()
        capture.stop()
        waiting.join(timeout=5.0)
    assert answers == [False]
