"""OperationsRun operations on a source and apply them to a sink: the rows of the target after each epoch, and
the expected rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import pyarrow as pa
from typing_extensions import override

from penstock.change import (
    CHANGE_TYPE,
    COMMIT_TIMESTAMP,
    COMMIT_VERSION,
    EXACT,
    EXACT_TYPE,
    ORDINAL,
    UNCHANGED,
    XID,
    LogStep,
)
from penstock.position import Position
from penstock.schema import TableSchema
from penstock.sinks.base import Sink, SnapshotFile, SnapshotPlace, TableChanges, Target
from penstock.sinks.modes import VALID_FROM, VALID_FROM_TIME, Layout, Mode
from penstock.sinks.row_files import write_batches
from penstock.spool import SpoolReader, SpoolWriter
from tests.support.contract.operations import (
    ALL,
    HEAP_OPERATIONS,
    OPERATIONS,
    Delete,
    Insert,
    Statement,
    Update,
)
from tests.support.contract.shapes import HEAP, KEYS_A_GROUP, Shape, heap_row
from tests.support.contract.sink_setups import SinkSetup
from tests.support.property.source_model import Heap, Record, SourceModel, canonical, changes_table, record_of
from tests.support.sinks.source import (
    NULL,
    Key,
    Row,
    Transaction,
    Value,
    exact_of,
    in_pieces,
    own_arrays,
    whole,
)

_XID = 7
"""The commits of transactions that are spooled at their commit."""


class FullIdentityModel(SourceModel):
    """Under replica identity FULL: a delete shows the old row, and there is no unchanged TOAST."""

    @override
    def update(self, key: Key, values: Row, unchanged: Sequence[str] = ()) -> None:
        self._old = self.rows[key]
        super().update(key, values)

    @override
    def delete(self, key: Key) -> None:
        self._old = self.rows[key]
        super().delete(key)

    @override
    def _key_row(self, key: Key) -> Row:
        return dict(self._old)


class TargetTable:
    """One table in one mode, from its snapshot on.

    `source` is the truth; its log is written to a real spool.
    """

    def __init__(
        self, place: SinkSetup, sink: Sink, mode: Mode, source: SourceModel | Heap, spool: Path
    ) -> None:
        self.setup, self.sink, self.mode, self.source = place, sink, mode, source
        self.table = table = source.table
        self.layout = Layout(
            pa.schema([pa.field(column.name, column.arrow_type) for column in table.columns]), table.key, mode
        )
        self.writer = SpoolWriter(spool, Position.of(source.fence))
        self.reader = SpoolReader(spool)
        self._spooled = 0
        self._xids: dict[int, int] = {}

    # --- actions ---

    def copy(self) -> None:
        """In two chunks."""
        place = self.setup.begin(self.sink, self.table, self.mode, Position.of(self.source.fence))
        rows = self.source.states[self.source.fence]
        self.sink.finish_snapshot(
            self.table, self.write(self.table, place, rows), Position.of(self.source.fence)
        )
        self.setup.copied(self.table)

    def write(self, table: TableSchema, place: SnapshotPlace, rows: Sequence[Row]) -> list[SnapshotFile]:
        return [
            self._chunk(table, place, number, part) for number, part in enumerate((rows[::2], rows[1::2]))
        ]

    def _chunk(
        self, table: TableSchema, place: SnapshotPlace, number: int, rows: Sequence[Row]
    ) -> SnapshotFile:
        columns = [*own_arrays(table, rows), pa.array([exact_of(row) for row in rows], EXACT_TYPE)]
        schema = pa.schema(
            [*((column.name, column.arrow_type) for column in table.columns), (EXACT, EXACT_TYPE)]
        )
        batches = iter([pa.RecordBatch.from_arrays(columns, schema=schema)] if rows else [])
        if self.sink.chunk_writer is not None:
            return self.sink.chunk_writer(batches, place, number, Position.of(self.source.fence))[0]
        return write_batches(batches, place, number)

    def spool(self, *, in_pieces_of: int | None = None) -> Position:
        """Spool the new commits of the source; with `in_pieces_of`, as streamed transactions of that many
        changes per block.
        """
        new = self.source.log[self._spooled :]
        self._spooled = len(self.source.log)
        for step in (
            [whole(self.table, new)] if in_pieces_of is None else _pieces(self.table, new, in_pieces_of)
        ):
            self.writer.append(step)
        self.writer.seal()
        if in_pieces_of is not None:
            self._xids |= {each.position: each.position for each in new}
        return Position.of(self.source.position)

    def target(self) -> Target:
        target = self.sink.load_target(self.table.name)
        assert target is not None
        return target

    def changes(self, start: Position, end: Position) -> TableChanges:
        found = self.reader.read(start, end).tables[self.table.name]
        return TableChanges(found.table, found.slices, found.counts)

    def follow(self, end: Position, target: Target | None = None) -> None:
        """The epoch that starts at the target's applied position."""
        target = target or self.target()
        assert target.applied is not None
        self.sink.apply(target, self.changes(target.applied, end), end)

    # --- actual and expected rows ---

    def shown(self) -> list[Record]:
        return self.settled(self.setup.rows(self.table.name, self.layout))

    def settled(self, rows: Sequence[Record]) -> list[Record]:
        """The model does not know the time of the snapshot."""
        return [_without_clock(row, self.source.fence) for row in rows]

    def expected(self, position: int) -> list[Record]:
        if self.mode is Mode.APPEND:
            rows = self._logged(position)
        elif isinstance(self.source, Heap):
            rows = self.source.expected(position)
        else:
            rows = self.source.expected(self.mode, position)
        return self.settled(rows)

    def _logged(self, position: int) -> list[Record]:
        fence = self.source.fence
        added = {
            CHANGE_TYPE: "snapshot",
            COMMIT_VERSION: fence,
            COMMIT_TIMESTAMP: None,
            ORDINAL: 0,
            XID: 0,
            UNCHANGED: None,
        }
        changes = changes_table(
            self.table, [each for each in self.source.log if each.position <= position]
        ).to_pylist()
        xids = [{**row, XID: self._xids.get(row[COMMIT_VERSION], _XID)} for row in changes]
        return [{**record_of(row), **added} for row in self.source.states[fence]] + xids

    def assert_exact(self) -> None:
        """The table equals the model at its applied position."""
        applied = self.target().applied
        assert applied is not None
        assert canonical(self.shown(), self.layout) == canonical(self.expected(applied.value), self.layout)


def _pieces(table: TableSchema, transactions: Sequence[Transaction], size: int) -> list[LogStep]:
    cut = [
        in_pieces(table, each, range(size, len(each.changes), size)) for each in transactions if each.changes
    ]
    return list(chain.from_iterable(cut))


def _without_clock(row: Record, fence: int) -> Record:
    if row.get(VALID_FROM) == fence:
        return {**row, VALID_FROM_TIME: None}
    return {**row, COMMIT_TIMESTAMP: None} if row.get(COMMIT_VERSION) == fence else row


class OperationsRun:
    """All operations on one shape, epoch by epoch, then the table emptied."""

    def __init__(self, place: SinkSetup, sink: Sink, mode: Mode, shape: Shape, root: Path) -> None:
        self.shape, self._texts = shape, place.texts
        table = shape.schema(texts=place.texts)
        source = self._heap(table) if shape is HEAP else self._keyed(table)
        self.target_table = TargetTable(
            place, sink, mode, source, root / f"spool-{table.name.name[:2]}-{mode}"
        )
        self._states: list[tuple[Callable[[], list[Record]], list[Record]]] = []
        self._groups = self._named_keys()
        self.target_table.copy()
        self._record_state()
        self._play()
        self.emptied_from = len(self._states)
        self._empty()
        self.states = [(self.target_table.settled(look()), expected) for look, expected in self._states]
        """Actual and expected rows, after the snapshot and after every epoch."""

    def of(self, operation: str, rows: Sequence[Record]) -> list[Record]:
        """The rows that belong to one operation."""
        return [row for row in rows if self._group(row) == operation]

    # the source
    # --------------------------------------------------------------------------------------------------------

    def _keyed(self, table: TableSchema) -> SourceModel:
        first = [self._row(name, at, 0) for name, operation in OPERATIONS.items() for at in operation.first]
        return (FullIdentityModel if self.shape.is_whole else SourceModel)(table, first)

    def _heap(self, table: TableSchema) -> Heap:
        return Heap(
            table,
            [
                heap_row(name, n, texts=self._texts)
                for name, (first, _) in HEAP_OPERATIONS.items()
                for n in first
            ],
        )

    def _row(self, operation: str, at: int, n: int) -> Row:
        number = list(OPERATIONS).index(operation) * KEYS_A_GROUP + at
        assert at < KEYS_A_GROUP
        return self.shape.row(number, n, texts=self._texts)

    # what happens
    # --------------------------------------------------------------------------------------------------------

    def _play(self) -> None:
        source = self.target_table.source
        count = max(len(each.epochs) for each in OPERATIONS.values())
        for number in range(count):
            if isinstance(source, Heap):
                self._play_heap(source, number)
            else:
                self._play_keyed(source, number)
            self.target_table.follow(self.target_table.spool(in_pieces_of=40 if number == 1 else None))
            self._record_state()

    def _play_keyed(self, source: SourceModel, number: int) -> None:
        epochs = {name: each.epochs[number] for name, each in OPERATIONS.items() if number < len(each.epochs)}
        for at in range(max(map(len, epochs.values()))):
            for name, epoch in epochs.items():
                for statement in epoch[at] if at < len(epoch) else ():
                    self._do(source, name, statement)
                source.skip_ordinals(1)
            source.commit()

    def _do(self, source: SourceModel, name: str, statement: Statement) -> None:
        if isinstance(statement, Insert):
            source.insert(self._row(name, statement.at, statement.n))
            return
        key = self._key(self._row(name, statement.at, 0))
        if isinstance(statement, Delete):
            source.delete(key)
        if isinstance(statement, Update):
            to = statement.at if statement.to is None else statement.to
            wanted = self.shape.kept if statement.keeps is ALL else statement.keeps
            keeps = [each for each in wanted if each in self.shape.kept and source.rows[key][each] != NULL]
            row = self._row(name, to, statement.n)
            source.update(key, {each: value for each, value in row.items() if each not in keeps}, keeps)

    def _play_heap(self, source: Heap, number: int) -> None:
        for name, (_, epochs) in HEAP_OPERATIONS.items():
            for change in epochs[number] if number < len(epochs) else ():
                if change.old is not None:
                    source.delete(source.rows.index(heap_row(name, change.old, texts=self._texts)))
                if change.new is not None:
                    source.insert(heap_row(name, change.new, texts=self._texts))
        if number >= 2:
            source.insert(heap_row("R04 inserts only", 9, texts=self._texts))
        source.commit()

    def _empty(self) -> None:
        """Truncate between other changes of one transaction, with others in the same epoch; and then
        alone.
        """
        source = self.target_table.source
        if self.target_table.table.key:
            rows = [self._row("R01 inserts, updates and deletes", at, 0) for at in (40, 41)]
        else:
            rows = [heap_row("R04 inserts only", n, texts=self._texts) for n in (40, 41)]
        source.insert(rows[0])
        source.truncate()
        source.insert(rows[1])
        source.commit()
        source.insert(rows[0])
        source.commit()
        self.target_table.follow(self.target_table.spool())
        self._record_state()
        source.truncate()
        source.commit()
        self.target_table.follow(self.target_table.spool())
        self._record_state()

    # --- reading the target ---

    def _record_state(self) -> None:
        look = self.target_table.setup.look(
            self.target_table.sink, self.target_table.table.name, self.target_table.layout
        )
        self._states.append((look, self.target_table.expected(self.target_table.source.position)))

    def _key(self, row: Row) -> Key:
        return tuple(row[name] for name in self.target_table.table.key)

    def _named_keys(self) -> dict[Key, str]:
        if not self.target_table.table.key:
            return {}
        return {self._key(self._row(name, at, 0)): name for name in OPERATIONS for at in range(KEYS_A_GROUP)}

    def key_of(self, row: Record) -> Key:
        texts = dict(row[EXACT] or ())
        return tuple(Value(row[name], texts.get(name)) for name in self.target_table.table.key)

    def _group(self, row: Record) -> str | None:
        return self._groups.get(self.key_of(row)) if self.target_table.table.key else str(row["operation"])
