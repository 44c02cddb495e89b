"""Join a batch of rows with a reference table in a Python worker: cached table copies, key lookups with a
cache, and the join itself.

Runs on executors and does not import pyspark.

`ReferenceCopy` reads the stored table once, and then only its changes. A task requests a version, and waits
up to a time limit until the keeper has stored it.

In a `LookupCache`, entries expire. The entry of a missing row usually expires sooner than that of a found
row, since a missing row may be inserted soon. A full cache evicts the least recently used entry.

A finder is plain data that Spark sends to executors. Its caches belong to the worker process, and end with
it.

The join preserves the order and number of rows. Deletes and truncates are passed on without a lookup.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from penstock.change import CHANGE_TYPE, EXACT, UNCHANGED, ChangeType
from penstock.contracts.reference import KeyedReferenceTable
from penstock.errors import (
    EnvironmentUnfitError,
    ReferenceBehindError,
    ReferenceStoreError,
    ReferenceTableError,
    find_error,
)
from penstock.reference.history import KeyValue, ReferenceHistory, key_values, row_schema, twice
from penstock.reference.store import Failure, StoreState, apply_changes, load_history, load_state
from penstock.retry import poll_pauses
from penstock.worker import settle_worker

_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.1
_ATTEMPTS = 10
_FEWEST_FORGOTTEN = 100_000


class ReferenceCopy:
    """A worker's in-memory copy of a stored reference table. Used by one thread."""

    def __init__(self, directory: Path, identity: str) -> None:
        self._directory = directory
        self._identity = identity
        self._history: ReferenceHistory | None = None
        self._reached = -1

    def newest(self) -> ReferenceHistory:
        """The table in its newest stored state. Raises the error that ended the keeper, instead of returning
        old rows.
        """
        state = self._load()
        if state.failure is not None:
            raise _raised(state.failure)
        return self._follow(state)

    def reaching(self, version: int, patience_seconds: float) -> ReferenceHistory:
        """The table with everything up to `version`. Waits for the keeper up to the time limit."""
        if self._history is not None and version <= self._reached:
            return self._history
        deadline = time.monotonic() + patience_seconds
        pauses = poll_pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while (state := self._load()).reached < version:
            if state.failure is not None:
                raise _raised(state.failure)
            if time.monotonic() > deadline:
                raise ReferenceBehindError(
                    f"the reference table in {self._directory} did not reach version {version} within "
                    f"{patience_seconds:g} s, "
                    f"but only {state.reached}",
                    hint="check that the process that keeps the table runs, and that stream and table use "
                    "the same slot, publication and spool",
                )
            time.sleep(next(pauses))
        return self._follow(state)

    def _load(self) -> StoreState:
        state = load_state(self._directory)
        if state is None:
            raise EnvironmentUnfitError(
                f"this executor finds no reference table in {self._directory}",
                hint="keep it in a directory that the driver and every executor can read",
            )
        if state.identity != self._identity:
            raise ReferenceStoreError(
                f"the reference table in {self._directory} was copied again while a query joined with it",
                hint="restart the query; with as_of_commit it needs a new checkpoint too",
            )
        return state

    def _follow(self, state: StoreState) -> ReferenceHistory:
        for attempt in range(_ATTEMPTS):
            try:
                # Drop the history first: after an error it may have a partly applied change.
                history, self._history = self._history, None
                self._history = self._brought_to(history, state)
                self._reached = state.reached
            except FileNotFoundError:  # the keeper has compacted the table and removed the file
                if attempt == _ATTEMPTS - 1:
                    raise
                state = self._load()
            else:
                break
        assert self._history is not None
        return self._history

    def _brought_to(self, history: ReferenceHistory | None, state: StoreState) -> ReferenceHistory:
        if history is None or self._reached < state.floor or _is_long(history, state):
            return load_history(self._directory, state)
        apply_changes(history, self._directory, state, after=self._reached)
        return history


def _is_long(history: ReferenceHistory, state: StoreState) -> bool:
    """Whether to load the table again, because the copy holds much history that the keeper has already
    compacted.
    """
    return state.floor > history.floor and history.changes_total > max(2 * state.base_rows, _FEWEST_FORGOTTEN)


def _raised(failure: Failure) -> Exception:
    error = find_error(failure.code) or ReferenceBehindError
    return error(failure.message, hint=failure.hint)


@lru_cache(maxsize=8)
def reference_copy(directory: Path, identity: str) -> ReferenceCopy:
    """The copy of this table in this process. If there are too many copies, the least recently used one is
    dropped.
    """
    return ReferenceCopy(directory, identity)


class _Entry(NamedTuple):
    rows: pa.Table | None
    """The rows of one lookup, with this key's row at `place`; None if there is no row."""
    place: int
    until: float


class LookupCache:
    """Cache of lookups by key. Used by one thread. `schema` is that of the rows: the table's columns, then
    `_exact`.
    """

    def __init__(
        self,
        schema: pa.Schema,
        *,
        ttl_seconds: float,
        negative_ttl_seconds: float,
        max_entries: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schema = schema
        self._ttl_seconds = ttl_seconds
        self._negative_ttl_seconds = negative_ttl_seconds
        self._max_entries = max_entries
        self._clock = clock
        self._entries: OrderedDict[KeyValue, _Entry] = OrderedDict()
        self._held_rows = 0
        """Number of rows in memory: an entry keeps all rows of its lookup alive."""

    def __len__(self) -> int:
        return len(self._entries)

    def missing(self, keys: Iterable[KeyValue | None]) -> list[KeyValue]:
        """The distinct keys without a valid entry."""
        now = self._clock()
        wanted = dict.fromkeys(key for key in keys if key is not None)
        return [key for key in wanted if (entry := self._entries.get(key)) is None or entry.until <= now]

    def put(self, asked: Sequence[KeyValue], found: Sequence[KeyValue], rows: pa.Table) -> None:
        """Store the result of a lookup of `asked`: `rows`, with the keys `found`. All other keys are stored
        as missing.
        """
        now = self._clock()
        places = {key: place for place, key in enumerate(found)}
        for key in asked:
            place = places.get(key)
            ttl_seconds = self._negative_ttl_seconds if place is None else self._ttl_seconds
            self._entries[key] = _Entry(rows if place is not None else None, place or 0, now + ttl_seconds)
            self._entries.move_to_end(key)
        self._held_rows += rows.num_rows

    def take(self, keys: Sequence[KeyValue | None]) -> tuple[pa.Table, pa.BooleanArray]:
        """The row of each key (all null if there is none), and a mask of the keys that have a row.

        Expired entries are used too. So a row that was just looked up is returned even if its time to live is
        shorter than the lookup took. And all rows of a batch with the same key get the same row.
        """
        rows, places = self._rows(keys)
        for key in keys:
            if key is not None and key in self._entries:
                self._entries.move_to_end(key)
        self._shrink()
        return rows.take(pa.array(places, pa.int64())), pa.array(
            [place is not None for place in places], pa.bool_()
        )

    def _rows(self, keys: Iterable[KeyValue | None]) -> tuple[pa.Table, list[int | None]]:
        """The rows of all lookups that found these keys, and the index of each key's row in them; None for a
        key without a row.
        """
        tables: dict[int, tuple[int, pa.Table]] = {}
        places: list[int | None] = []
        count = 0
        for key in keys:
            entry = self._entries.get(key) if key is not None else None
            if entry is None or entry.rows is None:
                places.append(None)
                continue
            if id(entry.rows) not in tables:
                tables[id(entry.rows)] = (count, entry.rows)
                count += entry.rows.num_rows
            places.append(tables[id(entry.rows)][0] + entry.place)
        return pa.concat_tables(
            [self._schema.empty_table(), *(table for _, table in tables.values())]
        ).combine_chunks(), places

    def _shrink(self) -> None:
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)
        if self._held_rows > 2 * self._max_entries:
            keys = [key for key, entry in self._entries.items() if entry.rows is not None]
            rows, places = self._rows(keys)
            together = rows.take(pa.array(places, pa.int64()))
            for place, key in enumerate(keys):
                self._entries[key] = self._entries[key]._replace(rows=together, place=place)
            self._held_rows = together.num_rows


_MOST_CACHES = 8
_caches: dict[str, LookupCache] = {}
"""Caches of this worker process, the most recently used one last."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The keys to find for the rows of one batch, row by row."""

    keys: list[KeyValue | None]
    """None for rows without a lookup."""
    columns: Sequence[pa.Array]
    """The same keys as Arrow columns of the stream."""
    versions: list[int] | None = None
    """For each row, the version of the reference table in which to find it; None for the current version."""


@dataclass(frozen=True, slots=True)
class Found:
    rows: pa.Table
    """The table's columns, then `_exact`; all null for missing rows."""
    is_match: pa.BooleanArray


class ReferenceFinder(ABC):
    @abstractmethod
    def find(self, asked: Asked) -> Found:
        """Find the rows of the reference table for one batch. Called in a task, once per batch."""


@dataclass(frozen=True, slots=True)
class KeptFinder(ReferenceFinder):
    """Finds rows in a copy of the whole table in the worker's memory."""

    directory: Path
    identity: str
    """Identity of the stored copy; a table that was copied again has another one."""
    patience_seconds: float

    @override
    def find(self, asked: Asked) -> Found:
        copy = reference_copy(self.directory, self.identity)
        if asked.versions is None:
            history = copy.newest()
            places = history.find(asked.keys)
        else:
            wanted = [
                version for key, version in zip(asked.keys, asked.versions, strict=True) if key is not None
            ]
            history = copy.reaching(max(wanted, default=0), self.patience_seconds)
            lowest = min(wanted, default=history.floor)
            # The version of a row without a lookup may be older than the floor, so raise it to `lowest`.
            places = history.find(asked.keys, [max(version, lowest) for version in asked.versions])
        return Found(history.take(places), places.is_valid())


@dataclass(frozen=True, slots=True)
class LookupFinder(ReferenceFinder):
    """Finds rows at the source by key, and caches found and missing rows."""

    table: KeyedReferenceTable
    ttl_seconds: float
    negative_ttl_seconds: float
    max_entries: int
    identity: str
    """Identifies the cache within a worker."""

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
    """Raise an error if two of the found rows have the same requested key."""
    if len(found) > len(set(found)):
        counts = Counter(found)
        if any(counts[key] > 1 for key in asked):
            raise twice(names)


def _keys_as(table: KeyedReferenceTable, columns: Sequence[pa.Array], rows: list[int]) -> pa.RecordBatch:
    """The keys of these rows, with the names and types of the table's key; keys that do not fit the types are
    left out.
    """
    schema = table.schema()
    fields = [schema.field(name) for name in table.key()]
    wanted = pa.array(rows, pa.int64())
    given = [column.take(wanted) for column in columns]
    for column, field in zip(given, fields, strict=True):
        if column.null_count:  # null keys were removed before, so the type cannot hold this value
            raise ReferenceTableError(
                f"the lookup key {field.name!r} of a row has a value that its type cannot hold, such as an "
                "infinite date",
                hint="keep the table instead, which supports such keys, or filter such rows out of the "
                "stream",
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
    return (
        column.chunk(0)
        if column.num_chunks == 1
        else pa.concat_arrays(column.chunks)
        if column.num_chunks
        else pa.nulls(0, column.type)
    )


def _lookup_cache(finder: LookupFinder) -> LookupCache:
    """The cache of this finder in this process. If there are too many caches, the least recently used one is
    dropped.
    """
    cache = _caches.pop(finder.identity, None)
    if cache is None:
        schema = row_schema(finder.table.schema())
        cache = LookupCache(
            schema,
            ttl_seconds=finder.ttl_seconds,
            negative_ttl_seconds=finder.negative_ttl_seconds,
            max_entries=finder.max_entries,
        )
    _caches[finder.identity] = cache
    while len(_caches) > _MOST_CACHES:
        del _caches[next(iter(_caches))]
    return cache


_GOING = pa.array([ChangeType.DELETE.value, ChangeType.TRUNCATE.value])


@dataclass(frozen=True, slots=True)
class Enrichment:
    """One join, in the form that is sent to executors."""

    finder: ReferenceFinder
    on: tuple[tuple[str, str], ...]
    """Columns of the stream and of the reference table's key, in the order of the key."""
    columns: tuple[tuple[str, str], ...]
    """Columns of the reference table, with their names in the result."""
    types: Mapping[str, pa.DataType]
    """Arrow types of these columns in the result, by their names there."""
    matched: str | None
    """Name of the added column that says whether a row was found; None if not requested."""
    version: str | None
    """The stream's column with the version of the reference table to join with; None to join with the current
    version.
    """

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Called by `mapInArrow` once per task."""
        settle_worker()
        return map(self.join, batches)

    def join(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        asked = self._asked(batch)
        found = self.finder.find(asked)
        arrays = list(batch.columns)
        names = list(batch.schema.names)
        exact = _exact_of(batch)
        if exact is not None:
            arrays[names.index(EXACT)] = self._exact(exact, found)
        for name, shown in self.columns:
            column = _whole(found.rows.column(name))
            arrays.append(column if column.type == self.types[shown] else column.cast(self.types[shown]))
            names.append(shown)
        if self.matched is not None:
            arrays.append(found.is_match)
            names.append(self.matched)
        return pa.RecordBatch.from_arrays(arrays, names)

    def _asked(self, batch: pa.RecordBatch) -> Asked:
        names = [name for name, _ in self.on]
        columns = [batch.column(name) for name in names]
        keys = key_values(columns, names, _exact_of(batch))
        if CHANGE_TYPE in batch.schema.names:
            going = pc.is_in(batch.column(CHANGE_TYPE), _GOING).to_pylist()
            keys = [None if goes else key for key, goes in zip(keys, going, strict=True)]
        if UNCHANGED in batch.schema.names:
            _check_known(batch.column(UNCHANGED), names)
        return Asked(keys, columns, self._versions(batch))

    def _versions(self, batch: pa.RecordBatch) -> list[int] | None:
        if self.version is None:
            return None
        versions = batch.column(self.version)
        if versions.null_count:
            raise ReferenceTableError(
                f"a row has no {self.version}, so it cannot be joined as of its commit",
                hint="rows of spark.read have no position; read the table as a stream",
            )
        return list(versions.to_pylist())

    def _exact(self, exact: pa.Array, found: Found) -> pa.Array:
        """The exact texts of the stream's row and of the found row, under the column names of the result."""
        texts = _whole(found.rows.column(EXACT))
        if texts.null_count == len(texts):
            return exact
        shown = dict(self.columns)
        merged = [
            _merged(own, others, shown)
            for own, others in zip(exact.to_pylist(), texts.to_pylist(), strict=True)
        ]
        return pa.array(merged, exact.type)


def _exact_of(batch: pa.RecordBatch) -> pa.Array | None:
    """The metadata column `_exact`; None if the batch has none, or has another column of that name."""
    column = batch.column(EXACT) if EXACT in batch.schema.names else None
    return column if column is not None and pa.types.is_map(column.type) else None


def _merged(own: list[Any] | None, others: list[Any] | None, shown: Mapping[str, str]) -> list[Any] | None:
    added = [(shown[name], text) for name, text in others or () if name in shown]
    return [*(own or ()), *added] or None


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)


def _check_known(unchanged: pa.Array, names: list[str]) -> None:
    """Raise an error if a join column has an unchanged TOAST value: the value is unknown, so it cannot be
    looked up.
    """
    if unchanged.null_count == len(unchanged):
        return
    for columns in unchanged.drop_null().to_pylist():
        hidden = next((name for name in names if name in columns), None)
        if hidden is not None:
            raise ReferenceTableError(
                f"a change has an unchanged TOAST value in its column {hidden!r}",
                hint="run ALTER TABLE … REPLICA IDENTITY FULL for the table of the stream, "
                "or join on a column of another type",
            )
