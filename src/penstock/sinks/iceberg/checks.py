"""Whether an Iceberg table is what the changes that are brought to it are for. `place` is how people find it."""

from __future__ import annotations

from penstock.errors import SchemaChangedError, TargetForeignError
from penstock.sinks.base import Target
from penstock.sinks.iceberg.catalog import LoadedTable
from penstock.sinks.iceberg.definition import target_layout
from penstock.sinks.iceberg.names import stored_name
from penstock.sinks.iceberg.schema import stored_type
from penstock.sinks.layout import Layout


def check_begun(target: Target, found: Target, place: str) -> None:
    """Another run may have followed what this one knows nothing of."""
    if (target.schema, target.key, target.source_oid, target.mode) != (found.schema, found.key, found.source_oid, found.mode):
        raise SchemaChangedError(
            f"{place} has other columns, or is made from another table, than {target.table} when the run began",
            hint=f"penstock tables resync {target.table}, or drop {place} and run again to copy the table anew",
        )


def check_columns(target: Target, loaded: LoadedTable, place: str) -> None:
    """What the table is said to have must be what it has: a value for a column that somebody renamed would go nowhere."""
    lacking = [name for name in target_layout(target).schema.names if name not in loaded.schema.names]
    if lacking:
        raise SchemaChangedError(
            f"{place} has no column {lacking[0]} any more",
            hint=f"give the column its name again, or drop {place} and run again to copy the table anew",
        )


def check_adoptable(loaded: LoadedTable, layout: Layout, place: str) -> None:
    """Whatever the table has, a copy of the source must have too: nobody who reads it is to miss a column, or find another type."""
    if loaded.problem is not None:
        raise TargetForeignError(f"{place} cannot be adopted: {loaded.problem.message}", hint="set existing: replace")
    wanted = {name: stored_type(field.type) for field in layout.schema for name in (field.name, stored_name(field.name, layout.mode))}
    for field in loaded.schema:
        if wanted.get(field.name) != field.type:
            known = wanted.get(field.name)
            why = "is none of the source's" if known is None else f"is {field.type}, and would become {known}"
            raise TargetForeignError(
                f"{place} cannot be adopted: its column {field.name!r} {why}",
                hint="alter the column there, or set existing: replace",
            )
