"""Captures that poll the source (polling, triggers): the feed interface, and `FeedCapture`, which writes a
feed into a spool.

A feed is polled periodically. Each poll returns whole transactions as log steps, and ends at a *mark*: a
position, and the feed's own state for resuming there. `FeedCapture` writes the changes and the mark of a poll
into one segment, so one commit makes both durable. Once all consumers have released a mark, it is confirmed
to the feed. So the last confirmed mark is the only durable state that a feed needs.

Positions come from the feed. They must always increase, also across restarts and if everything but the source
is lost, since targets compare them with their applied positions. The simplest such number is the server's WAL
position: see `penstock.postgres.consistent_read`.

After a crash the feed resumes from the last mark in the spool or from the last confirmed one, whichever is
later. It may then return the changes after that mark again: either the identical changes, or changes that can
be applied twice as upserts.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from typing_extensions import override

from penstock.capture.settings import CaptureLimits, CaptureMethod, Confirm
from penstock.capture.slot_capture import seal_pause_seconds
from penstock.capture.thread import CaptureThread
from penstock.change import Idle, LogicalMessage, LogStep
from penstock.position import Lsn, Position
from penstock.postgres.server import SystemIdentity
from penstock.postgres.types.column import TypePolicy
from penstock.spool.manifest import Manifest
from penstock.spool.ownership import CaptureIdentity, ensure_identity
from penstock.spool.retention import SpoolBudget, released_by_all
from penstock.spool.status import CaptureStatus
from penstock.spool.writer import SpoolWriter


@dataclass(frozen=True, slots=True)
class Mark:
    """Everything up to `position` has been returned; `state` tells the feed how to resume there."""

    position: Position
    state: str = ""
    """Text that only the feed interprets.

    It is stored in manifests and in the source, so it must not contain secrets or values of rows.
    """


class FeedSession(AbstractContextManager["FeedSession"], ABC):
    """One run of a feed, used by one thread.

    It owns its connections until `close`. An implementation sets `system` and `mark`.
    """

    system: SystemIdentity
    """The database system of the changes."""
    mark: Mark
    """The end of the last poll. It must be set before the last step of that poll is returned."""
    has_more: bool = False
    """Whether the last poll left changes for the next one, which then follows without a pause."""

    @abstractmethod
    def poll(self) -> Iterator[LogStep]:
        """Query the source once, and yield the changes since the last poll, if there are any.

        `FeedCapture` calls it every `interval_seconds` and exhausts the iterator. After an error it closes
        the session and opens another one at the last mark in the spool. Steps are `Transactions`, or pieces
        and their commit for a transaction that is too large for memory. Their positions are between the
        previous mark and the new one, and the last step ends at the new one. To store a mark at once without
        changes, yield a step without rows.
        """

    @abstractmethod
    def confirm(self, mark: Mark) -> None:
        """Store durably that no consumer needs anything up to this mark; `ChangeFeed.ensure` returns it from
        then on.

        Called between two polls with marks of this or earlier sessions, in order. The usual mistake is to
        store the mark already when its changes are returned.
        """

    def close(self) -> None:
        """Release all resources. May be called more than once."""

    @override
    def __exit__(self, *_: object) -> None:
        self.close()


class ChangeFeed(ABC):
    """The description of a source to poll. It holds no resources."""

    @abstractmethod
    def ensure(self) -> Mark:
        """Return the last confirmed mark. If there is none, create the first mark durably: it is before all
        later commits.
        """

    @abstractmethod
    def open(self, mark: Mark) -> FeedSession:
        """Open a session that resumes after `mark`, which is the last confirmed mark or a later one in the
        spool.
        """


MARK_PREFIX = "penstock.mark"
"""The prefix of the logical message that contains a mark in a manifest."""

_HOUSEKEEPING_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """Identity and polling interval of a feed, and the spool that its changes go to."""

    name: str
    """Identifies this feed among all feeds of the same source. A spool never changes its feed."""
    method: CaptureMethod
    spool: Path
    limits: CaptureLimits = field(default_factory=CaptureLimits)
    types: TypePolicy = TypePolicy.DEFAULT
    confirm: Confirm = Confirm.APPLIED
    interval_seconds: float = 1.0
    """The pause between two polls when nothing is left to read."""


class FeedCapture(CaptureThread):
    """Writes one feed into one spool."""

    def __init__(self, feed: ChangeFeed, settings: FeedSettings) -> None:
        super().__init__(settings.spool, settings.types.writes)
        self._feed = feed
        self._settings = settings
        self._marks: deque[Mark] = deque()
        self._released: Position | None = None
        self._housekeeping_due = 0.0
        self._poll_due = 0.0

    @override
    def _capture(self) -> None:
        settings, confirmed = self._settings, self._feed.ensure()
        spooled = spooled_marks(self._reader.segments())
        self._marks = deque(mark for mark in spooled if mark.position > confirmed.position)
        begin = self._marks[-1] if self._marks else confirmed
        with self._feed.open(begin) as session:
            system = session.system
            ensure_identity(
                settings.spool,
                CaptureIdentity(settings.name, settings.method.value, system.identifier, system.timeline),
            )
            writer = SpoolWriter(
                settings.spool, begin.position, max_segment_bytes=settings.limits.segment_bytes * 4
            )
            self._usage.scan()
            self._confirmed = confirmed.position
            self._received = begin.position
            self._last_seal = time.monotonic()
            self._advance(begin.position)
            try:
                self._follow(session, writer)
            finally:
                writer.close()

    def _follow(self, session: FeedSession, writer: SpoolWriter) -> None:
        budget = SpoolBudget(self._usage, self._settings.limits.spool_bytes)
        self._poll_due = 0.0
        while not self._stopping.is_set():
            self._do_housekeeping(session, budget)
            left = self._poll_due - time.monotonic()
            if budget.must_pause() or left > 0:
                self._stopping.wait(
                    min(_HOUSEKEEPING_SECONDS, max(left, 0.001)) if left > 0 else _HOUSEKEEPING_SECONDS
                )
                continue
            self._poll(session, writer)
            self._received = session.mark.position
            self._poll_due = 0.0 if session.has_more else time.monotonic() + self._pause_seconds()
        self._housekeeping_due = 0.0
        self._do_housekeeping(session, budget)

    def _poll(self, session: FeedSession, writer: SpoolWriter) -> None:
        """Write one poll into the spool: its changes and its mark in one segment. After a poll without
        changes, write only the mark, at most every `quiet_seconds`.
        """
        held: LogStep | None = None
        for step in session.poll():
            if held is not None:
                self._append(writer, held)
            held = step
        if held is not None:
            # The mark goes in before the last step, since appending that step may seal the segment.
            self._append(writer, _message(session.mark))
            self._append(writer, held)
        elif (
            time.monotonic() - self._last_seal >= self._settings.limits.quiet_seconds
            and session.mark.position > writer.end
        ):
            self._append(writer, _message(session.mark))
            self._append(writer, Idle(session.mark.position))
        else:
            return
        manifest = writer.seal(quiet=True)
        if manifest is not None:
            self._sealed(manifest)

    def _append(self, writer: SpoolWriter, step: LogStep) -> None:
        for manifest in writer.append(step):
            self._sealed(manifest)

    @override
    def _sealed(self, manifest: Manifest) -> None:
        self._marks.extend(spooled_marks([manifest]))
        super()._sealed(manifest)

    def _pause_seconds(self) -> float:
        """Return the pause before the next poll: the interval of the feed, or a longer time while many
        segments are not released, since each poll creates a segment.
        """
        waiting = self._usage.waiting(self._released)
        return max(
            self._settings.interval_seconds, seal_pause_seconds(self._settings.limits.seal_seconds, waiting)
        )

    def _do_housekeeping(self, session: FeedSession, budget: SpoolBudget) -> None:
        """Confirm marks, and delete the segments that every consumer has released."""
        now = time.monotonic()
        if now < self._housekeeping_due:
            return
        self._housekeeping_due = now + _HOUSEKEEPING_SECONDS
        self._released = released_by_all(self._spool)
        confirmable = self._end if self._settings.confirm is Confirm.SPOOLED else self._released
        mark = self._pop_mark(confirmable or Position.ZERO)
        if mark is not None:
            session.confirm(mark)
            self._confirmed = mark.position
        self._usage.delete_released(self._released)
        if self._is_report_due:
            self._report("full" if budget.must_pause() else "streaming", None)

    def _pop_mark(self, upto: Position) -> Mark | None:
        """Remove the unconfirmed marks at or before `upto`, and return the last of them; None if there is
        none.
        """
        mark = None
        while self._marks and self._marks[0].position <= upto:
            mark = self._marks.popleft()
        return mark

    @override
    def _facts(self, status: CaptureStatus) -> CaptureStatus:
        return replace(status, confirms=self._settings.confirm.value)


def spooled_marks(segments: Iterable[Manifest]) -> list[Mark]:
    """Return the marks in these segments, in order."""
    found = [
        Mark(Position.of(message.lsn.value + 1), message.content.decode())
        for segment in segments
        for message in segment.messages
        if message.prefix == MARK_PREFIX
    ]
    return sorted(found, key=lambda mark: mark.position)


def _message(mark: Mark) -> LogicalMessage:
    """Return the logical message that stores a mark in a manifest. It is outside of transactions.

    Its LSN is one before the position, since a segment contains the messages before its end.
    """
    return LogicalMessage(MARK_PREFIX, mark.state.encode(), Lsn(mark.position.value - 1))
