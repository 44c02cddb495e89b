"""Error policy: what follows an error that was raised while one table is applied, copied, resynced or maintained.

One table must not stop the others, so every error is the table's own unless its class says that something shared is at fault. The table
backs off and is tried again a bounded number of times while the others continue; then it fails, with the cause and the remedy in its
status. Whether the shared things (Spark, the target's root, the source) still work is checked by whoever counts an attempt, before it
counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from penstock.errors import (
    AuthenticationError,
    CaptureFailedError,
    ConnectionLostError,
    LockWaitError,
    PenstockError,
    PipelineBusyError,
    PositionGapError,
    Recovery,
    SecretError,
    ServerUnfitError,
    SinkError,
    SlotLostError,
    SlotMissingError,
    SystemChangedError,
    TableFailedError,
    TargetFileLostError,
)
from penstock.foreign import describe, is_disk_full, missing_file
from penstock.retry import Backoff
from penstock.schema import TableName


class Action(Enum):
    RETRY_TABLE = "retry the table"
    """The table backs off; after `Verdict.attempts` in a row it fails."""
    FAIL_TABLE = "fail the table"
    """Trying again cannot help. The others continue."""
    STOP = "stop"
    """Something shared is at fault. The run ends, or starts again after a pause, by the error's `Recovery`."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows, and the error to show: the one that was raised, or ours for one that was not."""

    action: Action
    error: PenstockError
    attempts: int = 1


_STOPPING = (
    AuthenticationError,
    CaptureFailedError,
    PipelineBusyError,
    PositionGapError,
    SecretError,
    ServerUnfitError,
    SlotLostError,
    SlotMissingError,
    SystemChangedError,
)
"""Errors of the source, the slot or the run itself, whichever table meets them first."""

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0
USUAL_ATTEMPTS = 10
"""About four minutes."""
FILE_ATTEMPTS = 3
"""A file that is lost does not come back; storage that was away for a moment does."""
PATIENT_ATTEMPTS = 60
"""About an hour: a full disk, a lock that another session holds, or a server that ends statements, passes when a person has acted."""

MOST_RESYNCS = 20
_RESYNC_WINDOW_SECONDS = 3600.0

_NEEDS_ROOM = "free space on the volumes of the target, the state directory and spark.local.dir; the table then continues by itself"


def decide(error: Exception, table: TableName, doing: str = "applying changes to") -> Verdict:
    """The one place that decides what follows an error raised while `doing` something to one table."""
    if isinstance(error, _STOPPING):
        return Verdict(Action.STOP, error)
    if is_disk_full(error):
        return Verdict(Action.RETRY_TABLE, SinkError(f"{doing} {table}: the disk is full", hint=_NEEDS_ROOM), PATIENT_ATTEMPTS)
    if not isinstance(error, PenstockError):
        return _decide_foreign(error, table, doing)
    if error.recovery is not Recovery.RETRY:
        return Verdict(Action.FAIL_TABLE, error)
    if isinstance(error, TargetFileLostError):
        return Verdict(Action.RETRY_TABLE, error, FILE_ATTEMPTS)
    if isinstance(error, LockWaitError | ConnectionLostError):
        return Verdict(Action.RETRY_TABLE, error, PATIENT_ATTEMPTS)
    return Verdict(Action.RETRY_TABLE, error, USUAL_ATTEMPTS)


def _decide_foreign(error: Exception, table: TableName, doing: str) -> Verdict:
    """An exception that is not ours: its message may contain row values, so only its kind is kept."""
    file = missing_file(error)
    if file is not None:
        lost = TargetFileLostError(f"{doing} {table}: the file {file} is missing")
        return Verdict(Action.RETRY_TABLE, lost, FILE_ATTEMPTS)
    return Verdict(Action.RETRY_TABLE, TableFailedError(f"{doing} {table}: {describe(error)}"), USUAL_ATTEMPTS)


def final(error: PenstockError, table: TableName) -> PenstockError:
    """The error as it is shown once the table has failed, always with a remedy."""
    remedy = f"penstock tables resync CONFIG {table}"
    if isinstance(error, TargetFileLostError):
        hint = f"{remedy} copies it from the source again; the present target cannot be read completely"
    elif error.hint is not None:
        hint = f"{error.hint}; then {remedy}" if remedy not in error.hint else error.hint
    elif isinstance(error, ConnectionLostError):
        hint = f"see the server's log for what ended the statement (a timeout, its memory); then {remedy}"
    else:
        hint = f"remove the cause (too little memory for Spark, say; the log at level DEBUG has the whole error), then {remedy}"
    return type(error)(error.message, hint=hint)


@dataclass(slots=True)
class _Failing:
    backoff: Backoff
    since: float
    due_at: float


class TableRetries:
    """Tables that failed and are to be tried again: how often each has failed, and when its next attempt is due.

    Attempts are counted by one thread; the others may be called by any.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failing: dict[TableName, _Failing] = {}
        self._succeeded: dict[TableName, float] = {}

    def count(self, table: TableName, verdict: Verdict) -> float | None:
        """Count a failed attempt. Returns the pause before the next one; None if that was the last.

        While no other table succeeds and others fail too, something that they share is the likely cause: then they are given more time.
        """
        now = self._clock()
        failing = self._failing.setdefault(table, _Failing(Backoff(FIRST_SECONDS, LONGEST_SECONDS), now, now))
        pause = failing.backoff.fail()
        attempts = PATIENT_ATTEMPTS if self._is_shared(table, verdict.error, failing.since) else verdict.attempts
        if failing.backoff.failures >= attempts:
            self.forget(table)
            return None
        failing.due_at = now + pause
        return pause

    def _is_shared(self, table: TableName, error: PenstockError, since: float) -> bool:
        if isinstance(error, TargetFileLostError):
            return False
        others = [each for each in self._failing.copy() if each != table]
        return bool(others) and not any(at >= since for each, at in self._succeeded.copy().items() if each != table)

    def failures(self, table: TableName) -> int:
        failing = self._failing.get(table)
        return 0 if failing is None else failing.backoff.failures

    def succeed(self, table: TableName) -> None:
        self._succeeded[table] = self._clock()
        self._failing.pop(table, None)

    def forget(self, table: TableName) -> None:
        """The table failed for good, was removed or was replaced by a new copy."""
        self._failing.pop(table, None)

    def is_due(self, table: TableName) -> bool:
        failing = self._failing.get(table)
        return failing is None or self._clock() >= failing.due_at

    @property
    def has_due(self) -> bool:
        return any(self._clock() >= failing.due_at for failing in list(self._failing.values()))


class ResyncLimit:
    """Bounds how often a table is resynced because it cannot be followed: a cause that a new copy does not remove would do so for ever."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._resyncs: dict[TableName, list[float]] = {}

    def check(self, table: TableName, reason: str) -> None:
        """Count a resync; `TableFailedError` if there were too many within an hour."""
        now = self._clock()
        recent = [at for at in self._resyncs.get(table, []) if at > now - _RESYNC_WINDOW_SECONDS]
        if len(recent) >= MOST_RESYNCS:
            hint = f"remove the cause, then penstock tables resync CONFIG {table}"
            raise TableFailedError(f"table {table} was resynced {len(recent)} times within an hour, and again {reason}", hint=hint)
        self._resyncs[table] = [*recent, now]
