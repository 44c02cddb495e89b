"""Start and resume a streaming query: its offsets, its tables, publication and slot, and the detection of
gaps.

Offsets: `{"position": "0/0"}` before the start; `{"position": F, "chunk": 3}` after three steps of the
snapshot at fence F; `{"position": P}` when the snapshot, if there is one, is complete and all changes up to P
were read. The end offset of a first batch also has the kind of start, such as `"begins": "slot"`, since
`startingPosition` may have another value when the batch is repeated. Offsets of earlier versions have no
`begins`; for them, `startingPosition` applies.

A query selects tables by name. So changes may be missing not only after a table was taken out of the
publication or recreated, but also after it was renamed. The spool stores the tables that each query has
observed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.capture.provision import ensure_capture
from penstock.capture.settings import CaptureSettings
from penstock.capture.source_checks import check_continuity, load_memberships, save_memberships
from penstock.errors import (
    ConfigError,
    NoTablesError,
    PenstockError,
    SlotMissingError,
    SpoolFormatError,
    SystemChangedError,
    TableGapError,
)
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable, inspect_tables
from penstock.postgres.connection import Connection, connect
from penstock.postgres.consistent_read import insert_position
from penstock.postgres.membership import inspect_captured_tables
from penstock.postgres.publication import inspect_publication, inspect_relations
from penstock.postgres.server import identify_system
from penstock.postgres.slot import COPY_AGAIN, inspect_slot
from penstock.spark.request import SourceRequest
from penstock.spool.ownership import is_spool_locked, load_identity
from penstock.spool.reader import SpoolReader
from penstock.spool.retention import released_positions, remove_consumer, set_released
from penstock.spool.status import load_status

NEW_QUERY = "start a new query, with a new checkpoint and a new target"
"""Hint for a query that cannot continue from its offset."""

GIVEN = "position"
"""The kind of start of a query whose `startingPosition` is a position."""


@dataclass(frozen=True, slots=True)
class ChangeOffset:
    position: Position
    chunk: int | None = None
    """Number of completed snapshot steps; None before and after the snapshot."""
    begins: str | None = None
    """The kind of start: `snapshot`, `now`, `slot` or `position`. Set at the end of the first batch, unless
    chunks remain.
    """

    INITIAL: ClassVar[ChangeOffset]

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> ChangeOffset:
        chunk = document.get("chunk")
        return cls(
            Position.parse(document["position"]),
            None if chunk is None else int(chunk),
            document.get("begins"),
        )

    def to_document(self) -> dict[str, Any]:
        plain = {"position": str(self.position), "chunk": self.chunk, "begins": self.begins}
        return {name: value for name, value in plain.items() if value is not None}


ChangeOffset.INITIAL = ChangeOffset(Position.ZERO)


def choose_tables(connection: Connection, request: SourceRequest) -> list[CatalogTable]:
    """Return the existing tables that the query selects, in name order."""
    found = [table for table in inspect_tables(connection) if request.choice.selects(table.name)]
    settings = request.capture()
    if not request.choice.patterns:
        relations = inspect_relations(connection, settings.publication, [table.name for table in found])
        published = {relation.name for relation in relations if relation.is_published}
        found = [table for table in found if table.name in published]
    if not found:
        raise _no_tables(connection, request, settings)
    return found


def ensure_source(request: SourceRequest) -> None:
    """Create the publication, then the slot. If the slot was read before and no longer exists, it is not
    recreated, so that the capture reports the gap.
    """
    settings = request.capture()
    with connect(settings.address) as connection:
        slot = inspect_slot(connection, settings.slot)
        tables = [table.name for table in choose_tables(connection, request)]
    if slot is not None or load_identity(settings.spool) is None:
        ensure_capture(
            settings.address,
            settings.slot,
            settings.publication,
            tables,
            failover=settings.failover,
            old_rows=settings.old_rows,
        )


def check_owner(settings: CaptureSettings) -> bool:
    """Raise an error if the spool's owner is not this query's source. Returns True if it is, and False if the
    spool has no owner yet.

    Call this before reading, releasing or planning anything in the spool. A capture checks the owner only
    when it has locked the spool, and a query that reads a shared spool never locks it.
    """
    identity = load_identity(settings.spool)
    if identity is None:
        return False
    if (identity.slot, identity.publication) != (settings.slot, settings.publication):
        raise SpoolFormatError(
            f"the spool at {settings.spool} has changes of slot {identity.slot}, publication "
            f"{identity.publication}, "
            f"not of {settings.slot}, {settings.publication}",
            hint=f'to read it, add .option("slot", "{identity.slot}").option("publication", '
            f'"{identity.publication}"); '
            'to capture with this query, use another spool: .option("spool", …)',
        )
    system = identify_system(settings.address).identifier
    if system != identity.system_identifier:
        raise SystemChangedError(
            f"the spool at {settings.spool} holds changes of database system {identity.system_identifier}, "
            f"and {settings.address.describe()} is {system}",
            hint='point dsn at that system, or use another spool: .option("spool", …)',
        )
    status = load_status(settings.spool) if is_spool_locked(settings.spool) else None
    if status is not None and status.numeric not in (None, settings.types.numeric):
        raise ConfigError(
            f"the option 'numeric' is {settings.types.numeric}, and the capture into {settings.spool} "
            f"writes {status.numeric}",
            hint=f'use .option("numeric", "{status.numeric}"), as in the query or process that captures',
        )
    return True


@contextmanager
def with_query_hints(settings: CaptureSettings) -> Iterator[None]:
    """Replace a capture's hint to copy tables again by one that applies to queries."""
    try:
        yield
    except PenstockError as error:
        if error.hint is None or COPY_AGAIN not in error.hint:
            raise
        words = (
            f"drop slot {settings.slot} if it exists, remove the spool at {settings.spool}, and {NEW_QUERY}"
        )
        raise type(error)(error.message, hint=error.hint.replace(COPY_AGAIN, words)) from error


def hold_from(settings: CaptureSettings, consumer: str, start: Position) -> None:
    """Keep everything after `start` in spool and slot, or raise if it is no longer available.

    An earlier query of the same consumer may have released later positions. This sets the consumer's release
    to zero, not to `start`, which may be inside a commit record. Zero keeps the whole spool. The release is
    set before the check, since released segments may be deleted at any moment.
    """
    before = released_positions(settings.spool).get(consumer)
    set_released(settings.spool, consumer, Position.ZERO)
    try:
        check_start(settings, start)
    except BaseException:
        if before is None:
            remove_consumer(settings.spool, consumer)
        else:
            set_released(settings.spool, consumer, before)
        raise


def begin_now(settings: CaptureSettings) -> Position:
    """The position at which a query with `startingPosition` `now` starts: the current end of WAL. The slot
    must exist.
    """
    with connect(settings.address) as connection:
        return insert_position(connection)


def check_start(settings: CaptureSettings, start: Position) -> None:
    """Raise unless every change after `start` is available."""
    with connect(settings.address) as connection:
        slot, server = inspect_slot(connection, settings.slot), insert_position(connection)
    if start > server:
        raise ConfigError(
            f"the option 'startingPosition' is {start}, and the end of the server's WAL is {server}",
            hint="set startingPosition to now to begin at the end of the WAL",
        )
    if slot is None:
        raise SlotMissingError(
            f"changes after {start} are not available: slot {settings.slot} does not exist",
            hint="set startingPosition to snapshot or now, which create the slot, or set the option slot to "
            "an existing one",
        )
    spool = SpoolReader(settings.spool)
    ground = (spool.start, spool.end) if spool.start is not None and spool.end is not None else None
    check_continuity(start, ground, slot.confirmed, settings.slot)


def _no_tables(connection: Connection, request: SourceRequest, settings: CaptureSettings) -> NoTablesError:
    place = settings.address.describe()
    if request.choice.single is not None:
        return NoTablesError(
            f"there is no table {request.choice.single} in {place}",
            hint="check the option 'table'; names are case-sensitive",
        )
    if request.choice.patterns:
        return NoTablesError(
            f"no table in {place} matches {request.choice}",
            hint="check the option 'tables'; names are case-sensitive",
        )
    if inspect_publication(connection, settings.publication) is None:
        return NoTablesError(
            f"neither table nor tables is given, and there is no publication {settings.publication} in "
            f"{place}",
            hint='add .option("table", "public.orders"), .option("tables", "public.*"), or the name of an '
            "existing publication",
        )
    return NoTablesError(
        f"the publication {settings.publication} in {place} has no table", hint="add tables to it"
    )


CHECK_SECONDS = 30.0
"""Interval at which a running query checks its tables. The next run detects gaps that these checks miss."""


class TableWatch:
    """Checks that the stream misses no changes of the tables of one query. Used only by the thread in which
    Spark calls the reader.
    """

    def __init__(self, request: SourceRequest, check_seconds: float = CHECK_SECONDS) -> None:
        self._request = request
        self._settings = request.capture()
        self._check_seconds = check_seconds
        self._due = 0.0

    def begin(self, *, replace: bool) -> None:
        """Record the current tables. With `replace`, discard the record of an earlier query first. Call this
        after the publication was created, and before the snapshot with the fence is exported.
        """
        self._due = 0.0
        if replace:
            save_memberships(self._settings.spool, self._request.consumer, {})
        self.check()

    def check(self) -> None:
        """Raise if changes of a table may be missing. The first call checks the tables; later calls do so at
        most once per interval.
        """
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self._check_seconds
        found = inspect_captured_tables(
            self._settings.address,
            self._settings.publication,
            self._request.choice.selects,
            old_rows=self._settings.old_rows,
        )
        recorded = load_memberships(self._settings.spool, self._request.consumer)
        interrupted = found.interruptions(recorded, must_be_captured=bool(self._request.choice.patterns))
        for name, reason in interrupted.items():
            raise TableGapError(
                f"table {name} {reason}, so changes of {name} may be missing",
                hint=f"{NEW_QUERY}, and with startingPosition snapshot",
            )
        known = {**found.members, **recorded}
        if known != recorded or not recorded:
            save_memberships(self._settings.spool, self._request.consumer, known)
