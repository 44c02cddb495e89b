"""The policy for an error of one table, and the message for errors that are not Penstock's."""

from __future__ import annotations

import errno
import random
from typing import Any

import pytest

from penstock.errors import (
    AuthenticationError,
    ConnectionLostError,
    LockWaitError,
    PenstockError,
    ProtocolError,
    SchemaChangedError,
    SinkError,
    SlotLostError,
    TargetFileLostError,
)
from penstock.foreign import describe, is_disk_full, missing_file
from penstock.pipeline.error_policy import (
    FILE_ATTEMPTS,
    PATIENT_ATTEMPTS,
    USUAL_ATTEMPTS,
    Action,
    TableRetries,
    UnreadableStarts,
    decide,
    final,
)
from penstock.retry import Backoff
from penstock.schema import TableName

TABLE = TableName("public", "t")


class Py4JJavaError(Exception):
    """As py4j's: the exception of the JVM, and all of its text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.java_exception = object()


STAGE = (
    "An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.\n"
    ": org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 "
    "times, most recent failure: "
    "Lost task 0.0 in stage 1.0 (TID 1) (host executor driver): "
)
LOST_FILE = STAGE + (
    "org.apache.spark.SparkFileNotFoundException: [FAILED_READ_FILE.FILE_NOT_EXIST] Encountered error "
    "while reading file "
    "file:///lake/public/t/part-0001.snappy.parquet. File does not exist.\n\tat org.apache.spark"
)
PYTHON = STAGE + (
    "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
    '  File "/x.py", line 3, in f\n'
    "ValueError: secret\n\n\tat org.apache.spark.api.python.BasePythonRunner"
)
NO_MEMORY = STAGE + "java.lang.OutOfMemoryError: Java heap space\n\tat java.base/java.util.Arrays"
NO_EXECUTOR = STAGE.replace("Lost task", "ExecutorLostFailure (executor 1 exited): secret Lost task")
FULL = STAGE + "java.io.IOException: No space left on device\n\tat java.base/java.io"
VALUE = "[CAST_INVALID_INPUT] The value 'secret' of the type \"STRING\" cannot be cast"


@pytest.mark.parametrize(
    ("error", "action", "attempts"),
    [
        (SlotLostError("x"), Action.STOP, 1),
        (AuthenticationError("x"), Action.STOP, 1),
        (SchemaChangedError("x"), Action.FAIL_TABLE, 1),
        (ProtocolError("x"), Action.FAIL_TABLE, 1),
        (SinkError("x"), Action.RETRY_TABLE, USUAL_ATTEMPTS),
        (TargetFileLostError("x"), Action.RETRY_TABLE, FILE_ATTEMPTS),
        (LockWaitError("x"), Action.RETRY_TABLE, PATIENT_ATTEMPTS),
        (ConnectionLostError("x"), Action.RETRY_TABLE, PATIENT_ATTEMPTS),
        (MemoryError(), Action.RETRY_TABLE, USUAL_ATTEMPTS),
        (OSError(errno.ENOSPC, "No space left on device"), Action.RETRY_TABLE, PATIENT_ATTEMPTS),
        (Py4JJavaError(FULL), Action.RETRY_TABLE, PATIENT_ATTEMPTS),
        (Py4JJavaError(LOST_FILE), Action.RETRY_TABLE, FILE_ATTEMPTS),
        (Py4JJavaError(NO_MEMORY), Action.RETRY_TABLE, USUAL_ATTEMPTS),
        (Py4JJavaError(NO_EXECUTOR), Action.RETRY_TABLE, USUAL_ATTEMPTS),
        (KeyError("secret"), Action.RETRY_TABLE, USUAL_ATTEMPTS),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_kind_of_error_has_one_outcome_and_shows_no_row(
    error: Exception, action: Action, attempts: int
) -> None:
    verdict = decide(error, TABLE)
    assert (verdict.action, verdict.attempts) == (action, attempts)
    shown = final(verdict.error, TABLE)
    assert "secret" not in str(shown)
    if action is Action.RETRY_TABLE:
        assert "penstock tables resync CONFIG public.t" in (shown.hint or "")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Py4JJavaError(LOST_FILE), "the file /lake/public/t/part-0001.snappy.parquet is missing"),
        (Py4JJavaError(PYTHON), "ValueError"),
        (Py4JJavaError(NO_MEMORY), "java.lang.OutOfMemoryError"),
        (Py4JJavaError(VALUE), "CAST_INVALID_INPUT"),
        (ValueError("secret"), "ValueError"),
        (ValueError("FileNotFoundException /lake/forged.parquet"), "ValueError"),
        (OSError(errno.EACCES, "Permission denied"), "Permission denied"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_of_a_foreign_error_its_kind_is_shown_and_the_name_of_a_missing_file(
    error: Exception, words: str
) -> None:
    assert describe(error) == words


def test_the_cause_of_an_error_is_read_too() -> None:
    lost, full = SinkError("no"), SinkError("no")
    lost.__cause__ = FileNotFoundError(2, "No such file", "/lake/a.parquet")
    full.__cause__ = OSError(errno.EDQUOT, "Disk quota exceeded")
    assert missing_file(lost) == "/lake/a.parquet"
    assert is_disk_full(full)
    assert not is_disk_full(ValueError("OSError: No space left on device"))


def test_a_pause_doubles_up_to_the_longest_and_is_never_the_same_for_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    backoff = Backoff(1.0, 8.0)
    assert [backoff.fail() for _ in range(6)] == [1.5, 3.0, 6.0, 12.0, 12.0, 12.0]
    assert (backoff.failures, backoff.seconds) == (6, 8.0)
    backoff.reset()
    assert backoff.fail() == 1.5
    backoff.failures = 100_000
    assert backoff.fail() == 12.0


def test_a_success_in_between_resets_the_retry_count() -> None:
    now = [0.0]
    retries, verdict = TableRetries(lambda: now[0]), decide(SinkError("no"), TABLE)
    for _ in range(USUAL_ATTEMPTS - 1):
        assert retries.count(TABLE, verdict) is not None
        assert not retries.is_due(TABLE)
        now[0] += 100
        assert retries.is_due(TABLE)
    retries.succeed(TABLE)
    assert retries.count(TABLE, verdict) is not None
    assert retries.failures(TABLE) == 1


class _Busy(dict[TableName, float]):
    """Another thread adds an entry at every read."""

    def items(self) -> Any:
        for number, each in enumerate(super().items()):
            self[TableName("public", f"new{number}")] = 0.0
            yield each


def test_an_attempt_is_counted_while_other_tables_succeed_in_other_threads() -> None:
    retries, verdict = TableRetries(lambda: 1.0), decide(SinkError("no"), TABLE)
    retries.count(TableName("public", "failing"), verdict)
    retries._succeeded = _Busy({TableName("public", "fine"): 0.0})
    assert retries.count(TABLE, verdict) is not None


def test_the_remedy_of_an_error_that_has_one_is_kept() -> None:
    shown: PenstockError = final(SinkError("no", hint="mount it"), TABLE)
    assert shown.hint == "mount it; then penstock tables resync CONFIG public.t"


A, B = TableName("public", "a"), TableName("public", "b")


def test_only_consecutive_starts_without_any_target_count() -> None:
    starts, errors = UnreadableStarts(), {A: SinkError("storage is away")}
    for outage in range(3):
        for start in range(USUAL_ATTEMPTS - 1):
            starts.begin()
            assert starts.may_retry(errors, ()), f"start {start} of outage {outage}"
        starts.begin()  # a target can be read again
    for _ in range(USUAL_ATTEMPTS - 1):
        starts.begin()
        assert starts.may_retry(errors, ())
    starts.begin()
    assert not starts.may_retry(errors, ())


def test_the_resync_of_one_table_does_not_fail_the_others_while_storage_is_away() -> None:
    errors = {A: SinkError("storage is away"), B: SinkError("storage is away")}
    assert UnreadableStarts().may_retry(errors, {A})
    assert not UnreadableStarts().may_retry(errors, {A, B}), "waiting does not help"
