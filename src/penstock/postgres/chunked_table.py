"""Copy tables in chunks under one exported snapshot: plan the chunks of each table, and read them in order.

A copy that reads chunks on several machines, or resumes under another snapshot, uses the planned chunks and
`chunks.read_chunk`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa

from penstock.postgres.catalog import CatalogTable, inspect_schemas, require_tables
from penstock.postgres.chunks import Chunk, cut_chunks, plan_chunks, read_chunk
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.snapshot_export import inspect_outline
from penstock.postgres.types.column import TypePolicy
from penstock.schema import TableName, TableSchema

_CHUNK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ChunkedTable:
    """A table, and the chunks that contain its rows."""

    table: CatalogTable
    schema: TableSchema
    chunks: tuple[Chunk, ...]

    def read(
        self, address: SourceAddress, snapshot: str, *, reject_inexact: bool = False
    ) -> Generator[pa.RecordBatch]:
        """Yield all rows of the table, over one connection for each chunk.

        `read_chunk` describes the batches and the errors.
        """
        for chunk in self.chunks:
            with closing(read_chunk(address, snapshot, chunk, reject_inexact=reject_inexact)) as batches:
                yield from batches


def chunk_tables(
    connection: Connection,
    tables: Sequence[CatalogTable],
    types: TypePolicy,
    publication: str | None,
    chunk_bytes: int,
) -> list[ChunkedTable]:
    """Plan the chunks of each table, with about `chunk_bytes` of heap each. They have the rows and columns
    that `publication` publishes.

    Call it after the snapshot was exported: otherwise rows that are written in between may be in no chunk.
    """
    schemas = inspect_schemas(
        connection, [table for table in tables if not table.members], types, publication
    )
    planned = []
    for table in tables:
        if table.members:
            found = inspect_outline(connection, table, types, publication)
            planned.append(ChunkedTable(table, found.outline.schema, tuple(cut_chunks(found, chunk_bytes))))
        else:
            schema = schemas[table.name]
            planned.append(
                ChunkedTable(
                    table, schema, tuple(plan_chunks(connection, table, schema, chunk_bytes, publication))
                )
            )
    return planned


def chunk_named_tables(
    address: SourceAddress, names: Sequence[TableName], types: TypePolicy, publication: str | None
) -> list[ChunkedTable]:
    """As `chunk_tables`, for tables by name, each once and in the given order. Raises `NoTablesError` if one
    does not exist.
    """
    with connect(address) as connection:
        return chunk_tables(connection, require_tables(connection, names), types, publication, _CHUNK_BYTES)
