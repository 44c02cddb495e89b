"""An Arrow schema as an Avro schema: what a registry keeps of a table's changes.

Columns that may be null, which in a change batch all of the table's own are, have null as their default; so a column that comes or goes
leaves the schemas compatible both ways. Avro's names are narrower than those of SQL: what does not fit is escaped, and the exact name
stands beside it under `penstock.name`. The text is the same for the same schema, since registries compare texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

import pyarrow as pa

from penstock.errors import ConnectorError
from penstock.schema import TableName

Json: TypeAlias = "str | int | list[Json] | dict[str, Json] | None"

EXACT_NAME = "penstock.name"

# Also an underscore with which something begins that would look like an escape.
_UNFIT = re.compile(r"[^A-Za-z0-9_]|^(?=[0-9])|_(?=x[0-9A-F]*(?:_|[^A-Za-z0-9_]))")

_PLAIN: tuple[tuple[Callable[[pa.DataType], bool], Json], ...] = (
    (pa.types.is_null, "null"),
    (pa.types.is_boolean, "boolean"),
    (lambda kind: pa.types.is_integer(kind) and kind.bit_width <= 32 and not pa.types.is_uint32(kind), "int"),
    (pa.types.is_integer, "long"),
    (lambda kind: pa.types.is_float16(kind) or pa.types.is_float32(kind), "float"),
    (pa.types.is_float64, "double"),
    (lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind), "string"),
    (lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind), "bytes"),
    (pa.types.is_date32, {"type": "int", "logicalType": "date"}),
    (pa.types.is_time64, {"type": "long", "logicalType": "time-micros"}),
    (pa.types.is_interval, "string"),
    (pa.types.is_duration, "long"),
)


def avro_text(table: TableName, schema: pa.Schema) -> str:
    """The Avro schema of a table's rows, as a record called like the table."""
    name, namespace = avro_name(table.name), avro_name(table.schema)
    record: dict[str, Json] = {"type": "record", "name": name, "namespace": namespace, "fields": _fields(schema, name)}
    if (name, namespace) != (table.name, table.schema):
        record[EXACT_NAME] = str(table)
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False)


def avro_name(name: str) -> str:
    """A name that Avro takes; no two names become the same."""

    def escaped(match: re.Match[str]) -> str:
        return f"_x{ord(match[0]):X}_" if match[0] else "_x_"

    return _UNFIT.sub(escaped, name)


def _fields(fields: Iterable[pa.Field], path: str) -> list[Json]:
    found: list[Json] = []
    taken: set[str] = set()
    for field in fields:
        name = avro_name(field.name)
        while name in taken:  # a column of the table and one of ours may have one name
            name += "_"
        taken.add(name)
        kind = _type(field.type, f"{path}_{name}")
        document: dict[str, Json] = {"name": name, "type": ["null", kind] if field.nullable and kind != "null" else kind}
        if field.nullable:
            document["default"] = None
        if name != field.name:
            document[EXACT_NAME] = field.name
        found.append(document)
    return found


def _type(kind: pa.DataType, path: str) -> Json:
    """`path` names the record that a struct becomes: in Avro, every record has a name of its own."""
    for fits, avro in _PLAIN:
        if fits(kind):
            return avro
    if pa.types.is_decimal(kind):
        is_fit = 0 <= kind.scale <= kind.precision
        return {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale} if is_fit else "string"
    if pa.types.is_timestamp(kind):
        return {"type": "long", "logicalType": "timestamp-micros" if kind.tz else "local-timestamp-micros"}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return {"type": "array", "items": _nullable(_type(kind.value_type, path))}
    if pa.types.is_map(kind) and pa.types.is_string(kind.key_type):
        return {"type": "map", "values": _nullable(_type(kind.item_type, path))}
    if pa.types.is_struct(kind):
        return {"type": "record", "name": path, "fields": _fields([kind.field(place) for place in range(kind.num_fields)], path)}
    raise ConnectorError(f"there is no Avro type for {kind}", hint="leave the column out of the publication's column list")


def _nullable(kind: Json) -> Json:
    return kind if kind == "null" else ["null", kind]
