"""Rows on their way into a Postgres target and back: Arrow on this side, text on the other.

The source's columns are text on both: a pipeline into Postgres reads values in the form that the source writes them (`TypePolicy.form`),
so there is none that a column could not hold, and `_exact` is not there. Only what a mode adds has types of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from penstock.change import EXACT
from penstock.postgres.applied import TargetColumn
from penstock.postgres.types.builtin import BUILTIN_TYPES
from penstock.postgres.types.registry import decode_column
from penstock.schema import Column, TableSchema
from penstock.sinks.layout import Layout

_BLOCK_ROWS = 65_536
_SORTED_BYTES = 256 << 20

# What a value of these means, or whether it means anything, is a matter of the source's own catalog. And not every server can read xml.
_FOREIGN = frozenset({"aclitem", "xml", *(name for name in BUILTIN_TYPES if name.startswith("reg"))})
_SAME = frozenset(oid for name, oids in BUILTIN_TYPES.items() if name not in _FOREIGN for oid in oids if oid)

# Values of these are equal to the server just if their texts are; of others, 1.0 and 1.00 may be one key.
_LITERAL = frozenset({0, *(BUILTIN_TYPES[name][0] for name in ("bool", "int2", "int4", "int8", "oid", "uuid", "text", "varchar", "date"))})

_ADDED = {
    pa.bool_(): BUILTIN_TYPES["bool"][0],
    pa.int64(): BUILTIN_TYPES["int8"][0],
    pa.string(): BUILTIN_TYPES["text"][0],
    pa.timestamp("us", "UTC"): BUILTIN_TYPES["timestamptz"][0],
    pa.list_(pa.string()): BUILTIN_TYPES["text"][1],
}


def target_columns(schema: TableSchema) -> tuple[TargetColumn, ...]:
    """The source's columns with the same types; what is not built in is text: enums, domains, and whatever an extension brings along."""
    return tuple(target_column(column.name, column.type_oid, column.type_modifier) for column in schema.columns)


def target_column(name: str, type_oid: int, type_modifier: int) -> TargetColumn:
    return TargetColumn(name, type_oid, type_modifier) if type_oid in _SAME else TargetColumn(name)


def is_told_by_text(columns: Iterable[TargetColumn], key: Collection[str]) -> bool:
    """Whether keys that are written otherwise are other keys."""
    return all(column.type_oid in _LITERAL for column in columns if column.name in key)


def source_columns(columns: Iterable[TargetColumn]) -> pa.Schema:
    """The other way: as the pipeline knows them."""
    return pa.schema([pa.field(column.name, pa.string()) for column in columns])


def stored_names(layout: Layout) -> list[str]:
    """The columns of the table in the target."""
    return [name for name in layout.schema.names if name != EXACT]


def added_columns(layout: Layout) -> list[TargetColumn]:
    """What the mode adds to the source's columns."""
    added = [field for field in layout.schema if field.name not in layout.columns.names and field.name != EXACT]
    return [TargetColumn(field.name, _ADDED[field.type]) for field in added]


def constant_texts(layout: Layout, values: dict[str, object]) -> list[str | None]:
    """The values of `added_columns`, as Postgres reads them."""
    fields = [layout.schema.field(column.name) for column in added_columns(layout)]
    return [_texts(pa.array([values[field.name]], field.type))[0].as_py() for field in fields]


def text_blocks(table: pa.Table, names: Sequence[str]) -> Iterator[list[pa.Array]]:
    """Rows as text, some thousand at a time."""
    for batch in table.select(names).to_batches(max_chunksize=_BLOCK_ROWS):
        yield [_texts(column) for column in batch.columns]


def in_key_order(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """Rows about as the key's index has them, which takes them in twice as fast as in any other order. Not if they are very large."""
    if not key or rows.num_rows < 2 or rows.nbytes > _SORTED_BYTES:
        return rows
    keys = pa.table([_ordered(rows.column(name)) for name in key], names=[str(at) for at in range(len(key))])
    return rows.take(pc.sort_indices(keys, [(name, "ascending") for name in keys.column_names]))


def _ordered(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Numbers are written as text, and 10 comes before 9 then."""
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid:
        return column


def parse_rows(blocks: Iterable[Sequence[pa.StringArray]], layout: Layout) -> pa.Table:
    """Rows of the target, from the texts of `stored_names`."""
    schema = layout.schema
    names = stored_names(layout)
    batches = []
    for block in blocks:
        found = dict(zip(names, block, strict=True))
        columns = [_typed(found[field.name], field) if field.name != EXACT else pa.nulls(len(block[0]), field.type) for field in schema]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=schema))
    return pa.Table.from_batches(batches, schema)


def _texts(values: pa.Array) -> pa.Array:
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        return values
    if pa.types.is_list(values.type):
        return pa.array([None if each is None else _array_text(each) for each in values.to_pylist()], pa.string())
    return values.cast(pa.string())


def _array_text(values: Sequence[str]) -> str:
    escaped = (value.replace("\\", "\\\\").replace('"', '\\"') for value in values)
    return "{" + ",".join(f'"{value}"' for value in escaped) + "}"


def _typed(texts: pa.StringArray, field: pa.Field) -> pa.Array:
    return decode_column(texts, Column(field.name, field.type, _ADDED[field.type])).values
