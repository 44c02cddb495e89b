"""The parts of the replication stream that need no server."""

from __future__ import annotations

import socket
import time

import pytest

from penstock.position import Position
from penstock.postgres import replication
from penstock.postgres.connection import SourceAddress
from penstock.postgres.replication import ReplicationStream, StreamRequest, parse_duration, plugin_options


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0.0), ("500ms", 0.5), ("2s", 2.0), ("1min", 60.0), ("90min", 5400.0), ("1h", 3600.0), ("1d", 86400.0)]
)
def test_a_duration_is_read_as_the_server_prints_it(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


def test_X02_what_is_taken_at_once_is_bounded_by_its_size_too() -> None:
    stream = ReplicationStream(SourceAddress.parse("host=nowhere"), StreamRequest("slot", "p", Position.ZERO))
    for _ in range(4):
        stream._hand_over([b"x"] * 3, 6 << 20)
    assert [len(stream.take(0.0)) for _ in range(3)] == [6, 6, 0]


@pytest.mark.parametrize(("name", "quoted"), [("plain", '"plain"'), ("Two Words", '"Two Words"'), ('a"b', '"a""b"'), ("a,b", '"a,b"')])
def test_a_publication_name_is_one_entry_of_the_list(name: str, quoted: str) -> None:
    assert replication._quoted(name) == quoted


@pytest.mark.parametrize(
    ("server_version", "wants_messages", "options"),
    [
        (130_022, False, {"proto_version": "1"}),
        (140_000, False, {"proto_version": "2", "streaming": "on"}),
        (180_001, False, {"proto_version": "2", "streaming": "on"}),
        (180_001, True, {"proto_version": "1", "messages": "true"}),
    ],
)
def test_X03_open_transactions_are_asked_for_where_the_server_has_them_and_no_message_is(
    server_version: int, wants_messages: bool, options: dict[str, str]
) -> None:
    request = StreamRequest("slot", "p", Position.ZERO, wants_messages=wants_messages)
    assert plugin_options(request, server_version) == {"publication_names": '"p"', **options}


def test_a_busy_unix_socket_is_read_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = _pauses(monkeypatch)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        theirs.sendall(b"x")
        pace = replication._Pace(ours.fileno())
        assert [pace.wait(5000, 1_000_000) for _ in range(5)] == [True] * 5
    assert pauses == []


def test_a_busy_loopback_connection_is_read_in_gulps_from_a_small_receive_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = _pauses(monkeypatch)
    ours, theirs = _tcp_pair()
    with ours, theirs:
        pace = replication._Pace(ours.fileno())
        # Linux gives twice of what is asked for.
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) <= 2 * replication._LOOPBACK_BUFFER_BYTES
        assert pace.wait(5000, 1_000_000)
    assert pauses == [replication._PAUSE_SECONDS]


def test_the_pause_for_another_machine_shrinks_while_the_receive_buffer_runs_full_and_grows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = _pauses(monkeypatch)
    monkeypatch.setattr(replication, "_is_loopback", lambda connected: False)
    ours, theirs = _tcp_pair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000)
        pace = replication._Pace(ours.fileno())
        for size in [200_000] * 10 + [10_000] * 20:
            pace.wait(5000, size)
    assert min(pauses) == replication._SHORTEST_PAUSE_SECONDS
    assert pauses[-1] == replication._PAUSE_SECONDS


def test_a_calm_connection_is_read_within_a_moment_of_becoming_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = _pauses(monkeypatch)
    ours, theirs = _tcp_pair()
    with ours, theirs:
        pace = replication._Pace(ours.fileno())
        assert not pace.wait(0, 0)
        theirs.sendall(b"x")
        assert pace.wait(3, 500)
    assert pauses == [replication._GATHER_SECONDS]


def _pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses instead of making them."""
    made: list[float] = []
    monkeypatch.setattr(time, "sleep", made.append)
    return made


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return ours, theirs
