"""The source of the `PostgresConnector` tests: that of `WalCapture`, with one of its tables."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from typing_extensions import override

from penstock.change import CHANGE_TYPE, ChangeType
from penstock.connectors.feed import CONSUMER
from penstock.connectors.postgres import PostgresConnector
from penstock.contracts.connector import ConnectorConfig, SourceCheckpoint, SourceConnector
from penstock.spool.manifest import SpoolLayout
from penstock.testing.connector_conformance import ConnectorHarness, Row
from penstock.testing.streams import wait_for
from tests.support.contract.wal_harness import WalHarness, wal_harness
from tests.support.fix_postgres import Database


class PostgresConnectorHarness(ConnectorHarness):
    def __init__(self, wal: WalHarness, options: Mapping[str, str] | None = None) -> None:
        self.wal = wal
        self.database = wal.database
        self.table = wal.table
        self._options = dict(options or {})
        self.registers_schemas = "registryUrl" in self._options
        self._columns = 0
        self._silent: socket.socket | None = None

    def with_options(self, options: Mapping[str, str]) -> PostgresConnectorHarness:
        """A harness of the same source, whose connectors have these options too."""
        return PostgresConnectorHarness(self.wal, options)

    @override
    def connector(self) -> PostgresConnector:
        return PostgresConnector()

    @override
    def config(self) -> ConnectorConfig:
        settings = self.wal.settings
        password = settings.address.password
        return {
            "dsn": settings.address.dsn,
            **({} if password is None else {"password": password.reveal()}),
            "slot": settings.slot,
            "publication": settings.publication,
            "spool": str(settings.spool),
            "tables": str(self.table),
            "quietSeconds": "0.1",
            "discoverSeconds": "20",
            **self._options,
        }

    @override
    def unreachable(self) -> ConnectorConfig:
        # Accepts connections and never answers.
        self._silent = self._silent or socket.create_server(("127.0.0.1", 0))
        port = self._silent.getsockname()[1]
        return {
            **self.config(),
            "dsn": f"host=127.0.0.1 port={port} user=no_such_role connect_timeout=60",
            "discoverSeconds": "0.5",
        }

    @override
    def add(self, *rows: Row) -> None:
        with self.database.connect() as connection:
            connection.cursor().executemany(
                f"INSERT INTO {self.table} (id, note) VALUES (%s, %s)".encode(), rows
            )

    @override
    def change_shape(self) -> None:
        self._columns += 1
        self.database.execute(f"ALTER TABLE {self.table} ADD COLUMN extra{self._columns} boolean")

    @override
    def acknowledged(self) -> object:
        return self.wal.confirmed if self.wal.has_slot else None

    @override
    def apply(self, target: list[Row], records: pa.RecordBatch) -> None:
        if ChangeType.TRUNCATE in records.column(CHANGE_TYPE).to_pylist():
            assert records.num_rows == 1
            target.clear()
        else:
            super().apply(target, records)

    @override
    def offset_of(self, checkpoint: SourceCheckpoint, partition: str) -> str:
        return checkpoint.offsets.get(partition) or checkpoint.offsets["stream"]

    @override
    def open_resources(self) -> object:
        # Excludes threads that wait for an unreachable server: they are abandoned on purpose and end by
        # themselves.
        found = self.wal.open_resources()
        assert isinstance(found, tuple)
        backends, threads = found
        return backends, [name for name in threads if name != "penstock-discover"]

    def close(self) -> None:
        if self._silent is not None:
            self._silent.close()


def wait_until_copied(harness: PostgresConnectorHarness, connector: SourceConnector) -> None:
    """Poll until the snapshot of all tables is complete."""

    def copying() -> Mapping[str, str]:
        connector.poll_batch(1)
        return connector.checkpoint().metadata

    wait_for(lambda: "to_copy" not in copying(), "the end of the snapshot", copying, harness.deadline_seconds)


@contextmanager
def unwritable(spool: Path) -> Iterator[None]:
    """Makes the consumer's file unwritable. A directory in its place also stops root."""
    path = SpoolLayout(spool).consumer(CONSUMER)
    obstacle = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    obstacle.mkdir()
    try:
        yield
    finally:
        obstacle.rmdir()


@contextmanager
def postgres_connector_harness(
    database: Database, directory: Path, options: Mapping[str, str] | None = None
) -> Iterator[PostgresConnectorHarness]:
    with wal_harness(database, directory) as wal:
        harness = PostgresConnectorHarness(wal, options)
        yield harness
        harness.close()
