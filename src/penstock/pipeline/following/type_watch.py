"""Tables whose stored values have another text because a type was altered: a label of an enum, or the attributes of a composite type.

No log shows it, so the catalog is compared with the definitions that the values of each table were read under. The state directory holds
these. If it is lost, or was written by a version that did not keep them, the definitions of the first look count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import SpoolCorruptError
from penstock.pipeline.formats import check_format
from penstock.postgres.connection import Connection
from penstock.postgres.type_texts import TypeText, inspect_type_texts
from penstock.schema import TableName, TableSchema
from penstock.spool import storage

_FILE = "types.json"
_FORMAT = 1

Known = Mapping[TableName, Mapping[int, str]]
"""By table, the signatures of the types that its columns consist of, by OID."""


@dataclass(frozen=True, slots=True)
class AlteredTypes:
    """The columns of a table whose stored values have another text now."""

    columns: tuple[str, ...]
    is_key: bool
    """Whether one of them is part of the key: changes no longer find their rows."""

    def __str__(self) -> str:
        return f"a type was altered, so that stored values of column {', '.join(map(repr, self.columns))} have another text now"


class TypeWatch:
    """Used by the pipeline's main thread alone."""

    def __init__(self, state: Path, is_stopped_by: Callable[[TableName, AlteredTypes], bool]) -> None:
        """`is_stopped_by`: whether the table is resynced for it, or fails. Any other table keeps what it has, and is told of once."""
        self._state = state
        self._is_stopped_by = is_stopped_by
        self._resynced: frozenset[TableName] = frozenset()
        self.open: frozenset[TableName] = frozenset()
        """Tables that are to be resynced or to fail, and are still applied."""

    def look(
        self,
        connection: Connection,
        schemas: Mapping[TableName, TableSchema],
        applied: Collection[TableName],
        resynced: Collection[TableName],
    ) -> dict[TableName, AlteredTypes]:
        """The tables among `applied` whose values have another text than in their targets.

        A copy of a table among `resynced` begins after the first look that names it there. Any other table that is not applied is paused,
        failed or being copied for the first time: what is known of it counts until it is applied.
        """
        known = load_known(self._state)
        types = inspect_table_types(connection, schemas)
        altered = {name: found for name in types if name in applied and (found := types[name].altered(known.get(name, {}))) is not None}
        self.open = frozenset(name for name, found in altered.items() if self._is_stopped_by(name, found))
        begun = set(resynced) - self._resynced
        self._resynced = frozenset(resynced)
        fresh = {name for name in types if name not in known or name in begun or name in applied} - self.open
        save_known(self._state, {name: types[name].signatures if name in fresh else known[name] for name in types})
        return altered


@dataclass(frozen=True, slots=True)
class TableTypes:
    """The types of one table's columns at one moment."""

    columns: Mapping[str, Mapping[int, TypeText]]
    key: Collection[str]

    @property
    def signatures(self) -> dict[int, str]:
        return {oid: text.sign() for types in self.columns.values() for oid, text in types.items()}

    def altered(self, known: Mapping[int, str]) -> AlteredTypes | None:
        """What changed since these signatures were taken; a type that was not there then changed nothing."""
        names = tuple(
            name
            for name, types in self.columns.items()
            if any(oid in known and not text.is_signed(known[oid]) for oid, text in types.items())
        )
        return AlteredTypes(names, any(name in self.key for name in names)) if names else None


def inspect_table_types(connection: Connection, schemas: Mapping[TableName, TableSchema]) -> dict[TableName, TableTypes]:
    """Of each table, also if several are routed into it. One statement, however many tables."""
    declared = {name: _declared(schema) for name, schema in schemas.items()}
    texts = inspect_type_texts(connection, {oid for columns in declared.values() for oids in columns.values() for oid in oids})
    return {
        name: TableTypes(
            {column: {oid: text for root in oids for oid, text in texts.get(root, {}).items()} for column, oids in columns.items()},
            schemas[name].key,
        )
        for name, columns in declared.items()
    }


def _declared(schema: TableSchema) -> dict[str, set[int]]:
    """By column, its types: those of the members may differ."""
    found: dict[str, set[int]] = {}
    for each in (schema,) if schema.members is None else schema.members.schemas:
        for column in each.columns:
            found.setdefault(column.name, set()).add(column.type_oid)
    return found


def remember_types(connection: Connection, state: Path, schemas: Mapping[TableName, TableSchema]) -> None:
    """Before tables are copied for the first time: the definitions that their values are read under."""
    known = load_known(state)
    new = {name: schema for name, schema in schemas.items() if name not in known}
    save_known(state, {**known, **{name: types.signatures for name, types in inspect_table_types(connection, new).items()}})


def load_known(state: Path) -> Known:
    """The definitions that the values in the targets were read under; empty before the first look."""
    data = storage.read_bytes(state / _FILE)
    if data is None:
        return {}
    try:
        document = json.loads(data)
        check_format(document, _FORMAT, state / _FILE)
        return {
            TableName.parse(name): {int(oid): str(signature) for oid, signature in types.items()}
            for name, types in document["tables"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "remove the file if no type was altered since the last run"
        raise SpoolCorruptError(f"{state / _FILE} cannot be understood", hint=hint) from error


def save_known(state: Path, known: Known) -> None:
    """Writes only what differs."""
    if load_known(state) != known:
        tables = {str(name): dict(sorted(types.items())) for name, types in sorted(known.items())}
        storage.replace_bytes(state / _FILE, json.dumps({"format": _FORMAT, "tables": tables}).encode())
