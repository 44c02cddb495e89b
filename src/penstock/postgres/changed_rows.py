"""Change batches from texts, for captures that get rows by asking for them: the typed columns, and the metadata beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa

from penstock.change import ChangeBatch, ChangeCounts, ChangeType, change_schema
from penstock.position import Position
from penstock.postgres.types.rows import decode_rows
from penstock.schema import TableSchema

_UNCHANGED = pa.list_(pa.string())


@dataclass(frozen=True, slots=True)
class Place:
    """Where some changes stand: in the transaction at `position`, the first of them as its change number `ordinal`."""

    position: Position
    time: datetime
    ordinal: int
    xid: int = 0
    """0 where it is not known."""


def change_batch(schema: TableSchema, kind: ChangeType, texts: Sequence[pa.StringArray], place: Place) -> ChangeBatch:
    """Rows of one kind, one text array for each column, in their order. Of deletes only the key's columns count."""
    count = len(texts[0]) if texts else 0
    if kind is ChangeType.DELETE and schema.key:
        keep = set(schema.key)
        texts = [text if name in keep else pa.nulls(count, pa.string()) for name, text in zip(schema.column_names, texts, strict=True)]
    decoded = decode_rows(texts, schema, count)
    metadata = [
        pa.repeat(pa.scalar(str(kind), pa.string()), count),
        pa.repeat(pa.scalar(place.position.value, pa.int64()), count),
        pa.repeat(pa.scalar(place.time, pa.timestamp("us", "UTC")), count),
        pa.array(range(place.ordinal, place.ordinal + count), pa.int64()),
        pa.repeat(pa.scalar(place.xid, pa.int64()), count),
        pa.nulls(count, _UNCHANGED),
        decoded.exact,
    ]
    rows = pa.RecordBatch.from_arrays([*decoded.columns, *metadata], schema=change_schema(schema))
    return ChangeBatch(schema, rows, _counts(kind, count, decoded.inexact, sum(decoded.unreadable.values())))


def truncate_batch(schema: TableSchema, place: Place) -> ChangeBatch:
    """One row that says that there is none any more."""
    return change_batch(schema, ChangeType.TRUNCATE, [pa.nulls(1, pa.string()) for _ in schema.columns], place)


def _counts(kind: ChangeType, count: int, inexact: int, unreadable: int) -> ChangeCounts:
    return ChangeCounts(
        inserts=count if kind is ChangeType.INSERT else 0,
        updates=count if kind is ChangeType.UPDATE_POSTIMAGE else 0,
        deletes=count if kind is ChangeType.DELETE else 0,
        truncates=count if kind is ChangeType.TRUNCATE else 0,
        inexact=inexact,
        unreadable=unreadable,
    )
