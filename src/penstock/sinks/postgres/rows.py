"""Convert rows between Arrow and the text form in which a Postgres target reads and returns them.

Source columns are text in Arrow too. A pipeline into Postgres keeps values in the text form of the source
(`TypePolicy.form`), so every value fits its column, and the target needs no `_exact`. Only columns that a
mode adds have other types.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from penstock.change import EXACT
from penstock.postgres.target.state import TargetColumn
from penstock.postgres.types.registry import BUILTIN_TYPES, decode_column
from penstock.schema import Column, TableSchema
from penstock.sinks.modes import Layout

_BLOCK_ROWS = 65_536
_SORTED_BYTES = 256 << 20

# These types become text: the meaning and validity of their values depend on the source's catalog, and not
# every server supports xml.
_FOREIGN = frozenset({"aclitem", "xml", *(name for name in BUILTIN_TYPES if name.startswith("reg"))})
_SAME = frozenset(oid for name, oids in BUILTIN_TYPES.items() if name not in _FOREIGN for oid in oids if oid)

# For these types, equal values have equal texts. For other types they may differ: 1.0 and 1.00 are the same
# numeric key.
_LITERAL = frozenset(
    {
        0,
        *(
            BUILTIN_TYPES[name][0]
            for name in ("bool", "int2", "int4", "int8", "oid", "uuid", "text", "varchar", "date")
        ),
    }
)

_ADDED = {
    pa.bool_(): BUILTIN_TYPES["bool"][0],
    pa.int64(): BUILTIN_TYPES["int8"][0],
    pa.string(): BUILTIN_TYPES["text"][0],
    pa.timestamp("us", "UTC"): BUILTIN_TYPES["timestamptz"][0],
    pa.list_(pa.string()): BUILTIN_TYPES["text"][1],
}


def target_columns(schema: TableSchema) -> tuple[TargetColumn, ...]:
    """The columns of the target table: the source's columns with the same types. Types that are not built in,
    such as enums, domains and types of extensions, become text.
    """
    return tuple(
        target_column(column.name, column.type_oid, column.type_modifier) for column in schema.columns
    )


def target_column(name: str, type_oid: int, type_modifier: int) -> TargetColumn:
    return TargetColumn(name, type_oid, type_modifier) if type_oid in _SAME else TargetColumn(name)


def is_identified_by_text(columns: Iterable[TargetColumn], key: Collection[str]) -> bool:
    """Whether keys with different texts are always different keys."""
    return all(column.type_oid in _LITERAL for column in columns if column.name in key)


def source_columns(columns: Iterable[TargetColumn]) -> pa.Schema:
    """The Arrow schema of the source's columns, from the target's columns: all are text."""
    return pa.schema([pa.field(column.name, pa.string()) for column in columns])


def stored_names(layout: Layout) -> list[str]:
    """The column names of the target table, which has no `_exact`."""
    return [name for name in layout.schema.names if name != EXACT]


def added_columns(layout: Layout) -> list[TargetColumn]:
    """The columns that the mode adds."""
    added = [
        field for field in layout.schema if field.name not in layout.columns.names and field.name != EXACT
    ]
    return [TargetColumn(field.name, _ADDED[field.type]) for field in added]


def constant_texts(layout: Layout, values: dict[str, object]) -> list[str | None]:
    """The values of `added_columns` as texts, in the same order. `values` has them by column name."""
    fields = [layout.schema.field(column.name) for column in added_columns(layout)]
    return [_texts(pa.array([values[field.name]], field.type))[0].as_py() for field in fields]


def text_blocks(table: pa.Table, names: Sequence[str]) -> Iterator[list[pa.Array]]:
    """Convert rows to text, in blocks of at most 65,536 rows."""
    for batch in table.select(names).to_batches(max_chunksize=_BLOCK_ROWS):
        yield [_texts(column) for column in batch.columns]


def in_key_order(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """Sort rows roughly as in the key's index, which makes inserts twice as fast. Rows of more than 256 MiB
    in total are not sorted.
    """
    if not key or rows.num_rows < 2 or rows.nbytes > _SORTED_BYTES:
        return rows
    keys = pa.table([_ordered(rows.column(name)) for name in key], names=[str(at) for at in range(len(key))])
    return rows.take(pc.sort_indices(keys, [(name, "ascending") for name in keys.column_names]))


def _ordered(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column as integers, if possible, because the text "10" would sort before "9"."""
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid:
        return column


def parse_rows(blocks: Iterable[Sequence[pa.StringArray]], layout: Layout) -> pa.Table:
    """Parse rows of the target from the texts of `stored_names`."""
    schema = layout.schema
    names = stored_names(layout)
    batches = []
    for block in blocks:
        found = dict(zip(names, block, strict=True))
        columns = [
            _typed(found[field.name], field) if field.name != EXACT else pa.nulls(len(block[0]), field.type)
            for field in schema
        ]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=schema))
    return pa.Table.from_batches(batches, schema)


def _texts(values: pa.Array) -> pa.Array:
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        return values
    if pa.types.is_list(values.type):
        return pa.array(
            [None if each is None else _array_text(each) for each in values.to_pylist()], pa.string()
        )
    return values.cast(pa.string())


def _array_text(values: Sequence[str]) -> str:
    escaped = (value.replace("\\", "\\\\").replace('"', '\\"') for value in values)
    return "{" + ",".join(f'"{value}"' for value in escaped) + "}"


def _typed(texts: pa.StringArray, field: pa.Field) -> pa.Array:
    return decode_column(texts, Column(field.name, field.type, _ADDED[field.type])).values
