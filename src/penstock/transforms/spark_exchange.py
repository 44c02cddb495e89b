"""Exchange rows with Spark through files: write the values that a query needs, read the query's results, and
match the results to the rows by row number.

Rows or changes are sent in numbered groups. A row number combines the number of the group and the row's index
in the group.
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

from penstock import storage
from penstock.arrow import Bools, as_arrow, as_bools
from penstock.change import UNCHANGED
from penstock.errors import SinkError
from penstock.spark.query import VALUE, WHERE, row_column
from penstock.transforms.computed import Computed
from penstock.transforms.transform import Fitted
from penstock.transforms.values import fill, typed_values, whole

_ROW_BITS: Final = 40


class Queries(Protocol):
    """Evaluates queries with Spark."""

    def answer(self, fitted: Fitted, files: Sequence[str], directory: str) -> None:
        """Evaluate the query of `fitted` for all rows of `files`, which `write_questions` wrote. Write the
        results to files in `directory`, which must not exist yet.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """Spark's results in row order. The table has a struct column with one field for each computed column,
    and one for the condition. A struct is null if Spark raised an error for its row.
    """

    table: pa.Table

    def column(self, computed: Computed) -> tuple[pa.Array, Bools]:
        """Return the values of a computed column in the target's form, and a mask of the rows for which Spark
        raised an error.
        """
        values, failed = self._tried(str(computed.place))
        return computed.written(values), failed

    @property
    def where(self) -> tuple[pa.Array, Bools]:
        """The values of the condition, and a mask of the rows for which Spark raised an error."""
        return self._tried(WHERE)

    def _tried(self, name: str) -> tuple[pa.Array, Bools]:
        found = whole(self.table.column(name))
        return pc.struct_field(found, VALUE), as_bools(found.is_null())

    def slice(self, start: int, count: int) -> Answers:
        return Answers(self.table.slice(start, count))

    def only(self, rows: Bools) -> Answers:
        return Answers(self.table.filter(pa.array(rows))) if self.table.num_columns else self


def write_questions(fitted: Fitted, rows: pa.Table, directory: str, group: int) -> str | None:
    """Write the columns that Spark needs to a file. Returns the path of the file; None if there are no
    rows.
    """
    if not rows.num_rows:
        return None
    if (
        fitted.needs_earlier_values
        and fitted.source.key
        and UNCHANGED in rows.column_names
        and rows.column(UNCHANGED).null_count < rows.num_rows
    ):
        rows = fill(rows, fitted.source.key).changes
    columns = {column.name: typed_values(rows, column).values for column in fitted.query_columns}
    numbers = as_arrow(np.arange(rows.num_rows) + (group << _ROW_BITS), pa.int64())
    path = Path(directory) / f"{group}-{secrets.token_hex(8)}.parquet"
    with storage.open_new(path) as file:
        pq.write_table(
            pa.table({**columns, row_column(fitted.source.column_names): numbers}), file, compression="none"
        )
    return str(path.absolute())


def read_answers(fitted: Fitted, directory: str, group: int, count: int) -> Answers:
    """Read Spark's results for the `count` rows of a group. Raises `SinkError` if the number of results
    differs.
    """
    if not count:
        return Answers(pa.table({}))
    number, first = row_column(fitted.source.column_names), group << _ROW_BITS
    files = sorted(map(str, storage.list_paths(Path(directory), "*.parquet")))
    wanted = (pc.field(number) >= first) & (pc.field(number) < first + count)
    found = (
        pq.read_table(files, filters=wanted).sort_by(number)
        if files
        else pa.table({number: pa.array([], pa.int64())})
    )
    if found.num_rows != count:
        raise SinkError(f"Spark evaluated {found.num_rows:,} of {count:,} rows of {fitted.source.name}")
    return Answers(found.drop_columns([number]))
