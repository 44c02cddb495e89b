"""The changes of one table as a bounded stream of records, with acknowledgements up to a position.

For each transaction, only the `Ack` of its last change is kept; those of the earlier changes are confirmed at
once. This is safe because a capture resumes at whole transactions: its resume point moves only when the last
change of a transaction is confirmed. Memory is proportional to the number of unacknowledged transactions.

The acknowledged position is stored *before* it is confirmed to the capture. So a caller that continues from
an older position, for example from a backup, gets an error instead of silently missing changes. The slot's
position is no substitute: it also advances over WAL without changes.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from pathlib import Path

from typing_extensions import override

from penstock import storage
from penstock.capture.watermark import CumulativeAcks
from penstock.contracts.capture import Ack, Change, ChangeStream
from penstock.contracts.records import CdcIterator, Record, RecordPosition
from penstock.errors import NoRowsError, RecordGoneError, SpoolCorruptError, SpoolError
from penstock.position import Position
from penstock.records.builder import ChangePlace, RecordBuilder, SnapshotPlace, parse_place, place_of
from penstock.spool.manifest import FORMAT, SpoolLayout, parse_document

_CAPACITY = 256


class RecordBuffer(CdcIterator):
    """Holds a few records, and the error that follows them if the stream failed."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._changed = threading.Condition()
        self._records: deque[Record] = deque()
        self._failure: BaseException | None = None
        self._is_closed = False

    @override
    def has_next(self) -> bool:
        with self._changed:
            return bool(self._records)

    @override
    def next(self) -> Record:
        with self._changed:
            self._changed.wait_for(self._has_answer)
            if self._records:
                self._changed.notify_all()
                return self._records.popleft()
            if self._failure is not None and not self._is_closed:
                raise self._failure
            raise _closed()

    @override
    def push(self, record: Record) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._records) < self._capacity)
            if self._is_closed:
                raise _closed()
            self._records.append(record)
            self._changed.notify_all()

    @override
    def teardown(self) -> None:
        with self._changed:
            self._is_closed = True
            self._records.clear()
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End the stream: once the buffer is empty, `next` raises `error`. No effect after `teardown`."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until `next` does not block. Returns False after the timeout."""
        with self._changed:
            return self._changed.wait_for(self._has_answer, timeout_seconds)

    def _has_answer(self) -> bool:
        return bool(self._records) or self._failure is not None or self._is_closed


def _closed() -> NoRowsError:
    return NoRowsError(
        "the record source was closed", hint="open a new one and continue from the last position"
    )


_SETTLE_SECONDS = 0.1


class AckLedger:
    """Stores the acknowledged position, then confirms the acknowledgements up to it.

    The thread of the stream calls `deliver`; any thread may call the other methods.
    """

    def __init__(self, spool: Path) -> None:
        self._file = SpoolLayout(spool).records
        self._lock = threading.Lock()
        self._acked = self._settled = _load(self._file)
        self._waiting: CumulativeAcks[ChangePlace, Ack] = CumulativeAcks()
        self._settled_at = 0.0
        self._is_closed = False

    @property
    def acked(self) -> ChangePlace:
        """The position up to which everything was acknowledged, in this run or an earlier one."""
        with self._lock:
            return self._acked

    @property
    def waiting(self) -> int:
        """Number of `Ack`s that wait to be confirmed; memory use is proportional to it."""
        with self._lock:
            return len(self._waiting)

    def deliver(self, place: ChangePlace, ack: Ack) -> None:
        """Keep the `ack` of the change at `place`, and confirm it when `place` is acknowledged. Call this in
        the order of places.
        """
        with self._lock:
            if place <= self._settled:
                ack.confirm()
                return
            last = self._waiting.last
            if last is not None and last[0].position == place.position:
                self._waiting.remove_last().confirm()
            self._waiting.append(place, ack)

    def ack(self, place: ChangePlace) -> None:
        with self._lock:
            if self._is_closed:
                raise NoRowsError(
                    "the source is closed and takes no acknowledgements",
                    hint="acknowledge before teardown; the record is delivered again",
                )
            self._acked = max(self._acked, place)
        self.settle()

    def settle(self, *, at_once: bool = False) -> None:
        """Store the acknowledged position, then confirm the changes up to it; at most ten times a second,
        unless `at_once`.
        """
        with self._lock:
            now = time.monotonic()
            if self._acked > self._settled and (at_once or now - self._settled_at >= _SETTLE_SECONDS):
                self._acked = max(
                    self._acked, _load(self._file)
                )  # another process may have stored a later position
                _store(self._file, self._acked)
                self._settled, self._settled_at = self._acked, now
            for ack in self._waiting.take(self._settled):
                ack.confirm()

    def refresh(self) -> ChangePlace:
        """Reload the acknowledged position, which another process may have moved."""
        with self._lock:
            self._acked = max(self._acked, _load(self._file))
            return self._acked

    def close(self) -> None:
        """Store the last position, and reject further acknowledgements."""
        with self._lock:
            self._is_closed = True
        self.settle(at_once=True)

    def restart(self) -> None:
        """Forget the unconfirmed acknowledgements of a stream that ended. Their changes will be delivered
        again.
        """
        with self._lock:
            self._waiting.clear()


def released_error(after: ChangePlace, acked: ChangePlace) -> RecordGoneError:
    return RecordGoneError(
        f"the records after {after.render()} were acknowledged up to {acked.render()} and may no longer be "
        "available",
        hint=f"continue from {acked.render()} if the target has everything up to it; "
        "otherwise empty the target and read from the start, with None",
    )


def _load(path: Path) -> ChangePlace:
    data = storage.read(path)
    if data is None:
        return ChangePlace(Position.ZERO)
    try:
        place = parse_place(RecordPosition(str(parse_document(data, where=path.name)["acked"])))
    except (KeyError, RecordGoneError) as error:
        raise _corrupt(path) from error
    if isinstance(place, SnapshotPlace):
        raise _corrupt(path)
    return place


def _store(path: Path, place: ChangePlace) -> None:
    document = {"format": FORMAT, "acked": str(place.render())}
    try:
        storage.put(path, json.dumps(document).encode())
    except OSError as error:
        raise SpoolError(f"the spool cannot be written: {error}") from error


def _corrupt(path: Path) -> SpoolCorruptError:
    return SpoolCorruptError(
        f"{path.name} has no position", hint=f"remove {path.name} from the spool; it is written again"
    )


_log = logging.getLogger(__name__)


class RecordStream:
    """Owns the capture's stream and the thread that reads it into `buffer`. Changes up to `after` are not put
    into the buffer, but not acknowledged either.
    """

    def __init__(
        self, changes: ChangeStream, builder: RecordBuilder, ledger: AckLedger, after: ChangePlace
    ) -> None:
        self.buffer = RecordBuffer()
        self._changes = changes
        self._builder = builder
        self._ledger = ledger
        self._after = after
        self._has_begun = False
        self._thread = threading.Thread(target=self._run, name="penstock-records", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the stream. Everything confirmed before is durable when this returns."""
        self.buffer.teardown()
        self._changes.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            for change in self._changes:
                if not self._has_begun:
                    self._begin()
                self._take(change)
        except NoRowsError:
            _log.debug("record stream closed")
        except BaseException as error:  # noqa: BLE001 - edge of the thread: the reader raises it
            self.buffer.fail(error)

    def _begin(self) -> None:
        """Check at the first change that the changes after `after` are still available. Only from then on the
        capture holds the slot: before, another process may have acknowledged, and thereby released, some of
        them.
        """
        self._has_begun = True
        acked = self._ledger.refresh()
        if self._after < acked:
            raise released_error(self._after, acked)

    def _take(self, change: Change) -> None:
        if change.event.table != self._builder.table:
            # The publication also has this table, for another consumer.
            change.ack.confirm()
            return
        place = place_of(change)
        self._ledger.deliver(place, change.ack)
        if place > self._after:
            self.buffer.push(self._builder.record(change))
