"""Whether an Iceberg table is what the changes that are brought to it are for. `place` is how people find it."""

from __future__ import annotations

import pyarrow as pa

from penstock.errors import SchemaChangedError
from penstock.sinks.base import TableChanges, Target
from penstock.sinks.iceberg_catalog import LoadedTable
from penstock.sinks.iceberg_definition import target_layout
from penstock.sinks.layout import Mode


def check_changes(target: Target, mode: Mode, changes: TableChanges, place: str) -> None:
    """The target must be able to take all changes in, and its mode must be the one that is asked for."""
    if target.mode is not mode:
        raise SchemaChangedError(
            f"table {target.table} is kept as {target.mode}, and {mode} is asked for",
            hint=f"penstock tables resync {target.table}, or the mode that it had",
        )
    for schema in changes.schemas:
        found = pa.schema([pa.field(column.name, column.arrow_type) for column in schema.columns])
        is_same = schema.key == target.key and found.equals(target.schema)
        if schema not in changes.views and (schema.oid != target.source_oid or not is_same):
            raise SchemaChangedError(
                f"table {target.table} changed its columns, its key or its identity, and the target cannot follow that yet",
                hint=f"drop {place} and run again to copy the table anew",
            )


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
