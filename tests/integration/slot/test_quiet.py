"""An idle database, or one that is busy with other tables, still lets the server remove WAL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from penstock.capture.slot_capture import SpoolCapture
from penstock.position import Position
from penstock.spool.reader import SpoolReader
from penstock.spool.retention import release
from tests.support.fix_postgres import PostgresServer
from tests.support.slot.source import BEYOND, Source
from tests.support.waiting import DEADLINE_SECONDS, wait_for


@contextmanager
def consumed(source: Source) -> Iterator[SpoolCapture]:
    """A capture with a consumer that releases everything at once."""
    done = threading.Event()
    with source.capture() as capture:

        def consume() -> None:
            reached = Position.ZERO
            while not done.is_set():
                if capture.wait_beyond(reached, 0.1) and capture.end is not None:
                    reached = release(source.spool, "pipeline", capture.end)

        consumer = threading.Thread(target=consume, name="consumer", daemon=True)
        consumer.start()
        try:
            yield capture
        finally:
            done.set()
            consumer.join(timeout=10)


def assert_slot_reaches(source: Source, end: Position) -> None:
    wait_for(
        lambda: source.confirmed >= end, f"the slot at {end}", lambda: (source.confirmed, source.state())
    )


@pytest.mark.versions(14, 18)
def test_H01_the_slot_advances_while_only_other_tables_are_busy(source: Source) -> None:
    with consumed(source) as capture:
        assert capture.wait_until(source.insert(1, 10), DEADLINE_SECONDS)
        for _ in range(5):
            source.database.execute("INSERT INTO public.other SELECT generate_series(1, 5000)")
            assert_slot_reaches(source, source.position)
    assert len(SpoolReader(source.spool).segments()) < 10, "quiet ground that was released is dropped"


@pytest.mark.versions(14, 18)
def test_H02_the_slot_advances_while_only_another_database_is_busy(
    source: Source, postgres_server: PostgresServer
) -> None:
    other = postgres_server.create_database()
    try:
        other.execute("CREATE TABLE busy (id bigint)")
        with consumed(source):
            for _ in range(3):
                other.execute("INSERT INTO busy SELECT generate_series(1, 5000)")
                assert_slot_reaches(source, source.position)
    finally:
        other.close()
        postgres_server.drop_database(other.name)


CHECKPOINTS: list[Callable[[Source], None]] = [
    lambda source: source.database.execute("CHECKPOINT"),
    lambda source: source.database.execute("SELECT pg_switch_wal()"),
]


@pytest.mark.versions(14, 18)
@pytest.mark.parametrize("write", CHECKPOINTS, ids=["checkpoint", "switch"])
def test_H03_the_slot_advances_when_only_the_server_itself_writes(
    source: Source, write: Callable[[Source], None]
) -> None:
    with consumed(source) as capture:
        write(source)
        end = Position.parse(source.database.query("SELECT pg_current_wal_flush_lsn()::text")[0][0])
        assert_slot_reaches(source, end)
        wait_for(lambda: saw_a_pause(source, capture), "a pause in which the server wrote nothing")


def saw_a_pause(source: Source, capture: SpoolCapture) -> bool:
    """Whether half a second passed without WAL; the server also writes records on its own."""
    flushed = source.flushed
    assert_slot_reaches(source, flushed)
    before = len(SpoolReader(source.spool).segments())
    assert not capture.wait_until(BEYOND, 0.5)
    after = len(SpoolReader(source.spool).segments())
    if source.flushed != flushed:
        return False
    assert after <= max(before, 1), "where nothing is written, nothing is sealed"
    return True


@pytest.mark.versions(14, 18)
def test_H04_the_slot_advances_without_our_changes_after_a_start(source: Source) -> None:
    """A stored position, idle tables, and WAL that grew in between."""
    stored = source.capture_all(1, 10)
    release(source.spool, "pipeline", stored)
    source.database.execute("INSERT INTO public.other SELECT generate_series(1, 20000)")
    end = source.position
    with consumed(source):
        assert_slot_reaches(source, end)
    source.wait_idle()
    with consumed(source) as capture:
        assert capture.wait_until(source.insert(11, 20), DEADLINE_SECONDS)
        assert source.ids(upto=capture.end)[-10:] == list(range(11, 21)), "and loses none of the next changes"
