"""The part of a check that looks at the source: what a run asks of it, tried in the same order and by the same functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from penstock.capture.blockers import outside_kind, reading_blockers
from penstock.capture.choosing import polling_settings
from penstock.capture.polling_tables import inspect_polled
from penstock.capture.provision import plan_coverage
from penstock.capture.trigger_provision import check_usable
from penstock.capture.trigger_provision import plan_coverage as plan_triggers
from penstock.errors import LockWaitError, NoTablesError, PenstockError, PrivilegeError, SlotBusyError
from penstock.lag import OpenTransaction, unreserved_slot
from penstock.pipeline.checks.findings import Step
from penstock.pipeline.checks.places import warn_of_tls
from penstock.pipeline.checks.targets import check_continuing
from penstock.pipeline.checks.transforms import warn_of_filters, warn_of_old_rows
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.tables import Selection, select_tables
from penstock.postgres.catalog import inspect_outside
from penstock.postgres.chunks import plan_chunks, probe_chunks
from penstock.postgres.connection import Connection, SourceAddress, connect, connect_replication, replication_command, source_errors
from penstock.postgres.ddl_trigger import ensure_trigger, load_key
from penstock.postgres.exported import ExportedSnapshot, export_snapshot
from penstock.postgres.limits import Limits, inspect_limits, room_faults
from penstock.postgres.moments import export_moment
from penstock.postgres.privileges import Role, inspect_owner_code, inspect_role, inspect_unreadable
from penstock.postgres.slot import Slot, check_failover, check_idle, check_slot, inspect_server, inspect_slot, server_faults
from penstock.schema import TableName

PATIENCE_WAITS = 5
"""How many seconds, about, an open transaction may hold up the temporary slot."""

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
    """One connection, and what is learnt on the way."""

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
        self._told: set[str] = set()

    def run(self) -> list[Step]:
        with ExitStack() as stack:
            if self._config.polling_rules is not None:
                return self._run_polling(stack)
            if self._config.source.capture == "trigger":
                return self._run_triggers(stack)
            return [
                self._try("server", self._server),
                self._try("replication", self._replication),
                self._try("slot", lambda step: self._slot(step, stack)),
                self._try("tables", self._tables),
                self._try("publication", self._with_selection(self._publication)),
                self._try("reading", self._with_selection(self._reading)),
                self._try("continuity", self._with_selection(self._continuity)),
            ]

    def _run_polling(self, stack: ExitStack) -> list[Step]:
        return [
            self._try("server", self._version),
            self._try("tables", self._tables),
            self._try("polling", self._with_selection(lambda step, selection: self._polling(step, selection, stack))),
            self._try("reading", self._with_selection(self._reading)),
        ]

    def _run_triggers(self, stack: ExitStack) -> list[Step]:
        return [
            self._try("server", self._version),
            self._try("tables", self._tables),
            self._try("triggers", self._with_selection(lambda step, selection: self._triggers(step, selection, stack))),
            self._try("reading", self._with_selection(self._reading)),
        ]

    def _version(self, step: Step) -> None:
        limits = inspect_limits(self._connection)
        step.detail = f"Postgres {limits.version}"

    def _polling(self, step: Step, selection: Selection, stack: ExitStack) -> None:
        """Whether the tables can be asked, and a snapshot such as every copy needs, which lasts as long as `stack`."""
        settings = polling_settings(self._config.capture_settings())
        assert settings is not None
        polled = inspect_polled(self._connection, settings, selection.sources)
        step.detail = f"{len(polled.tables):,} tables, every {settings.rules.interval_seconds:g} s"
        for name, error in polled.refused.items():
            step.problem(error, name)
        self._snapshot = stack.enter_context(export_moment(self._address))

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
        for fault in room_faults(limits, has_slot=inspect_slot(self._connection, self._config.slot) is not None):
            step.problem(fault)
        with step.catching():
            check_failover(self._config.source.failover, limits.version_number)
        _warn_of_settings(step, limits)
        self._can_decode = not step.problems

    def _replication(self, step: Step) -> None:
        try:
            with connect_replication(self._address, "penstock check") as connection:
                identifier, timeline, *_ = replication_command(connection, "IDENTIFY_SYSTEM", "identifying the server")
            step.detail = f"system {identifier}, timeline {timeline}"
            self._can_replicate = True
        except PrivilegeError as error:
            step.problem(PrivilegeError(error.message, hint=self._role.replication_grant()))
        except PenstockError as error:
            step.problem(error)

    def _slot(self, step: Step, stack: ExitStack) -> None:
        """The slot that is there, and a temporary one such as every snapshot needs; that one lasts as long as `stack`."""
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
            reason = f"no table of {self._address.describe()} matches a pattern of tables:, so a run would wait for one"
            step.problem(NoTablesError(reason, hint="check tables: in the configuration; case counts"))
        for name, error in selection.refused.items():
            step.problem(error, name)
        self._selection = selection
        self._warn_of_ignored(step)
        self._warn_of_idle_patterns(step, selection)
        _warn_of_twins(step, selection.tables)
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
            step.warn("ignored", f"{listed} {verb} ignored: {what}, whose changes do not enter the log", "exclude by pattern", names)

    def _warn_of_idle_patterns(self, step: Step, selection: Selection) -> None:
        known = [source for table in selection.tables.values() for source in table.sources]
        for rule in self._config.tables:
            if rule.match is not None and selection.tables and not any(rule.selects(table.name) for table in known):
                step.warn("no-match", f"pattern {rule.match} matches no table", "check tables: in the configuration; case counts")

    def _triggers(self, step: Step, selection: Selection, stack: ExitStack) -> None:
        """Whether the tables have their triggers, or could have them, and a snapshot, which lasts as long as `stack`."""
        name = step.detail = self._config.slot
        report = plan_triggers(self._connection, name, [table.name for table in selection.sources]).report
        for blocker in report.blockers:
            step.problem(blocker)
        if report.manageable:
            step.detail = f"{name}: {len(report.missing):,} tables may get their triggers"
        elif report.satisfied:
            step.detail = f"{name} notes the changes of every table"
            with step.catching():
                check_usable(self._connection, name)
        self._snapshot = stack.enter_context(export_moment(self._address))

    def _publication(self, step: Step, selection: Selection) -> None:
        name = step.detail = self._config.publication
        wanted = [table.name for table in selection.sources]
        if not wanted:
            step.is_skipped = True
            return
        plan = plan_coverage(self._connection, name, wanted, old_rows=self._config.source.old_rows)
        for blocker in plan.report.blockers:
            step.problem(blocker)
            self._told.add(blocker.what)
        if plan.report.manageable and plan.addition is not None:
            step.detail = f"{name} may be created or extended by {len(plan.report.missing):,} tables"
            with step.catching():
                plan.addition.run(self._connection, keep=False)
        elif plan.report.satisfied:
            step.detail = f"{name} holds every table"
        if self._config.source.event_trigger:
            self._warn_of_trigger(step)

    def _warn_of_trigger(self, step: Step) -> None:
        """A run goes on without it."""
        try:
            ensure_trigger(self._connection, keep=False)
            load_key(self._connection)
        except PrivilegeError as error:
            step.warn("no-event-trigger", error.message, error.hint)

    def _reading(self, step: Step, selection: Selection) -> None:
        snapshot = self._snapshot
        wanted = selection.sources
        schemas = {schema.oid: schema for schema in selection.source_schemas}
        unreadable = inspect_unreadable(self._connection, {table.oid: schemas[table.oid].column_names for table in wanted})
        for blocker in reading_blockers(unreadable, self._role):
            if blocker.what not in self._told:
                step.problem(blocker)
        self._warn_of_owners(step, selection)
        if snapshot is None or not wanted:
            step.is_skipped = True
            return
        refused = {each.table for each in unreadable}
        chunks = []
        for table in wanted:
            planned = plan_chunks(self._connection, table, schemas[table.oid], _ONE_CHUNK_BYTES, self._config.published_by)
            chunks += [replace(planned[0], last=1)] if planned and planned[0].heap not in refused else []
        for heap, failure in probe_chunks(self._address, snapshot.name, chunks).items():
            step.problem(failure, heap)
        step.detail = f"the first block of {len(chunks):,} tables"

    def _warn_of_owners(self, step: Step, selection: Selection) -> None:
        """Owners of tables whose functions may run with the rights of this role."""
        names = {table.oid: table.name for table in selection.sources}
        found = inspect_owner_code(self._connection, names)
        if found.owners:
            owners = ", ".join(sorted(set(found.owners.values())))
            what = f"{self._role.name} is a superuser, and may be made to run functions of those who own tables and are none: {owners}"
            fix = 'capture with a role that has no more than it needs: SECURITY.md, "Code of table owners"'
            step.warn("superuser-reads-tables-of-others", what, fix, sorted(names[oid] for oid in found.owners))
        for oid, functions in found.functions.items():
            what = f"indexes or constraints of {names[oid]} call functions that run as {self._role.name}: {', '.join(functions)}"
            fix = "let a superuser or the capture role own them, once they have been looked at: ALTER FUNCTION … OWNER TO …"
            step.warn("functions-of-others", what, fix, [names[oid]])

    def _continuity(self, step: Step, selection: Selection) -> None:
        if self._can_replicate and self._is_slot_sound:
            check_continuing(step, self._config, self._address, self._connection, selection)
        else:
            step.is_skipped = True


class _Patience:
    """Ends the wait for transactions that stay open. A run would wait on, and say for whom."""

    def __init__(self) -> None:
        self._waits = 0

    def __call__(self, transactions: Sequence[OpenTransaction]) -> None:
        self._waits += 1
        if self._waits >= PATIENCE_WAITS:
            who = "; ".join(each.describe() for each in transactions) or "a transaction"
            fixes = " ".join(each.remedy for each in transactions)
            raise LockWaitError(f"a slot cannot be made while a transaction stays open: {who}", hint=fixes or None)


def _warn_of_readers(step: Step, slot: Slot) -> None:
    """A run would wait until they are gone."""
    try:
        check_idle(slot)
    except SlotBusyError as busy:
        step.warn("slot-in-use", f"{busy.message}: a run may be under way", busy.hint)


def _warn_of_settings(step: Step, limits: Limits) -> None:
    if limits.wal_keep_mb == -1:
        what = "max_slot_wal_keep_size is not set: a slot that is not read keeps WAL until the server's disk is full"
        step.warn("unbounded-wal", what, "ALTER SYSTEM SET max_slot_wal_keep_size = '100GB'; SELECT pg_reload_conf();")
    if limits.sender_timeout_ms and limits.sender_timeout_ms < _SHORT_SENDER_TIMEOUT_MS:
        what = f"wal_sender_timeout is only {limits.sender_timeout_ms} ms: a short pause of the network ends the stream"
        step.warn("short-sender-timeout", what, "ALTER SYSTEM SET wal_sender_timeout = '60s'; SELECT pg_reload_conf();")
    if limits.decoding_memory_kb is not None and limits.decoding_memory_kb < _SMALL_DECODING_MEMORY_KB:
        what = f"logical_decoding_work_mem is only {limits.decoding_memory_kb} kB: the server spills even small transactions to its disk"
        step.warn("small-decoding-memory", what, "ALTER SYSTEM SET logical_decoding_work_mem = '64MB'; SELECT pg_reload_conf();")
    if limits.idle_slot_timeout:
        what = "idle_replication_slot_timeout is set: the server drops what a stopped pipeline still needs when it stays away for so long"
        step.warn("idle-slot-timeout", what, "ALTER SYSTEM SET idle_replication_slot_timeout = 0; SELECT pg_reload_conf();")


def _warn_of_twins(step: Step, names: Iterable[TableName]) -> None:
    seen: dict[str, TableName] = {}
    for name in names:
        other = seen.setdefault(str(name).casefold(), name)
        if other != name:
            what = f"tables {other} and {name} differ only in case, which file systems and catalogs may not tell apart"
            step.warn("case-twins", what, "rename one of them, or exclude it", (other, name))
