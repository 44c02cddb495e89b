"""`SpoolCapture`: capture by logical replication. It writes the changes of a replication slot into a spool,
and checks the health of the source every few seconds.

The capture runs in one daemon thread, next to the receive thread of its `ReplicationStream`. The capture
thread takes messages from the stream, decodes them, appends the resulting `LogStep`s to the spool, seals
segments, and confirms positions. It holds the spool's lock from its first query to its end, and is the only
writer of the spool and of its status file. A second capture of the same spool waits for the lock.
`ConfirmPolicy` decides which position is confirmed: by default the one that every consumer of the spool has
released.

Health checks run in a separate thread with short-lived connections, so that a slow answer does not delay the
stream. If the query of a check fails, the previous sample stays valid; the stream itself detects that the
server is unreachable. Only the health checks detect that the publication, or a table in it, was removed.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from types import TracebackType
from typing import Self

from typing_extensions import override

from penstock.capture.settings import CaptureSettings, ConfirmPolicy
from penstock.capture.source_checks import MembershipWatch, check_publication, inspect_source
from penstock.capture.thread import CaptureThread, StoppedError
from penstock.errors import (
    ConnectionLostError,
    PartitionIdentityError,
    PenstockError,
    PublicationError,
    TableGapError,
)
from penstock.lag import CaptureLag, OpenTransaction, unreserved_slot
from penstock.position import Position
from penstock.postgres.catalog import inspect_primary_key
from penstock.postgres.connection import Connection, SourceAddress, connect, source_errors
from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from penstock.postgres.pgoutput.relations import CatalogKey
from penstock.postgres.replication import ReplicationStream, StreamRequest
from penstock.postgres.server import SourceSample, SystemIdentity, inspect_health, log_wait
from penstock.postgres.slot import Slot
from penstock.spool.ownership import CaptureIdentity, ensure_identity
from penstock.spool.retention import SpoolBudget, released_by_all
from penstock.spool.status import CaptureStatus
from penstock.spool.writer import SpoolWriter


class KeyCatalog(AbstractContextManager["KeyCatalog"]):
    """Queries primary keys over one connection, so that a capture of a thousand tables does not log in a
    thousand times. The connection is opened by the first query, since most captures need none.
    """

    def __init__(self, address: SourceAddress) -> None:
        self._address = address
        self._stack = ExitStack()
        self._connection: Connection | None = None

    def load(self, oid: int) -> CatalogKey | None:
        """Return the key of the table with this OID; None if the table was dropped, or is visible only to the
        transaction that creates it.
        """
        if self._connection is not None:
            try:
                return self._ask(self._connection, oid)
            except ConnectionLostError:
                # Queries may be hours apart, and servers or proxies close idle connections.
                self.close()
        self._connection = self._stack.enter_context(connect(self._address))
        return self._ask(self._connection, oid)

    def close(self) -> None:
        self._connection = None
        self._stack.close()

    @override
    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, connection: Connection, oid: int) -> CatalogKey | None:
        with source_errors(f"querying a primary key at {self._address.describe()}"):
            return inspect_primary_key(connection, oid)


_log = logging.getLogger(__name__)

_LEAVE_SECONDS = 0.2
_SAMPLES_PER_MEMBERSHIP_CHECK = 6
"""One of this many health checks also checks the memberships of tables in the publication. That query is
expensive with many tables.
"""


class SourceWatch:
    """Samples the health of slot and server in a separate thread, between `__enter__` and `__exit__`. The
    capture's thread reads `sample` and calls `lag` and `check`.
    """

    def __init__(self, settings: CaptureSettings, members: MembershipWatch | None = None) -> None:
        self._settings = settings
        self._members = members
        self._hole: PenstockError | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-watch", daemon=True)
        self._sample: SourceSample | None = None
        self._sampled_at = 0.0
        self._level: SourceSample | None = None

    @property
    def sample(self) -> SourceSample | None:
        """The last sample; None before the first."""
        return self._sample

    def check(self) -> None:
        """Raise the error that a health check has found, if there is one: a missing publication, a table
        whose changes may be missing, or partitions that do not log their root's key.
        """
        if self._hole is not None:
            raise self._hole

    def lag(self, sealed: Position, commit_time: datetime | None) -> CaptureLag | None:
        """Return the lag of `sealed`, the last sealed position; None before the first sample. `commit_time`
        is the commit time of the last sealed transaction.
        """
        sample = self._sample
        if sample is None:
            return None
        if sealed >= sample.flushed:
            self._level = sample
        retained_bytes = sample.flushed.lsn - sample.slot_restart if sample.slot_restart is not None else None
        return CaptureLag(
            sampled_at=sample.taken_at,
            behind_bytes=max(0, sample.flushed - sealed),
            behind_seconds=self._behind_seconds(sample, commit_time),
            retained_bytes=retained_bytes,
            safe_wal_bytes=sample.safe_wal_bytes,
            wal_status=sample.wal_status,
            catalog_xmin_age=sample.catalog_xmin_age,
            oldest_xmin_age=sample.oldest_xmin_age,
            holders=sample.holders,
        )

    def _behind_seconds(self, sample: SourceSample, commit_time: datetime | None) -> float | None:
        """Return the seconds that have passed since the last sealed commit, or since the last sample whose
        WAL end was sealed, whichever is more recent. 0 if the WAL end of `sample` is sealed; None if neither
        time is known.
        """
        if self._level is sample:
            return 0.0
        known = [
            at
            for at in (commit_time, self._level.taken_at if self._level is not None else None)
            if at is not None
        ]
        # Computed with the server's clock, which also sets commit times. The local clock may differ.
        now = sample.taken_at + timedelta(seconds=time.monotonic() - self._sampled_at)
        return max(0.0, (now - max(known)) / timedelta(seconds=1)) if known else None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(timeout=_LEAVE_SECONDS)

    def _run(self) -> None:
        checks_memberships = itertools.cycle([False] * (_SAMPLES_PER_MEMBERSHIP_CHECK - 1) + [True])
        while not self._stopping.is_set() and self._hole is None:
            try:
                self._take_sample(with_memberships=next(checks_memberships))
            except (PublicationError, TableGapError, PartitionIdentityError) as error:
                self._hole = error
            except PenstockError as error:
                _log.info("source health check failed", extra={"code": error.code})
            self._stopping.wait(self._settings.limits.watch_seconds)

    def _take_sample(self, *, with_memberships: bool) -> None:
        settings = self._settings
        with connect(settings.address, "penstock watch") as connection:
            sample = inspect_health(connection, settings.slot, settings.limits.long_transaction_seconds)
            self._sampled_at, self._sample = time.monotonic(), sample
            check_publication(connection, settings)
        if with_memberships and self._members is not None:
            self._members.check()


_HOUSEKEEPING_SECONDS = 0.2
_FEW_SEGMENTS = 100
_SHORTEST_SEAL_SECONDS = 0.001
_LONGEST_SEAL_SECONDS = 30.0


class SpoolCapture(CaptureThread):
    """Captures one slot into one spool."""

    def __init__(self, settings: CaptureSettings, members: MembershipWatch | None = None) -> None:
        """With `members`, the capture ends with an error if a table was removed from the publication for a
        time, since changes of that table may be missing. Without `members`, each consumer of the spool checks
        its own tables.
        """
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
            self._members.check()
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
        with (
            self._open(request) as stream,
            SourceWatch(settings, self._members) as self._watch,
            KeyCatalog(settings.address) as catalog,
        ):
            if SystemIdentity(stream.system_identifier, stream.timeline) != system:
                raise ConnectionLostError(
                    "the replication connection reached another server than the queries before it"
                )
            ensure_identity(
                settings.spool,
                CaptureIdentity(settings.slot, settings.publication, system.identifier, system.timeline),
            )
            writer = SpoolWriter(settings.spool, start, max_segment_bytes=limits.segment_bytes * 4)
            self._usage.scan()
            self._confirmed = slot.confirmed
            self._advance(start)
            stream.start()
            prefixes = frozenset(settings.message_prefixes)
            decoder = PgOutputDecoder(
                keys, types, load_key=catalog.load, prefixes=prefixes, old_rows=settings.old_rows
            )
            self._follow(stream, decoder, writer)

    def _wait_for_slot(self, blockers: Sequence[OpenTransaction]) -> None:
        """Report the open transactions that the creation of the slot waits for, once a second. Raises
        `StoppedError` if the capture is stopped.
        """
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
        budget = SpoolBudget(self._usage, self._settings.limits.spool_bytes)
        bytes_before = self._bytes_total
        try:
            while not self._stopping.is_set():
                self._do_housekeeping(stream, budget)
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
            self._do_housekeeping(stream, budget)
            # The stream is closed before all other resources: closing it sends the last confirmation, and the
            # process may have little time left.
            stream.close()
        finally:
            writer.close()

    def _patience_seconds(self, writer: SpoolWriter) -> float:
        return self._settings.limits.seal_seconds if writer.pending_rows else _HOUSEKEEPING_SECONDS

    def _hold_seconds(self) -> float:
        """The time for which `take` may collect messages: until the next seal, but at most
        `_HOUSEKEEPING_SECONDS`.
        """
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
        return seal_pause_seconds(self._settings.limits.seal_seconds, self._usage.waiting(self._released))

    def _do_housekeeping(self, stream: ReplicationStream, budget: SpoolBudget) -> None:
        """Confirm a position to the server, and delete segments that every consumer has released."""
        now = time.monotonic()
        if now < self._housekeeping_due:
            return
        self._housekeeping_due = now + _HOUSEKEEPING_SECONDS
        if self._watch is not None:
            self._watch.check()
        self._released = done = released_by_all(self._settings.spool)
        self._choose_confirm(done)
        confirmable = self._policy.confirmable(done, self._end)
        if confirmable is not None:
            stream.confirm(confirmable)
            self._confirmed = max(self._confirmed, confirmable)
        self._usage.delete_released(done)
        if self._is_report_due:
            self._report("full" if budget.must_pause() else "streaming", None)

    def _choose_confirm(self, done: Position | None) -> None:
        sample = self._watch.sample if self._watch is not None else None
        if sample is not None and self._policy.update(sample.flushed, sample.slot_restart, done, self._end):
            _log.warning("confirm mode switched", extra={"confirms": self._policy.mode.value})

    @override
    def _facts(self, status: CaptureStatus) -> CaptureStatus:
        lag = self._watch.lag(status.sealed, self._commit_time) if self._watch is not None else None
        return replace(status, confirms=self._policy.mode.value, lag=lag)


def _warn_if_unreserved(slot: Slot) -> None:
    danger = unreserved_slot(slot.wal_status, f"slot {slot.name}")
    if danger is not None:
        _log.warning(
            "the slot may be invalidated",
            extra={"code": danger.code, "reason": danger.message, "fix": danger.hint},
        )


def seal_pause_seconds(least_seconds: float, waiting: int) -> float:
    """Return the minimum time between two seals. It grows with the square of `waiting`, the number of
    unreleased segments. So segments are small while the consumers keep up, and an absent consumer causes few
    segments: about 1,800 after an hour, 5,500 after a day. The pause is short compared with the lag of the
    consumers, and becomes shorter as soon as they release segments.
    """
    least_seconds = max(least_seconds, _SHORTEST_SEAL_SECONDS)
    return max(least_seconds, min(_LONGEST_SEAL_SECONDS, least_seconds * (waiting / _FEW_SEGMENTS) ** 2))
