"""Live change stream of a capture: a thread fills the spool, a reader returns changes, and acknowledgements
advance a watermark.

The stream is one consumer of its spool, and releases the spool up to the watermark. So with `confirm:
applied`, the capture confirms a transaction to the server only after the caller has confirmed every change of
it. A separate thread stores the released position. So a caller that confirms a change causes no I/O, and the
confirmation takes effect even if the caller does not ask for the next change.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Generator, Iterator
from contextlib import suppress
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from penstock.capture.events import PlacedEvent, spooled_events
from penstock.capture.thread import CaptureThread
from penstock.capture.watermark import AckWatermark
from penstock.contracts.capture import Change, Commit
from penstock.errors import SpoolError
from penstock.position import Position
from penstock.spool.reader import SpoolRange, SpoolReader
from penstock.spool.retention import release, released_positions
from penstock.spool.rows import RejectedChange, first_rejected

_log = logging.getLogger(__name__)

CONSUMER = "live"
"""The consumer name under which the stream releases the spool."""

_READ_ROWS = 100_000
_WAIT_SECONDS = 0.5
_RELEASE_SECONDS = 0.1


def register(spool: Path) -> None:
    """Register the stream as a consumer of the spool, unless it is registered already. A new consumer keeps
    everything in the spool until its first release.
    """
    try:
        if CONSUMER not in released_positions(spool):
            release(spool, CONSUMER, Position.ZERO)
    except OSError as error:
        raise SpoolError(f"the spool cannot be written: {error}") from error


class LiveChanges:
    """The changes of a capture, as an iterator that owns the capture's thread. The thread ends when the
    iterator is closed or garbage collected. Any thread may call `close`.
    """

    def __init__(self, spool: Path, capture: CaptureThread, *, reject_inexact: bool) -> None:
        """`capture` fills the spool; it is started here and stopped by `close`. With `reject_inexact`, a
        value that the type of its column cannot hold ends the stream.
        """
        watermark = AckWatermark(Position.ZERO)
        releasing = _Releasing(spool, watermark)
        self._is_closed = threading.Event()
        # The lock is reentrant, since a signal handler may call `close` while its thread is in `close`.
        self._closing = threading.RLock()
        # Neither the threads nor the generator hold a reference to this object. So it is garbage collected
        # when the caller drops the last reference, and the finalizer then ends the threads and the generator.
        self._changes = _follow(
            _Followed(spool, capture, reject_inexact), watermark, releasing, self._is_closed
        )
        self._end = weakref.finalize(self, _end, self._is_closed, self._changes, releasing, capture)
        capture.start()
        releasing.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Change:
        try:
            if self._is_closed.is_set():
                raise StopIteration
            return next(self._changes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Store the confirmed position, confirm it to the server, and release the slot and the spool's lock.
        A thread that waits for a change wakes up. All of this is complete when the call returns, even if
        another thread called `close` first.
        """
        with self._closing:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Followed(NamedTuple):
    """The spool to read, the capture that fills it, and whether a value that the type of its column cannot
    hold ends the stream.
    """

    spool: Path
    capture: CaptureThread
    reject_inexact: bool


def _follow(
    followed: _Followed, watermark: AckWatermark, releasing: _Releasing, is_closed: threading.Event
) -> Generator[Change]:
    reader, capture = SpoolReader(followed.spool), followed.capture
    at: Position | None = None
    while not is_closed.is_set():
        releasing.check()
        if at is None:
            # Wait until this capture has opened the spool: before that, a capture in another process may
            # still advance the released position.
            if capture.wait_until(Position.ZERO, _WAIT_SECONDS):
                at = _begin(reader, capture)
                watermark.settle(at)
        elif capture.wait_beyond(at, _WAIT_SECONDS):
            upto = reader.limit(at, max_rows=_READ_ROWS)
            # If the reader finds no segment although the capture has sealed one, read up to the sealed
            # position: `read` then raises the error.
            upto = upto if upto > at else capture.end or at
            spooled = reader.read(at, upto)
            refused = _first_rejected(spooled, reject_inexact=followed.reject_inexact)
            if refused is not None:
                # The watermark stops before the transaction of the rejected change, so the rejected change is
                # read again after a restart.
                yield from _deliver(_before(refused.version, spooled_events(spooled)), at, watermark)
                raise refused.error
            yield from _deliver(spooled_events(spooled), upto, watermark)
            at = upto


def _begin(reader: SpoolReader, capture: CaptureThread) -> Position:
    """Return the position after which the stream begins: the one that this consumer has released or, for a
    new consumer, the start of the spool.
    """
    begun = released_positions(reader.root).get(CONSUMER, Position.ZERO)
    end = capture.end or Position.ZERO
    # `reader.start` is read after `capture.end`. If the spool has no segment even at this time, its end is
    # also its start.
    return begun if begun > Position.ZERO else reader.start or end


def _first_rejected(spooled: SpoolRange, *, reject_inexact: bool) -> RejectedChange | None:
    """Return the first rejected change of all tables; None if no change is rejected."""
    found = (
        first_rejected(table.table, table.slices, reject_inexact=reject_inexact)
        for table in spooled.tables.values()
    )
    return min(filter(None, found), key=attrgetter("version"), default=None)


def _before(version: int, events: Iterator[PlacedEvent]) -> Iterator[PlacedEvent]:
    """Yield the events of all transactions before the commit at `version`."""
    return takewhile(lambda placed: placed.version < version, events)


def _deliver(events: Iterator[PlacedEvent], upto: Position, watermark: AckWatermark) -> Iterator[Change]:
    """Yield the changes of whole transactions up to `upto`. The watermark is given the end of each
    transaction before the last change of the transaction is yielded, since the caller may confirm that change
    and stop.
    """
    placed = next(events, None)
    position = Position.ZERO
    while placed is not None:
        if position.value != placed.version:
            position = Position.of(placed.version)
        ack = watermark.deliver(position)
        following = next(events, None)
        if following is not None and following.version != placed.version:
            watermark.settle(position)
        if following is None:
            watermark.settle(upto)
        yield Change(placed.event, ack, Commit(position, placed.time, placed.ordinal))
        placed = following
    watermark.settle(upto)


class _Releasing:
    """The thread that stores the watermark as the released position, at most every `_RELEASE_SECONDS`."""

    def __init__(self, spool: Path, watermark: AckWatermark) -> None:
        self._spool = spool
        self._watermark = watermark
        self._written = Position.ZERO
        self._failure: SpoolError | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-release", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._stopping.wait(_RELEASE_SECONDS):
                self._write()
            self._write()
        except OSError as error:
            _log.warning("confirmed position not written", extra={"error": str(error)})
            self._failure = SpoolError(f"the spool cannot be written: {error}")
        except SpoolError as error:
            self._failure = error

    def _write(self) -> None:
        resume = self._watermark.resume
        if resume > self._written:
            self._written = release(self._spool, CONSUMER, resume)


def _end(
    is_closed: threading.Event, changes: Generator[Change], releasing: _Releasing, capture: CaptureThread
) -> None:
    """End a stream. The release thread is stopped first, then the capture, which confirms the last released
    position to the server while it stops.
    """
    is_closed.set()
    releasing.stop()
    capture.stop()
    # If the generator is running in another thread, `close` raises ValueError, and the generator ends by
    # itself.
    with suppress(ValueError):
        changes.close()
