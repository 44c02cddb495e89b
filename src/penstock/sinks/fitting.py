"""Whether the changes that are brought to a table are such as it can take in."""

from __future__ import annotations

import pyarrow as pa

from penstock.errors import SchemaChangedError
from penstock.sinks.base import TableChanges, Target
from penstock.sinks.layout import Mode


def check_changes(target: Target, mode: Mode, changes: TableChanges, place: str) -> None:
    """The target must be able to take all changes in, and its mode must be the one that is asked for. `place`: how people find it."""
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
