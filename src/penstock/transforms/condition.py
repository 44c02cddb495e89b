"""Conditions that are worked out where the rows are, by pyarrow, and mean what Spark SQL means by them.

A value may be *missing*: it did not travel (unchanged TOAST), or its column's type cannot hold it. What depends on a missing value is
missing itself, and is no null: nobody knows what it would be. `a AND b` is false all the same where `a` is, whatever `b` may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.postgres.types.arrays import Bools, as_bools
from penstock.transforms.comparing import compare, is_comparable, like


class NotSimple(Exception):
    """The condition is more than can be worked out here; the words say what. Spark can be asked instead."""


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """What rows have in the columns that a condition names."""

    columns: Mapping[str, pa.Array]
    missing: Mapping[str, Bools]
    """Of columns of which some values are missing."""
    count: int

    def absent(self, name: str) -> Bools:
        return self.missing.get(name, np.zeros(self.count, np.bool_))


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """For each row: true, false, null (neither), or missing."""

    yes: Bools
    no: Bools
    missing: Bools

    @classmethod
    def of(cls, answers: pa.Array, missing: Bools) -> Verdict:
        known = as_bools(answers.is_valid()) & ~missing
        yes = as_bools(pc.fill_null(answers, False))
        return cls(yes & known, ~yes & known, missing)


class Operand(Protocol):
    @property
    def names(self) -> Iterator[str]: ...

    def type_in(self, types: Mapping[str, pa.DataType]) -> pa.DataType:
        """Raises `NotSimple`."""

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
    """Only those that no value can fail."""

    operand: Operand
    arrow_type: pa.DataType

    @property
    def names(self) -> Iterator[str]:
        yield from self.operand.names

    def type_in(self, types: Mapping[str, pa.DataType]) -> pa.DataType:
        given = self.operand.type_in(types)
        is_whole = pa.types.is_integer(given)
        if pa.types.is_string(self.arrow_type):
            is_safe = is_whole or pa.types.is_date(given) or pa.types.is_string(given) or pa.types.is_boolean(given)
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
        """The columns that it depends on."""

    def check(self, types: Mapping[str, pa.DataType]) -> None:
        """Raise `NotSimple` if Spark's meaning cannot be had here with columns of these types."""

    def judge(self, rows: Values) -> Verdict: ...


@dataclass(frozen=True, slots=True)
class Truth:
    """A boolean by itself."""

    operand: Operand

    @property
    def names(self) -> Iterator[str]:
        yield from self.operand.names

    def check(self, types: Mapping[str, pa.DataType]) -> None:
        if not pa.types.is_boolean(self.operand.type_in(types)):
            raise NotSimple("a value that is no boolean, where a condition stands")

    def judge(self, rows: Values) -> Verdict:
        values, missing = self.operand.values(rows)
        return Verdict.of(_spread(values, rows.count), missing)


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

    def judge(self, rows: Values) -> Verdict:
        (left, unknown), (right, also) = self.left.values(rows), self.right.values(rows)
        return Verdict.of(compare(self.sign, _spread(left, rows.count), _spread(right, rows.count)), unknown | also)


@dataclass(frozen=True, slots=True)
class Like:
    operand: Operand
    pattern: str

    @property
    def names(self) -> Iterator[str]:
        yield from self.operand.names

    def check(self, types: Mapping[str, pa.DataType]) -> None:
        if not pa.types.is_string(self.operand.type_in(types)):
            raise NotSimple("LIKE on what is no text")

    def judge(self, rows: Values) -> Verdict:
        values, missing = self.operand.values(rows)
        return Verdict.of(like(_spread(values, rows.count), self.pattern), missing)


@dataclass(frozen=True, slots=True)
class IsNull:
    operand: Operand

    @property
    def names(self) -> Iterator[str]:
        yield from self.operand.names

    def check(self, types: Mapping[str, pa.DataType]) -> None:
        self.operand.type_in(types)

    def judge(self, rows: Values) -> Verdict:
        values, missing = self.operand.values(rows)
        return Verdict.of(_spread(values, rows.count).is_null(), missing)


@dataclass(frozen=True, slots=True)
class Not:
    condition: Condition

    @property
    def names(self) -> Iterator[str]:
        yield from self.condition.names

    def check(self, types: Mapping[str, pa.DataType]) -> None:
        self.condition.check(types)

    def judge(self, rows: Values) -> Verdict:
        found = self.condition.judge(rows)
        return Verdict(found.no, found.yes, found.missing)


@dataclass(frozen=True, slots=True)
class Joined:
    """`AND`, or `OR`."""

    conditions: tuple[Condition, ...]
    is_and: bool

    @property
    def names(self) -> Iterator[str]:
        for each in self.conditions:
            yield from each.names

    def check(self, types: Mapping[str, pa.DataType]) -> None:
        for each in self.conditions:
            each.check(types)

    def judge(self, rows: Values) -> Verdict:
        found = [each.judge(rows) for each in self.conditions]
        all_of, any_of = _folded(np.logical_and), _folded(np.logical_or)
        missing = any_of([each.missing for each in found])
        if self.is_and:
            no = any_of([each.no for each in found])
            return Verdict(all_of([each.yes for each in found]), no, missing & ~no)
        yes = any_of([each.yes for each in found])
        return Verdict(yes, all_of([each.no for each in found]), missing & ~yes)


def _folded(function: np.ufunc) -> Callable[[list[Bools]], Bools]:
    return lambda parts: np.asarray(function.reduce(parts), np.bool_)


def _spread(values: pa.Array | pa.Scalar, count: int) -> pa.Array:
    return pa.repeat(values, count) if isinstance(values, pa.Scalar) else values
