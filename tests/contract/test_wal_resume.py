"""Where a `WalCapture` resumes: from the slot, after the process, connection, spool or slot was lost."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import subprocess
import sys
import threading
import tracemalloc
from contextlib import closing
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from penstock.capture.wal import WalCapture
from penstock.contracts.capture import ChangeStream, Event, Truncate
from penstock.errors import (
    ConnectionLostError,
    PenstockError,
    PositionGapError,
    PublicationError,
    SlotMissingError,
)
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.schema import TableName
from penstock.secret import Secret
from penstock.spool.retention import released_by_all
from penstock.testing.capture_conformance import check_next, deliver_three, upsert
from penstock.testing.streams import Background, check_same, take, wait_for
from tests.support.contract.wal_harness import WalHarness, wal_harness
from tests.support.fix_postgres import Database


def error_of(stream: ChangeStream, wal: WalHarness) -> PenstockError:
    with pytest.raises(PenstockError) as raised:
        Background(lambda: next(stream)).result(wal.deadline_seconds, "an error")
    return raised.value


# --- the slot is the resume point ---------------------------------------------------------------------------


def test_slot_moves_with_the_confirmed_position_while_no_change_is_requested(wal: WalHarness) -> None:
    with closing(wal.capture().live()) as stream:
        for each in range(3):
            wal.commit(upsert(wal.table, each, "x"), upsert(wal.other, each, "x"))
        changes = take(stream, 6, wal.deadline_seconds)
        before = wal.confirmed
        for change in (*changes[:3], *changes[4:]):
            change.ack.confirm()
        first, second = (
            change.commit.position for change in (changes[0], changes[2]) if change.commit is not None
        )
        wait_for(
            lambda: wal.confirmed >= first,
            f"the slot at {first}",
            lambda: wal.confirmed,
            wal.deadline_seconds,
        )
        assert before < first <= wal.confirmed < second, "half of the second transaction is unconfirmed"
        changes[3].ack.confirm()
        wait_for(
            lambda: wal.confirmed > second,
            f"the slot past {second}",
            lambda: wal.confirmed,
            wal.deadline_seconds,
        )


def test_capture_resumes_from_the_slot_when_the_spool_is_lost(wal: WalHarness) -> None:
    events = deliver_three(wal, confirm=lambda changes: changes[0].ack.confirm())
    shutil.rmtree(wal.settings.spool)
    check_next(wal, events[1:], "the slot knows what was confirmed")


def test_unconfirmed_changes_come_again_after_a_crash(wal: WalHarness) -> None:
    wal.capture().live().close()
    events: list[Event] = [upsert(wal.table, each, "x") for each in range(4)]
    for event in events:
        wal.commit(event)
    program = f"""
import os, time
from pathlib import Path
from penstock.capture.settings import CaptureSettings
from penstock.capture.wal import WalCapture
from penstock.position import Position
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.slot import inspect_slot
settings = CaptureSettings(
    SourceAddress.parse({wal.database.dsn!r}), {wal.settings.slot!r}, {wal.settings.publication!r},
    Path({str(wal.settings.spool)!r}),
)
stream = WalCapture(settings).live()
changes = [next(stream) for _ in range(4)]
for at in (0, 1, 3):
    changes[at].ack.confirm()
with connect(settings.address) as connection:
    while inspect_slot(connection, settings.slot).confirmed < changes[1].commit.position:
        time.sleep(0.02)
os._exit(9)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert (
        subprocess.run([sys.executable, "-c", program], check=False, env=environment, timeout=60).returncode
        == 9
    )
    check_next(wal, events[2:], "the third was not confirmed")


@pytest.mark.versions(14, 15, 16, 17)
def test_stream_snapshot_and_lag_on_every_version(database: Database, tmp_path: Path) -> None:
    with wal_harness(database, tmp_path) as wal:
        assert wal.capture().lag() is None
        events: list[Event] = [upsert(wal.table, 1, "x"), Truncate(wal.table), upsert(wal.table, 2, "y")]
        with closing(wal.capture().live()) as stream:
            for event in events:
                wal.commit(event)
            changes = take(stream, 3, wal.deadline_seconds)
            check_same(changes, events, "every change once, in order")
            changes[0].ack.confirm()
        check_next(wal, events[1:], "the first was confirmed")
        check_same(list(wal.capture().snapshot([wal.table])), events[2:], "the rows of now")
        # No reader uses the slot now. The flushed position may be slightly behind the written one.
        least = behind(wal, "pg_current_wal_flush_lsn()")
        lag = wal.capture().lag()
        assert lag is not None
        assert 0 < least <= lag <= behind(wal, "pg_current_wal_lsn()")


def behind(wal: WalHarness, server: str) -> int:
    """The lag in bytes, as the server computes it."""
    distance = (
        f"SELECT pg_wal_lsn_diff({server}, confirmed_flush_lsn)::bigint FROM pg_replication_slots "
        "WHERE slot_name = %s"
    )
    return int(wal.database.query(distance, wal.settings.slot)[0][0])


def test_stream_continues_after_a_lost_connection(wal: WalHarness) -> None:
    with closing(wal.capture().live()) as stream:
        wal.commit(upsert(wal.table, 1, "x"))
        take(stream, 1, wal.deadline_seconds)
        ended = (
            "SELECT count(pg_terminate_backend(active_pid)) FROM pg_replication_slots "
            "WHERE slot_name = %s AND active"
        )
        assert wal.database.query(ended, wal.settings.slot) == [(1,)]
        wal.commit(upsert(wal.table, 2, "x"))
        check_same(take(stream, 1, wal.deadline_seconds), [upsert(wal.table, 2, "x")], "each change once")


def test_dropped_slot_is_not_recreated(wal: WalHarness) -> None:
    deliver_three(wal, confirm=lambda _: None)
    wal.drop_slot()
    error = error_of(wal.capture().live(), wal)
    assert isinstance(error, SlotMissingError)
    assert (
        error.message == f"slot {wal.settings.slot} no longer exists: commits since it was last read are lost"
    )
    assert (error.hint or "").endswith(
        "for a WalCapture, drop the slot if it exists, remove the spool, and take a new snapshot"
    )
    assert not wal.has_slot


def test_slot_that_others_moved_is_a_gap(wal: WalHarness) -> None:
    deliver_three(wal, confirm=lambda _: None)
    shutil.rmtree(wal.settings.spool / "segments")
    before = released_by_all(wal.settings.spool) or Position.ZERO
    wal.await_free_slot()
    wal.database.execute(
        "SELECT pg_replication_slot_advance(%s, pg_current_wal_insert_lsn())", wal.settings.slot
    )
    confirmed = wal.confirmed
    error = error_of(wal.capture().live(), wal)
    assert isinstance(error, PositionGapError)
    assert error.message == (
        f"slot {wal.settings.slot} begins at {confirmed}, but its readers have only the commits up to "
        f"{before}: "
        f"the {confirmed - before} bytes of WAL in between can no longer be read"
    )
    assert (error.hint or "").endswith(
        "for a WalCapture, drop the slot if it exists, remove the spool, and take a new snapshot"
    )
    assert wal.confirmed == confirmed


def test_failed_stream_has_released_its_resources_and_stays_ended(wal: WalHarness) -> None:
    deliver_three(wal, confirm=lambda _: None)
    wal.drop_slot()
    stream = wal.capture().live()
    error_of(stream, wal)
    wait_for(
        lambda: wal.open_resources() == ([], []), "nothing open", wal.open_resources, wal.deadline_seconds
    )
    assert next(stream, None) is None


# --- streams ------------------------------------------------------------------------------------------------


def test_close_from_another_thread_ends_a_next_that_waits(wal: WalHarness) -> None:
    stream = wal.capture().live()
    waiting = Background(lambda: next(stream, None))
    wait_for(
        lambda: "penstock-receive" in str(wal.open_resources()),
        "a running stream",
        wal.open_resources,
        wal.deadline_seconds,
    )
    threading.Thread(target=stream.close).start()
    assert waiting.result(wal.deadline_seconds, "the end") is None


def test_every_close_returns_only_when_the_stream_has_released_its_resources(wal: WalHarness) -> None:
    stream = wal.capture().live()
    wait_for(
        lambda: "penstock-receive" in str(wal.open_resources()),
        "a running stream",
        wal.open_resources,
        wal.deadline_seconds,
    )
    together = threading.Barrier(4)

    def close() -> set[str]:
        together.wait(wal.deadline_seconds)
        stream.close()
        return {thread.name for thread in threading.enumerate()} & {
            "penstock-capture",
            "penstock-receive",
            "penstock-release",
        }

    closing_threads = [Background(close) for _ in range(4)]
    assert [each.result(wal.deadline_seconds, "the end of close") for each in closing_threads] == [set()] * 4


def test_second_stream_waits_until_the_first_is_closed_and_resumes_where_it_ended(wal: WalHarness) -> None:
    with closing(wal.capture().live()) as first:
        wal.commit(upsert(wal.table, 1, "x"))
        (change,) = take(first, 1, wal.deadline_seconds)
        with closing(wal.capture().live()) as second:
            waiting = Background(lambda: next(second))
            change.ack.confirm()
            wal.commit(upsert(wal.table, 2, "x"))
            take(first, 1, wal.deadline_seconds)[0].ack.confirm()
            first.close()
            wal.commit(upsert(wal.table, 3, "x"))
            check_same(
                [waiting.result(wal.deadline_seconds, "a change")],
                [upsert(wal.table, 3, "x")],
                "the first stream has confirmed the others",
            )


def test_unconfirmed_backlog_takes_little_memory(wal: WalHarness) -> None:
    with closing(wal.capture().live()) as stream:
        wal.database.execute(
            f"INSERT INTO {wal.table} SELECT i, repeat('x', 1000) FROM generate_series(1, 15000) i"
        )
        take(stream, 1, wal.deadline_seconds)
        tracemalloc.start()
        try:
            for _ in range(14_999):
                next(stream)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < 4 << 20


def test_capture_is_a_value(wal: WalHarness) -> None:
    plain = WalCapture(wal.settings)
    managed = plain.with_publication_management({wal.table}, manage=True)
    assert (plain.required, managed.required, managed.manage) == (None, frozenset({wal.table}), True)
    assert managed == replace(plain, required=frozenset({wal.table}), manage=True)
    with pytest.raises(FrozenInstanceError):
        plain.manage = True  # type: ignore[misc]
    secret = replace(
        managed,
        settings=replace(wal.settings, address=SourceAddress(wal.settings.address.dsn, Secret("hush"))),
    )
    assert pickle.loads(pickle.dumps(secret)) == copy.copy(secret) == secret
    assert "hush" not in repr(secret)


def test_server_that_cannot_be_reached_is_raised_by_live_itself(wal: WalHarness) -> None:
    settings = replace(
        wal.settings, address=wal.settings.address.with_parameters({"host": "127.0.0.1", "port": "1"})
    )
    with pytest.raises(ConnectionLostError):
        WalCapture(settings).live()


# --- the publication ----------------------------------------------------------------------------------------


def test_no_slot_is_made_while_there_is_no_publication(wal: WalHarness) -> None:
    with pytest.raises(PublicationError, match="does not exist"):
        WalCapture(wal.settings).live()
    with pytest.raises(PublicationError, match="does not exist") as raised:
        WalCapture(wal.settings).with_publication_management({wal.table}, manage=False).live()
    assert not wal.has_slot
    assert not Path(wal.settings.spool).exists()
    statement, _, alternative = (raised.value.hint or "").partition(" or ")
    assert alternative.startswith("pass manage=True to with_publication_management")
    wal.database.execute(statement)
    assert WalCapture(wal.settings).inspect_coverage({wal.table}).satisfied


def test_publication_is_made_before_the_slot_and_extended_later(wal: WalHarness) -> None:
    published = "SELECT tablename FROM pg_publication_tables WHERE pubname = %s ORDER BY 1"
    WalCapture(replace(wal.settings, tables=(wal.table,))).live().close()
    assert wal.database.query(published, wal.settings.publication) == [(wal.table.name,)]
    published_at = wal.database.query(
        "SELECT xmin::text::bigint FROM pg_publication WHERE pubname = %s", wal.settings.publication
    )
    slot_at = wal.database.query(
        "SELECT catalog_xmin::text::bigint FROM pg_replication_slots WHERE slot_name = %s", wal.settings.slot
    )
    assert published_at < slot_at
    with closing(wal.capture().live()) as stream:
        assert len(wal.database.query(published, wal.settings.publication)) == 2
        wal.commit(upsert(wal.other, 1, "x"))
        check_same(
            take(stream, 1, wal.deadline_seconds), [upsert(wal.other, 1, "x")], "a table that came later"
        )


def test_tables_that_can_be_published_are_streamed_although_another_cannot(
    wal: WalHarness, caplog: pytest.LogCaptureFixture
) -> None:
    required = {wal.table, wal.other, TableName("public", "absent")}
    capture = WalCapture(wal.settings).with_publication_management(required, manage=True)
    with closing(capture.live()) as stream:
        wal.commit(upsert(wal.other, 1, "x"))
        check_same(
            take(stream, 1, wal.deadline_seconds),
            [upsert(wal.other, 1, "x")],
            "published tables are streamed",
        )
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.getMessage() == (
        "not every required table is captured; blocked by: there is no table public.absent in the source "
        "(check the name, which is case-sensitive)"
    )
    assert vars(warning)["missing"] == ["public.absent"]


@pytest.mark.parametrize(
    ("required", "hint"),
    [
        (
            {TableName("public", "absent")},
            (
                "blocked by: there is no table public.absent in the source "
                "(check the name, which is case-sensitive)"
            ),
        ),
        (set(), "{create} or name its tables in with_publication_management, so that the capture creates it"),
        (
            None,
            (
                "{create} or call with_publication_management(tables, manage=True), "
                "so that the capture creates it"
            ),
        ),
    ],
)
def test_hint_for_a_missing_publication_fits_a_capture_that_manages_it(
    wal: WalHarness, required: set[TableName] | None, hint: str
) -> None:
    capture = WalCapture(wal.settings)
    if required is not None:
        capture = capture.with_publication_management(required, manage=True)
    with pytest.raises(PublicationError, match="does not exist") as raised:
        capture.live()
    create = f'CREATE PUBLICATION "{wal.settings.publication}" FOR TABLE …;'
    assert raised.value.hint == hint.format(create=create)
    assert not wal.has_slot


def test_table_that_is_not_published_and_not_managed_is_warned_of_with_the_sql(
    wal: WalHarness, caplog: pytest.LogCaptureFixture
) -> None:
    wal.database.execute(f"CREATE PUBLICATION {wal.settings.publication} FOR TABLE {wal.table}")
    capture = WalCapture(wal.settings).with_publication_management({wal.table, wal.other}, manage=False)
    with closing(capture.live()) as stream:
        wal.commit(upsert(wal.other, 1, "x"), upsert(wal.table, 1, "x"))
        check_same(
            take(stream, 1, wal.deadline_seconds),
            [upsert(wal.table, 1, "x")],
            "published tables are streamed",
        )
    (record,) = [record for record in caplog.records if "run:" in record.getMessage()]
    statement = record.getMessage().partition("run: ")[2]
    wal.database.execute(statement)
    assert capture.inspect_coverage({wal.table, wal.other}).satisfied
