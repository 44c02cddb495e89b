"""A server that has no room for a slot or its reader, or that has given the slot up: named with the setting, never passed over."""

from __future__ import annotations

import time
from contextlib import ExitStack

import psycopg
import pytest

from penstock.capture.settings import CaptureLimits
from penstock.capture.spooling import SpoolCapture
from penstock.errors import PenstockError
from penstock.position import Position
from penstock.spool.consumers import release
from penstock.spool.reader import SpoolReader
from tests.integration.slot.conftest import RoughServer
from tests.integration.slot.source import BEYOND, COPY_ANEW, QUICK, Source
from tests.waiting import DEADLINE_SECONDS, wait_for

# --- no room (L13) ---------------------------------------------------------------------------------------------------------------------


def test_L13_a_server_without_room_for_a_slot_is_named_with_the_setting(rough: RoughServer, rough_source: Source) -> None:
    source = rough_source
    source.database.query("SELECT pg_drop_replication_slot(%s)", source.slot)
    for number in range(rough.SLOTS):
        source.database.query("SELECT pg_create_physical_replication_slot(%s)", f"taken_{number}")
    error = source.failure()
    assert error.code == "PEN-1213"
    assert error.message.startswith(f"creating slot {source.slot}: all replication slots are in use")
    assert error.hint is not None
    assert error.hint.endswith("or ALTER SYSTEM SET max_replication_slots to more; then restart the server")
    source.database.query("SELECT pg_drop_replication_slot('taken_0')")
    with source.capture() as capture:
        assert capture.wait_beyond(Position.ZERO, DEADLINE_SECONDS), source.state()
        assert capture.wait_until(source.insert(1, 10), DEADLINE_SECONDS), source.state()
    assert source.ids() == list(range(1, 11))


def test_L13_a_server_without_a_free_sender_is_tried_again_and_named_with_the_setting(rough: RoughServer, rough_source: Source) -> None:
    source = rough_source
    source.insert(1, 5)
    with ExitStack() as readers:
        for _ in range(rough.SENDERS):
            readers.enter_context(psycopg.connect(source.database.dsn, replication="database", autocommit=True))
        with source.capture(QUICK) as capture:
            failure = source.trouble("PEN-1214")
            assert f"exceeds max_wal_senders (currently {rough.SENDERS})" in failure.message.replace('"', "")
            assert failure.hint is not None
            assert failure.hint.endswith("or ALTER SYSTEM SET max_wal_senders to more; then restart the server")
            readers.close()
            assert capture.wait_until(source.insert(6, 10), DEADLINE_SECONDS), source.state()
    assert source.ids() == list(range(1, 11))


# --- invalidated (L06, L07) ------------------------------------------------------------------------------------------------------------


@pytest.mark.versions(14, 16, 18)
def test_L06_L07_a_slot_whose_log_was_removed_is_given_up_with_the_reason(rough: RoughServer, rough_source: Source) -> None:
    source = rough_source
    end = source.capture_all(1, 10)
    release(source.spool, "pipeline", end)
    rough.set(max_slot_wal_keep_size="16MB")
    confirmed = source.confirmed
    source.insert(11, 20)
    rough.fill_log(6)
    error = source.failure()
    # Postgres 16 has a column for invalidated slots, and the reason only since 17.
    assert str(error) == invalidated(source, UNKNOWN if rough.postgres.version == 16 else REMOVED, confirmed)
    assert source.failure().code == "PEN-1204", "it persists"
    assert source.ids() == list(range(1, 11))
    assert source.confirmed == confirmed


@pytest.mark.versions(18)
def test_L06_a_slot_that_nobody_read_for_too_long_is_given_up_with_the_reason(rough: RoughServer, rough_source: Source) -> None:
    source = rough_source
    source.capture_all(1, 10)
    confirmed = source.confirmed
    rough.set(idle_replication_slot_timeout="1s")
    wait_for(lambda: _is_invalidated(rough, source), "an invalidated slot", lambda: None)
    error = source.failure()
    assert str(error) == invalidated(source, "idle_timeout): nobody read it for longer than idle_replication_slot_timeout", confirmed)
    assert source.ids() == list(range(1, 11))
    assert source.confirmed == confirmed


def _is_invalidated(rough: RoughServer, source: Source) -> bool:
    rough.fill_log(1)
    return source.database.query("SELECT invalidation_reason FROM pg_replication_slots WHERE slot_name = %s", source.slot) == [
        ("idle_timeout",)
    ]


def test_L07_a_slot_invalidated_under_a_running_capture_ends_it_at_the_next_start(rough: RoughServer, rough_source: Source) -> None:
    """The server ends the walsender of a slot that it gives up; what follows is the same as at a start, and not a retry for ever."""
    source = rough_source
    limits = CaptureLimits(spool_bytes=50_000, segment_rows=100, buffer_bytes=50_000, quiet_seconds=0.1)
    with source.capture(limits) as capture:
        for low in range(1, 5001, 500):
            source.insert(low, low + 499, note="x" * 200)
        wait_for(lambda: source.status is not None and source.status.state == "full", "a full spool", source.state)
        rough.set(max_slot_wal_keep_size="16MB")
        rough.fill_log(6)
        source.insert(5001, 5010)
        taken: list[int] = []
        with pytest.raises(PenstockError) as caught:
            drain(source, capture, taken)
    assert str(caught.value) == invalidated(source, REMOVED, source.confirmed)
    assert 0 < len(taken) <= 5000, "what came after is gone with the slot"
    assert taken == list(range(1, len(taken) + 1)), "and what came before is without a hole"


def drain(source: Source, capture: SpoolCapture, taken: list[int]) -> None:
    """Read and release what is sealed, for as long as something comes."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    done = SpoolReader(source.spool).start
    while time.monotonic() < deadline:
        end = capture.end or Position.ZERO
        if done is not None and end > done:
            taken += source.ids(after=done, upto=end)
            done = release(source.spool, "pipeline", end)
        capture.wait_until(BEYOND, 0.2)


REMOVED = "wal_removed): WAL that was still needed has been removed, since the slot held back more than max_slot_wal_keep_size"
UNKNOWN = "conflicting): WAL or catalog rows that were still needed are gone; this version of Postgres does not say which"


def invalidated(source: Source, reason: str, confirmed: Position) -> str:
    return (
        f"PEN-1204: the server has invalidated slot {source.slot} ({reason}; what committed after {confirmed} cannot be had any more\n"
        f"  fix: SELECT pg_drop_replication_slot('{source.slot}'); then {COPY_ANEW}"
    )
