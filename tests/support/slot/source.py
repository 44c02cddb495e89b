"""A captured database for capture tests: one published table, one unpublished, a slot and a spool."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from psycopg.conninfo import conninfo_to_dict

from penstock.capture.provision import ensure_capture
from penstock.capture.settings import CaptureLimits, CaptureSettings
from penstock.capture.slot_capture import SpoolCapture
from penstock.errors import PenstockError
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.schema import TableName
from penstock.spool.reader import SpoolReader
from penstock.spool.status import CaptureFailure, CaptureStatus, load_status
from tests.support.fix_postgres import Database
from tests.support.fix_proxy import ProxyFactory, TcpProxy
from tests.support.waiting import DEADLINE_SECONDS, wait_for

QUICK = CaptureLimits(quiet_seconds=0.1, watch_seconds=0.2)
BEYOND = Position.of((1 << 64) - 1)
COPY_AGAIN = (
    "copy the tables again: for a pipeline, remove the target tables, their penstock_epochs and the state "
    "directory, and run again; "
    "for a WalCapture, drop the slot if it exists, remove the spool, and take a new snapshot"
)
"""The exact text that operators read."""


class Source:
    """A database with one published table and one that is not, a slot, and a spool."""

    def __init__(
        self, database: Database, spool: Path, *, provisioned: bool = True, failover: bool = False
    ) -> None:
        self.database = database
        self.spool = spool
        self.address = SourceAddress.parse(database.dsn)
        self.slot = f"{database.name}_slot"
        database.execute("CREATE TABLE public.t (id bigint PRIMARY KEY, note text)")
        database.execute("CREATE TABLE public.other (id bigint)")
        if provisioned:
            ensure_capture(self.address, self.slot, "p", [TableName("public", "t")], failover=failover)

    def insert(self, low: int, high: int, note: str = "x") -> Position:
        self.database.execute(
            "INSERT INTO public.t SELECT i, %s FROM generate_series(%s::bigint, %s) i", note, low, high
        )
        return self.position

    @property
    def position(self) -> Position:
        return Position.parse(self.database.query("SELECT pg_current_wal_insert_lsn()::text")[0][0])

    @property
    def flushed(self) -> Position:
        """A position at or after every commit so far. Unlike `position`, it is never inside a record."""
        return Position.parse(self.database.query("SELECT pg_current_wal_flush_lsn()::text")[0][0])

    @property
    def confirmed(self) -> Position:
        rows = self.database.query(
            "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", self.slot
        )
        return Position.parse(rows[0][0])

    @property
    def active_pid(self) -> int | None:
        pid: int | None = self.database.query(
            "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", self.slot
        )[0][0]
        return pid

    def settings(
        self, limits: CaptureLimits = QUICK, address: SourceAddress | None = None, **others: object
    ) -> CaptureSettings:
        settings = CaptureSettings(
            address or self.address, self.slot, "p", self.spool, (TableName("public", "t"),), limits
        )
        return replace(settings, **others)  # type: ignore[arg-type]

    @contextmanager
    def capture(
        self, limits: CaptureLimits = QUICK, address: SourceAddress | None = None, **others: object
    ) -> Iterator[SpoolCapture]:
        capture = SpoolCapture(self.settings(limits, address, **others))
        capture.start()
        try:
            yield capture
        finally:
            capture.stop()

    def failure(self, address: SourceAddress | None = None, **others: object) -> PenstockError:
        """The error of a capture that is started now."""
        with self.capture(QUICK, address, **others) as capture, pytest.raises(PenstockError) as raised:
            capture.wait_until(BEYOND, DEADLINE_SECONDS)
        return raised.value

    def trouble(self, code: str) -> CaptureFailure:
        """Wait until the status of the capture that runs shows this error."""
        wait_for(
            lambda: (
                self.status is not None
                and self.status.failure is not None
                and self.status.failure.code == code
            ),
            code,
            self.state,
        )
        assert self.status is not None
        assert self.status.failure is not None
        return self.status.failure

    @property
    def status(self) -> CaptureStatus | None:
        return load_status(self.spool)

    def wait_idle(self) -> None:
        wait_for(lambda: self.active_pid is None, "a free slot", lambda: self.active_pid)

    def capture_all(self, low: int, high: int) -> Position:
        """Insert rows and run a capture until it has them."""
        with self.capture() as capture:
            end = self.insert(low, high)
            assert capture.wait_until(end, DEADLINE_SECONDS), self.state()
        self.wait_idle()
        return end

    def ids(self, after: Position | None = None, upto: Position | None = None) -> list[int]:
        """The ids of the rows in the spool, or in a range of it, in order."""
        reader = SpoolReader(self.spool)
        start, end = after or reader.start, upto or reader.end
        if start is None or end is None:
            return []
        slices = [part for table in reader.read(start, end).tables.values() for part in table.slices]
        return [
            row
            for part in slices
            for row in pq.read_table(part.path, columns=["id"]).column("id").to_pylist()
        ]

    def with_spool(self, spool: Path) -> Source:
        """The same slot, for another capture."""
        other = copy.copy(self)
        other.spool = spool
        return other

    def state(self) -> object:
        return load_status(self.spool)


def through(source: Source, proxy: ProxyFactory) -> tuple[TcpProxy, SourceAddress]:
    target = conninfo_to_dict(source.address.dsn)
    made = proxy(str(target["host"]), int(str(target["port"])))
    return made, source.address.with_parameters({"host": made.host, "port": str(made.port)})
