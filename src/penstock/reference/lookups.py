"""A cache of rows that were looked up in the source, and of keys that are not there; for tables too large to be kept whole.

Pure but for the clock. An entry is good for a time, and what is not there usually for a shorter one: a row that is missing now may be on
its way. What has not been asked for longest goes first when the cache is full.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import pyarrow as pa

from penstock.reference.keys import KeyValue


class _Entry(NamedTuple):
    rows: pa.Table | None
    """The rows that came with one lookup, this one at `place`; None if it is not there."""
    place: int
    until: float


class LookupCache:
    """For one thread. `schema` is that of the rows: the table's columns, then `_exact`."""

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
        """Of all lookups whose rows may still be held: one entry holds all that came with it."""

    def __len__(self) -> int:
        return len(self._entries)

    def missing(self, keys: Iterable[KeyValue | None]) -> list[KeyValue]:
        """The keys, each once, of which nothing is known, or nothing that is still good."""
        now = self._clock()
        wanted = dict.fromkeys(key for key in keys if key is not None)
        return [key for key in wanted if (entry := self._entries.get(key)) is None or entry.until <= now]

    def put(self, asked: Sequence[KeyValue], found: Sequence[KeyValue], rows: pa.Table) -> None:
        """What a lookup of `asked` gave: `rows`, with the keys `found`. Of all others it is known now that they are not there."""
        now = self._clock()
        places = {key: place for place, key in enumerate(found)}
        for key in asked:
            place = places.get(key)
            ttl_seconds = self._negative_ttl_seconds if place is None else self._ttl_seconds
            self._entries[key] = _Entry(rows if place is not None else None, place or 0, now + ttl_seconds)
            self._entries.move_to_end(key)
        self._held_rows += rows.num_rows

    def take(self, keys: Sequence[KeyValue | None]) -> tuple[pa.Table, pa.BooleanArray]:
        """The row of each key, all null where there is none, and whether there is one. Entries count however old they are by now.

        So a row that was just looked up is there even if a time to live is shorter than a lookup takes, and all rows of one batch that have
        one key get the same.
        """
        rows, places = self._rows(keys)
        for key in keys:
            if key is not None and key in self._entries:
                self._entries.move_to_end(key)
        self._shrink()
        return rows.take(pa.array(places, pa.int64())), pa.array([place is not None for place in places], pa.bool_())

    def _rows(self, keys: Iterable[KeyValue | None]) -> tuple[pa.Table, list[int | None]]:
        """The rows of all lookups that these keys came with, and the place of each key's row among them."""
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
        return pa.concat_tables([self._schema.empty_table(), *(table for _, table in tables.values())]).combine_chunks(), places

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
