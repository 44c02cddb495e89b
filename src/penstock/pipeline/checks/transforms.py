"""The part of a check that looks ahead at what changes may come to lack: filters that would stop a table, and old rows that nobody has."""

from __future__ import annotations

import pyarrow as pa

from penstock.pipeline.checks.findings import Step
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.tables import Selection
from penstock.postgres.catalog import inspect_whole_rows
from penstock.postgres.connection import Connection
from penstock.schema import Column, TableName, TableSchema
from penstock.sinks.layout import Mode
from penstock.transforms.texts import typed


def warn_of_filters(step: Step, connection: Connection, config: PipelineConfig, selection: Selection) -> None:
    """An update does not carry long values that it does not touch, unless the whole old row travels too."""
    looked = ((name, _lacking(name, schema, config, selection)) for name, schema in selection.schemas.items())
    found = {name: lack for name, lack in looked if lack is not None}
    oids = {name: selection.schemas[name].oid for name in found}
    whole = inspect_whole_rows(connection, list(oids.values())) if oids else ()
    for name, (code, words) in found.items():
        if oids[name] not in whole:
            step.warn(code, words, f"ALTER TABLE {name} REPLICA IDENTITY FULL;", (name,))


def warn_of_old_rows(step: Step, connection: Connection, config: PipelineConfig, selection: Selection) -> None:
    """Only a table whose whole old rows travel can show them."""
    logs = {
        name: schema.oid
        for name, schema in selection.schemas.items()
        if name not in selection.refused and config.mode_of(name) is Mode.APPEND and schema.members is None
    }
    whole = inspect_whole_rows(connection, list(logs.values()))
    for name in (name for name, oid in logs.items() if oid not in whole):
        words = f"old rows are asked for, and the log has those of {name} by their key alone"
        step.warn("no-old-rows", words, f"ALTER TABLE {name} REPLICA IDENTITY FULL;", (name,))


def _lacking(name: TableName, schema: TableSchema, config: PipelineConfig, selection: Selection) -> tuple[str, str] | None:
    transform = None if name in selection.refused else config.transform_of(name)
    if transform is None or not schema.key or schema.members is not None:
        return None
    fitted = transform.fit(schema)
    long = {column.name for column in schema.columns if column.name not in schema.key and _may_be_long(column)}
    if long and any(column.name not in schema.key for column in fitted.asked):
        words = f"an update that brings a row of {name} into its filter may lack long values that it does not touch, and stop the table"
        return "filter-may-lack-values", words
    for each in fitted.computed:
        if len(each.needs) > 1 and long & set(each.needs):
            words = f"{each.name!r} of {name} is made of several; an update may lack some that it does not touch, and stop the table"
            return "query-may-lack-values", words
    return None


def _may_be_long(column: Column) -> bool:
    kind = typed(column).arrow_type
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_nested(kind))
