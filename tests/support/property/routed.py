"""Several tables routed into one, as one source with one log, and the expected rows after each commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from penstock.change import ChangeBatch, Transactions
from penstock.pipeline.routing import gather, routed_views
from penstock.position import Position
from penstock.schema import TableName, TableSchema, joined_schema
from penstock.sinks.base import TableChanges, Target
from penstock.sinks.modes import Layout, Mode
from penstock.spool import SpoolReader
from tests.support.property.source_model import Record
from tests.support.sinks.source import Transaction, time_of, whole

SOURCE = "_source"
INTO = TableName("lake", "all")
FENCE = 100
_LATER = 10_000
"""One transaction writes to one table after the other."""


class Shards:
    """The members by schema, all copies of one table; `expected` returns the rows of one of them at its
    position.
    """

    def __init__(
        self,
        table: TableSchema,
        logs: Sequence[Sequence[Transaction]],
        expected: Callable[[int, int], list[Record]],
    ) -> None:
        self.members = [replace(table, oid=at + 1, name=TableName(f"s{at}", "t")) for at in range(len(logs))]
        self.schema = joined_schema(INTO, SOURCE, self.members)
        self.logs = [
            [
                replace(
                    each,
                    changes=tuple(
                        replace(change, ordinal=change.ordinal + at * _LATER) for change in each.changes
                    ),
                )
                for each in log
            ]
            for at, log in enumerate(logs)
        ]
        self.positions = sorted({each.position for log in logs for each in log})
        self._expected = expected

    def layout(self, mode: Mode) -> Layout:
        columns = pa.schema([pa.field(column.name, column.arrow_type) for column in self.schema.columns])
        return Layout(columns, self.schema.key, mode)

    def expected(self, position: int) -> list[Record]:
        found = []
        for at, (member, log) in enumerate(zip(self.members, self.logs, strict=True)):
            reached = max((each.position for each in log if each.position <= position), default=FENCE)
            found += [{**row, SOURCE: str(member.name)} for row in self._expected(at, reached)]
        return found

    def step(self, low: int, high: int) -> Transactions:
        """The changes of all members in `(low, high]`."""
        batches: list[ChangeBatch] = []
        for member, log in zip(self.members, self.logs, strict=True):
            some = [each for each in log if low < each.position <= high]
            if some:
                step = whole(member, some)
                assert isinstance(step, Transactions)
                batches += step.batches
        return Transactions(tuple(batches), Position.of(high), time_of(high), 1)

    def changes(self, target: Target, reader: SpoolReader, low: int, high: int) -> TableChanges | None:
        known: Mapping[int, TableSchema] = {self.schema.oid: self.schema}
        found = gather(target, reader.read(Position.of(low), Position.of(high)), known)
        return None if found is None else replace(found, views=routed_views(target, found, known))

    def target(self, layout: Layout) -> Target:
        return Target(INTO, self.schema.oid, self.schema.key, layout.columns, Position.of(FENCE), layout.mode)
