"""Rows on their way through Spark: files with the values that it needs, and what it makes of them, matched by number.

Rows, or changes, are asked about in groups, each of which has a number of its own; a row's number is made of that and its place.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.change import UNCHANGED
from penstock.errors import SinkError
from penstock.postgres.types.arrays import Bools, as_arrow, as_bools
from penstock.spark.query import VALUE, WHERE, row_column
from penstock.spool import storage
from penstock.transforms.computed import Computed
from penstock.transforms.filling import fill
from penstock.transforms.given import typed_values, whole
from penstock.transforms.transform import Fitted

_ROW_BITS: Final = 40


class Queries(Protocol):
    """Who works queries out: Spark."""

    def answer(self, fitted: Fitted, files: Sequence[str], directory: str) -> None:
        """The query of `fitted` for all rows of `files`, which `write_questions` wrote, into files of a new directory."""


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """What Spark made of rows, in their order: for each column and for the condition a struct of one value, null where it met an error."""

    table: pa.Table

    def column(self, computed: Computed) -> tuple[pa.Array, Bools]:
        """The values, and which of them could not be had."""
        values, failed = self._tried(str(computed.place))
        return computed.written(values), failed

    @property
    def where(self) -> tuple[pa.Array, Bools]:
        """The same for the condition."""
        return self._tried(WHERE)

    def _tried(self, name: str) -> tuple[pa.Array, Bools]:
        found = whole(self.table.column(name))
        return pc.struct_field(found, VALUE), as_bools(found.is_null())

    def slice(self, start: int, count: int) -> Answers:
        return Answers(self.table.slice(start, count))

    def only(self, rows: Bools) -> Answers:
        return Answers(self.table.filter(pa.array(rows))) if self.table.num_columns else self


def write_questions(fitted: Fitted, rows: pa.Table, directory: str, group: int) -> str | None:
    """What Spark needs of rows or changes of the source. Gives the path of the file; None if there are no rows."""
    if not rows.num_rows:
        return None
    if fitted.looks_back and fitted.source.key and UNCHANGED in rows.column_names and rows.column(UNCHANGED).null_count < rows.num_rows:
        rows = fill(rows, fitted.source.key).changes
    columns = {column.name: typed_values(rows, column).values for column in fitted.questioned}
    numbers = as_arrow(np.arange(rows.num_rows) + (group << _ROW_BITS), pa.int64())
    path = Path(directory) / f"{group}-{secrets.token_hex(8)}.parquet"
    with storage.create_file(path) as file:
        pq.write_table(pa.table({**columns, row_column(fitted.source.column_names): numbers}), file, compression="none")
    return str(path.absolute())


def read_answers(fitted: Fitted, directory: str, group: int, count: int) -> Answers:
    """Of the `count` rows of a group."""
    if not count:
        return Answers(pa.table({}))
    number, first = row_column(fitted.source.column_names), group << _ROW_BITS
    files = sorted(map(str, Path(directory).glob("*.parquet")))
    wanted = (pc.field(number) >= first) & (pc.field(number) < first + count)
    found = pq.read_table(files, filters=wanted).sort_by(number) if files else pa.table({number: pa.array([], pa.int64())})
    if found.num_rows != count:
        raise SinkError(f"Spark worked out {found.num_rows:,} of {count:,} rows of {fitted.source.name}")
    return Answers(found.drop_columns([number]))
