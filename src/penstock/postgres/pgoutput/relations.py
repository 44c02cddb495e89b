"""Which shape each table has at each place in the log, from the Relation messages; the catalog of now is never asked about the past.

Under replica identity FULL the message flags every column, so the key comes from what the capture read in the catalog at its start.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.postgres.pgoutput.framing import RELATION, Frames
from penstock.postgres.pgoutput.messages import Relation, decode_relation
from penstock.postgres.types.resolver import TypeResolver
from penstock.schema import TableName, TableSchema

Version = tuple[int, TableSchema]
"""The index of the message from which a schema holds, and the schema."""

BEFORE_ALL = -1


class RelationHistory:
    """The current schema of every table seen, by OID. Lives as long as a connection: only after a change is a Relation sent again."""

    def __init__(self, keys: Mapping[int, tuple[str, ...]], types: TypeResolver) -> None:
        self._keys = keys
        self._types = types
        self._current: dict[int, TableSchema] = {}
        self._bodies: dict[int, bytes] = {}

    def advance(self, frames: Frames) -> dict[int, list[Version]]:
        """Take in the Relation messages among `frames`; gives the versions that hold in them, for every table known."""
        versions: dict[int, list[Version]] = {oid: [(BEFORE_ALL, schema)] for oid, schema in self._current.items()}
        for index in map(int, frames.where(RELATION)):
            body = frames.body(index)
            oid = int.from_bytes(body[:4], "big")
            if self._bodies.get(oid) == body:
                continue
            relation = decode_relation(frames, index)
            schema = self._schema(relation)
            self._bodies[oid] = body
            if self._current.get(oid) != schema:
                self._current[oid] = schema
                versions.setdefault(oid, []).append((index, schema))
        return versions

    def _schema(self, relation: Relation) -> TableSchema:
        columns = tuple(self._types.column(column.name, column.type_oid, column.type_modifier) for column in relation.columns)
        return TableSchema(relation.oid, TableName(relation.namespace, relation.name), columns, self._key(relation))

    def _key(self, relation: Relation) -> tuple[str, ...]:
        flagged = tuple(column.name for column in relation.columns if column.is_key)
        if relation.replica_identity != "f":
            return flagged
        known = self._keys.get(relation.oid, ())
        names = tuple(column.name for column in relation.columns if column.name in known)
        # A key of which a column is gone, by a rename or a drop, tells nothing apart any more.
        return names if len(names) == len(known) else ()
