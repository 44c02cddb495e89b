"""What a source of records promises: one record at a time, each with its position, to a caller that keeps its place itself.

Where `ChangeCapture` keeps the resume point to itself, here the caller says with every `read` where it stands, and gets what comes next:

```python
with source:
    source.open(config)
    while True:
        try:
            record = source.read(position)
        except RecordNotFoundError as error:
            if error.recovery is not Recovery.RETRY:  # what comes next is gone, and will not come back
                raise
            continue
        target.write(record, record.position)  # record and position in one act
        position = record.position
        source.ack(position)  # once it is durable, not before
```

A source reads first what is there, through a `Snapshotter`, and then what changes, through a `CdcIterator`; both can be used by
themselves. The suites in `penstock.testing.record_source_conformance` and `penstock.testing.records_conformance` hold implementations to
these rules.
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
    """What a record says of its row."""

    SNAPSHOT = "snapshot"
    """It was there when the snapshot was taken."""
    UPSERT = "upsert"
    """It is there now, whether it was before or not."""
    DELETE = "delete"
    """It is not there any more."""
    TRUNCATE = "truncate"
    """No row of the table is there any more."""


@dataclass(frozen=True, slots=True)
class RecordPosition:
    """Where a record stands. Plain text, to be stored and given back; only the source that made it reads it."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Record:
    """One row, or what became of it.

    The usual mistake is to replace a whole row by `payload`: a column whose value did not travel is named in the metadata under
    `unchanged`, and what stands in the target must stay.
    """

    position: RecordPosition
    key: Key
    """The columns that tell rows apart, with their values; of a delete in a table without a key, the whole old row; of a truncate,
    empty."""
    payload: Mapping[str, object] | None
    """The row; None for a delete and a truncate."""
    metadata: Mapping[str, object]
    """`operation` and `table` always. Where there is something to say, `unchanged` (names of columns that keep their value), `exact`
    (texts of values that their type cannot hold, by column) and `moved_from` (the key under which unchanged values stand)."""
    timestamp: datetime
    """When it was committed; of a row of a snapshot, when it was read."""

    @property
    def operation(self) -> Operation:
        return Operation(str(self.metadata[OPERATION]))

    @property
    def table(self) -> TableName:
        return TableName.parse(str(self.metadata[TABLE]))


class RecordIterator(ABC):
    """Records one by one: ask `has_next`, then `next`. Also a Python iterator, of what there is now, and a context manager."""

    @abstractmethod
    def has_next(self) -> bool:
        """Whether there is a record. Called before every `next`, as often as one likes: nothing is passed over by asking."""

    @abstractmethod
    def next(self) -> Record:
        """The next record. What happens if there is none, the two kinds of iterators say."""

    @abstractmethod
    def teardown(self) -> None:
        """Let go of everything. Called once by the owner, who must not forget it; further calls do nothing."""

    def __iter__(self) -> Iterator[Record]:
        while self.has_next():
            yield self.next()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.teardown()
            return
        with suppress(SnapshotInterruptedError):  # what went wrong first is what counts
            self.teardown()


class Snapshotter(RecordIterator):
    """The rows of a table as of the moment at which this object was made, and then no more.

    Made by whoever wants the rows; from then on it holds a read-only transaction, which keeps nobody from writing but keeps dead rows
    from being removed: read it through, or tear it down. For one thread at a time.
    """

    @abstractmethod
    def has_next(self) -> bool:
        """Whether another row is there. The first False completes the snapshot, for good; reading the last row does not."""

    @abstractmethod
    def next(self) -> Record:
        """The row that `has_next` found.

        `NoRowsError` if there is none: at the end, after `teardown`, and also if `has_next` was not asked since the last row, for that is
        what finds one. The usual mistake is to take the error for the end of a loop; ask `has_next`.
        """

    @abstractmethod
    def teardown(self) -> None:
        """Close what is open; then, if the snapshot was not complete, raise `SnapshotInterruptedError`.

        It is never called by the snapshot itself, not even at its end. Everything is closed when the error is raised.
        """


class CdcIterator(RecordIterator):
    """A buffer between a stream that pushes and a caller who wants one record and no loop.

    Any number of threads may push and read. It has bounds, so that a caller who is slow slows the stream, and memory stays what it is.
    """

    @abstractmethod
    def has_next(self) -> bool:
        """Whether a record is in the buffer now. It never waits."""

    @abstractmethod
    def next(self) -> Record:
        """The oldest record in the buffer, which leaves it. Waits for one to be pushed if there is none: ask `has_next` if that is not
        wanted.

        `NoRowsError` once it has been torn down, also for those who wait at that moment.
        """

    @abstractmethod
    def push(self, record: Record) -> None:
        """Put a record behind the others. Waits while the buffer is full; `NoRowsError` once it has been torn down."""

    @abstractmethod
    def teardown(self) -> None:
        """Empty the buffer and wake who waits. Raises nothing."""


class RecordSource(ABC):
    """A place from which records are read, one call a record.

    Made without arguments, or with none that open anything. `validate` may be called at any time; then `open` once, `read` and `ack` in a
    loop, `teardown` once. Any thread may call any method: `read`s wait for one another, `ack` waits for nobody, and `teardown` ends a
    `read` that waits for a record.
    """

    @abstractmethod
    def validate(self, config: Mapping[str, str]) -> None:
        """Say whether `config` can be used, without opening anything.

        Called before `open`, by a check or a user interface, as often as one likes. `NoTableError` if it names no table,
        `InvalidUrlError` if what it names as address is none, `ConfigError` for all else. That the address answers is for `open` to find
        out.
        """

    @abstractmethod
    def open(self, config: Mapping[str, str]) -> None:
        """Connect. Called once, before the first `read`; what `validate` raises, this raises too.

        `InvalidUrlError` if the database cannot be reached under its address. When it returns, whatever commits from then on will be
        read, by somebody who has no position yet. It reads nothing by itself and moves nothing.
        """

    @abstractmethod
    def read(self, position: RecordPosition | None) -> Record:
        """The record that comes next after `position`, the caller's current one; the first of all for None.

        Called again and again, with the position of the last record, or with the one that was stored when the last run ended. The same
        position gives the same record, as long as that is not acknowledged: whoever failed to handle a record asks for it again. An
        earlier position goes back.

        A snapshot goes back by one record and no further, and ends with its source: any other of its positions, as after a restart,
        raises `SnapshotInterruptedError`. Then empty the target and read from None: rows of which we had the one half may be gone, and
        nobody would tell. The position of the last row is that of a finished snapshot, and good for ever. None, once what it gave is
        acknowledged or anything after it was read, takes a new snapshot.

        `RecordNotFoundError` if there is none yet, after a short wait: try again. `RecordGoneError`, a kind of it with another
        `recovery`, if there is none any more, or `position` is not of this source: never passed over in silence. `NoRowsError` before
        `open` and after `teardown`, also for who waits at that moment.

        It acknowledges nothing. The usual mistake is to keep the position only in memory: then a restart begins from the first record.
        """

    @abstractmethod
    def ack(self, position: RecordPosition) -> None:
        """Say that this record, *and every one before it*, is durable where it was going, and will never be asked for again.

        Called after that, from any thread, as often as one likes; one that is behind an earlier one says nothing new. What is said in quick
        succession may reach the source together, with a later call, at the latest with `teardown`. It also takes
        positions of an earlier run, so a caller may repeat its last one after a restart; `RecordGoneError` for one that this source never
        gave out. Positions of a snapshot move nothing, but for its last. Nothing else lets the source forget: not `read`, not `teardown`.
        Whoever hands records to several workers acknowledges up to the first that is not done. `NoRowsError` before `open` and after
        `teardown`: it came too late to count, and the record comes again.
        """

    @abstractmethod
    def teardown(self) -> None:
        """Close everything; what has been acknowledged is durable at the source when this returns. Further calls do nothing.

        In the middle of a snapshot it raises `SnapshotInterruptedError`, after everything has been closed.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.teardown()
            return
        with suppress(SnapshotInterruptedError):  # what went wrong first is what counts
            self.teardown()
