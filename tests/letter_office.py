"""A pipeline without Spark: a real spool, a table that is a list, and the letters between them. It dies when it is told to."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from penstock.errors import RowRefusedError, SinkError, SinkRefusedError
from penstock.pipeline.apply import EpochApplier
from penstock.pipeline.epochs import EpochLog
from penstock.pipeline.letters.box import LetterBox
from penstock.pipeline.letters.policy import RefusedPolicy
from penstock.pipeline.letters.store import LetterStore
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.states import TableState, TableStatus
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import Sink, TableChanges, Target
from penstock.sinks.fold import fold
from penstock.sinks.layout import Mode
from penstock.sinks.slice_reader import read_slices
from penstock.sinks.slices import slices_after
from penstock.sinks.steps import slices_upto, step_ends
from penstock.spool import SpoolWriter, storage
from penstock.spool.range import FileSlice
from penstock.transforms.applying import transform_changes
from penstock.transforms.transform import Transform
from tests.delta_tables import InlineExecutors
from tests.integration.sinks.source import Source, whole
from tests.property.chronicle import PlainTarget, Record
from tests.property.test_fold import layout_of
from tests.unit.test_applier import Ledger


class Died(BaseException):
    """In the place of SIGKILL."""


class ListSink(Ledger):
    """A table that is a list, and dies when it is told to."""

    def __init__(self, table: TableSchema, mode: Mode, rows: list[Record], fence: int) -> None:
        super().__init__()
        self.table = table
        self.layout = layout_of(table, mode)
        self.list = PlainTarget(self.layout, rows)
        self.applied[table.name] = Position.of(fence)
        self.faults: Iterator[str] = iter(())
        self.transform: Transform | None = None
        """Only says what it would refuse; rows stay as they are."""
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
        self.list, self.copy, self.applied[table] = PlainTarget(self.layout, shadow.list.rows), shadow.copy, position
        if fault == "after":
            raise Died
        if fault == "lost":
            raise SinkRefusedError("nobody knows whether it did", hint="look")

    @override
    def steps(self, slices: Sequence[FileSlice], end: Position) -> list[Position]:
        return step_ends(slices, self.step_rows, end)

    @override
    def apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        for upto in [end] if changes.at_once else self.steps(changes.slices, end):
            self._apply(target, replace(changes, slices=slices_upto(changes.slices, upto)), upto)

    def _apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        fault = next(self.faults, "")
        if fault == "before":
            raise Died
        reached = self.applied[target.table]
        if reached < end:
            read = read_slices(slices_after(changes.slices, reached), self.layout, None, changes.views)
            if self.transform is not None and transform_changes(self.transform.fit(self.table), read).refused.num_rows:
                raise RowRefusedError("some rows cannot be transformed", hint="mend them")
            self.list.apply(fold(read, self.layout, self.list.lookup))
            self.applied[target.table] = end
        if fault == "after":
            raise Died


class Office:
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
        """Files of letters that become one."""
        self.open()

    def open(self) -> None:
        store = LetterStore(self.root / "lake", "p", self.many)
        self.box = LetterBox(
            store,
            InlineExecutors(),
            policy_of=lambda _: self.policy,
            mode_of=lambda _: self.sink.layout.mode,
            refuse_inexact=self.refuses,
            on_replayed=self.replayed.append,
            transform_of=lambda _: self.sink.transform,
        )
        log = EpochLog(self.root / "lake", "p")
        observer = PipelineObserver()
        self.applier = EpochApplier(self.sink, log, self.root / "spool", consumer="p", system="1/1", observer=observer, letters=self.box)
        target = self.sink.load_target(self.source.table.name)
        self.applier.adopt({target.table: target}, {target.table: TableStatus(TableState.CATCHING_UP, target.applied, target.applied)})

    def idle(self) -> int:
        """The log goes on, and nothing of the table is in it."""
        end = self.writer.end.value + 10
        self.writer.advance(Position.of(end))
        self.writer.seal(quiet=True)
        return end

    def spool(self, start: int, end: int) -> None:
        self.writer.append(whole(self.source.table, self.source.log[start:end]))
        self.writer.seal()

    def apply(self, position: int) -> None:
        """Whatever it takes."""
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
def office(source: Source, mode: Mode, rows: list[Record]) -> Iterator[Office]:
    root = Path(tempfile.mkdtemp(prefix="penstock-office-"))
    try:
        yield Office(root, source, mode, rows)
    finally:
        shutil.rmtree(root)


@contextmanager
def dying_writes(after: int) -> Iterator[None]:
    """The store dies at one of its own steps."""
    left = [after]
    names = ("rename", "replace_bytes", "remove_file")
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
