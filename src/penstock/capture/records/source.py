"""`PostgresRecordSource`: the contract of a record source, for Postgres, over a `WalCapture`."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from typing_extensions import override

from penstock.capture.provision import check_coverage
from penstock.capture.records.building import RecordBuilder
from penstock.capture.records.ledger import AckLedger
from penstock.capture.records.reading import RecordReading
from penstock.capture.records.settings import RecordSettings
from penstock.capture.wal import WalCapture
from penstock.contracts.records import Record, RecordPosition, RecordSource
from penstock.errors import AuthenticationError, ConfigError, ConnectionLostError, InvalidUrlError, NoRowsError, PrivilegeError
from penstock.position import Position
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.slot import current_position


class PostgresRecordSource(RecordSource):
    """The records of one table. `RecordSettings` says what the configuration may hold."""

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
                raise ConfigError("the source was opened before", hint="make a new one for every open")
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
    return NoRowsError("the source is not open", hint="call open before the first read, and nothing after teardown")


def _reach(address: SourceAddress) -> Position:
    """Where the server is; that it answers at all is what `open` has to find out."""
    try:
        with connect(address) as connection:
            return current_position(connection)
    except (AuthenticationError, ConnectionLostError, PrivilegeError) as error:
        raise InvalidUrlError(error.message, hint=error.hint or "check that the server runs, and host, port and database in url") from error
