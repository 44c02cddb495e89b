"""When to look at the replication socket again."""

from __future__ import annotations

import ipaddress
import select
import socket
import time

_WAIT_SECONDS = 0.05
_PAUSE_SECONDS = 0.012
_SHORTEST_PAUSE_SECONDS = 0.001
_GATHER_SECONDS = 0.001
_STEADY_SECONDS = 0.008
_BUSY_WINDOW_SECONDS = 0.005
_BUSY_MESSAGES = 100
_LOOPBACK_BUFFER_BYTES = 64_000


class Pace:
    """Decides how long the receive thread of one connection lets the socket fill.

    The server sends each row by itself. A client that empties the socket at once makes it a packet a row, each with its acknowledgement;
    one that lets some milliseconds' worth queue up gets blocks, at up to twice the rate and with less CPU on both sides. So a busy stream
    is read in gulps with pauses between them, and a calm one a moment after it becomes readable: by then a small transaction is whole.
    Where small transactions follow each other closely, a gulp comes every few milliseconds: it costs the same for several as for one.

    Where the queue builds up depends on the way. On the loopback address it must be the server's send buffer: a small receive buffer
    closes the window soon, and reading opens it and refills it in one call. From another machine, refilling takes a round trip, so there
    the queue is the receive buffer that the system grows for us, and the pause is kept so short that it does not run full. A Unix
    socket holds too little for any pause.
    """

    def __init__(self, fileno: int) -> None:
        # Descriptors are not owned twice: this one is a copy.
        with socket.socket(fileno=socket.dup(fileno)) as probe:
            self._pauses = probe.family != socket.AF_UNIX
            self._is_loopback = self._pauses and _is_loopback(probe)
            if self._is_loopback:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LOOPBACK_BUFFER_BYTES)
        self._fileno = fileno
        self._readable = select.poll()
        self._readable.register(fileno, select.POLLIN)
        self._pause_seconds = _PAUSE_SECONDS
        self._window_start = time.monotonic()
        self._window_messages = 0

    def wait(self, count: int, size: int) -> bool:
        """Wait until it is time to read, at most some milliseconds; `count` and `size` are of the last gulp. Says if there is something."""
        now = time.monotonic()
        self._window_messages += count
        is_busy = self._window_messages >= _BUSY_MESSAGES
        if now - self._window_start > _BUSY_WINDOW_SECONDS:
            self._window_start, self._window_messages = now, 0
        if is_busy and self._pauses:
            time.sleep(self._next_pause_seconds(size))
            return True
        is_readable = bool(self._readable.poll(_WAIT_SECONDS * 1000))
        if is_readable and self._pauses:
            time.sleep(max(_GATHER_SECONDS, now + _STEADY_SECONDS - time.monotonic()))
        return is_readable

    def is_readable(self) -> bool:
        return bool(self._readable.poll(0))

    def _next_pause_seconds(self, size: int) -> float:
        if not self._is_loopback:
            with socket.socket(fileno=socket.dup(self._fileno)) as probe:
                # Small packets take several times their size.
                room = probe.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) / 4
            change = min(1.25, max(0.5, room / max(size, 1)))
            self._pause_seconds = min(_PAUSE_SECONDS, max(_SHORTEST_PAUSE_SECONDS, self._pause_seconds * change))
        return self._pause_seconds


def _is_loopback(connected: socket.socket) -> bool:
    peer, own = connected.getpeername()[0], connected.getsockname()[0]
    return bool(peer == own or ipaddress.ip_address(peer.partition("%")[0]).is_loopback)
