"""The TCP proxy that recovery tests use."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.fix_proxy import ProxyFactory, TcpProxy
from tests.support.waiting import wait_for


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """An echo server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_serve, args=(listener,), daemon=True)
        thread.start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=10)


def _serve(listener: socket.socket) -> None:
    workers = []
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            break
        workers.append(threading.Thread(target=_echo, args=(connection,), daemon=True))
        workers[-1].start()
    for worker in workers:
        worker.join(timeout=10)


def _echo(connection: socket.socket) -> None:
    with connection:
        try:
            while chunk := connection.recv(65536):
                connection.sendall(chunk)
        except OSError:
            return


@pytest.fixture
def between(proxy: ProxyFactory, echo: tuple[str, int]) -> TcpProxy:
    return proxy(*echo)


def client(between: TcpProxy) -> socket.socket:
    return socket.create_connection((between.host, between.port), timeout=10)


def ask(connection: socket.socket, payload: bytes) -> bytes:
    connection.sendall(payload)
    answer = b""
    while len(answer) < len(payload) and (chunk := connection.recv(65536)):
        answer += chunk
    return answer


def test_bytes_pass_both_ways(between: TcpProxy) -> None:
    payload = bytes(range(256)) * 4000
    with client(between) as one, client(between) as other:
        assert ask(one, b"ping") == b"ping"
        sender = threading.Thread(target=other.sendall, args=(payload,), daemon=True)
        sender.start()
        received = b""
        while len(received) < len(payload):
            received += other.recv(65536)
        sender.join(timeout=10)
        assert received == payload
        assert between.connections == 2


def test_cut_ends_every_connection_and_lets_new_ones_in(between: TcpProxy) -> None:
    with client(between) as one:
        assert ask(one, b"x") == b"x"
        between.cut()
        assert _ended(one)
        assert between.connections == 0
    with client(between) as other:
        assert ask(other, b"y") == b"y"


def test_refuse_fails_new_connections_and_keeps_the_old(between: TcpProxy) -> None:
    with client(between) as one:
        assert ask(one, b"x") == b"x"
        between.refuse()
        with pytest.raises(ConnectionRefusedError):
            client(between)
        assert ask(one, b"y") == b"y"
    between.accept()
    with client(between) as other:
        assert ask(other, b"z") == b"z"


def test_delay_holds_bytes_back(between: TcpProxy) -> None:
    with client(between) as one:
        assert ask(one, b"x") == b"x"
        between.delay(0.1)
        before = time.monotonic()
        assert ask(one, b"y") == b"y"
        assert time.monotonic() - before >= 0.2  # There and back.
        between.resume()


def test_half_open_swallows_bytes_and_closes_nothing(between: TcpProxy) -> None:
    with client(between) as one:
        assert ask(one, b"x") == b"x"
        between.half_open()
        one.sendall(b"lost")
        one.settimeout(0.2)
        with pytest.raises(TimeoutError):
            one.recv(1)
        one.settimeout(10)
        between.resume()
        assert ask(one, b"found") == b"found"


def test_a_client_that_leaves_takes_its_counterpart_along(between: TcpProxy) -> None:
    with client(between) as one:
        assert ask(one, b"x") == b"x"
    wait_for(lambda: not between.connections, "the end of all connections", lambda: between.connections)


def test_a_target_that_does_not_answer_ends_the_clients_connection(proxy: ProxyFactory) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        between = proxy(*unused.getsockname())
        with client(between) as one:
            assert _ended(one)


def _ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
