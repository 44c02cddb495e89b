"""A change of any table as one row: which table, what happened, and the row before and after it as JSON.

Values are exact: see `docs/guides/spark-source.md` for how each type is written. The JSON of many rows is put together column by column;
only rows that hold less than the whole row, or a value beyond its type, are written one by one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.change import (
    CHANGE_TYPE,
    COMMIT_TIMESTAMP,
    COMMIT_VERSION,
    EXACT,
    ORDINAL,
    UNCHANGED,
    XID,
    ChangeType,
    metadata_place,
)
from penstock.schema import TableSchema
from penstock.spark.json_text import json_column

ENVELOPE_SCHEMA = pa.schema(
    [
        pa.field("_table", pa.string(), nullable=False),
        pa.field(CHANGE_TYPE, pa.string(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("before", pa.string()),
        pa.field("after", pa.string()),
        pa.field(COMMIT_VERSION, pa.int64()),
        pa.field(COMMIT_TIMESTAMP, pa.timestamp("us", "UTC")),
        pa.field(ORDINAL, pa.int64(), nullable=False),
        pa.field(XID, pa.int64(), nullable=False),
        pa.field(UNCHANGED, pa.list_(pa.string())),
    ]
)


def to_envelopes(batch: pa.RecordBatch, table: TableSchema) -> pa.RecordBatch:
    """The envelopes of a batch of changes of `table`, in the same order."""
    metadata = {name: batch.column(metadata_place(table, name)) for name in (CHANGE_TYPE, EXACT, UNCHANGED)}
    kinds = metadata[CHANGE_TYPE]
    values = {
        column.name: _with_exact(json_column(batch.column(place), column), column.name, metadata[EXACT])
        for place, column in enumerate(table.columns)
    }
    is_delete, is_truncate = pc.equal(kinds, ChangeType.DELETE.value), pc.equal(kinds, ChangeType.TRUNCATE.value)
    rows = _objects(values, batch.num_rows)
    keys = _objects({name: values[name] for name in table.key}, batch.num_rows) if table.key else None
    nothing = pa.scalar(None, pa.string())
    is_old = pc.equal(kinds, ChangeType.UPDATE_PREIMAGE.value)
    gone = rows if keys is None else pc.if_else(_only_keys(batch, table, metadata[EXACT]), keys, rows)
    before = pc.if_else(is_delete, gone, pc.if_else(is_old, rows, nothing))
    has_no_new = pc.or_(pc.or_(is_delete, is_truncate), is_old)
    after = pc.if_else(has_no_new, nothing, _without_unchanged(rows, values, metadata[UNCHANGED]))
    key = pa.nulls(batch.num_rows, pa.string()) if keys is None else pc.if_else(is_truncate, nothing, keys)
    made = {"_table": pa.repeat(str(table.name), batch.num_rows), "key": key, "before": before, "after": after}
    columns = [made[name] if name in made else batch.column(metadata_place(table, name)) for name in ENVELOPE_SCHEMA.names]
    return pa.RecordBatch.from_arrays(columns, schema=ENVELOPE_SCHEMA)


def _only_keys(batch: pa.RecordBatch, table: TableSchema, exact: pa.Array) -> pa.Array:
    """Which rows show nothing but their key: a delete that shows more has the whole old row."""
    more = [row for row in _places(exact) if any(name not in table.key for name, _ in exact[row].as_py())]
    found = pa.array(np.isin(np.arange(batch.num_rows), more, invert=True))
    for place, column in enumerate(table.columns):
        if column.name not in table.key:
            found = pc.and_(found, pc.is_null(batch.column(place)))
    return found


def _objects(values: dict[str, pa.Array], rows: int) -> pa.Array:
    """One JSON object a row, of all columns."""
    parts: list[pa.Array | pa.Scalar] = [pa.scalar("{")]
    for place, (name, texts) in enumerate(values.items()):
        parts += [pa.scalar(f"{',' if place else ''}{json.dumps(name, ensure_ascii=False)}:"), texts]
    if not values:
        return pa.repeat("{}", rows)
    return pc.binary_join_element_wise(*parts, pa.scalar("}"), pa.scalar(""))


def _with_exact(texts: pa.Array, name: str, exact: pa.Array) -> pa.Array:
    """Values that the column's type cannot hold, as the text that Postgres has for them."""
    held: dict[int, str] = {}
    for row in _places(exact):
        for column, text in exact[row].as_py():
            if column == name:
                held[row] = json.dumps(text, ensure_ascii=False)
    return _replaced(texts, held)


def _without_unchanged(rows: pa.Array, values: dict[str, pa.Array], unchanged: pa.Array) -> pa.Array:
    """A value that did not travel is not in the object at all: it is not null."""
    held: dict[int, str] = {}
    for row in _places(unchanged):
        absent = set(unchanged[row].as_py())
        texts = {name: column[row].as_py() for name, column in values.items() if name not in absent}
        held[row] = "{" + ",".join(f"{json.dumps(name, ensure_ascii=False)}:{text}" for name, text in texts.items()) + "}"
    return _replaced(rows, held)


def _places(column: pa.Array) -> Sequence[int]:
    if column.null_count == len(column):
        return ()
    return list(pc.indices_nonzero(column.is_valid()).to_pylist())


def _replaced(texts: pa.Array, held: dict[int, str]) -> pa.Array:
    if not held:
        return texts
    mask = pa.array([row in held for row in range(len(texts))])
    return pc.if_else(mask, pa.array([held.get(row) for row in range(len(texts))], pa.string()), texts)
