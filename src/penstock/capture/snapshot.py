"""The snapshot of a `WalCapture`: the rows of some tables as of one moment, read one batch at a time."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing

from penstock.capture.events import snapshot_events
from penstock.capture.settings import CaptureSettings
from penstock.contracts.capture import UNTRACKED, Change, Commit
from penstock.errors import NoTablesError
from penstock.postgres.catalog import inspect_schemas, inspect_tables
from penstock.postgres.chunks import Chunk, plan_chunks, read_chunk
from penstock.postgres.connection import connect
from penstock.postgres.exported import export_snapshot
from penstock.schema import TableName, TableSchema

_CHUNK_BYTES = 1 << 30


def snapshot_changes(settings: CaptureSettings, tables: Sequence[TableName]) -> Generator[Change]:
    """An upsert for every row, under one exported snapshot. A table that is rewritten meanwhile ends it with `SnapshotLostError`."""
    if not tables:
        return
    address, refuse_inexact = settings.address, settings.types.refuses_inexact
    with export_snapshot(address) as exported:
        commit = Commit(exported.fence)
        for chunk in (chunk for _, chunks in plan_tables(settings, tables).values() for chunk in chunks):
            with closing(read_chunk(address, exported.name, chunk, refuse_inexact=refuse_inexact)) as batches:
                for batch in batches:
                    for event in snapshot_events(batch, chunk.schema):
                        yield Change(event, UNTRACKED, commit)


def plan_tables(settings: CaptureSettings, tables: Sequence[TableName]) -> dict[TableName, tuple[TableSchema, list[Chunk]]]:
    """Each table once, in the order given, with its shape and the chunks to read it in. Call it after the snapshot."""
    with connect(settings.address) as connection:
        known = {table.name: table for table in inspect_tables(connection)}
        unknown = [table for table in tables if table not in known]
        if unknown:
            raise NoTablesError(
                f"there is no table in the source that can be captured by the name {', '.join(map(str, unknown))}",
                hint="check the name; case counts, and a partition is part of its root",
            )
        wanted = [known[table] for table in dict.fromkeys(tables)]
        # In the columns that the stream has too, and of the same types.
        shapes = inspect_schemas(connection, wanted, settings.types, settings.publication)
        return {
            table.name: (shapes[table.name], plan_chunks(connection, table, shapes[table.name], _CHUNK_BYTES, settings.publication))
            for table in wanted
        }
