"""Check the source before and during capture: WAL continuity, same database system, uninterrupted publication
membership.

Before the first change is read, `inspect_source` checks three conditions. The server is the same database
system. Its timeline contains the WAL up to the captured position. Slot and spool together contain every
change that consumers need. The checks run from the most general cause to the most specific: another server, a
missing slot, missing WAL, a missing publication, and last another reader of the slot, which is the only
problem that resolves itself.

For each consumer, the spool stores by which catalog entry each table is a member of the publication. A check
compares these memberships with the catalog. So it does not detect two kinds of interruption between two
checks: a new table is added to the publication, removed and added again; or the publication omits operations
(`publish`) for some time. If the spool is lost, the memberships are recorded again from the catalog.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from penstock import storage
from penstock.capture.provision import ensure_capture
from penstock.capture.settings import CaptureSettings
from penstock.contracts.provisioning import Blocker, CaptureProvisioning, CoverageReport
from penstock.errors import (
    PositionGapError,
    PublicationError,
    SlotMissingError,
    SpoolCorruptError,
    SpoolError,
    SystemChangedError,
    TableGapError,
    TimelineChangedError,
)
from penstock.position import Position
from penstock.postgres.catalog import inspect_types, load_types
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.membership import CapturedTables, Membership, inspect_captured_tables
from penstock.postgres.publication import inspect_publication
from penstock.postgres.queries import identifier
from penstock.postgres.server import SystemIdentity, identify_system, inspect_switch
from penstock.postgres.slot import (
    COPY_AGAIN,
    OnWait,
    Slot,
    check_failover,
    check_idle,
    check_server,
    check_slot,
    current_position,
    drop_statement,
    ensure_slot,
    inspect_server,
    inspect_slot,
)
from penstock.postgres.types.registry import TypeResolver
from penstock.schema import TableName
from penstock.spool.history import SchemaHistory
from penstock.spool.manifest import parse_document
from penstock.spool.ownership import load_identity
from penstock.spool.reader import SpoolReader
from penstock.spool.retention import released_by_all, released_positions


def check_continuity(
    needed: Position, spool: tuple[Position, Position] | None, confirmed: Position, slot: str
) -> None:
    """Raise unless every change after `needed` can still be read. The server sends the transactions that
    commit after `confirmed`; the spool contains those between the two positions in `spool`. Nothing is
    missing if the slot has not advanced past `needed`, or if the spool covers the range from `needed` to
    `confirmed`.
    """
    if confirmed <= needed:
        return
    if spool is not None and spool[0] <= needed and confirmed <= spool[1]:
        return
    raise PositionGapError(
        f"slot {slot} begins at {confirmed}, but its readers have only the commits up to {needed}: "
        f"the {confirmed - needed} bytes of WAL in between can no longer be read",
        hint=COPY_AGAIN,
    )


def check_system(
    address: SourceAddress,
    now: SystemIdentity,
    before: SystemIdentity,
    held: Position,
    *,
    slot: Slot | None,
    name: str,
) -> None:
    """Raise unless the server `now` continues the WAL of the server `before`, from which changes up to `held`
    were captured. A change of timeline is accepted under three conditions. (1) Everything captured is before
    the switch. (2) The slot `name` was synchronised from the primary (Postgres 17 and later); another slot
    may lack catalog rows that decoding needs. (3) The slot is not past the captured position;
    `check_continuity` checks that.
    """
    if now == before:
        return
    check_same_system(now, before)
    switched = (
        f"the server is on timeline {now.timeline}, and everything captured came from timeline "
        f"{before.timeline}"
    )
    switch = inspect_switch(address, now.timeline, before.timeline)
    if switch is None:
        raise TimelineChangedError(
            f"{switched}, which is not part of the server's history: the server was restored to a time "
            "before that timeline began",
            hint=f"point source.dsn at the server that continued from timeline {before.timeline}, or "
            f"{COPY_AGAIN}",
        )
    if held.lsn > switch:
        raise TimelineChangedError(
            f"{switched}, which the server left at {switch}: the {held.lsn - switch} bytes of WAL from there "
            f"to {held} were captured, but the server lost them when it was promoted or restored",
            hint=f"{COPY_AGAIN}; with synchronized_standby_slots on the primary, the capture never runs "
            "ahead of the standby",
        )
    if slot is None or not (slot.failover and slot.synced):
        state = "does not exist" if slot is None else "was not synchronised from the primary"
        raise TimelineChangedError(
            f"{switched}; on the promoted server, slot {name} {state}, so changes up to the switch at "
            f"{switch} may be missing",
            hint=f"{COPY_AGAIN}; with source.failover: true and sync_replication_slots on the standby "
            "(Postgres 17 and later), the slot "
            "survives a promotion",
        )


def check_same_system(now: SystemIdentity, before: SystemIdentity) -> None:
    """Raise unless both are the same database system, on any timeline."""
    if now.identifier != before.identifier:
        raise SystemChangedError(
            f"the server is database system {now.identifier}, and everything captured came from "
            f"{before.identifier}",
            hint=f"point source.dsn back at the old system, or {COPY_AGAIN}",
        )


def check_not_rewound(held: Position, server: Position) -> None:
    """Raise if the server's WAL ends before the captured position: the server was restored to an earlier
    time, perhaps on the same timeline.
    """
    if held > server:
        raise SystemChangedError(
            f"changes were captured up to {held}, and the server's WAL ends at {server}: the server was "
            "restored to an earlier time",
            hint=COPY_AGAIN,
        )


_log = logging.getLogger(__name__)

_FORMAT = 1
_NAMED = 5
"""The maximum number of tables that an error names."""


def gap_text(report: CoverageReport) -> str:
    """Instructions for a coverage gap: the statements to run, followed by the blockers as SQL comments, so
    that the whole text can be pasted.
    """
    statements = " ".join(report.remediation)
    reasons = [_reason(blocker, statements) for blocker in report.blockers]
    if not statements:
        return f"blocked by: {'; '.join(reasons)}"
    return "\n".join([f"run: {statements}", *(f"-- blocked by: {reason}" for reason in reasons)])


def ensure_or_warn(
    capture: CaptureProvisioning, required: Collection[TableName], manage: bool, extra: Mapping[str, object]
) -> CoverageReport:
    """Ensure that a capture covers the tables `required`, and log a warning with the SQL to run if it does
    not cover all of them. Returns the last report.
    """
    report = capture.ensure_coverage(frozenset(required), manage)
    if manage and report.addable and report.blockers:
        report = capture.inspect_coverage(frozenset(required))  # without the tables that were just added
    if report.satisfied or (manage and report.manageable):
        return report
    facts = {**extra, "missing": sorted(map(str, report.missing))}
    _log.warning("not every required table is captured; %s", gap_text(report), extra=facts)
    return report


def _reason(blocker: Blocker, statements: str) -> str:
    remedy = blocker.remedy.replace(statements, "run that") if statements else blocker.remedy
    return " ".join(f"{blocker.what} ({remedy})".split())


def check_publication(
    connection: Connection,
    settings: CaptureSettings,
    *,
    has_slot: bool = True,
    coverage: CoverageReport | None = None,
) -> None:
    """Raise an error if the publication does not exist. Postgres 18 and later report no error in that case,
    and send no changes. `coverage` is the report of the tables that the capture must publish, if there are
    such tables; it explains why the capture has not created the publication.
    """
    name = settings.publication
    if inspect_publication(connection, name) is not None:
        return
    make = f"CREATE PUBLICATION {identifier(name)} FOR TABLE …;"
    if not has_slot:
        raise PublicationError(
            f"publication {name} does not exist; it must exist before slot {settings.slot} is created",
            hint=_creation_hint(make, coverage),
        )
    raise PublicationError(
        f"publication {name} does not exist: current changes are lost for slot {settings.slot}",
        hint=f"{drop_statement(settings.slot)} {make} then {COPY_AGAIN}",
    )


def _creation_hint(make: str, coverage: CoverageReport | None) -> str:
    method, aim = "with_publication_management", "so that the capture creates it"
    if coverage is None:
        return f"{make} or call {method}(tables, manage=True), {aim}"
    if coverage.blockers:
        return gap_text(coverage)
    if coverage.missing:
        return f"{' '.join(coverage.remediation)} or pass manage=True to {method}, {aim}"
    return f"{make} or name its tables in {method}, {aim}"


class MembershipWatch:
    """Checks that the tables of one consumer stay in the publication without interruption. Any thread may
    call `check`.
    """

    def __init__(
        self,
        settings: CaptureSettings,
        consumer: str,
        required: Collection[TableName],
        takes: Collection[TableName] | None,
    ) -> None:
        """`takes` are the tables that the consumer reads by name. If it is None, the consumer reads all
        published tables, and those in `required` must stay published.
        """
        self._settings = settings
        self._consumer = consumer
        self._required = frozenset(required)
        self._takes = takes
        self._warned: set[TableName] = set()
        self._lock = threading.Lock()

    def check(self, *, is_first: bool = False) -> None:
        """Raise `TableGapError` if changes of a recorded table may be missing, and record new tables. With
        `is_first`, earlier records are ignored, since nothing has been read yet.
        """
        with self._lock:  # an earlier check may still be running
            self._check(is_first=is_first)

    def _check(self, *, is_first: bool) -> None:
        settings = self._settings
        recorded = {} if is_first else load_memberships(settings.spool, self._consumer)
        found = self._inspect()
        if self._interruptions(found, recorded):
            # Inspect again, since a table that was altered between the queries may look like a removed table.
            found = self._inspect()
        named = self._interruptions(found, recorded)
        if named:
            more = f" (and {len(named) - _NAMED} more)" if len(named) > _NAMED else ""
            raise TableGapError(
                f"{'; '.join(named[:_NAMED])}{more}: changes may be missing",
                hint=f"{drop_statement(settings.slot)} then {COPY_AGAIN}",
            )
        for name, before in recorded.items():
            current_name = found.current_name(before)
            if current_name is not None and current_name not in found.members:
                self._warn_once(name)
        known = self._known(found, recorded)
        if known != recorded or is_first:
            try:
                save_memberships(settings.spool, self._consumer, known)
            except OSError as error:
                raise SpoolError(f"the spool cannot be written: {error}") from error

    def _inspect(self) -> CapturedTables:
        settings = self._settings
        takes = self._takes
        return inspect_captured_tables(
            settings.address,
            settings.publication,
            lambda table: takes is None or table in takes,
            old_rows=settings.old_rows,
        )

    def _interruptions(self, found: CapturedTables, recorded: Mapping[TableName, Membership]) -> list[str]:
        if self._takes is not None:
            reasons = found.interruptions(recorded)
        else:
            compared = {
                name: before
                for name, before in recorded.items()
                if not _is_known_replacement(found, name, before, recorded)
            }
            required = {name: before for name, before in compared.items() if name in self._required}
            optional = {name: before for name, before in compared.items() if name not in self._required}
            reasons = {
                **found.interruptions(required, by_oid=True),
                **found.interruptions(optional, by_oid=True, must_be_captured=False),
            }
        return [f"table {name} {reasons[name]}" for name in recorded if name in reasons]

    def _known(
        self, found: CapturedTables, recorded: Mapping[TableName, Membership]
    ) -> dict[TableName, Membership]:
        """Return the memberships to store. For a consumer that reads tables by name, these are the recorded
        ones and those of new tables. For other consumers, these are known tables under their current names,
        new tables, and dropped tables whose names no other table has taken.
        """
        if self._takes is not None:
            return {**found.members, **recorded}
        kept, gone = {}, {}
        for name, before in recorded.items():
            current_name = found.current_name(before)
            if current_name is None:
                gone[name] = before
            else:
                kept[current_name] = before
        return {**gone, **found.members, **kept}

    def _warn_once(self, name: TableName) -> None:
        if name not in self._warned:
            self._warned.add(name)
            _log.warning(
                "table is no longer in the publication",
                extra={"table": str(name), "publication": self._settings.publication},
            )


def _is_known_replacement(
    found: CapturedTables, name: TableName, before: Membership, recorded: Mapping[TableName, Membership]
) -> bool:
    """Whether the table was dropped, and its name now belongs to a table that has been captured without
    interruption.
    """
    return found.current_name(before) is None and found.members.get(name) in recorded.values()


def load_memberships(root: Path, consumer: str) -> dict[TableName, Membership]:
    """Return the recorded memberships of a consumer; empty before the first check."""
    path = _path(root, consumer)
    try:
        data = storage.read(path)
    except OSError as error:
        raise SpoolError(f"the spool cannot be read: {error}") from error
    if data is None:
        return {}
    document = parse_document(data, where=f"tables/{path.name}")
    try:
        return {
            TableName.parse(name): Membership(int(oid), str(act))
            for name, (oid, act) in document["tables"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpoolCorruptError(
            f"tables/{path.name} cannot be parsed",
            hint="remove the file if the publication has not been changed since the last run",
        ) from error


def save_memberships(root: Path, consumer: str, members: Mapping[TableName, Membership]) -> None:
    tables = {str(name): [member.oid, member.act] for name, member in sorted(members.items())}
    storage.put(
        _path(root, consumer),
        json.dumps({"format": _FORMAT, "consumer": consumer, "tables": tables}).encode(),
    )


def _path(root: Path, consumer: str) -> Path:
    return root / "tables" / f"{quote(consumer, safe='')}.json"


class Source(NamedTuple):
    """A checked source, from which capture can start."""

    system: SystemIdentity
    slot: Slot
    start: Position
    """The position from which capture continues."""
    keys: dict[int, tuple[str, ...]]
    """The key of each table at that position, by OID."""
    types: TypeResolver


def inspect_source(settings: CaptureSettings, reader: SpoolReader, on_wait: OnWait) -> Source:
    """Check the source, and raise the first error. Creates a missing slot, and its publication, only for a
    new spool and if `settings.tables` is set.
    """
    with connect(settings.address) as connection:
        server = inspect_server(connection)
        check_server(server)
        check_failover(settings.failover, server.version)
        system = identify_system(settings.address)
        slot = inspect_slot(connection, settings.slot)
        _check_history(connection, settings, reader, system, slot)
        slot = slot or _ensure_first(settings, on_wait)
        check_slot(slot, server.database)
        _check_ground(settings, reader, slot)
        check_publication(connection, settings)
        check_idle(slot)
        if settings.failover and not slot.failover:
            slot = ensure_slot(settings.address, connection, settings.slot, failover=True)
        types = TypeResolver(settings.types, inspect_types(connection), partial(load_types, settings.address))
        start = max(reader.end or Position.ZERO, slot.confirmed)
        return Source(system, slot, start, SchemaHistory.load(settings.spool).keys(start), types)


def _check_history(
    connection: Connection,
    settings: CaptureSettings,
    reader: SpoolReader,
    system: SystemIdentity,
    slot: Slot | None,
) -> None:
    before = load_identity(settings.spool)
    if before is None:
        return
    held = max(reader.end or Position.ZERO, *released_positions(settings.spool).values(), Position.ZERO)
    known = SystemIdentity(before.system_identifier, before.timeline)
    check_system(settings.address, system, known, held, slot=slot, name=settings.slot)
    check_not_rewound(held, current_position(connection))


def _ensure_first(settings: CaptureSettings, on_wait: OnWait) -> Slot:
    """Create a missing slot, and its publication. Raises `SlotMissingError` if the slot may have existed
    before, since the changes after its loss would be missing.
    """
    if load_identity(settings.spool) is not None or not settings.tables:
        raise SlotMissingError(
            f"slot {settings.slot} no longer exists: commits since it was last read are lost", hint=COPY_AGAIN
        )
    slot, _ = ensure_capture(
        settings.address,
        settings.slot,
        settings.publication,
        settings.tables,
        failover=settings.failover,
        old_rows=settings.old_rows,
        on_wait=on_wait,
    )
    return slot


def _check_ground(settings: CaptureSettings, reader: SpoolReader, slot: Slot) -> None:
    """Raise unless slot and spool together contain what consumers need. A consumer that has released nothing
    needs the spool from its start. A spool without consumers is also needed from its start, since a consumer
    may be added later.
    """
    ground = reader.extent
    needed = released_by_all(settings.spool) or Position.ZERO
    if needed == Position.ZERO and ground is not None:
        needed = ground[0]
    if needed > Position.ZERO:
        check_continuity(needed, ground, slot.confirmed, settings.slot)
