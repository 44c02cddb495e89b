"""Reading one record at a time from a capture, whichever it is.

Changes come from its live stream, through a thread and a buffer; rows from its snapshot. Going back is closing the stream and opening it
anew: it resumes before everything that is not acknowledged.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress

from penstock.capture.records.building import RecordBuilder
from penstock.capture.records.ledger import AckLedger, let_go
from penstock.capture.records.places import ChangePlace, SnapshotPlace, parse_place
from penstock.capture.records.snapshotter import CaptureSnapshotter
from penstock.capture.records.stream import RecordStream
from penstock.contracts.capture import ChangeCapture, ChangeStream
from penstock.contracts.records import Record, RecordPosition
from penstock.errors import PenstockError, RecordGoneError, RecordNotFoundError, SnapshotInterruptedError
from penstock.position import Position


class RecordReading:
    """What is open between `open` and `teardown` of a source. For one thread at a time, but for `ack` and `wake`."""

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
        # What an earlier run gave out lies before here; what this one gives out raises it.
        self._known = ChangePlace(known)
        self._takes_snapshot = takes_snapshot
        self._wait_seconds = wait_seconds
        self._live: ChangeStream | None = capture.live()
        self._stream: RecordStream | None = None
        self._snapshotter: CaptureSnapshotter | None = None
        self._is_placed = self._is_woken = False
        self._at: RecordPosition | None = None
        self._before: RecordPosition | None = None
        self._given: Record | None = None

    def read(self, position: RecordPosition | None) -> Record:
        place = None if position is None else self._check(position)
        self._ledger.settle()
        if not self._is_placed or position != self._at:
            if self._is_placed and position == self._before and self._given is not None and not self._is_acked(self._given):
                return self._given
            self._seek(position, place)
        record = self._next()
        self._before, self._at, self._given = position, record.position, record
        given = parse_place(record.position)
        if isinstance(given, ChangePlace):
            self._known = max(self._known, given)
        return record

    def ack(self, position: RecordPosition) -> None:
        place = parse_place(position)
        if isinstance(place, SnapshotPlace):
            return
        if place > self._known:
            raise RecordGoneError(f"{position} was not read from this source", hint="acknowledge positions of records as they came")
        self._ledger.ack(place)

    def wake(self) -> None:
        """End a `read` that waits for a record, or is about to."""
        self._is_woken = True
        stream = self._stream
        if stream is not None:
            stream.buffer.teardown()

    def close(self) -> None:
        with ExitStack() as closing:  # whatever fails, the rest is closed too
            if self._live is not None:
                closing.callback(self._live.close)
            if self._stream is not None:
                closing.callback(self._stream.close)
            closing.callback(self._ledger.close)
            if self._snapshotter is not None:
                closing.callback(self._snapshotter.teardown)

    # --- where to read --------------------------------------------------------------------------------------------------

    def _check(self, position: RecordPosition) -> ChangePlace | SnapshotPlace:
        """Refuse what cannot be gone on from, before anything is read."""
        place = parse_place(position)
        if isinstance(place, SnapshotPlace):
            return place
        acked = self._ledger.acked
        if place < acked:
            raise let_go(place, acked)
        if place > self._known:
            raise RecordGoneError(
                f"{position} lies beyond what this source has read so far; it is of another server, or of one that was set back",
                hint="empty the target and read from the start, with None",
            )
        return place

    def _seek(self, position: RecordPosition | None, place: ChangePlace | SnapshotPlace | None) -> None:
        if isinstance(place, SnapshotPlace):
            raise SnapshotInterruptedError(
                f"the snapshot of {self._builder.table} ended before its last row, and {position} leads nowhere any more",
                hint="empty the target and read from the start, with None",
            )
        self._is_placed = False
        self._leave_snapshot()
        live = self._unread()
        if place is not None:
            self._follow(live, place)
        elif not self._takes_snapshot:
            self._follow(live, self._ledger.acked)
        else:
            self._snapshotter = CaptureSnapshotter(self._capture, self._builder)
        self._at, self._before, self._given = position, None, None
        self._is_placed = True

    def _unread(self) -> ChangeStream:
        """A stream of which nothing has been taken; it is there before a snapshot is, so nothing falls between the two."""
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
        if self._is_woken:  # before there was anything to wake
            self._stream.buffer.teardown()

    def _leave_snapshot(self) -> None:
        snapshotter, self._snapshotter = self._snapshotter, None
        if snapshotter is not None:
            with suppress(SnapshotInterruptedError):
                snapshotter.teardown()

    # --- what is read ---------------------------------------------------------------------------------------------------

    def _next(self) -> Record:
        if self._snapshotter is not None:
            record = self._next_row(self._snapshotter)
            if record is not None:
                return record
        assert self._stream is not None
        if not self._stream.buffer.wait(self._wait_seconds):
            raise RecordNotFoundError("there is no record after this position yet", hint="ask again")
        try:
            return self._stream.buffer.next()
        except PenstockError:
            # The stream is over. If that is worth another try, the next read makes it, with a new one.
            self._is_placed = False
            raise

    def _is_acked(self, record: Record) -> bool:
        place = parse_place(record.position)
        return isinstance(place, ChangePlace) and place <= self._ledger.acked

    def _next_row(self, snapshotter: CaptureSnapshotter) -> Record | None:
        """None if there is none, as of an empty table. After the last row the changes follow."""
        try:
            record = snapshotter.next() if snapshotter.has_next() else None
        except BaseException:
            # It cannot be gone on with; whoever has rows of it is told so at the next read.
            self._is_placed = False
            self._leave_snapshot()
            raise
        if snapshotter.is_drained:
            self._leave_snapshot()
            # Nothing tells how an empty table came to be so; what is not acknowledged does.
            self._follow(self._unread(), self._ledger.acked if snapshotter.fence is None else ChangePlace(snapshotter.fence))
        return record
