"""A TCP proxy between Penstock and its server that fails on demand."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

ProxyFactory = Callable[[str, int], "TcpProxy"]

_CHUNK_BYTES = 65536


class TcpProxy:
    """Passes bytes between clients and one target, until a test makes it fail.

    `cut()` closes every connection, `refuse()` makes new ones fail as if no server listened, `delay(seconds)`
    holds every chunk back, and `half_open()` swallows what comes in from either side and closes nothing, as a
    network does that has lost its route. `resume()` ends the last two; a connection that has already lost
    bytes stays broken, only later ones are whole. `lose_answer_to(request)` passes the next request that
    contains these bytes, and cuts its connection when the answer comes.
    """

    def __init__(self, target_host: str, target_port: int) -> None:
        self._target = (target_host, target_port)
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._numbers = itertools.count(1)
        self._delay_seconds = 0.0
        self._swallowing = False
        self._unanswered: bytes | None = None
        self._refuses_after = False
        self._closing = threading.Event()
        # Bound and never listening, it keeps the port ours while new connections are refused.
        self._placeholder = _bound_socket(0)
        self.host = "127.0.0.1"
        self.port: int = self._placeholder.getsockname()[1]
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self.accept()

    # --- what tests ask for ---------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        """Number of open connections."""
        with self._lock:
            return len(self._links)

    def cut(self) -> None:
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close()

    def refuse(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # This wakes the accepting thread.
            listener.close()
        if self._acceptor is not None:
            self._acceptor.join(timeout=10)
            self._acceptor = None

    def accept(self) -> None:
        if self._listener is None:
            self._listener = _bound_socket(self.port)
            self._listener.listen()
            self._acceptor = threading.Thread(
                target=self._accept, args=(self._listener,), name="proxy-accept", daemon=True
            )
            self._acceptor.start()

    def delay(self, seconds: float) -> None:
        self._delay_seconds = seconds

    def half_open(self) -> None:
        self._swallowing = True

    def lose_answer_to(self, request: bytes, *, then_refuse: bool = False) -> None:
        """Once. With `then_refuse`, every connection is cut and new ones are refused until `accept()`."""
        self._refuses_after = then_refuse
        self._unanswered = request

    def resume(self) -> None:
        self._swallowing = False
        self._delay_seconds = 0.0

    def close(self) -> None:
        self._closing.set()
        self.refuse()
        self.cut()
        self._placeholder.close()

    # --- what links ask for ---------------------------------------------------------------------------------

    @property
    def swallowing(self) -> bool:
        return self._swallowing

    def wait_delay(self) -> None:
        if self._delay_seconds > 0:
            self._closing.wait(self._delay_seconds)

    def is_to_stay_unanswered(self, chunk: bytes) -> bool:
        with self._lock:
            if self._unanswered is None or self._unanswered not in chunk:
                return False
            self._unanswered = None
            return True

    def answer_came(self) -> None:
        if self._refuses_after:
            self.refuse()
            with self._lock:
                links = list(self._links)
            for link in links:
                link.shut_down()

    def forget(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=10)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            link = _Link(self, client, server, next(self._numbers))
            with self._lock:
                self._links.add(link)
            link.start()


class _Link:
    """One client's connection and its counterpart to the target, with a thread for each direction."""

    def __init__(self, proxy: TcpProxy, client: socket.socket, server: socket.socket, number: int) -> None:
        self._proxy = proxy
        self._loses_answer = False
        self._sockets = (client, server)
        for end in self._sockets:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = (
            threading.Thread(
                target=self._pump, args=(client, server), name=f"proxy-up-{number}", daemon=True
            ),
            threading.Thread(
                target=self._pump, args=(server, client), name=f"proxy-down-{number}", daemon=True
            ),
        )

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self.shut_down()
        for thread in self._threads:
            thread.join(timeout=10)
        for end in self._sockets:
            end.close()
        self._proxy.forget(self)

    def _pump(self, source: socket.socket, drain: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(_CHUNK_BYTES):
                self._proxy.wait_delay()
                if source is self._sockets[0] and self._proxy.is_to_stay_unanswered(chunk):
                    self._loses_answer = True
                elif source is self._sockets[1] and self._loses_answer:
                    self._proxy.answer_came()
                    break
                if not self._proxy.swallowing:
                    drain.sendall(chunk)
        if self._proxy.swallowing:
            return  # The other side is not informed; close() cleans up.
        self.shut_down()
        if threading.current_thread() is self._threads[0]:
            # The thread that ends last cleans up.
            self._threads[1].join(timeout=10)
            for end in self._sockets:
                end.close()
            self._proxy.forget(self)

    def shut_down(self) -> None:
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _bound_socket(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind(("127.0.0.1", port))
    return bound


@pytest.fixture
def proxy() -> Iterator[ProxyFactory]:
    """`proxy(host, port)` returns a proxy for that address; it ends with the test."""
    made: list[TcpProxy] = []

    def make(target_host: str, target_port: int) -> TcpProxy:
        made.append(TcpProxy(target_host, target_port))
        return made[-1]

    yield make
    for each in made:
        each.close()
