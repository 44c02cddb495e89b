"""Filter conditions evaluated with pyarrow, with the semantics of Spark SQL.

A result is true, false, null or missing. A value is *missing* if it is unchanged TOAST, or if its column's
type cannot hold it. Missing is not null: the value exists but is unknown, and so is every result that depends
on it. `a AND b` is still false if `a` is false.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow import Bools, as_bools

_COMPARE: Final[Mapping[str, Callable[[pa.Array, pa.Array], pa.Array]]] = {
    "=": pc.equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_MOST_DIGITS = 76


def is_comparable(left: pa.DataType, right: pa.DataType) -> bool:
    """Whether Spark compares the two types without conversion, or as numbers. False for a decimal and a
    float, because Spark rounds the decimal.
    """
    mixed = (pa.types.is_decimal(left) and pa.types.is_floating(right)) or (
        pa.types.is_floating(left) and pa.types.is_decimal(right)
    )
    return not mixed and _family(left) is not None and _family(left) == _family(right)


def _family(kind: pa.DataType) -> str | None:
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "number"
    if pa.types.is_timestamp(kind):
        return "instant" if kind.tz else "timestamp"
    tests = {"text": pa.types.is_string, "boolean": pa.types.is_boolean, "date": pa.types.is_date}
    return next((name for name, holds in tests.items() if holds(kind)), None)


def compare(sign: str, left: pa.Array, right: pa.Array) -> pa.Array:
    """Compare two columns as Spark does. `sign` is an SQL comparison operator. The result of `<=>` is never
    null.
    """
    if sign == "<=>":
        equal = compare("=", left, right)
        return pc.if_else(
            pc.and_(left.is_valid(), right.is_valid()), equal, pc.and_(left.is_null(), right.is_null())
        )
    left, right = _alike(left, right)
    if pa.types.is_floating(left.type):
        # In Spark NaN equals NaN and is greater than every number. Where either side is NaN, compare ranks.
        left_rank, right_rank = pc.is_nan(left).cast(pa.int8()), pc.is_nan(right).cast(pa.int8())
        odd = pc.or_(pc.is_nan(left), pc.is_nan(right))
        return pc.if_else(odd, _COMPARE[sign](left_rank, right_rank), _COMPARE[sign](left, right))
    return _COMPARE[sign](left, right)


def _alike(left: pa.Array, right: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Cast two columns to a common type. `is_comparable` must be true for their types."""
    kinds = (left.type, right.type)
    if kinds[0] == kinds[1]:
        return left, right
    if any(map(pa.types.is_floating, kinds)):
        return left.cast(pa.float64(), safe=False), right.cast(pa.float64(), safe=False)
    if any(map(pa.types.is_decimal, kinds)):
        scale = max(kind.scale if pa.types.is_decimal(kind) else 0 for kind in kinds)
        wide = pa.decimal256(_MOST_DIGITS, scale)
        return _as_decimal(left, wide), _as_decimal(right, wide)
    if all(map(pa.types.is_integer, kinds)):
        return left.cast(pa.int64()), right.cast(pa.int64())
    return left, right.cast(left.type)


def _as_decimal(values: pa.Array, wide: pa.DataType) -> pa.Array:
    return (values.cast(pa.decimal256(20, 0)) if pa.types.is_integer(values.type) else values).cast(wide)


def like(values: pa.Array, pattern: str) -> pa.Array:
    """SQL `LIKE`: `%` matches any text, including line breaks, and `_` any single character."""
    return pc.match_like(values, pattern)


class NotSimple(Exception):
    """Only Spark can evaluate the condition. The message names the part that this module does not support."""


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """The values of the columns that a condition names."""

    columns: Mapping[str, pa.Array]
    missing: Mapping[str, Bools]
    """For each column with missing values, the mask of these values."""
    count: int

    def absent(self, name: str) -> Bools:
        return self.missing.get(name, np.zeros(self.count, np.bool_))


@dataclass(frozen=True, slots=True, eq=False)
class TriState:
    """The result of a condition for each row: true (`yes`), false (`no`) or missing. A result for which none
    of the three masks is set is null.
    """

    yes: Bools
    no: Bools
    missing: Bools

    @classmethod
    def of(cls, answers: pa.Array, missing: Bools) -> TriState:
        known = as_bools(answers.is_valid()) & ~missing
        yes = as_bools(pc.fill_null(answers, False))
        return cls(yes & known, ~yes & known, missing)


class Operand(Protocol):
    @property
    def names(self) -> Iterator[str]: ...

    def type_in(self, types: Mapping[str, pa.DataType]) -> pa.DataType:
        """Return the type of the expression's values. Raises `NotSimple` if the expression is not
        supported.
        """

    def values(self, rows: Values) -> tuple[pa.Array | pa.Scalar, Bools]: ...


@dataclass(frozen=True, slots=True)
class Named:
    name: str

    @property
    def names(self) -> Iterator[str]:
        yield self.name

    def type_in(self, types: Mapping[str, pa.DataType]) -> pa.DataType:
        return types[self.name]

    def values(self, rows: Values) -> tuple[pa.Array | pa.Scalar, Bools]:
        return rows.columns[self.name], rows.absent(self.name)


@dataclass(frozen=True, slots=True)
class Literal:
    value: pa.Scalar

    @property
    def names(self) -> Iterator[str]:
        yield from ()

    def type_in(self, types: Mapping[str, pa.DataType]) -> pa.DataType:
        return self.value.type

    def values(self, rows: Values) -> tuple[pa.Array | pa.Scalar, Bools]:
        return self.value, np.zeros(rows.count, np.bool_)


@dataclass(frozen=True, slots=True)
class Cast:
    """A cast. Supports only casts that cannot fail."""

    operand: Operand
    arrow_type: pa.DataType

    @property
    def names(self) -> Iterator[str]:
        yield from self.operand.names

    def type_in(self, types: Mapping[str, pa.DataType]) -> pa.DataType:
        given = self.operand.type_in(types)
        is_whole = pa.types.is_integer(given)
        if pa.types.is_string(self.arrow_type):
            is_safe = (
                is_whole or pa.types.is_date(given) or pa.types.is_string(given) or pa.types.is_boolean(given)
            )
        else:
            is_safe = given == self.arrow_type or (is_whole and pa.types.is_int64(self.arrow_type))
        if not is_safe:
            raise NotSimple(f"a cast from {given} to {self.arrow_type}")
        return self.arrow_type

    def values(self, rows: Values) -> tuple[pa.Array | pa.Scalar, Bools]:
        values, missing = self.operand.values(rows)
        return values.cast(self.arrow_type), missing


class Condition(Protocol):
    @property
    def names(self) -> Iterator[str]:
        """The names of the columns that the condition depends on."""

    def check(self, types: Mapping[str, pa.DataType]) -> None:
        """Raise `NotSimple` if the condition cannot be evaluated for columns of these types with the same
        result as in Spark.
        """

    def judge(self, rows: Values) -> TriState: ...


@dataclass(frozen=True, slots=True)
class Truth:
    """A boolean column as a condition."""

    operand: Operand

    @property
    def names(self) -> Iterator[str]:
        yield from self.operand.names

    def check(self, types: Mapping[str, pa.DataType]) -> None:
        if not pa.types.is_boolean(self.operand.type_in(types)):
            raise NotSimple("a value that is not a boolean, used as a condition")

    def judge(self, rows: Values) -> TriState:
        values, missing = self.operand.values(rows)
        return TriState.of(_spread(values, rows.count), missing)


@dataclass(frozen=True, slots=True)
class Compared:
    sign: str
    left: Operand
    right: Operand

    @property
    def names(self) -> Iterator[str]:
        yield from self.left.names
        yield from self.right.names

    def check(self, types: Mapping[str, pa.DataType]) -> None:
        left, right = self.left.type_in(types), self.right.type_in(types)
        if not is_comparable(left, right):
            raise NotSimple(f"a comparison of {left} with {right}")

    def judge(self, rows: Values) -> TriState:
        (left, unknown), (right, also) = self.left.values(rows), self.right.values(rows)
        return TriState.of(
            compare(self.sign, _spread(left, rows.count), _spread(right, rows.count)), unknown | also
        )


@dataclass(frozen=True, slots=True)
class Like:
    operand: Operand
    pattern: str

    @property
    def names(self) -> Iterator[str]:
        yield from self.operand.names

    def check(self, types: Mapping[str, pa.DataType]) -> None:
        if not pa.types.is_string(self.operand.type_in(types)):
            raise NotSimple("LIKE on a value that is not a text")

    def judge(self, rows: Values) -> TriState:
        values, missing = self.operand.values(rows)
        return TriState.of(like(_spread(values, rows.count), self.pattern), missing)


@dataclass(frozen=True, slots=True)
class IsNull:
    operand: Operand

    @property
    def names(self) -> Iterator[str]:
        yield from self.operand.names

    def check(self, types: Mapping[str, pa.DataType]) -> None:
        self.operand.type_in(types)

    def judge(self, rows: Values) -> TriState:
        values, missing = self.operand.values(rows)
        return TriState.of(_spread(values, rows.count).is_null(), missing)


@dataclass(frozen=True, slots=True)
class Not:
    condition: Condition

    @property
    def names(self) -> Iterator[str]:
        yield from self.condition.names

    def check(self, types: Mapping[str, pa.DataType]) -> None:
        self.condition.check(types)

    def judge(self, rows: Values) -> TriState:
        found = self.condition.judge(rows)
        return TriState(found.no, found.yes, found.missing)


@dataclass(frozen=True, slots=True)
class Joined:
    """`AND` or `OR` of conditions."""

    conditions: tuple[Condition, ...]
    is_and: bool

    @property
    def names(self) -> Iterator[str]:
        for each in self.conditions:
            yield from each.names

    def check(self, types: Mapping[str, pa.DataType]) -> None:
        for each in self.conditions:
            each.check(types)

    def judge(self, rows: Values) -> TriState:
        found = [each.judge(rows) for each in self.conditions]
        all_of, any_of = _folded(np.logical_and), _folded(np.logical_or)
        missing = any_of([each.missing for each in found])
        if self.is_and:
            no = any_of([each.no for each in found])
            return TriState(all_of([each.yes for each in found]), no, missing & ~no)
        yes = any_of([each.yes for each in found])
        return TriState(yes, all_of([each.no for each in found]), missing & ~yes)


def _folded(function: np.ufunc) -> Callable[[list[Bools]], Bools]:
    return lambda parts: np.asarray(function.reduce(parts), np.bool_)


def _spread(values: pa.Array | pa.Scalar, count: int) -> pa.Array:
    return pa.repeat(values, count) if isinstance(values, pa.Scalar) else values
