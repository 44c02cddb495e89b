"""Contract of record sources: one record at a time, each with its position, for callers that store their
position.

A `ChangeCapture` stores the resume point itself. Here the caller passes its position to every `read` and gets
the next record:

```python
with source:
    source.open(config)
    while True:
        try:
            record = source.read(position)
        except RecordNotFoundError as error:
            if error.recovery is not Recovery.RETRY:  # the next record is no longer available
                raise
            continue
        target.write(record, record.position)  # record and position atomically
        position = record.position
        source.ack(position)  # after it is durable
```

A source first reads the current rows with a `Snapshotter`, and then changes with a `CdcIterator`; both can be
used on their own. The suites in `penstock.testing.record_source_conformance` and
`penstock.testing.records_conformance` check implementations against these rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from types import TracebackType
from typing import Final, Self

from penstock.contracts.capture import Key
from penstock.errors import SnapshotInterruptedError
from penstock.schema import TableName

OPERATION: Final = "operation"
TABLE: Final = "table"
UNCHANGED: Final = "unchanged"
EXACT: Final = "exact"
MOVED_FROM: Final = "moved_from"


class Operation(StrEnum):
    """The operation that produced a record."""

    SNAPSHOT = "snapshot"
    """A row of a snapshot."""
    UPSERT = "upsert"
    """The row was inserted or updated."""
    DELETE = "delete"
    """The row was deleted."""
    TRUNCATE = "truncate"
    """All rows of the table were removed."""


@dataclass(frozen=True, slots=True)
class RecordPosition:
    """Position of a record. Plain text, to be stored and passed back; only the source that created it can
    interpret it.
    """

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Record:
    """One row, or its deletion.

    Usual mistake: replacing a whole row by `payload`. A column with an unchanged TOAST value is listed in the
    metadata under `unchanged`, and the target must keep its value.
    """

    position: RecordPosition
    key: Key
    """The key columns, with their values. For a delete in a table without a key, the whole old row; for a
    truncate, empty.
    """
    payload: Mapping[str, object] | None
    """The row; None for a delete and a truncate."""
    metadata: Mapping[str, object]
    """Always `operation` and `table`. If applicable, `unchanged` (names of columns that keep their value),
    `exact` (texts of values that their type cannot hold, by column) and `moved_from` (the key under which the
    target has the unchanged values).
    """
    timestamp: datetime
    """Commit time; for a row of a snapshot, the time when it was read."""

    @property
    def operation(self) -> Operation:
        return Operation(str(self.metadata[OPERATION]))

    @property
    def table(self) -> TableName:
        return TableName.parse(str(self.metadata[TABLE]))


class RecordIterator(ABC):
    """Returns records one by one: call `has_next`, then `next`. It is also a Python iterator over the
    available records, and a context manager.
    """

    @abstractmethod
    def has_next(self) -> bool:
        """Whether there is a record.

        Called before every `next`, any number of times: a call skips no record.
        """

    @abstractmethod
    def next(self) -> Record:
        """The next record. Each kind of iterator defines the behaviour if there is none."""

    @abstractmethod
    def teardown(self) -> None:
        """Release everything. The owner must call it once; further calls do nothing."""

    def __iter__(self) -> Iterator[Record]:
        while self.has_next():
            yield self.next()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.teardown()
            return
        with suppress(SnapshotInterruptedError):  # the first error is the cause
            self.teardown()


class Snapshotter(RecordIterator):
    """The rows of a table as of the creation of this object.

    From its creation it holds a read-only transaction. The transaction blocks no writes, but keeps Postgres
    from removing dead rows. So read the snapshot to its end, or call `teardown`. For one thread at a time.
    """

    @abstractmethod
    def has_next(self) -> bool:
        """Whether there is another row. The first False completes the snapshot for good; reading the last row
        does not complete it.
        """

    @abstractmethod
    def next(self) -> Record:
        """The row that `has_next` found.

        Raises `NoRowsError` at the end, after `teardown`, and also if `has_next` was not called since the
        last row. Usual mistake: using the error as the end of a loop instead of `has_next`.
        """

    @abstractmethod
    def teardown(self) -> None:
        """Close everything; then, if the snapshot was not complete, raise `SnapshotInterruptedError`.

        The snapshot never calls this method itself, not even at its end.
        """


class CdcIterator(RecordIterator):
    """A bounded buffer between a stream that pushes records and a caller that reads them one by one.

    Any number of threads may push and read. A slow reader slows the stream, so memory stays bounded.
    """

    @abstractmethod
    def has_next(self) -> bool:
        """Whether the buffer has a record now. It never waits."""

    @abstractmethod
    def next(self) -> Record:
        """Remove and return the oldest record. Waits for a record if there is none; call `has_next` first to
        avoid waiting.

        Raises `NoRowsError` after `teardown`, also in threads that are waiting.
        """

    @abstractmethod
    def push(self, record: Record) -> None:
        """Append a record. Waits while the buffer is full; raises `NoRowsError` after `teardown`."""

    @abstractmethod
    def teardown(self) -> None:
        """Empty the buffer and wake all waiting threads. Raises nothing."""


class RecordSource(ABC):
    """A source from which records are read, one per call.

    Constructors open nothing. `validate` may be called at any time; then `open` once, `read` and `ack` in a
    loop, `teardown` once. Any thread may call any method: `read` calls run one after another, `ack` does not
    wait, and `teardown` ends a `read` that waits for a record.
    """

    @abstractmethod
    def validate(self, config: Mapping[str, str]) -> None:
        """Check `config` without opening anything.

        Called before `open`, by a check or a user interface, any number of times. Raises `NoTableError` if
        the table is missing or invalid, `InvalidUrlError` for the URL, `ConfigError` for everything else.
        Only `open` finds out whether the server answers.
        """

    @abstractmethod
    def open(self, config: Mapping[str, str]) -> None:
        """Connect. Called once, before the first `read`; raises everything that `validate` raises.

        Raises `InvalidUrlError` if the database cannot be reached at its URL. When it returns, a caller
        without a position will read every later commit. It reads no records and does not change the position
        at the source.
        """

    @abstractmethod
    def read(self, position: RecordPosition | None) -> Record:
        """The record after `position`, the caller's current one; the first record for None.

        Called in a loop, with the position of the last record, or with the one that the last run stored. The
        same position returns the same record until the record is acknowledged, so a caller that failed to
        handle a record reads it again. A caller can go back by passing an earlier position.

        In a snapshot, a caller can go back by one record only, and positions are valid only for the same
        source object. Any other position of a snapshot, for example after a restart, raises
        `SnapshotInterruptedError`, again at every retry. Then empty the target and read from None:
        otherwise rows that were deleted since the snapshot would stay in the target. The position of the
        last row stands for the complete snapshot, and stays valid. Passing None takes a new snapshot if the
        first record was acknowledged, or if a later record was read.

        Raises `RecordNotFoundError` after a short wait if there is no record yet: try again. Raises
        `RecordGoneError`, a subclass that cannot be retried, if the record is no longer available or
        `position` belongs to another source; `read` never skips records. Raises `NoRowsError` before `open`
        and after `teardown`, also in a thread that is waiting.

        It acknowledges nothing. Usual mistake: keeping the position only in memory; a restart then starts at
        the first record.
        """

    @abstractmethod
    def ack(self, position: RecordPosition) -> None:
        """State that this record, *and every one before it*, is durable in the target and will not be read
        again.

        Called after the commit of the target, from any thread, any number of times; a position before an
        acknowledged one has no effect. Several calls in quick succession may reach the source as one, with a
        later call or at the latest with `teardown`. Positions of an earlier run are valid, so a caller may
        acknowledge its last position again after a restart. A position that this source never returned raises
        `RecordGoneError`. Positions of snapshot rows have no effect, except that of the last row. No other
        call lets the source remove anything, neither `read` nor `teardown`. A caller with several workers
        acknowledges the last record before the first one that is not done. Raises `NoRowsError` before `open`
        and after `teardown`: the call has no effect, and the record is delivered again.
        """

    @abstractmethod
    def teardown(self) -> None:
        """Close everything. When the call returns, everything that was acknowledged before is durable at the
        source. Further calls do nothing.

        In the middle of a snapshot it raises `SnapshotInterruptedError`, after everything has been closed.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.teardown()
            return
        with suppress(SnapshotInterruptedError):  # the first error is the cause
            self.teardown()
