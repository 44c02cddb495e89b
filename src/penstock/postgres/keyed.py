"""Reading rows by their keys, under an exported snapshot: what changed between two snapshots is read again this way.

Keys come as text and are read by the input function of their column's type (of a domain, by that of its base type, without the domain's
checks), so that the index of the key finds the rows and no function of the table's owner runs. Composite types and ranges that are not
built in, which may consist of domains, and types whose operator is not to be trusted are compared as text instead. Two texts
may mean the same to the server and not to us: `1.0` and `1.00`, or `A` and `a` in citext. So a row is given out only for the key
that it has by the decoder's word; whoever asks for every such key once gets every row once.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from penstock.errors import TableRewrittenError
from penstock.postgres.chunks import (
    Aside,
    check_filenodes,
    check_values,
    kept_values,
    lock_table,
    open_snapshot,
    reading,
    snapshot_schema,
)
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.copying import read_texts
from penstock.postgres.outline import KeyOperator, TableOutline
from penstock.postgres.types.rows import DecodedRows, decode_rows

# One look into the index for each key, however few rows the planner believes the table to have: a batch must not read all of it.
_BY_INDEX = ("SET LOCAL enable_seqscan = off", "SET LOCAL enable_hashjoin = off", "SET LOCAL enable_mergejoin = off")


@dataclass(frozen=True, slots=True)
class KeyBatch:
    """Some keys, each once. A column each: `texts` is what the server is asked for.

    `exact` is the text that stands in `_exact` for a key that its type cannot hold; null for all others.
    """

    texts: tuple[pa.StringArray, ...]
    exact: tuple[pa.StringArray, ...]


def can_be_asked(arrow_type: pa.DataType) -> bool:
    """Whether a key of this type can be written so that the server reads it. Lists and structs are not tried."""
    return not pa.types.is_nested(arrow_type)


def read_keys(
    address: SourceAddress,
    snapshot: str | None,
    outline: TableOutline,
    batches: Iterable[KeyBatch],
    *,
    refuse_inexact: bool = False,
    aside: Aside | None = None,
) -> Generator[pa.RecordBatch]:
    """The rows under these keys that are there, typed by the stream's own decoder. Runs on an executor; opens its own connection."""
    table = outline.schema.name
    filenodes = {leaf.oid: leaf.filenode for leaf in outline.leaves}
    with open_snapshot(address, snapshot, table) as connection, reading(table):
        if _has_index(outline):
            for setting in _BY_INDEX:
                connection.execute(setting)
        lock_table(connection, table, outline.schema.oid, only=not outline.is_partitioned)
        check_filenodes(connection, filenodes, table)
        for batch in batches:
            yield from _read(connection, outline, batch, refuse_inexact=refuse_inexact, aside=aside)
        check_filenodes(connection, filenodes, table)


def _has_index(outline: TableOutline) -> bool:
    """Whether the index of the key finds all of its columns. Texts that are compared would otherwise be looked for key by key."""
    operators = map(outline.key_operators.get, outline.schema.key)
    return all(operator is None or operator.equals is not None for operator in operators)


def _read(
    connection: Connection, outline: TableOutline, keys: KeyBatch, *, refuse_inexact: bool, aside: Aside | None = None
) -> Generator[pa.RecordBatch]:
    target = snapshot_schema(outline.schema)
    for texts in read_texts(connection, keys_statement(outline, keys.texts), 1 + len(outline.schema.columns)):
        places = pc.subtract(texts[0].cast(pa.int64()), 1)
        rows = decode_rows(texts[1:], outline.schema)
        if aside is None:
            check_values(rows, outline.schema, refuse_inexact=refuse_inexact)
        found = pa.RecordBatch.from_arrays([*rows.columns, rows.exact], schema=target)
        found = found.filter(_is_asked(rows, outline, keys, places))
        yield found if aside is None else kept_values(found, rows.unreadable, outline.schema, aside, refuse_inexact=refuse_inexact)


def _is_asked(rows: DecodedRows, outline: TableOutline, keys: KeyBatch, places: pa.Int64Array) -> pa.BooleanArray:
    """Whether each row has, to the letter, the key that it was found under."""
    same = pa.array([True] * len(places), pa.bool_())
    for at, name in enumerate(outline.schema.key):
        index = outline.schema.column_names.index(name)
        if pa.types.is_string(outline.schema.columns[index].arrow_type):
            same = pc.and_(same, pc.equal(keys.texts[at].take(places), rows.columns[index]))
        else:
            exact = pc.fill_null(keys.exact[at].take(places), "")
            same = pc.and_(same, pc.equal(exact, pc.fill_null(pc.map_lookup(rows.exact, name, "first"), "")))
    return same


def _asked_type(type_name: str, operator: KeyOperator | None) -> str:
    """The type by whose input function a key is read."""
    if operator is None:
        return type_name
    return "pg_catalog.text" if operator.equals is None else operator.type_name


def _equals(column: str, key: sql.Composed, operator: KeyOperator | None) -> sql.Composed:
    """Compare as the index of the key does, so that the index is used.

    Both sides have exactly the type that the operator takes, so that no operator of the same name that another role made is found.
    """
    mine = sql.SQL("t.{}").format(sql.Identifier(column))
    if operator is None:
        return sql.SQL("{} = {}").format(mine, key)
    if operator.equals is None:
        return sql.SQL("pg_catalog.concat({}) = {}").format(mine, key)
    return sql.SQL("CAST({} AS {}) {} {}").format(mine, sql.SQL(operator.type_name), sql.SQL(operator.equals), key)


def _array_text(texts: pa.StringArray) -> str:
    """As the type's own input function reads its elements. A cast from text might be a function of the type's owner."""
    escaped = (text.replace("\\", "\\\\").replace('"', '\\"') for text in texts.to_pylist())
    return "{" + ",".join(f'"{text}"' for text in escaped) + "}"


def keys_statement(outline: TableOutline, texts: Sequence[pa.StringArray]) -> str:
    """The number of the key that each row was found under, counted from 1, then its columns as a chunk has them.

    Inside, the table's own columns come first, whatever they are called; the filter of the publication names them bare.
    """
    if any(column.null_count for column in texts):
        raise TableRewrittenError(f"changes of {outline.schema.name} came without their key; its snapshot starts again")
    names = [f"k{at}" for at in range(len(texts))]
    operators = [outline.key_operators.get(column) for column in outline.schema.key]
    types = [_asked_type(name, operator) for name, operator in zip(outline.key_types, operators, strict=True)]
    keys = [
        sql.SQL("pg_catalog.unnest({}::{}[])").format(sql.Literal(_array_text(column)), sql.SQL(type_name))
        for column, type_name in zip(texts, types, strict=True)
    ]
    asked = sql.Identifier("penstock keys")
    wanted = [
        _equals(column, sql.SQL("{}.{}").format(asked, sql.Identifier(name)), operator)
        for column, name, operator in zip(outline.schema.key, names, operators, strict=True)
    ]
    if outline.row_filter is not None:
        # The server wrote it, from an expression that it checked when the publication was made.
        wanted.append(sql.SQL("({})").format(sql.SQL(outline.row_filter)))
    return (
        sql.SQL(
            "SELECT {asked}.n, r.* FROM (SELECT {keys}, pg_catalog.generate_series(1, {count})) AS {asked} ({names}, n) "
            "CROSS JOIN LATERAL (SELECT {columns} FROM {only}{table} AS t WHERE {wanted}) AS r"
        )
        .format(
            asked=asked,
            keys=sql.SQL(", ").join(keys),
            count=sql.Literal(len(texts[0])),
            names=sql.SQL(", ").join(map(sql.Identifier, names)),
            columns=sql.SQL(", ").join(map(sql.Identifier, outline.schema.column_names)),
            only=sql.SQL("" if outline.is_partitioned else "ONLY "),
            table=sql.Identifier(outline.schema.name.schema, outline.schema.name.name),
            wanted=sql.SQL(" AND ").join(wanted),
        )
        .as_string()
    )
