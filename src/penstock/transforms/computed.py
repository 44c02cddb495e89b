"""Columns of the target that Spark works out from others of the source, and the query that says how."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyarrow import types

from penstock.postgres.types.registry import TEXT
from penstock.schema import Column
from penstock.transforms.casting import postgres_type
from penstock.transforms.texts import array_text, plain_text, with_elements

_KINDS: Final = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "byte": pa.int16(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_OIDS: Final = {pa.float32(): 700, pa.binary(): 17}
_ARRAY_OIDS: Final = {
    16: 1000, 17: 1001, 20: 1016, 21: 1005, 23: 1007, 25: 1009, 700: 1021, 701: 1022, 1082: 1182, 1114: 1115, 1184: 1185, 1700: 1231,
}  # fmt: skip
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")


@dataclass(frozen=True, slots=True)
class Query:
    """What Spark is asked about the rows of a table. Travels to the executors."""

    text: str
    asked: tuple[str, ...] | None = None
    """The source's columns that its condition depends on; None: it has none."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A column of the target that is made of any number of the source's."""

    name: str
    place: int
    """Among the columns of the query."""
    needs: tuple[str, ...]
    arrow_type: pa.DataType
    is_text_form: bool = False
    """Whether the target gets the text that Postgres reads."""

    @property
    def column(self) -> Column:
        oid, modifier = _postgres_type(self.arrow_type)
        if self.is_text_form:
            return Column(self.name, pa.string(), oid, modifier, TEXT)
        return Column(self.name, self.arrow_type, oid, modifier)

    def written(self, values: pa.Array) -> pa.Array:
        """Spark's values as the target gets them."""
        values = values.cast(self.arrow_type)
        return _text(values) if self.is_text_form else values


def read_kind(kind: str) -> pa.DataType | None:
    """A type of Spark's, from its JSON, as a column of a target has it; None: no target has that."""
    return _type_of(json.loads(kind))


def _type_of(document: Any) -> pa.DataType | None:
    if isinstance(document, str):
        match = _DECIMAL.fullmatch(document)
        return _KINDS.get(document) if match is None else pa.decimal128(int(match[1]), int(match[2]))
    element = _type_of(document["elementType"]) if document.get("type") == "array" else None
    return None if element is None or types.is_list(element) else pa.list_(element)


def _postgres_type(arrow_type: pa.DataType) -> tuple[int, int]:
    if types.is_list(arrow_type):
        oid, modifier = _postgres_type(arrow_type.value_type)
        return _ARRAY_OIDS[oid], modifier
    return (_OIDS[arrow_type], -1) if arrow_type in _OIDS else postgres_type(arrow_type)


def _text(values: pa.Array) -> pa.Array:
    if types.is_list(values.type):
        return array_text(with_elements(values, _text(values.flatten())))
    if types.is_binary(values.type):
        return pa.array([None if value is None else "\\x" + value.hex() for value in values.to_pylist()], pa.string())
    return values.cast(pa.string()) if types.is_floating(values.type) else plain_text(values)
