"""What stands behind `PostgresConnector.poll_batch`: a thread that reads, and a bounded queue of the steps that the consumer takes.

The thread makes publication and slot, runs a `SpoolCapture`, copies the tables that are to be copied, and then follows the spool. So the
consumer never waits for a server. Trouble that passes is waited out here; everything else is raised to the consumer once it has taken all
that came before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from penstock.capture.settings import CaptureSettings
from penstock.capture.spooling import SpoolCapture
from penstock.connectors.progress import Offset, Progress
from penstock.connectors.readiness import check_members, ensure_source
from penstock.connectors.rows import Begun, Copied, Range, Reached, Rows, Step, copy_tables
from penstock.errors import PenstockError, Recovery, SpoolError
from penstock.lag import OpenTransaction
from penstock.position import Position
from penstock.postgres.health import log_wait
from penstock.retry import Backoff
from penstock.schema import TableName
from penstock.spool.consumers import release, released
from penstock.spool.reader import SpoolReader

_log = logging.getLogger(__name__)

CONSUMER = "connector"
"""The name under which the connector releases what it does not need any more."""

_QUEUE_BYTES = 64 << 20
_QUEUE_STEPS = 256
_READ_ROWS = 100_000
_WAIT_SECONDS = 0.5
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
_END_SECONDS = 15.0
_WATCHES_PER_LOOK = 6
"""How often it looks whether the tables are still what they were, beside the watch over log and slot."""


class StepQueue:
    """Steps from one thread to another: as many as fit, and then the error that ended them. `ready` is set while there is something."""

    def __init__(self, ready: threading.Event, max_bytes: int = _QUEUE_BYTES, max_steps: int = _QUEUE_STEPS) -> None:
        self._ready = ready
        self._max_bytes = max_bytes
        self._max_steps = max_steps
        self._changed = threading.Condition()
        self._steps: deque[Step] = deque()
        self._bytes = 0
        self._failure: BaseException | None = None
        self._is_closed = False

    def put(self, steps: Sequence[Step]) -> bool:
        """Wait for room, then add all of them at once; False if nobody will take them. A queue that is empty takes anything."""
        size = sum(map(_size, steps))
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._has_room(size))
            if self._is_closed:
                return False
            if self._steps and len(steps) == 1 and isinstance(steps[0], Reached) and isinstance(self._steps[-1], Reached):
                self._steps.pop()  # quiet ground behind quiet ground is one stretch of it
            self._steps += steps
            self._bytes += size
            self._ready.set()
            return True

    def take(self, max_rows: int) -> Step | None:
        """The next step, at most so many rows of it; None if there is none now. Raises what ended the steps, after the last of them."""
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
            # The parts of a batch need not add up to its size.
            self._bytes = self._bytes - _size(step) if self._steps else 0
            self._changed.notify_all()
            return step

    def take_mark(self) -> Step | None:
        """The next step if it has no rows and has come already."""
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
        return not self._steps or (self._bytes + size <= self._max_bytes and len(self._steps) < self._max_steps)


def grouped(steps: Iterable[Step]) -> Iterator[tuple[Step, ...]]:
    """Rows together with what is reached by them, so that whoever takes the rows stands there, and not right before it."""
    group: tuple[Step, ...] = ()
    for step in steps:
        if group and isinstance(step, Rows):
            yield group
            group = ()
        group += (step,)
    if group:
        yield group


class Feed:
    """Reads from `progress` on, between `start` and `stop`."""

    def __init__(self, settings: CaptureSettings, progress: Progress, ready: threading.Event, *, takes_all: bool) -> None:
        """With `takes_all`, tables that join the publication later come too."""
        self.steps = StepQueue(ready)
        self._settings = settings
        self._tables = frozenset(progress.tables)
        self._takes_all = takes_all
        self._members = progress.members
        self._followed = progress.followed
        self._begin = progress.floor
        self._to_copy = list(progress.to_copy)
        # What was given out of a table before it was whole, nobody has noted.
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
        """Let go of slot and spool. Nothing is acknowledged that was not before."""
        self._stopping.set()
        self.steps.close()
        self._capture.stop()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_SECONDS)

    @property
    def trouble(self) -> BaseException | None:
        """Why nothing comes now; None while all is well. What the capture says counts also while nobody takes what came before."""
        return self._trouble or self._capture.trouble

    @property
    def errors_total(self) -> int:
        """How often something went wrong so far."""
        return self._errors_total

    # --- the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._retried(self._make_ready)
            self._capture.start()
            self._begin = self._await_begin()
            self._put((Begun(self._begin, self._members),))
            self._retried(self._copy)
            self._follow()
        except _StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - the thread's edge: the consumer raises it
            self._note(error)
            self.steps.fail(error)
        finally:
            self._capture.stop()

    def _make_ready(self) -> None:
        """Publication, then slot, then a look at which tables these are. A slot that is gone is a hole, and the capture says so."""
        settings = self._settings
        ensure_source(settings, self._check_going, is_known=self._begin > Position.ZERO)
        self._members = check_members(settings, self._tables, self._followed)
        try:
            if CONSUMER not in released(settings.spool):
                release(settings.spool, CONSUMER, Position.ZERO)
        except OSError as error:
            raise SpoolError(f"the spool cannot be written: {error}") from error

    def _await_begin(self) -> Position:
        """The spool is ours once it is open, and not before: another process may have been moving the position until then."""
        while not self._capture.wait_until(Position.ZERO, _WAIT_SECONDS):
            self._look()
        end = self._capture.end or Position.ZERO
        if self._begin > Position.ZERO:
            return self._begin
        begun = released(self._settings.spool).get(CONSUMER, Position.ZERO)
        return begun if begun > Position.ZERO else self._reader.start or end

    def _copy(self) -> None:
        """All that is left to copy. When it is interrupted, tables that are not whole begin anew, under another snapshot."""
        again, self._copies_again = self._copies_again, True
        for group in grouped(copy_tables(self._settings, self._to_copy, self._check_going, again=again)):
            self._put(group)
            for step in group:
                if isinstance(step, Copied):
                    self._to_copy.remove(step.table)
                    self._skip[step.table] = Offset(step.fence)

    def _follow(self) -> None:
        look_seconds = self._settings.limits.watch_seconds * _WATCHES_PER_LOOK
        at, look_at = self._begin, time.monotonic() + look_seconds
        while True:
            self._look()
            if time.monotonic() >= look_at:
                self._look_at_members()
                look_at = time.monotonic() + look_seconds
            if not self._capture.wait_beyond(at, _WAIT_SECONDS):
                continue
            upto = self._reader.limit(at, max_rows=_READ_ROWS)
            # Nothing new although the capture says so: reading as far as it says tells what is missing.
            upto = upto if upto > at else self._capture.end or at
            refused = self._give_out(at, upto)
            if refused is not None:
                raise refused
            self._skip = {table: offset for table, offset in self._skip.items() if offset.position > upto}
            at = upto

    def _look_at_members(self) -> None:
        """A table that is renamed or taken out of the publication just falls silent. What this does not see, the next start does."""
        try:
            check_members(self._settings, self._tables, self._members)
        except PenstockError as error:
            if error.recovery is not Recovery.RETRY:
                raise
            _log.info("tables not looked at", extra={"code": error.code})

    def _give_out(self, at: Position, upto: Position) -> PenstockError | None:
        """The changes in `(at, upto]`; or the whole transactions before the first value that ends the stream, and its error.

        In that case the floor stays where it is. No commit ends right before the refused one, and a position at which none ends must not
        be confirmed: the server takes a transaction for known if its commit record *begins* before that.
        """
        found = Range.of(self._reader.read(at, upto), self._skip, self._wants)
        refused = found.first_refused(refuse_inexact=self._settings.types.refuses_inexact)
        if refused is not None:
            found = Range.of(self._reader.read(at, Position.of(refused.version - 1)), self._skip, self._wants)
        for group in grouped(chain(found.rows(), [] if refused is not None else [Reached(upto)])):
            self._put(group)
        return refused.error if refused is not None else None

    def _wants(self, table: TableName) -> bool:
        return self._takes_all or table in self._tables

    # --- what can go wrong ----------------------------------------------------------------------------------------------

    def _put(self, steps: Sequence[Step]) -> None:
        if not self.steps.put(steps):
            raise _StoppedError

    def _look(self) -> None:
        if self._stopping.is_set():
            raise _StoppedError
        self._note(self._capture.trouble)

    def _note(self, trouble: BaseException | None) -> None:
        if trouble is not None and trouble is not self._trouble:
            self._errors_total += 1
        self._trouble = trouble

    def _check_going(self, blockers: Sequence[OpenTransaction]) -> None:
        """Called once a second while a slot or a snapshot waits for others."""
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
                _log.warning("connector interrupted", extra={"code": error.code, "reason": error.message, "pause_seconds": pause})
                if self._stopping.wait(pause):
                    raise _StoppedError from error
            else:
                self._trouble = None
                return


class _StoppedError(Exception):
    """Raised through whatever the thread does to end it."""


def _size(step: Step) -> int:
    return int(step.records.nbytes) if isinstance(step, Rows) else 0
