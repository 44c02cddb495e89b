"""Whether changes are such as a Delta table of ours can take in."""

from __future__ import annotations

import pyarrow as pa

from penstock.errors import SchemaChangedError
from penstock.schema import TableSchema
from penstock.sinks.base import TableChanges, Target
from penstock.sinks.layout import Mode


def checked_schema(target: Target, changes: TableChanges, mode: Mode, place: str) -> TableSchema | None:
    """One schema of the changes, all of which the target must be able to take in, as its mode must be the one that is asked for."""
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
                hint=f"remove {place} and run again to copy the table anew",
            )
    return next(iter(changes.schemas), None)
