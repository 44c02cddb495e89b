"""Read one record at a time, first from a table snapshot, then from the change stream.

A thread moves changes from the live stream to a buffer; rows come from the capture's snapshot. To go back to
an earlier position, the reader closes the stream and opens it again: the stream then resumes before all
unacknowledged changes.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from datetime import UTC, datetime

from typing_extensions import override

from penstock.contracts.capture import Change, ChangeCapture, ChangeStream, Upsert
from penstock.contracts.records import Operation, Record, RecordPosition, Snapshotter
from penstock.errors import (
    NoRowsError,
    PenstockError,
    RecordGoneError,
    RecordNotFoundError,
    SnapshotInterruptedError,
)
from penstock.position import Position
from penstock.records.builder import ChangePlace, RecordBuilder, SnapshotPlace, commit_of, parse_place
from penstock.records.stream import AckLedger, RecordStream, released_error


class CaptureSnapshotter(Snapshotter):
    """Reads the snapshot of a capture, one row ahead of its caller.

    Reading ahead shows which row is the last. The last row has the fence as its position, from which reading
    continues with changes.
    """

    def __init__(self, capture: ChangeCapture, builder: RecordBuilder) -> None:
        self._builder = builder
        self._time = datetime.now(UTC)
        self._number = 0
        self._failure: BaseException | None = None
        self._found: Record | None = None
        self._is_complete = self._is_closed = False
        self._changes = capture.snapshot([builder.table])
        # This first `next` takes the snapshot: `snapshot` is a generator, which does nothing before.
        self._ahead = next(self._changes, None)
        self.fence = None if self._ahead is None else commit_of(self._ahead).position
        """The position at which the snapshot is exact. After the snapshot, reading continues with the changes
        after this position. It is None for an empty table: reading then continues with all unacknowledged
        changes.
        """

    @property
    def is_drained(self) -> bool:
        """Whether every row was returned. The next `has_next` then returns False."""
        return self._ahead is None and self._found is None and self._failure is None

    @override
    def has_next(self) -> bool:
        if self._failure is not None and not self._is_closed:
            raise self._failure
        if self._found is None and self._ahead is not None and not self._is_closed:
            self._found = self._move(self._ahead)
        self._is_complete = self._is_complete or (self._found is None and not self._is_closed)
        return self._found is not None

    @override
    def next(self) -> Record:
        found, self._found = self._found, None
        if found is None:
            raise NoRowsError(
                "there is no further row, or has_next was not called", hint="call has_next before every next"
            )
        return found

    @override
    def teardown(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._found = None
        self._changes.close()
        if not self._is_complete:
            raise SnapshotInterruptedError(
                f"the snapshot of {self._builder.table} ended after {self._number} rows",
                hint="empty the target and take a new snapshot, which reads every row again",
            )

    def _move(self, change: Change) -> Record:
        """The record of the current row, `change`. First reads the row after it, to find out whether `change`
        is the last.
        """
        try:
            self._ahead = next(self._changes, None)
            self._number += 1
            return self._record(change)
        except BaseException as error:
            # Keep the error: a generator that raised looks finished, as if `change` had been the last row.
            self._failure = error
            raise

    def _record(self, change: Change) -> Record:
        assert self.fence is not None
        assert isinstance(change.event, Upsert)
        place = ChangePlace(self.fence) if self._ahead is None else SnapshotPlace(self.fence, self._number)
        return self._builder.row(change.event, Operation.SNAPSHOT, place.render(), self._time)


class RecordReading:
    """State of a source between `open` and `teardown`. For one thread at a time, except `ack` and `wake`."""

    def __init__(
        self,
        capture: ChangeCapture,
        builder: RecordBuilder,
        ledger: AckLedger,
        known: Position,
        *,
        takes_snapshot: bool,
        wait_seconds: float,
    ) -> None:
        self._capture = capture
        self._builder = builder
        self._ledger = ledger
        # Records of earlier runs are before this position; records of this run advance it.
        self._known = ChangePlace(known)
        self._takes_snapshot = takes_snapshot
        self._wait_seconds = wait_seconds
        self._live: ChangeStream | None = capture.live()
        self._stream: RecordStream | None = None
        self._snapshotter: CaptureSnapshotter | None = None
        self._is_positioned = self._is_woken = False
        self._current: RecordPosition | None = None
        self._previous: RecordPosition | None = None
        self._returned: Record | None = None

    def read(self, position: RecordPosition | None) -> Record:
        place = None if position is None else self._check(position)
        self._ledger.settle()
        if not self._is_positioned or position != self._current:
            if (
                self._is_positioned
                and position == self._previous
                and self._returned is not None
                and not self._is_acked(self._returned)
            ):
                return self._returned
            self._seek(position, place)
        record = self._next()
        self._previous, self._current, self._returned = position, record.position, record
        given = parse_place(record.position)
        if isinstance(given, ChangePlace):
            self._known = max(self._known, given)
        return record

    def ack(self, position: RecordPosition) -> None:
        place = parse_place(position)
        if isinstance(place, SnapshotPlace):
            return
        if place > self._known:
            raise RecordGoneError(
                f"{position} was not read from this source", hint="pass the position of a record unchanged"
            )
        self._ledger.ack(place)

    def wake(self) -> None:
        """End the wait of a `read` for a record: a wait that has begun, or one that begins later."""
        self._is_woken = True
        stream = self._stream
        if stream is not None:
            stream.buffer.teardown()

    def close(self) -> None:
        with ExitStack() as closing:  # after a failure, the rest is closed too
            if self._live is not None:
                closing.callback(self._live.close)
            if self._stream is not None:
                closing.callback(self._stream.close)
            closing.callback(self._ledger.close)
            if self._snapshotter is not None:
                closing.callback(self._snapshotter.teardown)

    # --- positions ------------------------------------------------------------------------------------------

    def _check(self, position: RecordPosition) -> ChangePlace | SnapshotPlace:
        """The parsed position. Raises an error before anything is read if reading cannot continue there."""
        place = parse_place(position)
        if isinstance(place, SnapshotPlace):
            return place
        acked = self._ledger.acked
        if place < acked:
            raise released_error(place, acked)
        if place > self._known:
            raise RecordGoneError(
                f"{position} is beyond the server's position; it belongs to another server, or the server "
                "was restored to an earlier state",
                hint="empty the target and read from the start, with None",
            )
        return place

    def _seek(self, position: RecordPosition | None, place: ChangePlace | SnapshotPlace | None) -> None:
        if isinstance(place, SnapshotPlace):
            raise SnapshotInterruptedError(
                f"the snapshot of {self._builder.table} ended before its last row, so reading cannot "
                f"continue at {position}",
                hint="empty the target and read from the start, with None",
            )
        self._is_positioned = False
        self._close_snapshot()
        live = self._unread_stream()
        if place is not None:
            self._follow(live, place)
        elif not self._takes_snapshot:
            self._follow(live, self._ledger.acked)
        else:
            self._snapshotter = CaptureSnapshotter(self._capture, self._builder)
        self._current, self._previous, self._returned = position, None, None
        self._is_positioned = True

    def _unread_stream(self) -> ChangeStream:
        """Return a stream from which nothing has been read. It is opened before the snapshot is taken, so
        that no change is lost between snapshot and stream.
        """
        if self._stream is not None:
            self._ledger.settle(at_once=True)
            stream, self._stream = self._stream, None
            stream.close()
            self._ledger.restart()
        if self._live is None:
            self._live = self._capture.live()
        return self._live

    def _follow(self, live: ChangeStream, after: ChangePlace) -> None:
        self._live = None
        self._stream = RecordStream(live, self._builder, self._ledger, after)
        if self._is_woken:  # `wake` was called before the stream existed
            self._stream.buffer.teardown()

    def _close_snapshot(self) -> None:
        snapshotter, self._snapshotter = self._snapshotter, None
        if snapshotter is not None:
            with suppress(SnapshotInterruptedError):
                snapshotter.teardown()

    # --- records --------------------------------------------------------------------------------------------

    def _next(self) -> Record:
        if self._snapshotter is not None:
            record = self._next_row(self._snapshotter)
            if record is not None:
                return record
        assert self._stream is not None
        if not self._stream.buffer.wait(self._wait_seconds):
            raise RecordNotFoundError("there is no record after this position yet", hint="try again")
        try:
            return self._stream.buffer.next()
        except PenstockError:
            # The stream ended. The next read may try again with a new stream.
            self._is_positioned = False
            raise

    def _is_acked(self, record: Record) -> bool:
        place = parse_place(record.position)
        return isinstance(place, ChangePlace) and place <= self._ledger.acked

    def _next_row(self, snapshotter: CaptureSnapshotter) -> Record | None:
        """The next row of the snapshot; None if the table is empty. After the last row, this opens the stream
        of changes.
        """
        try:
            record = snapshotter.next() if snapshotter.has_next() else None
        except BaseException:
            # The snapshot cannot continue; the next read with one of its positions raises an error.
            self._is_positioned = False
            self._close_snapshot()
            raise
        if snapshotter.is_drained:
            self._close_snapshot()
            # An empty table has no fence: deliver all unacknowledged changes.
            self._follow(
                self._unread_stream(),
                self._ledger.acked if snapshotter.fence is None else ChangePlace(snapshotter.fence),
            )
        return record
