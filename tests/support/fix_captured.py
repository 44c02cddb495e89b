"""A database captured into a spool by a real capture; the changes are returned as plain rows.

One `captured` serves a whole module: give every test its own tables. The capture starts when rows are first
read, so earlier statements run without a reader; `start` begins earlier, and `stop` lets the capture fall
behind again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.capture.settings import CaptureLimits, CaptureSettings
from penstock.capture.slot_capture import SpoolCapture
from penstock.change import METADATA_NAMES, change_schema
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.schema import TableName, TableSchema
from penstock.spark.envelope import read_changes
from penstock.spool.reader import FileSlice, SpoolReader
from penstock.spool.status import load_status
from tests.support.fix_postgres import Database, PostgresServer
from tests.support.waiting import DEADLINE_SECONDS, wait_for

Row = dict[str, Any]

_LIMITS = CaptureLimits(seal_seconds=0.005, quiet_seconds=0.02)
_SHOWN = ("_change_type", "_unchanged", "_exact")


def change(kind: str, **values: object) -> Row:
    """A row as `Captured.rows` returns it; `unchanged=` names unchanged TOAST columns."""
    unchanged = values.pop("unchanged", None)
    return {"_change_type": kind, **values, **({"_unchanged": unchanged} if unchanged else {})}


class Captured:
    """A database, a publication of all its tables, a slot and a spool."""

    def __init__(
        self,
        database: Database,
        spool: Path,
        options: str = "",
        parameters: Mapping[str, str] | None = None,
        *,
        old_rows: bool = False,
    ) -> None:
        self.database = database
        self.spool = spool
        self.slot = f"{database.name}_slot"
        address = SourceAddress.parse(database.dsn).with_parameters(parameters or {})
        self.settings = CaptureSettings(address, self.slot, "p", spool, (), _LIMITS, old_rows=old_rows)
        database.execute(f"CREATE PUBLICATION p FOR ALL TABLES {options}")
        database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", self.slot)
        self._capture: SpoolCapture | None = None

    def execute(self, *statements: str) -> None:
        """Run statements, each in its own transaction."""
        for statement in statements:
            self.database.execute(statement)

    def query(self, statement: str, *arguments: object) -> list[tuple[Any, ...]]:
        return self.database.query(statement, *arguments)

    def transaction(self) -> AbstractContextManager[object]:
        return self.database.transaction()

    def oid(self, table: str) -> int:
        return int(self.query("SELECT %s::regclass::oid::int8", table)[0][0])

    @property
    def position(self) -> Position:
        return Position.parse(self.query("SELECT pg_current_wal_insert_lsn()::text")[0][0])

    def start(self) -> None:
        if self._capture is None:
            self._capture = SpoolCapture(self.settings)
            self._capture.start()

    def stop(self) -> None:
        if self._capture is not None:
            self._capture.stop()
            self._capture = None
            wait_for(lambda: self._active_pid() is None, "a free slot", self._active_pid)

    def drain(self) -> Position:
        """Wait until the spool holds everything so far, and return that position."""
        self.start()
        assert self._capture is not None
        end = self.position
        assert self._capture.wait_until(end, DEADLINE_SECONDS), load_status(self.spool)
        return end

    def slices(self, table: str | TableName | int, *, old: bool = False) -> list[FileSlice]:
        """The files of a table, in order: by name (in `public`, if it is plain text), or by OID."""
        self.drain()
        name = TableName("public", table) if isinstance(table, str) else table
        reader = SpoolReader(self.spool)
        start, end = reader.start, reader.end
        assert start is not None
        assert end is not None
        found = [
            each
            for part in reader.read(start, end).tables.values()
            for each in (part.with_old if old else part.slices)
        ]
        mine = [each for each in found if name in (each.file.table, each.file.oid)]
        return sorted(mine, key=lambda each: (each.file.min_position, each.path))

    def schemas(self, table: str | TableName | int) -> list[TableSchema]:
        """The schemas under which the changes of a table were spooled, in order."""
        shapes = [each.file.schema for each in self.slices(table)]
        return [shape for at, shape in enumerate(shapes) if at == 0 or shapes[at - 1] != shape]

    def full_rows(self, table: str | TableName | int) -> list[Row]:
        """Every change with all its metadata, in order."""
        slices = self.slices(table)
        rows = [
            row
            for each in slices
            for batch in read_changes([each], change_schema(each.file.schema))
            for row in batch.to_pylist()
        ]
        places = [(row["_commit_version"], row["_ordinal"]) for row in rows]
        assert places == sorted(set(places)), "changes are in order, and no two have the same place"
        return rows

    def rows(self, table: str | TableName | int) -> list[Row]:
        """Every change with its columns and its kind; `_unchanged` and `_exact` only if they are
        not empty.
        """
        return [_brief(row) for row in self.full_rows(table)]

    def rows_with_old(self, table: str) -> list[Row]:
        """The same, with rows as they were before updates."""
        slices = self.slices(table, old=True)
        found = [
            row
            for each in slices
            for batch in read_changes([each], change_schema(each.file.schema))
            for row in batch.to_pylist()
        ]
        return [
            _brief(row) for row in sorted(found, key=lambda row: (row["_commit_version"], row["_ordinal"]))
        ]

    def close(self) -> None:
        self.stop()

    def _active_pid(self) -> int | None:
        pid: int | None = self.query(
            "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", self.slot
        )[0][0]
        return pid


@pytest.fixture(scope="module")
def captured(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Captured]:
    with capturing(postgres_server, tmp_path_factory.mktemp("captured") / "spool") as made:
        yield made


@contextmanager
def capturing(
    server: PostgresServer, spool: Path, options: str = "", parameters: Mapping[str, str] | None = None
) -> Iterator[Captured]:
    """A `Captured` whose publication has `options`, and whose connections have libpq's `parameters`."""
    database = server.create_database()
    made = Captured(database, spool, options, parameters)
    try:
        yield made
    finally:
        made.close()
        database.close()
        server.drop_database(database.name)


def _brief(row: Row) -> Row:
    shown = {
        name: value
        for name, value in row.items()
        if name not in METADATA_NAMES or (name in _SHOWN and value is not None)
    }
    return {**shown, "_exact": dict(shown["_exact"])} if "_exact" in shown else shown
