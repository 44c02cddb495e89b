"""Settings of a capture: options, limits, polling rules, and the confirm mode. They have a text form, since
they are passed as options of the Spark source.

Confirm mode `applied` (the default) confirms positions that every consumer of the spool has released.
`spooled` confirms sealed positions, whose changes are on disk: the server can remove WAL sooner, but until
the targets have the changes, the spool is their only copy. With `max_retained_bytes`, the mode switches from
`applied` to `spooled` while the slot retains more WAL than that because the consumers are behind the sealed
position. WAL that a long transaction retains does not depend on the confirm mode, and causes no switch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

from penstock.errors import ConfigError
from penstock.location import absolute_path
from penstock.options import (
    BOOLEAN,
    SECONDS,
    SIZE,
    TEXT,
    TEXTS,
    Kind,
    Option,
    OptionTable,
    choice,
    declared_options,
    read_fields,
    switch,
    write_fields,
)
from penstock.position import Lsn, Position
from penstock.postgres.connection import SourceAddress
from penstock.postgres.publication import ONE_PUBLICATION, names_several
from penstock.postgres.slot import check_slot_name
from penstock.postgres.types.column import TypePolicy
from penstock.schema import TableName
from penstock.secret import FileSecret, Secret

RESUME_AT = 0.8
"""The mode returns to `applied` when the retained WAL falls below this fraction of the limit. With a fraction
of 1 the mode would oscillate at the limit.
"""


BEHIND_AT = 0.2
"""The mode switches to `spooled` only if the consumers are behind the sealed position by more than this
fraction of the limit. If they are closer, something else retains the WAL.
"""


class CaptureMethod(StrEnum):
    """How changes are found. The values are stored in the identity of a spool."""

    WAL = "wal"
    POLLING = "polling"
    TRIGGER = "trigger"

    @property
    def uses_publication(self) -> bool:
        """Whether a publication chooses tables, columns and rows, and a slot retains WAL."""
        return self is CaptureMethod.WAL


class Confirm(StrEnum):
    APPLIED = "applied"
    SPOOLED = "spooled"


class ConfirmPolicy:
    """Decides which position is confirmed to the server. A capture uses one object for its whole lifetime,
    and passes only durable positions.
    """

    def __init__(self, configured: Confirm, max_retained_bytes: int | None) -> None:
        self._configured = configured
        self._max_retained_bytes = max_retained_bytes
        self._mode = configured

    @property
    def mode(self) -> Confirm:
        return self._mode

    @property
    def gives_way(self) -> bool:
        """Whether the limit has switched the mode from `applied` to `spooled`."""
        return self._mode is not self._configured

    def update(
        self, server: Position, restart: Lsn | None, released: Position | None, sealed: Position | None
    ) -> bool:
        """Choose the mode for a sample of the server; returns whether the mode changed. `server` is the end
        of the WAL, `restart` the slot's restart point. The retained WAL is measured from `restart` or from
        the released position, whichever is earlier. In both modes this is the WAL that mode `applied` would
        retain. So the mode stays `spooled` while the consumers are behind, although the slot itself has
        advanced.
        """
        if self._max_retained_bytes is None or self._configured is Confirm.SPOOLED:
            return False
        kept = [
            position
            for position in (restart, released.lsn if released is not None else None)
            if position is not None
        ]
        if not kept:
            return False
        retained_bytes = server.lsn - min(kept)
        gained_bytes = (sealed or Position.ZERO).lsn - (released or Position.ZERO).lsn
        limit = self._max_retained_bytes * (RESUME_AT if self.gives_way else 1)
        margin = self._max_retained_bytes * BEHIND_AT * (RESUME_AT if self.gives_way else 1)
        mode = Confirm.SPOOLED if retained_bytes > limit and gained_bytes > margin else Confirm.APPLIED
        changed, self._mode = mode is not self._mode, mode
        return changed

    def confirmable(self, released: Position | None, sealed: Position | None) -> Position | None:
        """Return the position to confirm: `sealed` in mode `spooled`, otherwise `released`. None if there is
        none yet.
        """
        position = sealed if self._mode is Confirm.SPOOLED else released
        return position if position is not None and position > Position.ZERO else None


XMIN = "xmin"
"""The value that stands for no cursor column: changed rows are found by `xmin`, the id of the transaction
that wrote the row.
"""


@dataclass(frozen=True, slots=True)
class PollingRules:
    """Rules of capture by polling: interval, cursor columns, detection of deletes, and the resume store."""

    interval_seconds: float = 1.0
    """The pause between two polls."""
    cursor: str = XMIN
    """The cursor column, or `xmin`, of all tables that `cursors` does not list."""
    cursors: tuple[tuple[TableName, str], ...] = ()
    """Cursor columns, or `xmin`, of individual tables."""
    deletes: bool = False
    """Whether deleted rows are detected, by comparing all keys in every poll."""
    resume: Path | None = None
    """The directory of the resume store. If None, the resume store is in the tables `penstock.polling` and
    `penstock.polled_tables` of the source.
    """

    DEFAULT: ClassVar[PollingRules]

    def __post_init__(self) -> None:
        if not 0 <= self.interval_seconds < math.inf:
            raise ConfigError(
                f"the polling interval is {self.interval_seconds} s",
                hint="set polling.interval to a finite time of 0 seconds or more",
            )
        if self.resume is not None:
            object.__setattr__(self, "resume", absolute_path(self.resume, "resume"))

    def cursor_of(self, table: TableName) -> str:
        return dict(self.cursors).get(table, self.cursor)

    def to_text(self) -> str:
        return json.dumps(
            {
                "interval_seconds": self.interval_seconds,
                "cursor": self.cursor,
                "cursors": {str(table): column for table, column in self.cursors},
                "deletes": self.deletes,
                "resume": None if self.resume is None else str(self.resume),
            }
        )

    @classmethod
    def parse(cls, text: str) -> PollingRules:
        document = json.loads(text)
        return cls(
            interval_seconds=document["interval_seconds"],
            cursor=document["cursor"],
            cursors=tuple((TableName.parse(table), column) for table, column in document["cursors"].items()),
            deletes=document["deletes"],
            resume=None if document["resume"] is None else Path(document["resume"]),
        )


PollingRules.DEFAULT = PollingRules()


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """Limits on the size and age of changes in memory and in the spool, and intervals of a capture."""

    segment_rows: Annotated[int, Option("A segment is sealed at this number of rows.", SIZE)] = 100_000
    segment_bytes: Annotated[int, Option("A segment is sealed at this number of bytes.", SIZE)] = 64 << 20
    segment_seconds: Annotated[
        float, Option("A segment is sealed when its oldest change has this age.", SECONDS)
    ] = 0.5
    seal_seconds: Annotated[
        float, Option("Minimum time between two segments, unless one is full.", SECONDS)
    ] = 0.02
    """The capture increases this time while consumers lag."""
    quiet_seconds: Annotated[
        float,
        Option("Minimum time between two advances of the position while no captured table changes.", SECONDS),
    ] = 5.0
    buffer_bytes: Annotated[int, Option("Maximum bytes of received changes in memory.", SIZE)] = 128 << 20
    spool_bytes: Annotated[
        int, Option("At this spool size the capture pauses until the consumers catch up.", SIZE)
    ] = 20 << 30
    silence_seconds: Annotated[
        float,
        Option(
            "Time without a message from the server after which the connection counts as lost; at least "
            "the server's `wal_sender_timeout`.",
            SECONDS,
        ),
    ] = 60.0
    watch_seconds: Annotated[float, Option("Interval of the health checks of slot and server.", SECONDS)] = (
        5.0
    )
    long_transaction_seconds: Annotated[
        float, Option("Age from which an open transaction is reported.", SECONDS)
    ] = 60.0


def _tables(text: str) -> tuple[TableName, ...]:
    return tuple(TableName.parse(name) for name in json.loads(text))


def tables_option(tables: Iterable[TableName]) -> str:
    """Return the text of the option `tables`, which only Penstock itself sets.

    It is JSON, since a table name may contain any character.
    """
    return json.dumps([str(table) for table in tables])


_TABLES = Kind("list", _tables, "a JSON list of tables", tables_option)
_DIRECTORY = Kind("directory", Path)
_POLLING = Kind("JSON", PollingRules.parse, "polling rules in JSON", PollingRules.to_text)

DSN = Option("Connection string: libpq URI or key=value, without the password.", name="dsn", is_required=True)
PASSWORD = Option("Password of the role.", name="password")
PASSWORD_FILE = Option(
    "File with the password, instead of `password`. It is read for every connection, so that a token in it "
    "can be rotated.",
    TEXT.named("file"),
    name="passwordFile",
)


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """Settings of one capture: the source, the slot and publication (or polling rules), and the spool."""

    address: SourceAddress
    slot: Annotated[str, Option("Name of the replication slot.", TEXT.named("name"), is_required=True)]
    publication: Annotated[str, Option("Publication. Default: the name of the slot.", TEXT.named("name"))]
    spool: Annotated[Path, Option("Spool directory.", _DIRECTORY, is_required=True)]
    tables: Annotated[tuple[TableName, ...], Option("", _TABLES, is_internal=True)] = ()
    """With `wal`, the tables to publish when the capture creates a missing slot; if empty, the capture
    creates neither slot nor publication. With `polling`, the tables to poll; if empty, the capture polls all
    tables that any process has added.
    """
    limits: CaptureLimits = CaptureLimits()
    types: TypePolicy = TypePolicy.DEFAULT
    failover: Annotated[
        bool,
        Option(
            "Synchronise the slot to standbys, so that it survives a failover. Postgres 17 and later.",
            BOOLEAN,
        ),
    ] = False
    confirm: Annotated[
        Confirm,
        Option(
            "When WAL is confirmed, so that the server may remove it: when all consumers have `applied` "
            "it, or when it is "
            "`spooled` to disk.",
            choice(*Confirm, of=Confirm),
        ),
    ] = Confirm.APPLIED
    max_retained_bytes: Annotated[
        int | None,
        Option(
            "With `confirm: applied`: while the slot retains more than this number of bytes of WAL because "
            "consumers are behind, "
            "confirm as with `spooled`.",
            SIZE,
            name="maxRetainedWal",
        ),
    ] = None
    message_prefixes: Annotated[tuple[str, ...], Option("", TEXTS, is_internal=True)] = ()
    """Prefixes of the logical messages that are kept in the spool; the capture ignores all others."""
    is_separate: Annotated[
        bool,
        Option(
            "Where the capture runs: in the process of the pipeline or query (`embedded`), or in `penstock "
            "capture`, which "
            "several of them can share (`separate`).",
            switch("embedded", "separate"),
            name="process",
        ),
    ] = False
    polling: Annotated[PollingRules | None, Option("", _POLLING, is_internal=True)] = None
    """The rules of a capture by polling; None for other capture methods. With polling, there is no
    publication, and `slot` is only the name of the capture.
    """
    by_triggers: Annotated[bool, Option("", BOOLEAN, is_internal=True)] = False
    """Whether to capture by triggers. `slot` is then the schema of the change table."""
    old_rows: Annotated[
        bool,
        Option(
            "Also return the row as it was before each update and delete; the tables need REPLICA IDENTITY "
            "FULL.",
            BOOLEAN,
        ),
    ] = False

    @property
    def method(self) -> CaptureMethod:
        if self.by_triggers:
            return CaptureMethod.TRIGGER
        return CaptureMethod.WAL if self.polling is None else CaptureMethod.POLLING

    def __post_init__(self) -> None:
        check_slot_name(self.slot)
        if names_several(self.publication):
            raise ConfigError(
                f"the option 'publication' lists several: {self.publication}", hint=ONE_PUBLICATION
            )
        object.__setattr__(self, "spool", absolute_path(self.spool, "spool"))

    def to_options(self) -> dict[str, str]:
        """Return the settings as options of the Spark source.

        Spark redacts the option named `password` wherever it shows options.

        A password file is passed as a path, and is read on the machine where the capture runs. Spark tasks,
        which run on other machines, are sent the content of the file.
        """
        options = {
            "dsn": self.address.dsn,
            **write_fields(self),
            **write_fields(self.limits),
            **write_fields(self.types),
        }
        if isinstance(self.address.password, FileSecret):
            options["passwordFile"] = str(self.address.password.path)
        elif self.address.password is not None:
            options["password"] = self.address.password.reveal()
        return options

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> CaptureSettings:
        """Parse the options; names are case-insensitive. Options of other interfaces are ignored."""
        given = {name.lower(): value for name, value in options.items()}
        CAPTURE_OPTIONS.check_required(given)
        values = read_fields(cls, given)
        return cls(
            **values | {"publication": values["publication"] or values["slot"]},
            address=_address(given),
            limits=CaptureLimits(**read_fields(CaptureLimits, given)),
            types=_types(given),
        )


CAPTURE_OPTIONS = OptionTable(
    (
        DSN,
        PASSWORD,
        PASSWORD_FILE,
        *declared_options(CaptureSettings),
        *declared_options(TypePolicy),
        *declared_options(CaptureLimits),
    ),
    page="docs/reference/source-options.md",
    example='.option("{name}", …)',
)
"""Options of every interface that runs a capture: the Spark source, the connectors, the record source."""


def _address(given: Mapping[str, str]) -> SourceAddress:
    password = given.get("password")
    address = SourceAddress.parse(given["dsn"])
    if address.password is not None:
        raise ConfigError(
            "the option 'dsn' contains a password, and Spark shows that option wherever it prints a plan",
            hint='remove it from the dsn and add .option("password", …), which Spark hides',
        )
    file = given.get("passwordfile")
    if password and file:
        raise ConfigError(
            "the options 'password' and 'passwordFile' are both given", hint="leave one of them out"
        )
    if file:
        return SourceAddress(address.dsn, FileSecret.at(Path(file)))
    return SourceAddress(address.dsn, Secret(password)) if password else address


def _types(given: Mapping[str, str]) -> TypePolicy:
    try:
        return TypePolicy(**read_fields(TypePolicy, given))
    except ValueError as error:
        raise ConfigError(
            f"an option about types is wrong: {error}", hint="see docs/reference/types.md"
        ) from error
