"""Finding out, at start, which tables there are and how each one stands."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

import pyarrow as pa

from penstock.capture.blockers import relation_blockers
from penstock.capture.continuity import check_continuity
from penstock.capture.provision import blocked
from penstock.contracts.provisioning import CoverageReport
from penstock.errors import (
    ConnectionLostError,
    MembersDifferError,
    NoTablesError,
    PenstockError,
    PositionGapError,
    Recovery,
    SchemaChangedError,
    SourceError,
    TableError,
    TargetForeignError,
    TargetRewoundError,
    UnsupportedTableError,
)
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.epochs import Epoch
from penstock.pipeline.error_policy import Action, decide, final
from penstock.pipeline.existing_policy import ExistingPolicy
from penstock.pipeline.following.follower import why_anew
from penstock.pipeline.orders import TableOrders, with_orders
from penstock.pipeline.routing import route_tables
from penstock.pipeline.schema_policy import SchemaPolicy, SchemaRule
from penstock.pipeline.states import TableState, TableStatus
from penstock.position import Position
from penstock.postgres.catalog import (
    CatalogTable,
    KeyFault,
    check_mirrorable,
    inspect_key_faults,
    inspect_misnamed,
    inspect_schemas,
    inspect_tables,
    inspect_whole_rows,
)
from penstock.postgres.connection import Connection, connect
from penstock.postgres.horizon import shown_position
from penstock.postgres.publication import inspect_relations
from penstock.retry import Backoff
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import Target, Targets
from penstock.sinks.directories import reserved_schema
from penstock.sinks.layout import Mode, added_names
from penstock.transforms.transform import is_made_by

_LOOK_SECONDS = 10.0
_LOAD_ATTEMPTS = 3
_LOAD_PAUSE_SECONDS = 0.5


@dataclass(slots=True)
class Tables:
    """The tables of a pipeline, by name: what the source has, what the target has, and the state that follows."""

    sources: dict[TableName, CatalogTable] = field(default_factory=dict)
    targets: dict[TableName, Target] = field(default_factory=dict)
    statuses: dict[TableName, TableStatus] = field(default_factory=dict)
    schemas: dict[TableName, TableSchema] = field(default_factory=dict)
    foreign: dict[TableName, ExistingPolicy] = field(default_factory=dict)
    """Those in whose place something stands that the pipeline did not write; and what is to become of that."""
    anew: dict[TableName, str] = field(default_factory=dict)
    """Those whose target is to be copied anew, whatever else is the matter with it; and why."""
    returned: set[TableName] = field(default_factory=set)
    """Those that were gone, and are there again; their targets are no copies of them."""
    gone: dict[TableName, str] = field(default_factory=dict)
    """Those that the source has no more, and why; some of their changes may still be to come."""
    seen_at: Position | None = None
    """Everything that was made before the source was looked at comes up to here."""

    @property
    def going(self) -> list[TableName]:
        """Those that have not failed, and that the source has."""
        return [name for name, status in self.statuses.items() if not status.is_over and name not in self.gone]

    @property
    def capturable(self) -> list[TableName]:
        """What the publication must hold."""
        return [source for name in self.going for source in self.sources_of(name)]

    def sources_of(self, name: TableName) -> tuple[TableName, ...]:
        """The tables of the source that a table of the pipeline consists of."""
        return tuple(source.name for source in self.sources[name].sources) if name in self.sources else (name,)

    @property
    def owners(self) -> dict[TableName, TableName]:
        """By table of the source, the table of the pipeline that it is, or is part of."""
        return {source: name for name in {**self.sources, **self.statuses} for source in self.sources_of(name)}

    @property
    def pending(self) -> list[CatalogTable]:
        return [self.sources[name] for name, status in self.statuses.items() if status.state is TableState.PENDING]

    @property
    def awaiting(self) -> list[TableName]:
        """Adopted tables, of which a copy is being made beside them, or soon will be."""
        return [name for name, status in self.statuses.items() if status.state is TableState.SNAPSHOTTING and status.applied is None]

    @property
    def filled(self) -> dict[TableName, Position]:
        """Where each table stands that has been copied before, and goes on from there."""
        return {
            name: status.applied
            for name, status in self.statuses.items()
            if not status.is_over and status.applied is not None and name not in self.anew and name not in self.gone
        }


@dataclass(frozen=True, slots=True)
class Selection:
    """The tables that a configuration selects, with their shapes; and those that cannot be mirrored, each with its reason."""

    tables: dict[TableName, CatalogTable]
    schemas: dict[TableName, TableSchema]
    refused: dict[TableName, PenstockError]
    seen_at: Position | None = None
    """Everything that was made before all of this was seen comes up to here."""

    @property
    def sources(self) -> list[CatalogTable]:
        """The tables of the source that these are made of, without those that are refused."""
        return [source for name, table in self.tables.items() if name not in self.refused for source in table.sources]

    def knows(self, name: TableName) -> bool:
        """Whether the source has the table, or those that make it, however unfit they are."""
        return name in self.tables or isinstance(self.refused.get(name), MembersDifferError)

    @property
    def source_schemas(self) -> list[TableSchema]:
        """The shapes of the tables of the source."""
        return [each for schema in self.schemas.values() for each in ((schema,) if schema.members is None else schema.members.schemas)]


def select_tables(
    connection: Connection,
    config: PipelineConfig,
    *,
    asks_spark: bool = True,
    seen: Callable[[Connection], Position | None] = shown_position,
) -> Selection:
    """Look at the source. A table that is named and is not there is refused; one that no pattern matches is not missed.

    `seen` tells, once the catalog has answered, where all that committed before is: `CaptureSide.seen`, for whoever acts on it.

    What was ordered about single tables counts as if the file said it. Spark is started if it takes that to say whether a query fits its
    table; without `asks_spark` it is taken to fit.
    """
    config = with_orders(config)
    tables = {table.name: table for table in inspect_tables(connection) if _is_selected(config, table)}
    schemas = inspect_schemas(connection, tables.values(), config.type_policy, config.published_by)
    selection = Selection(tables, schemas, {}, seen(connection))
    faults = inspect_key_faults(connection, selection.schemas.values())
    keyless = [schema.oid for schema in selection.schemas.values() if not schema.key]
    # What triggers write down always has the whole old row.
    whole = set(keyless) if config.source.capture == "trigger" else inspect_whole_rows(connection, keyless)
    for name, schema in selection.schemas.items():
        route = config.route_of(name)
        mode = config.mode_of(name if route is None else route.into)
        needs_key = mode is not Mode.APPEND and not (mode is Mode.MIRROR and schema.oid in whole)
        try:
            check_mirrorable(schema, faults.get(name, KeyFault.MISSING) if needs_key else None)
            transform = config.transform_of(name)
            if route is not None and transform is not None:
                raise UnsupportedTableError(
                    f"table {name} is routed into {route.into}, and a rule transforms its columns or rows: it cannot be both",
                    hint="take columns:, where: and sql: out of the rules that select it, or into:",
                )
            if transform is None:
                check_names(schema, mode)
            elif asks_spark or not transform.needs_spark(schema):
                check_names(transform.schema(schema), mode)
        except TableError as error:
            selection.refused[name] = error
    misnamed = {each.name: each.error() for each in inspect_misnamed(connection).values() if each.is_table and config.selects(each.name)}
    selection.refused.update(misnamed)
    unknown = [name for name in config.named_tables if name not in tables and name not in misnamed]
    for blocker in relation_blockers(None, inspect_relations(connection, "", unknown) if unknown else ()):
        selection.refused.setdefault(blocker.tables[0], blocked([blocker]))
    if config.is_routing:
        check = lambda schema: check_names(schema, config.mode_of(schema.name))  # noqa: E731
        route_tables(selection.tables, selection.schemas, selection.refused, config.route_of, check)
    if config.sink.postgres is None:
        selection.refused.update({name: found for name in selection.tables if (found := reserved_schema(name)) is not None})
    return selection


def check_names(schema: TableSchema, mode: Mode) -> None:
    """Raise if a column has the name of one that the mode adds; Spark does not tell upper case from lower."""
    taken = [name for name in schema.column_names if name.casefold() in added_names(mode)]
    if taken:
        raise UnsupportedTableError(
            f"table {schema.name} has a column named {taken[0]!r}, a name that the mode {mode} needs for itself",
            hint="rename the column, exclude the table, or choose another mode for it",
        )


def check_selected(selection: Selection, source: str) -> None:
    """Raise if there is nothing to mirror: for the reason that what is named was refused for, if something is."""
    if not selection.tables:
        hint = "check tables: in the configuration, case counts; `penstock run` without --once waits until a pattern matches"
        raise next(iter(selection.refused.values()), NoTablesError(f"no table of {source} matches a pattern of tables:", hint=hint))


def await_tables(
    config_of: Callable[[], PipelineConfig], tell: Callable[[str], None], pause: Callable[[float], bool]
) -> PipelineConfig | None:
    """Wait until a pattern matches a table, and give the configuration by then; None if `pause` says that it is time to stop.

    The source is asked every ten seconds, and `tell` is called once. A table that is named is not waited for: without it, it is an error.
    """
    is_told = False
    while True:
        config = config_of()
        with connect(config.source.address()) as connection:
            if is_any_selected(connection, config):
                return config
        if not is_told:
            source = config.source.address().describe()
            tell(f"no table of {source} matches a pattern of tables: yet; looking again every {_LOOK_SECONDS:.0f} s")
            is_told = True
        if pause(_LOOK_SECONDS):
            return None


def is_any_selected(connection: Connection, config: PipelineConfig) -> bool:
    """Whether a table is named, or one that exists matches a pattern."""
    config = with_orders(config)
    return bool(config.named_tables) or any(_is_selected(config, table) for table in inspect_tables(connection))


def _is_selected(config: PipelineConfig, table: CatalogTable) -> bool:
    """The change table of `capture: trigger` is never one of the pipeline's."""
    return config.selects(table.name) and not (config.source.capture == "trigger" and table.name.schema == config.slot)


def inspect_pipeline(
    selection: Selection,
    sink: Targets,
    last: Epoch | None,
    rule_of: Callable[[TableName], SchemaRule] = lambda _: SchemaRule(),
    existing_of: Callable[[TableName], ExistingPolicy] = lambda _: ExistingPolicy.REFUSE,
    *,
    is_alone: bool = True,
) -> Tables:
    """Look at the target too. What one table cannot do fails that table alone.

    A target that cannot be read is tried again a few times. If that is so for all of them, and `is_alone` says that the pipeline has no
    other tables, what they share is at fault, and it is raised.
    """
    tables = Tables(dict(selection.tables), schemas=dict(selection.schemas), seen_at=selection.seen_at)
    refused = {**refuse_indistinct(selection.tables, sink.tells_apart, sink.describe), **selection.refused}
    found = {name: _LoadedTarget.of(sink, name) for name in selection.schemas if name not in refused}
    refused |= _unreadable(found.values(), is_alone=is_alone)
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
            reason = why_anew(schema, target, rule_of(name).transform) if rule_of(name).renews else None
            if reason is not None:
                tables.anew[name] = reason
        tables.statuses[name] = status_of(tables.targets.get(name), name, last)
    return tables


@dataclass(frozen=True, slots=True)
class _LoadedTarget:
    """The target of one table as a start finds it."""

    name: TableName
    target: Target | None = None
    refusal: PenstockError | None = None
    unreadable: PenstockError | None = None
    """It could not be read, however often that was tried."""

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


def _unreadable(loaded: Collection[_LoadedTarget], *, is_alone: bool) -> dict[TableName, PenstockError]:
    """Tables whose target cannot be read. Raises if that is so for all tables of the pipeline: then what they share is at fault."""
    found = {each.name: each.unreadable for each in loaded if each.unreadable is not None}
    if found and is_alone and len(found) == len(loaded):
        raise next(iter(found.values()))
    return {name: final(error, name) for name, error in found.items()}


def _place_foreign(tables: Tables, name: TableName, error: TargetForeignError, policy: ExistingPolicy) -> None:
    if policy is ExistingPolicy.REFUSE:
        refused = TargetForeignError(error.message, hint=f"{error.hint}; or set existing: adopt, or existing: replace, for {name}")
        tables.statuses[name] = TableStatus.failed(refused, None)
    else:
        tables.foreign[name] = policy
        tables.statuses[name] = TableStatus(TableState.PENDING)


def _is_back(name: TableName, last: Epoch, rule: SchemaRule) -> bool:
    """Whether the source has a table again that was gone. What happened to it meanwhile, if it is the same one, is not in its target."""
    recorded = last.tables.get(name)
    if recorded is None or recorded.state is not TableState.GONE:
        return False
    if not rule.renews:
        raise SchemaChangedError(
            f"table {name} was gone for a while: {recorded.reason}; and a new copy would have nothing of what its target holds",
            hint=f"penstock tables resync {name} copies it as it is now",
        )
    return True


def refuse_indistinct(
    names: Iterable[TableName], tells_apart: Callable[[TableName, TableName], bool], describe: Callable[[TableName], str]
) -> dict[TableName, PenstockError]:
    """Tables whose names differ only in case, where the target has but one place for them: whichever came last would win."""
    folded: dict[str, list[TableName]] = {}
    for name in names:
        folded.setdefault(str(name).casefold(), []).append(name)
    refused: dict[TableName, PenstockError] = {}
    for alike in folded.values():
        if len(alike) > 1 and not tells_apart(alike[0], alike[1]):
            listed = ", ".join(map(str, alike))
            for name in alike:
                refused[name] = UnsupportedTableError(
                    f"the names of {listed} differ only in case, and {describe(name)} is the same place for all of them",
                    hint="rename or exclude all of them but one",
                )
    return refused


def _check_same(schema: TableSchema, target: Target | None, place: str, rule: SchemaRule) -> None:
    """A target that was filled from another table of the same name, or from one of another shape, would go on with rows that are wrong.

    By most policies that is for the log to show, or for a copy to mend.
    """
    if target is None or target.applied is None or rule.renews:
        return
    if not is_made_by(target, rule.transform):
        raise SchemaChangedError(
            f"columns:, where: or sql: of table {schema.name} changed since {place} was filled",
            hint=f"put them back, or penstock tables resync {schema.name}, or remove {place} and run again to copy the table anew",
        )
    schema = schema if rule.transform is None else rule.transform.schema(schema)
    found = pa.schema([pa.field(column.name, column.arrow_type) for column in schema.columns])
    is_same = schema.key == target.key and found.equals(target.schema)
    if schema.oid != target.source_oid or (rule.policy is SchemaPolicy.STOP and not is_same):
        raise SchemaChangedError(
            f"table {schema.name} was re-created, or changed its columns or its key, since {place} was filled",
            hint=f"remove {place} and run again to copy the table anew",
        )


def fail_blocked(tables: Tables, report: CoverageReport) -> None:
    """Tables whose changes would not arrive, or not whole. If that is so for all of them, nothing starts, and every reason is told."""
    reasons = {name: blocker for blocker in reversed(report.blockers) for name in blocker.tables}
    if reasons.keys() >= set(tables.capturable):
        raise blocked(report.blockers)
    owners = tables.owners
    for source, blocker in reasons.items():
        name = owners.get(source, source)
        tables.statuses[name] = TableStatus.failed(blocked([blocker]), tables.statuses[name].applied)


def pause_ordered(tables: Tables, orders: TableOrders) -> None:
    for name, status in tables.statuses.items():
        if name in orders.paused and not status.is_over:
            tables.statuses[name] = replace(status, state=TableState.PAUSED)


def fail_unpublished(tables: Tables, added: Iterable[TableName], describe: Callable[[TableName], str]) -> None:
    """Tables that were filled before and have not been published since: their changes in between are in no log."""
    owners = tables.owners
    for source in added:
        name = owners.get(source, source)
        if name in tables.filled:
            error = TargetRewoundError(
                f"table {source} was not in the publication any more, so changes of it are missing",
                hint=f"remove {describe(name)} and run again to copy the table anew",
            )
            tables.statuses[name] = TableStatus.failed(error, tables.statuses[name].applied)


def status_of(target: Target | None, name: TableName, last: Epoch | None) -> TableStatus:
    """The target owns the position; the record of epochs adds that nothing of this table lies between the two."""
    recorded = last.tables.get(name) if last is not None else None
    if target is None or target.applied is None:
        return TableStatus(TableState.PENDING)
    if recorded is None or last is None:
        return TableStatus(TableState.CATCHING_UP, target.applied, target.applied)
    if recorded.is_over:
        return recorded
    if recorded.committed is not None and target.applied < recorded.committed:
        return TableStatus(TableState.CATCHING_UP, target.applied, target.applied)
    if recorded.state is not TableState.STREAMING:
        # That epoch was not for this table: it was still being copied, or paused.
        return TableStatus(TableState.CATCHING_UP, max(target.applied, recorded.applied or target.applied), target.applied)
    return TableStatus(TableState.CATCHING_UP, max(target.applied, last.position), target.applied)


def fail_over_holes(
    tables: Tables,
    ground: tuple[Position, Position] | None,
    confirmed: Position,
    slot: str,
    describe: Callable[[TableName], str],
    *,
    is_alone: bool = True,
) -> None:
    """Tables whose next change can no longer be had. If that is so for all that there are, the slot is at fault, and nothing starts."""
    holes: dict[TableName, PositionGapError] = {}
    for name, applied in tables.filled.items():
        try:
            check_continuity(applied, ground, confirmed, slot)
        except PositionGapError as error:
            holes[name] = error
    if holes and is_alone and len(holes) == len(tables.filled):
        raise next(iter(holes.values()))
    for name in holes:
        rewound = TargetRewoundError(
            f"{describe(name)} holds {name} only up to {tables.statuses[name].applied}, and the changes after that are gone",
            hint=f"remove {describe(name)} and run again to copy the table anew",
        )
        tables.statuses[name] = TableStatus.failed(rewound, tables.statuses[name].applied)
