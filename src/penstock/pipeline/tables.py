"""The tables of a run with their states, and the checks that fail or pause tables at start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from penstock.capture.provision import blocked
from penstock.capture.source_checks import check_continuity
from penstock.config.policies import ExistingPolicy
from penstock.contracts.provisioning import CoverageReport
from penstock.errors import PenstockError, PositionGapError, TargetRewoundError
from penstock.pipeline.epoch_log import Epoch
from penstock.pipeline.table_overrides import TableOverrides
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import Target


@dataclass(slots=True)
class Tables:
    """The tables of a pipeline at start-up, by name: their sources, targets and states."""

    sources: dict[TableName, CatalogTable] = field(default_factory=dict)
    targets: dict[TableName, Target] = field(default_factory=dict)
    statuses: dict[TableName, TableStatus] = field(default_factory=dict)
    schemas: dict[TableName, TableSchema] = field(default_factory=dict)
    foreign: dict[TableName, ExistingPolicy] = field(default_factory=dict)
    """Tables with an existing target table that the pipeline did not create, and the policy for it."""
    resyncs: dict[TableName, str] = field(default_factory=dict)
    """Tables that must be resynced, with the reason."""
    returned: set[TableName] = field(default_factory=set)
    """Tables in state `gone` that exist again in the source, so they are copied again."""
    reconfigured: dict[TableName, PenstockError] = field(default_factory=dict)
    """Tables that have not failed before, whose target was filled with other settings, and that cannot be
    resynced without a loss, with the error.
    """
    unreadable: dict[TableName, PenstockError] = field(default_factory=dict)
    """Tables whose target could not be read, with the error."""
    unpublished: set[TableName] = field(default_factory=set)
    """Tables whose capture starts only now, or was interrupted. An earlier, unfinished snapshot of such a
    table lacks changes.
    """
    gone: dict[TableName, str] = field(default_factory=dict)
    """Tables that the source dropped, with the reason; some of their changes may not be applied yet."""
    seen_at: Position | None = None
    """A position at or after everything committed before the catalog was read."""

    @property
    def live(self) -> list[TableName]:
        """Tables that exist in the source and have not failed."""
        return [
            name for name, status in self.statuses.items() if not status.is_over and name not in self.gone
        ]

    @property
    def capturable(self) -> list[TableName]:
        """The source tables to capture."""
        return [source for name in self.live for source in self.sources_of(name)]

    def sources_of(self, name: TableName) -> tuple[TableName, ...]:
        """The source tables of a pipeline table: one, or the members of a routed table."""
        return (
            tuple(source.name for source in self.sources[name].sources) if name in self.sources else (name,)
        )

    @property
    def owners(self) -> dict[TableName, TableName]:
        """The pipeline table to which each source table belongs."""
        return {
            source: name for name in {**self.sources, **self.statuses} for source in self.sources_of(name)
        }

    @property
    def pending(self) -> list[CatalogTable]:
        return [
            self.sources[name] for name, status in self.statuses.items() if status.state is TableState.PENDING
        ]

    @property
    def adopted(self) -> list[TableName]:
        """Adopted tables that a resync is replacing, or will replace."""
        return [
            name
            for name, status in self.statuses.items()
            if status.state is TableState.SNAPSHOTTING and status.applied is None
        ]

    @property
    def filled(self) -> dict[TableName, Position]:
        """The applied position of each table that was copied in an earlier run and continues from this
        position.
        """
        return {
            name: status.applied
            for name, status in self.statuses.items()
            if not status.is_over
            and status.applied is not None
            and name not in self.resyncs
            and name not in self.gone
        }


def fail_blocked(tables: Tables, report: CoverageReport) -> None:
    """Fail the tables that `report` blocks, because their changes would be missing or incomplete. If it
    blocks all tables, raise an error with all reasons.
    """
    reasons = {name: blocker for blocker in reversed(report.blockers) for name in blocker.tables}
    if reasons.keys() >= set(tables.capturable):
        raise blocked(report.blockers)
    owners = tables.owners
    for source, blocker in reasons.items():
        name = owners.get(source, source)
        tables.statuses[name] = TableStatus.failed(blocked([blocker]), tables.statuses[name].applied)


def pause_ordered(tables: Tables, orders: TableOverrides) -> None:
    for name, status in tables.statuses.items():
        if name in orders.paused and not status.is_over:
            tables.statuses[name] = replace(status, state=TableState.PAUSED)


def fail_unpublished(
    tables: Tables, added: Iterable[TableName], describe: Callable[[TableName], str]
) -> None:
    """Fail tables that already have a target and were not captured for a time, because changes from that time
    are lost. `added` are the source tables whose capture starts only now.
    """
    owners = tables.owners
    for source in added:
        name = owners.get(source, source)
        tables.unpublished.add(name)
        if name in tables.filled:
            error = TargetRewoundError(
                f"table {source} was not captured for a time, so some of its changes are missing",
                hint=f"remove {describe(name)} and run again to copy the table again",
            )
            tables.statuses[name] = TableStatus.failed(error, tables.statuses[name].applied)


def status_of(target: Target | None, name: TableName, last: Epoch | None) -> TableStatus:
    """Return the status with which a table starts, from its target and the last epoch record. If the record
    shows that the table had no change after the target's position, the applied position is that of the
    record.
    """
    recorded = last.tables.get(name) if last is not None else None
    if target is None or target.applied is None:
        return TableStatus(TableState.PENDING)
    if recorded is None or last is None:
        return TableStatus(TableState.CATCHING_UP, target.applied, target.applied)
    if recorded.is_over:
        return recorded
    if recorded.committed is not None and target.applied < recorded.committed:
        return TableStatus(TableState.CATCHING_UP, target.applied, target.applied)
    if recorded.state is not TableState.STREAMING:
        # The table took no part in that epoch: it was being copied, or paused.
        return TableStatus(
            TableState.CATCHING_UP, max(target.applied, recorded.applied or target.applied), target.applied
        )
    return TableStatus(TableState.CATCHING_UP, max(target.applied, last.position), target.applied)


def fail_over_holes(
    tables: Tables,
    ground: tuple[Position, Position] | None,
    confirmed: Position,
    slot: str,
    describe: Callable[[TableName], str],
    *,
    is_alone: bool = True,
) -> None:
    """Fail tables for which changes after the applied position are neither in the spool nor in the source.

    `ground` is the range of positions in the spool; the source has all changes after `confirmed`. If no table
    can continue, raises the error of one of them instead, unless other tables are streaming (`is_alone` is
    False).
    """
    holes: dict[TableName, PositionGapError] = {}
    for name, applied in tables.filled.items():
        try:
            check_continuity(applied, ground, confirmed, slot)
        except PositionGapError as error:
            holes[name] = error
    if holes and is_alone and len(holes) == len(tables.filled):
        raise next(iter(holes.values()))
    for name in holes:
        rewound_error = TargetRewoundError(
            f"{describe(name)} holds {name} only up to {tables.statuses[name].applied}, and the changes "
            "after that are lost",
            hint=f"remove {describe(name)} and run again to copy the table again",
        )
        tables.statuses[name] = TableStatus.failed(rewound_error, tables.statuses[name].applied)
