"""`Transform`: what is asked for a table, and `Fitted`, the same for one shape of it: from the source's rows and changes to the target's.

Rows and changes are taken one by one, with two exceptions that come from the same cause, that a change need not have all values of its row:
see `filling.py`. A change that no longer passes the filter is a delete of its key, whether or not the target has a row there.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import NoReturn

import pyarrow as pa

from penstock.change import METADATA_NAMES
from penstock.errors import ConfigError, TransformError
from penstock.schema import Column, TableSchema
from penstock.secret import Secret
from penstock.sinks.base import Target
from penstock.transforms.columns import Action, CastTo, Hash, MadeColumn, Masked
from penstock.transforms.condition import Condition, NotSimple
from penstock.transforms.condition_text import parse_condition
from penstock.transforms.masking import Mask
from penstock.transforms.texts import typed

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Transform:
    """What the configuration says of one table. Travels to the executors."""

    drop: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    hash: tuple[str, ...] = ()
    mask: Mapping[str, Mask] = field(default_factory=dict)
    cast: Mapping[str, str] = field(default_factory=dict)
    where: str | None = None
    key: Secret | None = None
    """Of the hashes."""
    needs_key: bool = True
    """Whether rows have to be told apart in the target: not in a log of changes."""

    @property
    def fingerprint(self) -> str:
        """Two transforms that make other rows of the same ones have different ones. Tells nothing of the key."""
        document = {
            "drop": sorted(self.drop),
            "rename": sorted(self.rename.items()),
            "hash": sorted(self.hash),
            "mask": sorted((name, mask.first, mask.last) for name, mask in self.mask.items()),
            "cast": sorted(self.cast.items()),
            "where": self.where,
        }
        secret = self.key.reveal().encode() if self.key is not None and self.hash else b""
        return hmac.new(secret, json.dumps(document).encode(), hashlib.sha256).hexdigest()[:16]

    def schema(self, source: TableSchema) -> TableSchema:
        """What the target sees. `TransformError` if the table is not one to which this can be done."""
        return self.fit(source).schema

    def fit(self, source: TableSchema) -> Fitted:
        columns = {column.name: column for column in source.columns}
        if source.members is not None:
            _refuse(source, "it is made of several tables, and what is routed cannot be transformed")
        self._check_named(source)
        made = tuple(self._made(column) for column in source.columns if column.name not in self.drop)
        for each in made:
            if (reason := each.why_not) is not None:
                _refuse(source, f"column {each.source.name!r}: {reason}")
        self._check_names(source, made)
        key = tuple(each.name for each in made if each.source.name in source.key)
        if self.needs_key:
            self._check_key(source, made)
        elif len(key) < len(source.key):
            key = ()
        return Fitted(source, made, key, self._condition(source, columns), self.fingerprint)

    def _check_named(self, source: TableSchema) -> None:
        """A column that was renamed in the source must not slip through as it is, because nobody told us its new name."""
        for name in (*self.drop, *self.rename, *self.hash, *self.mask, *self.cast):
            if name not in source.column_names:
                _refuse(source, f"there is no column {name!r}")

    def _made(self, column: Column) -> MadeColumn:
        return MadeColumn(column, self.rename.get(column.name, column.name), self._action(column.name))

    def _action(self, name: str) -> Action | None:
        if name in self.hash:
            assert self.key is not None, "the configuration has seen to that"
            return Hash(self.key)
        if name in self.cast:
            return CastTo(self.cast[name], self.mask.get(name))
        return Masked(self.mask[name]) if name in self.mask else None

    def _check_names(self, source: TableSchema, made: tuple[MadeColumn, ...]) -> None:
        if not made:
            _refuse(source, "no column is left")
        seen: dict[str, str] = {}
        for each in made:
            other = seen.setdefault(each.name.casefold(), each.source.name)
            if other != each.source.name:
                _refuse(source, f"columns {other!r} and {each.source.name!r} would both be called {each.name!r}")
            if each.name in METADATA_NAMES:
                _refuse(source, f"column {each.source.name!r} cannot be called {each.name!r}, a name that every change has")

    def _check_key(self, source: TableSchema, made: tuple[MadeColumn, ...]) -> None:
        kept = {each.source.name: each for each in made}
        for name in source.key:
            if name not in kept:
                _refuse(source, f"column {name!r} is part of the key, and cannot be dropped unless the mode is append: hash it instead")
            if not kept[name].keeps_apart:
                _refuse(source, f"column {name!r} is part of the key, and rows that differ might not any more: hash it instead")

    def _condition(self, source: TableSchema, columns: Mapping[str, Column]) -> Condition | None:
        if self.where is None:
            return None
        try:
            return parse_condition(self.where, {name: typed(column).arrow_type for name, column in columns.items()})
        except NotSimple as reason:
            _refuse(source, f"where has {reason}, which is not known here")
        except ConfigError as error:
            _refuse(source, f"where: {error.message}")


@dataclass(frozen=True)
class Fitted:
    """A transform for one shape of a table. Travels to the executors."""

    source: TableSchema
    made: tuple[MadeColumn, ...]
    key: tuple[str, ...]
    """By the names that the target has."""
    condition: Condition | None
    fingerprint: str

    @cached_property
    def schema(self) -> TableSchema:
        columns = tuple(each.column for each in self.made)
        attributes = self.source.attributes
        if attributes is not None:
            attributes = replace(attributes, source=self.source.columns, made_by=self.fingerprint)
        return replace(self.source, columns=columns, key=self.key, attributes=attributes)

    @property
    def is_filter(self) -> bool:
        return self.condition is not None

    @property
    def asked(self) -> Iterator[Column]:
        """The columns that the filter depends on."""
        names = set() if self.condition is None else set(self.condition.names)
        return (column for column in self.source.columns if column.name in names)

    @property
    def names(self) -> dict[str, str]:
        """The source's columns that are kept in some form, and what they are called in the target."""
        return {each.source.name: each.name for each in self.made}

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        return pa.schema([pa.field(column.name, column.arrow_type) for column in self.schema.columns])


def is_made_by(target: Target, transform: Transform | None) -> bool:
    """Whether the target's rows, as far as anybody wrote that down, are what the transform of now makes."""
    if target.origin is None:
        return target.applied is not None or transform is None
    return target.origin.made_by == ("" if transform is None else transform.fingerprint)


def _refuse(source: TableSchema, reason: str) -> NoReturn:
    raise TransformError(f"table {source.name} cannot be transformed: {reason}", hint="change columns: or where: of its rule")
