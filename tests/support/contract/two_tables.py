"""Two tables of one sink, to test that a failure of one leaves the other alone."""

from __future__ import annotations

from dataclasses import replace

from penstock.change import Transactions
from penstock.pipeline.applier import EpochApplier
from penstock.pipeline.epoch_log import EpochLog
from penstock.pipeline.table_selection import Selection, inspect_pipeline
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.modes import Mode
from penstock.spool import SpoolWriter
from tests.support.contract.crash_table import FIRST, CrashTable
from tests.support.contract.shapes import INDEXED
from tests.support.contract.sink_setups import PIPELINE, SinkSetup
from tests.support.pipeline.epochs import open_epochs
from tests.support.sinks.source import whole

SECOND = replace(INDEXED, name=TableName("public", "other"), oid=16402)


class TwoTables:
    """Two tables of one pipeline, whose changes commit in the same transactions."""

    def __init__(self, place: SinkSetup, mode: Mode) -> None:
        self.setup, self.mode, self.sink = place, mode, place.open(mode)
        self.first, self.second = (CrashTable(place, self.sink, mode, shape) for shape in (FIRST, SECOND))
        self.spool, self.log = place.root / "spool", EpochLog(place.root / "epochs", PIPELINE)
        (place.root / "epochs").mkdir()
        self.writer = SpoolWriter(self.spool, Position.of(self.first.source.fence))
        self.applier = self.start()

    def start(self) -> EpochApplier:
        """Open the sink as another process does."""
        self.sink.close()
        self.sink = self.first.sink = self.second.sink = self.setup.open(self.mode)
        schemas = {each.table.name: each.table for each in (self.first, self.second)}
        found = inspect_pipeline(Selection({}, schemas, {}), self.sink, self.log.last())
        self.applier = open_epochs(self.sink, self.setup.root, log=self.log).applier
        self.applier.tables.start(found.targets, found.statuses)
        return self.applier

    def work(self) -> Position:
        for each in (self.first, self.second):
            each.busy.work()
        steps = [whole(each.table, each.busy.log[-1:]) for each in (self.first, self.second)]
        batches = [batch for step in steps if isinstance(step, Transactions) for batch in step.batches]
        assert isinstance(steps[0], Transactions)
        self.writer.append(replace(steps[0], batches=tuple(batches)))
        self.writer.seal()
        return Position.of(self.first.busy.position)

    def assert_exact(self, first: Position, second: Position) -> None:
        for each, position in ((self.first, first), (self.second, second)):
            assert each.target().applied == position
            each.assert_exact()
