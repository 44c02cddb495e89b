"""A server without room for a slot or a walsender, or that has invalidated the slot: the error names the
setting.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import psycopg
import pytest

from penstock.capture.settings import CaptureLimits
from penstock.capture.slot_capture import SpoolCapture
from penstock.errors import PenstockError
from penstock.position import Position
from penstock.spool.reader import SpoolReader
from penstock.spool.retention import release
from tests.support.slot.scratch_server import ScratchServer
from tests.support.slot.source import BEYOND, COPY_AGAIN, QUICK, Source
from tests.support.waiting import DEADLINE_SECONDS, wait_for

# --- no room (L13) ------------------------------------------------------------------------------------------


def test_L13_a_server_without_room_for_a_slot_is_named_with_the_setting(
    scratch_server: ScratchServer, scratch_source: Source
) -> None:
    source = scratch_source
    source.database.query("SELECT pg_drop_replication_slot(%s)", source.slot)
    for number in range(scratch_server.SLOTS):
        source.database.query("SELECT pg_create_physical_replication_slot(%s)", f"taken_{number}")
    error = source.failure()
    assert error.code == "PEN-1213"
    assert error.message.startswith(f"creating slot {source.slot}: all replication slots are in use")
    assert error.hint is not None
    assert error.hint.endswith(
        "or raise the limit with ALTER SYSTEM SET max_replication_slots = … and restart the server"
    )
    source.database.query("SELECT pg_drop_replication_slot('taken_0')")
    with source.capture() as capture:
        assert capture.wait_beyond(Position.ZERO, DEADLINE_SECONDS), source.state()
        assert capture.wait_until(source.insert(1, 10), DEADLINE_SECONDS), source.state()
    assert source.ids() == list(range(1, 11))


def test_L13_a_server_without_a_free_sender_is_tried_again_and_named_with_the_setting(
    scratch_server: ScratchServer, scratch_source: Source
) -> None:
    source = scratch_source
    source.insert(1, 5)
    with ExitStack() as readers:
        for _ in range(scratch_server.SENDERS):
            readers.enter_context(
                psycopg.connect(source.database.dsn, replication="database", autocommit=True)
            )
        with source.capture(QUICK) as capture:
            failure = source.trouble("PEN-1214")
            assert f"exceeds max_wal_senders (currently {scratch_server.SENDERS})" in failure.message.replace(
                '"', ""
            )
            assert failure.hint is not None
            assert failure.hint.endswith(
                "or raise the limit with ALTER SYSTEM SET max_wal_senders = … and restart the server"
            )
            readers.close()
            assert capture.wait_until(source.insert(6, 10), DEADLINE_SECONDS), source.state()
    assert source.ids() == list(range(1, 11))


# --- invalidated (L06, L07) ---------------------------------------------------------------------------------


@pytest.mark.versions(14, 16, 18)
def test_L06_L07_a_slot_whose_log_was_removed_is_given_up_with_the_reason(
    scratch_server: ScratchServer, scratch_source: Source
) -> None:
    source = scratch_source
    end = source.capture_all(1, 10)
    release(source.spool, "pipeline", end)
    scratch_server.set(max_slot_wal_keep_size="16MB")
    confirmed = source.confirmed
    source.insert(11, 20)
    scratch_server.fill_log(6)
    error = source.failure()
    # Postgres 16 has a column for invalidated slots, and the reason only since 17.
    assert str(error) == invalidated(
        source, UNKNOWN if scratch_server.postgres.version == 16 else REMOVED, confirmed
    )
    assert source.failure().code == "PEN-1204", "it persists"
    assert source.ids() == list(range(1, 11))
    assert source.confirmed == confirmed


@pytest.mark.versions(18)
def test_L06_a_slot_invalidated_after_its_idle_timeout_is_reported_with_the_reason(
    scratch_server: ScratchServer, scratch_source: Source
) -> None:
    source = scratch_source
    source.capture_all(1, 10)
    confirmed = source.confirmed
    scratch_server.set(idle_replication_slot_timeout="1s")
    wait_for(lambda: _is_invalidated(scratch_server, source), "an invalidated slot", lambda: None)
    error = source.failure()
    assert str(error) == invalidated(
        source, "idle_timeout): it was not read for longer than idle_replication_slot_timeout", confirmed
    )
    assert source.ids() == list(range(1, 11))
    assert source.confirmed == confirmed


def _is_invalidated(scratch_server: ScratchServer, source: Source) -> bool:
    scratch_server.fill_log(1)
    return source.database.query(
        "SELECT invalidation_reason FROM pg_replication_slots WHERE slot_name = %s", source.slot
    ) == [("idle_timeout",)]


def test_L07_a_slot_invalidated_under_a_running_capture_ends_it_at_the_next_start(
    scratch_server: ScratchServer, scratch_source: Source
) -> None:
    """The server ends the walsender of an invalidated slot; the error is the same as at a start, without
    endless retries.
    """
    source = scratch_source
    limits = CaptureLimits(spool_bytes=50_000, segment_rows=100, buffer_bytes=50_000, quiet_seconds=0.1)
    with source.capture(limits) as capture:
        for low in range(1, 5001, 500):
            source.insert(low, low + 499, note="x" * 200)
        wait_for(
            lambda: source.status is not None and source.status.state == "full", "a full spool", source.state
        )
        scratch_server.set(max_slot_wal_keep_size="16MB")
        scratch_server.fill_log(6)
        source.insert(5001, 5010)
        taken: list[int] = []
        with pytest.raises(PenstockError) as caught:
            drain(source, capture, taken)
    assert str(caught.value) == invalidated(source, REMOVED, source.confirmed)
    assert 0 < len(taken) <= 5000, "later changes are lost with the slot"
    assert taken == list(range(1, len(taken) + 1)), "and earlier changes have no hole"


def drain(source: Source, capture: SpoolCapture, taken: list[int]) -> None:
    """Read and release sealed segments while there are any."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    done = SpoolReader(source.spool).start
    while time.monotonic() < deadline:
        end = capture.end or Position.ZERO
        if done is not None and end > done:
            taken += source.ids(after=done, upto=end)
            done = release(source.spool, "pipeline", end)
        capture.wait_until(BEYOND, 0.2)


REMOVED = (
    "wal_removed): WAL that was still needed has been removed, since the slot held back more than "
    "max_slot_wal_keep_size"
)
UNKNOWN = (
    "conflicting): WAL or catalog rows that were still needed have been removed; this version of "
    "Postgres does not report which"
)


def invalidated(source: Source, reason: str, confirmed: Position) -> str:
    return (
        f"PEN-1204: the server has invalidated slot {source.slot} ({reason}; transactions that "
        f"committed after {confirmed} can no longer be read\n"
        f"  fix: SELECT pg_drop_replication_slot('{source.slot}'); then {COPY_AGAIN}"
    )
