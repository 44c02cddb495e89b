"""Looks at the source every few seconds, beside the capture.

It has a thread and short-lived connections of its own, so that a server that is slow to answer a question does not hold up the stream. A
look that fails leaves the last one standing; the stream has its own way of noticing that the server is gone. What it does not notice is
that the publication, or a table of it, is: then nothing comes, as if nothing had happened.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from datetime import datetime, timedelta
from types import TracebackType
from typing import Self

from penstock.capture.membership import MemberWatch, check_publication
from penstock.capture.settings import CaptureSettings
from penstock.errors import PartitionIdentityError, PenstockError, PublicationError, TableGapError
from penstock.lag import CaptureLag
from penstock.position import Position
from penstock.postgres.connection import connect
from penstock.postgres.health import SourceSample, inspect_health

_log = logging.getLogger(__name__)

_LEAVE_SECONDS = 0.2
_WATCHES_PER_LOOK = 6
"""How often tables are looked at, beside the watch over log and slot: with many tables that is no small question."""


class SourceWatch:
    """Samples between `__enter__` and `__exit__`. `sample`, `lag` and `check` are for the capture's thread."""

    def __init__(self, settings: CaptureSettings, members: MemberWatch | None = None) -> None:
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
        """The last look; None before the first."""
        return self._sample

    def check(self) -> None:
        """Raise if what is published is no longer what it was."""
        if self._hole is not None:
            raise self._hole

    def lag(self, sealed: Position, commit_time: datetime | None) -> CaptureLag | None:
        """How far what is sealed is behind; `commit_time` is that of the last sealed transaction."""
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
        """Since the last sealed commit, unless we were level with the server later than that: then nothing had committed in between."""
        if self._level is sample:
            return 0.0
        known = [at for at in (commit_time, self._level.taken_at if self._level is not None else None) if at is not None]
        # By the server's clock, which commits are timed by: ours may go differently.
        now = sample.taken_at + timedelta(seconds=time.monotonic() - self._sampled_at)
        return max(0.0, (now - max(known)) / timedelta(seconds=1)) if known else None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopping.set()
        self._thread.join(timeout=_LEAVE_SECONDS)

    def _run(self) -> None:
        looks = itertools.cycle([False] * (_WATCHES_PER_LOOK - 1) + [True])
        while not self._stopping.is_set() and self._hole is None:
            try:
                self._look(at_tables=next(looks))
            except (PublicationError, TableGapError, PartitionIdentityError) as error:
                self._hole = error
            except PenstockError as error:
                _log.info("the source could not be looked at", extra={"code": error.code})
            self._stopping.wait(self._settings.limits.watch_seconds)

    def _look(self, *, at_tables: bool) -> None:
        settings = self._settings
        with connect(settings.address, "penstock watch") as connection:
            sample = inspect_health(connection, settings.slot, settings.limits.long_transaction_seconds)
            self._sampled_at, self._sample = time.monotonic(), sample
            check_publication(connection, settings)
        if at_tables and self._members is not None:
            self._members.look()
