"""Policies of a pipeline or of a table rule: schema changes, rejected rows, existing target tables,
routes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.errors import SchemaChangedError
from penstock.postgres.catalog import CatalogShape
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import Target
from penstock.sinks.evolution import Evolution, ResyncRequired, plan_evolution
from penstock.sinks.lineage import DdlHint, Origin
from penstock.transforms.transform import Transform


class ExistingPolicy(StrEnum):
    REFUSE = "refuse"
    """The source table fails. The existing target table is not changed."""
    ADOPT = "adopt"
    """The pipeline takes over the existing table.

    The table keeps its rows until a snapshot is complete; then the rows of the snapshot replace them.
    """
    REPLACE = "replace"
    """The existing table is deleted with all its data, and the pipeline creates a new one."""

    @property
    def consequence(self) -> str:
        return (
            "its rows are replaced when a snapshot is complete"
            if self is ExistingPolicy.ADOPT
            else "it is deleted with all its data"
        )


class RefusedPolicy(StrEnum):
    STOP = "stop"
    """The table fails."""
    DEAD_LETTERS = "dead_letters"
    """The row goes to the dead-letter queue, and the table continues."""


SOURCE_COLUMN = "_source"


@dataclass(frozen=True, slots=True)
class Route:
    into: TableName
    source_column: str


def check_routes(routes: Iterable[Route | None]) -> None:
    """Raise `ValueError` if rules that route into the same target have different source columns."""
    columns: dict[TableName, str] = {}
    for route in routes:
        if route is not None and columns.setdefault(route.into, route.source_column) != route.source_column:
            both = f"{columns[route.into]!r} and {route.source_column!r}"
            raise ValueError(
                f"rules that route into {route.into} have different values of source_column: {both}"
            )


class SchemaPolicy(StrEnum):
    EVOLVE = "evolve"
    """The target is altered. If that is not possible, a mirror is resynced."""
    ADDITIVE = "additive"
    """Columns are added and widened. Any other change fails the table."""
    IGNORE = "ignore"
    """The target keeps its columns. Columns that are new in the source are left out, and columns that were
    dropped there become NULL. A change that does not fit into the target's columns fails the table.
    """
    STOP = "stop"
    """Any change of a column or of the key fails the table."""


@dataclass(frozen=True, slots=True)
class SchemaRule:
    """The schema policy of one table."""

    policy: SchemaPolicy = SchemaPolicy.EVOLVE
    can_resync: bool = True
    """Whether the table mode allows a resync."""
    transform: Transform | None = None
    """The transform of the table's rows."""

    @property
    def auto_resync(self) -> bool:
        """Whether a target that cannot be altered is resynced automatically."""
        return self.policy is SchemaPolicy.EVOLVE and self.can_resync


def plan_following(
    policy: SchemaPolicy,
    target: Target,
    origin: Origin,
    versions: Sequence[TableSchema],
    now: CatalogShape,
    *,
    ends: bool = False,
    reported: Sequence[DdlHint] = (),
) -> Evolution:
    """Plan the schema changes after which `target` can hold rows of the source schemas `versions`. Raises
    `ResyncRequired` if the target must be resynced, and `SchemaChangedError` if the policy does not allow the
    changes.

    `ends` and `reported` are passed to `plan_evolution`.
    """
    stopped = SchemaChangedError(
        f"the columns or the key of table {target.table} changed in a way that schema_changes: {policy} "
        "does not allow",
        hint=f"penstock tables resync CONFIG {target.table} copies the table with its current columns; or "
        "set schema_changes: evolve",
    )
    if policy is SchemaPolicy.STOP:
        raise stopped
    try:
        is_fixed, is_log = policy is SchemaPolicy.IGNORE, target.mode.is_log
        found = plan_evolution(
            target.schema,
            target.key,
            origin,
            versions,
            now,
            is_fixed=is_fixed,
            is_log=is_log,
            ends=ends,
            hints=reported,
        )
    except ResyncRequired as reason:
        if policy is SchemaPolicy.EVOLVE:
            raise
        raise stopped from reason
    if policy is SchemaPolicy.ADDITIVE and (found.renamed or found.dropped):
        raise stopped
    return found
