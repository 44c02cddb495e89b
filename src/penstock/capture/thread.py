"""The thread that fills a spool. `CaptureThread` implements the common part of all capture methods: the lock
that makes the thread the spool's only writer, retries, stopping, and status reports. A subclass implements
`_capture`, which runs until the capture is stopped, or raises an error.

After a temporary error the capture continues from the end of the spool, after a growing pause. All other
errors end the capture; `wait_beyond` raises them in the reader, and the spool's status file shows them to
other processes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from penstock.errors import PenstockError, Recovery, SlotBusyError, SpoolLockedError
from penstock.foreign import describe
from penstock.lag import OpenTransaction
from penstock.position import Position
from penstock.retry import Backoff
from penstock.spool.manifest import Manifest
from penstock.spool.ownership import SpoolLock
from penstock.spool.reader import SpoolReader
from penstock.spool.retention import SegmentUsage
from penstock.spool.status import CaptureFailure, CaptureStatus, write_status

_log = logging.getLogger(__name__)

_STATUS_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
_LOCK_PAUSE_SECONDS = 1.0
_END_SECONDS = 10.0


class StoppedError(Exception):
    """Raised inside a wait to end it when the capture is stopped."""


class CaptureThread(ABC):
    """Captures into one spool in the background, between `start` and `stop`."""

    def __init__(self, spool: Path, writes: str) -> None:
        """`writes` is the value format of the type policy; the status file reports it."""
        self._spool = spool
        self._writes = writes
        self._thread = threading.Thread(target=self._run, name="penstock-capture", daemon=True)
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._end: Position | None = None
        self._trouble: BaseException | None = None
        self._reader = SpoolReader(spool)
        self._usage = SegmentUsage(self._reader)
        self._received = Position.ZERO
        self._confirmed = Position.ZERO
        self._commit_time: datetime | None = None
        self._rows_total = 0
        self._bytes_total = 0
        self._last_seal = 0.0
        self._status_due = 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the capture and release its resources. Nothing is lost: the source still has all pending
        changes.
        """
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        # `join` cannot be used: in Python 3.11, after a signal has interrupted a join, the next join returns
        # at once.
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._ended.wait(_END_SECONDS)

    @property
    def end(self) -> Position | None:
        """The last sealed position; None until the capture has opened the spool."""
        return self._end

    @property
    def trouble(self) -> BaseException | None:
        """The error that prevents the capture from continuing now; None if there is none. For a capture that
        waits for the spool's lock, the error is found only here, since that capture must not write the status
        file.
        """
        return self._trouble

    def wait_beyond(self, position: Position, timeout_seconds: float) -> bool:
        """Wait up to `timeout_seconds` until the spool extends past `position`; returns whether it does.
        Raises the error that ended the capture.
        """
        return self._wait(lambda end: end > position, timeout_seconds)

    def wait_until(self, position: Position, timeout_seconds: float) -> bool:
        """Wait up to `timeout_seconds` until the spool contains everything up to `position`; returns whether
        it does. Raises the error that ended the capture.
        """
        return self._wait(lambda end: end >= position, timeout_seconds)

    def _wait(self, reached: Callable[[Position], bool], timeout_seconds: float) -> bool:
        def over() -> bool:
            return (
                self._failure is not None
                or self._stopping.is_set()
                or (self._end is not None and reached(self._end))
            )

        with self._changed:
            self._changed.wait_for(over, timeout_seconds)
            if self._failure is not None:
                raise self._failure
            return self._end is not None and reached(self._end)

    # --- for subclasses -------------------------------------------------------------------------------------

    @abstractmethod
    def _capture(self) -> None:
        """Capture from the end of the spool until `_stopping` is set. Called again after a temporary error,
        with the lock held.
        """

    def _facts(self, status: CaptureStatus) -> CaptureStatus:
        """Return the status report with the facts of this capture method added. `status` contains the facts
        that all methods report.
        """
        return status

    # --- the capture thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        lock = SpoolLock(self._spool)
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
        """Acquire the spool's lock, and wait while another capture holds it. Returns False if this capture is
        stopped first. Writes no status: the status file belongs to the lock holder.
        """
        while not self._stopping.is_set():
            try:
                lock.acquire()
            except SpoolLockedError as error:
                if self._trouble is None:
                    _log.warning(
                        "capture waits for the spool lock",
                        extra={"code": error.code, "reason": error.message},
                    )
                self._trouble = error
                self._stopping.wait(_LOCK_PAUSE_SECONDS)
            else:
                self._trouble = None
                return True
        return False

    def _keep_capturing(self) -> None:
        _log.info("capture started", extra={"spool": str(self._spool)})
        backoff = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        has_more_to_try = False
        while has_more_to_try or not self._stopping.is_set():
            before, has_more_to_try = self._received, False
            try:
                self._capture()
            except StoppedError:
                break
            except PenstockError as error:
                if error.recovery is not Recovery.RETRY:
                    self._fail(error)
                    return self._report("failed", error)
                if self._received > before:
                    backoff.reset()
                pause = backoff.fail()
                self._report("waiting", error)
                _log.warning(
                    "capture interrupted",
                    extra={"code": error.code, "reason": error.message, "pause_seconds": pause},
                )
                # Try once more even if stopped during the pause: the slot of a killed capture becomes free
                # soon, and the released position can then still be confirmed.
                has_more_to_try = isinstance(error, SlotBusyError) and not self._stopping.is_set()
                self._stopping.wait(pause)
            except BaseException as error:  # noqa: BLE001 - handed to the reader, which raises it
                self._fail(error)
                return self._report("failed", error)
            else:
                break  # stopped
        return self._report("stopped", None)

    def _fail(self, error: BaseException) -> None:
        # INFO only: `wait_beyond` and `wait_until` raise the error in the reader.
        _log.info("capture failed", extra={"error": describe(error)})
        with self._changed:
            self._failure = self._trouble = error
            self._changed.notify_all()

    def _sealed(self, manifest: Manifest) -> None:
        self._rows_total += manifest.rows
        self._usage.add(manifest)
        self._last_seal = time.monotonic()
        self._commit_time = manifest.commit_time or self._commit_time
        self._advance(manifest.end)

    def _advance(self, end: Position) -> None:
        with self._changed:
            self._end = end
            self._changed.notify_all()

    @property
    def _is_report_due(self) -> bool:
        return time.monotonic() >= self._status_due

    def _report(
        self, state: str, trouble: BaseException | None, waits_for: tuple[OpenTransaction, ...] = ()
    ) -> None:
        """Write the status file. The caller holds the spool's lock."""
        self._status_due = time.monotonic() + _STATUS_SECONDS
        self._trouble = trouble
        status = CaptureStatus(
            state=state,
            pid=os.getpid(),
            received=self._received,
            sealed=self._end or Position.ZERO,
            rows_total=self._rows_total,
            bytes_total=self._bytes_total,
            updated_at=datetime.now(UTC),
            confirmed=self._confirmed,
            waits_for=waits_for,
            numeric=self._writes,
        )
        status = self._facts(
            replace(status, failure=CaptureFailure.of(_named(trouble)) if trouble is not None else None)
        )
        try:
            write_status(self._spool, status)
        except OSError as error:
            # The capture continues without a status file; if the disk is full or missing, writing the next
            # segment fails.
            _log.warning("capture status not written", extra={"error": str(error)})


def _named(error: BaseException) -> PenstockError:
    return (
        error
        if isinstance(error, PenstockError)
        else PenstockError(f"unexpected {type(error).__name__} in the capture")
    )
