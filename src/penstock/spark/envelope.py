"""Read spooled changes in a task as Arrow batches: typed rows of one table, or envelopes with rows as JSON.

Integers and decimals are JSON numbers with all digits; numeric without a precision has no trailing zeros.
Floats are numbers, except for `"NaN"`, `"Infinity"` and `"-Infinity"`. Text types, including json and jsonb,
are strings; bytea is `"\\x00ff"`, as in Postgres. Dates and timestamps are ISO 8601; timestamps with a time
zone are in UTC and end with `Z`. Arrays are arrays. hstore and PostGIS geometries are objects.

Values are exact: `docs/guides/spark-source.md` lists the form of each type. JSON is built column by column
for whole batches; only rows with unchanged values or `_exact` values are built one by one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock import storage
from penstock.change import (
    CHANGE_TYPE,
    COMMIT_TIMESTAMP,
    COMMIT_VERSION,
    EXACT,
    ORDINAL,
    UNCHANGED,
    XID,
    ChangeType,
    metadata_index,
)
from penstock.errors import EnvironmentUnfitError, SchemaChangedError
from penstock.schema import Column, TableName, TableSchema
from penstock.spool.reader import FileSlice
from penstock.spool.rows import read_rows

_CONTROL = r"[\x00-\x1f]"
_UNBOUNDED = -1


def json_column(values: pa.Array, column: Column) -> pa.Array:
    """Return the JSON text of every value; the text `null` for null."""
    return pc.fill_null(_texts(values, column), "null")


def _texts(values: pa.Array, column: Column) -> pa.Array:
    kind = values.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return values.cast(pa.string())
    if pa.types.is_string(kind):
        return _quoted(values)
    if pa.types.is_date(kind):
        return _framed(values.cast(pa.string()))
    if pa.types.is_timestamp(kind):
        return _framed(pc.strftime(values, "%Y-%m-%dT%H:%M:%S" + ("Z" if kind.tz else ""), locale="C"))
    if pa.types.is_floating(kind):
        return _floats(values)
    trims = pa.types.is_decimal(kind) and column.type_modifier == _UNBOUNDED
    return pa.array(
        [None if value is None else _text(value, kind, trims=trims) for value in values.to_pylist()],
        pa.string(),
    )


def _floats(values: pa.Array) -> pa.Array:
    """The JSON text of floats: the shortest number that identifies the value in its type, as Postgres writes
    it; NaN and infinities as strings.
    """
    texts = values.cast(pa.string())
    for text, shown in _NOT_FINITE.items():
        texts = pc.if_else(pc.equal(texts, text), shown, texts)
    return texts


def _quoted(values: pa.Array) -> pa.Array:
    if pc.any(pc.match_substring_regex(values, _CONTROL)).as_py():
        return pa.array(
            [
                None if value is None else json.dumps(value, ensure_ascii=False)
                for value in values.to_pylist()
            ],
            pa.string(),
        )
    escaped = pc.replace_substring(pc.replace_substring(values, "\\", "\\\\"), '"', '\\"')
    return _framed(escaped)


def _framed(texts: pa.Array) -> pa.Array:
    quote = pa.scalar('"')
    return pc.binary_join_element_wise(quote, texts, quote, pa.scalar(""))


def _text(value: Any, kind: pa.DataType, *, trims: bool = False) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(_floats(pa.array([value], kind))[0])
    if isinstance(value, Decimal):
        return _digits(value, trims=trims)
    if isinstance(value, bytes):
        return f'"\\\\x{value.hex()}"'
    if isinstance(value, list | dict):
        return _nested(value, kind)
    if isinstance(value, datetime | date | time):
        return f'"{value.isoformat().replace("+00:00", "Z")}"'
    return json.dumps(value, ensure_ascii=False)


_NOT_FINITE = {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}


def _digits(value: Decimal, *, trims: bool) -> str:
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if trims and "." in text else text


def _nested(value: Any, kind: pa.DataType) -> str:
    if pa.types.is_map(kind):
        pairs = value.items() if isinstance(value, dict) else value
        return (
            "{"
            + ",".join(
                f"{json.dumps(name, ensure_ascii=False)}:{_text(item, kind.item_type)}"
                for name, item in pairs
            )
            + "}"
        )
    if pa.types.is_struct(kind):
        fields = [kind.field(place) for place in range(kind.num_fields)]
        return (
            "{"
            + ",".join(f"{json.dumps(field.name)}:{_text(value[field.name], field.type)}" for field in fields)
            + "}"
        )
    trims = pa.types.is_decimal(kind.value_type)
    return "[" + ",".join(_text(item, kind.value_type, trims=trims) for item in value) + "]"


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
    """Convert a batch of changes of `table` to envelopes, in the same order."""
    metadata = {name: batch.column(metadata_index(table, name)) for name in (CHANGE_TYPE, EXACT, UNCHANGED)}
    kinds = metadata[CHANGE_TYPE]
    values = {
        column.name: _with_exact(json_column(batch.column(place), column), column.name, metadata[EXACT])
        for place, column in enumerate(table.columns)
    }
    is_delete, is_truncate = (
        pc.equal(kinds, ChangeType.DELETE.value),
        pc.equal(kinds, ChangeType.TRUNCATE.value),
    )
    rows = _objects(values, batch.num_rows)
    keys = _objects({name: values[name] for name in table.key}, batch.num_rows) if table.key else None
    nothing = pa.scalar(None, pa.string())
    is_old = pc.equal(kinds, ChangeType.UPDATE_PREIMAGE.value)
    gone = rows if keys is None else pc.if_else(_only_keys(batch, table, metadata[EXACT]), keys, rows)
    before = pc.if_else(is_delete, gone, pc.if_else(is_old, rows, nothing))
    has_no_new = pc.or_(pc.or_(is_delete, is_truncate), is_old)
    after = pc.if_else(has_no_new, nothing, _without_unchanged(rows, values, metadata[UNCHANGED]))
    key = pa.nulls(batch.num_rows, pa.string()) if keys is None else pc.if_else(is_truncate, nothing, keys)
    made = {
        "_table": pa.repeat(str(table.name), batch.num_rows),
        "key": key,
        "before": before,
        "after": after,
    }
    columns = [
        made[name] if name in made else batch.column(metadata_index(table, name))
        for name in ENVELOPE_SCHEMA.names
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ENVELOPE_SCHEMA)


def _only_keys(batch: pa.RecordBatch, table: TableSchema, exact: pa.Array) -> pa.Array:
    """A mask of the rows that have values only in key columns. A delete that has other values contains the
    whole old row.
    """
    more = [row for row in _places(exact) if any(name not in table.key for name, _ in exact[row].as_py())]
    found = pa.array(np.isin(np.arange(batch.num_rows), more, invert=True))
    for place, column in enumerate(table.columns):
        if column.name not in table.key:
            found = pc.and_(found, pc.is_null(batch.column(place)))
    return found


def _objects(values: dict[str, pa.Array], rows: int) -> pa.Array:
    """One JSON object per row, with all columns of `values`."""
    parts: list[pa.Array | pa.Scalar] = [pa.scalar("{")]
    for place, (name, texts) in enumerate(values.items()):
        parts += [pa.scalar(f"{',' if place else ''}{json.dumps(name, ensure_ascii=False)}:"), texts]
    if not values:
        return pa.repeat("{}", rows)
    return pc.binary_join_element_wise(*parts, pa.scalar("}"), pa.scalar(""))


def _with_exact(texts: pa.Array, name: str, exact: pa.Array) -> pa.Array:
    """Replace the values that the type of column `name` cannot hold by their exact Postgres text."""
    held: dict[int, str] = {}
    for row in _places(exact):
        for column, text in exact[row].as_py():
            if column == name:
                held[row] = json.dumps(text, ensure_ascii=False)
    return _replaced(texts, held)


def _without_unchanged(rows: pa.Array, values: dict[str, pa.Array], unchanged: pa.Array) -> pa.Array:
    """The objects in `rows` without the columns that have unchanged TOAST values. These values are not null,
    but unknown.
    """
    held: dict[int, str] = {}
    for row in _places(unchanged):
        absent = set(unchanged[row].as_py())
        texts = {name: column[row].as_py() for name, column in values.items() if name not in absent}
        held[row] = (
            "{"
            + ",".join(f"{json.dumps(name, ensure_ascii=False)}:{text}" for name, text in texts.items())
            + "}"
        )
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


_BATCH_ROWS = 65_536
_BATCH_BYTES = 32 << 20
_TASK_ROWS = 100_000


def plan_tasks(slices: Iterable[FileSlice]) -> list[tuple[FileSlice, ...]]:
    """Distribute slices over tasks, in order. Small files share a task, since starting a task costs more than
    reading a small file.
    """
    tasks: list[list[FileSlice]] = []
    rows = _TASK_ROWS
    for each in slices:
        if rows + each.file.rows > _TASK_ROWS:
            tasks.append([])
            rows = 0
        tasks[-1].append(each)
        rows += each.file.rows
    return [tuple(task) for task in tasks]


def read_changes(slices: Sequence[FileSlice], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of the slices, in order. Raises an error for a slice with another schema than `schema`, since
    Spark 4.1 matches columns only by position.
    """
    for each, batch in _read(slices):
        check_shape(each.file.table, batch.schema, schema)
        yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def read_envelopes(slices: Sequence[FileSlice]) -> Iterator[pa.RecordBatch]:
    """The changes of the slices as envelopes, for tables of any schema."""
    for each, batch in _read(slices):
        yield to_envelopes(batch, each.file.schema)


def check_shape(table: TableName, found: pa.Schema, schema: pa.Schema) -> None:
    if found.names != schema.names or found.types != schema.types:
        raise SchemaChangedError(
            f"table {table} had a schema change while it was streamed",
            hint="start a new query with a new checkpoint, which uses the new schema",
        )


def _read(slices: Sequence[FileSlice]) -> Iterator[tuple[FileSlice, pa.RecordBatch]]:
    for each in slices:
        _check_reachable(each)
        # Rows and bytes are both limited: a batch is completely in memory, here and in the JVM.
        for batch in read_rows(each, _BATCH_ROWS, _BATCH_BYTES):
            yield each, batch


def _check_reachable(slice: FileSlice) -> None:
    root = slice.path.parents[2]
    if not storage.exists(root):
        raise EnvironmentUnfitError(
            f"the spool at {root} cannot be reached from this executor",
            hint='use a directory that the driver and every executor can read: .option("spool", '
            '"/a/shared/directory")',
        )
