"""Schema history: the schema versions of each table, and the position from which each version holds.

Manifests contain the schemas of their own segment and are deleted with it. The history is kept longer. For
each table, by OID, it has the versions that a consumer may still read, and always the current one. The writer
adds a version before it seals the first segment that uses it, so every schema in a segment is also in the
history.

A version holds from the first transaction that changed rows under it. Several versions in one transaction
have the same position and keep their order.

The file has one line per version and is append-only. A crash may leave an incomplete last line, which is
ignored. The writer rewrites the file without unneeded versions when it starts, and when the file has doubled.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

from penstock import storage
from penstock.errors import SpoolCorruptError
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.spool.manifest import FORMAT, SpoolLayout, parse_document, parse_schema, schema_document
from penstock.spool.retention import released_by_all

_WHERE = "history.jsonl"
_HEAD = json.dumps({"format": FORMAT}).encode() + b"\n"
_SPARE_LINES = 100


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """A table's schema from `position` until its next version."""

    position: Position
    schema: TableSchema


@dataclass(frozen=True, slots=True)
class SchemaHistory:
    """The ordered versions of every table, by OID.

    Immutable: `recorded` and `pruned` return a new history.
    """

    tables: Mapping[int, tuple[SchemaVersion, ...]] = field(default_factory=dict)

    @classmethod
    def load(cls, root: Path) -> Self:
        """Load the history of a spool; empty for a new spool."""
        data = storage.read(SpoolLayout(root).history)
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
            raise SpoolCorruptError(
                f"{_WHERE} is not a history of schemas", hint="restore the file, or delete the spool"
            ) from error
        return cls({oid: tuple(versions) for oid, versions in tables.items()})

    def versions(self, oid: int) -> tuple[SchemaVersion, ...]:
        return self.tables.get(oid, ())

    def at(self, oid: int, position: Position) -> TableSchema | None:
        """Return the schema at the end of the transaction at `position`; None if the table had no change up
        to there.
        """
        versions = self.versions(oid)
        found = bisect_right(versions, position, key=lambda version: version.position)
        return versions[found - 1].schema if found else None

    def current(self, oid: int) -> TableSchema | None:
        versions = self.versions(oid)
        return versions[-1].schema if versions else None

    def keys(self, position: Position) -> dict[int, tuple[str, ...]]:
        """Return the keys, by OID, of tables with changes up to `position`.

        Later versions are ignored: a crash before a seal may have left them.
        """
        schemas = {oid: self.at(oid, position) for oid in self.tables}
        return {oid: schema.key for oid, schema in schemas.items() if schema is not None}

    def recorded(self, changes: Iterable[SchemaVersion]) -> SchemaHistory:
        """Return the history with `changes` added; the same object if they add nothing.

        `changes` are ordered and contain whole transactions. Changes that are captured again add nothing.
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
        """Return the history without versions that were replaced at or before `upto`, and without tables
        whose name was taken by another table before `upto`.
        """
        taken: dict[TableName, Position] = {}
        for versions in self.tables.values():
            name = versions[-1].schema.name
            taken[name] = max(taken.get(name, Position.ZERO), _named_at(versions))
        return SchemaHistory(
            {
                oid: _needed(versions, upto)
                for oid, versions in self.tables.items()
                if taken[versions[-1].schema.name] > upto
                or taken[versions[-1].schema.name] == _named_at(versions)
            }
        )

    def store(self, root: Path) -> None:
        """Replace the file durably. The caller holds the spool's lock."""
        lines = [_line(version) for versions in self.tables.values() for version in versions]
        storage.put(SpoolLayout(root).history, b"".join([_HEAD, *lines]))

    def added_to(self, before: SchemaHistory) -> list[SchemaVersion] | None:
        """Return the versions appended to tables since `before`; None if the histories differ in any other
        way.
        """
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
        """The number of versions."""
        return sum(map(len, self.tables.values()))


class HistoryRecorder:
    """Adds versions to the history; used by the writer. Recording a known schema object takes only one
    comparison.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._latest: dict[int, TableSchema] = {}
        self._history = SchemaHistory.load(root)
        data = storage.read(SpoolLayout(root).history)
        self._exists = data is not None
        self._rewrite_size = 2 * self._history.size + _SPARE_LINES
        if data is not None and (
            not data.endswith(b"\n") or self._pruned(self._history).size < self._history.size
        ):
            self._rewrite(self._history)

    def record(self, changes: Iterable[SchemaVersion]) -> None:
        """Record the schemas of changes before their segment is sealed. Positions must not go back."""
        recorded = self._history.recorded([change for change in changes if self._is_new(change.schema)])
        if recorded is self._history:
            return
        added = recorded.added_to(self._history)
        if added is None or not self._exists or recorded.size > self._rewrite_size:
            self._rewrite(recorded)
        else:
            storage.append(SpoolLayout(self._root).history, b"".join(map(_line, added)))
            self._history = recorded

    def _rewrite(self, history: SchemaHistory) -> None:
        self._history = self._pruned(history)
        self._rewrite_size = 2 * self._history.size + _SPARE_LINES
        self._history.store(self._root)
        self._exists = True

    def _pruned(self, history: SchemaHistory) -> SchemaHistory:
        """Return the history without versions that all consumers have released."""
        upto = released_by_all(self._root)
        return history if upto is None else history.pruned(upto)

    def _is_new(self, schema: TableSchema) -> bool:
        """Whether the schema differs from the last one of its table. The comparison is by identity, since a
        decoder returns the same object until the schema changes.
        """
        is_new = self._latest.get(schema.oid) is not schema
        self._latest[schema.oid] = schema
        return is_new


def _by_table(changes: Iterable[SchemaVersion]) -> dict[int, dict[Position, list[TableSchema]]]:
    tables: dict[int, dict[Position, list[TableSchema]]] = {}
    for change in changes:
        tables.setdefault(change.schema.oid, {}).setdefault(change.position, []).append(change.schema)
    return tables


def _merged(
    versions: tuple[SchemaVersion, ...], position: Position, schemas: list[TableSchema]
) -> tuple[SchemaVersion, ...]:
    """Return `versions`, with those at `position` replaced by `schemas`, and without repetitions."""
    before = [version for version in versions if version.position < position]
    after = [version for version in versions if version.position > position]
    merged: list[SchemaVersion] = before
    for version in (*(SchemaVersion(position, schema) for schema in schemas), *after):
        if not merged or merged[-1].schema != version.schema:
            merged.append(version)
    return tuple(merged)


def _needed(versions: tuple[SchemaVersion, ...], upto: Position) -> tuple[SchemaVersion, ...]:
    """Return the version that holds right after `upto`, and all later ones."""
    first = bisect_right(versions, upto, key=lambda version: version.position)
    return versions[max(0, first - 1) :]


def _named_at(versions: tuple[SchemaVersion, ...]) -> Position:
    """Return the position from which the table has had its current name."""
    name = versions[-1].schema.name
    same_name = takewhile(lambda version: version.schema.name == name, reversed(versions))
    return min(version.position for version in same_name)


def _line(version: SchemaVersion) -> bytes:
    document = {"position": str(version.position), **schema_document(version.schema)}
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _parse_version(document: dict[str, Any]) -> SchemaVersion:
    return SchemaVersion(Position.parse(document["position"]), parse_schema(document))
