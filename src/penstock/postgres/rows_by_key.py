"""Read rows by their keys under an exported snapshot. Used to read those rows again that changed between two
snapshots of one copy.

Keys are sent as text and parsed by the input function of their column's type, so that the key's index is used
and no function of the table's owner runs. For a domain, the input function of its base type is used, without
the domain's checks. Some types are compared as text: those whose operator is not trusted, and composite types
and ranges that are not built in, since they may contain domains.

The server may consider two different texts equal: `1.0` and `1.00`, or `A` and `a` in citext. So a row is
returned only for the key whose text is identical to the row's decoded key. A caller that passes every such
key once gets every row once.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from penstock.errors import TableRewrittenError
from penstock.postgres.chunks import (
    OnRejected,
    check_filenodes,
    check_values,
    filter_values,
    lock_table,
    open_snapshot,
    reading,
    snapshot_schema,
)
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.copy_text import read_texts
from penstock.postgres.snapshot_export import CopyFingerprint, KeyOperator
from penstock.postgres.types.rows import DecodedRows, decode_rows

# These settings force one index lookup per key, even if the planner believes that the table is small: a batch
# must not read the whole table.
_BY_INDEX = (
    "SET LOCAL enable_seqscan = off",
    "SET LOCAL enable_hashjoin = off",
    "SET LOCAL enable_mergejoin = off",
)


@dataclass(frozen=True, slots=True)
class KeyBatch:
    """Distinct keys, with one array per key column. `texts` are sent to the server. `exact` has the text in
    `_exact` of each value that its type cannot hold, and null for all others.
    """

    texts: tuple[pa.StringArray, ...]
    exact: tuple[pa.StringArray, ...]


def can_query_key(arrow_type: pa.DataType) -> bool:
    """Whether a key of this type can be sent to the server as text. Lists and structs cannot."""
    return not pa.types.is_nested(arrow_type)


def read_keys(
    address: SourceAddress,
    snapshot: str | None,
    outline: CopyFingerprint,
    batches: Iterable[KeyBatch],
    *,
    reject_inexact: bool = False,
    on_rejected: OnRejected | None = None,
) -> Generator[pa.RecordBatch]:
    """Yield the existing rows with these keys, decoded by the same decoder as the stream. Runs on executors;
    opens a connection.
    """
    table = outline.schema.name
    filenodes = {leaf.oid: leaf.filenode for leaf in outline.leaves}
    with open_snapshot(address, snapshot, table) as connection, reading(table):
        if _has_index(outline):
            for setting in _BY_INDEX:
                connection.execute(setting)
        lock_table(connection, table, outline.schema.oid, only=not outline.is_partitioned)
        check_filenodes(connection, filenodes, table)
        for batch in batches:
            yield from _read(
                connection, outline, batch, reject_inexact=reject_inexact, on_rejected=on_rejected
            )
        check_filenodes(connection, filenodes, table)


def _has_index(outline: CopyFingerprint) -> bool:
    """Whether the key's index can be used for all of its columns. Columns compared as text would need a scan
    for each key.
    """
    operators = map(outline.key_operators.get, outline.schema.key)
    return all(operator is None or operator.equals is not None for operator in operators)


def _read(
    connection: Connection,
    outline: CopyFingerprint,
    keys: KeyBatch,
    *,
    reject_inexact: bool,
    on_rejected: OnRejected | None = None,
) -> Generator[pa.RecordBatch]:
    target = snapshot_schema(outline.schema)
    for texts in read_texts(connection, keys_statement(outline, keys.texts), 1 + len(outline.schema.columns)):
        places = pc.subtract(texts[0].cast(pa.int64()), 1)
        rows = decode_rows(texts[1:], outline.schema)
        if on_rejected is None:
            check_values(rows, outline.schema, reject_inexact=reject_inexact)
        found = pa.RecordBatch.from_arrays([*rows.columns, rows.exact], schema=target)
        found = found.filter(_is_exact_match(rows, outline, keys, places))
        yield (
            found
            if on_rejected is None
            else filter_values(
                found, rows.unreadable, outline.schema, on_rejected, reject_inexact=reject_inexact
            )
        )


def _is_exact_match(
    rows: DecodedRows, outline: CopyFingerprint, keys: KeyBatch, places: pa.Int64Array
) -> pa.BooleanArray:
    """Return for each row whether its decoded key is identical to the key by which the server found it."""
    same = pa.array([True] * len(places), pa.bool_())
    for at, name in enumerate(outline.schema.key):
        index = outline.schema.column_names.index(name)
        if pa.types.is_string(outline.schema.columns[index].arrow_type):
            same = pc.and_(same, pc.equal(keys.texts[at].take(places), rows.columns[index]))
        else:
            exact = pc.fill_null(keys.exact[at].take(places), "")
            same = pc.and_(same, pc.equal(exact, pc.fill_null(pc.map_lookup(rows.exact, name, "first"), "")))
    return same


def _input_type(type_name: str, operator: KeyOperator | None) -> str:
    """Return the type whose input function parses a key."""
    if operator is None:
        return type_name
    return "pg_catalog.text" if operator.equals is None else operator.type_name


def _equals(column: str, key: sql.Composed, operator: KeyOperator | None) -> sql.Composed:
    """Return the condition that a column equals a key. It uses the operator of the key's index, so that the
    index is used. Both sides have exactly the operator's type, so that an operator of the same name from
    another role is not chosen.
    """
    mine = sql.SQL("t.{}").format(sql.Identifier(column))
    if operator is None:
        return sql.SQL("{} = {}").format(mine, key)
    if operator.equals is None:
        return sql.SQL("pg_catalog.concat({}) = {}").format(mine, key)
    return sql.SQL("CAST({} AS {}) {} {}").format(
        mine, sql.SQL(operator.type_name), sql.SQL(operator.equals), key
    )


def _delimiter(operator: KeyOperator | None) -> str:
    """Return the array delimiter of the type that a key is sent as. It is a comma for text and for all
    built-in types that a key can have: `box` uses a semicolon, but cannot be in a key, since it has no order.
    """
    return "," if operator is None or operator.equals is None else operator.delimiter


def _array_text(texts: pa.StringArray, delimiter: str) -> str:
    """Return an array of keys in the format that the type's own input function parses. A cast from text is
    not used, since it might be a function of the type's owner.
    """
    escaped = (text.replace("\\", "\\\\").replace('"', '\\"') for text in texts.to_pylist())
    return "{" + delimiter.join(f'"{text}"' for text in escaped) + "}"


def keys_statement(outline: CopyFingerprint, texts: Sequence[pa.StringArray]) -> str:
    """Return the SELECT for the rows with these keys. Its first column is the number of the key by which the
    row was found, counted from 1. The row's columns follow, in the order that chunks use. In the subquery,
    the table's columns come first under their own names, which the publication's filter uses without
    qualification.
    """
    if any(column.null_count for column in texts):
        raise TableRewrittenError(
            f"changes of {outline.schema.name} came without their key; its snapshot starts again"
        )
    names = [f"k{at}" for at in range(len(texts))]
    operators = [outline.key_operators.get(column) for column in outline.schema.key]
    types = [_input_type(name, operator) for name, operator in zip(outline.key_types, operators, strict=True)]
    keys = [
        sql.SQL("pg_catalog.unnest({}::{}[])").format(
            sql.Literal(_array_text(column, _delimiter(operator))), sql.SQL(type_name)
        )
        for column, type_name, operator in zip(texts, types, operators, strict=True)
    ]
    asked = sql.Identifier("penstock keys")
    wanted = [
        _equals(column, sql.SQL("{}.{}").format(asked, sql.Identifier(name)), operator)
        for column, name, operator in zip(outline.schema.key, names, operators, strict=True)
    ]
    if outline.row_filter is not None:
        # The server printed it from the parsed expression of the publication, so it is valid SQL.
        wanted.append(sql.SQL("({})").format(sql.SQL(outline.row_filter)))
    return (
        sql.SQL(
            "SELECT {asked}.n, r.* FROM (SELECT {keys}, pg_catalog.generate_series(1, {count})) "
            "AS {asked} ({names}, n) "
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
