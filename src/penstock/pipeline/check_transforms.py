"""The part of a check that looks ahead at filters: what they may come to lack, before a row stops its table."""

from __future__ import annotations

import pyarrow as pa

from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.findings import Step
from penstock.pipeline.tables import Selection
from penstock.postgres.catalog import inspect_whole_rows
from penstock.postgres.connection import Connection
from penstock.schema import Column
from penstock.transforms.texts import typed


def warn_of_filters(step: Step, connection: Connection, config: PipelineConfig, selection: Selection) -> None:
    """An update does not carry long values that it does not touch, unless the whole old row travels too."""
    filtered = {}
    for name, schema in selection.schemas.items():
        transform = None if name in selection.refused else config.transform_of(name)
        if transform is not None and transform.where is not None and schema.key:
            fitted = transform.fit(schema)
            may_come_in = any(column.name not in schema.key for column in fitted.asked)
            if may_come_in and any(_may_be_long(column) for column in schema.columns if column.name not in schema.key):
                filtered[name] = schema.oid
    whole = inspect_whole_rows(connection, list(filtered.values())) if filtered else ()
    for name, oid in filtered.items():
        if oid not in whole:
            step.warn(
                "filter-may-lack-values",
                f"an update that brings a row of {name} into its filter may lack long values that it does not touch, and stop the table",
                f"ALTER TABLE {name} REPLICA IDENTITY FULL;",
                (name,),
            )


def _may_be_long(column: Column) -> bool:
    kind = typed(column).arrow_type
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_nested(kind))
