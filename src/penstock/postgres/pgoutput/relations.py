"""Table schemas by position in the log, from Relation messages, and keys of tables with replica identity
FULL. Pure: the owner of a connection passes the function that queries the catalog.

The current catalog is never used for past changes, with one exception. For a table with replica identity
FULL, Relation messages flag every column as key. So its key must come from the catalog, which shows the
current key although the decoded log may be far behind. The catalog is queried each time such a table is
described: at its first change and after every change of its definition. If the catalog returns the known key,
that key applies. If it returns another key, the key changed at some position before that of the query. The
exact position is unknown, since transaction ids are not in the order of commits. Until the log has passed the
position of the query, the table is treated as one without a key: its changes have whole rows, which is
correct for any key. After that position it has the new key.

An open transaction whose changes are streamed sees its own DDL, which is invisible to others until it
commits. So the server describes every table to each such transaction separately, and again after a rollback
to a savepoint. Once the transaction commits, the server does not repeat its last descriptions for other
transactions. This module does the same: it keeps a history for each open transaction, clears it at every
abort, and merges it at the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from penstock.postgres.pgoutput.messages import RELATION, TYPE, Frames, Relation, decode_relation, decode_type
from penstock.postgres.pgoutput.transactions import Timeline
from penstock.postgres.types.registry import TypeResolver
from penstock.schema import TableName, TableSchema, key_in_order


@dataclass(frozen=True, slots=True)
class CatalogKey:
    """A table's key in the catalog at the time of the query; no columns if it has no key."""

    columns: tuple[str, ...]
    asked_at: int
    """A log position at which all transactions that the catalog showed had committed."""


LoadKey = Callable[[int], CatalogKey | None]
"""Function that queries the catalog for the key of the table with this OID. It returns None if the table does
not exist, or does not exist yet.
"""


class FullKey(NamedTuple):
    """The key of a table, valid from the message that described the table."""

    columns: tuple[str, ...]
    later: CatalogKey | None = None
    """The key that replaces this one once the log has passed the position of the catalog query. The caller
    then calls `settle`.
    """


class FullKeys:
    """The key of each table with replica identity FULL at the current log position."""

    def __init__(self, known: Mapping[int, tuple[str, ...]], load: LoadKey | None = None) -> None:
        """`known` are the keys at the end of the spool. Without `load`, the keys never change."""
        self._known = dict(known)
        self._load = load
        self._waiting: dict[int, CatalogKey] = {}

    def describe(self, oid: int, columns: Collection[str], place: int) -> FullKey:
        """Return the key of a table that has just been described with these columns. It is for changes at or
        after `place`.
        """
        found = None if self._load is None else self._load(oid)
        if found is None:
            return FullKey(() if oid in self._waiting else key_in_order(self._known.get(oid, ()), columns))
        if self._holds(oid, found, columns):
            self._known[oid] = found.columns
            return FullKey(key_in_order(found.columns, columns))
        waiting = self._waiting.get(oid)
        # If the catalog returns the same key again, the earlier position applies. Otherwise a table that is
        # altered repeatedly would never get its key.
        later = waiting if waiting is not None and set(waiting.columns) == set(found.columns) else found
        self._waiting[oid] = later
        return FullKey(self.settle(oid, later, columns)) if place > later.asked_at else FullKey((), later)

    def has_seen(self, oid: int) -> bool:
        """Whether the catalog has ever shown the table. If not, it was dropped, or its creating transaction
        has not committed.
        """
        return oid in self._known or oid in self._waiting

    def settle(self, oid: int, later: CatalogKey, columns: Collection[str]) -> tuple[str, ...]:
        """Record that the log has passed the position at which `later` was queried; returns that key in the
        order of `columns`.
        """
        if self._waiting.get(oid) is later:
            del self._waiting[oid]
            self._known[oid] = later.columns
        return key_in_order(later.columns, columns)

    def _holds(self, oid: int, found: CatalogKey, columns: Collection[str]) -> bool:
        """Whether the catalog's key is the known one. If no key is known, any key is accepted whose columns
        are among `columns`.
        """
        if oid in self._waiting:
            return False
        return (
            set(self._known[oid]) == set(found.columns)
            if oid in self._known
            else set(found.columns) <= set(columns)
        )


@dataclass(frozen=True, slots=True)
class Version:
    """A table's schema, valid from the message with this index."""

    index: int
    schema: TableSchema
    is_full: bool
    """Whether the replica identity is FULL, so that the server sends every old row whole."""


BEFORE_ALL = -1


@dataclass(frozen=True, slots=True)
class _Described:
    """A table's latest Relation message. `number` counts the Relation messages of the connection."""

    body: bytes
    schema: TableSchema
    number: int
    is_full: bool
    """Whether the replica identity is FULL. Equal messages may then describe different keys."""
    later: CatalogKey | None = None
    """The key that applies once the log has passed the position of the catalog query."""


class _Tables:
    """The tables described so far by OID, for all transactions or for one open transaction."""

    def __init__(self, unseen: dict[int, _Described] | None = None) -> None:
        self.described: dict[int, _Described] = {}
        self.unsettled: set[int] = set()
        """OIDs of tables with a key that applies only from a later position."""
        self.unseen = unseen or {}
        """Tables with replica identity FULL that have been described, possibly before a rollback to a
        savepoint, and that the catalog did not show.
        """

    def put(self, oid: int, described: _Described) -> None:
        self.described[oid] = described
        if described.later is None:
            self.unsettled.discard(oid)
        else:
            self.unsettled.add(oid)


@dataclass(frozen=True, slots=True)
class Versions:
    """The schemas in effect in a run of messages. `_changed` has only the tables that are described in the
    run, since these are few even if there are a thousand tables.
    """

    _described: Mapping[int, _Described]
    _changed: dict[int, list[Version]] = field(default_factory=dict)

    def of(self, oid: int) -> list[Version]:
        """Return the versions of the table in order; empty if the table is unknown."""
        found = self._changed.get(oid)
        if found is not None:
            return found
        known = self._described.get(oid)
        return [] if known is None else [Version(BEFORE_ALL, known.schema, known.is_full)]

    def add(self, oid: int, version: Version) -> None:
        """Add a version of a table. Must be called before the new description replaces the old one in
        `_described`.
        """
        self._changed[oid] = [*self.of(oid), version]


class RelationHistory:
    """The schema of every table described on a connection, by OID. A new connection needs a new object, since
    the server repeats a Relation message only after a change.
    """

    def __init__(self, keys: FullKeys, types: TypeResolver) -> None:
        self._keys = keys
        self._types = types
        self._number = 0
        self._current = _Tables()
        self._streams: dict[int, _Tables] = {}

    def advance(self, frames: Frames, timeline: Timeline, stream: int | None = None) -> Versions:
        """Process the Relation and Type messages among `frames`, and return the versions in effect there.
        `stream` is the xid of the open transaction whose block the messages are from.
        """
        known = self._current if stream is None else self._streams.setdefault(stream, _Tables())
        versions = Versions(known.described)
        for index in map(int, np.flatnonzero((frames.kinds == RELATION) | (frames.kinds == TYPE))):
            if frames.kinds[index] == TYPE:
                self._types.learn(*decode_type(frames, index))
                continue
            self._number += 1
            body = frames.body(index)
            oid = int.from_bytes(body[:4], "big")
            before = known.described.get(oid)
            if before is not None and before.body == body and not before.is_full:
                known.put(oid, replace(before, number=self._number))
                continue
            relation = decode_relation(frames, index)
            described = self._describe(body, relation, timeline.place_at(frames, index))
            if relation.is_full and not self._keys.has_seen(oid):
                known.unseen[oid] = described
            if before is None or (before.schema, before.is_full) != (described.schema, described.is_full):
                versions.add(oid, Version(index, described.schema, described.is_full))
            known.put(oid, described)
        self._settle_keys(frames, timeline, known, versions)
        return versions

    def commit(self, stream: int) -> dict[int, tuple[str, ...]]:
        """Make the descriptions of an open transaction valid for all transactions, except for tables that
        have since been described outside of it. Returns the keys of the tables that the transaction created
        itself, since the catalog did not show these tables before.
        """
        told = self._streams.pop(stream, _Tables())
        for oid, described in told.described.items():
            current = self._current.described.get(oid)
            if current is None or current.number < described.number:
                # The catalog did not show the transaction's change of the key while it was open.
                self._current.put(oid, self._rekeyed(described) if described.is_full else described)
        made = {
            oid: (self._current.described.get(oid) or self._rekeyed(described)).schema.key
            for oid, described in told.unseen.items()
        }
        return {oid: key for oid, key in made.items() if key}

    def forget(self, stream: int, *, is_whole: bool) -> None:
        """Process a rollback of the transaction or of a part of it: the server will describe all tables to it
        again.
        """
        told = self._streams.pop(stream, None)
        if told is not None and not is_whole:
            self._streams[stream] = _Tables(told.unseen)

    def _settle_keys(self, frames: Frames, timeline: Timeline, known: _Tables, versions: Versions) -> None:
        """Apply each key whose catalog query was at a position that the log passes within `frames`."""
        for oid in tuple(known.unsettled):
            described = known.described[oid]
            assert described.later is not None
            index = timeline.first_past(frames, described.later.asked_at)
            if index is not None:
                key = self._keys.settle(oid, described.later, described.schema.column_names)
                schema = replace(described.schema, key=key)
                versions.add(oid, Version(max(index, versions.of(oid)[-1].index), schema, described.is_full))
                known.put(oid, replace(described, schema=schema, later=None))

    def _rekeyed(self, described: _Described) -> _Described:
        schema = described.schema
        key = self._keys.describe(schema.oid, schema.column_names, 0)
        return replace(described, schema=replace(schema, key=key.columns), later=key.later)

    def _describe(self, body: bytes, relation: Relation, place: int) -> _Described:
        columns = tuple(
            self._types.column(column.name, column.type_oid, column.type_modifier)
            for column in relation.columns
        )
        names = tuple(column.name for column in relation.columns)
        flagged = tuple(column.name for column in relation.columns if column.is_key)
        key = self._keys.describe(relation.oid, names, place) if relation.is_full else FullKey(flagged)
        schema = TableSchema(relation.oid, TableName(relation.namespace, relation.name), columns, key.columns)
        return _Described(body, schema, self._number, relation.is_full, key.later)
