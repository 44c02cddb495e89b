"""A target with a dead-letter queue in memory."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from penstock.change import EXACT
from penstock.pipeline.dead_letters.rejections import Name, Rejection, Screened, screen
from penstock.schema import TableSchema
from penstock.sinks.fold import fold
from penstock.sinks.modes import CURRENT, DELETED, Layout, Mode
from penstock.sinks.slice_reader import changes_at
from tests.support.property.source_model import PlainTarget, Record, canonical, changes_table
from tests.support.sinks.source import Transaction

NO = Rejection("PEN-1411", "no")


class RejectingTarget:
    """A target, and its open dead letters."""

    def __init__(self, table: TableSchema, layout: Layout, rows: Sequence[Record]) -> None:
        self.table = table
        self.layout = layout
        self.target = PlainTarget(layout, rows)
        self.letters = changes_table(table, [])
        self.replayed: list[Name] = []

    def apply(self, epoch: Sequence[Transaction], refused: set[Name], *, replays: bool = False) -> Screened:
        changes = changes_table(self.table, epoch)
        screened = screen(changes, self.letters, self.layout, dict.fromkeys(refused, NO), replays=replays)
        both = pa.concat_tables([self.letters, changes])
        self.target.apply(fold(_without(both, screened.excluded), self.layout, self.target.lookup))
        assert screened.replayed.isdisjoint(self.replayed), "no dead letter is applied twice"
        self.replayed += screened.replayed
        kept = pa.concat_tables([self.letters, _only(changes, screened.refused)])
        self.letters = _without(kept, {*screened.superseded, *screened.replayed})
        return screened

    def live(self, rows: Sequence[Record]) -> list[str]:
        """The rows that target and source share: those that are live and have no dead letter."""
        held = {self.target.name(row, self.layout.key) for row in self.letters.to_pylist()}
        own = [*self.layout.columns.names, EXACT]
        wanted = [row for row in rows if not row.get(DELETED) and row.get(CURRENT, True)]
        free = [row for row in wanted if self.target.name(row, self.layout.key) not in held]
        return canonical(
            [{name: row[name] for name in own} for row in free],
            Layout(self.layout.columns, self.layout.key, Mode.MIRROR),
        )


def _without(changes: pa.Table, names: set[Name]) -> pa.Table:
    return changes.filter(pa.array(~changes_at(changes, names)))


def _only(changes: pa.Table, names: dict[Name, Rejection]) -> pa.Table:
    return changes.filter(pa.array(changes_at(changes, names)))
