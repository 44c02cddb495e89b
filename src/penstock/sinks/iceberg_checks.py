"""Whether an Iceberg table is what the changes that are brought to it are for. `place` is how people find it."""

from __future__ import annotations

from penstock.errors import SchemaChangedError
from penstock.sinks.base import Target
from penstock.sinks.iceberg_catalog import LoadedTable
from penstock.sinks.iceberg_definition import target_layout


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
