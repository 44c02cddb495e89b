"""Tables that the source has no more under the name that they were mirrored by: dropped, renamed, moved to another schema.

Their targets stay as they are, with all that there was of them by then. A table that has another name is another table for whoever reads:
it is copied under that name, if the configuration selects it. One that comes back is copied anew, since what happened to it meanwhile,
under whatever name, is not in its target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.errors import MembersDifferError, PenstockError, Recovery
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.epochs import Epoch
from penstock.pipeline.states import TableState
from penstock.pipeline.tables import Tables, status_of
from penstock.postgres.catalog import inspect_names
from penstock.postgres.connection import Connection
from penstock.schema import TableName
from penstock.sinks.base import Target, Targets

Selects = Callable[[TableName], bool]


def why_gone(connection: Connection, oids: Mapping[TableName, int], selects: Selects) -> dict[TableName, str]:
    """What became of tables that are not there any more, by the OIDs that they had."""
    names = inspect_names(connection, list(oids.values()))
    return {name: _reason(name, names.get(oid), selects) for name, oid in oids.items()}


def _reason(name: TableName, now: TableName | None, selects: Selects) -> str:
    if now is None:
        return "it was dropped"
    if now == name:
        return "it is unlogged now, or a part of another table"
    return f"it is called {now} now, {'and copied under that name' if selects(now) else 'which is not selected'}"


def keep_gone(connection: Connection, tables: Tables, targets: Targets, last: Epoch | None, config: PipelineConfig) -> None:
    """At start, also take in the tables of the last epoch that the source has no more: some of their changes may be still to come."""
    found: dict[TableName, Target] = {}
    for name, recorded in (last.tables if last is not None else {}).items():
        if name in tables.sources or not config.has(name) or _differs(tables, name):
            continue
        if recorded.state is TableState.GONE:
            tables.statuses[name] = recorded
        elif recorded.state is not TableState.FAILED and (target := _filled(targets, name)) is not None:
            found[name] = target
            tables.statuses[name] = status_of(target, name, last)
    tables.targets |= found
    tables.gone |= why_gone(connection, {name: target.source_oid for name, target in found.items()}, config.selects)


def _differs(tables: Tables, name: TableName) -> bool:
    """Whether those that are routed into it are there, and only not alike."""
    status = tables.statuses.get(name)
    return status is not None and (status.reason or "").startswith(f"{MembersDifferError.code}:")


def _filled(targets: Targets, name: TableName) -> Target | None:
    try:
        target = targets.load_target(name)
    except PenstockError as error:
        if error.recovery is not Recovery.OPERATOR:
            raise
        return None
    return target if target is not None and target.applied is not None else None
