"""SQL transforms without Spark: `Analyse` and `Queries`, implemented by functions of a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

from penstock.spark.query import VALUE, WHERE, Analysis, Selected, row_column
from penstock.transforms.computed import read_kind
from penstock.transforms.spark_exchange import Answers, Queries, read_answers, write_questions
from penstock.transforms.transform import Fitted, Transform

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Made:
    """A column computed from others; an exception of the function becomes an error of that row."""

    kind: str
    needs: tuple[str, ...]
    function: Callable[[Row], object]


@dataclass(frozen=True)
class PlainQuery(Queries):
    columns: Mapping[str, str | Made] = field(default_factory=dict)
    """By name: a column of the source, or the function that computes the column."""
    where: Made | None = None
    read: list[list[str]] = field(default_factory=list)
    """The columns of all files that were queried."""

    def transform(self, *, needs_key: bool = True) -> Transform:
        return Transform(sql="SELECT …", needs_key=needs_key, analyse=self.analyse)

    def condition(self) -> Transform:
        """A query with only a condition, which counts as not simple."""
        return Transform(where="f(x)", analyse=self.analyse)

    def analyse(self, text: str, columns: tuple[tuple[str, pa.DataType], ...]) -> Analysis:
        del text, columns
        selected = tuple(
            Selected(name, '"string"', (each,), is_plain=True)
            if isinstance(each, str)
            else Selected(name, f'"{each.kind}"', each.needs)
            for name, each in self.columns.items()
        )
        return Analysis(selected, None if self.where is None else self.where.needs)

    @override
    def answer(self, fitted: Fitted, files: Sequence[str], directory: str) -> None:
        """One file for each input, in reverse order: results need not be in the order of the inputs."""
        Path(directory).mkdir()
        number = row_column(fitted.source.column_names)
        for at, path in enumerate(files):
            with pq.ParquetFile(path) as file:
                rows = file.read()
            self.read.append([name for name in rows.column_names if name != number])
            rows = rows.take(pa.array(range(rows.num_rows - 1, -1, -1), pa.int64()))
            pq.write_table(
                pa.table({number: rows.column(number), **self._made(rows.to_pylist())}),
                f"{directory}/{at}.parquet",
            )

    def _made(self, rows: list[dict[str, Any]]) -> dict[str, pa.Array]:
        made = {str(at): each for at, each in enumerate(self.columns.values()) if not isinstance(each, str)}
        if self.where is not None:
            made[WHERE] = self.where
        found = {}
        for name, each in made.items():
            kind = read_kind(f'"{each.kind}"')
            found[name] = pa.array([_tried(each, row) for row in rows], pa.struct([pa.field(VALUE, kind)]))
        return found

    def ask(self, fitted: Fitted, rows: pa.Table) -> Answers:
        """Evaluate a query for all rows or changes."""
        with TemporaryDirectory() as directory:
            path = write_questions(fitted, rows, directory, 7)
            if path is not None:
                self.answer(fitted, [path], f"{directory}/answers")
            return read_answers(fitted, f"{directory}/answers", 7, rows.num_rows)


def _tried(made: Made, row: Row) -> dict[str, object] | None:
    try:
        return {VALUE: made.function({name: row[name] for name in made.needs})}
    except (ArithmeticError, TypeError, ValueError):
        return None
