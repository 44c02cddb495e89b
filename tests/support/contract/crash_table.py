"""A table of a sink with a busy source, for tests that simulate crashes."""

from __future__ import annotations

from penstock.position import Position
from penstock.sinks.base import Sink
from penstock.sinks.modes import Mode
from tests.support.contract.operations_run import TargetTable
from tests.support.contract.shapes import HEAP, INDEXED, Shape, heap_row
from tests.support.contract.sink_setups import SinkSetup
from tests.support.property.source_model import Heap, SourceModel
from tests.support.sinks.source import Row

FIRST = INDEXED


class Busy(SourceModel):
    """Each transaction inserts, updates, moves and deletes rows."""

    def __init__(self, shape: Shape, *, texts: bool) -> None:
        self._shape, self._texts = shape, texts
        super().__init__(shape.schema(texts=texts), [self.row(number, number) for number in (0, 1, 2, 4)])
        self.turns = 0

    def work(self) -> None:
        turn = self.turns = self.turns + 1
        self.insert(self.row(100 + turn, turn))
        self.change(turn)
        self.commit()

    def change(self, turn: int) -> None:
        """Further changes in the same transaction."""
        for number, to in ((0, 0), (1, 1), (2 + (turn + 1) % 2, 2 + turn % 2)):
            self.update(self._key(self.row(number, 0)), self.row(to, turn))
        if turn > 2:
            self.delete(self._key(self.row(98 + turn, 0)))

    def row(self, number: int, n: int) -> Row:
        return self._shape.row(number, n, texts=self._texts)


class Growing(Busy):
    """Inserts only."""

    def change(self, turn: int) -> None:
        self.insert(self.row(200 + turn, turn))


class Emptied(Busy):
    """A truncate, then one insert."""

    def change(self, turn: int) -> None:
        self.truncate()
        self.insert(self.row(200 + turn, turn))


class BusyHeap(Heap):
    """Inserts, updates and deletes of indistinguishable rows."""

    def __init__(self, shape: Shape, *, texts: bool) -> None:
        del shape
        self._texts = texts
        super().__init__(HEAP.schema(texts=texts), [self._row(number) for number in (0, 0, 0, 1, 2)])
        self._turns = 0

    def work(self) -> None:
        turn = self._turns = self._turns + 1
        self.insert(self._row(turn))
        self.insert(self._row(0))
        self.update(self.rows.index(self._row(0)), self._row(turn))
        self.delete(self.rows.index(self._row(turn)))
        self.commit()

    def _row(self, n: int) -> Row:
        return heap_row("R05", n, texts=self._texts)


Kind = type[Busy] | type[BusyHeap]


class CrashTable(TargetTable):
    """A table that is copied, whose source is busy."""

    def __init__(
        self, place: SinkSetup, sink: Sink, mode: Mode, shape: Shape = FIRST, kind: Kind = Busy
    ) -> None:
        self.busy = busy = kind(shape, texts=place.texts)
        super().__init__(place, sink, mode, busy, place.root / f"spool-{shape.name.name}")
        self.copy()

    def work(self) -> Position:
        self.busy.work()
        return self.spool()

    def go_on_elsewhere(self) -> None:
        """Continue as a new process."""
        self.sink.close()
        self.sink = self.setup.open(self.mode)
