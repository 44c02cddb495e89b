"""The snapshot of a capture: the rows of some tables as of one moment, read one batch at a time."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, closing

from penstock.capture.events import snapshot_events
from penstock.contracts.capture import UNTRACKED, Change, Commit
from penstock.errors import NoTablesError
from penstock.postgres.catalog import inspect_schemas, inspect_tables
from penstock.postgres.chunks import Chunk, plan_chunks, read_chunk
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.exported import ExportedSnapshot
from penstock.postgres.types.policy import TypePolicy
from penstock.schema import TableName, TableSchema

_CHUNK_BYTES = 1 << 30


def snapshot_changes(
    address: SourceAddress,
    tables: Sequence[TableName],
    exporting: AbstractContextManager[ExportedSnapshot],
    types: TypePolicy,
    publication: str | None = None,
) -> Generator[Change]:
    """An upsert for every row, under one exported snapshot. A table that is rewritten meanwhile ends it with `SnapshotLostError`.

    The columns and rows are those that the stream has too: what `publication` lets through, or all but generated columns.
    """
    if not tables:
        return
    with exporting as exported:
        commit = Commit(exported.fence)
        for chunk in (chunk for _, chunks in plan_tables(address, tables, types, publication).values() for chunk in chunks):
            with closing(read_chunk(address, exported.name, chunk, refuse_inexact=types.refuses_inexact)) as batches:
                for batch in batches:
                    for event in snapshot_events(batch, chunk.schema):
                        yield Change(event, UNTRACKED, commit)


def plan_tables(
    address: SourceAddress, tables: Sequence[TableName], types: TypePolicy, publication: str | None
) -> dict[TableName, tuple[TableSchema, list[Chunk]]]:
    """Each table once, in the order given, with its shape and the chunks to read it in. Call it after the snapshot."""
    with connect(address) as connection:
        known = {table.name: table for table in inspect_tables(connection)}
        unknown = [table for table in tables if table not in known]
        if unknown:
            raise NoTablesError(
                f"there is no table in the source that can be captured by the name {', '.join(map(str, unknown))}",
                hint="check the name; case counts, and a partition is part of its root",
            )
        wanted = [known[table] for table in dict.fromkeys(tables)]
        shapes = inspect_schemas(connection, wanted, types, publication)
        return {
            table.name: (shapes[table.name], plan_chunks(connection, table, shapes[table.name], _CHUNK_BYTES, publication))
            for table in wanted
        }
