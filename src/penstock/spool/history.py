"""Which shape each table had from which position on, for as long as anybody may ask.

Manifests know the shape of the changes in their own segment, and go with it. The history outlives them: for every table, by its OID, the
versions that a consumer may still meet, and the current one for good. The writer adds to it before it seals the segment in which a new
version appears, and only then; so whatever a reader finds in a segment is in the history too.

A version holds from the first transaction that brought a change under it. When one transaction brought several, they have the same
position, and stand in their order.

On disk it is a file of lines, one for each version, to which lines are added; a last line that has no end is what a crash left, and does
not count. When the writer starts, and when the file has doubled, it is written anew without what is no longer needed.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

from penstock.errors import SpoolCorruptError
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.spool import consumers, storage
from penstock.spool.layout import FORMAT, SpoolLayout
from penstock.spool.manifest import parse_document, parse_schema, schema_document

_WHERE = "history.jsonl"
_HEAD = json.dumps({"format": FORMAT}).encode() + b"\n"
_SPARE_LINES = 100


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """A table's shape from `position` on, until its next version."""

    position: Position
    schema: TableSchema


@dataclass(frozen=True, slots=True)
class SchemaHistory:
    """The versions of every table, by OID, in order. A value: recording gives another one."""

    tables: Mapping[int, tuple[SchemaVersion, ...]] = field(default_factory=dict)

    @classmethod
    def load(cls, root: Path) -> Self:
        """What the spool knows; nothing, if it has not been written to."""
        data = storage.read_bytes(SpoolLayout(root).history)
        if data is None:
            return cls()
        head, *lines = data.split(b"\n")[:-1] or [b""]
        parse_document(head, where=_WHERE)
        tables: dict[int, list[SchemaVersion]] = {}
        try:
            for line in lines:
                version = _parse_version(json.loads(line))
                tables.setdefault(version.schema.oid, []).append(version)
        except (KeyError, TypeError, ValueError) as error:
            raise SpoolCorruptError(f"{_WHERE} is not a history of schemas", hint="restore the file, or delete the spool") from error
        return cls({oid: tuple(versions) for oid, versions in tables.items()})

    def versions(self, oid: int) -> tuple[SchemaVersion, ...]:
        return self.tables.get(oid, ())

    def at(self, oid: int, position: Position) -> TableSchema | None:
        """The shape that the table's changes have at the end of the transaction at `position`; None if it has had none by then."""
        versions = self.versions(oid)
        found = bisect_right(versions, position, key=lambda version: version.position)
        return versions[found - 1].schema if found else None

    def current(self, oid: int) -> TableSchema | None:
        versions = self.versions(oid)
        return versions[-1].schema if versions else None

    def keys(self, position: Position) -> dict[int, tuple[str, ...]]:
        """By OID, of every table that had changes by then. A crash may have left later ones, of a segment that was never sealed."""
        schemas = {oid: self.at(oid, position) for oid in self.tables}
        return {oid: schema.key for oid, schema in schemas.items() if schema is not None}

    def recorded(self, changes: Iterable[SchemaVersion]) -> SchemaHistory:
        """This history with what `changes` adds to it; itself, if that is nothing.

        They are in order, and those of a transaction are all there. Changes that were captured before, and are again, add nothing.
        """
        tables: dict[int, tuple[SchemaVersion, ...]] = {}
        for oid, group in _by_table(changes).items():
            versions = self.versions(oid)
            for position, schemas in group.items():
                if not (versions and versions[-1].position < position and [versions[-1].schema] == schemas):
                    versions = _merged(versions, position, schemas)
            if versions != self.versions(oid):
                tables[oid] = versions
        return SchemaHistory({**self.tables, **tables}) if tables else self

    def pruned(self, upto: Position) -> SchemaHistory:
        """Without the versions that only changes up to `upto` have, and without tables whose name another table has had since then."""
        taken: dict[TableName, Position] = {}
        for versions in self.tables.values():
            name = versions[-1].schema.name
            taken[name] = max(taken.get(name, Position.ZERO), _named_at(versions))
        return SchemaHistory(
            {
                oid: _needed(versions, upto)
                for oid, versions in self.tables.items()
                if taken[versions[-1].schema.name] > upto or taken[versions[-1].schema.name] == _named_at(versions)
            }
        )

    def store(self, root: Path) -> None:
        """Make it durable, in place of what was there. Only for the one who holds the spool's lock."""
        lines = [_line(version) for versions in self.tables.values() for version in versions]
        storage.replace_bytes(SpoolLayout(root).history, b"".join([_HEAD, *lines]))

    def added_to(self, before: SchemaHistory) -> list[SchemaVersion] | None:
        """What this history has at the end of tables beyond `before`; None if it differs in any other way."""
        added: list[SchemaVersion] = []
        for oid, versions in self.tables.items():
            known = before.versions(oid)
            if versions is not known:
                if versions[: len(known)] != known:
                    return None
                added += versions[len(known) :]
        return added if before.tables.keys() <= self.tables.keys() else None

    @property
    def size(self) -> int:
        """How many versions there are."""
        return sum(map(len, self.tables.values()))


class HistoryRecorder:
    """The writer's hand on the history. What it has seen costs nothing to see again."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._latest: dict[int, TableSchema] = {}
        self._history = SchemaHistory.load(root)
        data = storage.read_bytes(SpoolLayout(root).history)
        self._is_there = data is not None
        self._most = 2 * self._history.size + _SPARE_LINES
        if data is not None and (not data.endswith(b"\n") or self._pruned(self._history).size < self._history.size):
            self._rewrite(self._history)

    def record(self, changes: Iterable[SchemaVersion]) -> None:
        """Call it before the segment is sealed that holds these changes, which are further on in the log than those before."""
        recorded = self._history.recorded([change for change in changes if self._is_new(change.schema)])
        if recorded is self._history:
            return
        added = recorded.added_to(self._history)
        if added is None or not self._is_there or recorded.size > self._most:
            self._rewrite(recorded)
        else:
            storage.append_bytes(SpoolLayout(self._root).history, b"".join(map(_line, added)))
            self._history = recorded

    def _rewrite(self, history: SchemaHistory) -> None:
        self._history = self._pruned(history)
        self._most = 2 * self._history.size + _SPARE_LINES
        self._history.store(self._root)
        self._is_there = True

    def _pruned(self, history: SchemaHistory) -> SchemaHistory:
        """Without what no consumer can meet any more."""
        upto = consumers.minimum(self._root)
        return history if upto is None else history.pruned(upto)

    def _is_new(self, schema: TableSchema) -> bool:
        """A decoder gives out the same object until the shape changes, so looking at every column would be in vain."""
        is_new = self._latest.get(schema.oid) is not schema
        self._latest[schema.oid] = schema
        return is_new


def _by_table(changes: Iterable[SchemaVersion]) -> dict[int, dict[Position, list[TableSchema]]]:
    tables: dict[int, dict[Position, list[TableSchema]]] = {}
    for change in changes:
        tables.setdefault(change.schema.oid, {}).setdefault(change.position, []).append(change.schema)
    return tables


def _merged(versions: tuple[SchemaVersion, ...], position: Position, schemas: list[TableSchema]) -> tuple[SchemaVersion, ...]:
    """`versions` with the shapes that the changes of the transaction at `position` have, one after the other."""
    before = [version for version in versions if version.position < position]
    after = [version for version in versions if version.position > position]
    merged: list[SchemaVersion] = before
    for version in (*(SchemaVersion(position, schema) for schema in schemas), *after):
        if not merged or merged[-1].schema != version.schema:
            merged.append(version)
    return tuple(merged)


def _needed(versions: tuple[SchemaVersion, ...], upto: Position) -> tuple[SchemaVersion, ...]:
    """From the version that changes right after `upto` have, or the last one."""
    first = bisect_right(versions, upto, key=lambda version: version.position)
    return versions[max(0, first - 1) :]


def _named_at(versions: tuple[SchemaVersion, ...]) -> Position:
    """From where on the table has had the name that it has now."""
    name = versions[-1].schema.name
    own = takewhile(lambda version: version.schema.name == name, reversed(versions))
    return min(version.position for version in own)


def _line(version: SchemaVersion) -> bytes:
    document = {"position": str(version.position), **schema_document(version.schema)}
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _parse_version(document: dict[str, Any]) -> SchemaVersion:
    return SchemaVersion(Position.parse(document["position"]), parse_schema(document))
