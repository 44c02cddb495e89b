"""A sink under test, between a source that is a dict and a real spool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow as pa

from penstock.change import EXACT, EXACT_TYPE
from penstock.position import Position
from penstock.schema import Column, TableName, TableSchema
from penstock.sinks.base import Sink, SnapshotFile, SnapshotPlace, TableChanges, Target
from penstock.sinks.row_files import write_batches
from penstock.spool import SpoolReader, SpoolWriter
from tests.support.sinks.source import NULL, Key, Row, Source, Value, exact_of, own_arrays, whole

PIPELINE = "shop"
ITEMS = TableName("public", "items")


class SinkHarness(ABC):
    """Holds a source of the rows 1 to 9, not yet copied. Subclasses create the sink and read its tables."""

    types: tuple[pa.DataType, ...] = (pa.string(), pa.string(), pa.string())
    """The order of the columns `id`, `note` and `size` in which the pipeline writes them."""

    def __init__(self, root: Path) -> None:
        columns = [
            Column(name, kind, oid)
            for name, kind, oid in zip(("id", "note", "size"), self.types, (20, 25, 1700), strict=True)
        ]
        self.table = TableSchema(16401, ITEMS, tuple(columns), ("id",))
        self.source = Source(self.table, [self.item(key, f"note {key}", f"{key}.50") for key in range(1, 10)])
        self.writer = SpoolWriter(root / "spool", Position.of(self.source.fence))
        self.reader = SpoolReader(root / "spool")
        self._spooled = 0
        self._root = root
        self.sink = self.open()

    @abstractmethod
    def open(self, pipeline: str = PIPELINE) -> Sink:
        """A sink of the kind, on the same target: of another process, if there is one already."""

    @abstractmethod
    def rows(self) -> list[Row]:
        """The rows that a reader of the target sees, sorted."""

    @abstractmethod
    def put_foreign(self) -> None:
        """Create a foreign object in the place of the table."""

    @abstractmethod
    def dying(self) -> AbstractContextManager[None]:
        """An epoch applied in this block dies after everything is written, before the commit."""

    @abstractmethod
    def unanswered(self) -> AbstractContextManager[None]:
        """An epoch applied in this block commits, but the answer is lost."""

    def row_files(self) -> dict[Path, int]:
        """The data and delete files of the targets, each with its inode, which links to one file share."""
        found = [
            path for path in self._root.rglob("*") if path.suffix in (".parquet", ".bin") and path.is_file()
        ]
        return {
            path: path.stat().st_ino
            for path in found
            if not {"spool", "_delta_log"} & set(path.relative_to(self._root).parts)
        }

    def item(self, key: int, note: str | None = "first", size: str | None = None) -> Row:
        return {"id": self.value(key), "note": Value(note), "size": Value(size) if size is not None else NULL}

    def value(self, key: int) -> Value:
        return Value(str(key) if pa.types.is_string(self.types[0]) else key)

    def at(self, key: int) -> Key:
        return (self.value(key),)

    @property
    def fence(self) -> Position:
        return Position.of(self.source.fence)

    # snapshots
    # --------------------------------------------------------------------------------------------------------

    def begin(self) -> SnapshotPlace:
        return self.sink.begin_snapshot(self.table, self.fence)

    def write(
        self, place: SnapshotPlace, number: int, rows: Sequence[Row], fence: Position | None = None
    ) -> tuple[SnapshotFile, Position]:
        """The executor's part of a chunk."""
        columns = [*own_arrays(self.table, rows), pa.array([exact_of(row) for row in rows], EXACT_TYPE)]
        schema = pa.schema(
            [*((column.name, column.arrow_type) for column in self.table.columns), (EXACT, EXACT_TYPE)]
        )
        batches = iter([pa.RecordBatch.from_arrays(columns, schema=schema)] if rows else [])
        if self.sink.chunk_writer is not None:
            return self.sink.chunk_writer(batches, place, number, fence or self.fence)
        return write_batches(batches, place, number), fence or self.fence

    def copy(self) -> None:
        """The whole table, in two chunks and an empty one."""
        place = self.begin()
        rows = self.source.states[self.source.fence]
        files = [self.write(place, number, part)[0] for number, part in enumerate((rows[:5], rows[5:], []))]
        self.sink.finish_snapshot(self.table, files, self.fence)

    # epochs
    # --------------------------------------------------------------------------------------------------------

    def commit(self) -> Position:
        """Commit in the source, and put the changes into the spool."""
        position = self.source.commit()
        self.writer.append(whole(self.table, self.source.log[self._spooled :]))
        self.writer.seal()
        self._spooled = len(self.source.log)
        return Position.of(position)

    def target(self) -> Target:
        target = self.sink.load_target(ITEMS)
        assert target is not None
        return target

    def changes(self, start: Position, end: Position) -> TableChanges:
        found = self.reader.read(start, end).tables[ITEMS]
        return TableChanges(ITEMS, found.slices, found.counts)

    def apply(self, start: Position, end: Position, target: Target | None = None) -> None:
        self.sink.apply(target or self.target(), self.changes(start, end), end)

    def follow(self) -> Position:
        """Commit the open changes of the source and apply them to the target."""
        applied = self.target().applied
        assert applied is not None
        end = self.commit()
        self.apply(applied, end)
        return end
