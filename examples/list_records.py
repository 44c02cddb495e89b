"""The smallest implementation of the record source contract: a list of events, and the number of acknowledged
events.

`Log` represents the source and its durable state; everything else may be lost at any time. Run it to see
records, or use it as a template for your own source: `tests/contract/test_list_records.py` runs the
conformance suites against it.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime

from typing_extensions import override

from penstock import (
    CdcIterator,
    Delete,
    Record,
    RecordPosition,
    RecordSource,
    Snapshotter,
    TableName,
    Truncate,
    Upsert,
)
from penstock.contracts.capture import Event
from penstock.contracts.records import OPERATION, TABLE, Operation
from penstock.errors import (
    InvalidUrlError,
    NoRowsError,
    NoTableError,
    RecordGoneError,
    RecordNotFoundError,
    SnapshotInterruptedError,
)

_WAIT_SECONDS = 0.05
_ROW = re.compile(r"row ([0-9]+) at ([0-9]+)")
_EVENT = re.compile(r"after ([0-9]+)")


class Log:
    """The events of one table, and the number of acknowledged events."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.events: list[tuple[Event, datetime]] = []
        self.acked = 0

    def commit(self, *events: Event) -> None:
        with self.changed:
            self.events += ((event, datetime.now(UTC)) for event in events)
            self.changed.notify_all()

    def rows(self) -> tuple[int, list[Upsert]]:
        """The current rows, and the number of events they result from."""
        rows: dict[tuple[object, ...], Upsert] = {}
        with self.changed:
            for event, _ in self.events:
                match event:
                    case Upsert():
                        rows[tuple(event.key.values())] = event
                    case Delete():
                        rows.pop(tuple(event.key.values()), None)
                    case Truncate():
                        rows.clear()
            return len(self.events), list(rows.values())


class ListSnapshotter(Snapshotter):
    """Holds all rows from its creation; the rest of the class implements the rules of the contract."""

    def __init__(self, log: Log, table: TableName) -> None:
        self.at, rows = log.rows()
        self._table = table
        self._rows = deque(rows)
        self._read = 0
        self._found: Record | None = None
        self._is_complete = self._is_closed = False

    @override
    def has_next(self) -> bool:
        if self._found is None and self._rows and not self._is_closed:
            row = self._rows.popleft()
            self._read += 1
            # The position of the last row is that of the first event after the snapshot.
            position = f"row {self._read} at {self.at}" if self._rows else f"after {self.at}"
            self._found = _record(self._table, row, position, datetime.now(UTC), Operation.SNAPSHOT)
        self._is_complete = self._is_complete or (self._found is None and not self._is_closed)
        return self._found is not None

    @override
    def next(self) -> Record:
        found, self._found = self._found, None
        if found is None:
            raise NoRowsError("no row", hint="ask has_next first")
        return found

    @override
    def teardown(self) -> None:
        was_closed, self._is_closed, self._found = self._is_closed, True, None
        if not was_closed and not self._is_complete:
            raise SnapshotInterruptedError(
                f"ended after {self._read} rows", hint="empty the target and take a new snapshot"
            )


class ListIterator(CdcIterator):
    """A bounded buffer for pushed records."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._changed = threading.Condition()
        self._records: deque[Record] = deque()
        self._is_closed = False

    @override
    def has_next(self) -> bool:
        return bool(self._records)

    @override
    def next(self) -> Record:
        with self._changed:
            self._changed.wait_for(lambda: self._records or self._is_closed)
            self._changed.notify_all()
            if not self._records:
                raise NoRowsError("closed")
            return self._records.popleft()

    @override
    def push(self, record: Record) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._records) < self._capacity)
            if self._is_closed:
                raise NoRowsError("closed")
            self._records.append(record)
            self._changed.notify_all()

    @override
    def teardown(self) -> None:
        with self._changed:
            self._is_closed = True
            self._records.clear()
            self._changed.notify_all()


class ListRecordSource(RecordSource):
    """Reads the table of the log that the URL names, `list:NAME`.

    It can look up any event, so it needs no buffer.
    """

    def __init__(self, logs: Mapping[str, Log]) -> None:
        self._logs = logs
        self._lock = threading.RLock()
        self._log: Log | None = None
        self._table = TableName("", "")
        self._snapshotter: ListSnapshotter | None = None
        self._before: RecordPosition | None = None
        self._given: Record | None = None

    @override
    def validate(self, config: Mapping[str, str]) -> None:
        if not config.get("table"):
            raise NoTableError("no table", hint="set table")
        if not config.get("url", "").startswith("list:"):
            raise InvalidUrlError("not an address", hint="set url to list:NAME")

    @override
    def open(self, config: Mapping[str, str]) -> None:
        self.validate(config)
        log = self._logs.get(config["url"].removeprefix("list:"))
        if log is None:
            raise InvalidUrlError("there is no such list")
        self._table = TableName.parse(config["table"])
        self._log = log

    @override
    def read(self, position: RecordPosition | None) -> Record:
        with self._lock:
            if (
                self._given is not None
                and position == self._before
                and not self._is_acked(self._given.position)
            ):
                self._opened()
                return self._given
            record = (
                self._event(position)
                if position is not None and _EVENT.fullmatch(position.text)
                else self._row(position)
            )
            self._before, self._given = position, record
            return record

    @override
    def ack(self, position: RecordPosition) -> None:
        log = self._opened()
        if _ROW.fullmatch(position.text):
            return
        with log.changed:
            log.acked = max(log.acked, _number(position, log))

    @override
    def teardown(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            with log.changed:
                log.changed.notify_all()
        with self._lock:
            snapshotter, self._snapshotter = self._snapshotter, None
            if snapshotter is not None:
                snapshotter.teardown()

    def _opened(self) -> Log:
        if self._log is None:
            raise NoRowsError("not open", hint="call open first")
        return self._log

    def _is_acked(self, position: RecordPosition) -> bool:
        log = self._opened()
        return bool(_EVENT.fullmatch(position.text)) and _number(position, log) <= log.acked

    def _row(self, position: RecordPosition | None) -> Record:
        log = self._opened()
        if position is None:
            self._snapshotter = ListSnapshotter(log, self._table)
        elif not _ROW.fullmatch(position.text):
            raise RecordGoneError("not a position of this source", hint="begin with None")
        elif self._snapshotter is None or self._given is None or position != self._given.position:
            raise SnapshotInterruptedError(
                "that snapshot is over", hint="empty the target and begin with None"
            )
        snapshotter = self._snapshotter
        assert snapshotter is not None
        if not snapshotter.has_next():
            self._snapshotter = None
            return self._event(RecordPosition(f"after {snapshotter.at}"))
        record = snapshotter.next()
        if _EVENT.fullmatch(record.position.text):
            self._snapshotter = None
        return record

    def _event(self, position: RecordPosition) -> Record:
        log = self._opened()
        at = _number(position, log)
        with log.changed:
            if at < log.acked:
                raise RecordGoneError(
                    "what follows was acknowledged before", hint="empty the target and begin with None"
                )
            log.changed.wait_for(lambda: len(log.events) > at or self._log is None, _WAIT_SECONDS)
            self._opened()
            if len(log.events) <= at:
                raise RecordNotFoundError("nothing yet")
            event, time = log.events[at]
            return _record(self._table, event, f"after {at + 1}", time, Operation.UPSERT)


def _number(position: RecordPosition, log: Log) -> int:
    match = _EVENT.fullmatch(position.text)
    if match is None or int(match[1]) > len(log.events):
        raise RecordGoneError("not a position of this source", hint="begin with None")
    return int(match[1])


def _record(table: TableName, event: Event, position: str, time: datetime, operation: Operation) -> Record:
    place = RecordPosition(position)
    match event:
        case Upsert():
            return Record(place, event.key, event.row, {OPERATION: operation.value, TABLE: str(table)}, time)
        case Delete():
            return Record(
                place, event.key, None, {OPERATION: Operation.DELETE.value, TABLE: str(table)}, time
            )
        case Truncate():
            return Record(place, {}, None, {OPERATION: Operation.TRUNCATE.value, TABLE: str(table)}, time)


def main() -> None:
    table = TableName("public", "t")
    log = Log()
    log.commit(Upsert(table, {"id": 1}, {"id": 1, "note": "hello"}))
    position: RecordPosition | None = None
    with ListRecordSource({"shop": log}) as source:
        source.open({"url": "list:shop", "table": str(table)})
        for _ in range(2):
            record = source.read(position)
            print(record.operation, dict(record.key), record.payload)
            position = record.position
            source.ack(position)
            log.commit(Delete(table, {"id": 1}))


if __name__ == "__main__":
    main()
