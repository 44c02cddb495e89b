"""`PostgresRecordSource`, which reads records of one table over a `WalCapture`, and its settings."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from typing_extensions import override

from penstock.capture.provision import check_coverage
from penstock.capture.settings import CAPTURE_OPTIONS, CaptureSettings
from penstock.capture.wal import WalCapture
from penstock.contracts.records import Record, RecordPosition, RecordSource
from penstock.errors import (
    AuthenticationError,
    ConfigError,
    ConnectionLostError,
    InvalidUrlError,
    NoRowsError,
    NoTableError,
    PrivilegeError,
)
from penstock.options import OptionTable
from penstock.position import Position
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.slot import current_position
from penstock.records.builder import RecordBuilder
from penstock.records.reader import RecordReading
from penstock.records.stream import AckLedger
from penstock.schema import TableName
from penstock.secret import Secret

_OWN: Final = frozenset({"url", "table", "columns", "snapshot", "waitseconds"})
_UNSUPPORTED: Final = frozenset({"dsn", "tables", "process", "polling", "bytriggers", "oldrows"})
"""Options of a capture that the source sets itself, or that records do not support."""

_CAPTURE: Final = OptionTable(
    (option for option in CAPTURE_OPTIONS.options if option.key not in _UNSUPPORTED),
    page="docs/guides/records.md",
    example='"{name}": "…"',
)

_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class RecordSettings:
    """Settings of a record source, which reads one table through one slot.

    `url`, `table` (as schema.table), `slot` and `spool` are required. `columns` is a comma-separated list of
    the columns in records; the default is all. `snapshot` is `initial` (the default) or `never`.
    `waitSeconds` is the longest time that a read waits for a record. The other options are the same as those
    of the Spark source.
    """

    capture: CaptureSettings
    table: TableName
    columns: tuple[str, ...] = ()
    takes_snapshot: bool = True
    wait_seconds: float = _WAIT_SECONDS

    @classmethod
    def parse(cls, config: Mapping[str, str | None]) -> RecordSettings:
        """Parse the options; names are case-insensitive, and None is the same as no option."""
        folded = {name.lower(): value for name, value in config.items() if value is not None}
        table = _table(folded.get("table", ""))
        address = _address(folded.get("url", ""), folded.get("password"))
        rest = {name: value for name, value in folded.items() if name not in _OWN}
        unknown = sorted(set(rest) - _CAPTURE.keys)
        if unknown:
            raise ConfigError(
                f"a record source has no option {', '.join(unknown)}",
                hint="see docs/guides/records.md for all options",
            )
        _CAPTURE.check_required(rest)
        rest["dsn"] = address.dsn
        if address.password is not None:
            rest["password"] = address.password.reveal()
        return cls(
            CaptureSettings.from_options(rest),
            table,
            tuple(name.strip() for name in folded.get("columns", "").split(",") if name.strip()),
            _takes_snapshot(folded.get("snapshot", "initial")),
            _seconds(folded.get("waitseconds", "")),
        )


def _table(text: str) -> TableName:
    if not text.strip():
        raise NoTableError("the option 'table' is missing", hint="set table to schema.table")
    try:
        return TableName.parse(text)
    except ValueError as error:
        raise NoTableError(
            f"{text!r} is not the name of a table",
            hint="set table to schema.table, in double quotes where SQL needs them",
        ) from error


def _address(url: str, password: str | None) -> SourceAddress:
    if not url.strip():
        raise InvalidUrlError(
            "the option 'url' is missing", hint="set url to postgresql://user@host:5432/database"
        )
    try:
        return SourceAddress.parse(url, Secret(password) if password else None)
    except ConfigError as error:
        raise InvalidUrlError(error.message.replace("the source dsn", "url"), hint=error.hint) from error


def _takes_snapshot(text: str) -> bool:
    if text not in ("initial", "never"):
        raise ConfigError(f"the option 'snapshot' is {text!r}", hint="use one of: initial, never")
    return text == "initial"


def _seconds(text: str) -> float:
    try:
        value = float(text or _WAIT_SECONDS)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _LONGEST_WAIT_SECONDS:
        raise ConfigError(
            f"the option 'waitSeconds' is {text!r}", hint=f"use a number from 0 to {_LONGEST_WAIT_SECONDS:g}"
        )
    return value


class PostgresRecordSource(RecordSource):
    """The records of one table. `RecordSettings` describes the configuration."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._reading: RecordReading | None = None

    @override
    def validate(self, config: Mapping[str, str]) -> None:
        RecordSettings.parse(config)

    @override
    def open(self, config: Mapping[str, str]) -> None:
        self.validate(config)
        with self._lock:
            if self._reading is not None or self._is_over.is_set():
                state = "has been closed" if self._is_over.is_set() else "was already opened"
                raise ConfigError(f"the source {state}", hint="create a new source for every open")
            self._reading = self._begin(config)

    @override
    def read(self, position: RecordPosition | None) -> Record:
        with self._lock:
            if self._reading is None or self._is_over.is_set():
                raise _not_open()
            return self._reading.read(position)

    @override
    def ack(self, position: RecordPosition) -> None:
        reading = self._reading
        if reading is None or self._is_over.is_set():
            raise _not_open()
        reading.ack(position)

    @override
    def teardown(self) -> None:
        if self._is_over.is_set():
            return
        self._is_over.set()
        if self._reading is not None:
            self._reading.wake()
        with self._lock:
            if self._reading is not None:
                self._reading.close()

    def _begin(self, config: Mapping[str, str]) -> RecordReading:
        settings = RecordSettings.parse(config)
        capture = WalCapture(settings.capture, takes=frozenset({settings.table}))
        known = _reach(settings.capture.address)
        check_coverage(capture.ensure_coverage({settings.table}, manage=True))
        return RecordReading(
            capture,
            RecordBuilder(settings.table, settings.columns),
            AckLedger(settings.capture.spool),
            known,
            takes_snapshot=settings.takes_snapshot,
            wait_seconds=settings.wait_seconds,
        )


def _not_open() -> NoRowsError:
    return NoRowsError(
        "the source is not open", hint="call open before the first read; after teardown, create a new source"
    )


def _reach(address: SourceAddress) -> Position:
    """The server's current position. `open` uses it to check that the server can be reached."""
    try:
        with connect(address) as connection:
            return current_position(connection)
    except (AuthenticationError, ConnectionLostError, PrivilegeError) as error:
        raise InvalidUrlError(
            error.message, hint=error.hint or "check that the server runs, and host, port and database in url"
        ) from error
