"""The replication stream against a real server: confirmed positions, and how it survives errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from psycopg.conninfo import conninfo_to_dict

from penstock.capture.provision import ensure_capture
from penstock.change import Transactions
from penstock.errors import ConnectionLostError, SlotBusyError
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from penstock.postgres.replication import ReplicationStream, StreamRequest
from penstock.schema import TableName
from tests.support.fix_postgres import Database
from tests.support.fix_proxy import ProxyFactory, TcpProxy
from tests.support.waiting import DEADLINE_SECONDS, wait_for


class Source:
    """A database with one published table, and a slot on it."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.address = SourceAddress.parse(database.dsn)
        self.slot = f"{database.name}_slot"
        database.execute("CREATE TABLE public.t (id bigint PRIMARY KEY, note text)")
        ensure_capture(self.address, self.slot, "p", [TableName("public", "t")])

    def insert(self, low: int, high: int, note: str = "x") -> Position:
        """The position after the commit."""
        self.database.execute(
            "INSERT INTO public.t SELECT i, %s FROM generate_series(%s::bigint, %s) i", note, low, high
        )
        return Position.parse(self.database.query("SELECT pg_current_wal_insert_lsn()::text")[0][0])

    @property
    def confirmed(self) -> Position:
        row = self.database.query(
            "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", self.slot
        )
        return Position.parse(row[0][0])

    @property
    def is_active(self) -> bool:
        row = self.database.query("SELECT active FROM pg_replication_slots WHERE slot_name = %s", self.slot)
        return bool(row[0][0])

    @contextmanager
    def stream(
        self,
        address: SourceAddress | None = None,
        *,
        max_buffer_bytes: int = 128 << 20,
        confirmed: Position = Position.ZERO,
        silence_seconds: float = 60.0,
    ) -> Iterator[ReplicationStream]:
        request = StreamRequest(self.slot, "p", Position.ZERO, max_buffer_bytes, confirmed, silence_seconds)
        stream = ReplicationStream(address or self.address, request)
        try:
            stream.open()
            stream.start()
            yield stream
        finally:
            stream.close()


@pytest.fixture
def source(database: Database) -> Source:
    return Source(database)


class Rows:
    """Reads the ids of the rows in a stream.

    One for each stream, since the server describes a table once in a connection.
    """

    def __init__(self, stream: ReplicationStream) -> None:
        self._stream = stream
        self._decoder = PgOutputDecoder()

    def read(self, count: int) -> list[int]:
        ids: list[int] = []
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(ids) < count and time.monotonic() < deadline:
            for step in self._decoder.decode(self._stream.take(0.2)):
                if isinstance(step, Transactions):
                    ids += [row for batch in step.batches for row in batch.rows.column("id").to_pylist()]
        return ids


def read_rows(stream: ReplicationStream, count: int) -> list[int]:
    return Rows(stream).read(count)


# --- confirming ---------------------------------------------------------------------------------------------


def test_slot_is_not_confirmed_before_confirm_is_called(source: Source) -> None:
    before = source.confirmed
    address = source.address.with_parameters({"options": "-c wal_sender_timeout=400ms"})
    with source.stream(address) as stream:
        end = source.insert(1, 1000)
        assert read_rows(stream, 1000) == list(range(1, 1001))
        # Several reports have reached the server by the time it knows that all was written.
        wait_for(
            lambda: reported(source, "write") >= end, f"a report of {end}", lambda: reported(source, "write")
        )
        assert source.confirmed == before
    assert source.confirmed == before
    with source.stream() as stream:
        assert read_rows(stream, 1000) == list(range(1, 1001))


def reported(source: Source, kind: str) -> Position:
    """A position that the stream reported to the server: written or flushed."""
    row = source.database.query(
        "SELECT to_jsonb(r) ->> %s FROM pg_stat_replication r WHERE pid = %s",
        f"{kind}_lsn",
        walsender(source),
    )
    return Position.parse(row[0][0]) if row and row[0][0] else Position.ZERO


def walsender(source: Source) -> int | None:
    row = source.database.query(
        "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", source.slot
    )
    pid: int | None = row[0][0]
    return pid


def test_confirm_moves_the_slot_and_never_backwards(source: Source) -> None:
    begin = source.confirmed
    with source.stream(confirmed=begin) as stream:
        middle = source.insert(1, 10)
        end = source.insert(11, 20)
        assert read_rows(stream, 20) == list(range(1, 21))
        stream.confirm(end)
        wait_for(lambda: source.confirmed == end, f"the slot at {end}", lambda: source.confirmed)
        stream.confirm(middle)
    assert source.confirmed == end
    address = source.address.with_parameters({"options": "-c wal_sender_timeout=400ms"})
    with source.stream(address, confirmed=end) as stream:
        stream.confirm(middle)
        last = source.insert(21, 21)
        assert read_rows(stream, 1) == [21]
        wait_for(
            lambda: reported(source, "write") >= last,
            f"a report of {last}",
            lambda: reported(source, "write"),
        )
        assert reported(source, "flush") == Position.ZERO
        stream.confirm(last)
        wait_for(lambda: source.confirmed >= last, f"the slot at {last}", lambda: source.confirmed)


def test_position_confirmed_right_before_the_end_still_reaches_the_server(source: Source) -> None:
    with source.stream() as stream:
        end = source.insert(1, 10)
        assert len(read_rows(stream, 10)) == 10
        stream.confirm(end)
    wait_for(lambda: source.confirmed == end, f"the slot at {end}", lambda: source.confirmed)


def test_closing_releases_the_slot_at_once(source: Source) -> None:
    with source.stream() as stream:
        source.insert(1, 1)
        assert read_rows(stream, 1) == [1]
        assert source.is_active
        started = time.monotonic()
    wait_for(lambda: not source.is_active, "a free slot", lambda: walsender(source))
    assert time.monotonic() - started < 2.0


# --- flow ---------------------------------------------------------------------------------------------------


def test_stuck_consumer_is_kept_alive_and_the_buffer_stays_bounded(source: Source) -> None:
    limit = 4 << 20
    address = source.address.with_parameters({"options": "-c wal_sender_timeout=1s"})
    for low in range(0, 100_000, 10_000):
        source.insert(low + 1, low + 10_000, note="y" * 200)
    with source.stream(address, max_buffer_bytes=limit) as stream:
        wait_for(lambda: stream.buffered_bytes > limit, "a full buffer", lambda: stream.buffered_bytes)
        pid = walsender(source)
        largest = watch(lambda: stream.buffered_bytes, seconds=3.0)
        # The last read before the limit may exceed it.
        assert largest <= limit + (10 << 20)
        assert walsender(source) == pid
        assert read_rows(stream, 100_000) == list(range(1, 100_001))


def watch(figure: Callable[[], int], *, seconds: float) -> int:
    """The largest value over a span that is itself the subject: longer than the server's time-out."""
    largest = 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        largest = max(largest, figure())
        time.sleep(0.01)
    return largest


def test_small_transaction_is_handed_over_without_waiting_for_more(source: Source) -> None:
    with source.stream() as stream:
        rows = Rows(stream)
        source.insert(0, 0)
        rows.read(1)
        delays = []
        for number in range(1, 21):
            source.insert(number, number)
            committed = time.monotonic()
            assert rows.read(1) == [number]
            delays.append(time.monotonic() - committed)
    assert sorted(delays)[10] < 0.1, delays


# --- trouble ------------------------------------------------------------------------------------------------


def between(source: Source, proxy: ProxyFactory, **parameters: str) -> tuple[TcpProxy, SourceAddress]:
    """A proxy in front of the server, and the address that leads through it."""
    target = conninfo_to_dict(source.address.dsn)
    made = proxy(str(target["host"]), int(str(target["port"])))
    return made, source.address.with_parameters({"host": made.host, "port": str(made.port), **parameters})


def test_cut_connection_surfaces_from_take_after_received_changes(
    source: Source, proxy: ProxyFactory
) -> None:
    network, address = between(source, proxy)
    with source.stream(address) as stream:
        source.insert(1, 100)
        wait_for(lambda: stream.buffered_bytes > 3000, "arrived rows", lambda: stream.buffered_bytes)
        network.cut()
        wait_for(lambda: stream._failure is not None, "a noticed cut", lambda: stream.buffered_bytes)
        assert read_until_failure(stream) >= 100


def read_until_failure(stream: ReplicationStream) -> int:
    messages = 0
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        try:
            messages += len(stream.take(0.2))
        except ConnectionLostError:
            return messages
    raise AssertionError(f"the stream did not fail; it gave {messages} messages")


def test_half_open_connection_is_noticed(source: Source, proxy: ProxyFactory) -> None:
    network, address = between(source, proxy, options="-c wal_sender_timeout=1s")
    with source.stream(address, silence_seconds=1.0) as stream:
        source.insert(1, 1)
        assert read_rows(stream, 1) == [1]
        network.half_open()
        read_until_failure(stream)
        with pytest.raises(ConnectionLostError, match="has not answered"):
            stream.take(0.0)


def test_idle_server_that_answers_is_not_taken_for_dead(source: Source) -> None:
    address = source.address.with_parameters({"options": "-c wal_sender_timeout=600ms"})
    with source.stream(address, silence_seconds=0.5) as stream:
        pid = walsender(source)
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline:
            stream.take(0.1)
        assert walsender(source) == pid
        source.insert(1, 1)
        assert read_rows(stream, 1) == [1]


def test_terminated_server_process_is_a_lost_connection(source: Source) -> None:
    with source.stream() as stream:
        source.insert(1, 1)
        assert read_rows(stream, 1) == [1]
        source.database.execute("SELECT pg_terminate_backend(%s)", walsender(source))
        read_until_failure(stream)


def test_busy_slot_is_named_as_such(source: Source) -> None:
    with source.stream() as first:
        source.insert(1, 1)
        assert read_rows(first, 1) == [1]
        with pytest.raises(SlotBusyError), source.stream():
            pass
