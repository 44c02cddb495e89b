"""`SpoolCapture`: follows a replication slot into a spool.

It runs as one named daemon thread beside the receive thread of its `ReplicationStream`: take messages, decode them, append the steps of
the log to the spool, seal segments, confirm. It owns the spool's lock and is its only writer. What it confirms is what every consumer of
the spool has released, and consumers release only what their targets hold; the capture itself never decides that something is safe.

Errors that time can mend are tried again here, with growing pauses, from where the spool ends. All others end the capture; `wait_beyond`
raises them to the reader, and the spool's status file shows them to everybody else.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial

from penstock.capture.continuity import check_continuity
from penstock.capture.provision import ensure_capture
from penstock.capture.settings import CaptureSettings
from penstock.errors import PenstockError, Recovery, SlotMissingError
from penstock.position import Position
from penstock.postgres.catalog import inspect_keys, inspect_types, load_types
from penstock.postgres.connection import connect
from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from penstock.postgres.replication import ReplicationStream, StreamRequest
from penstock.postgres.slot import Slot, check_idle, check_server, check_slot, inspect_server, inspect_slot
from penstock.postgres.types.resolver import TypeResolver
from penstock.spool.consumers import minimum
from penstock.spool.identity import CaptureIdentity, ensure_identity, load_identity
from penstock.spool.lock import SpoolLock
from penstock.spool.reader import SpoolReader
from penstock.spool.retention import SpoolBudget, delete_released
from penstock.spool.status import CaptureFailure, CaptureStatus, write_status
from penstock.spool.writer import SpoolWriter

_log = logging.getLogger(__name__)

_HOUSEKEEPING_SECONDS = 0.2
_STATUS_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0


class SpoolCapture:
    """One slot into one spool, in the background between `start` and `stop`."""

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self._thread = threading.Thread(target=self._run, name="penstock-capture", daemon=True)
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._end: Position | None = None
        self._state = "starting"
        self._trouble: PenstockError | None = None
        self._received = Position.ZERO
        self._rows_total = 0
        self._bytes_total = 0
        self._segments_total = 0
        self._segments_discarded = 0
        self._last_seal = 0.0
        self._housekeeping_due = 0.0
        self._status_due = 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the capture and release the slot and the lock. Nothing pending is lost: it is still in the WAL."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=10.0)

    @property
    def end(self) -> Position | None:
        """The last sealed position; None until the spool was opened."""
        return self._end

    def wait_beyond(self, position: Position, timeout_seconds: float) -> bool:
        """Wait, at most so long, until the spool reaches past `position`. Raises what ended the capture."""
        return self._wait(lambda end: end > position, timeout_seconds)

    def wait_until(self, position: Position, timeout_seconds: float) -> bool:
        """Wait, at most so long, until the spool holds everything up to `position`. Raises what ended the capture."""
        return self._wait(lambda end: end >= position, timeout_seconds)

    def _wait(self, reached: Callable[[Position], bool], timeout_seconds: float) -> bool:
        def over() -> bool:
            return self._failure is not None or self._stopping.is_set() or (self._end is not None and reached(self._end))

        with self._changed:
            self._changed.wait_for(over, timeout_seconds)
            if self._failure is not None:
                raise self._failure
            return self._end is not None and reached(self._end)

    # --- the capture thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._stopping.is_set():
            before = self._received
            try:
                self._capture()
            except PenstockError as error:
                if error.recovery is not Recovery.RETRY:
                    return self._fail(error)
                if self._received > before:
                    pause = _FIRST_PAUSE_SECONDS
                self._report("waiting", error)
                _log.warning("capture interrupted", extra={"code": error.code, "pause_seconds": pause})
                self._stopping.wait(pause * random.uniform(0.5, 1.5))
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
            except BaseException as error:  # noqa: BLE001 - the thread's edge: the reader raises it
                return self._fail(error)
        return self._report("stopped", None)

    def _fail(self, error: BaseException) -> None:
        _log.error("capture failed", extra={"error": str(error)})
        with self._changed:
            self._failure = error
            self._changed.notify_all()
        self._report("failed", error)

    def _capture(self) -> None:
        settings = self._settings
        with SpoolLock(settings.spool):
            reader = SpoolReader(settings.spool)
            slot, keys, types = self._inspect(reader)
            start = max(reader.end or Position.ZERO, slot.confirmed)
            request = StreamRequest(settings.slot, settings.publication, start, settings.limits.buffer_bytes, slot.confirmed)
            with self._open(request) as stream:
                ensure_identity(
                    settings.spool,
                    CaptureIdentity(settings.slot, settings.publication, stream.system_identifier, stream.timeline),
                )
                writer = SpoolWriter(settings.spool, start, max_segment_bytes=settings.limits.segment_bytes * 4)
                self._advance(start)
                stream.start()
                self._follow(stream, PgOutputDecoder(keys, types), writer, reader)

    def _inspect(self, reader: SpoolReader) -> tuple[Slot, dict[int, tuple[str, ...]], TypeResolver]:
        """Everything that can be wrong with the source is found here, before the first row."""
        settings = self._settings
        with connect(settings.address) as connection:
            server = inspect_server(connection)
            check_server(server)
            slot = inspect_slot(connection, settings.slot)
            if slot is None and (load_identity(settings.spool) is not None or not settings.tables):
                raise SlotMissingError(
                    f"slot {settings.slot} is gone: what committed since it was last read cannot be had any more",
                    hint="remove the target tables, their penstock_epochs and the state directory, and run again to copy them anew",
                )
            if slot is None:
                slot, _ = ensure_capture(settings.address, settings.slot, settings.publication, settings.tables)
            check_slot(slot, server.database)
            check_idle(slot)
            needed = minimum(settings.spool)
            if needed is not None and needed > Position.ZERO:
                ground = (reader.start, reader.end) if reader.start is not None and reader.end is not None else None
                check_continuity(needed, ground, slot.confirmed, settings.slot)
            types = TypeResolver(settings.types, inspect_types(connection), partial(load_types, settings.address))
            return slot, dict(inspect_keys(connection)), types

    @contextmanager
    def _open(self, request: StreamRequest) -> Iterator[ReplicationStream]:
        stream = ReplicationStream(self._settings.address, request)
        try:
            stream.open()
            yield stream
        finally:
            stream.close()

    def _follow(self, stream: ReplicationStream, decoder: PgOutputDecoder, writer: SpoolWriter, reader: SpoolReader) -> None:
        budget = SpoolBudget(reader, self._settings.limits.spool_bytes)
        bytes_before = self._bytes_total
        try:
            while not self._stopping.is_set():
                self._keep_house(stream, reader, budget)
                if budget.must_pause():
                    self._stopping.wait(_HOUSEKEEPING_SECONDS)
                    continue
                messages = stream.take(self._patience_seconds(writer))
                if messages:
                    self._bytes_total = bytes_before + stream.taken_bytes
                    for step in decoder.decode(messages):
                        for manifest in writer.append(step):
                            self._sealed(manifest.rows, writer.end)
                self._received = Position(stream.received)
                self._seal_if_due(writer, caught_up=stream.buffered_bytes == 0)
            self._housekeeping_due = 0.0
            self._keep_house(stream, reader, budget)
        finally:
            writer.close()

    def _patience_seconds(self, writer: SpoolWriter) -> float:
        return self._settings.limits.seal_seconds if writer.pending_rows else _HOUSEKEEPING_SECONDS

    def _seal_if_due(self, writer: SpoolWriter, *, caught_up: bool) -> None:
        limits = self._settings.limits
        now = time.monotonic()
        rested = now - self._last_seal
        full = writer.pending_rows >= limits.segment_rows or writer.pending_bytes >= limits.segment_bytes
        old = writer.oldest_pending_age_seconds >= limits.segment_seconds
        manifest = None
        if full or (rested >= self._seal_pause_seconds() and writer.pending_rows and (caught_up or old)):
            manifest = writer.seal()
        elif rested >= limits.quiet_seconds:
            manifest = writer.seal(quiet=True)
        if manifest is not None:
            self._sealed(manifest.rows, writer.end)

    def _seal_pause_seconds(self) -> float:
        """Small segments while readers keep up, larger ones while they are behind, so that their number stays bounded."""
        waiting = self._segments_total - self._segments_discarded
        return min(2.0, self._settings.limits.seal_seconds * max(1.0, waiting / 50))

    def _sealed(self, rows: int, end: Position) -> None:
        self._rows_total += rows
        self._segments_total += 1
        self._last_seal = time.monotonic()
        self._advance(end)

    def _advance(self, end: Position) -> None:
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def _keep_house(self, stream: ReplicationStream, reader: SpoolReader, budget: SpoolBudget) -> None:
        """Confirm what every consumer has released, and drop it from the spool."""
        now = time.monotonic()
        if now < self._housekeeping_due:
            return
        self._housekeeping_due = now + _HOUSEKEEPING_SECONDS
        released = minimum(self._settings.spool)
        if released is not None and released > Position.ZERO:
            stream.confirm(released)
            self._segments_discarded += len(delete_released(reader))
        if now >= self._status_due:
            self._report("full" if budget.must_pause() else "streaming", None)

    def _report(self, state: str, trouble: BaseException | None) -> None:
        self._status_due = time.monotonic() + _STATUS_SECONDS
        status = CaptureStatus(
            state=state,
            pid=os.getpid(),
            received=self._received,
            sealed=self._end or Position.ZERO,
            rows_total=self._rows_total,
            bytes_total=self._bytes_total,
            updated_at=datetime.now(UTC),
            failure=CaptureFailure.of(_named(trouble)) if trouble is not None else None,
        )
        try:
            write_status(self._settings.spool, status)
        except OSError as error:
            # The capture goes on without it; if the disk is full or gone, the next segment says so.
            _log.warning("capture status not written", extra={"error": str(error)})


def _named(error: BaseException) -> PenstockError:
    return error if isinstance(error, PenstockError) else PenstockError(f"{type(error).__name__} in the capture")
