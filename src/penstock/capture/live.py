"""The live stream of a capture: a thread that fills the spool, and a reader that takes changes out of it.

The stream is one consumer of its spool. What it releases there is the watermark of its acknowledgements, so the capture confirms to the
server what the caller has confirmed, in whole transactions, and nothing else. A thread of its own writes the releases down: confirming a
change costs no I/O, and counts also while nobody asks for the next one.
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

from penstock.capture.acks import AckWatermark
from penstock.capture.events import PlacedEvent, spooled_events
from penstock.capture.thread import CaptureThread
from penstock.contracts.capture import Change, Commit
from penstock.errors import SpoolError
from penstock.position import Position
from penstock.spool.consumers import release, released
from penstock.spool.reader import SpoolRange, SpoolReader
from penstock.spool.values import RefusedValue, first_refused

_log = logging.getLogger(__name__)

CONSUMER = "live"
"""The name under which the stream releases what it does not need any more."""

_READ_ROWS = 100_000
_WAIT_SECONDS = 0.5
_RELEASE_SECONDS = 0.1


def register(spool: Path) -> None:
    """Make the stream a consumer of its spool, if it is not one yet: one that has not begun, and needs all that the spool holds."""
    try:
        if CONSUMER not in released(spool):
            release(spool, CONSUMER, Position.ZERO)
    except OSError as error:
        raise SpoolError(f"the spool cannot be written: {error}") from error


class LiveChanges:
    """One run of a capture, from the moment it is made until it is closed or dropped. `close` may come from any thread."""

    def __init__(self, spool: Path, capture: CaptureThread, *, refuse_inexact: bool) -> None:
        """`capture` fills the spool, and is started and stopped here."""
        watermark = AckWatermark(Position.ZERO)
        releasing = _Releasing(spool, watermark)
        self._is_closed = threading.Event()
        # Entered again by its own thread when a signal handler closes what is being closed.
        self._closing = threading.RLock()
        # Neither the threads nor the generator know this object: when the last reference to it goes, everything ends.
        self._changes = _follow(_Followed(spool, capture, refuse_inexact), watermark, releasing, self._is_closed)
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
        """Write down what has been confirmed, tell the server, and let go of slot and spool. Wakes a thread that waits for a change.

        All that is done when this returns, also where another thread had begun it.
        """
        with self._closing:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Followed(NamedTuple):
    """A spool, who fills it, and whether a value beyond its type ends the stream."""

    spool: Path
    capture: CaptureThread
    refuse_inexact: bool


def _follow(followed: _Followed, watermark: AckWatermark, releasing: _Releasing, is_closed: threading.Event) -> Generator[Change]:
    reader, capture = SpoolReader(followed.spool), followed.capture
    at: Position | None = None
    while not is_closed.is_set():
        releasing.check()
        if at is None:
            # The spool is ours once it is open, and not before: another process may have been moving the position until then.
            if capture.wait_until(Position.ZERO, _WAIT_SECONDS):
                at = _begin(reader, capture)
                watermark.settle(at)
        elif capture.wait_beyond(at, _WAIT_SECONDS):
            upto = reader.limit(at, max_rows=_READ_ROWS)
            # Nothing new although the capture says so: reading as far as it says tells what is missing.
            upto = upto if upto > at else capture.end or at
            spooled = reader.read(at, upto)
            refused = _first_refused(spooled, refuse_inexact=followed.refuse_inexact)
            if refused is not None:
                # Nothing is settled beyond the last transaction that goes out, so this one comes again after a restart.
                yield from _deliver(_before(refused.version, spooled_events(spooled)), at, watermark)
                raise refused.error
            yield from _deliver(spooled_events(spooled), upto, watermark)
            at = upto


def _begin(reader: SpoolReader, capture: CaptureThread) -> Position:
    """Where this consumer has released the spool; if it has not begun, where the spool starts."""
    begun = released(reader.root).get(CONSUMER, Position.ZERO)
    end = capture.end or Position.ZERO
    # Asked after the end: while there is no segment, the end is the start.
    return begun if begun > Position.ZERO else reader.start or end


def _first_refused(spooled: SpoolRange, *, refuse_inexact: bool) -> RefusedValue | None:
    """The first value of any table that ends the stream."""
    found = (first_refused(table.table, table.slices, refuse_inexact=refuse_inexact) for table in spooled.tables.values())
    return min(filter(None, found), key=attrgetter("version"), default=None)


def _before(version: int, events: Iterator[PlacedEvent]) -> Iterator[PlacedEvent]:
    """The whole transactions before the commit at `version`."""
    return takewhile(lambda placed: placed.version < version, events)


def _deliver(events: Iterator[PlacedEvent], upto: Position, watermark: AckWatermark) -> Iterator[Change]:
    """Hand out whole transactions. That one is whole is noted before its last change goes out, since confirming that may be the end."""
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
    """The thread that writes the watermark down, a few times a second at most."""

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


def _end(is_closed: threading.Event, changes: Generator[Change], releasing: _Releasing, capture: CaptureThread) -> None:
    """The release first, then the capture, which confirms it to the server as its last act."""
    is_closed.set()
    releasing.stop()
    capture.stop()
    # Its reader may be in it, and then it ends by itself.
    with suppress(ValueError):
        changes.close()
