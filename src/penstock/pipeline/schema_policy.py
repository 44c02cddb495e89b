"""What is to happen when a table of the source changes its shape: `schema_changes` of a pipeline, or of a rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.errors import SchemaChangedError
from penstock.postgres.attributes import CatalogShape
from penstock.schema import TableSchema
from penstock.sinks.base import Target
from penstock.sinks.evolution import CopyAnew, Evolution, plan_evolution
from penstock.sinks.layout import Mode
from penstock.sinks.lineage import Told
from penstock.sinks.origin import Origin
from penstock.transforms.transform import Transform


class SchemaPolicy(StrEnum):
    EVOLVE = "evolve"
    """The target follows; where it cannot, the table is copied anew."""
    ADDITIVE = "additive"
    """Columns are added and hold more; anything else stops the table."""
    IGNORE = "ignore"
    """The target keeps its columns: new ones are left out, those that are dropped become null; what then no longer fits stops the table."""
    STOP = "stop"
    """Any change of a column or of the key stops the table."""


@dataclass(frozen=True, slots=True)
class SchemaRule:
    """What holds for one table."""

    policy: SchemaPolicy = SchemaPolicy.EVOLVE
    is_mirror: bool = True
    transform: Transform | None = None
    """What is done to the rows on their way into the target."""

    @property
    def renews(self) -> bool:
        """Whether a target that cannot follow is copied anew by itself: only a mirror loses nothing by that, of what it was."""
        return self.policy is SchemaPolicy.EVOLVE and self.is_mirror


def plan_following(
    policy: SchemaPolicy,
    target: Target,
    origin: Origin,
    versions: Sequence[TableSchema],
    now: CatalogShape,
    *,
    ends: bool = False,
    told: Sequence[Told] = (),
) -> Evolution:
    """What `target` has to become for changes of `versions`; `CopyAnew`, or `SchemaChangedError` if the policy will not have it.

    `ends` and `told` as `plan_evolution` has them.
    """
    stopped = SchemaChangedError(
        f"table {target.table} changed its columns or its key, and schema_changes is {policy}",
        hint="penstock tables resync copies the table as it is now; or set schema_changes: evolve",
    )
    if policy is SchemaPolicy.STOP:
        raise stopped
    try:
        is_fixed, is_log = policy is SchemaPolicy.IGNORE, target.mode is Mode.APPEND
        found = plan_evolution(target.schema, target.key, origin, versions, now, is_fixed=is_fixed, is_log=is_log, ends=ends, told=told)
    except CopyAnew as reason:
        if policy is SchemaPolicy.EVOLVE:
            raise
        raise stopped from reason
    if policy is SchemaPolicy.ADDITIVE and (found.renamed or found.dropped):
        raise stopped
    return found
