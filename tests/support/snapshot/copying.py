"""Snapshots without a pipeline: a real capture, and a coordinator that can be interrupted and restarted.

For every exported snapshot it records the rows of each table. That is the oracle: a table finished at a fence
must equal the source at that fence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from penstock.errors import PenstockError
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.retries import RetryLog
from penstock.pipeline.snapshots.coordinator import SnapshotCoordinator
from penstock.pipeline.snapshots.copy import SnapshotDeadLetters
from penstock.pipeline.snapshots.executors import SnapshotExecutors
from penstock.pipeline.snapshots.state import SnapshotProgress, SnapshotStore
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable, inspect_schema, inspect_tables
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.consistent_read import export_consistent_read
from penstock.postgres.slot import OnWait
from penstock.postgres.snapshot_export import ExportedSnapshot, export_snapshot
from penstock.postgres.types.column import TypePolicy
from penstock.postgres.types.rows import decode_rows
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import Sink
from tests.support.fix_captured import Captured
from tests.support.pipeline.epochs import open_dead_letters

PIPELINE = "copying"
SOURCE = "_source"
Texts = dict[str, list[str | None]]
"""By column, the values of all rows."""
RowsOf = Callable[[TableName], list[dict[str, Any]]]


class Watcher(PipelineObserver):
    """Observes chunks being read; may interrupt after some of them."""

    def __init__(self) -> None:
        self.read: list[TableName] = []
        self.finished: list[TableName] = []
        self.resumed: dict[TableName, tuple[int, int]] = {}
        self.planned: list[TableName] = []
        self.troubles: list[str] = []
        self.progress: SnapshotProgress | None = None
        self.after_chunk: Callable[[int], None] = lambda _: None
        self._counting = threading.Lock()

    def snapshot_planned(self, table: TableName, chunks: int, heap_bytes: int) -> None:
        self.planned.append(table)

    def snapshot_resumed(self, table: TableName, done: int, chunks: int) -> None:
        self.resumed[table] = (done, chunks)

    def snapshot_progressed(self, progress: SnapshotProgress) -> None:
        self.progress = progress
        with self._counting:  # lanes read chunks concurrently
            self.read.append(progress.table)
            read = len(self.read)
        self.after_chunk(read)

    def snapshot_finished(self, table: TableName, rows: int) -> None:
        self.finished.append(table)

    def announced(self, message: str) -> None:
        self.troubles.append(message)

    def interrupted(self, reason: str, pause_seconds: float) -> None:
        self.troubles.append(reason)


class Copying:
    """The tables of a captured database, on their way into a lake."""

    def __init__(
        self, captured: Captured, lake: Path, *, executors: SnapshotExecutors, sink: Sink, rows: RowsOf
    ) -> None:
        self.captured = captured
        self.address = SourceAddress.parse(captured.database.dsn)
        self.executors = executors
        self.sink = sink
        self.rows = rows
        self.store = SnapshotStore(lake, PIPELINE)
        self.lake = lake
        self.retries = RetryLog(lake)
        self.fences: dict[TableName, Position] = {}
        self.held: dict[Position, dict[TableName, Texts]] = {}
        """The rows of every table, by fence."""
        self._tables: list[CatalogTable] = []

    def run(
        self,
        *tables: str,
        watcher: Watcher | None = None,
        chunks: int | None = None,
        chunk_bytes: int = 8192,
        hold_seconds: float | None = None,
        policy: TypePolicy = TypePolicy.DEFAULT,
        publication: str | None = "p",
        is_stopping: Callable[[], bool] = lambda: False,
        into: TableName | None = None,
        dead_letters: SnapshotDeadLetters | None = None,
        has_slot: bool = True,
    ) -> tuple[Watcher, dict[TableName, PenstockError]]:
        """Copy tables of schema public, all `into` one if that is given, completely or until so many chunks
        have been read.

        Without `has_slot` snapshots are taken as for polling and triggers, which waits for no transaction.
        """
        watcher = watcher or Watcher()
        with connect(self.address) as connection:
            found = {table.name: table for table in inspect_tables(connection)}
        self._tables = [found[TableName("public", name)] for name in tables]
        wanted = self._tables if into is None else [CatalogTable(1 << 62, into, tuple(self._tables), SOURCE)]
        waiting = [table for table in wanted if not self._is_finished(table.name)]
        coordinator = SnapshotCoordinator(
            self.executors,
            self.address,
            self.sink,
            watcher,
            chunk_bytes,
            policy,
            publication,
            store=self.store,
            spool=self.captured.spool,
            slot=self.captured.slot if has_slot else None,
            max_hold_seconds=hold_seconds,
            dead_letters=dead_letters or open_dead_letters(self.lake.parent),
            export=partial(self._export, has_slot=has_slot),
            retries=self.retries,
        )
        read = len(watcher.read)
        failures = coordinator.copy(
            waiting,
            lambda name, fence: self.fences.update({name: fence}),
            lambda name: None,
            lambda: is_stopping() or (chunks is not None and len(watcher.read) - read >= chunks),
        )
        return watcher, failures

    def assert_exact(
        self, *tables: str, policy: TypePolicy = TypePolicy.DEFAULT, publication: str | None = "p"
    ) -> None:
        """Every table equals the source at the target's position."""
        for name in (TableName("public", table) for table in tables):
            target = self.sink.load_target(name)
            assert target is not None, name
            assert target.applied is not None, name
            with connect(self.address) as connection:
                (table,) = [each for each in inspect_tables(connection) if each.name == name]
                schema = inspect_schema(connection, table, policy, publication)
            assert _sorted(self.rows(name)) == _sorted(_decoded(self.held[target.applied][name], schema)), (
                name
            )
            assert self.store.load(name) is None, "nothing is left of a snapshot that is finished"

    def assert_joined(self, into: TableName, *tables: str) -> None:
        """One table equals the source rows of all `tables` at the target's position."""
        target = self.sink.load_target(into)
        assert target is not None
        assert target.applied is not None
        held = []
        with connect(self.address) as connection:
            for table in inspect_tables(connection):
                if table.name.name in tables:
                    rows = _decoded(
                        self.held[target.applied][table.name],
                        inspect_schema(connection, table, publication="p"),
                    )
                    held += [{**row, SOURCE: str(table.name)} for row in rows]
        assert _sorted(self.rows(into)) == _sorted(held)
        assert self.store.load(into) is None, "nothing is left of a snapshot that is finished"

    def _is_finished(self, name: TableName) -> bool:
        target = self.sink.load_target(name)
        return target is not None and target.applied is not None

    @contextmanager
    def _export(
        self, address: SourceAddress, on_wait: OnWait, _tables: Sequence[CatalogTable] = (), *, has_slot: bool
    ) -> Iterator[ExportedSnapshot]:
        with (
            export_snapshot(address, on_wait)
            if has_slot
            else export_consistent_read(address, on_wait) as exported
        ):
            self.held[exported.fence] = self._contents(exported.name, self._tables)
            yield exported

    def _contents(self, snapshot: str, tables: Sequence[CatalogTable]) -> dict[TableName, Texts]:
        with psycopg.connect(self.address.conninfo("oracle")) as connection:
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot)))
            return {table.name: self._texts(connection, table.name) for table in tables}

    def _texts(self, connection: psycopg.Connection, table: TableName) -> Texts:
        name = sql.Identifier(table.schema, table.name)
        names = [
            each.name
            for each in connection.execute(sql.SQL("SELECT * FROM {} LIMIT 0").format(name)).description or ()
        ]
        text = "CASE WHEN {0} IS DISTINCT FROM NULL THEN pg_catalog.format('%s', {0}) END"
        columns = [sql.SQL(text).format(sql.Identifier(each)) for each in names]
        rows = connection.execute(
            sql.SQL("SELECT {} FROM {}").format(sql.SQL(", ").join(columns), name)
        ).fetchall()
        return {each: [row[at] for row in rows] for at, each in enumerate(names)}


def _decoded(texts: Texts, schema: TableSchema) -> list[dict[str, Any]]:
    """Values typed by the decoder, which has separate tests."""
    rows = decode_rows([pa.array(texts[name], pa.string()) for name in schema.column_names], schema)
    table = pa.table([*rows.columns, rows.exact], names=[*schema.column_names, "_exact"])
    return list(table.to_pylist())


def _sorted(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(repr(sorted(row.items())) for row in rows)
