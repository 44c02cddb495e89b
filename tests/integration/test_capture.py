"""`SpoolCapture` against a real server: nothing lost and nothing doubled, whatever happens to the connection, the slot and the spool."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from psycopg.conninfo import conninfo_to_dict

from penstock.capture import spooling
from penstock.capture.provision import ensure_capture
from penstock.capture.settings import CaptureLimits, CaptureSettings
from penstock.capture.spooling import SpoolCapture
from penstock.change import LogStep, TransactionPiece
from penstock.errors import PenstockError, PositionGapError, SlotMissingError
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.postgres.pgoutput.decoder import PIECE_MESSAGES, PgOutputDecoder
from penstock.postgres.pgoutput.framing import Payload
from penstock.schema import TableName
from penstock.spool.consumers import release
from penstock.spool.reader import SpoolReader
from penstock.spool.status import load_status
from tests.fix_postgres import Database
from tests.fix_proxy import ProxyFactory, TcpProxy

DEADLINE_SECONDS = 60.0
QUICK = CaptureLimits(quiet_seconds=0.1)


def wait_for(condition: Callable[[], bool], what: str, state: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true; at the end: {state()}")
        time.sleep(0.02)


class Source:
    """A database with one published table and one that is not, a slot, and a spool."""

    def __init__(self, database: Database, spool: Path) -> None:
        self.database = database
        self.spool = spool
        self.address = SourceAddress.parse(database.dsn)
        self.slot = f"{database.name}_slot"
        database.execute("CREATE TABLE public.t (id bigint PRIMARY KEY, note text)")
        database.execute("CREATE TABLE public.other (id bigint)")
        ensure_capture(self.address, self.slot, "p", [TableName("public", "t")])

    def insert(self, low: int, high: int, note: str = "x") -> Position:
        self.database.execute("INSERT INTO public.t SELECT i, %s FROM generate_series(%s::bigint, %s) i", note, low, high)
        return self.position

    @property
    def position(self) -> Position:
        return Position.parse(self.database.query("SELECT pg_current_wal_insert_lsn()::text")[0][0])

    @property
    def confirmed(self) -> Position:
        rows = self.database.query("SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", self.slot)
        return Position.parse(rows[0][0])

    @property
    def active_pid(self) -> int | None:
        pid: int | None = self.database.query("SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", self.slot)[0][0]
        return pid

    def settings(self, limits: CaptureLimits = QUICK, address: SourceAddress | None = None) -> CaptureSettings:
        return CaptureSettings(address or self.address, self.slot, "p", self.spool, (TableName("public", "t"),), limits)

    @contextmanager
    def capture(self, limits: CaptureLimits = QUICK, address: SourceAddress | None = None) -> Iterator[SpoolCapture]:
        capture = SpoolCapture(self.settings(limits, address))
        capture.start()
        try:
            yield capture
        finally:
            capture.stop()

    def ids(self, after: Position | None = None, upto: Position | None = None) -> list[int]:
        """The ids of the rows in the spool, or in a range of it, in order."""
        reader = SpoolReader(self.spool)
        start, end = after or reader.start, upto or reader.end
        if start is None or end is None:
            return []
        slices = [part for table in reader.read(start, end).tables.values() for part in table.slices]
        return [row for part in slices for row in pq.read_table(part.path, columns=["id"]).column("id").to_pylist()]

    def with_spool(self, spool: Path) -> Source:
        """The same slot, for a capture of its own."""
        other = copy.copy(self)
        other.spool = spool
        return other

    def state(self) -> object:
        return load_status(self.spool)


@pytest.fixture
def source(database: Database, tmp_path: Path) -> Source:
    return Source(database, tmp_path / "spool")


def through(source: Source, proxy: ProxyFactory) -> tuple[TcpProxy, SourceAddress]:
    target = conninfo_to_dict(source.address.dsn)
    made = proxy(str(target["host"]), int(str(target["port"])))
    return made, source.address.with_parameters({"host": made.host, "port": str(made.port)})


# --- trouble that time mends --------------------------------------------------------------------------------------------------


def test_capture_resumes_after_cut_connections_with_no_row_lost_or_doubled(source: Source, proxy: ProxyFactory) -> None:
    network, address = through(source, proxy)
    with source.capture(address=address) as capture:
        assert capture.wait_beyond(Position.ZERO, DEADLINE_SECONDS)
        for part in range(4):
            source.insert(part * 5000 + 1, part * 5000 + 5000)
            network.cut()
        assert capture.wait_until(source.position, DEADLINE_SECONDS), source.state()
    assert source.ids() == list(range(1, 20_001))


def test_capture_waits_for_a_busy_slot_until_it_is_free(source: Source, tmp_path: Path) -> None:
    with ExitStack() as second:
        with source.capture() as first:
            end = source.insert(1, 10)
            assert first.wait_until(end, DEADLINE_SECONDS)
            rival = source.with_spool(tmp_path / "rival")
            waiting = second.enter_context(rival.capture())
            wait_for(lambda: failure_code(rival.spool) == "PEN-1202", "a capture that waits for the slot", rival.state)
        assert waiting.wait_until(end, DEADLINE_SECONDS), rival.state()
        assert rival.ids() == list(range(1, 11))


def failure_code(spool: Path) -> str | None:
    status = load_status(spool)
    return status.failure.code if status is not None and status.failure is not None else None


# --- trouble that it does not ----------------------------------------------------------------------------------------------------


def test_missing_slot_ends_the_capture_without_a_retry(source: Source) -> None:
    with source.capture() as capture:
        assert capture.wait_until(source.insert(1, 10), DEADLINE_SECONDS)
    wait_for(lambda: source.active_pid is None, "a free slot", lambda: source.active_pid)
    source.database.execute("SELECT pg_drop_replication_slot(%s)", source.slot)
    assert isinstance(failure_of(source), SlotMissingError)
    assert source.database.query("SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", source.slot) == [(0,)]
    assert failure_code(source.spool) == "PEN-1201"


def test_slot_ahead_of_a_consumer_and_of_the_spool_is_a_gap(source: Source) -> None:
    with source.capture() as capture:
        end = source.insert(1, 10)
        assert capture.wait_until(end, DEADLINE_SECONDS)
    release(source.spool, "pipeline", end)
    wait_for(lambda: source.active_pid is None, "a free slot", lambda: source.active_pid)
    source.insert(11, 20)
    source.database.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_insert_lsn())", source.slot)
    assert isinstance(failure_of(source), PositionGapError)
    assert source.ids() == list(range(1, 11))


def failure_of(source: Source) -> PenstockError:
    with source.capture() as capture, pytest.raises(PenstockError) as raised:
        capture.wait_until(Position.of((1 << 64) - 1), DEADLINE_SECONDS)
    return raised.value


# --- quiet ------------------------------------------------------------------------------------------------------------------------


def test_spool_and_slot_advance_while_only_other_tables_are_busy(source: Source) -> None:
    with source.capture() as capture:
        assert capture.wait_until(source.insert(1, 10), DEADLINE_SECONDS)
        source.database.execute("INSERT INTO public.other SELECT generate_series(1, 50000)")
        end = source.position
        assert capture.wait_until(end, DEADLINE_SECONDS), source.state()
        before = source.confirmed
        assert before < end
        release(source.spool, "pipeline", end)
        wait_for(lambda: source.confirmed >= end, f"the slot at {end}", lambda: source.confirmed)
        assert capture.wait_until(source.insert(11, 20), DEADLINE_SECONDS)
        segments = SpoolReader(source.spool).segments()
        assert len(segments) < 50, "quiet ground is sealed now and then, not at every step"


def test_slot_is_not_confirmed_while_no_consumer_has_released_anything(source: Source) -> None:
    before = source.confirmed
    with source.capture() as capture:
        assert capture.wait_until(source.insert(1, 10), DEADLINE_SECONDS)
        source.database.execute("INSERT INTO public.other SELECT generate_series(1, 1000)")
        assert capture.wait_until(source.position, DEADLINE_SECONDS)
    wait_for(lambda: source.active_pid is None, "a free slot", lambda: source.active_pid)
    assert source.confirmed == before


# --- bounds -----------------------------------------------------------------------------------------------------------------------


def test_capture_pauses_at_the_spool_limit_and_goes_on_after_release(source: Source) -> None:
    limits = CaptureLimits(spool_bytes=200_000, segment_rows=1000, quiet_seconds=0.1)
    with source.capture(limits) as capture:
        source.insert(1, 10_000, note="x" * 100)
        wait_for(lambda: state_of(source.spool) == "full", "a full spool", source.state)
        for low in range(10_001, 50_001, 1000):
            source.insert(low, low + 999, note="x" * 100)
        assert not capture.wait_until(source.position, 1.0)
        assert capture.end is not None
        seen: list[int] = []
        done: Position | None = None
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(seen) < 50_000 and time.monotonic() < deadline:
            upto = capture.end
            seen += source.ids(done, upto)
            done = release(source.spool, "pipeline", upto)
            capture.wait_beyond(done, 1.0)
    assert seen == list(range(1, 50_001))


def state_of(spool: Path) -> str | None:
    status = load_status(spool)
    return None if status is None else status.state


def test_long_transaction_is_captured_in_bounded_pieces(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    carried: list[int] = []

    class WatchedDecoder(PgOutputDecoder):
        def decode(self, messages: Sequence[Payload]) -> list[LogStep]:
            steps = super().decode(messages)
            carried.append(self.carried_messages)
            pieces.extend(sum(batch.rows.num_rows for batch in step.batches) for step in steps if isinstance(step, TransactionPiece))
            return steps

    monkeypatch.setattr(spooling, "PgOutputDecoder", WatchedDecoder)
    with source.capture() as capture:
        assert capture.wait_until(source.insert(1, 300_000), DEADLINE_SECONDS), source.state()
    assert source.ids() == list(range(1, 300_001))
    assert len(pieces) >= 300_000 // PIECE_MESSAGES
    assert max(pieces) <= PIECE_MESSAGES
    assert max(carried) <= 50_000
    assert sum(1 for segment in SpoolReader(source.spool).segments() if segment.rows) == 1


# --- the end ----------------------------------------------------------------------------------------------------------------------


def test_stop_releases_the_slot_and_the_lock_at_once(source: Source) -> None:
    with source.capture() as capture:
        assert capture.wait_until(source.insert(1, 10), DEADLINE_SECONDS)
        assert source.active_pid is not None
        started = time.monotonic()
        capture.stop()
        assert "penstock-capture" not in {thread.name for thread in threading.enumerate()}
        wait_for(lambda: source.active_pid is None, "a free slot", lambda: source.active_pid)
        assert time.monotonic() - started < 3.0
    with source.capture() as again:
        assert again.wait_until(source.insert(11, 20), DEADLINE_SECONDS)
    assert source.ids() == list(range(1, 21))


def test_stop_wakes_who_waits(source: Source) -> None:
    with source.capture() as capture:
        assert capture.wait_until(source.insert(1, 1), DEADLINE_SECONDS)
        answers: list[bool] = []
        waiting = threading.Thread(target=lambda: answers.append(capture.wait_until(Position.of((1 << 64) - 1), DEADLINE_SECONDS)))
        waiting.start()
        capture.stop()
        waiting.join(timeout=5.0)
    assert answers == [False]
