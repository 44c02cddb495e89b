"""Source health in the status of a capture: three lags, and which consumer holds the slot back."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psycopg
import pytest

from penstock.capture.settings import CaptureLimits
from penstock.lag import CaptureLag
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.postgres.snapshot_export import export_snapshot
from tests.support.fix_postgres import Database
from tests.support.slot.scratch_server import ScratchServer
from tests.support.slot.source import BEYOND, Source
from tests.support.waiting import DEADLINE_SECONDS, wait_for

WATCHFUL = CaptureLimits(quiet_seconds=0.1, watch_seconds=0.1, long_transaction_seconds=0.3)


def lag_of(source: Source) -> CaptureLag | None:
    return source.status.lag if source.status is not None else None


def wait_for_lag(source: Source, what: str, **wanted: object) -> CaptureLag:
    def is_there() -> bool:
        lag = lag_of(source)
        return lag is not None and all(getattr(lag, name) == value for name, value in wanted.items())

    wait_for(is_there, what, source.state)
    lag = lag_of(source)
    assert lag is not None
    return lag


def test_H06_lag_is_reported_in_bytes_in_seconds_and_in_retained_log(
    scratch_server: ScratchServer, scratch_source: Source
) -> None:
    source = scratch_source
    scratch_server.set(max_slot_wal_keep_size="256MB")
    with source.capture(
        CaptureLimits(spool_bytes=50_000, segment_rows=100, quiet_seconds=0.1, watch_seconds=0.1)
    ) as capture:
        end = source.insert(1, 10)
        assert capture.wait_until(end, DEADLINE_SECONDS)
        level = wait_for_lag(source, "a capture that is level", behind_bytes=0, behind_seconds=0.0)
        assert level.safe_wal_bytes is not None
        assert level.safe_wal_bytes > 200_000_000
        assert level.wal_status == "reserved"
        assert level.warnings == ()
        # No consumer releases anything: the spool fills, receiving pauses, and the source continues.
        for low in range(11, 20_011, 1000):
            source.insert(low, low + 999, note="x" * 200)
        wait_for(
            lambda: source.status is not None and source.status.state == "full", "a full spool", source.state
        )
        scratch_server.fill_log(8)
        wait_for(
            lambda: (lag := lag_of(source)) is not None and lag.wal_status == "extended",
            "more log than is usual",
            source.state,
        )
        behind = lag_of(source)
        assert behind is not None
        assert behind.behind_bytes > 64 << 20
        assert behind.retained_bytes is not None
        assert behind.retained_bytes >= behind.behind_bytes
        assert behind.behind_seconds is not None
        assert 0 < behind.behind_seconds < 120
        assert behind.safe_wal_bytes is not None
        assert behind.safe_wal_bytes < level.safe_wal_bytes - (64 << 20)
        assert behind.warnings[0].startswith(
            "wal_status is extended: the slot keeps more WAL than max_wal_size; "
        )
        assert source.status is not None
        assert source.status.failure is None, "a warning is not an error"


@pytest.mark.versions(14, 15, 16, 17, 18)
def test_H06_every_version_reports_the_state_of_the_slot(source: Source) -> None:
    with source.capture(WATCHFUL) as capture:
        assert capture.wait_until(source.insert(1, 10), DEADLINE_SECONDS)
        lag = wait_for_lag(source, "a capture that is level", behind_bytes=0, behind_seconds=0.0)
        assert (lag.wal_status, lag.warnings) == ("reserved", ())
        assert lag.retained_bytes is not None
        assert lag.catalog_xmin_age is not None


def test_H07_open_transactions_that_hold_the_slot_back_are_named(scratch_source: Source) -> None:
    source = scratch_source
    with (
        source.capture(WATCHFUL),
        psycopg.connect(source.database.dsn, application_name="nightly report") as session,
    ):
        session.execute("INSERT INTO public.other VALUES (1)")
        pid = session.info.backend_pid
        wait_for(
            lambda: (lag := lag_of(source)) is not None and len(lag.holders) == 1,
            "the transaction that is open",
            source.state,
        )
        lag = lag_of(source)
        assert lag is not None
        (holder,) = lag.holders
        assert (holder.pid, holder.name, holder.database, holder.state) == (
            pid,
            "nightly report",
            source.database.name,
            "idle in transaction",
        )
        assert holder.age_seconds is not None
        assert holder.age_seconds >= 0.3
        assert lag.warnings[0].startswith(
            f"held up by process {pid} (nightly report) in {source.database.name}, open for "
        )
        assert lag.oldest_xmin_age is not None
        assert lag.catalog_xmin_age is not None
        session.execute("PREPARE TRANSACTION 'left behind'")
        session.autocommit = True
        try:
            wait_for(
                lambda: (lag := lag_of(source)) is not None and [each.pid for each in lag.holders] == [None],
                "the prepared one",
                source.state,
            )
            lag = lag_of(source)
            assert lag is not None
            assert lag.warnings[0].startswith(
                f"held up by prepared transaction 'left behind' in {source.database.name}, open for "
            )
        finally:
            session.execute("ROLLBACK PREPARED 'left behind'")
        wait_for_lag(source, "no holder any more", holders=())


def test_H07_a_slot_that_cannot_be_created_yet_says_for_whom_it_waits(
    database: Database, tmp_path: Path
) -> None:
    source = Source(database, tmp_path / "spool", provisioned=False)
    with psycopg.connect(database.dsn, application_name="migration") as session:
        session.execute("INSERT INTO public.other VALUES (1)")
        pid = session.info.backend_pid
        with source.capture(WATCHFUL) as capture:
            wait_for(
                lambda: source.status is not None and len(source.status.waits_for) > 0,
                "a word about the wait",
                source.state,
            )
            assert source.status is not None
            assert source.status.state == "creating slot"
            (blocker,) = source.status.waits_for
            assert (blocker.pid, blocker.name) == (pid, "migration")
            assert blocker.describe().startswith(f"process {pid} (migration) in {database.name}, open for ")
            session.commit()
            assert capture.wait_beyond(Position.ZERO, DEADLINE_SECONDS)
            assert capture.wait_until(source.insert(1, 10), DEADLINE_SECONDS), source.state()
    assert source.ids() == list(range(1, 11))


def test_H07_a_capture_that_waits_for_its_slot_can_be_stopped_and_leaves_none_behind(
    database: Database, tmp_path: Path
) -> None:
    source = Source(database, tmp_path / "spool", provisioned=False)
    with psycopg.connect(database.dsn) as session:
        session.execute("INSERT INTO public.other VALUES (1)")
        with source.capture(WATCHFUL) as capture:
            wait_for(
                lambda: source.status is not None and len(source.status.waits_for) > 0,
                "a word about the wait",
                source.state,
            )
            started = time.monotonic()
            capture.stop()
            assert time.monotonic() - started < 5
        assert source.status is not None
        assert source.status.state == "stopped"
        wait_for(
            lambda: (
                database.query("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", source.slot) == []
            ),
            "no slot",
            source.state,
        )
    assert not capture.wait_until(BEYOND, 0)


def test_H07_a_snapshot_that_waits_says_for_whom(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    database.execute("CREATE TABLE public.other (id bigint)")
    taken: list[Position] = []

    def take() -> None:
        with export_snapshot(SourceAddress.parse(database.dsn)) as snapshot:
            taken.append(snapshot.fence)

    with psycopg.connect(database.dsn) as session:
        session.execute("INSERT INTO public.other VALUES (1)")
        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        wait_for(lambda: len(caplog.records) > 0, "a word about the wait", lambda: caplog.records)
        assert caplog.records[0].message == "waiting for open transactions"
        assert f"process {session.info.backend_pid} " in str(vars(caplog.records[0])["transactions"])
        assert taken == []
        session.commit()
    thread.join(timeout=DEADLINE_SECONDS)
    assert len(taken) == 1
