"""The rows of one table, one record at a time."""

from __future__ import annotations

from datetime import UTC, datetime

from typing_extensions import override

from penstock.capture.records.building import RecordBuilder, commit_of
from penstock.capture.records.places import ChangePlace, SnapshotPlace
from penstock.contracts.capture import Change, ChangeCapture, Upsert
from penstock.contracts.records import Operation, Record, Snapshotter
from penstock.errors import NoRowsError, SnapshotInterruptedError


class CaptureSnapshotter(Snapshotter):
    """Reads the snapshot of a capture, one row ahead of its caller. For a `WalCapture` that is an exported one, of one moment.

    So the last row is known for the last, and its position says that the snapshot is complete and which changes follow.
    """

    def __init__(self, capture: ChangeCapture, builder: RecordBuilder) -> None:
        self._builder = builder
        self._time = datetime.now(UTC)
        self._number = 0
        self._failure: BaseException | None = None
        self._found: Record | None = None
        self._is_complete = self._is_closed = False
        self._changes = capture.snapshot([builder.table])
        # The snapshot is taken here: a generator that nobody asks has done nothing yet.
        self._ahead = next(self._changes, None)
        self.fence = None if self._ahead is None else commit_of(self._ahead).position
        """Where the snapshot is exact: the changes after it follow. None if the table is empty: then all do that there are."""

    @property
    def is_drained(self) -> bool:
        """Whether every row has been given out; what is left to say is that there is no other."""
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
            raise NoRowsError("there is no row, or has_next was not asked whether there is", hint="ask has_next before every next")
        return found

    @override
    def teardown(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._found = None
        self._changes.close()
        if not self._is_complete:
            raise SnapshotInterruptedError(f"the snapshot of {self._builder.table} was ended after {self._number} rows")

    def _move(self, change: Change) -> Record:
        """Look at the row after this one; then this one can be placed."""
        try:
            self._ahead = next(self._changes, None)
            self._number += 1
            return self._record(change)
        except BaseException as error:
            # Asked again, the generator would seem to be at its end, and this row to have been given out.
            self._failure = error
            raise

    def _record(self, change: Change) -> Record:
        assert self.fence is not None
        assert isinstance(change.event, Upsert)
        place = ChangePlace(self.fence) if self._ahead is None else SnapshotPlace(self.fence, self._number)
        return self._builder.row(change.event, Operation.SNAPSHOT, place.render(), self._time)
