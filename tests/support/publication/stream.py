"""The rows of a publication from both sides: those that a snapshot reads, and the changes that a capture
spools.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from penstock.capture.settings import CaptureLimits, CaptureSettings
from penstock.capture.slot_capture import SpoolCapture
from penstock.change import CHANGE_TYPE, COMMIT_VERSION, METADATA_NAMES, ORDINAL
from penstock.position import Position
from penstock.postgres.catalog import inspect_schema, inspect_tables
from penstock.postgres.chunks import plan_chunks, read_chunk
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.snapshot_export import export_snapshot
from penstock.schema import TableName
from penstock.spool.reader import SpoolReader
from tests.support.fix_postgres import Database
from tests.support.waiting import DEADLINE_SECONDS

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    table: str
    kind: str
    row: Row


class Follower:
    """One slot, one publication, one spool, in the test's database."""

    def __init__(self, database: Database, directory: Path, publication: str = "pub") -> None:
        self.database = database
        self.address = SourceAddress.parse(database.dsn)
        self.slot = f"slot_{database.name}"
        self.publication = publication
        self._spool = directory / "spool"

    def create_slot(self) -> None:
        self.database.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", self.slot)

    @contextmanager
    def capture(self) -> Iterator[SpoolCapture]:
        settings = CaptureSettings(
            self.address, self.slot, self.publication, self._spool, limits=CaptureLimits(quiet_seconds=0.1)
        )
        capture = SpoolCapture(settings)
        capture.start()
        try:
            yield capture
        finally:
            capture.stop()

    def drain(self) -> list[Event]:
        """Everything that committed until now, in order."""
        with self.capture() as capture:
            self.reach(capture)
        return self.events()

    def reach(self, capture: SpoolCapture) -> None:
        end = Position.parse(self.database.query("SELECT pg_current_wal_insert_lsn()::text")[0][0])
        assert capture.wait_until(end, DEADLINE_SECONDS)

    def events(self) -> list[Event]:
        reader = SpoolReader(self._spool)
        assert reader.start is not None
        assert reader.end is not None
        found = []
        for key, changes in reader.read(reader.start, reader.end).tables.items():
            for part in changes.slices:
                for row in pq.read_table(part.path).to_pylist():
                    own = {name: value for name, value in row.items() if name not in METADATA_NAMES}
                    found.append((row[COMMIT_VERSION], row[ORDINAL], Event(str(key), row[CHANGE_TYPE], own)))
        return [event for _, _, event in sorted(found, key=lambda each: each[:2])]

    def snapshot(self, table: str) -> list[Row]:
        """The rows as a snapshot reads them."""
        with export_snapshot(self.address) as exported, connect(self.address) as connection:
            found = next(each for each in inspect_tables(connection) if each.name == TableName.parse(table))
            schema = inspect_schema(connection, found, publication=self.publication)
            chunks = plan_chunks(connection, found, schema, 8192, self.publication)
            rows = [
                row
                for chunk in chunks
                for batch in read_chunk(self.address, exported.name, chunk)
                for row in batch.to_pylist()
            ]
        return [{name: value for name, value in row.items() if name not in METADATA_NAMES} for row in rows]


def folded(rows: list[Row], events: list[Event], table: str, key: str = "id") -> list[Row]:
    """The rows of a mirror of `table` that started with `rows` and applied `events` in order."""
    held = {row[key]: row for row in rows}
    for event in events:
        if event.table != table:
            continue
        if event.kind == "truncate":
            held.clear()
        elif event.kind == "delete":
            held.pop(event.row[key], None)
        elif event.kind in ("insert", "update_postimage"):
            held[event.row[key]] = event.row
    return sorted(held.values(), key=lambda row: row[key])
