"""Schema changes that only the catalog shows: altered types, and tables that were dropped, renamed or moved
to another schema.

The WAL does not show an altered type. So the type definitions in the catalog are compared with those that
were valid when each table's values were read. The state directory stores these older definitions. If they are
missing, the definitions that the first query finds are used instead.

The target of a dropped, renamed or moved table stays as it is. Under its new name the table counts as another
table, and is copied if the configuration selects it. A table that was `gone` and exists again is copied
again, because its target lacks the changes that were made while it was gone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock import storage
from penstock.config.model import PipelineConfig
from penstock.errors import MembersDifferError, PenstockError, Recovery, SpoolCorruptError
from penstock.pipeline.epoch_log import Epoch
from penstock.pipeline.retries import check_format
from penstock.pipeline.table_states import TableState
from penstock.pipeline.tables import Tables, status_of
from penstock.postgres.catalog import TypeText, inspect_names, inspect_type_texts
from penstock.postgres.connection import Connection
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import Target, Targets

_FILE = "types.json"
_FORMAT = 1

Known = Mapping[TableName, Mapping[int, str]]
"""The signature of each type definition, by table and type OID."""


@dataclass(frozen=True, slots=True)
class AlteredTypes:
    """Columns whose stored values have another text form since a type was altered."""

    columns: tuple[str, ...]
    is_key: bool
    """Whether one of the columns is a key column. Later changes then do not find their rows in the target."""

    def __str__(self) -> str:
        return (
            f"a type was altered, so stored values of column {', '.join(map(repr, self.columns))} have "
            "another text form now"
        )


class TypeWatch:
    """Finds altered types. Used by the pipeline's main thread only."""

    def __init__(self, state: Path, is_stopped_by: Callable[[TableName, AlteredTypes], bool]) -> None:
        """`is_stopped_by` returns whether a table must be resynced, or fail, because of altered types. Any
        other table keeps its rows, and `find_altered` returns it only once.
        """
        self._state = state
        self._is_stopped_by = is_stopped_by
        self._resynced: frozenset[TableName] = frozenset()
        self.open: frozenset[TableName] = frozenset()
        """Tables that must be resynced or fail, and to which epochs still apply changes."""

    def find_altered(
        self,
        connection: Connection,
        schemas: Mapping[TableName, TableSchema],
        applied: Collection[TableName],
        resynced: Collection[TableName],
    ) -> dict[TableName, AlteredTypes]:
        """Return the tables among `applied` whose values now have another text form in the source than in the
        target.

        `resynced` are tables whose resync is ordered. The first call with such a table must happen before its
        copy starts. A table that is neither in `applied` nor in `resynced` is paused, failed or being copied
        for the first time. Its stored definitions do not change until it is in `applied`.
        """
        known = load_known(self._state)
        types = inspect_table_types(connection, schemas)
        altered = {
            name: found
            for name in types
            if name in applied and (found := types[name].altered(known.get(name, {}))) is not None
        }
        self.open = frozenset(name for name, found in altered.items() if self._is_stopped_by(name, found))
        begun = set(resynced) - self._resynced
        self._resynced = frozenset(resynced)
        fresh = {name for name in types if name not in known or name in begun or name in applied} - self.open
        save_known(
            self._state, {name: types[name].signatures if name in fresh else known[name] for name in types}
        )
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
        """Return the columns whose types differ from the signatures `known`; None if no column differs. Types
        that are not in `known` are ignored.
        """
        names = tuple(
            name
            for name, types in self.columns.items()
            if any(oid in known and not text.is_signed(known[oid]) for oid, text in types.items())
        )
        return AlteredTypes(names, any(name in self.key for name in names)) if names else None


def inspect_table_types(
    connection: Connection, schemas: Mapping[TableName, TableSchema]
) -> dict[TableName, TableTypes]:
    """Read the column types of all tables, including routed tables, with one query."""
    declared = {name: _declared(schema) for name, schema in schemas.items()}
    texts = inspect_type_texts(
        connection, {oid for columns in declared.values() for oids in columns.values() for oid in oids}
    )
    return {
        name: TableTypes(
            {
                column: {oid: text for root in oids for oid, text in texts.get(root, {}).items()}
                for column, oids in columns.items()
            },
            schemas[name].key,
        )
        for name, columns in declared.items()
    }


def _declared(schema: TableSchema) -> dict[str, set[int]]:
    """The type OIDs of each column: several if the members of a routed table have different types."""
    found: dict[str, set[int]] = {}
    for each in (schema,) if schema.members is None else schema.members.schemas:
        for column in each.columns:
            found.setdefault(column.name, set()).add(column.type_oid)
    return found


def remember_types(connection: Connection, state: Path, schemas: Mapping[TableName, TableSchema]) -> None:
    """Store the type definitions of new tables before they are copied for the first time."""
    known = load_known(state)
    new = {name: schema for name, schema in schemas.items() if name not in known}
    save_known(
        state,
        {**known, **{name: types.signatures for name, types in inspect_table_types(connection, new).items()}},
    )


def load_known(state: Path) -> Known:
    """Load the signatures of the type definitions that were valid when the targets' values were read. Empty
    before the first query.
    """
    data = storage.read(state / _FILE)
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
        raise SpoolCorruptError(f"{state / _FILE} has invalid content", hint=hint) from error


def save_known(state: Path, known: Known) -> None:
    """Write the signatures if they differ from the stored ones."""
    if load_known(state) != known:
        tables = {str(name): dict(sorted(types.items())) for name, types in sorted(known.items())}
        storage.put(state / _FILE, json.dumps({"format": _FORMAT, "tables": tables}).encode())


Selects = Callable[[TableName], bool]


def drop_reasons(
    connection: Connection, oids: Mapping[TableName, int], selects: Selects
) -> dict[TableName, str]:
    """Return the reason why each of these tables no longer exists under its name. `oids` has the OIDs of the
    tables. `selects` returns whether the configuration selects a table.
    """
    names = inspect_names(connection, list(oids.values()))
    return {name: _reason(name, names.get(oid), selects) for name, oid in oids.items()}


def _reason(name: TableName, now: TableName | None, selects: Selects) -> str:
    if now is None:
        return "it was dropped"
    if now == name:
        return "it became unlogged, or a partition of another table"
    return (
        f"it is called {now} now, {'and copied under that name' if selects(now) else 'which is not selected'}"
    )


def include_dropped(
    connection: Connection, tables: Tables, targets: Targets, last: Epoch | None, config: PipelineConfig
) -> None:
    """Add the tables of the last epoch that the source has dropped to `tables`, because some of their changes
    may not be applied yet. Called at the start of a run.
    """
    found: dict[TableName, Target] = {}
    for name, recorded in (last.tables if last is not None else {}).items():
        if name in tables.sources or not config.has(name) or _differs(tables, name):
            continue
        if recorded.state is TableState.GONE:
            tables.statuses[name] = recorded
        elif recorded.state is not TableState.FAILED and (target := _filled(targets, name)) is not None:
            found[name] = target
            tables.statuses[name] = status_of(target, name, last)
    tables.targets |= found
    tables.gone |= drop_reasons(
        connection, {name: target.source_oid for name, target in found.items()}, config.selects
    )


def _differs(tables: Tables, name: TableName) -> bool:
    """Whether the table is a routed table that failed because its members differ. Such a table was not
    dropped.
    """
    status = tables.statuses.get(name)
    return status is not None and (status.reason or "").startswith(f"{MembersDifferError.code}:")


def _filled(targets: Targets, name: TableName) -> Target | None:
    try:
        target = targets.load_target(name)
    except PenstockError as error:
        if error.recovery is not Recovery.OPERATOR:
            raise
        return None
    return target if target is not None and target.applied is not None else None
