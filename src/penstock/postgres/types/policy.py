"""What is chosen about types: whether values have any, how numbers without a bound are read, whether one beyond its type is an error."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

MAX_DIGITS = 38
_DECIMAL = re.compile(r"decimal\(\s*(\d{1,2})\s*,\s*(\d{1,2})\s*\)")


@dataclass(frozen=True, slots=True)
class TypePolicy:
    """One for a pipeline. It has a plain text form, since it travels as options of the Spark source."""

    numeric: str = "decimal(38,18)"
    """What becomes of numeric without a precision, or with more than 38 digits: `decimal(p,s)`, or `string`."""
    on_unrepresentable: str = "null"
    """`null`: a value beyond its type is null there and stands in `_exact`. `error`: it stops its table, or a `WalCapture` stream."""

    form: str = "typed"
    """`typed`; or `text`: every value is what the source writes, which another Postgres reads as it is. Nothing is beyond that."""

    DEFAULT: ClassVar[TypePolicy]

    def __post_init__(self) -> None:
        _parse_numeric(self.numeric)
        if self.on_unrepresentable not in ("null", "error"):
            raise ValueError(f"on_unrepresentable is 'null' or 'error', not {self.on_unrepresentable!r}")
        if self.form not in ("typed", "text"):
            raise ValueError(f"form is 'typed' or 'text', not {self.form!r}")

    @property
    def numeric_type(self) -> pa.DataType:
        return _parse_numeric(self.numeric)

    @property
    def is_text(self) -> bool:
        return self.form == "text"

    @property
    def writes(self) -> str:
        """What tells the spools of two policies apart."""
        return self.form if self.is_text else self.numeric

    @property
    def refuses_inexact(self) -> bool:
        return self.on_unrepresentable == "error"


def _parse_numeric(text: str) -> pa.DataType:
    if text == "string":
        return pa.string()
    match = _DECIMAL.fullmatch(text)
    if match is not None:
        precision, scale = int(match[1]), int(match[2])
        if 1 <= precision <= MAX_DIGITS and scale <= precision:
            return pa.decimal128(precision, scale)
    raise ValueError(f"numeric is 'string' or decimal(p,s) with at most {MAX_DIGITS} digits, not {text!r}")


TypePolicy.DEFAULT = TypePolicy()
