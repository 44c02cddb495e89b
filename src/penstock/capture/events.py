"""Convert typed rows, from the spool or from a snapshot, to the events of the capture contract."""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import repeat
from operator import attrgetter

import pyarrow as pa

from penstock.change import (
    CHANGE_TYPE,
    COMMIT_TIMESTAMP,
    COMMIT_VERSION,
    EXACT,
    ORDINAL,
    UNCHANGED,
    ChangeType,
)
from penstock.contracts.capture import UNTRACKED, Change, Commit, Delete, Event, Truncate, Upsert
from penstock.postgres.chunked_table import chunk_named_tables
from penstock.postgres.connection import SourceAddress
from penstock.postgres.snapshot_export import ExportedSnapshot
from penstock.postgres.types.column import TypePolicy
from penstock.schema import TableName, TableSchema
from penstock.spool.reader import FileSlice, SpoolRange, TableRange
from penstock.spool.rows import ExactEntries, metadata_column, read_rows

_BATCH_ROWS = 1024
_BATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PlacedEvent:
    """An event with its position and ordinal."""

    version: int
    ordinal: int
    time: datetime | None
    event: Event
    is_moved: bool = False
    """Whether this is the insert of a key change and has unchanged TOAST values. No other insert has
    unchanged values.
    """


def spooled_events(spooled: SpoolRange) -> Iterator[PlacedEvent]:
    """Yield all changes of a range in log order. One batch of each table is in memory at a time."""
    tables = [_inserted_before_deleted(_table_events(table)) for table in spooled.tables.values()]
    return tables[0] if len(tables) == 1 else heapq.merge(*tables, key=attrgetter("version", "ordinal"))


def snapshot_events(batch: pa.RecordBatch, schema: TableSchema) -> Iterator[Upsert]:
    """Yield an upsert for each row of a batch. The batch has the table's columns, then `_exact`."""
    builder = EventBuilder(schema)
    for start in range(0, batch.num_rows, _BATCH_ROWS):
        part = batch.slice(start, _BATCH_ROWS)
        texts = part.column(len(schema.columns)).to_pylist()
        for values, exact in zip(builder.rows(part), texts, strict=True):
            yield builder.upsert(values, None, exact)


class EventBuilder:
    """Builds the events of one table under one version of its schema."""

    def __init__(self, schema: TableSchema) -> None:
        self._table = schema.name
        self._names = schema.column_names
        self._key = [(name, self._names.index(name)) for name in schema.key]
        # Without a key, all values together identify the row.
        self._old = self._key or [(name, place) for place, name in enumerate(self._names)]

    def rows(self, batch: pa.RecordBatch) -> Iterable[tuple[object, ...]]:
        if not self._names:
            return repeat((), batch.num_rows)
        return zip(*(batch.column(place).to_pylist() for place in range(len(self._names))), strict=True)

    def upsert(
        self, values: Sequence[object], unchanged: Sequence[str] | None, exact: ExactEntries | None
    ) -> Upsert:
        texts = dict(exact or ())
        row = dict(zip(self._names, values, strict=True))
        for name in unchanged or ():
            del row[name]
        return Upsert(
            self._table, _identity(self._key, values, texts), row, frozenset(unchanged or ()), texts
        )

    def event(
        self, kind: str, values: Sequence[object], unchanged: Sequence[str] | None, exact: ExactEntries | None
    ) -> Event:
        if kind == ChangeType.TRUNCATE:
            return Truncate(self._table)
        if kind == ChangeType.DELETE:
            return Delete(self._table, _identity(self._old, values, dict(exact or ())))
        return self.upsert(values, unchanged, exact)


def _identity(
    columns: Iterable[tuple[str, int]], values: Sequence[object], exact: dict[str, str]
) -> dict[str, object]:
    return {name: exact.get(name, values[place]) for name, place in columns}


def _table_events(table: TableRange) -> Iterator[PlacedEvent]:
    for each in table.slices:
        builder = EventBuilder(each.file.schema)
        for batch in read_rows(each, _BATCH_ROWS, _BATCH_BYTES):
            yield from _batch_events(builder, batch, each)


def _batch_events(builder: EventBuilder, batch: pa.RecordBatch, slice: FileSlice) -> Iterator[PlacedEvent]:
    names = (CHANGE_TYPE, COMMIT_VERSION, COMMIT_TIMESTAMP, ORDINAL, UNCHANGED, EXACT)
    metadata = zip(*(metadata_column(batch, slice, name).to_pylist() for name in names), strict=True)
    for values, (kind, version, time, ordinal, unchanged, exact) in zip(
        builder.rows(batch), metadata, strict=True
    ):
        event = builder.event(kind, values, unchanged, exact)
        yield PlacedEvent(version, ordinal, time, event, unchanged is not None and kind == ChangeType.INSERT)


def _inserted_before_deleted(events: Iterator[PlacedEvent]) -> Iterator[PlacedEvent]:
    """Put the insert of a key change with unchanged TOAST values before its delete, so that a consumer that
    applies the events in order can still read those values from the old row. The delete's ordinal is one less
    than the insert's. The two events exchange their ordinals, so that ordinals still ascend.
    """
    held: PlacedEvent | None = None
    for placed in events:
        old, new = held and held.event, placed.event
        if held is not None and isinstance(old, Delete) and placed.is_moved and isinstance(new, Upsert):
            yield PlacedEvent(held.version, held.ordinal, held.time, replace(new, moved_from=old.key))
            held = PlacedEvent(placed.version, placed.ordinal, placed.time, old)
            continue
        if held is not None:
            yield held
        held = placed
    if held is not None:
        yield held


def snapshot_changes(
    address: SourceAddress,
    tables: Sequence[TableName],
    exporting: AbstractContextManager[ExportedSnapshot],
    types: TypePolicy,
    publication: str | None = None,
) -> Generator[Change]:
    """Yield an upsert for every row of the tables, read under one exported snapshot. Raises
    `TableRewrittenError` if a table is rewritten during the copy. Columns and rows are those of the stream:
    those that `publication` publishes or, without a publication, all rows and all columns that are not
    generated.
    """
    if not tables:
        return
    with exporting as exported:
        commit = Commit(exported.fence)
        for table in chunk_named_tables(address, tables, types, publication):
            with closing(table.read(address, exported.name, reject_inexact=types.rejects_inexact)) as batches:
                for batch in batches:
                    for event in snapshot_events(batch, table.schema):
                        yield Change(event, UNTRACKED, commit)
