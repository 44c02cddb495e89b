"""`Transform`: the configured transform of a table. `Fitted`: the transform adapted to one schema of the
source table.

Each row and each change is transformed on its own, with two exceptions for changes that lack unchanged TOAST
values (see `values.py`): missing values are taken from earlier changes of the row, and a change is rejected
if neither these nor the target have the values. An update that does not pass the filter becomes a delete of
its key, whether or not the target has the row.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NoReturn

import pyarrow as pa

from penstock.change import METADATA_NAMES
from penstock.errors import ConfigError, TransformError
from penstock.schema import Column, TableSchema
from penstock.secret import Secret
from penstock.sinks.base import Target
from penstock.spark.query import Analysis
from penstock.transforms.columns import Action, CastTo, Hash, MadeColumn, Mask, Masked
from penstock.transforms.computed import (
    Analyse,
    Computed,
    Query,
    TargetColumn,
    ask_spark,
    query_of,
    spark_columns,
    target_columns,
)
from penstock.transforms.condition import Condition, NotSimple
from penstock.transforms.condition_parser import parse_condition


@dataclass(frozen=True, slots=True)
class Transform:
    """The configured transform of one table. Sent to executors."""

    drop: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    hash: tuple[str, ...] = ()
    mask: Mapping[str, Mask] = field(default_factory=dict)
    cast: Mapping[str, str] = field(default_factory=dict)
    where: str | None = None
    sql: str | None = None
    """A complete Spark query over the table. It replaces the column transforms and the filter."""
    key: Secret | None = None
    """The secret key for hashes."""
    needs_key: bool = True
    """Whether the target needs a key; false for table mode append."""
    analyse: Analyse = field(default=ask_spark, compare=False, repr=False)
    """The function that plans queries with Spark."""

    @property
    def fingerprint(self) -> str:
        """A digest of the transform's configuration. Transforms with different results have different
        fingerprints. The fingerprint does not reveal the secret key.
        """
        document = {
            "drop": sorted(self.drop),
            "rename": sorted(self.rename.items()),
            "hash": sorted(self.hash),
            "mask": sorted((name, mask.first, mask.last) for name, mask in self.mask.items()),
            "cast": sorted(self.cast.items()),
            "where": self.where,
            **({} if self.sql is None else {"sql": self.sql}),
        }
        secret = self.key.reveal().encode() if self.key is not None and self.hash else b""
        return hmac.new(secret, json.dumps(document).encode(), hashlib.sha256).hexdigest()[:16]

    def schema(self, source: TableSchema) -> TableSchema:
        """Return the target's schema for a source table. Raises `TransformError` if the transform does not
        fit the table.
        """
        return self.fit(source).schema

    def needs_spark(self, source: TableSchema) -> bool:
        """Whether Spark has to evaluate the transform's filter or query."""
        return self.sql is not None or (self.where is not None and self._condition(source) is None)

    def fit(self, source: TableSchema) -> Fitted:
        """Adapt the transform to a schema of the source table. Called in the driver; may start Spark."""
        if source.members is not None:
            _refuse(source, "it is routed from several tables, and a routed table cannot be transformed")
        condition, query = None, None
        if self.sql is not None:
            made, query = self._selected(source, self.sql)
        else:
            made = self._kept(source)
            condition = self._condition(source)
            if condition is None and self.where is not None:
                text = query_of(self.where)
                query = Query(text, self._analysis(source, text).condition_columns)
        _check_names(source, made)
        if self.needs_key:
            self._check_key(source, made)
        key = tuple(each.name for each in key_columns(source, made))
        return Fitted(
            source, made, key if len(key) == len(source.key) else (), condition, self.fingerprint, query
        )

    def _kept(self, source: TableSchema) -> tuple[TargetColumn, ...]:
        self._check_named(source)
        made = tuple(self._made(column) for column in source.columns if column.name not in self.drop)
        for each in made:
            if (reason := each.why_not) is not None:
                _refuse(source, f"column {each.source.name!r}: {reason}")
        return made

    def _selected(self, source: TableSchema, text: str) -> tuple[tuple[TargetColumn, ...], Query | None]:
        analysis = self._analysis(source, text)
        try:
            made = target_columns(analysis, source)
        except ValueError as error:
            _refuse(source, f"sql: {error}")
        needs_query = analysis.condition_columns is not None or any(
            isinstance(each, Computed) for each in made
        )
        return made, Query(text, analysis.condition_columns) if needs_query else None

    def _analysis(self, source: TableSchema, text: str) -> Analysis:
        try:
            return self.analyse(text, spark_columns(source))
        except ConfigError as error:
            _refuse(source, f"{'where' if self.sql is None else 'sql'}: {error.message}", error.hint)

    def _check_named(self, source: TableSchema) -> None:
        """Raise an error if the table lacks a column that the transform names. Otherwise a column that was
        renamed in the source would reach the target untransformed.
        """
        for name in (*self.drop, *self.rename, *self.hash, *self.mask, *self.cast):
            if name not in source.column_names:
                _refuse(source, f"there is no column {name!r}")

    def _made(self, column: Column) -> MadeColumn:
        return MadeColumn(column, self.rename.get(column.name, column.name), self._action(column.name))

    def _action(self, name: str) -> Action | None:
        if name in self.hash:
            assert self.key is not None, "the configuration requires it"
            return Hash(self.key)
        if name in self.cast:
            return CastTo(self.cast[name], self.mask.get(name))
        return Masked(self.mask[name]) if name in self.mask else None

    def _check_key(self, source: TableSchema, made: tuple[TargetColumn, ...]) -> None:
        kept = {each.source.name: each for each in key_columns(source, made)}
        for name in source.key:
            if name not in kept and self.sql is not None:
                _refuse(
                    source,
                    f"column {name!r} is part of the key, and has to be selected as it is, unless the mode "
                    "is append",
                )
            if name not in kept:
                _refuse(
                    source,
                    f"column {name!r} is part of the key, and cannot be dropped unless the mode is append: "
                    "hash it instead",
                )
            if not kept[name].keeps_apart:
                _refuse(
                    source,
                    f"column {name!r} is part of the key, and different keys could become equal: hash it "
                    "instead",
                )

    def _condition(self, source: TableSchema) -> Condition | None:
        """The parsed filter; None if there is no filter, or Spark evaluates it."""
        if self.where is None:
            return None
        try:
            return parse_condition(self.where, dict(spark_columns(source)))
        except NotSimple:
            return None
        except ConfigError as error:
            _refuse(source, f"where: {error.message}")


@dataclass(frozen=True)
class Fitted:
    """A transform adapted to one schema of the source table. Sent to executors."""

    source: TableSchema
    made: tuple[TargetColumn, ...]
    key: tuple[str, ...]
    """The target names of the key columns."""
    condition: Condition | None
    fingerprint: str
    query: Query | None = None
    """The query that Spark evaluates; None if the transform does not need Spark. If the query has a
    condition, this condition is the filter.
    """

    @cached_property
    def schema(self) -> TableSchema:
        columns = tuple(each.column for each in self.made)
        attributes = self.source.attributes
        if attributes is not None:
            attributes = replace(attributes, source=self.source.columns, made_by=self.fingerprint)
        return replace(self.source, columns=columns, key=self.key, attributes=attributes)

    @property
    def is_filter(self) -> bool:
        return self.condition is not None or (
            self.query is not None and self.query.condition_columns is not None
        )

    @property
    def needs_earlier_values(self) -> bool:
        """Whether unchanged TOAST values have to be taken from earlier changes, because the filter or a
        computed column depends on them.
        """
        return self.is_filter or any(len(each.needs) > 1 for each in self.computed)

    @property
    def condition_columns(self) -> Iterator[Column]:
        """The source columns that the filter depends on."""
        names: set[str] = set()
        if self.condition is not None:
            names = set(self.condition.names)
        elif self.query is not None:
            names = set(self.query.condition_columns or ())
        return (column for column in self.source.columns if column.name in names)

    @property
    def query_columns(self) -> Iterator[Column]:
        """The source columns that Spark needs to evaluate `query`."""
        needs = {name for each in self.computed for name in each.needs}
        if self.query is not None:
            needs |= set(self.query.condition_columns or ())
        return (column for column in self.source.columns if column.name in needs)

    @cached_property
    def computed(self) -> tuple[Computed, ...]:
        return tuple(each for each in self.made if isinstance(each, Computed))

    @cached_property
    def key_columns(self) -> tuple[MadeColumn, ...]:
        return key_columns(self.source, self.made)

    @cached_property
    def names(self) -> dict[str, tuple[str, ...]]:
        """For each source column, the names of the target columns that are computed from it alone. Such a
        target column is unchanged TOAST if the source column is.
        """
        found: dict[str, tuple[str, ...]] = {}
        for each in self.made:
            needs = each.needs if isinstance(each, Computed) else (each.source.name,)
            if len(needs) == 1:
                found[needs[0]] = (*found.get(needs[0], ()), each.name)
        return found

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        return pa.schema([pa.field(column.name, column.arrow_type) for column in self.schema.columns])


def key_columns(source: TableSchema, made: tuple[TargetColumn, ...]) -> tuple[MadeColumn, ...]:
    """Return the target columns that are made from the source's key columns, in the target's order. If
    several are made from the same key column, only the first is included.
    """
    found: dict[str, MadeColumn] = {}
    for each in made:
        if isinstance(each, MadeColumn) and each.source.name in source.key:
            found.setdefault(each.source.name, each)
    return tuple(found.values())


def is_made_by(target: Target, transform: Transform | None) -> bool:
    """Whether the target's rows were made with `transform`; None stands for no transform. If the target does
    not record how its rows were made, returns True if it has an applied position or `transform` is None.
    """
    if target.origin is None:
        return target.applied is not None or transform is None
    return target.origin.made_by == ("" if transform is None else transform.fingerprint)


def _check_names(source: TableSchema, made: tuple[TargetColumn, ...]) -> None:
    if not made:
        _refuse(source, "no column is left")
    seen: dict[str, TargetColumn] = {}
    for each in made:
        other = seen.setdefault(each.name.casefold(), each)
        if other is not each:
            _refuse(
                source, f"columns {_origin(other)!r} and {_origin(each)!r} would both be called {each.name!r}"
            )
        if each.name in METADATA_NAMES:
            _refuse(
                source,
                f"column {_origin(each)!r} cannot be called {each.name!r}, a name that every change has",
            )


def _origin(column: TargetColumn) -> str:
    return column.source.name if isinstance(column, MadeColumn) else column.name


def _refuse(source: TableSchema, reason: str, hint: str | None = None) -> NoReturn:
    hint = hint or "change columns:, where: or sql: of its rule"
    raise TransformError(f"table {source.name} cannot be transformed: {reason}", hint=hint)
