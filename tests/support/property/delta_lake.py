"""A Delta table in a temporary directory, written without Spark."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from penstock.position import Position
from penstock.schema import TableSchema
from penstock.sinks.modes import Layout, Mode
from penstock.spool import SpoolReader, SpoolWriter
from penstock.spool.reader import FileSlice
from tests.support.delta_tables import (
    APPLICATION,
    InlineExecutors,
    add_rows,
    create_table,
    epoch,
    rows_of,
    state_of,
)
from tests.support.property.source_model import Record, canonical
from tests.support.sinks.source import Transaction, whole

MODES = (Mode.MIRROR, Mode.SOFT_DELETE, Mode.HISTORY)


class Lake:
    """One table, and the spool of its changes."""

    def __init__(
        self, root: Path, layout: Layout, fence: int, rows: Sequence[Record], *, mapped: bool
    ) -> None:
        self.path = root / "table"
        self.layout = layout
        self.executors = InlineExecutors()
        create_table(self.path, layout, mapped=mapped)
        for half in (rows[::2], rows[1::2]):
            add_rows(self.path, pa.Table.from_pylist(list(half), layout.schema), fence)
        self._reached = fence
        self.writer = SpoolWriter(root / "spool", Position.of(fence))
        self.reader = SpoolReader(root / "spool")

    def spool(self, table: TableSchema, transactions: Sequence[Transaction]) -> Sequence[FileSlice]:
        self.writer.append(whole(table, transactions))
        self.writer.seal()
        start, self._reached = self._reached, transactions[-1].position
        found = self.reader.read(Position.of(start), Position.of(self._reached)).tables.get(table.name)
        return () if found is None else found.slices

    def apply(self, table: TableSchema, transactions: Sequence[Transaction]) -> None:
        slices = self.spool(table, transactions)
        assert epoch(self.path, self.layout, slices, self._reached).apply(self.executors)
        assert state_of(self.path).transactions == {APPLICATION: self._reached}

    def canonical(self) -> list[str]:
        return canonical(rows_of(self.path), self.layout)


@contextmanager
def lake(layout: Layout, fence: int, rows: Sequence[Record], *, mapped: bool = False) -> Iterator[Lake]:
    root = Path(tempfile.mkdtemp(prefix="penstock-lake-"))
    try:
        yield Lake(root, layout, fence, rows, mapped=mapped)
    finally:
        shutil.rmtree(root)
