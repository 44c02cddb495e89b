"""`SpoolCapture`: follows a replication slot into a spool.

It runs as one named daemon thread beside the receive thread of its `ReplicationStream`: take messages, decode them, append the steps of
the log to the spool, seal segments, confirm. It holds the spool's lock from its first look at the source to its end, and is the spool's
only writer, status file included; a second capture of the same spool waits for the lock and writes nothing. What it confirms,
`ConfirmPolicy` says: by default what every consumer of the spool has released, and consumers release only what their targets hold.

Errors that time can mend are tried again here, with growing pauses, from where the spool ends. All others end the capture; `wait_beyond`
raises them to the reader, and the spool's status file shows them to everybody else.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from penstock.capture.confirming import ConfirmPolicy
from penstock.capture.inspection import inspect_source
from penstock.capture.keys import KeyCatalog
from penstock.capture.settings import CaptureSettings
from penstock.capture.watch import SourceWatch
from penstock.errors import ConnectionLostError, PenstockError, Recovery, SlotBusyError, SpoolLockedError
from penstock.lag import OpenTransaction
from penstock.position import Position
from penstock.postgres.health import log_wait
from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from penstock.postgres.replication import ReplicationStream, StreamRequest
from penstock.postgres.timeline import SystemIdentity
from penstock.spool.consumers import minimum
from penstock.spool.identity import CaptureIdentity, ensure_identity
from penstock.spool.lock import SpoolLock
from penstock.spool.manifest import Manifest
from penstock.spool.reader import SpoolReader
from penstock.spool.status import CaptureFailure, CaptureStatus, write_status
from penstock.spool.stock import SpoolBudget, SpoolStock
from penstock.spool.writer import SpoolWriter

_log = logging.getLogger(__name__)

_HOUSEKEEPING_SECONDS = 0.2
_STATUS_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
_LOCK_PAUSE_SECONDS = 1.0
_END_SECONDS = 10.0
_FEW_SEGMENTS = 100
_SHORTEST_SEAL_SECONDS = 0.001
_LONGEST_SEAL_SECONDS = 30.0


class SpoolCapture:
    """One slot into one spool, in the background between `start` and `stop`."""

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self._thread = threading.Thread(target=self._run, name="penstock-capture", daemon=True)
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._end: Position | None = None
        self._trouble: BaseException | None = None
        self._policy = ConfirmPolicy(settings.confirm, settings.max_retained_bytes)
        self._watch: SourceWatch | None = None
        self._confirmed = Position.ZERO
        self._commit_time: datetime | None = None
        self._received = Position.ZERO
        self._rows_total = 0
        self._bytes_total = 0
        self._reader = SpoolReader(settings.spool)
        self._stock = SpoolStock(self._reader)
        self._released: Position | None = None
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
        # Not by joining: in Python 3.11, a join that a signal breaks off takes the thread for ended, and the next returns at once.
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._ended.wait(_END_SECONDS)

    @property
    def end(self) -> Position | None:
        """The last sealed position; None until the spool was opened."""
        return self._end

    @property
    def trouble(self) -> BaseException | None:
        """Why nothing comes now; None while all is well. The only word of a capture that waits for the spool's lock."""
        return self._trouble

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
        lock = SpoolLock(self._settings.spool)
        try:
            if self._acquire(lock):
                try:
                    self._keep_capturing()
                finally:
                    lock.release()
        except BaseException as error:  # noqa: BLE001 - the thread's edge: the reader raises it
            self._fail(error)
        finally:
            self._ended.set()

    def _acquire(self, lock: SpoolLock) -> bool:
        """Wait until no other capture writes to the spool; False if there is no need any more. The status file is the other one's."""
        while not self._stopping.is_set():
            try:
                lock.acquire()
            except SpoolLockedError as error:
                if self._trouble is None:
                    _log.warning("capture waits for another one", extra={"code": error.code, "reason": error.message})
                self._trouble = error
                self._stopping.wait(_LOCK_PAUSE_SECONDS)
            else:
                self._trouble = None
                return True
        return False

    def _keep_capturing(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        has_more_to_try = False
        while has_more_to_try or not self._stopping.is_set():
            before = self._received
            try:
                self._capture()
            except _StoppedError:
                break
            except PenstockError as error:
                if error.recovery is not Recovery.RETRY:
                    self._fail(error)
                    return self._report("failed", error)
                if self._received > before:
                    pause = _FIRST_PAUSE_SECONDS
                self._report("waiting", error)
                _log.warning("capture interrupted", extra={"code": error.code, "reason": error.message, "pause_seconds": pause})
                # What is taken by a capture that was killed is free in a moment; then what was released is confirmed after all.
                has_more_to_try = isinstance(error, SlotBusyError) and not self._stopping.is_set()
                self._stopping.wait(pause * random.uniform(0.5, 1.5))
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
            except BaseException as error:  # noqa: BLE001 - handed to the reader, which raises it
                self._fail(error)
                return self._report("failed", error)
            else:
                break  # as it was told to
        return self._report("stopped", None)

    def _fail(self, error: BaseException) -> None:
        _log.error("capture failed", extra={"error": str(error)})
        with self._changed:
            self._failure = self._trouble = error
            self._changed.notify_all()

    def _capture(self) -> None:
        settings = self._settings
        system, slot, start, keys, types = inspect_source(settings, self._reader, self._wait_for_slot)
        limits = settings.limits
        request = StreamRequest(
            settings.slot,
            settings.publication,
            start,
            limits.buffer_bytes,
            slot.confirmed,
            silence_seconds=limits.silence_seconds,
            wants_messages=bool(settings.message_prefixes),
        )
        with self._open(request) as stream, SourceWatch(settings) as self._watch, KeyCatalog(settings.address) as catalog:
            if SystemIdentity(stream.system_identifier, stream.timeline) != system:
                raise ConnectionLostError("another server answers at this address than a moment ago")
            ensure_identity(settings.spool, CaptureIdentity(settings.slot, settings.publication, system.identifier, system.timeline))
            writer = SpoolWriter(settings.spool, start, max_segment_bytes=limits.segment_bytes * 4)
            self._stock.look()
            self._confirmed = slot.confirmed
            self._advance(start)
            stream.start()
            prefixes = frozenset(settings.message_prefixes)
            self._follow(stream, PgOutputDecoder(keys, types, load_key=catalog.load, prefixes=prefixes), writer)

    def _wait_for_slot(self, blockers: Sequence[OpenTransaction]) -> None:
        """Called once a second while the slot's creation waits."""
        if self._stopping.is_set():
            raise _StoppedError
        log_wait(blockers)
        self._report("creating slot", None, tuple(blockers))

    @contextmanager
    def _open(self, request: StreamRequest) -> Iterator[ReplicationStream]:
        stream = ReplicationStream(self._settings.address, request)
        try:
            stream.open()
            yield stream
        finally:
            stream.close()

    def _follow(self, stream: ReplicationStream, decoder: PgOutputDecoder, writer: SpoolWriter) -> None:
        budget = SpoolBudget(self._stock, self._settings.limits.spool_bytes)
        bytes_before = self._bytes_total
        try:
            while not self._stopping.is_set():
                self._keep_house(stream, budget)
                if budget.must_pause():
                    self._stopping.wait(_HOUSEKEEPING_SECONDS)
                    continue
                messages = stream.take(self._patience_seconds(writer), self._hold_seconds())
                if messages:
                    self._bytes_total = bytes_before + stream.taken_bytes
                    for step in decoder.decode(messages):
                        for manifest in writer.append(step):
                            self._sealed(manifest)
                self._received = Position(stream.received)
                self._seal_if_due(writer, caught_up=stream.buffered_bytes == 0)
            self._housekeeping_due = 0.0
            self._keep_house(stream, budget)
            # At once, before anything else is let go: this process may have little time left, and the last confirmation goes with it.
            stream.close()
        finally:
            writer.close()

    def _patience_seconds(self, writer: SpoolWriter) -> float:
        return self._settings.limits.seal_seconds if writer.pending_rows else _HOUSEKEEPING_SECONDS

    def _hold_seconds(self) -> float:
        """What comes before the next seal may wait for it undecoded."""
        return min(self._last_seal + self._seal_pause_seconds() - time.monotonic(), _HOUSEKEEPING_SECONDS)

    def _seal_if_due(self, writer: SpoolWriter, *, caught_up: bool) -> None:
        limits = self._settings.limits
        now = time.monotonic()
        rested = now - self._last_seal
        pause = self._seal_pause_seconds()
        full = writer.pending_rows >= limits.segment_rows or writer.pending_bytes >= limits.segment_bytes
        old = writer.oldest_pending_age_seconds >= limits.segment_seconds
        manifest = None
        if full or (rested >= pause and writer.pending_rows and (caught_up or old)):
            manifest = writer.seal()
        elif rested >= max(limits.quiet_seconds, pause):
            manifest = writer.seal(quiet=True)
        if manifest is not None:
            self._sealed(manifest)

    def _seal_pause_seconds(self) -> float:
        return seal_pause_seconds(self._settings.limits.seal_seconds, self._stock.waiting(self._released))

    def _sealed(self, manifest: Manifest) -> None:
        self._rows_total += manifest.rows
        self._stock.add(manifest)
        self._last_seal = time.monotonic()
        self._commit_time = manifest.commit_time or self._commit_time
        self._advance(manifest.end)

    def _advance(self, end: Position) -> None:
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def _keep_house(self, stream: ReplicationStream, budget: SpoolBudget) -> None:
        """Confirm what may be confirmed, and drop from the spool what every consumer has released."""
        now = time.monotonic()
        if now < self._housekeeping_due:
            return
        self._housekeeping_due = now + _HOUSEKEEPING_SECONDS
        self._released = done = minimum(self._settings.spool)
        self._choose_confirm(done)
        confirmable = self._policy.confirmable(done, self._end)
        if confirmable is not None:
            stream.confirm(confirmable)
            self._confirmed = max(self._confirmed, confirmable)
        self._stock.delete_released(done)
        if now >= self._status_due:
            self._report("full" if budget.must_pause() else "streaming", None)

    def _choose_confirm(self, done: Position | None) -> None:
        sample = self._watch.sample if self._watch is not None else None
        if sample is not None and self._policy.look(sample.flushed, sample.slot_restart, done, self._end):
            _log.warning("what is confirmed has changed", extra={"confirms": self._policy.mode.value})

    def _report(self, state: str, trouble: BaseException | None, waits_for: tuple[OpenTransaction, ...] = ()) -> None:
        """Only for the holder of the lock."""
        self._status_due = time.monotonic() + _STATUS_SECONDS
        self._trouble = trouble
        sealed = self._end or Position.ZERO
        status = CaptureStatus(
            state=state,
            pid=os.getpid(),
            received=self._received,
            sealed=sealed,
            rows_total=self._rows_total,
            bytes_total=self._bytes_total,
            updated_at=datetime.now(UTC),
            failure=CaptureFailure.of(_named(trouble)) if trouble is not None else None,
            confirms=self._policy.mode.value,
            confirmed=self._confirmed,
            waits_for=waits_for,
            lag=self._watch.lag(sealed, self._commit_time) if self._watch is not None else None,
            numeric=self._settings.types.writes,
        )
        try:
            write_status(self._settings.spool, status)
        except OSError as error:
            # The capture goes on without it; if the disk is full or gone, the next segment says so.
            _log.warning("capture status not written", extra={"error": str(error)})


def seal_pause_seconds(least_seconds: float, waiting: int) -> float:
    """The least time between two seals: small segments while consumers keep up, ever larger ones the more segments wait.

    By its square the number stays in the thousands however long a consumer is away: about 1,800 after an hour, 5,000 after a day. Nobody
    is kept waiting by that who is not behind by as much; and it is short again as soon as consumers have released.
    """
    least_seconds = max(least_seconds, _SHORTEST_SEAL_SECONDS)
    return max(least_seconds, min(_LONGEST_SEAL_SECONDS, least_seconds * (waiting / _FEW_SEGMENTS) ** 2))


class _StoppedError(Exception):
    """Raised through the creation of a slot to end it."""


def _named(error: BaseException) -> PenstockError:
    return error if isinstance(error, PenstockError) else PenstockError(f"{type(error).__name__} in the capture")
