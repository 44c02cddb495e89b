"""The I/O shell of the replication stream.

`ReplicationStream` owns one connection and one daemon thread. The thread takes raw CopyData messages off the socket, answers keepalives and
puts the messages, untouched and in order, into a bounded buffer; it never waits for decoding, the spool or Spark. At the buffer's limit it
stops reading but goes on reporting, so that the server does not take us for dead.

How the socket is drained decides the speed. A client that empties it at once makes the server send one small packet a row; one that lets it
fill for some milliseconds makes the server send in blocks, at twice the rate and a fraction of the CPU. So, while the stream is busy, the
thread pauses between gulps, and libpq's input buffer is grown beforehand to take a whole gulp. A Unix socket's buffer is too small for that:
there it only waits for readability.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import psycopg
from psycopg import sql
from psycopg.pq import ExecStatus

from penstock.errors import ConnectionLostError
from penstock.position import Lsn, Position
from penstock.postgres.connection import Connection, SourceAddress, connect_replication, replication_command, translate

_STATUS = struct.Struct("!cQQQqB")
_WAL_START = struct.Struct("!Q")
_KEEPALIVE = ord("k")
_POSTGRES_EPOCH_SECONDS = 946_684_800

_INPUT_BUFFER_BYTES = 8_000_000
_GULP_MESSAGES = 10_000
_GULP_BYTES = 8 << 20
_BUSY_WINDOW_SECONDS = 0.005
_BUSY_MESSAGES = 100
_PAUSE_SECONDS = 0.012
_STATUS_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """What to stream: `start` is where the caller's own knowledge ends; the server never goes back before what was confirmed."""

    slot: str
    publication: str
    start: Position
    max_buffer_bytes: int = 128 << 20


class ReplicationStream:
    """Receives in the background between `open` and `close`. `take` and `confirm` are for one consumer thread."""

    def __init__(self, address: SourceAddress, request: StreamRequest) -> None:
        self._address = address
        self._request = request
        self._connection: Connection | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._gulps: deque[tuple[list[memoryview], int]] = deque()
        self._buffered_bytes = 0
        self._failure: BaseException | None = None
        self._stopping = False
        self._confirmed = 0  # the server ignores a zero: nothing is confirmed until `confirm` says so
        self._received = 0
        self._status_due = 0.0
        self._status_seconds = _STATUS_SECONDS
        self.system_identifier = ""
        self.timeline = 0

    def open(self) -> None:
        """Connect and learn who the server is. Nothing flows until `start`."""
        self._connection = connect_replication(self._address, "penstock capture")
        self.system_identifier, timeline, *_ = replication_command(self._connection, "IDENTIFY_SYSTEM", "identifying the server")
        self.timeline = int(timeline)
        (timeout,) = replication_command(self._connection, "SHOW wal_sender_timeout", "asking for wal_sender_timeout")
        self._status_seconds = status_interval(timeout)
        # libpq's input buffer grows to the largest message and never shrinks: one large value makes room for whole gulps.
        self._connection.pgconn.exec_(b"SELECT pg_catalog.repeat('x', %d)" % _INPUT_BUFFER_BYTES)

    def start(self) -> None:
        if self._connection is None:
            raise RuntimeError("open the stream before starting it")
        command = sql.SQL("START_REPLICATION SLOT {} LOGICAL {} (proto_version '1', publication_names {})").format(
            sql.Identifier(self._request.slot), sql.SQL(str(self._request.start)), sql.Literal(_quoted(self._request.publication))
        )
        result = self._connection.pgconn.exec_(command.as_string(self._connection).encode())
        if result.status != ExecStatus.COPY_BOTH:
            raise translate(psycopg.errors.error_from_result(result), f"starting replication from slot {self._request.slot}")
        self._thread = threading.Thread(target=self._run, name="penstock-receive", daemon=True)
        self._thread.start()

    def take(self, timeout_seconds: float) -> list[memoryview]:
        """The next messages in order, some ten thousand at most; an empty list if none came in time. Raises what ended the stream."""
        with self._changed:
            if not self._gulps and self._failure is None:
                self._changed.wait(timeout_seconds)
            if self._gulps:
                messages, size = self._gulps.popleft()
                while self._gulps and len(messages) + len(self._gulps[0][0]) <= _GULP_MESSAGES:
                    more, more_bytes = self._gulps.popleft()
                    messages += more
                    size += more_bytes
                self._buffered_bytes -= size
                self._changed.notify_all()
                return messages
            if self._failure is not None:
                raise self._failure
            return []

    def confirm(self, position: Position) -> None:
        """Tell the server that WAL up to `position` is no longer needed. Never moves backwards."""
        with self._changed:
            if position.value > self._confirmed:
                self._confirmed = position.value
                self._status_due = 0.0

    @property
    def received(self) -> Lsn:
        return Lsn(self._received)

    @property
    def buffered_bytes(self) -> int:
        return self._buffered_bytes

    def close(self) -> None:
        """End the stream and release the slot. May be called more than once."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        if self._connection is not None:
            self._connection.close()

    # --- the receive thread --------------------------------------------------------------------------------------------

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
        pause = 0.0 if _is_unix(pgconn.socket) else _PAUSE_SECONDS
        get, consume = pgconn.get_copy_data, pgconn.consume_input
        window_start, window_messages = time.monotonic(), 0
        while not self._stopping:
            drained, count = self._gulp(get)
            self._report_if_due()
            self._wait_for_room()
            if not drained:
                continue
            window_messages += count
            now = time.monotonic()
            if count == 0:
                self._wait_readable(pgconn.socket)
            elif pause and window_messages >= _BUSY_MESSAGES:
                time.sleep(pause)
            if now - window_start > _BUSY_WINDOW_SECONDS:
                window_start, window_messages = now, 0
            consume()
        self._status_due = 0.0  # the last word: what was confirmed while we were stopping
        self._report_if_due()

    def _gulp(self, get: Callable[[int], tuple[int, memoryview]]) -> tuple[bool, int]:
        """Move what libpq has into the buffer. Says whether libpq is drained, and how many messages came."""
        messages: list[memoryview] = []
        append = messages.append
        size = 0
        drained = False
        while len(messages) < _GULP_MESSAGES and size < _GULP_BYTES:
            length, data = get(1)
            if length <= 0:
                if length < 0:
                    self._hand_over(messages, size)
                    self._ended()
                drained = True
                break
            append(data)
            size += length
            if data[0] == _KEEPALIVE and data[17]:  # the server wants an answer
                self._status_due = 0.0
        if messages:
            (self._received,) = _WAL_START.unpack_from(messages[-1], 1)
            self._hand_over(messages, size)
        return drained, len(messages)

    def _hand_over(self, messages: list[memoryview], size: int) -> None:
        with self._changed:
            self._gulps.append((messages, size))
            self._buffered_bytes += size
            self._changed.notify_all()

    def _wait_for_room(self) -> None:
        """Stop reading while the consumer is behind; reporting goes on."""
        while not self._stopping and self._buffered_bytes > self._request.max_buffer_bytes:
            self._report_if_due()
            with self._changed:
                self._changed.wait(0.1)

    def _wait_readable(self, fileno: int) -> None:
        select.select([fileno], [], [], 0.05)

    def _report_if_due(self) -> None:
        now = time.monotonic()
        if now < self._status_due or self._connection is None:
            return
        confirmed = self._confirmed
        clock = int((time.time() - _POSTGRES_EPOCH_SECONDS) * 1_000_000)
        pgconn = self._connection.pgconn
        pgconn.put_copy_data(_STATUS.pack(b"r", max(self._received, confirmed), confirmed, confirmed, clock, 0))
        pgconn.flush()
        self._status_due = now + self._status_seconds

    def _ended(self) -> None:
        """The server ended the copy: say why."""
        assert self._connection is not None
        result = self._connection.pgconn.get_result()
        if result is not None and result.status == ExecStatus.FATAL_ERROR:
            raise translate(psycopg.errors.error_from_result(result), "receiving changes")
        raise ConnectionLostError("the server ended the replication stream")


def status_interval(wal_sender_timeout: str) -> float:
    """How often to report, in seconds, given how the server prints its wal_sender_timeout (`1min`, `500ms`, `0`)."""
    units = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
    digits = wal_sender_timeout.rstrip("abcdefghijklmnopqrstuvwxyz")
    seconds = float(digits or 0) * units.get(wal_sender_timeout[len(digits) :], 0.001)
    return min(_STATUS_SECONDS, seconds / 4) if seconds > 0 else _STATUS_SECONDS


def _quoted(publication: str) -> str:
    """As pgoutput's own list of identifiers wants it."""
    escaped = publication.replace('"', '""')
    return f'"{escaped}"'


def _is_unix(fileno: int) -> bool:
    with socket.socket(fileno=socket.dup(fileno)) as probe:
        return probe.family == socket.AF_UNIX


