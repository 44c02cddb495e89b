"""How a task finds the rows of a reference table: the strategies behind `enrich`.

A finder is plain data that travels to the executors; what it needs to remember between batches is kept by the worker process, for as long
as that lives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from typing_extensions import override

from penstock.change import EXACT
from penstock.contracts.reference import KeyedReferenceTable
from penstock.errors import ReferenceTableError
from penstock.reference.copies import reference_copy
from penstock.reference.history import row_schema, twice
from penstock.reference.keys import KeyValue, key_values
from penstock.reference.lookups import LookupCache

_MOST_CACHES = 8
_caches: dict[str, LookupCache] = {}
"""Of this worker process, the one that was used last at the end."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be found for the rows of one batch, row by row."""

    keys: list[KeyValue | None]
    """None where there is nothing to be found."""
    columns: Sequence[pa.Array]
    """The same keys in Arrow, as the stream has them."""
    versions: list[int] | None = None
    """As of when; None for now."""


@dataclass(frozen=True, slots=True)
class Found:
    rows: pa.Table
    """The table's columns, then `_exact`; all null where nothing was found."""
    is_match: pa.BooleanArray


class ReferenceFinder(ABC):
    @abstractmethod
    def find(self, asked: Asked) -> Found:
        """Called in a task, once for each batch."""


@dataclass(frozen=True, slots=True)
class KeptFinder(ReferenceFinder):
    """In the whole table, which the worker holds in memory."""

    directory: Path
    identity: str
    """Of the copy: one that was made anew is another."""
    patience_seconds: float

    @override
    def find(self, asked: Asked) -> Found:
        copy = reference_copy(self.directory, self.identity)
        if asked.versions is None:
            history = copy.newest()
            places = history.find(asked.keys)
        else:
            wanted = [version for key, version in zip(asked.keys, asked.versions, strict=True) if key is not None]
            history = copy.reaching(max(wanted, default=0), self.patience_seconds)
            lowest = min(wanted, default=history.floor)
            # Rows for which nothing is to be found are as old as they like.
            places = history.find(asked.keys, [max(version, lowest) for version in asked.versions])
        return Found(history.take(places), places.is_valid())


@dataclass(frozen=True, slots=True)
class LookupFinder(ReferenceFinder):
    """In the source itself, by key; what was found, and what was not, is remembered for a time."""

    table: KeyedReferenceTable
    ttl_seconds: float
    negative_ttl_seconds: float
    max_entries: int
    identity: str
    """By which a worker finds its cache again."""

    @override
    def find(self, asked: Asked) -> Found:
        cache = _lookup_cache(self)
        missing = cache.missing(asked.keys)
        if missing:
            first = {key: row for row, key in reversed(list(enumerate(asked.keys))) if key is not None}
            keys = _keys_as(self.table, asked.columns, [first[key] for key in missing])
            rows = self.table.lookup(keys) if keys.num_rows else row_schema(self.table.schema()).empty_table()
            names = self.table.key()
            whole = rows.combine_chunks()
            found = key_values([_one(whole, name) for name in names], names, _one(whole, EXACT))
            _check_apart(found, missing, names)
            cache.put(missing, [key if key is not None else () for key in found], whole)
        return Found(*cache.take(asked.keys))


def _check_apart(found: Sequence[KeyValue | None], asked: Sequence[KeyValue], names: Sequence[str]) -> None:
    """Of two rows with one key nobody knows which is meant."""
    if len(found) > len(set(found)):
        counts = Counter(found)
        if any(counts[key] > 1 for key in asked):
            raise twice(names)


def _keys_as(table: KeyedReferenceTable, columns: Sequence[pa.Array], rows: list[int]) -> pa.RecordBatch:
    """Keys with the names and types of the table; those that the types cannot hold are not there, and are left out."""
    schema = table.schema()
    fields = [schema.field(name) for name in table.key()]
    wanted = pa.array(rows, pa.int64())
    given = [column.take(wanted) for column in columns]
    for column, field in zip(given, fields, strict=True):
        if column.null_count:  # null equals nothing, and is not asked for: this is a value that its own type cannot hold
            raise ReferenceTableError(
                f"a row is to be looked up by a {field.name!r} that its type cannot hold, such as an infinite date",
                hint="keep the table instead, which joins by such values too, or take such rows out of the stream before",
            )
    arrays = [_cast(column, field.type) for column, field in zip(given, fields, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, [field.name for field in fields])
    return batch.drop_null()


def _cast(array: pa.Array, to: pa.DataType) -> pa.Array:
    try:
        return array.cast(to)
    except pa.ArrowInvalid:
        return pa.concat_arrays([_cast_one(array.slice(at, 1), to) for at in range(len(array))])


def _cast_one(value: pa.Array, to: pa.DataType) -> pa.Array:
    try:
        return value.cast(to)
    except pa.ArrowInvalid:
        return pa.nulls(1, to)


def _one(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)


def _lookup_cache(finder: LookupFinder) -> LookupCache:
    """The one of this process; those of queries that are long gone make room."""
    cache = _caches.pop(finder.identity, None)
    if cache is None:
        schema = row_schema(finder.table.schema())
        cache = LookupCache(
            schema, ttl_seconds=finder.ttl_seconds, negative_ttl_seconds=finder.negative_ttl_seconds, max_entries=finder.max_entries
        )
    _caches[finder.identity] = cache
    while len(_caches) > _MOST_CACHES:
        del _caches[next(iter(_caches))]
    return cache
