"""Error policy: the action after an error of one table in an epoch, a snapshot, a resync or maintenance.

One table must not stop the others, so every error is attributed to the table unless its class says that the
cause is shared. The table backs off and is retried a limited number of times while the other tables continue.
Then it fails, with cause and remedy in its status. Before an attempt counts, the caller checks that the
shared parts (Spark, target root, source) work.

Epochs skip a table that backs off, as they skip a paused table. Its applied position does not change, and the
spool keeps the changes after this position.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
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
    """Back off and retry; after `Verdict.attempts` consecutive failures the table fails."""
    FAIL_TABLE = "fail the table"
    """A retry cannot help. The other tables continue."""
    STOP = "stop"
    """The cause is shared by all tables. The run ends, or restarts after a pause, as the error's `Recovery`
    says.
    """


@dataclass(frozen=True, slots=True)
class Verdict:
    """The action after an error, and the error to show: the one that was raised, or a `PenstockError` for an
    exception of another library.
    """

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
"""Errors of the source, the slot or the run itself. They stop the run, whichever table raised them."""

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0
USUAL_ATTEMPTS = 10
"""The attempts after other errors. They take about four minutes."""
FILE_ATTEMPTS = 3
"""The attempts after a missing file. They are few, because a lost file does not return."""
PATIENT_ATTEMPTS = 60
"""The attempts after errors that need an operator: a full disk, another session's lock or a server timeout.
They take about an hour.
"""


def attempts_without_any_target(errors: Collection[PenstockError]) -> int:
    """Return the number of consecutive starts without a readable target after which the tables fail. It is
    small if target files are missing. Otherwise it is as for retries within a run.
    """
    if all(isinstance(error, TargetFileLostError) for error in errors):
        return FILE_ATTEMPTS
    return USUAL_ATTEMPTS if len(errors) == 1 else PATIENT_ATTEMPTS


@dataclass(slots=True)
class UnreadableStarts:
    """Counts consecutive starts in which no target could be read."""

    count: int = 0
    _is_counted: bool = False

    def begin(self) -> None:
        """Call before the targets are read. Resets the count if the previous start could read a target."""
        if not self._is_counted:
            self.count = 0
        self._is_counted = False

    def may_retry(
        self, errors: Mapping[TableName, PenstockError], ordered_resyncs: Collection[TableName]
    ) -> bool:
        """Count a start in which no target could be read. Returns True to start again, because storage or
        catalog may be unavailable for a time, and False to fail the tables.

        Returns False, too, if a resync of all these tables is ordered, because another start would not help.
        """
        self.count += 1
        self._is_counted = True
        is_ordered = errors.keys() <= set(ordered_resyncs)
        return not is_ordered and self.count < attempts_without_any_target(errors.values())


MOST_RESYNCS = 20
_RESYNC_WINDOW_SECONDS = 3600.0

_NEEDS_ROOM = (
    "free space on the volumes of the target, the state directory and spark.local.dir; the table "
    "then continues by itself"
)


def decide(error: Exception, table: TableName, doing: str = "applying changes to") -> Verdict:
    """Choose the action after an error of one table. No other code makes this decision. `doing` is the
    operation that failed; messages begin with it and the table's name.
    """
    if isinstance(error, _STOPPING):
        return Verdict(Action.STOP, error)
    if is_disk_full(error):
        return Verdict(
            Action.RETRY_TABLE,
            SinkError(f"{doing} {table}: the disk is full", hint=_NEEDS_ROOM),
            PATIENT_ATTEMPTS,
        )
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
    """Decide on an exception of another library. Its message may contain row values, so only its class is
    kept.
    """
    file = missing_file(error)
    if file is not None:
        lost = TargetFileLostError(f"{doing} {table}: the file {file} is missing")
        return Verdict(Action.RETRY_TABLE, lost, FILE_ATTEMPTS)
    return Verdict(
        Action.RETRY_TABLE, TableFailedError(f"{doing} {table}: {describe(error)}"), USUAL_ATTEMPTS
    )


def final(error: PenstockError, table: TableName) -> PenstockError:
    """Return the error to show for a failed table. It always has a hint."""
    remedy = f"penstock tables resync CONFIG {table}"
    if error.hint is not None:
        hint = f"{error.hint}; then {remedy}" if remedy not in error.hint else error.hint
    elif isinstance(error, TargetFileLostError):
        hint = f"{remedy} copies it from the source again; the current target cannot be read completely"
    elif isinstance(error, ConnectionLostError):
        hint = f"see the Postgres log for the reason (such as a timeout or too little memory); then {remedy}"
    else:
        hint = (
            "remove the cause, such as too little memory for Spark (the log at level DEBUG has the "
            f"full error), then {remedy}"
        )
    return type(error)(error.message, hint=hint)


@dataclass(slots=True)
class _Failing:
    backoff: Backoff
    since: float
    due_at: float


class TableRetries:
    """The tables to retry, with the number of their failures and the time of their next attempt.

    One thread counts attempts; any thread may call the other methods.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failing: dict[TableName, _Failing] = {}
        self._succeeded: dict[TableName, float] = {}

    def count(self, table: TableName, verdict: Verdict) -> float | None:
        """Count a failed attempt. Returns the pause before the next attempt; None if this was the last
        attempt.

        If other tables fail too, and none has succeeded since this table first failed, a shared cause is
        likely. Then more attempts are allowed.
        """
        now = self._clock()
        failing = self._failing.setdefault(table, _Failing(Backoff(FIRST_SECONDS, LONGEST_SECONDS), now, now))
        pause = failing.backoff.fail()
        attempts = (
            PATIENT_ATTEMPTS if self._is_shared(table, verdict.error, failing.since) else verdict.attempts
        )
        if failing.backoff.failures >= attempts:
            self.forget(table)
            return None
        failing.due_at = now + pause
        return pause

    def _is_shared(self, table: TableName, error: PenstockError, since: float) -> bool:
        if isinstance(error, TargetFileLostError):
            return False
        others = [each for each in self._failing.copy() if each != table]
        return bool(others) and not any(
            at >= since for each, at in self._succeeded.copy().items() if each != table
        )

    def failures(self, table: TableName) -> int:
        failing = self._failing.get(table)
        return 0 if failing is None else failing.backoff.failures

    def succeed(self, table: TableName) -> None:
        self._succeeded[table] = self._clock()
        self._failing.pop(table, None)

    def forget(self, table: TableName) -> None:
        """Forget the failures of a table that is now `failed`, was removed, or was resynced."""
        self._failing.pop(table, None)

    def is_due(self, table: TableName) -> bool:
        failing = self._failing.get(table)
        return failing is None or self._clock() >= failing.due_at

    @property
    def has_due(self) -> bool:
        return any(self._clock() >= failing.due_at for failing in list(self._failing.values()))


class ResyncLimit:
    """Limits how often a table is resynced automatically. Without a limit, a cause that a resync does not
    remove would lead to endless resyncs.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._resyncs: dict[TableName, list[float]] = {}

    def check(self, table: TableName, reason: str) -> None:
        """Count a resync. Raises `TableFailedError` if there were too many within an hour."""
        now = self._clock()
        recent = [at for at in self._resyncs.get(table, []) if at > now - _RESYNC_WINDOW_SECONDS]
        if len(recent) >= MOST_RESYNCS:
            hint = f"remove the cause, then penstock tables resync CONFIG {table}"
            raise TableFailedError(
                f"table {table} was resynced {len(recent)} times within an hour, "
                f"and needs another resync: {reason}",
                hint=hint,
            )
        self._resyncs[table] = [*recent, now]
