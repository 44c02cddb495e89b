"""A table's columns from text, with `_exact`: the step that snapshot and stream share, so that a value is the same by both roads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.change import EXACT_TYPE
from penstock.errors import ProtocolError
from penstock.postgres.types.arrays import Ragged, as_arrow
from penstock.postgres.types.registry import decode_text
from penstock.schema import TableSchema


def decode_rows(texts: Sequence[pa.StringArray], table: TableSchema, row_count: int | None = None) -> tuple[list[pa.Array], pa.MapArray]:
    """Type `texts`, one array for each column of `table`, and give the `_exact` column of the same rows.

    Only a table without columns needs to be told its `row_count`.
    """
    if row_count is None:
        row_count = len(texts[0]) if texts else 0
    typed: list[pa.Array] = []
    inexact: dict[int, npt.NDArray[np.int64]] = {}
    for at, (column, values) in enumerate(zip(table.columns, texts, strict=True)):
        try:
            decoded = decode_text(values, column.type_oid, column.type_modifier)
        except ProtocolError as error:
            raise ProtocolError(f"column {column.name!r} of {table.name} has {error.message}") from None
        typed.append(decoded.values)
        if decoded.inexact is not None and decoded.inexact.true_count:
            inexact[at] = _true_rows(decoded.inexact)
    if not inexact:
        return typed, pa.nulls(row_count, EXACT_TYPE)
    return typed, _exact(texts, table, row_count, inexact)


def _true_rows(mask: pa.BooleanArray) -> npt.NDArray[np.int64]:
    rows = pc.indices_nonzero(mask)
    return np.frombuffer(rows.buffers()[1], np.uint64, count=len(rows), offset=rows.offset * 8).astype(np.int64)


def _exact(texts: Sequence[pa.StringArray], table: TableSchema, row_count: int, inexact: dict[int, npt.NDArray[np.int64]]) -> pa.MapArray:
    ragged = Ragged.plan(row_count, inexact)
    names = pa.array(table.column_names, pa.string()).take(as_arrow(ragged.columns, pa.int64()))
    by_column = pa.concat_arrays([texts[at].take(as_arrow(rows, pa.int64())) for at, rows in inexact.items()])
    exact = by_column.take(as_arrow(ragged.order, pa.int64()))
    entries = pa.StructArray.from_arrays([names, exact], fields=[EXACT_TYPE.key_field, EXACT_TYPE.item_field])
    return ragged.build(EXACT_TYPE, entries)
