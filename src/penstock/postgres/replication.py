"""The replication stream: receive messages, confirm positions, and decide when to read the socket.

`ReplicationStream` owns one connection and one daemon thread. The thread reads raw CopyData messages from the
socket, answers keepalives and appends the messages, unchanged and in order, to a bounded buffer. It never
waits for decoding, the spool or Spark. When the buffer is full it stops reading but continues to send status
updates, so that the server does not end the connection. If the server sends nothing for some time, the thread
requests a reply; if none arrives, the connection counts as lost. `Pace` decides when the socket is read,
which determines throughput.
"""

from __future__ import annotations

import ipaddress
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat

import psycopg
from psycopg import sql
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn

from penstock.errors import ConnectionLostError, PublicationError
from penstock.position import Lsn, Position
from penstock.postgres.connection import (
    Connection,
    SourceAddress,
    connect_replication,
    replication_command,
    translate,
)
from penstock.postgres.queries import identifier
from penstock.postgres.slot import COPY_AGAIN, drop_statement

_WAIT_SECONDS = 0.05
_PAUSE_SECONDS = 0.012
_SHORTEST_PAUSE_SECONDS = 0.001
_GATHER_SECONDS = 0.001
_STEADY_SECONDS = 0.008
_BUSY_WINDOW_SECONDS = 0.005
_BUSY_MESSAGES = 100
_LOOPBACK_BUFFER_BYTES = 64_000


class Pace:
    """Decides how long the receive thread of one connection waits before it reads the socket.

    The server sends each row separately. A client that empties the socket at once gets one packet per row,
    and each packet is acknowledged separately. A client that lets some milliseconds of data queue up gets
    blocks, at up to twice the rate and with less CPU on both sides. So a busy stream is read in batches with
    pauses between them. A quiet stream is read shortly after it becomes readable, when a small transaction
    has usually arrived completely. With a steady flow of small transactions, a batch is read every few
    milliseconds, since reading several transactions costs the same as reading one.

    Where the data should queue up depends on the transport. On the loopback address, it should be the
    server's send buffer: a small receive buffer closes the TCP window early, and one read both opens the
    window and refills the buffer. From another machine, refilling takes a round trip. So the data queues up
    in the receive buffer, which the system enlarges, and the pause is short enough that the buffer does not
    fill up. The buffer of a Unix socket is too small for any pause.
    """

    def __init__(self, fileno: int) -> None:
        # The descriptor is duplicated, so that the socket object does not close libpq's descriptor.
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
        """Wait until it is time to read, for at most some milliseconds; `count` and `size` describe the last
        batch. Returns whether the socket is readable.
        """
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
                # In the receive buffer, small packets take several times their size.
                room = probe.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) / 4
            change = min(1.25, max(0.5, room / max(size, 1)))
            self._pause_seconds = min(
                _PAUSE_SECONDS, max(_SHORTEST_PAUSE_SECONDS, self._pause_seconds * change)
            )
        return self._pause_seconds


def _is_loopback(connected: socket.socket) -> bool:
    peer, own = connected.getpeername()[0], connected.getsockname()[0]
    return bool(peer == own or ipaddress.ip_address(peer.partition("%")[0]).is_loopback)


_STATUS = struct.Struct("!cQQQqB")
_WAL_START = struct.Struct("!Q")
_KEEPALIVE_BYTES = 18
_POSTGRES_EPOCH_SECONDS = 946_684_800

_INPUT_BUFFER_BYTES = 8_000_000
_GULP_MESSAGES = 10_000
_GULP_BYTES = 8 << 20
_MANY_BYTES = 1 << 18
"""A batch below this size takes as long to decode as a single byte."""
_LEAVE_SECONDS = 2.0
_STATUS_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """Parameters of START_REPLICATION. The stream begins at `start`, but never before the slot's confirmed
    position.
    """

    slot: str
    publication: str
    start: Position
    max_buffer_bytes: int = 128 << 20
    confirmed: Position = Position.ZERO
    """The slot's confirmed position. `confirm` never sends an earlier one, which some servers would accept.
    """
    silence_seconds: float = 60.0
    """How long the server may send nothing before the connection counts as lost, unless its
    wal_sender_timeout is longer.
    """
    wants_messages: bool = False
    """Whether the server sends logical messages."""


class ReplicationStream:
    """A replication stream, received by a background thread between `start` and `close`.

    One consumer thread calls `take` and `confirm`.
    """

    def __init__(self, address: SourceAddress, request: StreamRequest) -> None:
        self._address = address
        self._request = request
        self._connection: Connection | None = None
        self._pace: Pace
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._batches: deque[tuple[list[bytes], int]] = deque()
        self._buffered_bytes = 0
        self._taken_bytes = 0
        self._failure: BaseException | None = None
        self._stopping = False
        self._confirmed = 0  # the server ignores a zero: nothing is confirmed until `confirm` is called
        self._reported = 0
        self._received = 0
        self._status_due = 0.0
        self._status_seconds = _STATUS_SECONDS
        self._silence_seconds = request.silence_seconds
        self._heard_at = 0.0
        self._has_asked = False
        self.system_identifier = ""
        self.timeline = 0

    def open(self) -> None:
        """Connect and identify the server. No messages flow until `start`."""
        self._connection = connect_replication(self._address, "penstock capture")
        self.system_identifier, timeline, *_ = replication_command(
            self._connection, "IDENTIFY_SYSTEM", "identifying the server"
        )
        self.timeline = int(timeline)
        (timeout,) = replication_command(
            self._connection, "SHOW wal_sender_timeout", "asking for wal_sender_timeout"
        )
        timeout_seconds = parse_duration(timeout)
        if timeout_seconds > 0:
            self._status_seconds = min(_STATUS_SECONDS, timeout_seconds / 4)
            self._silence_seconds = max(self._silence_seconds, timeout_seconds)
        self._pace = Pace(self._connection.pgconn.socket)
        # libpq's input buffer grows to the size of the largest message and never shrinks. So one large value
        # is received first, after which a whole batch fits into the buffer.
        result = self._connection.pgconn.exec_(b"SELECT pg_catalog.repeat('x', %d)" % _INPUT_BUFFER_BYTES)
        if result.status != ExecStatus.TUPLES_OK:
            raise translate(psycopg.errors.error_from_result(result), "making room for the stream")

    def start(self) -> None:
        if self._connection is None:
            raise RuntimeError("open the stream before starting it")
        options = plugin_options(self._request)
        command = sql.SQL("START_REPLICATION SLOT {} LOGICAL {} ({})").format(
            sql.Identifier(self._request.slot),
            sql.SQL(str(self._request.start)),
            sql.SQL(", ").join(
                sql.SQL("{} {}").format(sql.Identifier(name), sql.Literal(value))
                for name, value in options.items()
            ),
        )
        result = self._connection.pgconn.exec_(command.as_string(self._connection).encode())
        if result.status != ExecStatus.COPY_BOTH:
            raise translate(
                psycopg.errors.error_from_result(result),
                f"starting replication from slot {self._request.slot}",
            )
        self._thread = threading.Thread(target=self._run, name="penstock-receive", daemon=True)
        self._thread.start()

    def take(self, timeout_seconds: float, hold_seconds: float = 0.0) -> list[bytes]:
        """Return the next messages in order, at most about ten thousand or some megabytes; an empty list if
        none arrived in time. With `hold_seconds`, messages are collected for that long unless there are
        already many. This saves calls if the consumer cannot use the messages earlier. Raises the error that
        ended the stream.
        """
        with self._changed:
            if hold_seconds > 0:
                self._changed.wait_for(
                    lambda: self._failure is not None or self._buffered_bytes >= _MANY_BYTES, hold_seconds
                )
            elif not self._batches and self._failure is None:
                self._changed.wait(timeout_seconds)
            if self._batches:
                messages, size = self._batches.popleft()
                while (
                    self._batches
                    and size < _GULP_BYTES
                    and len(messages) + len(self._batches[0][0]) <= _GULP_MESSAGES
                ):
                    more, more_bytes = self._batches.popleft()
                    messages += more
                    size += more_bytes
                self._buffered_bytes -= size
                self._taken_bytes += size
                self._changed.notify_all()
                return messages
            if self._failure is not None:
                raise self._failure
            return []

    def confirm(self, position: Position) -> None:
        """Tell the server that WAL up to `position` is no longer needed. Never moves backwards."""
        with self._changed:
            if position.value > max(self._confirmed, self._request.confirmed.value):
                self._confirmed = position.value
                self._status_due = 0.0

    @property
    def received(self) -> Lsn:
        return Lsn(self._received)

    @property
    def buffered_bytes(self) -> int:
        return self._buffered_bytes

    @property
    def taken_bytes(self) -> int:
        """The size of all messages that `take` has returned."""
        return self._taken_bytes

    def close(self) -> None:
        """End the stream and release the slot. May be called more than once."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        if self._connection is not None:
            self._connection.close()

    # --- the receive thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._receive()
        except psycopg.Error as error:
            self._fail(translate(error, "receiving changes"))
        except BaseException as error:  # noqa: BLE001 - the thread's edge: handed to the consumer, which raises it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _receive(self) -> None:
        assert self._connection is not None
        pgconn = self._connection.pgconn
        self._heard_at = time.monotonic()
        while not self._stopping:
            is_drained, count, size = self._read_batch(pgconn.get_copy_data)
            self._report_if_due()
            self._wait_for_room()
            if is_drained:
                self._check_silence(has_heard=self._pace.wait(count, size) or count > 0)
                self._read(pgconn)
        self._end_copy(pgconn)

    def _read(self, pgconn: PGconn) -> None:
        """Let libpq read the received data. Over TLS a call reads one record, and the server sends one record
        per row.
        """
        pgconn.consume_input()
        if pgconn.ssl_in_use:
            for _ in range(_GULP_MESSAGES):
                if not self._pace.is_readable():
                    return
                pgconn.consume_input()

    def _end_copy(self, pgconn: PGconn) -> None:
        """Send the last confirmation and end the copy: once the server acknowledges the end, it has processed
        the confirmation and the slot is free.
        """
        self._report(requests_reply=False)
        pgconn.put_copy_end()
        pgconn.flush()
        deadline = time.monotonic() + _LEAVE_SECONDS
        while time.monotonic() < deadline:
            length, _ = pgconn.get_copy_data(1)
            if length < 0:
                return
            if length == 0:
                select.select([pgconn.socket], [], [], _WAIT_SECONDS)
                pgconn.consume_input()

    def _read_batch(self, get: Callable[[int], tuple[int, memoryview]]) -> tuple[bool, int, int]:
        """Move the messages that libpq holds into the buffer. Returns whether libpq is drained, the number of
        messages, and their size.
        """
        messages: list[bytes] = []
        append = messages.append
        size = length = 0
        data: memoryview
        for length, data in map(get, repeat(1, _GULP_MESSAGES)):
            if length <= _KEEPALIVE_BYTES:
                if length <= 0:
                    break
                if data[_KEEPALIVE_BYTES - 1]:  # the server requests a reply
                    self._status_due = 0.0
            # The messages are copied to bytes, since the garbage collector would traverse every live
            # memoryview, which takes half of the time.
            append(bytes(data))
            size += length
            if size > _GULP_BYTES:
                break
        if messages:
            (reached,) = _WAL_START.unpack_from(messages[-1], 1)
            self._received = max(self._received, reached)
            self._hand_over(messages, size)
        if length < 0:
            self._ended()
        return length == 0, len(messages), size

    def _hand_over(self, messages: list[bytes], size: int) -> None:
        with self._changed:
            self._batches.append((messages, size))
            self._buffered_bytes += size
            self._changed.notify_all()

    def _wait_for_room(self) -> None:
        """Wait while the buffer is full. Status updates continue."""
        while not self._stopping and self._buffered_bytes > self._request.max_buffer_bytes:
            self._report_if_due()
            with self._changed:
                self._changed.wait(min(0.1, self._status_seconds))
            self._heard_at = time.monotonic()  # the pause was on this side

    def _check_silence(self, *, has_heard: bool) -> None:
        """Raise an error if the server stays silent. A connection that is open only on this side never fails
        by itself; TCP keepalives take minutes to detect it, and a proxy in between answers them.
        """
        now = time.monotonic()
        silent_seconds = now - self._heard_at
        if has_heard:
            self._heard_at, self._has_asked = now, False
        elif silent_seconds > self._silence_seconds:
            raise ConnectionLostError(f"the server has not answered for {silent_seconds:.0f} s")
        elif silent_seconds > self._silence_seconds / 2 and not self._has_asked:
            self._has_asked = True
            self._report(requests_reply=True)

    def _report_if_due(self) -> None:
        if time.monotonic() >= self._status_due:
            self._report(requests_reply=False)

    def _report(self, *, requests_reply: bool) -> None:
        """Send the received and confirmed positions to the server; with `requests_reply`, request an
        immediate reply.
        """
        if self._connection is None:
            return
        # Set before sending, so that a confirmation during the send is not delayed.
        self._status_due = time.monotonic() + self._status_seconds
        confirmed = self._confirmed
        # Each confirmed position is sent once, as the flush position. A server that shuts down waits until
        # everything it has sent counts as flushed, which may take very long if the position is that of a slow
        # target. If the last status message has flush position zero, the server waits for the received
        # position instead.
        flushed = confirmed if confirmed != self._reported else 0
        clock = int((time.time() - _POSTGRES_EPOCH_SECONDS) * 1_000_000)
        pgconn = self._connection.pgconn
        pgconn.put_copy_data(
            _STATUS.pack(b"r", max(self._received, confirmed), flushed, flushed, clock, requests_reply)
        )
        pgconn.flush()
        self._reported = confirmed

    def _ended(self) -> None:
        """Raise the error for a COPY that the server ended."""
        assert self._connection is not None
        result = self._connection.pgconn.get_result()
        if result is not None and result.status == ExecStatus.FATAL_ERROR:
            error = psycopg.errors.error_from_result(result)
            if isinstance(error, psycopg.errors.UndefinedObject) and self._request.publication in str(error):
                raise self._unpublished() from error
            raise translate(error, "receiving changes")
        raise ConnectionLostError("the server ended the replication stream")

    def _unpublished(self) -> PublicationError:
        """Return the error for a change that was made before the publication was created. Servers before
        version 18 cannot decode such a change, and stop at the same change on every attempt.
        """
        return PublicationError(
            f"publication {self._request.publication} did not exist when the next change was made, so the "
            "server cannot decode it",
            hint=f"{drop_statement(self._request.slot)} CREATE PUBLICATION "
            f"{identifier(self._request.publication)} FOR TABLE …; "
            f"(unless the publication exists again); then {COPY_AGAIN}",
        )


def plugin_options(request: StreamRequest) -> dict[str, str]:
    """Return the options for pgoutput.

    With protocol version 2 the server sends a long transaction in blocks while it is open. This is off with
    logical messages: inside a block a message names the whole transaction, not its subtransaction, so
    messages that are rolled back could not be distinguished from those that commit. With protocol version 1,
    every transaction is sent when it has committed.

    two_phase is always off: a prepared transaction is sent when it commits, like any other.
    """
    options = {"publication_names": _quoted(request.publication)}
    if request.wants_messages:
        return {"proto_version": "1", "messages": "true", **options}
    return {"proto_version": "2", "streaming": "on", **options}


def parse_duration(text: str) -> float:
    """Return the seconds in the text of a setting such as wal_sender_timeout (`1min`, `500ms`, `0`)."""
    units = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    return float(digits or 0) * units.get(text[len(digits) :], 0.001)


def _quoted(publication: str) -> str:
    """Quote a name as pgoutput's identifier lists require."""
    escaped = publication.replace('"', '""')
    return f'"{escaped}"'
