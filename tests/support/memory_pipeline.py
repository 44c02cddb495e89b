"""A pipeline without Spark: a real spool, a target in memory and a dead-letter queue. It can be made to
crash.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

from typing_extensions import override

from penstock import storage
from penstock.config.policies import RefusedPolicy
from penstock.errors import RowRefusedError, SinkError, SinkRefusedError
from penstock.pipeline.dead_letters.queue import DeadLetterQueue
from penstock.pipeline.dead_letters.store import DeadLetterStore
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import Sink, TableChanges, Target
from penstock.sinks.fold import fold
from penstock.sinks.modes import Mode
from penstock.sinks.slice_reader import read_slices, slices_after, step_ends
from penstock.spool import SpoolWriter
from penstock.spool.reader import FileSlice
from penstock.transforms.apply import transform_changes
from penstock.transforms.transform import Transform
from tests.support.delta_tables import InlineExecutors
from tests.support.pipeline.epochs import open_epochs
from tests.support.pipeline.position_sink import PositionSink
from tests.support.property.histories import layout_of
from tests.support.property.source_model import PlainTarget, Record
from tests.support.sinks.source import NULL, Row, Source, Value, whole


class Died(BaseException):
    """Simulates SIGKILL."""


class ListSink(PositionSink):
    """A target in memory, with scripted crashes and errors."""

    def __init__(self, table: TableSchema, mode: Mode, rows: list[Record], fence: int) -> None:
        super().__init__()
        self.table = table
        self.layout = layout_of(table, mode)
        self.list = PlainTarget(self.layout, rows)
        self.applied[table.name] = Position.of(fence)
        self.faults: Iterator[str] = iter(())
        self.transform: Transform | None = None
        """Only reports the rows that it would reject; rows stay unchanged."""
        self.step_rows = 1_000_000
        self.copy = "first"

    @override
    def load_target(self, table: TableName) -> Target:
        columns, applied, mode = self.layout.columns, self.applied[table], self.layout.mode
        return Target(table, self.table.oid, self.table.key, columns, applied, mode, copy=self.copy)

    @override
    def replace(self, table: TableName, shadow: Sink, position: Position) -> None:
        assert isinstance(shadow, ListSink)
        fault = next(self.faults, "")
        if fault == "before":
            raise Died
        if fault == "refused":
            raise SinkRefusedError("it does not fit", hint="make it fit")
        if fault == "failed":
            raise SinkError("not now")
        self.list, self.copy, self.applied[table] = (
            PlainTarget(self.layout, shadow.list.rows),
            shadow.copy,
            position,
        )
        if fault == "after":
            raise Died
        if fault == "lost":
            raise SinkRefusedError("the outcome is unknown", hint="look")

    @override
    def steps(self, slices: Sequence[FileSlice], end: Position) -> list[Position]:
        return step_ends(slices, self.step_rows, end)

    @override
    def apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        fault = next(self.faults, "")
        if fault == "before":
            raise Died
        reached = self.applied[target.table]
        if reached < end:
            read = read_slices(slices_after(changes.slices, reached), self.layout, None, changes.views)
            if (
                self.transform is not None
                and transform_changes(self.transform.fit(self.table), read).refused.num_rows
            ):
                raise RowRefusedError("some rows cannot be transformed", hint="mend them")
            self.list.apply(fold(read, self.layout, self.list.lookup))
            self.applied[target.table] = end
        if fault == "after":
            raise Died


class MemoryPipeline:
    """A pipeline without Spark: it is closed and opened again whenever it dies."""

    def __init__(self, root: Path, source: Source, mode: Mode, rows: list[Record]) -> None:
        (root / "lake").mkdir()
        self.root = root
        self.source = source
        self.sink = ListSink(source.table, mode, rows, source.fence)
        self.policy = RefusedPolicy.DEAD_LETTERS
        self.refuses = True
        self.writer = SpoolWriter(root / "spool", Position.of(source.fence))
        self.replayed: list[TableName] = []
        self.many = 2
        """Number of dead-letter files that are compacted into one."""
        self.open()

    def open(self) -> None:
        store = DeadLetterStore(self.root / "lake", "p", self.many)
        self.box = DeadLetterQueue(
            store,
            InlineExecutors(),
            policy_of=lambda _: self.policy,
            mode_of=lambda _: self.sink.layout.mode,
            reject_inexact=self.refuses,
            on_replayed=self.replayed.append,
            transform_of=lambda _: self.sink.transform,
        )
        self.applier = open_epochs(self.sink, self.root, dead_letters=self.box).applier
        target = self.sink.load_target(self.source.table.name)
        self.applier.tables.start(
            {target.table: target},
            {target.table: TableStatus(TableState.CATCHING_UP, target.applied, target.applied)},
        )

    def idle(self) -> int:
        """Advance the log without changes of the table."""
        end = self.writer.end.value + 10
        self.writer.advance(Position.of(end))
        self.writer.seal(quiet=True)
        return end

    def spool(self, start: int, end: int) -> None:
        self.writer.append(whole(self.source.table, self.source.log[start:end]))
        self.writer.seal()

    def apply(self, position: int) -> None:
        """Apply until it succeeds, reopening after each crash."""
        for _ in range(20):
            try:
                self.applier.apply(Position.of(position))
                return
            except Died:
                self.open()
        raise AssertionError("it never came to an end")

    @property
    def name(self) -> TableName:
        return self.source.table.name

    def letters(self, status: str = "open") -> list[dict[str, Any]]:
        return [letter for letter in self.box.store.load().to_pylist() if letter["status"] == status]


@contextmanager
def memory_pipeline(source: Source, mode: Mode, rows: list[Record]) -> Iterator[MemoryPipeline]:
    root = Path(tempfile.mkdtemp(prefix="penstock-test-"))
    try:
        yield MemoryPipeline(root, source, mode, rows)
    finally:
        shutil.rmtree(root)


@contextmanager
def dying_writes(after: int) -> Iterator[None]:
    """The store raises a simulated crash at its step number `after`."""
    left = [after]
    names = ("rename", "put", "delete")
    real: dict[str, Callable[..., Any]] = {name: getattr(storage, name) for name in names}

    def dying(name: str) -> Callable[..., Any]:
        def step(path: Path, *given: Any, **named: Any) -> Any:
            if "penstock_dead_letters" in str(path):
                left[0] -= 1
                if left[0] == 0:
                    raise Died
            return real[name](path, *given, **named)

        return step

    for name in names:
        setattr(storage, name, dying(name))
    try:
        yield
    finally:
        for name in names:
            setattr(storage, name, real[name])


LONG, BEYOND = Value(Decimal("1.50")), Value(None, "7e50")


def row(key: int, amount: Value = LONG, note: str = "n") -> Row:
    return {"id": Value(key), "note": Value(note), "amount": amount, "seen": NULL, "blob": NULL}


def key(number: int) -> tuple[Value, ...]:
    return (Value(number),)


def epoch(made: MemoryPipeline) -> None:
    """Commit the open changes of the source and apply them."""
    position = made.source.commit(50)
    made.spool(len(made.source.log) - 1, len(made.source.log))
    made.apply(position)
