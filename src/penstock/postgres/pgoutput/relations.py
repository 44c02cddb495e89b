"""Which shape each table has at each place in the log, from the Relation messages; the catalog of now is never asked about the past.

Only the key of a table with replica identity FULL is not in them; `keys` says where that comes from.

A transaction that is sent while open sees its own DDL, which nobody else does until it commits. So the server describes every table to
each such transaction by itself, anew after a part of it was rolled back, and counts what it described last as known to all once the
transaction commits. What is kept here mirrors that: a history for each open transaction, emptied at every abort, joined at the commit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from penstock.postgres.pgoutput.framing import RELATION, TYPE, Frames
from penstock.postgres.pgoutput.keys import FullKeys
from penstock.postgres.pgoutput.messages import Relation, decode_relation, decode_type
from penstock.postgres.pgoutput.transactions import Timeline
from penstock.postgres.types.resolver import TypeResolver
from penstock.schema import TableName, TableSchema

Version = tuple[int, TableSchema]
"""The index of the message from which a schema holds, and the schema."""

Versions = dict[int, list[Version]]
"""By the table's OID, in order."""

BEFORE_ALL = -1


@dataclass(frozen=True, slots=True)
class _Described:
    """A table's latest Relation message; `number` counts them over the connection."""

    body: bytes
    schema: TableSchema
    number: int
    is_full: bool
    """Under replica identity FULL: the same message may stand for another key."""


class RelationHistory:
    """The schema of every table seen, by OID. Lives as long as a connection: only after a change is a Relation sent again."""

    def __init__(self, keys: FullKeys, types: TypeResolver) -> None:
        self._keys = keys
        self._types = types
        self._number = 0
        self._current: dict[int, _Described] = {}
        self._streams: dict[int, dict[int, _Described]] = {}

    def advance(self, frames: Frames, timeline: Timeline, stream: int | None = None) -> Versions:
        """Take in the Relation and Type messages among `frames`; gives the versions that hold in them, for every table known.

        `stream` is the xid of the open transaction whose block the messages are from.
        """
        known = self._current if stream is None else self._streams.setdefault(stream, {})
        if len(timeline.xids):
            self._settle_keys(known, int(timeline.xids[0]))
        versions: Versions = {oid: [(BEFORE_ALL, each.schema)] for oid, each in known.items()}
        for index in map(int, np.flatnonzero((frames.kinds == RELATION) | (frames.kinds == TYPE))):
            if frames.kinds[index] == TYPE:
                self._types.learn(*decode_type(frames, index))
                continue
            self._number += 1
            body = frames.body(index)
            oid = int.from_bytes(body[:4], "big")
            before = known.get(oid)
            if before is not None and before.body == body and not before.is_full:
                known[oid] = replace(before, number=self._number)
                continue
            relation = decode_relation(frames, index)
            schema = self._schema(relation, timeline.xid_at(index))
            known[oid] = _Described(body, schema, self._number, relation.is_full)
            if before is None or before.schema != schema:
                versions.setdefault(oid, []).append((index, schema))
        return versions

    def commit(self, stream: int) -> None:
        """What an open transaction was told holds for all now, but for tables that have been described to all since."""
        for oid, described in self._streams.pop(stream, {}).items():
            current = self._current.get(oid)
            if current is None or current.number < described.number:
                # The catalog did not show what the transaction did to the key as long as it was open.
                self._current[oid] = self._rekeyed(described, stream) if described.is_full else described

    def forget(self, stream: int) -> None:
        """A transaction, or a part of it, was rolled back: whatever it still has to say, it is told all tables anew."""
        self._streams.pop(stream, None)

    def _settle_keys(self, known: dict[int, _Described], xid: int) -> None:
        for oid in self._keys.ripe(xid):
            if oid in known:
                schema = known[oid].schema
                known[oid] = replace(known[oid], schema=replace(schema, key=self._keys.settle(oid, schema.column_names)))

    def _rekeyed(self, described: _Described, xid: int) -> _Described:
        schema = described.schema
        return replace(described, schema=replace(schema, key=self._keys.key(schema.oid, schema.column_names, xid)))

    def _schema(self, relation: Relation, xid: int) -> TableSchema:
        columns = tuple(self._types.column(column.name, column.type_oid, column.type_modifier) for column in relation.columns)
        names = tuple(column.name for column in relation.columns)
        flagged = tuple(column.name for column in relation.columns if column.is_key)
        key = self._keys.key(relation.oid, names, xid) if relation.is_full else flagged
        return TableSchema(relation.oid, TableName(relation.namespace, relation.name), columns, key)
