"""`PostgresReferenceTable`: a reference table that reads a table of a Postgres database.

The snapshot uses an exported snapshot and the decoder of the stream. Changes come from a spool, which a
`SpoolCapture` of this process or another reader of the spool fills. The table is one of the spool's
consumers, and releases only confirmed positions.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

import pyarrow as pa
from typing_extensions import override

from penstock.capture.factory import SpoolFollower, check_shared, missing_capture
from penstock.capture.provision import ensure_capture
from penstock.capture.settings import CaptureSettings
from penstock.capture.slot_capture import SpoolCapture
from penstock.capture.source_checks import check_continuity
from penstock.change import change_schema, snapshot_batch, truncate_batch
from penstock.contracts.connector import SourceCheckpoint
from penstock.contracts.reference import PositionedReferenceTable
from penstock.errors import (
    CheckpointError,
    ConfigError,
    ConnectorStateError,
    PenstockError,
    Recovery,
    SchemaChangedError,
    SlotMissingError,
)
from penstock.position import Position
from penstock.postgres.chunked_table import chunk_named_tables
from penstock.postgres.connection import connect
from penstock.postgres.server import identify_system
from penstock.postgres.slot import inspect_slot
from penstock.postgres.snapshot_export import export_snapshot
from penstock.reference.keyed_tables import TableIdentity, check_membership, inspect_identity, inspect_shape
from penstock.schema import TableName, TableSchema
from penstock.spool.ownership import ConsumerLock, load_identity
from penstock.spool.reader import FileSlice, SpoolReader
from penstock.spool.retention import release, released_positions, remove_consumer, set_released
from penstock.spool.rows import RejectedChange, first_rejected, read_rows

_READ_ROWS = 100_000
_BATCH_ROWS = 10_000
_BATCH_BYTES = 8 << 20
_ENDING_SECONDS = 30.0
_LOOK_SECONDS = 30.0
_OTHER_TABLE = 'close the other reference table, or give each another name: consumer="…"'
_ANEW = "start without a checkpoint, which copies the table again"


class PostgresReferenceTable(PositionedReferenceTable):
    """A table with a slot, publication and spool, which other readers may share.

    The first poll or `restore` opens the connections. From then on the server keeps WAL until a checkpoint is
    confirmed, even if the table is no longer polled; `forget` ends that.
    """

    def __init__(self, settings: CaptureSettings, table: TableName, *, consumer: str | None = None) -> None:
        if settings.polling is not None or settings.by_triggers:
            raise ConfigError(
                "a reference table needs logical replication, but these settings have another capture method",
                hint="use settings with a slot and a publication; lookups by key need neither",
            )
        self._settings = settings
        self._table = table
        self._consumer = consumer or f"reference-{table}"
        self._lock = ConsumerLock(settings.spool, self._consumer, hint=_OTHER_TABLE)
        self._reader = SpoolReader(settings.spool)
        self._capture: SpoolCapture | SpoolFollower | None = None
        self._shape: TableSchema | None = None
        self._identity: TableIdentity | None = None
        self._look_due = 0.0
        self._snapshot: Generator[pa.RecordBatch, None, Position] | None = None
        self._has_rows = False
        self._at: Position | None = None
        self._changes: Iterator[pa.RecordBatch] = iter(())
        self._next: pa.RecordBatch | None = None
        self._upto = Position.ZERO
        self._epoch = 0
        self._failure: PenstockError | None = None
        self._is_used = False
        self._is_closed = False
        # Neither the threads nor the generator of the snapshot refer to this object. So if it is garbage
        # collected without `close`, the finalizer and the end of the generator release everything.
        self._held = ExitStack()
        self._held.callback(self._lock.release)
        self._end = weakref.finalize(self, self._held.close)

    # --- ReferenceTableSource -------------------------------------------------------------------------------

    @override
    def schema(self) -> pa.Schema:
        return pa.schema([pa.field(column.name, column.arrow_type) for column in self._known_shape().columns])

    @override
    def key(self) -> tuple[str, ...]:
        return self._known_shape().key

    @override
    def poll_snapshot(self) -> pa.RecordBatch | None:
        """Return the next batch of the snapshot. One exported snapshot stays open on the server until the
        last row; creating it waits for open transactions.

        A lost snapshot raises an error with recovery RETRY. The next call takes another snapshot, and begins
        with a truncate if rows of the lost one had been delivered.
        """
        self._check_usable()
        if self._at is not None:
            return None
        try:
            if self._snapshot is None:
                self._begin()
                self._snapshot = _read_snapshot(
                    self._settings, self._table, self._known_shape(), self._consumer, again=self._has_rows
                )
            batch = next(self._snapshot)
        except StopIteration as end:
            self._move(end.value)
            return None
        except BaseException as error:
            # A generator that raised an error would report its end on the next call.
            self._snapshot = None
            self._note(error)
            raise
        self._has_rows = True
        return batch

    @override
    def is_snapshot_complete(self) -> bool:
        return self._at is not None

    @override
    def poll_changes(self) -> pa.RecordBatch | None:
        """Return the next batch of changes. Raises the error that ended the capture, and `SchemaChangedError`
        at the first change with another schema, after all earlier changes.
        """
        self._check_usable()
        if self._at is None:
            raise ConnectorStateError(
                f"the snapshot of {self._table} is not complete",
                hint="call poll_snapshot until it returns None",
            )
        try:
            self._look()
            if self._next is None:
                self._open_ranges(self._at)
            return self._take()
        except BaseException as error:
            # The delivered part of this range is delivered again.
            self._changes, self._next = iter(()), None
            self._note(error)
            raise

    @override
    def checkpoint(self) -> SourceCheckpoint:
        offsets = {} if self._at is None else {"position": str(self._at)}
        identity = {} if self._identity is None else self._identity.to_metadata()
        return SourceCheckpoint(offsets, self._epoch, {"table": str(self._table), **identity})

    @override
    def restore(self, checkpoint: SourceCheckpoint) -> None:
        self._check_usable()
        if self._is_used:
            raise ConnectorStateError(
                f"reading of {self._table} has started, so no checkpoint can be restored",
                hint="call restore before the first poll",
            )
        position = self._position_of(checkpoint)
        self._epoch = checkpoint.epoch
        if position is None:
            return
        self._claim()
        identity = TableIdentity.of(checkpoint)
        system = identify_system(self._settings.address).identifier
        if identity.system != system:
            raise CheckpointError(
                f"the checkpoint is of database system {identity.system}, and this is {system}", hint=_ANEW
            )
        check_membership(self._settings.address, self._settings.publication, self._table, identity.membership)
        self._hold_from(position)
        self._identity, self._at, self._upto = identity, position, position

    @override
    def close(self) -> None:
        self._is_closed = True
        if self._snapshot is not None:
            self._snapshot.close()
        self._end()

    @override
    def confirm(self, checkpoint: SourceCheckpoint) -> None:
        """Release WAL up to the checkpoint, as far as no other consumer of the spool needs it."""
        position = self._position_of(checkpoint)
        if position is not None:
            release(self._settings.spool, self._consumer, position)

    def forget(self) -> None:
        """Close the table and release all WAL held for it. Its checkpoints cannot be restored afterwards."""
        self.close()
        remove_consumer(self._settings.spool, self._consumer)

    # --- PositionedReferenceTable ---------------------------------------------------------------------------

    @override
    def reached(self) -> Position:
        return self._at or Position.ZERO

    @override
    def settled(self) -> Position:
        """The lowest released position of the other consumers of the spool. Zero if there are no others,
        because a consumer may start soon and need all versions.
        """
        others = [
            position
            for name, position in released_positions(self._settings.spool).items()
            if name != self._consumer
        ]
        return min(others, default=Position.ZERO)

    # --- the beginning --------------------------------------------------------------------------------------

    def _claim(self) -> None:
        """Check that the spool belongs to this source, and that no other process uses this consumer name."""
        self._is_used = True
        settings = self._settings
        check_shared(settings.spool, settings.slot, settings.publication, settings.types)
        self._lock.wait(_ENDING_SECONDS)

    def _begin(self) -> None:
        """Create publication, slot and consumer, so that no change after the snapshot's fence is lost."""
        self._claim()
        settings = self._settings
        if settings.is_separate and (missing := missing_capture(settings.spool)) is not None:
            raise missing
        with connect(settings.address) as connection:
            slot = inspect_slot(connection, settings.slot)
        # A lost slot is not recreated if it was read before: the capture then reports the gap.
        if slot is not None or load_identity(settings.spool) is None:
            ensure_capture(
                settings.address,
                settings.slot,
                settings.publication,
                [self._table],
                failover=settings.failover,
            )
        self._identity = inspect_identity(settings.address, settings.publication, self._table)
        set_released(settings.spool, self._consumer, Position.ZERO)

    def _hold_from(self, position: Position) -> None:
        """Keep all changes after `position` in spool and slot, or raise if they are no longer available.

        The released position may move back to an older checkpoint, but never forward: only `confirm` states
        that the rows before a checkpoint are durable. A consumer without a file has released nothing.
        """
        settings = self._settings
        before = released_positions(settings.spool).get(self._consumer)
        released = Position.ZERO if before is None else min(before, position)
        # Set this before the check, since released segments may be deleted at any moment.
        set_released(settings.spool, self._consumer, released)
        try:
            self._check_ground(position)
        except BaseException:
            if before is None:
                remove_consumer(settings.spool, self._consumer)
            else:
                set_released(settings.spool, self._consumer, before)
            raise

    def _check_ground(self, position: Position) -> None:
        settings = self._settings
        with connect(settings.address) as connection:
            slot = inspect_slot(connection, settings.slot)
        if slot is None:
            raise SlotMissingError(
                f"changes after {position} are lost: slot {settings.slot} no longer exists", hint=_ANEW
            )
        check_continuity(position, self._reader.extent, slot.confirmed, settings.slot)

    # --- the changes ----------------------------------------------------------------------------------------

    def _open_ranges(self, at: Position) -> None:
        """Advance until there is a change of the table, or the end of the spool."""
        capture = self._running()
        while self._next is None:
            capture.wait_beyond(at, 0.0)  # raises the capture's error, if it has ended
            upto = self._reader.limit(at, max_rows=_READ_ROWS) if self._reader.start is not None else at
            if upto <= at:
                return
            upto, slices = self._readable(at, upto)
            self._changes = (batch for each in slices for batch in read_rows(each, _BATCH_ROWS, _BATCH_BYTES))
            self._upto = upto
            self._next = next(self._changes, None)
            if self._next is None:
                self._move(upto)
            at = upto

    def _readable(self, at: Position, upto: Position) -> tuple[Position, Sequence[FileSlice]]:
        """The table's changes in `(at, upto]` before the first one that cannot be delivered, and the position
        up to which they reach. Raises the error of that change if no position lies before it.
        """
        slices = self._slices(at, upto)
        stop = self._first_stop(slices)
        if stop is None:
            return upto, slices
        last = Position.of(stop.version - 1)
        if last <= at:
            raise stop.error
        return last, self._slices(at, last)

    def _slices(self, at: Position, upto: Position) -> Sequence[FileSlice]:
        found = self._reader.read(at, upto).tables.get(self._table)
        return found.slices if found is not None else ()

    def _first_stop(self, slices: Sequence[FileSlice]) -> RejectedChange | None:
        stops = [first_rejected(self._table, slices, reject_inexact=self._settings.types.rejects_inexact)]
        for each in slices:
            if not self._has_shape(each.file.schema):
                stops.append(RejectedChange(each.file.min_position.value, _altered(self._table)))
        return min(filter(None, stops), key=lambda stop: stop.version, default=None)

    def _take(self) -> pa.RecordBatch | None:
        """Return the next batch. Reads one batch ahead, so that `checkpoint` advances with the last batch of
        a range.
        """
        batch = self._next
        if batch is not None:
            self._next = next(self._changes, None)
            if self._next is None:
                self._move(self._upto)
        return batch

    def _running(self) -> SpoolCapture | SpoolFollower:
        if self._capture is None:
            settings = replace(self._settings, tables=())
            self._capture = SpoolFollower(settings) if settings.is_separate else SpoolCapture(settings)
            self._held.callback(self._capture.stop)
            self._capture.start()
        return self._capture

    def _move(self, position: Position) -> None:
        if self._at is None or position > self._at:
            self._at = position
            self._upto = max(self._upto, position)
            self._epoch += 1

    # --- checks and errors ----------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ConnectorStateError(
                f"the reference table {self._table} is closed",
                hint="create another one and restore its checkpoint",
            )
        if self._failure is not None:
            raise self._failure

    def _note(self, error: BaseException) -> None:
        """Store a permanent error, which ends this object: every later poll raises it."""
        if isinstance(error, PenstockError) and error.recovery is not Recovery.RETRY:
            self._failure = error

    def _look(self) -> None:
        """Check at intervals that the table is still published: the server does not send changes of an
        unpublished table.
        """
        if time.monotonic() < self._look_due or self._identity is None:
            return
        try:
            check_membership(
                self._settings.address, self._settings.publication, self._table, self._identity.membership
            )
        except PenstockError as error:
            # Without the server, changes in the spool can still be read.
            if error.recovery is not Recovery.RETRY:
                raise
        self._look_due = time.monotonic() + _LOOK_SECONDS

    def _known_shape(self) -> TableSchema:
        if self._shape is None:
            settings = self._settings
            self._shape = inspect_shape(settings.address, self._table, settings.types, settings.publication)
        return self._shape

    def _has_shape(self, found: TableSchema) -> bool:
        return _is_same_shape(self._known_shape(), found)

    def _position_of(self, checkpoint: SourceCheckpoint) -> Position | None:
        """The position in a checkpoint; None for an empty checkpoint, which is the beginning. Raises
        `CheckpointError` for a checkpoint of another table.
        """
        name = checkpoint.metadata.get("table", str(self._table))
        if name != str(self._table):
            raise CheckpointError(f"the checkpoint is of {name}, not of {self._table}", hint=_ANEW)
        try:
            return Position.parse(checkpoint.offsets["position"]) if checkpoint.offsets else None
        except (KeyError, ValueError) as error:
            raise CheckpointError("the checkpoint is not one of a Postgres table", hint=_ANEW) from error


def _read_snapshot(
    settings: CaptureSettings, table: TableName, shape: TableSchema, consumer: str, *, again: bool
) -> Generator[pa.RecordBatch, None, Position]:
    """Yield the rows of the table under one exported snapshot, and return its position. With `again`, a
    truncate precedes the rows.
    """
    with export_snapshot(settings.address) as exported:
        fence = exported.fence
        release(settings.spool, consumer, fence)
        (chunked,) = chunk_named_tables(settings.address, [table], settings.types, settings.publication)
        if not _is_same_shape(shape, chunked.schema):
            raise _altered(table)
        if again:
            yield truncate_batch(shape, fence)
        ordinal = 1
        with closing(
            chunked.read(settings.address, exported.name, reject_inexact=settings.types.rejects_inexact)
        ) as rows:
            for batch in (
                whole.slice(at, _BATCH_ROWS) for whole in rows for at in range(0, whole.num_rows, _BATCH_ROWS)
            ):
                yield snapshot_batch(batch, shape, fence.value, ordinal)
                ordinal += batch.num_rows
    return fence


def _is_same_shape(ours: TableSchema, theirs: TableSchema) -> bool:
    mine, found = change_schema(ours), change_schema(theirs)
    return (mine.names, mine.types, ours.key) == (found.names, found.types, theirs.key)


def _altered(table: TableName) -> SchemaChangedError:
    return SchemaChangedError(f"the reference table {table} changed its columns or its key", hint=_ANEW)
