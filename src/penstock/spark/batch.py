"""`spark.read`: the rows of one table as they are now, read in parallel under one snapshot.

Spark plans a batch in one short-lived process and reads it in others, so neither can hold the snapshot: `penstock.spark.holder` does, in a
process of its own, unless a single task reads everything. The rows have the columns of the stream, as its `snapshot` rows do, but no
position: an ordinary snapshot has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from penstock.capture.settings import CaptureSettings
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.chunks import Chunk, plan_chunks
from penstock.postgres.connection import SourceAddress, connect
from penstock.schema import TableSchema
from penstock.spark.filters import translate_filter
from penstock.spark.holder import hold_snapshot
from penstock.spark.request import SourceRequest
from penstock.spark.snapshots import ChunkPartition, read_snapshot
from penstock.worker import settle_worker


class _Pushdown:
    """`pushFilters` of the reader, which takes part where Spark offers it and does no harm where it does not.

    With `spark.sql.python.filterPushdown.enabled` left at false, Spark refuses to read from any reader that has a method of that name which
    is not the base class's own; it tells by `__func__`.
    """

    def __get__(self, reader: CurrentRowsReader | None, owner: type | None = None) -> Any:
        return self if reader is None else _BoundPushdown(reader)


@dataclass(frozen=True)
class _BoundPushdown:
    reader: CurrentRowsReader

    @property
    def __func__(self) -> Any:
        return DataSourceReader.pushFilters

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        """Spark looks at every row again: the source may let more rows through than a filter does, never fewer."""
        conditions = (translate_filter(each, self.reader.table) for each in filters)
        self.reader.conditions += [condition for condition in conditions if condition is not None]
        return filters


class CurrentRowsReader(DataSourceReader):
    """Lives in the process that plans the query; a copy of it in each task."""

    pushFilters = _Pushdown()

    def __init__(self, request: SourceRequest, table: TableSchema, schema: pa.Schema) -> None:
        self._request = request
        self._schema = schema
        self.table = table
        self.conditions: list[str] = []

    def partitions(self) -> list[InputPartition]:
        settings = self._request.capture()
        columns = tuple(column for column in self.table.columns if column.name in self._schema.names)
        wanted = replace(self.table, columns=columns or self.table.columns[:1])
        chunks = self._chunks(settings, wanted)
        held = None
        if len(chunks) > 1:
            # Blocks that are filled between the plan and the snapshot would be in none of the chunks but the last: plan again, after it.
            held = hold_snapshot(settings.address, self._request.hold_seconds)
            chunks = self._chunks(settings, wanted)
        return [self._partition(settings.address, held, chunk, number) for number, chunk in enumerate(chunks)]

    def _chunks(self, settings: CaptureSettings, wanted: TableSchema) -> list[Chunk]:
        with connect(settings.address) as connection:
            table = CatalogTable(self.table.oid, self.table.name)
            return plan_chunks(connection, table, wanted, self._request.chunk_bytes, settings.publication)

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        settle_worker()
        if not isinstance(partition, ChunkPartition):  # a partitioned table without partitions
            return iter(())
        return self._read(partition)

    def _read(self, partition: ChunkPartition) -> Iterator[pa.RecordBatch]:
        for batch in read_snapshot(partition):
            columns = [batch.column(name) for name in self._schema.names]
            yield pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _partition(self, address: SourceAddress, snapshot: str | None, chunk: Chunk, number: int) -> ChunkPartition:
        conditions = [chunk.row_filter] if chunk.row_filter is not None else []
        row_filter = " AND ".join(f"({condition})" for condition in conditions + self.conditions) or None
        refuse_inexact = self._request.capture().types.refuses_inexact
        return ChunkPartition(address, snapshot, replace(chunk, row_filter=row_filter), None, number, refuse_inexact)
