"""`SpoolCapture`: follows a replication slot into a spool.

It runs as one named daemon thread beside the receive thread of its `ReplicationStream`: take messages, decode them, append the steps of
the log to the spool, seal segments, confirm. It holds the spool's lock from its first look at the source to its end, and is the spool's
only writer, status file included; a second capture of the same spool waits for the lock and writes nothing. What it confirms,
`ConfirmPolicy` says: by default what every consumer of the spool has released, and consumers release only what their targets hold.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from typing_extensions import override

from penstock.capture.confirming import ConfirmPolicy
from penstock.capture.inspection import inspect_source
from penstock.capture.keys import KeyCatalog
from penstock.capture.membership import MemberWatch
from penstock.capture.settings import CaptureSettings
from penstock.capture.thread import CaptureThread, StoppedError
from penstock.capture.watch import SourceWatch
from penstock.errors import ConnectionLostError
from penstock.lag import OpenTransaction, unreserved_slot
from penstock.position import Position
from penstock.postgres.health import log_wait
from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from penstock.postgres.replication import ReplicationStream, StreamRequest
from penstock.postgres.slot import Slot
from penstock.postgres.timeline import SystemIdentity
from penstock.spool.consumers import minimum
from penstock.spool.identity import CaptureIdentity, ensure_identity
from penstock.spool.status import CaptureStatus
from penstock.spool.stock import SpoolBudget
from penstock.spool.writer import SpoolWriter

_log = logging.getLogger(__name__)

_HOUSEKEEPING_SECONDS = 0.2
_FEW_SEGMENTS = 100
_SHORTEST_SEAL_SECONDS = 0.001
_LONGEST_SEAL_SECONDS = 30.0


class SpoolCapture(CaptureThread):
    """One slot into one spool."""

    def __init__(self, settings: CaptureSettings, members: MemberWatch | None = None) -> None:
        """With `members`, a table that was out of the publication ends the capture. Without, its consumers look after their tables."""
        super().__init__(settings.spool, settings.types.writes)
        self._settings = settings
        self._members = members
        self._policy = ConfirmPolicy(settings.confirm, settings.max_retained_bytes)
        self._watch: SourceWatch | None = None
        self._released: Position | None = None
        self._housekeeping_due = 0.0

    @override
    def _capture(self) -> None:
        settings = self._settings
        system, slot, start, keys, types = inspect_source(settings, self._reader, self._wait_for_slot)
        if self._members is not None:
            self._members.look()
        _warn_if_unreserved(slot)
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
        with self._open(request) as stream, SourceWatch(settings, self._members) as self._watch, KeyCatalog(settings.address) as catalog:
            if SystemIdentity(stream.system_identifier, stream.timeline) != system:
                raise ConnectionLostError("another server answers at this address than a moment ago")
            ensure_identity(settings.spool, CaptureIdentity(settings.slot, settings.publication, system.identifier, system.timeline))
            writer = SpoolWriter(settings.spool, start, max_segment_bytes=limits.segment_bytes * 4)
            self._stock.look()
            self._confirmed = slot.confirmed
            self._advance(start)
            stream.start()
            prefixes = frozenset(settings.message_prefixes)
            decoder = PgOutputDecoder(keys, types, load_key=catalog.load, prefixes=prefixes, old_rows=settings.old_rows)
            self._follow(stream, decoder, writer)

    def _wait_for_slot(self, blockers: Sequence[OpenTransaction]) -> None:
        """Called once a second while the slot's creation waits."""
        if self._stopping.is_set():
            raise StoppedError
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

    def _keep_house(self, stream: ReplicationStream, budget: SpoolBudget) -> None:
        """Confirm what may be confirmed, and drop from the spool what every consumer has released."""
        now = time.monotonic()
        if now < self._housekeeping_due:
            return
        self._housekeeping_due = now + _HOUSEKEEPING_SECONDS
        if self._watch is not None:
            self._watch.check()
        self._released = done = minimum(self._settings.spool)
        self._choose_confirm(done)
        confirmable = self._policy.confirmable(done, self._end)
        if confirmable is not None:
            stream.confirm(confirmable)
            self._confirmed = max(self._confirmed, confirmable)
        self._stock.delete_released(done)
        if self._is_report_due:
            self._report("full" if budget.must_pause() else "streaming", None)

    def _choose_confirm(self, done: Position | None) -> None:
        sample = self._watch.sample if self._watch is not None else None
        if sample is not None and self._policy.look(sample.flushed, sample.slot_restart, done, self._end):
            _log.warning("what is confirmed has changed", extra={"confirms": self._policy.mode.value})

    @override
    def _facts(self, status: CaptureStatus) -> CaptureStatus:
        lag = self._watch.lag(status.sealed, self._commit_time) if self._watch is not None else None
        return replace(status, confirms=self._policy.mode.value, lag=lag)


def _warn_if_unreserved(slot: Slot) -> None:
    danger = unreserved_slot(slot.wal_status, f"slot {slot.name}")
    if danger is not None:
        _log.warning("the slot may be invalidated", extra={"code": danger.code, "reason": danger.message, "fix": danger.hint})


def seal_pause_seconds(least_seconds: float, waiting: int) -> float:
    """The least time between two seals: small segments while consumers keep up, ever larger ones the more segments wait.

    By its square the number stays in the thousands however long a consumer is away: about 1,800 after an hour, 5,000 after a day. Nobody
    is kept waiting by that who is not behind by as much; and it is short again as soon as consumers have released.
    """
    least_seconds = max(least_seconds, _SHORTEST_SEAL_SECONDS)
    return max(least_seconds, min(_LONGEST_SEAL_SECONDS, least_seconds * (waiting / _FEW_SEGMENTS) ** 2))
