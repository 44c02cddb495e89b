"""How long the replication reader lets its socket fill."""

from __future__ import annotations

import itertools
import socket
import time

import pytest

from penstock.postgres import replication as pace_module
from penstock.postgres.replication import Pace


def test_a_busy_unix_socket_is_read_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = _pauses(monkeypatch)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        theirs.sendall(b"x")
        pace = Pace(ours.fileno())
        assert [pace.wait(5000, 1_000_000) for _ in range(5)] == [True] * 5
    assert pauses == []


def test_a_busy_loopback_connection_is_read_in_gulps_from_a_small_receive_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses = _pauses(monkeypatch)
    ours, theirs = _tcp_pair()
    with ours, theirs:
        pace = Pace(ours.fileno())
        # Linux reports twice the requested size.
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) <= 2 * pace_module._LOOPBACK_BUFFER_BYTES
        assert pace.wait(5000, 1_000_000)
    assert pauses == [pace_module._PAUSE_SECONDS]


def test_the_pause_for_another_machine_shrinks_while_the_receive_buffer_runs_full_and_grows_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses = _pauses(monkeypatch)
    monkeypatch.setattr(pace_module, "_is_loopback", lambda connected: False)
    ours, theirs = _tcp_pair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000)
        pace = Pace(ours.fileno())
        for size in [200_000] * 10 + [10_000] * 20:
            pace.wait(5000, size)
    assert min(pauses) == pace_module._SHORTEST_PAUSE_SECONDS
    assert pauses[-1] == pace_module._PAUSE_SECONDS


@pytest.mark.parametrize(
    ("waited_seconds", "pause_seconds"), [(0.025, 0.001), (0.0075, 0.001), (0.002, 0.006), (0.0, 0.008)]
)
def test_a_calm_connection_is_read_within_a_moment_of_becoming_readable_and_a_steady_one_not_again_at_once(
    monkeypatch: pytest.MonkeyPatch, waited_seconds: float, pause_seconds: float
) -> None:
    pauses = _pauses(monkeypatch)
    ours, theirs = _tcp_pair()
    with ours, theirs:
        pace = Pace(ours.fileno())
        assert not pace.wait(0, 0)
        theirs.sendall(b"x")
        monkeypatch.setattr(time, "monotonic", itertools.count(1.0, waited_seconds).__next__)
        assert pace.wait(3, 500)
    assert pauses == pytest.approx([pause_seconds])


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
