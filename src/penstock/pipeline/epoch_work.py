"""What an epoch has to do: for each table, the changes from where it stands to the end of the epoch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from penstock.change import ChangeCounts
from penstock.pipeline.routing import gather
from penstock.pipeline.states import TableStatus
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.sinks.alterations import AlterationReader
from penstock.sinks.base import TableChanges, Target
from penstock.spool.range import SpoolRange


def is_behind(status: TableStatus, end: Position) -> bool:
    return status.is_applied and status.applied is not None and status.applied < end


def plan_work(
    targets: Mapping[TableName, Target],
    statuses: Mapping[TableName, TableStatus],
    ranges: Mapping[Position, SpoolRange],
    routed: Mapping[int, TableSchema],
    due: Collection[TableName],
    *,
    hints: AlterationReader,
) -> tuple[list[TableChanges], dict[TableName, Exception]]:
    """What each table has to take in, read from where that table stands, the largest first; and the tables that could not be planned.

    `routed` are tables into which others go, by their numbers. `due` are tables for which there is something to do in any case.
    """
    work: list[TableChanges] = []
    failures: dict[TableName, Exception] = {}
    altered = {start: hints.read(each.messages) for start, each in ranges.items()}
    for name, status in statuses.items():
        if not status.is_applied or status.applied is None:
            continue
        try:
            found = gather(targets[name], ranges[status.applied], routed) if status.applied in ranges else None
        except Exception as error:  # noqa: BLE001 the edge of one table's work: the error policy decides
            failures[name] = error
            continue
        if found is not None:
            work.append(replace(found, alterations=altered[status.applied]))
        elif name in due:
            work.append(TableChanges(name, (), ChangeCounts()))
    return sorted(work, key=lambda changes: -changes.counts.rows), failures
