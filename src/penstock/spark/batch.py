"""`spark.read`: the current rows of one table, read in parallel under one snapshot, with Spark's filters
pushed down.

A pushed condition may select more rows than Spark's filter, because Spark filters the rows again, but never
fewer. So only conditions on types with the same order and equality in Spark and Postgres are pushed down;
strings are compared by bytes, as in Spark. `IS NULL` is not pushed down: a value that the Spark type cannot
hold is null in Spark, but not in Postgres.

Spark plans a batch in one short-lived process and reads it in others, so none of them can hold the snapshot.
Unless a single task reads a table without partitions, another process (`penstock.spark.holder`) holds the
snapshot. The rows have the columns of the stream's `snapshot` rows, but no position: only a snapshot that is
exported with a replication slot has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    ColumnPath,
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from penstock.capture.settings import CaptureSettings
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.chunks import Chunk, plan_chunks
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.queries import compare, contains, is_comparable, is_one_of, is_present
from penstock.schema import Column, TableSchema
from penstock.spark.holder import hold_snapshot
from penstock.spark.request import SourceRequest
from penstock.spark.snapshot import ChunkPartition, read_snapshot
from penstock.worker import settle_worker

_OPERATORS: Mapping[type[Filter], str] = {
    EqualTo: "=",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}
_TEXTS: Mapping[type[Filter], str] = {
    StringStartsWith: "starts",
    StringEndsWith: "ends",
    StringContains: "contains",
}


def translate_filter(filter: Filter, table: TableSchema) -> str | None:
    """Return the SQL condition for a Spark filter; None if the filter cannot be pushed down."""
    if isinstance(filter, Not):
        return _negated(filter.child, table)
    column = _column(getattr(filter, "attribute", ()), table)
    if column is None:
        return None
    if isinstance(filter, IsNotNull):
        return is_present(column)
    if not is_comparable(column):
        return None
    return _compared(filter, column)


def _compared(filter: Filter, column: Column) -> str | None:
    value = getattr(filter, "value", None)
    if _holds_nul(value):
        return None
    if isinstance(filter, EqualNullSafe):
        return None if value is None else compare(column, "=", value)
    if isinstance(filter, In):
        return is_one_of(column, list(filter.value))
    if type(filter) in _TEXTS:
        return contains(column, str(value), _TEXTS[type(filter)])
    operator = _OPERATORS.get(type(filter))
    return None if operator is None or value is None else compare(column, operator, value)


def _negated(child: Filter, table: TableSchema) -> str | None:
    column = _column(getattr(child, "attribute", ()), table)
    if (
        column is None
        or not is_comparable(column)
        or not isinstance(child, EqualTo)
        or child.value is None
        or _holds_nul(child.value)
    ):
        return None
    return compare(column, "<>", child.value)


def _holds_nul(value: object) -> bool:
    """Whether a string contains NUL, which Postgres does not store and rejects in a statement."""
    texts = value if isinstance(value, tuple) else (value,)
    return any(isinstance(text, str) and "\0" in text for text in texts)


def _column(path: ColumnPath, table: TableSchema) -> Column | None:
    return next((column for column in table.columns if (column.name,) == tuple(path)), None)


class _Pushdown:
    """The reader's method `pushFilters`, in a form that hides from Spark that the reader overrides it.

    While `spark.sql.python.filterPushdown.enabled` is false, its default, Spark rejects every reader that
    overrides `pushFilters`. Spark recognises an override by comparing the method's `__func__` with that of
    the base class. So `__func__` is here that of the base class.
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
        """Collect the SQL conditions. Returns all filters, so that Spark also applies them to the rows."""
        conditions = (translate_filter(each, self.reader.table) for each in filters)
        self.reader.conditions += [condition for condition in conditions if condition is not None]
        return filters


class CurrentRowsReader(DataSourceReader):
    """Reads the current rows of one table. Spark plans with this object in one process; each task has a copy
    of it.
    """

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
        if len(chunks) > 1 or any(chunk.heap_oid != self.table.oid for chunk in chunks):
            # Plan again under the snapshot. The first plan lacks partitions that were added before the
            # snapshot, and all blocks that a heap gained would be in its last chunk.
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

    def _partition(
        self, address: SourceAddress, snapshot: str | None, chunk: Chunk, number: int
    ) -> ChunkPartition:
        reject_inexact = self._request.capture().types.rejects_inexact
        return ChunkPartition(
            address, snapshot, chunk.with_conditions(self.conditions), None, number, reject_inexact
        )
