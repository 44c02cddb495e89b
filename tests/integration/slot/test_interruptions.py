"""Server restarts and network faults: the spool ends with exactly the committed rows, each once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.capture.settings import CaptureLimits
from penstock.errors import AuthenticationError, PenstockError, PrivilegeError
from penstock.position import Position
from penstock.spool.retention import release
from tests.support.fix_proxy import ProxyFactory, TcpProxy
from tests.support.slot.scratch_server import ScratchServer
from tests.support.slot.source import QUICK, Source, through
from tests.support.waiting import DEADLINE_SECONDS, wait_for

SHUTDOWN_SECONDS = 15.0
"""Half of the time that the embedded server is given before it is killed."""

# --- server stopped (C01) ---


def test_C01_a_restarted_server_is_taken_up_again(
    scratch_server: ScratchServer, scratch_source: Source
) -> None:
    """Fast, immediate, and with the reader's process ended; with rows before, between and after."""
    source = scratch_source
    with source.capture() as capture:
        assert capture.wait_until(source.insert(1, 1000), DEADLINE_SECONDS)
        source.insert(1001, 2000)
        source.database.close()
        scratch_server.postgres.restart("fast")
        source.insert(2001, 3000)
        source.database.close()
        scratch_server.postgres.restart("immediate")
        source.insert(3001, 4000)
        wait_for(lambda: source.active_pid is not None, "a capture that reads again", source.state)
        source.database.query("SELECT pg_terminate_backend(%s)", source.active_pid)
        source.insert(4001, 5000)
        assert capture.wait_until(source.position, DEADLINE_SECONDS), source.state()
    assert source.ids() == list(range(1, 5001))


def test_C01_a_server_shuts_down_although_a_target_is_behind(
    scratch_server: ScratchServer, scratch_source: Source
) -> None:
    """The server waits until its data was received, not until it is applied, which may never happen."""
    source = scratch_source
    with source.capture() as capture:
        assert capture.wait_until(source.insert(1, 1000), DEADLINE_SECONDS)
        end = capture.end
        assert end is not None
        done = release(source.spool, "pipeline", end)
        wait_for(lambda: source.confirmed >= end, f"the slot at {end}", lambda: source.confirmed)
        assert capture.wait_until(source.insert(1001, 2000), DEADLINE_SECONDS)
        source.database.close()
        began = time.monotonic()
        scratch_server.postgres.stop("fast")
        assert time.monotonic() - began < SHUTDOWN_SECONDS
        scratch_server.postgres.start()
        assert capture.wait_until(source.insert(2001, 3000), DEADLINE_SECONDS), source.state()
        assert source.ids(done, capture.end) == list(range(1001, 3001))


def test_L02_nothing_is_lost_or_doubled_whatever_the_log_ends_with_at_a_stop(source: Source) -> None:
    """An open transaction, a rolled back one, a message, an empty commit, many rows with one LSN: the capture
    confirms each, and resumes after it.
    """
    seen: list[int] = []
    done: Position | None = None
    with source.database.connect() as session:

        def leave_open() -> None:
            session.execute("INSERT INTO public.t VALUES (1, 'begun before the stop')")

        def copy() -> None:
            with session.cursor().copy("COPY public.t FROM STDIN") as rows:
                for key in range(2, 502):
                    rows.write_row((key, "x"))
            session.commit()

        endings: list[Callable[[], None]] = [
            leave_open,
            copy,
            lambda: source.database.execute(
                "SELECT pg_logical_emit_message(false, 'note', 'not of a transaction')"
            ),
            lambda: source.database.execute("SELECT pg_logical_emit_message(true, 'note', 'of one')"),
            lambda: source.database.execute("BEGIN; SELECT txid_current(); COMMIT"),
            lambda: source.database.execute("BEGIN; INSERT INTO public.t VALUES (-1, 'never'); ROLLBACK"),
            lambda: source.database.execute("INSERT INTO public.t VALUES (502, 'the last')"),
        ]
        for leave in endings:
            with source.capture() as capture:
                leave()
                assert capture.wait_until(source.flushed, DEADLINE_SECONDS), source.state()
                end = capture.end
                assert end is not None
                seen += source.ids(done, end)
                done = release(source.spool, "pipeline", end)
                wait_for(
                    lambda end=end: source.confirmed >= end,  # type: ignore[misc]
                    f"the slot at {end}",
                    lambda: source.confirmed,
                )
            source.wait_idle()
    assert seen == list(range(1, 503))


HARM: dict[str, Callable[[TcpProxy], None]] = {
    "cut": lambda network: network.cut(),
    "half open": lambda network: network.half_open(),
}


@pytest.mark.parametrize("harm", HARM)
def test_C01_a_network_that_fails_is_crossed_again(source: Source, proxy: ProxyFactory, harm: str) -> None:
    """Half open: nothing is refused and nothing arrives. The server ends its side by wal_sender_timeout, we
    ours by a probe.
    """
    network, address = through(source, proxy)
    address = address.with_parameters({"options": "-c wal_sender_timeout=1s", "connect_timeout": "2"})
    with source.capture(replace(QUICK, silence_seconds=1.0), address) as capture:
        assert capture.wait_until(source.insert(1, 1000), DEADLINE_SECONDS)
        HARM[harm](network)
        source.insert(1001, 2000)
        wait_for(lambda: capture.trouble is not None, "a capture that noticed", source.state)
        network.resume()
        source.insert(2001, 3000)
        assert capture.wait_until(source.position, DEADLINE_SECONDS), source.state()
    assert source.ids() == list(range(1, 3001))


# --- refusals that pass, and those that do not (C02) --------------------------------------------------------


def test_C02_a_server_without_room_for_a_connection_is_tried_again(source: Source) -> None:
    role = f"{source.database.name}_narrow"
    source.database.execute(f"CREATE ROLE {role} LOGIN REPLICATION CONNECTION LIMIT 0")
    source.database.execute(f"GRANT pg_monitor TO {role}")
    try:
        address = source.address.with_parameters({"user": role})
        with source.capture(address=address) as capture:
            failure = source.trouble("PEN-1101")
            assert "too many connections for role" in failure.message
            source.database.execute(f"ALTER ROLE {role} CONNECTION LIMIT -1")
            assert capture.wait_until(source.insert(1, 10), DEADLINE_SECONDS), source.state()
        assert source.ids() == list(range(1, 11))
    finally:
        source.wait_idle()
        source.database.execute(f"REVOKE pg_monitor FROM {role}")
        source.database.execute(f"DROP ROLE {role}")


@pytest.mark.parametrize(
    ("parameters", "kind"),
    [
        ({"user": "no_such_role"}, AuthenticationError),
        ({"dbname": "no_database_of_that_name"}, AuthenticationError),
    ],
)
def test_C02_a_refusal_that_time_cannot_mend_ends_the_capture(
    source: Source, parameters: dict[str, str], kind: type[PenstockError]
) -> None:
    error = source.failure(source.address.with_parameters(parameters))
    assert type(error) is kind
    assert error.hint


def test_C02_error_for_a_role_that_may_not_replicate_says_so(source: Source) -> None:
    role = f"{source.database.name}_plain"
    source.database.execute(f"CREATE ROLE {role} LOGIN")
    try:
        error = source.failure(source.address.with_parameters({"user": role}))
        assert type(error) is PrivilegeError
        assert "ALTER ROLE … REPLICATION" in (error.hint or "")
    finally:
        source.database.execute(f"DROP ROLE {role}")


# --- settings of the role (C06) -----------------------------------------------------------------------------


@pytest.mark.versions(14, 18)
def test_C06_timeouts_set_on_the_role_do_not_matter(source: Source, postgres_version: int) -> None:
    role = f"{source.database.name}_hasty"
    source.database.execute(f"CREATE ROLE {role} LOGIN REPLICATION")
    timeouts = [
        "statement_timeout",
        "lock_timeout",
        "idle_in_transaction_session_timeout",
        "idle_session_timeout",
    ]
    timeouts += ["transaction_timeout"] if postgres_version >= 17 else []
    try:
        for timeout in timeouts:
            source.database.execute(f"ALTER ROLE {role} SET {timeout} = '200ms'")
        with source.capture(address=source.address.with_parameters({"user": role})) as capture:
            assert capture.wait_until(source.insert(1, 10), DEADLINE_SECONDS), source.state()
            pid = source.active_pid
            assert not capture.wait_until(Position.of(source.position.value + (1 << 40)), 1.0)
            assert capture.wait_until(source.insert(11, 200_000), DEADLINE_SECONDS), source.state()
            assert source.active_pid == pid, "no reconnect"
        assert source.ids() == list(range(1, 200_001))
    finally:
        source.wait_idle()
        source.database.execute(f"DROP ROLE {role}")


# --- a slow consumer (C07, H08) -----------------------------------------------------------------------------


def test_C07_H08_a_full_spool_does_not_cost_the_connection(source: Source) -> None:
    """Three times wal_sender_timeout without reading a byte: status updates are sent anyway."""
    address = source.address.with_parameters({"options": "-c wal_sender_timeout=1500ms"})
    limits = CaptureLimits(
        spool_bytes=100_000, segment_rows=500, buffer_bytes=100_000, quiet_seconds=0.1, watch_seconds=0.5
    )
    with source.capture(limits, address) as capture:
        for low in range(1, 20_001, 500):
            source.insert(low, low + 499, note="x" * 200)
        wait_for(
            lambda: source.status is not None and source.status.state == "full", "a full spool", source.state
        )
        source.insert(
            20_001, 40_000, note="x" * 200
        )  # more than the buffer holds: nothing is read off the socket any more
        pid = source.active_pid
        assert pid is not None
        deadline = time.monotonic() + 4.5
        while time.monotonic() < deadline:
            assert source.active_pid == pid, source.state()
            time.sleep(0.1)
        assert source.status is not None
        assert source.status.state == "full"
        seen: list[int] = []
        done: Position | None = None
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(seen) < 40_000 and time.monotonic() < deadline:
            upto = capture.end
            assert upto is not None
            seen += source.ids(done, upto)
            done = release(source.spool, "pipeline", upto)
            capture.wait_beyond(done, 1.0)
        assert source.active_pid == pid, "no reconnect"
    assert seen == list(range(1, 40_001))
