"""`PostgresReferenceTable`: the contract of a reference table, for a table of a Postgres database.

A view of the one engine. The snapshot is read under an exported snapshot, by the stream's own decoder; the changes come out of a spool,
which a `SpoolCapture` of this process fills, or that of another reader of the same spool, whichever was there first. The table is one more
consumer of that spool, and releases what is confirmed, nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import pyarrow as pa
from typing_extensions import override

from penstock.capture.continuity import check_continuity
from penstock.capture.following import SpoolFollower, check_shared, missing_capture
from penstock.capture.provision import ensure_capture
from penstock.capture.settings import CaptureSettings
from penstock.capture.snapshot import plan_tables
from penstock.capture.spooling import SpoolCapture
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
from penstock.postgres.chunks import read_chunk
from penstock.postgres.connection import connect
from penstock.postgres.exported import export_snapshot
from penstock.postgres.slot import inspect_slot
from penstock.reference.membership import Membership, inspect_member, inspect_shape
from penstock.schema import TableName, TableSchema
from penstock.spool.consumers import forget, hold, release, released
from penstock.spool.identity import load_identity
from penstock.spool.lock import ConsumerLock
from penstock.spool.reader import FileSlice, SpoolReader
from penstock.spool.rows import read_rows
from penstock.spool.values import RefusedValue, first_refused

_READ_ROWS = 100_000
_BATCH_ROWS = 10_000
_BATCH_BYTES = 8 << 20
_ENDING_SECONDS = 30.0
_LOOK_SECONDS = 30.0
_ANEW = "start without a checkpoint, which copies the table anew"


class PostgresReferenceTable(PositionedReferenceTable):
    """One table, by one slot, publication and spool, which other readers may share. Nothing is opened before the first poll or `restore`.

    From then on the source keeps its log until a checkpoint is confirmed, also when nobody polls any more: `forget` ends that.
    """

    def __init__(self, settings: CaptureSettings, table: TableName, *, consumer: str | None = None) -> None:
        if settings.polling is not None or settings.by_triggers:
            raise ConfigError(
                "a reference table follows the log, and these settings are of another capture",
                hint="give it settings with a slot and a publication; its rows can be looked up without either",
            )
        self._settings = settings
        self._table = table
        self._consumer = consumer or f"reference-{table}"
        self._lock = ConsumerLock(settings.spool, self._consumer)
        self._reader = SpoolReader(settings.spool)
        self._capture: SpoolCapture | SpoolFollower | None = None
        self._shape: TableSchema | None = None
        self._member: Membership | None = None
        self._look_due = 0.0
        self._snapshot: Generator[pa.RecordBatch] | None = None
        self._has_rows = False
        self._at: Position | None = None
        self._changes: Iterator[pa.RecordBatch] = iter(())
        self._next: pa.RecordBatch | None = None
        self._upto = Position.ZERO
        self._epoch = 0
        self._failure: PenstockError | None = None
        self._is_used = False
        self._is_closed = False

    # --- ReferenceTableSource -------------------------------------------------------------------------------------------

    @override
    def schema(self) -> pa.Schema:
        return pa.schema([pa.field(column.name, column.arrow_type) for column in self._known_shape().columns])

    @override
    def key(self) -> tuple[str, ...]:
        return self._known_shape().key

    @override
    def poll_snapshot(self) -> pa.RecordBatch | None:
        """Under one exported snapshot, which is held open on the server until the last row. Taking it waits for open transactions.

        A snapshot that is lost on the way raises an error that says RETRY. The next call takes another one, and begins with a truncate if
        rows of the first had been delivered.
        """
        self._check_usable()
        if self._at is not None:
            return None
        try:
            if self._snapshot is None:
                self._begin()
                self._snapshot = self._read_snapshot()
            batch = next(self._snapshot, None)
        except BaseException as error:
            # A generator that has raised would say next that it is at its end.
            self._snapshot = None
            self._note(error)
            raise
        self._has_rows = self._has_rows or batch is not None
        return batch

    @override
    def is_snapshot_complete(self) -> bool:
        return self._at is not None

    @override
    def poll_changes(self) -> pa.RecordBatch | None:
        """Raises what ended the capture, and `SchemaChangedError` at the first change of another shape, after every change before it."""
        self._check_usable()
        if self._at is None:
            raise ConnectorStateError(f"the snapshot of {self._table} is not complete", hint="call poll_snapshot until it gives None")
        try:
            self._look()
            if self._next is None:
                self._open_ranges(self._at)
            return self._take()
        except BaseException as error:
            # What has come of this range comes again, from its beginning.
            self._changes, self._next = iter(()), None
            self._note(error)
            raise

    @override
    def checkpoint(self) -> SourceCheckpoint:
        offsets = {} if self._at is None else {"position": str(self._at)}
        member = {} if self._member is None else self._member.to_metadata()
        return SourceCheckpoint(offsets, self._epoch, {"table": str(self._table), **member})

    @override
    def restore(self, checkpoint: SourceCheckpoint) -> None:
        self._check_usable()
        if self._is_used:
            raise ConnectorStateError(f"reading of {self._table} has begun, so no checkpoint can be restored", hint="restore first")
        position = self._position_of(checkpoint)
        self._epoch = checkpoint.epoch
        if position is None:
            return
        self._claim()
        expected, found = Membership.of(checkpoint), self._inspect_member()
        if expected.system != found.system:
            raise CheckpointError(f"the checkpoint is of database system {expected.system}, and this is {found.system}", hint=_ANEW)
        found.check(expected, self._table)
        self._hold_from(position)
        self._member, self._at, self._upto = expected, position, position

    @override
    def close(self) -> None:
        self._is_closed = True
        if self._snapshot is not None:
            self._snapshot.close()
        if self._capture is not None:
            self._capture.stop()
        self._lock.release()

    @override
    def confirm(self, checkpoint: SourceCheckpoint) -> None:
        """Let go of the log up to the checkpoint, as far as no other reader of the spool needs it."""
        position = self._position_of(checkpoint)
        if position is not None:
            release(self._settings.spool, self._consumer, position)

    def forget(self) -> None:
        """Close it, and keep nothing of the log for this table any more: no checkpoint of it can be restored from now on."""
        self.close()
        forget(self._settings.spool, self._consumer)

    # --- PositionedReferenceTable ---------------------------------------------------------------------------------------

    @override
    def reached(self) -> Position:
        return self._at or Position.ZERO

    @override
    def settled(self) -> Position:
        """What every other reader of the spool has released. Without any there may be one soon, which needs everything."""
        others = [position for name, position in released(self._settings.spool).items() if name != self._consumer]
        return min(others, default=Position.ZERO)

    # --- the beginning --------------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        """The spool must be this source's, and nobody else may read it under this name."""
        self._is_used = True
        settings = self._settings
        check_shared(settings.spool, settings.slot, settings.publication, settings.types)
        self._lock.wait(_ENDING_SECONDS)

    def _begin(self) -> None:
        """Publication, slot, consumer: then a snapshot can be taken, and nothing after its fence is lost."""
        self._claim()
        settings = self._settings
        if settings.is_separate and (missing := missing_capture(settings.spool)) is not None:
            raise missing
        with connect(settings.address) as connection:
            slot = inspect_slot(connection, settings.slot)
        # A slot that is gone is not made anew where one has been read before: the capture then says what is lost.
        if slot is not None or load_identity(settings.spool) is None:
            ensure_capture(settings.address, settings.slot, settings.publication, [self._table], failover=settings.failover)
        self._member = self._inspect_member()
        hold(settings.spool, self._consumer, Position.ZERO)

    def _read_snapshot(self) -> Generator[pa.RecordBatch]:
        settings, shape = self._settings, self._known_shape()
        with export_snapshot(settings.address) as exported:
            fence = exported.fence
            release(settings.spool, self._consumer, fence)
            schema, chunks = plan_tables(settings.address, [self._table], settings.types, settings.publication)[self._table]
            if not self._has_shape(schema):
                raise self._altered()
            if self._has_rows:
                yield truncate_batch(shape, fence)
            ordinal = 1
            for chunk in chunks:
                rows = read_chunk(settings.address, exported.name, chunk, refuse_inexact=settings.types.refuses_inexact)
                with closing(rows):
                    for batch in (whole.slice(at, _BATCH_ROWS) for whole in rows for at in range(0, whole.num_rows, _BATCH_ROWS)):
                        yield snapshot_batch(batch, shape, fence.value, ordinal)
                        ordinal += batch.num_rows
        self._move(fence)

    def _hold_from(self, position: Position) -> None:
        """Have spool and slot keep what commits after `position`, or raise if that cannot be had any more."""
        settings = self._settings
        before = released(settings.spool).get(self._consumer)
        # Before looking: what was released is deleted at any moment.
        hold(settings.spool, self._consumer, position)
        try:
            self._check_ground(position)
        except BaseException:
            if before is None:
                forget(settings.spool, self._consumer)
            else:
                hold(settings.spool, self._consumer, before)
            raise

    def _check_ground(self, position: Position) -> None:
        settings = self._settings
        with connect(settings.address) as connection:
            slot = inspect_slot(connection, settings.slot)
        if slot is None:
            raise SlotMissingError(f"nothing after {position} can be had: slot {settings.slot} is gone", hint=_ANEW)
        check_continuity(position, self._reader.extent, slot.confirmed, settings.slot)

    # --- the changes ----------------------------------------------------------------------------------------------------

    def _open_ranges(self, at: Position) -> None:
        """Go on until there is a change of the table, or nothing more in the spool."""
        capture = self._running()
        while self._next is None:
            capture.wait_beyond(at, 0.0)  # raises what ended it, if it has ended
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
        """The table's changes in `(at, upto]`, or in as much of it as comes before the first that cannot be delivered; or its error."""
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

    def _first_stop(self, slices: Sequence[FileSlice]) -> RefusedValue | None:
        stops = [first_refused(self._table, slices, refuse_inexact=self._settings.types.refuses_inexact)]
        for each in slices:
            if not self._has_shape(each.file.schema):
                stops.append(RefusedValue(each.file.min_position.value, self._altered()))
        return min(filter(None, stops), key=lambda stop: stop.version, default=None)

    def _take(self) -> pa.RecordBatch | None:
        """The batch that waits. Its successor is looked for at once, so that `checkpoint` moves with the last batch of a range."""
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
            self._capture.start()
        return self._capture

    def _move(self, position: Position) -> None:
        if self._at is None or position > self._at:
            self._at = position
            self._upto = max(self._upto, position)
            self._epoch += 1

    # --- what can be wrong ----------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ConnectorStateError(f"the reference table {self._table} is closed", hint="make another one, and restore its checkpoint")
        if self._failure is not None:
            raise self._failure

    def _note(self, error: BaseException) -> None:
        """What time does not mend ends this object."""
        if isinstance(error, PenstockError) and error.recovery is not Recovery.RETRY:
            self._failure = error

    def _look(self) -> None:
        """Now and then: a table that left the publication has changes that are in no log."""
        if time.monotonic() < self._look_due or self._member is None:
            return
        try:
            self._inspect_member().check(self._member, self._table)
        except PenstockError as error:
            # The server is away, or somebody has the table to himself, perhaps for hours: what the spool has goes on meanwhile.
            if error.recovery is not Recovery.RETRY:
                raise
        self._look_due = time.monotonic() + _LOOK_SECONDS

    def _inspect_member(self) -> Membership:
        return inspect_member(self._settings.address, self._settings.publication, self._table)

    def _known_shape(self) -> TableSchema:
        if self._shape is None:
            settings = self._settings
            self._shape = inspect_shape(settings.address, self._table, settings.types, settings.publication)
        return self._shape

    def _has_shape(self, found: TableSchema) -> bool:
        ours, theirs = change_schema(self._known_shape()), change_schema(found)
        return (ours.names, ours.types, self._known_shape().key) == (theirs.names, theirs.types, found.key)

    def _altered(self) -> SchemaChangedError:
        return SchemaChangedError(f"the reference table {self._table} changed its columns or its key", hint=_ANEW)

    def _position_of(self, checkpoint: SourceCheckpoint) -> Position | None:
        """None for the beginning."""
        name = checkpoint.metadata.get("table", str(self._table))
        if name != str(self._table):
            raise CheckpointError(f"the checkpoint is of {name}, not of {self._table}", hint=_ANEW)
        try:
            return Position.parse(checkpoint.offsets["position"]) if checkpoint.offsets else None
        except (KeyError, ValueError) as error:
            raise CheckpointError("the checkpoint is not one of a Postgres table", hint=_ANEW) from error
