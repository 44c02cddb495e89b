"""Which shape each table has at each place in the log, from the Relation messages; the catalog of now is never asked about the past.

Only the key of a table with replica identity FULL is not in them; `keys` says where that comes from.

A transaction that is sent while open sees its own DDL, which nobody else does until it commits. So the server describes every table to
each such transaction by itself, anew after a part of it was rolled back, and counts what it described last as known to all once the
transaction commits. What is kept here mirrors that: a history for each open transaction, emptied at every abort, joined at the commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.postgres.pgoutput.framing import RELATION, TYPE, Frames
from penstock.postgres.pgoutput.keys import CatalogKey, FullKey, FullKeys
from penstock.postgres.pgoutput.messages import Relation, decode_relation, decode_type
from penstock.postgres.pgoutput.transactions import Timeline
from penstock.postgres.types.resolver import TypeResolver
from penstock.schema import TableName, TableSchema


@dataclass(frozen=True, slots=True)
class Version:
    """A table's shape from one message on."""

    index: int
    schema: TableSchema
    is_full: bool
    """Whether the replica identity is FULL, so that every old row travels whole."""


BEFORE_ALL = -1


@dataclass(frozen=True, slots=True)
class _Described:
    """A table's latest Relation message; `number` counts them over the connection."""

    body: bytes
    schema: TableSchema
    number: int
    is_full: bool
    """Under replica identity FULL: the same message may stand for another key."""
    later: CatalogKey | None = None
    """The key that it has once the log has passed the place at which this one was asked for."""


class _Tables:
    """What has been described so far, to all or to one open transaction: the tables by OID."""

    def __init__(self, unseen: dict[int, _Described] | None = None) -> None:
        self.described: dict[int, _Described] = {}
        self.unsettled: set[int] = set()
        """Those that have a key only later."""
        self.unseen = unseen or {}
        """Those under replica identity FULL that have been described, now or before, and that the catalog did not show."""

    def put(self, oid: int, described: _Described) -> None:
        self.described[oid] = described
        if described.later is None:
            self.unsettled.discard(oid)
        else:
            self.unsettled.add(oid)


@dataclass(frozen=True, slots=True)
class Versions:
    """The schemas that hold in a run of messages. Of a thousand tables few are changed in a run, and fewer described."""

    _described: Mapping[int, _Described]
    _changed: dict[int, list[Version]] = field(default_factory=dict)

    def of(self, oid: int) -> list[Version]:
        """In order; empty if the table is not known."""
        found = self._changed.get(oid)
        if found is not None:
            return found
        known = self._described.get(oid)
        return [] if known is None else [Version(BEFORE_ALL, known.schema, known.is_full)]

    def add(self, oid: int, version: Version) -> None:
        """Call it before the table is described again."""
        self._changed[oid] = [*self.of(oid), version]


class RelationHistory:
    """The schema of every table seen, by OID. Lives as long as a connection: only after a change is a Relation sent again."""

    def __init__(self, keys: FullKeys, types: TypeResolver) -> None:
        self._keys = keys
        self._types = types
        self._number = 0
        self._current = _Tables()
        self._streams: dict[int, _Tables] = {}

    def advance(self, frames: Frames, timeline: Timeline, stream: int | None = None) -> Versions:
        """Take in the Relation and Type messages among `frames`; gives the versions that hold in them.

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
        """What an open transaction was told holds for all now, but for tables that have been described to all since.

        Gives the keys of the tables that it made itself, which nobody could see before.
        """
        told = self._streams.pop(stream, _Tables())
        for oid, described in told.described.items():
            current = self._current.described.get(oid)
            if current is None or current.number < described.number:
                # The catalog did not show what the transaction did to the key as long as it was open.
                self._current.put(oid, self._rekeyed(described) if described.is_full else described)
        made = {oid: (self._current.described.get(oid) or self._rekeyed(described)).schema.key for oid, described in told.unseen.items()}
        return {oid: key for oid, key in made.items() if key}

    def forget(self, stream: int, *, is_whole: bool) -> None:
        """A transaction, or a part of it, was rolled back: whatever it still has to say, it is told all tables anew."""
        told = self._streams.pop(stream, None)
        if told is not None and not is_whole:
            self._streams[stream] = _Tables(told.unseen)

    def _settle_keys(self, frames: Frames, timeline: Timeline, known: _Tables, versions: Versions) -> None:
        """Give tables the keys that waited for a place which the log passes among `frames`."""
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
        columns = tuple(self._types.column(column.name, column.type_oid, column.type_modifier) for column in relation.columns)
        names = tuple(column.name for column in relation.columns)
        flagged = tuple(column.name for column in relation.columns if column.is_key)
        key = self._keys.describe(relation.oid, names, place) if relation.is_full else FullKey(flagged)
        schema = TableSchema(relation.oid, TableName(relation.namespace, relation.name), columns, key.columns)
        return _Described(body, schema, self._number, relation.is_full, key.later)
