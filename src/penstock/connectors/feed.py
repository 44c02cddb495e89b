"""The reader thread of a connector and its bounded queue: publication and slot, snapshot rows and spooled
changes, as Arrow batches.

Nothing is decoded here: the spool contains typed batches, and snapshots use the decoder of the stream.

The thread creates publication and slot, runs a `SpoolCapture`, copies the tables that need a snapshot, and
then reads the spool, so the consumer never waits for a server. The thread retries temporary errors. All other
errors are raised in the consumer, after it has taken all earlier rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from penstock.capture.provision import check_coverage, ensure_capture, ensure_coverage
from penstock.capture.settings import CaptureSettings
from penstock.capture.slot_capture import SpoolCapture
from penstock.change import COMMIT_VERSION, METADATA_FIELDS, snapshot_batch, truncate_batch
from penstock.connectors.progress import Offset, Progress
from penstock.errors import PenstockError, Recovery, SpoolError, TableGapError
from penstock.lag import OpenTransaction
from penstock.position import Position
from penstock.postgres.chunked_table import chunk_named_tables
from penstock.postgres.connection import connect
from penstock.postgres.membership import Membership, inspect_captured_tables
from penstock.postgres.server import log_wait
from penstock.postgres.slot import OnWait, check_server, ensure_slot, inspect_server
from penstock.postgres.snapshot_export import export_snapshot
from penstock.retry import Backoff
from penstock.schema import TableName
from penstock.spool.ownership import load_identity
from penstock.spool.reader import FileSlice, SpoolRange, SpoolReader
from penstock.spool.retention import release, released_positions
from penstock.spool.rows import RejectedChange, first_rejected, read_rows


def ensure_source(settings: CaptureSettings, on_wait: OnWait, *, is_known: bool) -> None:
    """Create missing publication and slot, or raise an error with the statements that fix the problem.

    A slot is created only if there cannot have been one before: not if `is_known` (the consumer has a
    position), and not if the spool was filled from a slot. Creating a slot waits for the open transactions;
    `on_wait` gets these once a second.
    """
    address, tables = settings.address, settings.tables
    if is_known or load_identity(settings.spool) is not None:
        if tables:
            check_coverage(ensure_coverage(address, settings.publication, tables, manage=True))
    elif tables:
        ensure_capture(
            address, settings.slot, settings.publication, tables, failover=settings.failover, on_wait=on_wait
        )
    else:
        with connect(address) as connection:
            check_server(inspect_server(connection))
            ensure_slot(address, connection, settings.slot, failover=settings.failover, on_wait=on_wait)


def check_members(
    settings: CaptureSettings, tables: Collection[TableName], before: Mapping[TableName, Membership]
) -> Mapping[TableName, Membership]:
    """The current publication membership of `tables`. Raises if changes may be missing of a table that was a
    member according to `before`.
    """
    found = inspect_captured_tables(settings.address, settings.publication, lambda table: table in tables)
    for table, reason in found.interruptions(before, must_be_captured=bool(settings.tables)).items():
        raise TableGapError(
            f"table {table} {reason}, so changes of {table} may be missing",
            hint="start without a checkpoint, which copies the tables again",
        )
    return found.members


BATCH_ROWS = 10_000
BATCH_BYTES = 8 << 20

_VERSION = [field.name for field in METADATA_FIELDS].index(COMMIT_VERSION) - len(METADATA_FIELDS)


@dataclass(frozen=True, slots=True)
class Begun:
    """The start of reading: the consumer has all changes up to `floor`."""

    floor: Position
    retained: Position
    """The source retains the changes after this position. It is before `floor` if the consumer continues from
    a checkpoint that it has not acknowledged.
    """
    members: Mapping[TableName, Membership] = field(default_factory=dict)
    """Publication membership of the tables, as it was checked at the start."""


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Rows of a snapshot, or the truncate that precedes a repeated snapshot."""

    table: TableName
    records: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class Copied:
    """The snapshot of a table was delivered completely."""

    table: TableName
    fence: Position


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """Changes of one table, in order."""

    table: TableName
    records: pa.RecordBatch

    @property
    def last_commit(self) -> tuple[Position, int]:
        """The position of the last commit in the batch, and the number of rows that belong to it."""
        versions = _versions(self.records)
        return Position.of(versions[-1].as_py()), _count(versions, versions[-1])


@dataclass(frozen=True, slots=True)
class Reached:
    """All changes of all tables up to `floor` were delivered."""

    floor: Position


Rows: TypeAlias = CopiedRows | ChangedRows
Step: TypeAlias = Begun | Rows | Copied | Reached


# --- the stream ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Range:
    """The part of a spool range that a consumer needs: the files of each table with changes that the consumer
    does not have.
    """

    tables: Mapping[TableName, tuple[FileSlice, ...]]
    skip: Mapping[TableName, Offset]

    @classmethod
    def of(
        cls, spooled: SpoolRange, skip: Mapping[TableName, Offset], wants: Callable[[TableName], bool]
    ) -> Range:
        wanted = {
            table: _after(found.slices, skip.get(table))
            for table, found in spooled.tables.items()
            if wants(table)
        }
        return cls({table: wanted[table] for table in sorted(wanted) if wanted[table]}, skip)

    def first_rejected(self, *, reject_inexact: bool) -> RejectedChange | None:
        """The first change, of any table, with a value that must not be delivered and therefore ends the
        stream; None if there is no such change.
        """
        found = (
            first_rejected(table, slices, reject_inexact=reject_inexact)
            for table, slices in self.tables.items()
        )
        return min(filter(None, found), key=attrgetter("version"), default=None)

    def rows(self) -> Iterator[ChangedRows]:
        """The rows, table by table; those of one table in commit order."""
        for table, slices in self.tables.items():
            skip = self.skip.get(table, Offset(Position.ZERO))
            known = skip.rows or 0
            for each in slices:
                for batch in read_rows(each, BATCH_ROWS, BATCH_BYTES):
                    # Rows that were already delivered come first: `_after` left out all earlier commits.
                    delivered = min(known, _count(_versions(batch), skip.position.value)) if known else 0
                    known -= delivered
                    if batch.num_rows > delivered:
                        yield ChangedRows(table, batch.slice(delivered))


def _after(slices: Sequence[FileSlice], offset: Offset | None) -> tuple[FileSlice, ...]:
    """The files with commits after the offset. If the commit at the offset was delivered only in part, the
    file with that commit is included.
    """
    if offset is None:
        return tuple(slices)
    after = offset.position if offset.rows is None else Position.of(offset.position.value - 1)
    left = (each for each in slices if each.file.max_position > after)
    return tuple(
        replace(each, after=max(each.after or after, after)) if each.file.min_position <= after else each
        for each in left
    )


def _versions(batch: pa.RecordBatch) -> pa.Array:
    """The commit versions of a batch. The column is found by index, because the table may have a column of
    the same name.
    """
    return batch.column(batch.num_columns + _VERSION)


def _count(versions: pa.Array, version: object) -> int:
    return int(pc.sum(pc.equal(versions, version)).as_py() or 0)


# --- the snapshot -------------------------------------------------------------------------------------------


def copy_tables(
    settings: CaptureSettings, tables: Sequence[TableName], on_wait: OnWait, *, again: bool
) -> Iterator[Step]:
    """The rows of `tables` under one exported snapshot, one table after the other.

    With `again`, a truncate precedes the rows of each table: the consumer may have rows of an interrupted
    snapshot that no longer exist in the source.
    """
    if not tables:
        return
    with export_snapshot(settings.address, on_wait) as exported:
        for table in chunk_named_tables(settings.address, tables, settings.types, settings.publication):
            schema = table.schema
            if again:
                yield CopiedRows(schema.name, truncate_batch(schema, exported.fence))
            ordinal = 1  # the truncate has ordinal 0
            with closing(
                table.read(settings.address, exported.name, reject_inexact=settings.types.rejects_inexact)
            ) as batches:
                for batch in batches:
                    yield CopiedRows(
                        schema.name, snapshot_batch(batch, schema, exported.fence.value, ordinal)
                    )
                    ordinal += batch.num_rows
            yield Copied(schema.name, exported.fence)


_log = logging.getLogger(__name__)

CONSUMER = "connector"
"""Name under which the connector releases positions of the spool."""

_QUEUE_BYTES = 64 << 20
_QUEUE_STEPS = 256
_READ_ROWS = 100_000
_WAIT_SECONDS = 0.5
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
_END_SECONDS = 15.0
_WATCHES_PER_CHECK = 6
"""Number of health checks of slot and server after which the publication membership is checked once."""


class StepQueue:
    """Bounded queue of steps from the feed's thread to the consumer. After the last step it has the error
    that ended the feed. The event `ready` is set while the queue has a step or an error.
    """

    def __init__(
        self, ready: threading.Event, max_bytes: int = _QUEUE_BYTES, max_steps: int = _QUEUE_STEPS
    ) -> None:
        self._ready = ready
        self._max_bytes = max_bytes
        self._max_steps = max_steps
        self._changed = threading.Condition()
        self._steps: deque[Step] = deque()
        self._bytes = 0
        self._failure: BaseException | None = None
        self._is_closed = False

    def put(self, steps: Sequence[Step]) -> bool:
        """Wait for room, then append all steps at once. Returns False if the queue is closed. An empty queue
        accepts steps of any size.
        """
        size = sum(map(_size, steps))
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._has_room(size))
            if self._is_closed:
                return False
            if (
                self._steps
                and len(steps) == 1
                and isinstance(steps[0], Reached)
                and isinstance(self._steps[-1], Reached)
            ):
                self._steps.pop()  # of several steps without rows only the last is needed
            self._steps += steps
            self._bytes += size
            self._ready.set()
            return True

    def take(self, max_rows: int) -> Step | None:
        """The next step, with at most `max_rows` rows; None if there is none now. After the last step it
        raises the error that ended the feed.
        """
        with self._changed:
            if not self._steps:
                if self._failure is not None:
                    raise self._failure
                self._ready.clear()
                return None
            step = self._steps.popleft()
            if isinstance(step, Rows) and step.records.num_rows > max_rows:
                self._steps.appendleft(replace(step, records=step.records.slice(max_rows)))
                step = replace(step, records=step.records.slice(0, max_rows))
            # The sizes of a batch's parts need not add up to the size of the batch, so an empty queue resets
            # the count.
            self._bytes = self._bytes - _size(step) if self._steps else 0
            self._changed.notify_all()
            return step

    def put_back(self, step: Step) -> None:
        """Make the step that was taken last the next step again."""
        with self._changed:
            self._steps.appendleft(step)
            self._bytes += _size(step)

    def take_mark(self) -> Step | None:
        """The next step if it is available and has no rows; otherwise None."""
        with self._changed:
            if not self._steps or isinstance(self._steps[0], Rows):
                return None
            self._changed.notify_all()
            return self._steps.popleft()

    def fail(self, failure: BaseException) -> None:
        with self._changed:
            self._failure = failure
            self._ready.set()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _has_room(self, size: int) -> bool:
        return not self._steps or (
            self._bytes + size <= self._max_bytes and len(self._steps) < self._max_steps
        )


def grouped(steps: Iterable[Step]) -> Iterator[tuple[Step, ...]]:
    """Group rows with the progress steps that follow them, so that a consumer that takes the rows also takes
    the progress.
    """
    group: tuple[Step, ...] = ()
    for step in steps:
        if group and isinstance(step, Rows):
            yield group
            group = ()
        group += (step,)
    if group:
        yield group


class Feed:
    """Reads the steps after `progress` into the queue `steps`, from `start` until `stop`."""

    def __init__(
        self, settings: CaptureSettings, progress: Progress, ready: threading.Event, *, takes_all: bool
    ) -> None:
        """With `takes_all`, the feed also reads tables that are added to the publication later."""
        self.steps = StepQueue(ready)
        self._settings = settings
        self._tables = frozenset(progress.tables)
        self._takes_all = takes_all
        self._members = progress.members
        self._followed = progress.followed
        self._begin = progress.floor
        self._to_copy = list(progress.to_copy)
        # A checkpoint does not record whether a table was copied in part, so assume that it was.
        self._copies_again = progress.floor > Position.ZERO
        self._skip: dict[TableName, Offset] = dict(progress.ahead)
        self._capture = SpoolCapture(replace(settings, tables=()))
        self._reader = SpoolReader(settings.spool)
        self._trouble: BaseException | None = None
        self._errors_total = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-connector", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and the capture, which closes slot and spool. Acknowledges nothing."""
        self._stopping.set()
        self.steps.close()
        self._capture.stop()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_SECONDS)

    @property
    def trouble(self) -> BaseException | None:
        """The error that blocks the feed now; None if there is none. An error of the capture is returned even
        while earlier steps wait in the queue.
        """
        return self._trouble or self._capture.trouble

    @property
    def errors_total(self) -> int:
        """Number of errors so far."""
        return self._errors_total

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._retried(self._make_ready)
            self._capture.start()
            retained = self._await_retained()
            self._begin = self._begin if self._begin > Position.ZERO else retained
            self._put((Begun(self._begin, retained, self._members),))
            self._retried(self._copy)
            self._follow()
        except _StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - edge of the thread: the consumer raises it
            self._note(error)
            self.steps.fail(error)
        finally:
            self._capture.stop()

    def _make_ready(self) -> None:
        """Create publication and slot, then check the tables. If a slot existed before and is missing now,
        this creates none: the capture reports the gap.
        """
        settings = self._settings
        ensure_source(settings, self._check_running, is_known=self._begin > Position.ZERO)
        self._members = check_members(settings, self._tables, self._followed)
        try:
            if CONSUMER not in released_positions(settings.spool):
                release(settings.spool, CONSUMER, Position.ZERO)
        except OSError as error:
            raise SpoolError(f"the spool cannot be written: {error}") from error

    def _await_retained(self) -> Position:
        """Wait until the capture has opened the spool, and return the position after which all changes are
        retained. Before the spool is open, another process may still move that position. Reading starts there
        if the consumer has no checkpoint.
        """
        while not self._capture.wait_until(Position.ZERO, _WAIT_SECONDS):
            self._check_capture()
        end = self._capture.end or Position.ZERO
        released = released_positions(self._settings.spool).get(CONSUMER, Position.ZERO)
        return released if released > Position.ZERO else self._reader.start or end

    def _copy(self) -> None:
        """Copy the tables that are not yet copied. After an interruption, incomplete tables start again under
        another snapshot.
        """
        again, self._copies_again = self._copies_again, True
        for group in grouped(copy_tables(self._settings, self._to_copy, self._check_running, again=again)):
            self._put(group)
            for step in group:
                if isinstance(step, Copied):
                    self._to_copy.remove(step.table)
                    self._skip[step.table] = Offset(step.fence)

    def _follow(self) -> None:
        check_seconds = self._settings.limits.watch_seconds * _WATCHES_PER_CHECK
        at, check_at = self._begin, time.monotonic() + check_seconds
        while True:
            self._check_capture()
            if time.monotonic() >= check_at:
                self._check_members()
                check_at = time.monotonic() + check_seconds
            if not self._capture.wait_beyond(at, _WAIT_SECONDS):
                continue
            upto = self._reader.limit(at, max_rows=_READ_ROWS)
            # If the reader finds nothing although the capture has more, read up to the capture's position:
            # this raises the error for the gap.
            upto = upto if upto > at else self._capture.end or at
            rejected = self._deliver(at, upto)
            if rejected is not None:
                raise rejected
            self._skip = {table: offset for table, offset in self._skip.items() if offset.position > upto}
            at = upto

    def _check_members(self) -> None:
        """Detect tables that were renamed or removed from the publication: the server sends no more changes
        of them. Interruptions that this check misses are detected at the next start.
        """
        try:
            check_members(self._settings, self._tables, self._members)
        except PenstockError as error:
            if error.recovery is not Recovery.RETRY:
                raise
            _log.info("publication membership not checked", extra={"code": error.code})

    def _deliver(self, at: Position, upto: Position) -> PenstockError | None:
        """Deliver the changes in `(at, upto]`; returns None. If one of them has a value that ends the stream,
        deliver only the whole transactions before it, and return the error for that value.

        After such an error the floor does not move. Only the end position of a commit may be confirmed, and
        the end of the last commit before the rejected one is not known here. Another position just before the
        rejected commit is not safe: the server skips a transaction whose commit record *begins* before the
        confirmed position.
        """
        found = Range.of(self._reader.read(at, upto), self._skip, self._wants)
        rejected = found.first_rejected(reject_inexact=self._settings.types.rejects_inexact)
        if rejected is not None:
            found = Range.of(
                self._reader.read(at, Position.of(rejected.version - 1)), self._skip, self._wants
            )
        for group in grouped(chain(found.rows(), [] if rejected is not None else [Reached(upto)])):
            self._put(group)
        return rejected.error if rejected is not None else None

    def _wants(self, table: TableName) -> bool:
        return self._takes_all or table in self._tables

    # --- errors ---------------------------------------------------------------------------------------------

    def _put(self, steps: Sequence[Step]) -> None:
        if not self.steps.put(steps):
            raise _StoppedError

    def _check_capture(self) -> None:
        if self._stopping.is_set():
            raise _StoppedError
        self._note(self._capture.trouble)

    def _note(self, trouble: BaseException | None) -> None:
        if trouble is not None and trouble is not self._trouble:
            self._errors_total += 1
        self._trouble = trouble

    def _check_running(self, blockers: Sequence[OpenTransaction]) -> None:
        """Called once a second while a slot or a snapshot waits for other transactions."""
        if self._stopping.is_set():
            raise _StoppedError
        log_wait(blockers)

    def _retried(self, act: Callable[[], None]) -> None:
        backoff = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while True:
            try:
                act()
            except PenstockError as error:
                if error.recovery is not Recovery.RETRY:
                    raise
                self._note(error)
                pause = backoff.fail()
                _log.warning(
                    "connector interrupted",
                    extra={"code": error.code, "reason": error.message, "pause_seconds": pause},
                )
                if self._stopping.wait(pause):
                    raise _StoppedError from error
            else:
                self._trouble = None
                return


class _StoppedError(Exception):
    """Raised in the thread to end it."""


def _size(step: Step) -> int:
    return int(step.records.nbytes) if isinstance(step, Rows) else 0
