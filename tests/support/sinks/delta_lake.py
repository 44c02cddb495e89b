"""A Delta table without Spark, and epochs applied to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
from typing_extensions import override

from penstock.change import EXACT
from penstock.position import Position
from penstock.schema import Column, TableName, TableSchema
from penstock.sinks.delta.epoch import DeltaCommit
from penstock.sinks.executors import In, Out
from penstock.sinks.modes import Layout, Mode
from penstock.spool import SpoolReader, SpoolWriter
from penstock.spool.reader import FileSlice
from tests.support.delta_tables import InlineExecutors, add_rows, create_table, epoch, rows_of
from tests.support.sinks.source import Source, Value, whole

ITEMS = TableSchema(
    16401,
    TableName("public", "items"),
    (Column("id", pa.int64(), 20), Column("note", pa.string(), 25)),
    ("id",),
)


LAYOUT = Layout(pa.schema([("id", pa.int64()), ("note", pa.string())]), ("id",), Mode.MIRROR)


class DyingExecutors(BaseException):
    """Simulates the end of the process."""


class Lake:
    """Rows 1 to 9 in two files, and changes to them."""

    def __init__(self, root: Path) -> None:
        self.path = root / "table"
        self.source = Source(ITEMS, [{"id": Value(key), "note": Value("first")} for key in range(1, 10)])
        create_table(self.path, LAYOUT)
        for keys in (range(1, 6), range(6, 10)):
            add_rows(
                self.path,
                pa.Table.from_pylist(
                    [{"id": key, "note": "first", EXACT: None} for key in keys], LAYOUT.schema
                ),
            )
        self._writer = SpoolWriter(root / "spool", Position.of(self.source.fence))
        self._reader = SpoolReader(root / "spool")
        self._written = 0

    def slices(self) -> Sequence[FileSlice]:
        self._writer.append(whole(ITEMS, self.source.log[self._written :]))
        self._writer.seal()
        start = self.source.log[self._written - 1].position if self._written else self.source.fence
        self._written = len(self.source.log)
        return (
            self._reader.read(Position.of(start), Position.of(self.source.position)).tables[ITEMS.name].slices
        )

    def epoch(self, slices: Sequence[FileSlice]) -> DeltaCommit:
        return epoch(self.path, LAYOUT, slices, self.source.position)

    def change(self) -> None:
        self.source.update((Value(2),), {"note": Value("second")})
        self.source.delete((Value(7),))
        self.source.insert({"id": Value(20), "note": Value("new")})
        self.source.commit()

    @property
    def is_right(self) -> bool:
        expected = {row["id"].typed: row["note"].typed for row in self.source.rows.values()}
        found = rows_of(self.path)
        return len(found) == len(expected) and {row["id"]: row["note"] for row in found} == expected

    def files(self) -> set[str]:
        return {file.name for file in self.path.iterdir() if file.is_file()}


class CommitsConcurrently(InlineExecutors):
    """Another writer commits while the epoch is being prepared."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._act = act

    @override
    def run(self, function: Callable[[In], Out], tasks: Sequence[In], *, light: bool = False) -> list[Out]:
        found = super().run(function, tasks)
        self._act()
        return found
