"""Column transforms: keep, rename, hash with a key, mask, cast.

A hash is the HMAC-SHA-256 of the value's canonical text, as 64 hexadecimal digits. Null stays null. An array
is hashed element by element, so that queries can still unnest and join it. The canonical texts are:

| type | text |
|---|---|
| text, and all types that are read as text | itself |
| whole numbers | digits |
| numeric | digits without zeros at the end of the fraction: 1.50 is 1.5, and 2.00 is 2 |
| boolean | `true`, `false` |
| date | `2024-12-31` |
| timestamp | `2024-12-31 23:59:59.000000`; with time zone the same in UTC, and `Z` |
| real, double precision | the shortest decimal that reads as the same double; zero has no sign |
| bytea | the bytes themselves |
"""

from __future__ import annotations

import hashlib
import hmac
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from penstock.arrow import Bools
from penstock.postgres.types.rows import decode_readable
from penstock.schema import Column
from penstock.secret import Secret
from penstock.transforms.casts import (
    array_text,
    by_value,
    can_cast,
    cast_values,
    is_text_form,
    keeps_apart,
    parse_cast,
    plain_text,
    postgres_type,
    typed,
    with_elements,
)

_NUMBER = re.compile(r"-?\d+\.\d+")


def can_hash(arrow_type: pa.DataType) -> bool:
    if pa.types.is_list(arrow_type):
        return can_hash(arrow_type.value_type)
    return not pa.types.is_nested(arrow_type)


def hashed_type(arrow_type: pa.DataType) -> pa.DataType:
    return pa.list_(hashed_type(arrow_type.value_type)) if pa.types.is_list(arrow_type) else pa.string()


def hash_values(values: pa.Array, key: Secret) -> pa.Array:
    """Return the hashes of the values. `can_hash` must be true for their type."""
    if pa.types.is_list(values.type):
        return with_elements(values, hash_values(values.flatten(), key))
    digest = _digester(key)
    return by_value(values, lambda value: digest(_text_of(value)), pa.string())


def hash_texts(texts: pa.Array, key: Secret, arrow_type: pa.DataType) -> pa.Array:
    """Return the hashes of values that their column type cannot hold. `texts` has the Postgres text of each,
    and null for all other values.
    """
    digest = _digester(key)
    is_number = pa.types.is_decimal(arrow_type)
    found = [
        None if text is None else digest(_plain_number(text) if is_number else text)
        for text in texts.to_pylist()
    ]
    return pa.array(found, pa.string())


def _digester(key: Secret) -> Callable[[str | bytes], str]:
    base = hmac.new(key.reveal().encode(), digestmod=hashlib.sha256)

    def digest(value: str | bytes) -> str:
        each = base.copy()
        each.update(value.encode() if isinstance(value, str) else value)
        return each.hexdigest()

    return digest


def _text_of(value: object) -> str | bytes:
    if isinstance(value, (str, bytes)):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _float_text(value)
    if hasattr(value, "isoformat"):
        return _time_text(value)
    return _plain_number(f"{value:f}") if hasattr(value, "as_tuple") else str(value)


def _plain_number(text: str) -> str:
    """Return the number without insignificant zeros. `NaN` and infinities are not changed."""
    text = text.rstrip("0").rstrip(".") if _NUMBER.fullmatch(text) else text
    return "0" if text in ("-0", "") else text


def _float_text(value: float) -> str:
    return repr(value + 0.0).removesuffix(".0")


def _time_text(value: object) -> str:
    if not hasattr(value, "microsecond"):
        return str(value)  # a date
    text = f"{value:%Y-%m-%d %H:%M:%S.%f}"
    return text.rjust(26, "0") + ("Z" if getattr(value, "tzinfo", None) else "")


STARS = "***"


def can_mask(arrow_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(arrow_type.value_type if pa.types.is_list(arrow_type) else arrow_type))


@dataclass(frozen=True, slots=True)
class Mask:
    """Replaces a text by its first `first` and last `last` characters, with three stars between them. A text
    of at most `first + last` characters becomes three stars. Null stays null. Each element of an array is
    masked.
    """

    first: int = 0
    last: int = 0

    def __call__(self, values: pa.Array) -> pa.Array:
        if pa.types.is_list(values.type):
            return with_elements(values, self(values.flatten()))
        shown = self.first + self.last
        if not shown:
            return pc.if_else(values.is_valid(), pa.scalar(STARS), pa.scalar(None, pa.string()))
        head = pc.utf8_slice_codeunits(values, 0, self.first) if self.first else ""
        tail = pc.utf8_slice_codeunits(values, -self.last, 2**31 - 1) if self.last else ""
        masked = pc.binary_join_element_wise(head, STARS, tail, "")
        return pc.if_else(
            pc.greater(pc.utf8_length(values), shown), masked, pc.if_else(values.is_valid(), STARS, values)
        )


_TEXT_OID, _TEXTS_OID = 25, 1009


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Values of a column, and the exact texts of those that the column type cannot hold. `texts` is None if
    there are no such values.
    """

    values: pa.Array
    texts: pa.Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    values: pa.Array
    texts: pa.Array | None = None
    failed: Bools | None = None
    """Mask of the values that could not be transformed."""


class Action(ABC):
    """A transform of one column's values. Sent to the executors."""

    keeps_apart = True
    """Whether the action converts different values to different results."""

    @abstractmethod
    def why_not(self, column: Column) -> str | None:
        """The reason why the action cannot be applied to this typed column; None if it can."""

    @abstractmethod
    def becomes(self, column: Column) -> pa.DataType: ...

    @abstractmethod
    def make(self, given: Given) -> Made:
        """Apply the action to typed values."""

    @property
    @abstractmethod
    def fault(self) -> str:
        """The end of the reason for rejecting a value, such as "cannot be hashed"."""


@dataclass(frozen=True, slots=True)
class Hash(Action):
    key: Secret

    @override
    def why_not(self, column: Column) -> str | None:
        return (
            None
            if can_hash(column.arrow_type)
            else f"values of type {column.arrow_type} cannot be hashed: drop the column"
        )

    @override
    def becomes(self, column: Column) -> pa.DataType:
        return hashed_type(column.arrow_type)

    @override
    def make(self, given: Given) -> Made:
        hashes = hash_values(given.values, self.key)
        if given.texts is None:
            return Made(hashes)
        exact = hash_texts(given.texts, self.key, given.values.type)
        if pa.types.is_list(hashes.type):
            exact = _listed(exact)
        return Made(pc.if_else(given.texts.is_valid(), exact, hashes))

    @property
    @override
    def fault(self) -> str:
        return "cannot be hashed"


@dataclass(frozen=True, slots=True)
class Masked(Action):
    mask: Mask

    keeps_apart = False

    @override
    def why_not(self, column: Column) -> str | None:
        return (
            None
            if can_mask(column.arrow_type)
            else f"only texts can be masked, not {column.arrow_type}: hash the column, or cast it to string"
        )

    @override
    def becomes(self, column: Column) -> pa.DataType:
        return hashed_type(column.arrow_type)

    @override
    def make(self, given: Given) -> Made:
        values = self.mask(given.values)
        if given.texts is None:
            return Made(values)
        # Of the types that can be masked, only nested arrays have exact texts. They are masked completely.
        stars = _listed(Mask()(given.texts)) if pa.types.is_list(values.type) else Mask()(given.texts)
        return Made(pc.if_else(given.texts.is_valid(), stars, values))

    @property
    @override
    def fault(self) -> str:
        return "cannot be masked"


@dataclass(frozen=True, slots=True)
class CastTo(Action):
    name: str
    mask: Mask | None = None
    """Applied after the cast."""

    @override
    def why_not(self, column: Column) -> str | None:
        wanted = parse_cast(self.name)
        if not can_cast(column.arrow_type, wanted):
            return f"{column.arrow_type} cannot be cast to {self.name}: use sql"
        return None if self.mask is None or can_mask(wanted) else f"only texts can be masked, not {self.name}"

    @override
    def becomes(self, column: Column) -> pa.DataType:
        return parse_cast(self.name)

    @override
    def make(self, given: Given) -> Made:
        values, failed = cast_values(given.values, parse_cast(self.name), given.texts)
        return Made(values if self.mask is None else self.mask(values), None, failed)

    @property
    @override
    def fault(self) -> str:
        return f"cannot be cast to {self.name}"


@dataclass(frozen=True, slots=True)
class MadeColumn:
    """A target column, and the source column from which it is computed."""

    source: Column
    name: str
    action: Action | None = None

    @property
    def why_not(self) -> str | None:
        return None if self.action is None else self.action.why_not(typed(self.source))

    @property
    def keeps_apart(self) -> bool:
        """Whether different source values have different target values, as a key column requires."""
        if isinstance(self.action, CastTo):
            return self.action.mask is None and keeps_apart(
                typed(self.source).arrow_type, parse_cast(self.action.name)
            )
        return self.action is None or self.action.keeps_apart

    @property
    def column(self) -> Column:
        if self.action is None:
            return replace(self.source, name=self.name)
        becomes = self.action.becomes(typed(self.source))
        if pa.types.is_list(becomes):
            oid, modifier = _TEXTS_OID, -1
        else:
            oid, modifier = postgres_type(becomes)
        if is_text_form(self.source):
            return Column(self.name, pa.string(), oid, modifier, self.source.reader)
        return Column(self.name, becomes, oid, modifier)

    def make(self, given: Given) -> Made:
        if self.action is None:
            return Made(given.values, given.texts)
        if not is_text_form(self.source):
            return self.action.make(given)
        made = self.action.make(read_texts(given.values, self.source))
        write = array_text if pa.types.is_list(made.values.type) else _written
        return Made(write(made.values), None, made.failed)


def _listed(values: pa.Array) -> pa.Array:
    """Return a list with a single element for each value."""
    return pa.ListArray.from_arrays(pa.array(range(len(values) + 1), pa.int32()), values)


def _written(values: pa.Array) -> pa.Array:
    return values.cast(pa.string()) if pa.types.is_floating(values.type) else plain_text(values)


def read_texts(values: pa.Array, column: Column) -> Given:
    """Parse values that are stored as Postgres text to typed values."""
    decoded, shown, _ = decode_readable(values, typed(column))
    if decoded.inexact is None:
        return Given(decoded.values)
    return Given(decoded.values, pc.if_else(decoded.inexact, shown, pa.scalar(None, pa.string())))


def faults(made: Mapping[MadeColumn, Made], count: int) -> tuple[Bools, list[tuple[str, Bools]]]:
    """Return a mask of the rows with a value that could not be transformed, and the reasons, each with a mask
    of the rows that it concerns.
    """
    found = [
        (f"column {column.source.name!r} holds a value that {column.action.fault}", each.failed)
        for column, each in made.items()
        if column.action is not None and each.failed is not None and each.failed.any()
    ]
    any_of = np.zeros(count, np.bool_)
    for _, rows in found:
        any_of |= rows
    return any_of, found
