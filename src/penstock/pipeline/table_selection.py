"""Select the tables of a pipeline at start, and determine the state of each one."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from penstock.capture.provision import blocked, relation_blockers
from penstock.config.model import PipelineConfig
from penstock.config.policies import ExistingPolicy, SchemaPolicy, SchemaRule
from penstock.errors import (
    ConnectionLostError,
    MembersDifferError,
    NoTablesError,
    PenstockError,
    Recovery,
    SchemaChangedError,
    SourceError,
    TableError,
    TargetForeignError,
    UnsupportedTableError,
)
from penstock.pipeline.epoch_log import Epoch
from penstock.pipeline.error_policy import Action, decide, final
from penstock.pipeline.routing import route_tables
from penstock.pipeline.schema_changes.tracker import find_resync_reason, is_retyped
from penstock.pipeline.sources.adapter import source_adapter
from penstock.pipeline.sources.base import SourceAdapter
from penstock.pipeline.table_overrides import with_overrides
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.pipeline.tables import Tables, status_of
from penstock.position import Position
from penstock.postgres.catalog import (
    CatalogTable,
    KeyFault,
    check_mirrorable,
    inspect_key_faults,
    inspect_misnamed,
    inspect_schemas,
    inspect_tables,
)
from penstock.postgres.connection import Connection, connect
from penstock.postgres.consistent_read import shown_position
from penstock.postgres.publication import inspect_relations
from penstock.retry import Backoff
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import Target, Targets, reserved_schema
from penstock.sinks.modes import Mode
from penstock.transforms.transform import is_made_by

_QUERY_SECONDS = 10.0
_LOAD_ATTEMPTS = 3
_LOAD_PAUSE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Selection:
    """The tables that a configuration selects, with their schemas. `refused` has the selected tables that
    cannot be mirrored, each with the reason.
    """

    tables: dict[TableName, CatalogTable]
    schemas: dict[TableName, TableSchema]
    refused: dict[TableName, PenstockError]
    seen_at: Position | None = None
    """A position at or after everything that was committed before the catalog was read."""

    @property
    def sources(self) -> list[CatalogTable]:
        """The source tables of the selected tables, without refused ones."""
        return [
            source
            for name, table in self.tables.items()
            if name not in self.refused
            for source in table.sources
        ]

    def knows(self, name: TableName) -> bool:
        """Whether the source has the table. For a routed table: whether it has the members, even if their
        schemas differ.
        """
        return name in self.tables or isinstance(self.refused.get(name), MembersDifferError)

    @property
    def source_schemas(self) -> list[TableSchema]:
        """The schemas of the source tables."""
        return [
            each
            for schema in self.schemas.values()
            for each in ((schema,) if schema.members is None else schema.members.schemas)
        ]


def select_tables(
    connection: Connection,
    config: PipelineConfig,
    *,
    asks_spark: bool = True,
    seen: Callable[[Connection], Position | None] = shown_position,
) -> Selection:
    """Read the catalog and select tables. A table that the configuration names and that does not exist is
    refused. A pattern may match no table.

    `seen` returns the position for `Selection.seen_at`. A caller that uses this position passes
    `SourceAdapter.seen`.

    Operator overrides count as part of the configuration. Spark is started only if a transform has a query
    that only Spark can check. Without `asks_spark`, such a query is not checked.
    """
    config = with_overrides(config)
    source = source_adapter(config)
    tables = {
        table.name: table for table in inspect_tables(connection) if _is_selected(config, source, table)
    }
    schemas = inspect_schemas(connection, tables.values(), config.type_policy, config.published_by)
    selection = Selection(tables, schemas, {}, seen(connection))
    faults = inspect_key_faults(connection, selection.schemas.values())
    keyless = [schema.oid for schema in selection.schemas.values() if not schema.key]
    whole = source.whole_rows(connection, keyless)
    for name, schema in selection.schemas.items():
        route = config.route_of(name)
        mode = config.source_mode(name)
        needs_key = mode.needs_key(has_old_rows=schema.oid in whole)
        try:
            check_mirrorable(schema, faults.get(name, KeyFault.MISSING) if needs_key else None)
            transform = config.transform_of(name)
            if route is not None and transform is not None:
                raise UnsupportedTableError(
                    f"table {name} is routed into {route.into}, and a rule transforms its columns or rows; "
                    "these cannot be combined",
                    hint="remove columns:, where: and sql: from the rules that select it, or remove into:",
                )
            if transform is None:
                check_names(schema, mode)
            elif asks_spark or not transform.needs_spark(schema):
                check_names(transform.schema(schema), mode)
        except TableError as error:
            selection.refused[name] = error
    misnamed = {
        each.name: each.error()
        for each in inspect_misnamed(connection).values()
        if each.is_table and config.selects(each.name)
    }
    selection.refused.update(misnamed)
    unknown = [name for name in config.named_tables if name not in tables and name not in misnamed]
    for blocker in relation_blockers(None, inspect_relations(connection, "", unknown) if unknown else ()):
        selection.refused.setdefault(blocker.tables[0], blocked([blocker]))
    if config.is_routing:
        check = lambda schema: check_names(schema, config.mode_of(schema.name))  # noqa: E731
        route_tables(selection.tables, selection.schemas, selection.refused, config.route_of, check)
    if config.sink.postgres is None:
        selection.refused.update(
            {name: found for name in selection.tables if (found := reserved_schema(name)) is not None}
        )
    return selection


def check_names(schema: TableSchema, mode: Mode) -> None:
    """Raise an error if a column has the name of a column that the table mode adds. The check ignores case,
    as Spark does.
    """
    taken = [name for name in schema.column_names if name.casefold() in mode.added_names]
    if taken:
        raise UnsupportedTableError(
            f"table {schema.name} has a column named {taken[0]!r}, which the mode {mode} adds",
            hint="rename the column, exclude the table, or choose another mode for it",
        )


def check_selected(selection: Selection, source: str) -> None:
    """Raise an error if no table can be mirrored: the error of a refused table, or `NoTablesError`."""
    if not selection.tables:
        hint = (
            "check the setting `tables` in the configuration (names are case-sensitive); "
            "`penstock run` without --once waits until a pattern matches"
        )
        raise next(
            iter(selection.refused.values()),
            NoTablesError(f"no table of {source} matches a pattern of tables:", hint=hint),
        )


def await_tables(
    config_of: Callable[[], PipelineConfig], tell: Callable[[str], None], pause: Callable[[float], bool]
) -> PipelineConfig | None:
    """Wait until the configuration names a table, or a pattern matches one. Returns the configuration with
    the current tables; None if `pause` returns True.

    The source is queried every ten seconds. If no table is found at once, `tell` is called with a message,
    but only once.
    """
    is_reported = False
    while True:
        config = config_of()
        with connect(config.source.address()) as connection:
            if is_any_selected(connection, config):
                return config
        if not is_reported:
            source = config.source.address().describe()
            tell(
                f"no table of {source} matches a pattern of tables: yet; looking again every "
                f"{_QUERY_SECONDS:.0f} s"
            )
            is_reported = True
        if pause(_QUERY_SECONDS):
            return None


def is_any_selected(connection: Connection, config: PipelineConfig) -> bool:
    """Whether the configuration names a table, or a pattern matches an existing one."""
    config = with_overrides(config)
    return bool(config.named_tables) or any(
        _is_selected(config, source_adapter(config), table) for table in inspect_tables(connection)
    )


def _is_selected(config: PipelineConfig, source: SourceAdapter, table: CatalogTable) -> bool:
    return config.selects(table.name) and not source.is_internal(table.name)


def inspect_pipeline(
    selection: Selection,
    sink: Targets,
    last: Epoch | None,
    rule_of: Callable[[TableName], SchemaRule] = lambda _: SchemaRule(),
    existing_of: Callable[[TableName], ExistingPolicy] = lambda _: ExistingPolicy.REFUSE,
    *,
    on_none_readable: Callable[[Mapping[TableName, PenstockError]], None] = lambda _errors: None,
) -> Tables:
    """Determine the state of each table from source, target and the last epoch record. An error of one table
    fails only that table.

    If a target cannot be read after a few attempts, its table fails. If no target can be read,
    `on_none_readable` is called with the errors before the tables fail; it raises an error if the cause may
    be shared.
    """
    tables = Tables(dict(selection.tables), schemas=dict(selection.schemas), seen_at=selection.seen_at)
    refused = {**find_indistinct(selection.tables, sink.are_distinct, sink.describe), **selection.refused}
    found = {name: _LoadedTarget.of(sink, name) for name in selection.schemas if name not in refused}
    tables.unreadable = _find_unreadable(found.values(), sink.describe, on_none_readable)
    refused |= tables.unreadable
    for name, error in refused.items():
        tables.statuses[name] = TableStatus.failed(error, None)
    for name, schema in selection.schemas.items():
        if name in refused:
            continue
        try:
            target = found[name].get()
            if target is not None and last is not None and _is_back(name, last, rule_of(name)):
                tables.returned.add(name)
                target = None
            _check_settings(tables, schema, target, rule_of(name), last)
            _check_same(schema, target, sink.describe(name), rule_of(name))
        except TargetForeignError as error:
            _place_foreign(tables, name, error, existing_of(name))
            continue
        except PenstockError as error:
            if error.recovery is not Recovery.OPERATOR or isinstance(error, SourceError):
                raise
            tables.statuses[name] = TableStatus.failed(error, None)
            continue
        if target is not None and target.applied is not None:
            tables.targets[name] = target
            reason = (
                find_resync_reason(schema, target, rule_of(name).transform)
                if rule_of(name).auto_resync
                else None
            )
            if reason is not None:
                tables.resyncs[name] = reason
        tables.statuses[name] = status_of(tables.targets.get(name), name, last)
    return tables


@dataclass(frozen=True, slots=True)
class _LoadedTarget:
    """The result of reading the target of one table at start-up."""

    name: TableName
    target: Target | None = None
    refusal: PenstockError | None = None
    unreadable: PenstockError | None = None
    """The last error, if every attempt to read the target failed."""

    @classmethod
    def of(cls, sink: Targets, name: TableName) -> _LoadedTarget:
        backoff = Backoff(_LOAD_PAUSE_SECONDS)
        while True:
            try:
                return cls(name, sink.load_target(name))
            except Exception as error:
                pause = backoff.fail()
                verdict = decide(error, name, "reading the target of")
                if verdict.action is Action.STOP or isinstance(error, ConnectionLostError):
                    raise
                if verdict.action is Action.FAIL_TABLE:
                    return cls(name, refusal=verdict.error)
                if backoff.failures >= _LOAD_ATTEMPTS:
                    return cls(name, unreadable=verdict.error)
                time.sleep(pause)

    def get(self) -> Target | None:
        if self.refusal is not None:
            raise self.refusal
        return self.target


def _find_unreadable(
    loaded: Collection[_LoadedTarget],
    describe: Callable[[TableName], str],
    on_none_readable: Callable[[Mapping[TableName, PenstockError]], None],
) -> dict[TableName, PenstockError]:
    """Return the tables whose target cannot be read. The error of each is the one with which the table
    fails.
    """
    found = {each.name: each.unreadable for each in loaded if each.unreadable is not None}
    if found and len(found) == len(loaded):
        on_none_readable(found)
    return {
        name: final(type(error)(error.message, hint=unreadable_hint(describe(name))), name)
        for name, error in found.items()
    }


def unreadable_hint(place: str) -> str:
    """Return the hint for a target that cannot be read. Only an operator may remove such a target, because it
    may belong to another program, or may be restored.
    """
    return f"restore {place}, or remove it, so that the table is copied as a new one"


def _place_foreign(
    tables: Tables, name: TableName, error: TargetForeignError, policy: ExistingPolicy
) -> None:
    if policy is ExistingPolicy.REFUSE:
        refused = TargetForeignError(
            error.message, hint=f"{error.hint}; or set existing: adopt, or existing: replace, for {name}"
        )
        tables.statuses[name] = TableStatus.failed(refused, None)
    else:
        tables.foreign[name] = policy
        tables.statuses[name] = TableStatus(TableState.PENDING)


def _is_back(name: TableName, last: Epoch, rule: SchemaRule) -> bool:
    """Whether a table that was `gone` exists again. Its target then lacks the changes that were made while
    the table was gone.
    """
    recorded = last.tables.get(name)
    if recorded is None or recorded.state is not TableState.GONE:
        return False
    if not rule.auto_resync:
        raise SchemaChangedError(
            f"table {name} did not exist for a time: {recorded.reason}; a resync would lose the rows that "
            "only its target has",
            hint=f"penstock tables resync CONFIG {name} copies it with its current schema",
        )
    return True


def find_indistinct(
    names: Iterable[TableName],
    are_distinct: Callable[[TableName, TableName], bool],
    describe: Callable[[TableName], str],
) -> dict[TableName, PenstockError]:
    """Return an error for each table whose name differs from another's only in case, if the target does not
    distinguish case. Such tables would overwrite each other.
    """
    folded: dict[str, list[TableName]] = {}
    for name in names:
        folded.setdefault(str(name).casefold(), []).append(name)
    refused: dict[TableName, PenstockError] = {}
    for alike in folded.values():
        if len(alike) > 1 and not are_distinct(alike[0], alike[1]):
            listed = ", ".join(map(str, alike))
            for name in alike:
                refused[name] = UnsupportedTableError(
                    f"the names of {listed} differ only in case, and {describe(name)} is the same target "
                    "for all of them",
                    hint="rename or exclude all of them but one",
                )
    return refused


def _check_settings(
    tables: Tables, schema: TableSchema, target: Target | None, rule: SchemaRule, last: Epoch | None
) -> None:
    """Raise an error if the target was filled with other settings, and a resync would lose rows that only the
    target has.
    """
    changed = None if target is None or target.applied is None else find_changed_setting(schema, target, rule)
    if changed is None:
        return
    error = SchemaChangedError(
        f"{changed} of table {schema.name} changed since its target was filled",
        hint="restore the setting; or, to discard what only the target has, penstock tables resync CONFIG "
        f"{schema.name}",
    )
    recorded = None if last is None else last.tables.get(schema.name)
    if recorded is None or not recorded.is_over:
        tables.reconfigured[schema.name] = error
    raise error


def find_changed_setting(schema: TableSchema | None, target: Target, rule: SchemaRule) -> str | None:
    """Return the setting with which the target was filled and which has another value now; None if there is
    none, or if the table is resynced automatically. Without `schema`, only the transform is compared.
    """
    if rule.auto_resync:
        return None
    if not is_made_by(target, rule.transform):
        return "columns:, where:, sql: or hash_key:"
    return "types:" if schema is not None and is_retyped(schema, target, rule.transform) else None


def check_configuration(tables: Tables, ordered: Collection[TableName]) -> None:
    """Raise an error if settings of tables changed that their targets cannot follow, unless a resync of these
    tables is ordered. Otherwise the tables would fail, and would miss changes until the setting is restored.
    """
    found = {name: error for name, error in tables.reconfigured.items() if name not in ordered}
    if found:
        raise SchemaChangedError(
            "; ".join(error.message for error in found.values()),
            hint="restore the settings; or, to discard what only the targets have: penstock tables resync "
            f"CONFIG {' '.join(map(str, found))}",
        )


def _check_same(schema: TableSchema, target: Target | None, place: str, rule: SchemaRule) -> None:
    """Raise an error if a target was filled from another table of the same name, or from another schema.

    The check is skipped if the table is resynced automatically.
    """
    if target is None or target.applied is None or rule.auto_resync:
        return
    schema = schema if rule.transform is None else rule.transform.schema(schema)
    found = pa.schema([pa.field(column.name, column.arrow_type) for column in schema.columns])
    is_same = schema.key == target.key and found.equals(target.schema)
    if schema.oid != target.source_oid or (rule.policy is SchemaPolicy.STOP and not is_same):
        raise SchemaChangedError(
            f"table {schema.name} was re-created, or changed its columns or its key, since {place} was "
            "filled",
            hint=f"remove {place} and run again to copy the table again",
        )
