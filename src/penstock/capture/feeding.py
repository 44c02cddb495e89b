"""`FeedCapture`: the bridge that writes what a feed gives into a spool, so that everything behind the spool is as with logical replication.

It stands where `SpoolCapture` stands, and is built on the same thread. The mark at which a look ends lies in the manifest of the segment
that holds the changes of the look, so one rename makes both durable. After a crash the feed goes on from the last such mark, or from the
one that was confirmed to it, whichever is further; what it gives again then is the same as before, or is no harm to who upserts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from typing_extensions import override

from penstock.capture.confirming import Confirm
from penstock.capture.feeds import ChangeFeed, FeedSession, Mark
from penstock.capture.settings import CaptureLimits
from penstock.capture.spooling import seal_pause_seconds
from penstock.capture.thread import CaptureThread
from penstock.change import LogicalMessage, LogStep, Quiet
from penstock.position import Lsn, Position
from penstock.postgres.types.policy import TypePolicy
from penstock.spool.consumers import minimum
from penstock.spool.identity import CaptureIdentity, ensure_identity
from penstock.spool.manifest import Manifest
from penstock.spool.status import CaptureStatus
from penstock.spool.stock import SpoolBudget
from penstock.spool.writer import SpoolWriter

MARK_PREFIX = "penstock.mark"
"""Under which a mark stands among a manifest's messages."""

_HOUSEKEEPING_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """Where a feed's changes go."""

    spool: Path
    limits: CaptureLimits = field(default_factory=CaptureLimits)
    types: TypePolicy = TypePolicy.DEFAULT
    confirm: Confirm = Confirm.APPLIED


class FeedCapture(CaptureThread):
    """One feed into one spool."""

    def __init__(self, feed: ChangeFeed, settings: FeedSettings) -> None:
        super().__init__(settings.spool, settings.types.writes)
        self._feed = feed
        self._settings = settings
        self._marks: deque[Mark] = deque()
        self._released: Position | None = None
        self._housekeeping_due = 0.0
        self._look_due = 0.0

    @override
    def _capture(self) -> None:
        settings, confirmed = self._settings, self._feed.ensure()
        spooled = spooled_marks(self._reader.segments())
        self._marks = deque(mark for mark in spooled if mark.position > confirmed.position)
        begin = self._marks[-1] if self._marks else confirmed
        with self._feed.open(begin) as session:
            system = session.system
            ensure_identity(settings.spool, CaptureIdentity(self._feed.name, self._feed.kind, system.identifier, system.timeline))
            writer = SpoolWriter(settings.spool, begin.position, max_segment_bytes=settings.limits.segment_bytes * 4)
            self._stock.look()
            self._confirmed = confirmed.position
            self._received = begin.position
            self._last_seal = time.monotonic()
            self._advance(begin.position)
            try:
                self._follow(session, writer)
            finally:
                writer.close()

    def _follow(self, session: FeedSession, writer: SpoolWriter) -> None:
        budget = SpoolBudget(self._stock, self._settings.limits.spool_bytes)
        self._look_due = 0.0
        while not self._stopping.is_set():
            self._keep_house(session, budget)
            patience = self._look_due - time.monotonic()
            if budget.must_pause() or patience > 0:
                self._stopping.wait(min(_HOUSEKEEPING_SECONDS, max(patience, 0.001)) if patience > 0 else _HOUSEKEEPING_SECONDS)
                continue
            self._look(session, writer)
            self._received = session.mark.position
            self._look_due = 0.0 if session.has_more else time.monotonic() + self._pause_seconds()
        self._housekeeping_due = 0.0
        self._keep_house(session, budget)

    def _look(self, session: FeedSession, writer: SpoolWriter) -> None:
        """One look into the spool: its changes and its mark in one segment, or, now and then, the mark alone."""
        held: LogStep | None = None
        for step in session.look():
            if held is not None:
                self._append(writer, held)
            held = step
        if held is not None:
            # The mark goes in before the last step, which may seal by itself.
            self._append(writer, _message(session.mark))
            self._append(writer, held)
        elif time.monotonic() - self._last_seal >= self._settings.limits.quiet_seconds and session.mark.position > writer.end:
            self._append(writer, _message(session.mark))
            self._append(writer, Quiet(session.mark.position))
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
        """The feed's own, or longer while many segments wait for their consumers: each look makes one."""
        waiting = self._stock.waiting(self._released)
        return max(self._feed.interval_seconds, seal_pause_seconds(self._settings.limits.seal_seconds, waiting))

    def _keep_house(self, session: FeedSession, budget: SpoolBudget) -> None:
        """Confirm what may be confirmed, and drop from the spool what every consumer has released."""
        now = time.monotonic()
        if now < self._housekeeping_due:
            return
        self._housekeeping_due = now + _HOUSEKEEPING_SECONDS
        self._released = minimum(self._spool)
        confirmable = self._end if self._settings.confirm is Confirm.SPOOLED else self._released
        mark = self._pop_mark(confirmable or Position.ZERO)
        if mark is not None:
            session.confirm(mark)
            self._confirmed = mark.position
        self._stock.delete_released(self._released)
        if self._is_report_due:
            self._report("full" if budget.must_pause() else "streaming", None)

    def _pop_mark(self, upto: Position) -> Mark | None:
        """The last mark that lies at or before there, if it has not been confirmed yet."""
        mark = None
        while self._marks and self._marks[0].position <= upto:
            mark = self._marks.popleft()
        return mark

    @override
    def _facts(self, status: CaptureStatus) -> CaptureStatus:
        return replace(status, confirms=self._settings.confirm.value)


def spooled_marks(segments: Iterable[Manifest]) -> list[Mark]:
    """The marks in some segments, in order."""
    found = [
        Mark(Position.of(message.lsn.value + 1), message.content.decode())
        for segment in segments
        for message in segment.messages
        if message.prefix == MARK_PREFIX
    ]
    return sorted(found, key=lambda mark: mark.position)


def _message(mark: Mark) -> LogicalMessage:
    """Outside of transactions, one before the position: a segment holds such messages that stand before its end."""
    return LogicalMessage(MARK_PREFIX, mark.state.encode(), Lsn(mark.position.value - 1))
