"""Every fault of a slot is found before the first row, with its own code and fix; nothing is lost, skipped or
confirmed.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from penstock.capture.provision import ensure_capture
from penstock.capture.settings import CaptureSettings
from penstock.errors import (
    ConfigError,
    PenstockError,
    PositionGapError,
    SlotDatabaseError,
    SlotForeignError,
    SlotMissingError,
    SlotPhysicalError,
    SlotPluginError,
    SlotTemporaryError,
    SlotTwoPhaseError,
    SpoolLockedError,
    SystemChangedError,
)
from penstock.position import Position
from penstock.schema import TableName
from penstock.spool.manifest import SpoolLayout
from penstock.spool.reader import SpoolReader
from penstock.spool.retention import release
from tests.support.fix_postgres import Database, PostgresServer
from tests.support.slot.source import BEYOND, COPY_AGAIN, Source
from tests.support.waiting import DEADLINE_SECONDS, wait_for

OTHER_NAME = "choose another name under source.slot (the option slot of the Spark source)"


# --- slots that are not ours (L09) --------------------------------------------------------------------------


@pytest.fixture
def bare(database: Database, tmp_path: Path) -> Source:
    """Without a slot: the test creates a special one."""
    return Source(database, tmp_path / "spool", provisioned=False)


def refused_until_mended(
    source: Source, kind: type[SlotForeignError], mend: Callable[[], None]
) -> PenstockError:
    """The fault stops the capture before anything is written. After the fix, every later row is captured."""
    source.insert(1, 5)
    error = source.failure()
    assert type(error) is kind
    assert SpoolReader(source.spool).segments() == ()
    assert source.status is not None
    assert (source.status.state, source.status.has_stopped) == ("failed", True)
    mend()
    with source.capture() as capture:
        assert capture.wait_beyond(Position.ZERO, DEADLINE_SECONDS), source.state()
        assert capture.wait_until(source.insert(6, 10), DEADLINE_SECONDS), source.state()
    assert source.ids() == list(range(6, 11))
    return error


def drop_slot(source: Source) -> None:
    source.database.query("SELECT pg_drop_replication_slot(%s)", source.slot)


@pytest.mark.versions(14, 18)
def test_L09_a_physical_slot_is_refused_by_name(bare: Source) -> None:
    bare.database.query("SELECT pg_create_physical_replication_slot(%s, true)", bare.slot)
    error = refused_until_mended(bare, SlotPhysicalError, lambda: drop_slot(bare))
    assert str(error) == (
        f"PEN-1209: slot {bare.slot} is a physical slot, not a logical one\n"
        f"  fix: {OTHER_NAME}, or, if it is not needed, SELECT pg_drop_replication_slot('{bare.slot}')"
    )


@pytest.mark.versions(14, 18)
def test_L09_a_slot_of_another_plugin_is_refused_by_name(bare: Source) -> None:
    with another_plugin(bare.database) as plugin:
        bare.database.query("SELECT pg_create_logical_replication_slot(%s, %s)", bare.slot, plugin)
        error = refused_until_mended(bare, SlotPluginError, lambda: drop_slot(bare))
    assert str(error) == (
        f"PEN-1207: slot {bare.slot} is a slot of plugin {plugin}, not of pgoutput\n"
        f"  fix: {OTHER_NAME}, or, if it is not needed, SELECT pg_drop_replication_slot('{bare.slot}')"
    )


@contextmanager
def another_plugin(database: Database) -> Iterator[str]:
    """Test servers contain one plugin only, so a copy in another place serves as the other one."""
    ((library,),) = database.query("SELECT setting FROM pg_config WHERE name = 'PKGLIBDIR'")
    with tempfile.TemporaryDirectory(prefix="penstock-plugin-") as folder:
        Path(folder).chmod(0o755)
        shutil.copy(Path(library) / "pgoutput.so", Path(folder) / "other.so")
        yield f"{folder}/other"


@pytest.mark.versions(14, 18)
def test_L09_a_slot_of_another_database_is_refused_by_name(
    bare: Source, postgres_server: PostgresServer
) -> None:
    other = postgres_server.create_database()
    try:
        other.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", bare.slot)
        error = refused_until_mended(bare, SlotDatabaseError, lambda: drop_slot(bare))
    finally:
        other.close()
        postgres_server.drop_database(other.name)
    assert str(error) == (
        f"PEN-1208: slot {bare.slot} is a slot of database {other.name}, not of {bare.database.name}\n"
        f"  fix: {OTHER_NAME}, or point source.dsn at database {other.name}"
    )


@pytest.mark.versions(14, 18)
def test_L09_a_temporary_slot_is_refused_with_the_session_that_holds_it(bare: Source) -> None:
    with psycopg.connect(bare.database.dsn, autocommit=True, application_name="another tool") as session:
        session.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput', true)", [bare.slot])
        pid = session.info.backend_pid

        def end_session() -> None:
            bare.database.query("SELECT pg_terminate_backend(%s, 5000)", pid)

        error = refused_until_mended(bare, SlotTemporaryError, end_session)
    assert error.message.startswith(
        f"slot {bare.slot} is a temporary slot of server process {pid} (application 'another tool', client "
    )
    assert error.hint == f"{OTHER_NAME}, or end that session: SELECT pg_terminate_backend({pid})"


@pytest.mark.versions(14, 18)
def test_L09_X04_a_two_phase_slot_is_refused_because_it_sends_transactions_that_may_be_rolled_back(
    bare: Source,
) -> None:
    bare.database.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput', false, true)", bare.slot)
    error = refused_until_mended(bare, SlotTwoPhaseError, lambda: drop_slot(bare))
    assert str(error) == (
        f"PEN-1211: slot {bare.slot} was created with two_phase: it sends prepared transactions that may "
        "still be rolled back\n"
        f"  fix: {OTHER_NAME}, or, if it is not needed, SELECT pg_drop_replication_slot('{bare.slot}')"
    )


@pytest.mark.parametrize("name", ["Shop", "shop-1", "", "x" * 64, "ré"])
def test_L09_an_invalid_slot_name_is_reported_before_the_server_is_asked(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CaptureSettings.from_options(
            {"dsn": "postgresql://cdc@db.example/shop", "slot": name, "spool": "/spool"}
        )
    assert caught.value.hint in (
        "use lower-case letters, digits and underscores, 63 at most",
        'add .option("slot", …)',
    )


def test_L09_a_name_of_digits_is_as_good_as_any(bare: Source) -> None:
    bare.slot = "0815"
    ensure_capture(bare.address, bare.slot, "p", [TableName("public", "t")])
    bare.capture_all(1, 10)
    assert bare.ids() == list(range(1, 11))


# --- slots that were ours (L04, L05) ------------------------------------------------------------------------


@pytest.mark.versions(14, 18)
def test_L04_a_dropped_slot_is_not_recreated_silently(source: Source) -> None:
    source.capture_all(1, 10)
    drop_slot(source)
    source.insert(11, 20)
    error = source.failure()
    assert isinstance(error, SlotMissingError)
    assert str(error) == (
        f"PEN-1201: slot {source.slot} no longer exists: commits since it was last read are lost\n  fix: "
        f"{COPY_AGAIN}"
    )
    assert source.database.query(
        "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", source.slot
    ) == [(0,)]
    assert source.ids() == list(range(1, 11))


@pytest.mark.versions(14, 18)
@pytest.mark.parametrize("has_consumer", [True, False])
def test_L05_a_slot_recreated_ahead_of_the_spool_is_a_gap(source: Source, has_consumer: bool) -> None:
    """Also if no consumer has read the spool yet: a later consumer would read over the hole."""
    end = source.capture_all(1, 10)
    if has_consumer:
        release(source.spool, "pipeline", end)
    drop_slot(source)
    source.insert(11, 20)
    ensure_capture(source.address, source.slot, "p", [TableName("public", "t")])
    confirmed = source.confirmed
    source.insert(21, 30)
    error = source.failure()
    assert isinstance(error, PositionGapError)
    needed = end if has_consumer else SpoolReader(source.spool).start
    assert needed is not None
    assert str(error) == (
        f"PEN-1205: slot {source.slot} begins at {confirmed}, but its readers have only the commits up to "
        f"{needed}: "
        f"the {confirmed - needed} bytes of WAL in between can no longer be read\n  fix: {COPY_AGAIN}"
    )
    assert source.failure().code == "PEN-1205", "it persists"
    assert source.ids() == list(range(1, 11))
    assert source.confirmed == confirmed


# --- a server that is not ours ------------------------------------------------------------------------------


def test_L10_L14_another_database_system_is_not_taken_for_the_old_one(source: Source) -> None:
    """Also a system created by pg_upgrade: it has a new identifier, even if slots were copied."""
    release(source.spool, "pipeline", source.capture_all(1, 10))
    confirmed = source.confirmed
    source.insert(11, 20)
    ((identifier,),) = source.database.query("SELECT system_identifier::text FROM pg_control_system()")
    identity = SpoolLayout(source.spool).identity
    identity.write_text(identity.read_text().replace(identifier, "7000000000000000001"))
    error = source.failure()
    assert type(error) is SystemChangedError
    assert str(error) == (
        f"PEN-1206: the server is database system {identifier}, and everything captured came from "
        "7000000000000000001\n"
        f"  fix: point source.dsn back at the old system, or {COPY_AGAIN}"
    )
    assert source.ids() == list(range(1, 11))
    assert source.confirmed == confirmed


def test_L10_a_server_that_was_set_back_to_an_earlier_time_is_noticed(source: Source) -> None:
    end = source.capture_all(1, 10)
    ahead = Position.of(end.value + (1 << 40))
    release(source.spool, "pipeline", ahead)
    confirmed, server = source.confirmed, source.flushed
    error = source.failure()
    assert type(error) is SystemChangedError
    words = (
        f"changes were captured up to {ahead}, and the server's WAL ends at (\\S+): the server was "
        "restored to an earlier time"
    )
    found = re.fullmatch(words, error.message)
    assert found is not None, error.message
    assert server <= Position.parse(found[1]) <= source.flushed
    assert error.hint == COPY_AGAIN
    assert source.ids() == list(range(1, 11))
    assert source.confirmed == confirmed


# --- busy (L08) ---------------------------------------------------------------------------------------------


@pytest.mark.versions(14, 18)
def test_L08_a_busy_slot_is_waited_for_and_its_reader_is_named(source: Source, tmp_path: Path) -> None:
    with source.capture() as first:
        assert first.wait_until(source.insert(1, 10), DEADLINE_SECONDS)
        rival = source.with_spool(tmp_path / "rival")
        with rival.capture() as waiting:
            failure = rival.trouble("PEN-1202")
            pid = source.active_pid
            since = "to_char(backend_start AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS')"
            ((client, begun),) = source.database.query(
                f"SELECT host(client_addr), {since} FROM pg_stat_activity WHERE pid = %s", pid
            )
            reader = f"{pid} (application 'penstock capture', client {client}, since {begun} UTC)"
            assert failure.message == f"slot {source.slot} is being read by server process {reader}"
            hint = (
                "stop that reader; if it has ended and the server has not noticed yet: "
                f"SELECT pg_terminate_backend({pid})"
            )
            assert failure.hint == hint
            assert rival.status is not None
            assert rival.status.state == "waiting"
            first.stop()
            end = source.insert(11, 20)
            assert waiting.wait_until(end, DEADLINE_SECONDS), rival.state()
    assert rival.ids() == list(range(1, 21))
    assert source.ids() == list(range(1, 11))


def test_L08_only_the_capture_that_holds_the_spool_writes_its_status(source: Source) -> None:
    with source.capture() as first:
        assert first.wait_until(source.insert(1, 10), DEADLINE_SECONDS)
        with source.capture() as second:
            wait_for(
                lambda: isinstance(second.trouble, SpoolLockedError),
                "a capture that waits for the spool",
                lambda: second.trouble,
            )
            deadline = time.monotonic() + 2.2  # two health checks of each
            while time.monotonic() < deadline:
                assert source.status is not None
                assert (source.status.state, source.status.failure) == ("streaming", None)
            first.stop()
            assert second.wait_until(source.insert(11, 20), DEADLINE_SECONDS), source.state()
            assert second.trouble is None
    assert source.ids() == list(range(1, 21))


# --- never backwards (L03, L12) -----------------------------------------------------------------------------


def test_L03_L12_the_slot_never_moves_backwards_nor_past_released_positions(source: Source) -> None:
    """Neither a later consumer that needs less nor a restarted capture moves it."""
    middle = source.capture_all(1, 10)
    release(source.spool, "fast", middle)
    with source.capture() as capture:
        wait_for(lambda: source.confirmed >= middle, f"the slot at {middle}", lambda: source.confirmed)
        confirmed = source.confirmed
        assert confirmed == middle, "no keepalive confirms anything"
        release(source.spool, "slow", Position.of(middle.value - 1))
        assert capture.wait_until(source.insert(11, 20), DEADLINE_SECONDS)
        assert not capture.wait_until(BEYOND, 0.6)
        assert source.confirmed == confirmed
    source.wait_idle()
    with source.capture() as capture:
        assert capture.wait_until(source.insert(21, 30), DEADLINE_SECONDS)
        assert not capture.wait_until(BEYOND, 0.6)
    source.wait_idle()
    assert source.confirmed == confirmed
