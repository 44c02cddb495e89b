"""Finding out, at start, which tables there are and how each one stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.capture.continuity import check_continuity
from penstock.errors import PenstockError, PositionGapError, Recovery, SourceError, TargetRewoundError
from penstock.pipeline.epochs import Epoch
from penstock.pipeline.states import TableState, TableStatus
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable, check_mirrorable, inspect_schema, inspect_tables
from penstock.postgres.connection import Connection
from penstock.schema import TableName
from penstock.sinks.base import Sink, Target


@dataclass(slots=True)
class Tables:
    """The tables of a pipeline, by name: what the source has, what the target has, and the state that follows."""

    sources: dict[TableName, CatalogTable] = field(default_factory=dict)
    targets: dict[TableName, Target] = field(default_factory=dict)
    statuses: dict[TableName, TableStatus] = field(default_factory=dict)

    @property
    def capturable(self) -> list[TableName]:
        """What the publication must hold."""
        return [name for name, status in self.statuses.items() if status.state is not TableState.FAILED]

    @property
    def pending(self) -> list[CatalogTable]:
        return [self.sources[name] for name, status in self.statuses.items() if status.state is TableState.PENDING]

    @property
    def filled(self) -> dict[TableName, Position]:
        """Where each table stands that has been copied before."""
        return {
            name: status.applied
            for name, status in self.statuses.items()
            if status.state is not TableState.FAILED and status.applied is not None
        }


def inspect_pipeline(connection: Connection, selects: Callable[[TableName], bool], sink: Sink, last: Epoch | None) -> Tables:
    """Look at source and target. What one table cannot do fails that table alone."""
    tables = Tables()
    for source in inspect_tables(connection):
        if not selects(source.name):
            continue
        tables.sources[source.name] = source
        try:
            target = sink.load_target(source.name)
            check_mirrorable(inspect_schema(connection, source))
        except PenstockError as error:
            if error.recovery is not Recovery.OPERATOR or isinstance(error, SourceError):
                raise
            tables.statuses[source.name] = TableStatus.failed(error, None)
            continue
        if target is not None and target.applied is not None:
            tables.targets[source.name] = target
        tables.statuses[source.name] = _status(tables.targets.get(source.name), source.name, last)
    return tables


def _status(target: Target | None, name: TableName, last: Epoch | None) -> TableStatus:
    """The target owns the position; the record of epochs adds that nothing of this table lies between the two."""
    recorded = last.tables.get(name) if last is not None else None
    if target is None or target.applied is None:
        return TableStatus(TableState.PENDING)
    if recorded is None or last is None:
        return TableStatus(TableState.CATCHING_UP, target.applied, target.applied)
    if recorded.state is TableState.FAILED:
        return recorded
    if recorded.committed is not None and target.applied < recorded.committed:
        return TableStatus(TableState.CATCHING_UP, target.applied, target.applied)
    return TableStatus(TableState.CATCHING_UP, max(target.applied, last.position), target.applied)


def fail_over_holes(
    tables: Tables, ground: tuple[Position, Position] | None, confirmed: Position, slot: str, describe: Callable[[TableName], str]
) -> None:
    """Tables whose next change can no longer be had. If that is so for all of them, the slot is at fault, and nothing starts."""
    holes: dict[TableName, PositionGapError] = {}
    for name, applied in tables.filled.items():
        try:
            check_continuity(applied, ground, confirmed, slot)
        except PositionGapError as error:
            holes[name] = error
    if holes and len(holes) == len(tables.filled):
        raise next(iter(holes.values()))
    for name in holes:
        rewound = TargetRewoundError(
            f"{describe(name)} holds {name} only up to {tables.statuses[name].applied}, and the changes after that are gone",
            hint=f"remove {describe(name)} and run again to copy the table anew",
        )
        tables.statuses[name] = TableStatus.failed(rewound, tables.statuses[name].applied)
