"""`check_pipeline`: test the requirements of a run before its first row, and report all problems at once.

The check inspects the source in the same order as a run, with the same functions. It executes actions that
can be undone: it opens connections, creates a temporary slot, creates the publication and rolls this back,
reads one block of each table as a snapshot does, and writes and removes files and a table. It also inspects
the results of earlier runs. It starts Spark only if a table has a query that only Spark can parse.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from penstock.capture.polling.settings import PollingSettings
from penstock.capture.polling.tables import inspect_polled
from penstock.capture.provision import plan_coverage, reading_blockers
from penstock.capture.trigger.provision import check_usable
from penstock.capture.trigger.provision import plan_trigger_coverage as plan_triggers
from penstock.config.model import PipelineConfig, load_config
from penstock.errors import LockWaitError, NoTablesError, PenstockError, PrivilegeError, SlotBusyError
from penstock.lag import OpenTransaction, unreserved_slot
from penstock.pipeline.checks.environment import check_places, warn_of_tls
from penstock.pipeline.checks.findings import CheckReport, Step
from penstock.pipeline.checks.targets import check_continuing
from penstock.pipeline.sources.adapter import source_adapter
from penstock.pipeline.table_selection import Selection, select_tables
from penstock.postgres.catalog import inspect_outside, inspect_whole_rows, outside_kind
from penstock.postgres.chunks import plan_chunks, probe_chunks
from penstock.postgres.connection import (
    Connection,
    SourceAddress,
    connect,
    connect_replication,
    replication_command,
    source_errors,
)
from penstock.postgres.consistent_read import export_consistent_read
from penstock.postgres.publication import ensure_trigger, load_key
from penstock.postgres.server import (
    Limits,
    Role,
    inspect_limits,
    inspect_owner_code,
    inspect_role,
    inspect_unreadable,
    limit_faults,
)
from penstock.postgres.slot import (
    Slot,
    check_failover,
    check_idle,
    check_slot,
    inspect_server,
    inspect_slot,
    server_faults,
)
from penstock.postgres.snapshot_export import ExportedSnapshot, export_snapshot
from penstock.schema import Column, TableName, TableSchema
from penstock.transforms.casts import typed


def warn_of_filters(step: Step, connection: Connection, config: PipelineConfig, selection: Selection) -> None:
    """Warn of filters and queries that need TOAST values which updates may lack. With REPLICA IDENTITY FULL,
    updates have these values in the old row.
    """
    looked = ((name, _lacking(name, schema, config, selection)) for name, schema in selection.schemas.items())
    found = {name: lack for name, lack in looked if lack is not None}
    oids = {name: selection.schemas[name].oid for name in found}
    whole = inspect_whole_rows(connection, list(oids.values())) if oids else ()
    for name, (code, words) in found.items():
        if oids[name] not in whole:
            step.warn(code, words, f"ALTER TABLE {name} REPLICA IDENTITY FULL;", (name,))


def warn_of_old_rows(
    step: Step, connection: Connection, config: PipelineConfig, selection: Selection
) -> None:
    """Warn of tables with mode `append` whose old rows are not completely in the WAL, because they lack
    REPLICA IDENTITY FULL.
    """
    logs = {
        name: schema.oid
        for name, schema in selection.schemas.items()
        if name not in selection.refused and config.mode_of(name).is_log and schema.members is None
    }
    whole = inspect_whole_rows(connection, list(logs.values()))
    for name in (name for name, oid in logs.items() if oid not in whole):
        words = f"old_rows is set, and the WAL has only the key of old rows of {name}"
        step.warn("no-old-rows", words, f"ALTER TABLE {name} REPLICA IDENTITY FULL;", (name,))


def _lacking(
    name: TableName, schema: TableSchema, config: PipelineConfig, selection: Selection
) -> tuple[str, str] | None:
    transform = None if name in selection.refused else config.transform_of(name)
    if transform is None or not schema.key or schema.members is not None:
        return None
    fitted = transform.fit(schema)
    long = {
        column.name for column in schema.columns if column.name not in schema.key and _may_be_long(column)
    }
    if long and any(column.name not in schema.key for column in fitted.condition_columns):
        words = (
            f"an update that moves a row of {name} into its filter may lack unchanged TOAST values, "
            "and fail the table"
        )
        return "filter-may-lack-values", words
    for each in fitted.computed:
        if len(each.needs) > 1 and long & set(each.needs):
            words = (
                f"{each.name!r} of {name} uses several columns; an update may lack unchanged TOAST "
                "values of them, and fail the table"
            )
            return "query-may-lack-values", words
    return None


def _may_be_long(column: Column) -> bool:
    kind = typed(column).arrow_type
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_nested(kind))


PATIENCE_WAITS = 5
"""How long, in seconds, an open transaction may delay the temporary slot."""

_ONE_CHUNK_BYTES = 1 << 40
_SHORT_SENDER_TIMEOUT_MS = 5_000
_SMALL_DECODING_MEMORY_KB = 4_096
_STEPS = ("server", "replication", "slot", "tables", "publication", "reading", "continuity")
SOURCE_STEPS = ("connection", *_STEPS)


def check_source(config: PipelineConfig, address: SourceAddress) -> list[Step]:
    connection_step = Step("connection", address.describe())
    try:
        with connect(address, "penstock check") as connection:
            warn_of_tls(connection_step, connection, "source.dsn")
            return [connection_step, *_SourceCheck(config, address, connection).run()]
    except PenstockError as error:
        connection_step.problem(error)
    return [connection_step, *(Step(name, is_skipped=True) for name in _STEPS)]


class _SourceCheck:
    """Checks the source over one connection. Later steps use the results of earlier ones."""

    def __init__(self, config: PipelineConfig, address: SourceAddress, connection: Connection) -> None:
        self._config = config
        self._address = address
        self._connection = connection
        self._role: Role = inspect_role(connection)
        self._snapshot: ExportedSnapshot | None = None
        self._selection: Selection | None = None
        self._can_replicate = False
        self._can_decode = False
        self._is_slot_sound = False
        self._reported: set[str] = set()

    def run(self) -> list[Step]:
        with ExitStack() as stack:
            actions: dict[str, Callable[[Step], None]] = {
                "version": self._version,
                "server": self._server,
                "replication": self._replication,
                "slot": lambda step: self._slot(step, stack),
                "tables": self._tables,
                "publication": self._with_selection(self._publication),
                "polling": self._with_selection(
                    lambda step, selection: self._polling(step, selection, stack)
                ),
                "triggers": self._with_selection(
                    lambda step, selection: self._triggers(step, selection, stack)
                ),
                "reading": self._with_selection(self._reading),
                "continuity": self._with_selection(self._continuity),
            }
            steps = source_adapter(self._config).check_steps
            return [self._try("server" if name == "version" else name, actions[name]) for name in steps]

    def _version(self, step: Step) -> None:
        limits = inspect_limits(self._connection)
        step.detail = f"Postgres {limits.version}"

    def _polling(self, step: Step, selection: Selection, stack: ExitStack) -> None:
        """Check whether the tables can be polled, and whether a snapshot can be taken. `stack` keeps the
        snapshot open.
        """
        settings = PollingSettings.of(self._config.capture_settings())
        polled = inspect_polled(self._connection, settings, selection.sources)
        step.detail = f"{len(polled.tables):,} tables, every {settings.rules.interval_seconds:g} s"
        for name, error in polled.refused.items():
            step.problem(error, name)
        self._snapshot = stack.enter_context(export_consistent_read(self._address))

    def _try(self, name: str, action: Callable[[Step], None]) -> Step:
        """Run one step. An error, such as a view that the role may not read, stops only this step."""
        step = Step(name)
        with step.catching(), source_errors(f"checking {name}"):
            action(step)
        return step

    def _with_selection(self, action: Callable[[Step, Selection], None]) -> Callable[[Step], None]:
        def run(step: Step) -> None:
            if self._selection is None:
                step.is_skipped = True
            else:
                action(step, self._selection)

        return run

    def _server(self, step: Step) -> None:
        limits = inspect_limits(self._connection)
        step.detail = f"Postgres {limits.version}"
        for fault in server_faults(inspect_server(self._connection)):
            step.problem(fault)
        for fault in limit_faults(
            limits, has_slot=inspect_slot(self._connection, self._config.slot) is not None
        ):
            step.problem(fault)
        with step.catching():
            check_failover(self._config.source.failover, limits.version_number)
        _warn_of_settings(step, limits)
        self._can_decode = not step.problems

    def _replication(self, step: Step) -> None:
        try:
            with connect_replication(self._address, "penstock check") as connection:
                identifier, timeline, *_ = replication_command(
                    connection, "IDENTIFY_SYSTEM", "identifying the server"
                )
            step.detail = f"system {identifier}, timeline {timeline}"
            self._can_replicate = True
        except PrivilegeError as error:
            step.problem(PrivilegeError(error.message, hint=self._role.replication_grant()))
        except PenstockError as error:
            step.problem(error)

    def _slot(self, step: Step, stack: ExitStack) -> None:
        """Check the existing slot, and create a temporary slot as every snapshot does. `stack` keeps the
        temporary slot.
        """
        name = self._config.slot
        step.detail = f"{name} will be created"
        with step.catching():
            slot = inspect_slot(self._connection, name)
            if slot is not None:
                step.detail = f"{name}, confirmed {slot.confirmed}"
                check_slot(slot, self._role.database)
                _warn_of_readers(step, slot)
                danger = unreserved_slot(slot.wal_status, f"slot {name}")
                if danger is not None:
                    step.warn(danger.code, danger.message, danger.hint)
            self._is_slot_sound = True
        if not (self._can_replicate and self._can_decode):
            step.is_skipped = True
        else:
            with step.catching():
                self._snapshot = stack.enter_context(export_snapshot(self._address, _Patience()))

    def _tables(self, step: Step) -> None:
        config = self._config
        selection = select_tables(self._connection, config)
        step.detail = f"{len(selection.tables):,} selected"
        if not selection.tables and not selection.refused:
            reason = (
                f"no table of {self._address.describe()} matches a pattern of tables:, so a run would "
                "wait for one"
            )
            step.problem(
                NoTablesError(
                    reason, hint="check the setting `tables` in the configuration; names are case-sensitive"
                )
            )
        for name, error in selection.refused.items():
            step.problem(error, name)
        self._selection = selection
        self._warn_of_ignored(step)
        self._warn_of_idle_patterns(step, selection)
        _warn_of_case_duplicates(step, selection.tables)
        warn_of_filters(step, self._connection, config, selection)
        if config.source.old_rows:
            warn_of_old_rows(step, self._connection, config, selection)

    def _warn_of_ignored(self, step: Step) -> None:
        named = set(self._config.named_tables)
        ignored: dict[str, list[TableName]] = defaultdict(list)
        for name, kind, persistence in inspect_outside(self._connection):
            if name not in named and self._config.selects(name):
                ignored[outside_kind(kind, persistence) or "no table"].append(name)
        for what, names in ignored.items():
            listed = ", ".join(map(str, names))
            verb = "are" if len(names) > 1 else "is"
            step.warn(
                "ignored",
                f"{listed} {verb} ignored, because the WAL has no changes of this kind of relation: {what}",
                "add exclude: to the rule in tables:",
                names,
            )

    def _warn_of_idle_patterns(self, step: Step, selection: Selection) -> None:
        known = [source for table in selection.tables.values() for source in table.sources]
        for rule in self._config.tables:
            if (
                rule.match is not None
                and selection.tables
                and not any(rule.selects(table.name) for table in known)
            ):
                step.warn(
                    "no-match",
                    f"pattern {rule.match} matches no table",
                    "check the setting `tables` in the configuration; names are case-sensitive",
                )

    def _triggers(self, step: Step, selection: Selection, stack: ExitStack) -> None:
        """Check whether the tables have triggers or can get them, and take a snapshot. `stack` keeps the
        snapshot open.
        """
        name = step.detail = self._config.slot
        report = plan_triggers(self._connection, name, [table.name for table in selection.sources]).report
        for blocker in report.blockers:
            step.problem(blocker)
        if report.manageable:
            step.detail = f"{name}: {len(report.missing):,} tables may get their triggers"
        elif report.satisfied:
            step.detail = f"{name} records the changes of every table"
            with step.catching():
                check_usable(self._connection, name)
        self._snapshot = stack.enter_context(export_consistent_read(self._address))

    def _publication(self, step: Step, selection: Selection) -> None:
        name = step.detail = self._config.publication
        wanted = [table.name for table in selection.sources]
        if not wanted:
            step.is_skipped = True
            return
        plan = plan_coverage(
            self._connection,
            name,
            wanted,
            old_rows=self._config.source.old_rows,
            unkeyed=self._config.unkeyed(wanted),
        )
        for blocker in plan.report.blockers:
            step.problem(blocker)
            self._reported.add(blocker.what)
        if plan.report.manageable and plan.addition is not None:
            step.detail = f"{name} may be created or extended by {len(plan.report.missing):,} tables"
            with step.catching():
                plan.addition.run(self._connection, keep=False)
        elif plan.report.satisfied:
            step.detail = f"{name} holds every table"
        if self._config.source.event_trigger:
            self._warn_of_trigger(step)

    def _warn_of_trigger(self, step: Step) -> None:
        """Warn if the role cannot create the event trigger, or cannot verify its messages. A run does not
        require the trigger.
        """
        try:
            ensure_trigger(self._connection, keep=False)
            load_key(self._connection)
        except PrivilegeError as error:
            step.warn("no-event-trigger", error.message, error.hint)

    def _reading(self, step: Step, selection: Selection) -> None:
        snapshot = self._snapshot
        wanted = selection.sources
        schemas = {schema.oid: schema for schema in selection.source_schemas}
        unreadable = inspect_unreadable(
            self._connection, {table.oid: schemas[table.oid].column_names for table in wanted}
        )
        for blocker in reading_blockers(unreadable, self._role):
            if blocker.what not in self._reported:
                step.problem(blocker)
        self._warn_of_owners(step, selection)
        if snapshot is None or not wanted:
            step.is_skipped = True
            return
        refused = {each.table for each in unreadable}
        chunks = []
        for table in wanted:
            planned = plan_chunks(
                self._connection, table, schemas[table.oid], _ONE_CHUNK_BYTES, self._config.published_by
            )
            chunks += [replace(planned[0], last=1)] if planned and planned[0].heap not in refused else []
        for heap, failure in probe_chunks(self._address, snapshot.name, chunks).items():
            step.problem(failure, heap)
        step.detail = f"the first block of {len(chunks):,} tables"

    def _warn_of_owners(self, step: Step, selection: Selection) -> None:
        """Warn of table owners whose functions may run with this role's rights."""
        names = {table.oid: table.name for table in selection.sources}
        found = inspect_owner_code(self._connection, names)
        if found.owners:
            owners = ", ".join(sorted(set(found.owners.values())))
            what = (
                f"{self._role.name} is a superuser, and can be made to run functions of table owners who are "
                f"not superusers: {owners}"
            )
            fix = 'capture with a role that has only the required rights: SECURITY.md, "Code of table owners"'
            step.warn(
                "superuser-reads-tables-of-others", what, fix, sorted(names[oid] for oid in found.owners)
            )
        for oid, functions in found.functions.items():
            what = (
                f"indexes or constraints of {names[oid]} call functions that run as {self._role.name}: "
                f"{', '.join(functions)}"
            )
            fix = (
                "review them, then make a superuser or the capture role their owner: ALTER FUNCTION … "
                "OWNER TO …"
            )
            step.warn("functions-of-others", what, fix, [names[oid]])

    def _continuity(self, step: Step, selection: Selection) -> None:
        if self._can_replicate and self._is_slot_sound:
            check_continuing(step, self._config, self._address, self._connection, selection)
        else:
            step.is_skipped = True


class _Patience:
    """`OnWait` callback that raises an error if open transactions delay a slot for some seconds. A run would
    report them and continue to wait.
    """

    def __init__(self) -> None:
        self._waits = 0

    def __call__(self, transactions: Sequence[OpenTransaction]) -> None:
        self._waits += 1
        if self._waits >= PATIENCE_WAITS:
            who = "; ".join(each.describe() for each in transactions) or "a transaction"
            fixes = " ".join(each.remedy for each in transactions)
            raise LockWaitError(
                f"a slot cannot be created while a transaction stays open: {who}", hint=fixes or None
            )


def _warn_of_readers(step: Step, slot: Slot) -> None:
    """Warn of processes that read the slot. A run would wait until they have ended."""
    try:
        check_idle(slot)
    except SlotBusyError as busy:
        step.warn("slot-in-use", f"{busy.message}: a run may be active", busy.hint)


def _warn_of_settings(step: Step, limits: Limits) -> None:
    if limits.wal_keep_mb == -1:
        what = (
            "max_slot_wal_keep_size is not set: a slot that is not read keeps WAL until the server's "
            "disk is full"
        )
        step.warn(
            "unbounded-wal",
            what,
            "ALTER SYSTEM SET max_slot_wal_keep_size = '100GB'; SELECT pg_reload_conf();",
        )
    if limits.sender_timeout_ms and limits.sender_timeout_ms < _SHORT_SENDER_TIMEOUT_MS:
        what = (
            f"wal_sender_timeout is only {limits.sender_timeout_ms} ms: a short pause of the network "
            "ends the stream"
        )
        step.warn(
            "short-sender-timeout",
            what,
            "ALTER SYSTEM SET wal_sender_timeout = '60s'; SELECT pg_reload_conf();",
        )
    if limits.decoding_memory_kb is not None and limits.decoding_memory_kb < _SMALL_DECODING_MEMORY_KB:
        what = (
            f"logical_decoding_work_mem is only {limits.decoding_memory_kb} kB: the server spills even "
            "small transactions to its disk"
        )
        step.warn(
            "small-decoding-memory",
            what,
            "ALTER SYSTEM SET logical_decoding_work_mem = '64MB'; SELECT pg_reload_conf();",
        )
    if limits.idle_slot_timeout:
        what = (
            "idle_replication_slot_timeout is set: the server invalidates the slot of a pipeline that "
            "is stopped for longer"
        )
        step.warn(
            "idle-slot-timeout",
            what,
            "ALTER SYSTEM SET idle_replication_slot_timeout = 0; SELECT pg_reload_conf();",
        )


def _warn_of_case_duplicates(step: Step, names: Iterable[TableName]) -> None:
    seen: dict[str, TableName] = {}
    for name in names:
        other = seen.setdefault(str(name).casefold(), name)
        if other != name:
            what = (
                f"tables {other} and {name} differ only in case, which file systems and catalogs may "
                "not distinguish"
            )
            step.warn("case-twins", what, "rename one of them, or exclude it", (other, name))


def check_pipeline(path: Path) -> CheckReport:
    """Check the configuration file at `path`, its source, and the directories to which a run writes."""
    configuration = Step("configuration", str(path))
    config: PipelineConfig | None = None
    with configuration.catching():
        config = load_config(path)
    if config is None:
        return CheckReport(None, [configuration])
    return CheckReport(config.pipeline, [configuration, *_steps(config, configuration)])


def _steps(config: PipelineConfig, configuration: Step) -> list[Step]:
    try:
        address = config.source.address()
    except PenstockError as error:
        configuration.problem(error)
        return [*(Step(name, is_skipped=True) for name in SOURCE_STEPS), *check_places(config)]
    try:
        return [*check_source(config, address), *check_places(config)]
    finally:
        _end_spark()


def _end_spark() -> None:
    """Stop Spark if this check started it."""
    queries = sys.modules.get("penstock.spark.query_plan")
    if queries is not None:
        queries.end_started()
