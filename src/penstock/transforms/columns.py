"""What becomes of one column: taken over, hashed, masked or cast, under its own name or another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from penstock.postgres.types.arrays import Bools
from penstock.postgres.types.rows import decode_readable
from penstock.schema import Column
from penstock.secret import Secret
from penstock.transforms.casting import can_cast, cast_values, keeps_apart, parse_cast, postgres_type
from penstock.transforms.hashing import can_hash, hash_texts, hash_values, hashed_type
from penstock.transforms.masking import Mask, can_mask
from penstock.transforms.texts import array_text, is_text_form, plain_text, typed

_TEXT_OID, _TEXTS_OID = 25, 1009


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Values of a column, and the exact texts of those that its type cannot hold; None if there are none."""

    values: pa.Array
    texts: pa.Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    values: pa.Array
    texts: pa.Array | None = None
    failed: Bools | None = None
    """Which values could not be had."""


class Action(ABC):
    """Travels to the executors."""

    keeps_apart = True
    """Whether values that differ differ still."""

    @abstractmethod
    def why_not(self, column: Column) -> str | None:
        """Why it cannot be done to this column, which is typed; None if it can."""

    @abstractmethod
    def becomes(self, column: Column) -> pa.DataType: ...

    @abstractmethod
    def make(self, given: Given) -> Made:
        """Of typed values."""

    @property
    @abstractmethod
    def fault(self) -> str:
        """What is said of a value that could not be had."""


@dataclass(frozen=True, slots=True)
class Hash(Action):
    key: Secret

    @override
    def why_not(self, column: Column) -> str | None:
        return None if can_hash(column.arrow_type) else f"values of type {column.arrow_type} cannot be hashed: drop it"

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
        return None if can_mask(column.arrow_type) else f"only texts can be masked, not {column.arrow_type}: hash it, or cast it to string"

    @override
    def becomes(self, column: Column) -> pa.DataType:
        return hashed_type(column.arrow_type)

    @override
    def make(self, given: Given) -> Made:
        values = self.mask(given.values)
        if given.texts is None:
            return Made(values)
        # Only arrays that are not plain lists have texts of their own: nothing of them is told.
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
    """After the cast."""

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
    """A column of the target, and what it is made of."""

    source: Column
    name: str
    action: Action | None = None

    @property
    def why_not(self) -> str | None:
        return None if self.action is None else self.action.why_not(typed(self.source))

    @property
    def keeps_apart(self) -> bool:
        """Whether it can be part of a key."""
        if isinstance(self.action, CastTo):
            return self.action.mask is None and keeps_apart(typed(self.source).arrow_type, parse_cast(self.action.name))
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
    """Each value by itself in a list."""
    return pa.ListArray.from_arrays(pa.array(range(len(values) + 1), pa.int32()), values)


def _written(values: pa.Array) -> pa.Array:
    return values.cast(pa.string()) if pa.types.is_floating(values.type) else plain_text(values)


def read_texts(values: pa.Array, column: Column) -> Given:
    """The source's own text, typed."""
    decoded, shown, _ = decode_readable(values, typed(column))
    if decoded.inexact is None:
        return Given(decoded.values)
    return Given(decoded.values, pc.if_else(decoded.inexact, shown, pa.scalar(None, pa.string())))


def faults(made: Mapping[MadeColumn, Made], count: int) -> tuple[Bools, list[tuple[str, Bools]]]:
    """Which rows hold a value that could not be had, and for each reason which."""
    found = [
        (f"column {column.source.name!r} holds a value that {column.action.fault}", each.failed)
        for column, each in made.items()
        if column.action is not None and each.failed is not None and each.failed.any()
    ]
    any_of = np.zeros(count, np.bool_)
    for _, rows in found:
        any_of |= rows
    return any_of, found
