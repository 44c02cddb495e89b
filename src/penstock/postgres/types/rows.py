"""Decode the columns of a table from text, and build their `_exact` column. Snapshot and stream share this
step, so that a value is the same in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow import Ragged, as_arrow
from penstock.change import EXACT_TYPE, REPLACED
from penstock.errors import ProtocolError, UnreadableTextError
from penstock.postgres.types.column import NULL_TEXT, DecodedColumn
from penstock.postgres.types.registry import decode_column
from penstock.schema import Column, TableSchema


@dataclass(frozen=True, slots=True, eq=False)
class DecodedRows:
    """The typed columns of some rows, and their `_exact` column."""

    columns: list[pa.Array]
    exact: pa.MapArray
    inexact_columns: tuple[str, ...] = ()
    """The names of the columns that have an entry in `_exact`."""
    unreadable: Mapping[str, int] = field(default_factory=dict)
    """The number of unreadable texts in each column. An unreadable text is null in its column, and is marked
    with `REPLACED` in `_exact`.
    """

    @property
    def inexact(self) -> int:
        """The number of rows with an entry in `_exact`."""
        return len(self.exact) - int(self.exact.null_count)


def decode_rows(
    texts: Sequence[pa.StringArray], table: TableSchema, row_count: int | None = None
) -> DecodedRows:
    """Decode `texts`, one array for each column of `table`, and build the `_exact` column. An unreadable text
    never raises an error here, since other tables share the stream. It is counted in `unreadable`, and its
    table fails when the row is applied. `row_count` is needed only for a table without columns.
    """
    if row_count is None:
        row_count = len(texts[0]) if texts else 0
    decoded: list[DecodedColumn] = []
    exact_texts: list[pa.StringArray] = []
    unreadable: dict[str, int] = {}
    for column, values in zip(table.columns, texts, strict=True):
        found, shown, count = decode_readable(values, column)
        if count:
            unreadable[column.name] = count
        decoded.append(found)
        exact_texts.append(shown)
    return join_columns(decoded, exact_texts, table, row_count, unreadable)


def join_columns(
    decoded: Sequence[DecodedColumn],
    texts: Sequence[pa.StringArray],
    table: TableSchema,
    row_count: int,
    unreadable: Mapping[str, int] = MappingProxyType({}),
) -> DecodedRows:
    """Combine the decoded columns of a table, and build their `_exact` column from `texts`."""
    typed = [column.values for column in decoded]
    inexact = {
        at: _true_rows(column.inexact)
        for at, column in enumerate(decoded)
        if column.inexact is not None and column.inexact.true_count
    }
    if not inexact:
        return DecodedRows(typed, pa.nulls(row_count, EXACT_TYPE))
    names = tuple(table.columns[at].name for at in inexact)
    return DecodedRows(typed, _exact(texts, table, row_count, inexact), names, unreadable)


def decode_readable(values: pa.StringArray, column: Column) -> tuple[DecodedColumn, pa.StringArray, int]:
    """Decode a column. Returns the readable values, the texts for `_exact`, and the number of unreadable
    values. A text is unreadable if it is not UTF-8, or not in its type's format. The table's owner can cause
    both. For example, a type that was dropped from the catalog is identified only by its name, which another
    type may have had.
    """
    try:
        return decode_column(values, column), values, 0
    except (ProtocolError, UnreadableTextError):
        return _decode_each(values, column)


def _decode_each(values: pa.StringArray, column: Column) -> tuple[DecodedColumn, pa.StringArray, int]:
    octets: list[bytes | None] = values.cast(pa.binary()).to_pylist()
    shown = [None if each is None else each.decode(errors="replace") for each in octets]
    broken = pa.array(
        [
            each is not None and text is not None and text.encode() != each
            for each, text in zip(octets, shown, strict=True)
        ]
    )
    lossy = pa.array(shown, pa.string())
    readable = pc.if_else(broken, NULL_TEXT, lossy)
    try:
        decoded = decode_column(readable, column)
    except ProtocolError:
        decoded, refused = _decode_one_by_one(readable, column)
        broken = pc.or_(broken, refused)
        lossy = pc.if_else(refused, pc.binary_join_element_wise(pa.scalar(REPLACED), lossy, ""), lossy)
    inexact = broken if decoded.inexact is None else pc.or_(broken, decoded.inexact)
    return DecodedColumn(decoded.values, inexact), lossy, broken.true_count


def _decode_one_by_one(values: pa.StringArray, column: Column) -> tuple[DecodedColumn, pa.BooleanArray]:
    """Decode each value separately. Returns the column, in which a value that cannot be decoded is null, and
    a mask of these values.
    """
    parts: list[pa.Array] = []
    inexact: list[bool] = []
    refused: list[bool] = []
    for row in range(len(values)):
        try:
            one = decode_column(values[row : row + 1], column)
        except ProtocolError:
            one = DecodedColumn(pa.nulls(1, column.arrow_type))
            refused.append(True)
        else:
            refused.append(False)
        parts.append(one.values)
        inexact.append(one.inexact is not None and one.inexact.true_count > 0)
    return DecodedColumn(pa.concat_arrays(parts), pa.array(inexact, pa.bool_())), pa.array(
        refused, pa.bool_()
    )


def _true_rows(mask: pa.BooleanArray) -> npt.NDArray[np.int64]:
    rows = pc.indices_nonzero(mask)
    return np.frombuffer(rows.buffers()[1], np.uint64, count=len(rows), offset=rows.offset * 8).astype(
        np.int64
    )


def _exact(
    texts: Sequence[pa.StringArray],
    table: TableSchema,
    row_count: int,
    inexact: dict[int, npt.NDArray[np.int64]],
) -> pa.MapArray:
    ragged = Ragged.plan(row_count, inexact)
    names = pa.array(table.column_names, pa.string()).take(as_arrow(ragged.columns, pa.int64()))
    by_column = pa.concat_arrays([texts[at].take(as_arrow(rows, pa.int64())) for at, rows in inexact.items()])
    exact = by_column.take(as_arrow(ragged.order, pa.int64()))
    entries = pa.StructArray.from_arrays([names, exact], fields=[EXACT_TYPE.key_field, EXACT_TYPE.item_field])
    return ragged.build(EXACT_TYPE, entries)
