"""The I/O shell of the replication stream.

`ReplicationStream` owns one connection and one daemon thread. The thread takes raw CopyData messages off the socket, answers keepalives and
puts the messages, untouched and in order, into a bounded buffer; it never waits for decoding, the spool or Spark. At the buffer's limit it
stops reading but goes on reporting, so that the server does not take us for dead. Nor do we trust a silent server: when nothing comes it is
asked for an answer, and without one the connection counts as lost.

How the socket is drained decides the speed; `pace` says how.
"""

from __future__ import annotations

import select
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
from penstock.postgres.connection import Connection, SourceAddress, connect_replication, replication_command, translate
from penstock.postgres.pace import Pace
from penstock.postgres.queries import identifier
from penstock.postgres.slot import COPY_ANEW, drop_statement

_STATUS = struct.Struct("!cQQQqB")
_WAL_START = struct.Struct("!Q")
_KEEPALIVE_BYTES = 18
_POSTGRES_EPOCH_SECONDS = 946_684_800

_INPUT_BUFFER_BYTES = 8_000_000
_GULP_MESSAGES = 10_000
_GULP_BYTES = 8 << 20
_MANY_BYTES = 1 << 18
"""Decoding fewer takes as long as decoding one."""
_WAIT_SECONDS = 0.05
_LEAVE_SECONDS = 2.0
_STATUS_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """What to stream: `start` is where the caller's own knowledge ends; the server never goes back before what was confirmed."""

    slot: str
    publication: str
    start: Position
    max_buffer_bytes: int = 128 << 20
    confirmed: Position = Position.ZERO
    """What the slot has confirmed already. Some servers would let it be moved back; `confirm` does not."""
    silence_seconds: float = 60.0
    """How long the server may say nothing at all, if its wal_sender_timeout is not longer still."""
    wants_messages: bool = False
    """Whether the server sends logical messages too."""


class ReplicationStream:
    """Receives in the background between `open` and `close`. `take` and `confirm` are for one consumer thread."""

    def __init__(self, address: SourceAddress, request: StreamRequest) -> None:
        self._address = address
        self._request = request
        self._connection: Connection | None = None
        self._pace: Pace
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._gulps: deque[tuple[list[bytes], int]] = deque()
        self._buffered_bytes = 0
        self._taken_bytes = 0
        self._failure: BaseException | None = None
        self._stopping = False
        self._confirmed = 0  # the server ignores a zero: nothing is confirmed until `confirm` says so
        self._told = 0
        self._received = 0
        self._status_due = 0.0
        self._status_seconds = _STATUS_SECONDS
        self._silence_seconds = request.silence_seconds
        self._heard_at = 0.0
        self._has_asked = False
        self.system_identifier = ""
        self.timeline = 0

    def open(self) -> None:
        """Connect and learn who the server is. Nothing flows until `start`."""
        self._connection = connect_replication(self._address, "penstock capture")
        self.system_identifier, timeline, *_ = replication_command(self._connection, "IDENTIFY_SYSTEM", "identifying the server")
        self.timeline = int(timeline)
        (timeout,) = replication_command(self._connection, "SHOW wal_sender_timeout", "asking for wal_sender_timeout")
        timeout_seconds = parse_duration(timeout)
        if timeout_seconds > 0:
            self._status_seconds = min(_STATUS_SECONDS, timeout_seconds / 4)
            self._silence_seconds = max(self._silence_seconds, timeout_seconds)
        self._pace = Pace(self._connection.pgconn.socket)
        # libpq's input buffer grows to the largest message and never shrinks: one large value makes room for whole gulps.
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
            sql.SQL(", ").join(sql.SQL("{} {}").format(sql.Identifier(name), sql.Literal(value)) for name, value in options.items()),
        )
        result = self._connection.pgconn.exec_(command.as_string(self._connection).encode())
        if result.status != ExecStatus.COPY_BOTH:
            raise translate(psycopg.errors.error_from_result(result), f"starting replication from slot {self._request.slot}")
        self._thread = threading.Thread(target=self._run, name="penstock-receive", daemon=True)
        self._thread.start()

    def take(self, timeout_seconds: float, hold_seconds: float = 0.0) -> list[bytes]:
        """The next messages in order, some ten thousand or some megabytes at most; an empty list if none came in time.

        With `hold_seconds`, they are left to gather for so long, unless that is many already: a caller who can do nothing with them before
        then saves the cost of each further call. Raises what ended the stream.
        """
        with self._changed:
            if hold_seconds > 0:
                self._changed.wait_for(lambda: self._failure is not None or self._buffered_bytes >= _MANY_BYTES, hold_seconds)
            elif not self._gulps and self._failure is None:
                self._changed.wait(timeout_seconds)
            if self._gulps:
                messages, size = self._gulps.popleft()
                while self._gulps and size < _GULP_BYTES and len(messages) + len(self._gulps[0][0]) <= _GULP_MESSAGES:
                    more, more_bytes = self._gulps.popleft()
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
        """The size of all messages that `take` has given out."""
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
        self._heard_at = time.monotonic()
        while not self._stopping:
            is_drained, count, size = self._gulp(pgconn.get_copy_data)
            self._report_if_due()
            self._wait_for_room()
            if is_drained:
                self._check_silence(has_heard=self._pace.wait(count, size) or count > 0)
                self._read(pgconn)
        self._take_leave(pgconn)

    def _read(self, pgconn: PGconn) -> None:
        """Have libpq read what has arrived. Over TLS a call brings one record, and the server makes one of each row."""
        pgconn.consume_input()
        if pgconn.ssl_in_use:
            for _ in range(_GULP_MESSAGES):
                if not self._pace.is_readable():
                    return
                pgconn.consume_input()

    def _take_leave(self, pgconn: PGconn) -> None:
        """Say what was confirmed last, and end the copy in order: once the server agrees, it has taken note, and the slot is free."""
        self._report(asks=False)
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

    def _gulp(self, get: Callable[[int], tuple[int, memoryview]]) -> tuple[bool, int, int]:
        """Move what libpq has into the buffer. Says whether libpq is drained, how many messages came, and their size."""
        messages: list[bytes] = []
        append = messages.append
        size = length = 0
        data: memoryview
        for length, data in map(get, repeat(1, _GULP_MESSAGES)):
            if length <= _KEEPALIVE_BYTES:
                if length <= 0:
                    break
                if data[_KEEPALIVE_BYTES - 1]:  # the server wants an answer
                    self._status_due = 0.0
            # Bytes, not views: the garbage collector visits every view that is alive, again and again, and spends half the time on that.
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
            self._gulps.append((messages, size))
            self._buffered_bytes += size
            self._changed.notify_all()

    def _wait_for_room(self) -> None:
        """Stop reading while the consumer is behind; reporting goes on."""
        while not self._stopping and self._buffered_bytes > self._request.max_buffer_bytes:
            self._report_if_due()
            with self._changed:
                self._changed.wait(min(0.1, self._status_seconds))
            self._heard_at = time.monotonic()  # it is we who did not listen

    def _check_silence(self, *, has_heard: bool) -> None:
        """A connection that is open on our side only never fails by itself; TCP's own checks take minutes, and do not see past a proxy."""
        now = time.monotonic()
        silent_seconds = now - self._heard_at
        if has_heard:
            self._heard_at, self._has_asked = now, False
        elif silent_seconds > self._silence_seconds:
            raise ConnectionLostError(f"the server has not answered for {silent_seconds:.0f} s")
        elif silent_seconds > self._silence_seconds / 2 and not self._has_asked:
            self._has_asked = True
            self._report(asks=True)

    def _report_if_due(self) -> None:
        if time.monotonic() >= self._status_due:
            self._report(asks=False)

    def _report(self, *, asks: bool) -> None:
        """Tell the server where we are; with `asks`, it answers at once."""
        if self._connection is None:
            return
        # First, so that a confirmation that comes in meanwhile is not put off.
        self._status_due = time.monotonic() + self._status_seconds
        confirmed = self._confirmed
        # Told once: a server that shuts down waits until all it has sent is flushed, if it was told last what is, and that may be never as
        # long as a target is behind. Of a zero it takes no note, and waits for what we have received.
        flushed = confirmed if confirmed != self._told else 0
        clock = int((time.time() - _POSTGRES_EPOCH_SECONDS) * 1_000_000)
        pgconn = self._connection.pgconn
        pgconn.put_copy_data(_STATUS.pack(b"r", max(self._received, confirmed), flushed, flushed, clock, asks))
        pgconn.flush()
        self._told = confirmed

    def _ended(self) -> None:
        """The server ended the copy: say why."""
        assert self._connection is not None
        result = self._connection.pgconn.get_result()
        if result is not None and result.status == ExecStatus.FATAL_ERROR:
            error = psycopg.errors.error_from_result(result)
            if isinstance(error, psycopg.errors.UndefinedObject) and self._request.publication in str(error):
                raise self._unpublished() from error
            raise translate(error, "receiving changes")
        raise ConnectionLostError("the server ended the replication stream")

    def _unpublished(self) -> PublicationError:
        """Servers before 18 decode a change only if there was a publication when it was made, and will stop there again each time."""
        return PublicationError(
            f"publication {self._request.publication} did not exist when a change was made that comes next, and the server cannot read on",
            hint=f"{drop_statement(self._request.slot)} CREATE PUBLICATION {identifier(self._request.publication)} FOR TABLE …; "
            f"unless it is there again; then {COPY_ANEW}",
        )


def plugin_options(request: StreamRequest) -> dict[str, str]:
    """Options for pgoutput. With protocol version 2 the server sends a long transaction in blocks while it is open.

    Not with logical messages: inside a block a message names the whole transaction, never the savepoint after which it was
    sent, so one that is rolled back could not be told from one that commits. Then every transaction comes when it has committed.

    Never two_phase: a prepared transaction comes when it commits, like any other.
    """
    options = {"publication_names": _quoted(request.publication)}
    if request.wants_messages:
        return {"proto_version": "1", "messages": "true", **options}
    return {"proto_version": "2", "streaming": "on", **options}


def parse_duration(text: str) -> float:
    """Seconds, given how the server prints a setting such as wal_sender_timeout (`1min`, `500ms`, `0`)."""
    units = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    return float(digits or 0) * units.get(text[len(digits) :], 0.001)


def _quoted(publication: str) -> str:
    """As pgoutput's own list of identifiers wants it."""
    escaped = publication.replace('"', '""')
    return f'"{escaped}"'
