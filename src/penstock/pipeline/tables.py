"""Finding out, at start, which tables there are and how each one stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pyarrow as pa

from penstock.capture.continuity import check_continuity
from penstock.errors import (
    NoTablesError,
    PenstockError,
    PositionGapError,
    Recovery,
    SchemaChangedError,
    SourceError,
    TargetRewoundError,
)
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.epochs import Epoch
from penstock.pipeline.states import TableState, TableStatus
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable, check_mirrorable, inspect_schemas, inspect_tables
from penstock.postgres.connection import Connection
from penstock.schema import TableName, TableSchema
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


def inspect_pipeline(connection: Connection, config: PipelineConfig, sink: Sink, last: Epoch | None) -> Tables:
    """Look at source and target. What one table cannot do fails that table alone."""
    tables = Tables()
    selected = [source for source in inspect_tables(connection) if config.selects(source.name)]
    schemas = inspect_schemas(connection, selected, config.types.policy, config.publication)
    for source in selected:
        tables.sources[source.name] = source
        try:
            schema = schemas[source.name]
            check_mirrorable(schema)
            target = sink.load_target(source.name)
            _check_same(schema, target, sink.describe(source.name))
        except PenstockError as error:
            if error.recovery is not Recovery.OPERATOR or isinstance(error, SourceError):
                raise
            tables.statuses[source.name] = TableStatus.failed(error, None)
            continue
        if target is not None and target.applied is not None:
            tables.targets[source.name] = target
        tables.statuses[source.name] = _status(tables.targets.get(source.name), source.name, last)
    return tables


def _check_same(schema: TableSchema, target: Target | None, place: str) -> None:
    """A target that was filled from another table of the same name, or from one of another shape, would go on with rows that are wrong."""
    if target is None or target.applied is None:
        return
    found = pa.schema([pa.field(column.name, column.arrow_type) for column in schema.columns])
    if schema.oid != target.source_oid or schema.key != target.key or not found.equals(target.schema):
        raise SchemaChangedError(
            f"table {schema.name} was re-created, or changed its columns or its key, since {place} was filled",
            hint=f"remove {place} and run again to copy the table anew",
        )


def fail_unknown(tables: Tables, named: Iterable[TableName]) -> None:
    """Tables that the configuration names and the source does not have."""
    for name in named:
        if name not in tables.statuses:
            error = NoTablesError(
                f"there is no table {name} in the source", hint="check the name under tables: (case counts), or remove it"
            )
            tables.statuses[name] = TableStatus.failed(error, None)


def fail_unpublished(tables: Tables, added: Iterable[TableName], describe: Callable[[TableName], str]) -> None:
    """Tables that were filled before and have not been published since: their changes in between are in no log."""
    for name in added:
        if name in tables.filled:
            error = TargetRewoundError(
                f"table {name} was not in the publication any more, so changes of it are missing",
                hint=f"remove {describe(name)} and run again to copy the table anew",
            )
            tables.statuses[name] = TableStatus.failed(error, tables.statuses[name].applied)


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
