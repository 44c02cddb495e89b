"""The maintenance thread: runs the maintenance that is due for every streaming table, in parallel with
epochs.

A failed job is retried with backoff. Epochs do not wait for the thread, and its errors do not affect epochs.
The only error that fails a table is a target file that stays missing. The sink decides how often an expensive
job runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from uuid import uuid4

from pyspark import InheritableThread
from pyspark.sql import SparkSession

from penstock.config.model import PipelineConfig
from penstock.errors import PenstockError, TargetFileLostError
from penstock.foreign import describe
from penstock.pipeline.dead_letters.store import DeadLetterStore
from penstock.pipeline.epoch_log import EpochLog
from penstock.pipeline.error_policy import decide, final
from penstock.pipeline.retries import RetryLog
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.retry import Backoff
from penstock.schema import TableName
from penstock.sinks.base import Sink

_log = logging.getLogger(__name__)

_POOL = "penstock-maintenance"
_QUERY_SECONDS = 1.0
_FIRST_REST_SECONDS = 10.0
_LONGEST_REST_SECONDS = 3600.0
_CHORES_SECONDS = 60.0
_POLL_SECONDS = 0.1
_STOP_SECONDS = 10.0
"""How long `stop` waits for the thread. Work outside Spark jobs cannot be cancelled; it ends with the
process.
"""


def cleanup_jobs(config: PipelineConfig, letters: DeadLetterStore) -> list[Callable[[], None]]:
    """Return functions that delete old epoch records, and old dead letters that were superseded or replayed.
    Empty if `maintenance.vacuum` is off.
    """
    chosen = config.maintenance
    if not chosen.vacuum:
        return []
    epochs = EpochLog(config.sink.root, config.pipeline)

    def forget_dead_letters() -> None:
        letters.forget(datetime.now(UTC) - timedelta(seconds=chosen.dead_letters_keep_seconds))

    return [lambda: epochs.forget(chosen.delta_keep_seconds, chosen.delta.versions), forget_dead_letters]


class Jobs:
    """The Spark jobs of the maintenance thread. After the thread has called `settle`, its jobs run at lower
    priority, and `cancel` ends them.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext
        self._group = f"penstock-maintenance-{uuid4().hex}"

    def settle(self) -> None:
        self._context.setLocalProperty("spark.scheduler.pool", _POOL)
        self._context.setJobGroup(self._group, "penstock maintenance")

    def cancel(self) -> None:
        self._context.cancelJobGroup(self._group)


class TableMaintenance:
    """The maintenance thread. The pipeline's main thread calls `start`, `check` and `stop`."""

    def __init__(
        self,
        sink: Sink,
        statuses: Callable[[], Mapping[TableName, TableStatus]],
        limit_seconds: float,
        jobs: Jobs,
        chores: Sequence[Callable[[], None]] = (),
        *,
        retries: RetryLog | None = None,
        give_up: Callable[[TableName, PenstockError], None] = lambda _name, _error: None,
    ) -> None:
        """A job that takes longer than `limit_seconds` is cancelled. `chores` are jobs for the whole
        pipeline, which run once a minute.

        `give_up` fails a table whose files are lost. No other failure of maintenance fails a table, because
        its rows are correct.
        """
        self._sink = sink
        self._statuses = statuses
        self._limit_seconds = limit_seconds
        self._jobs = jobs
        self._stopping = threading.Event()
        self._is_last = False
        self._since: float | None = None
        self._chores = chores
        self._chores_due = 0.0
        self._retries = retries or RetryLog()
        self._give_up = give_up
        self._failures: dict[object, tuple[Backoff, float]] = {}
        """For each table or chore whose last attempt failed: its backoff, and the time of its next attempt.
        """
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = InheritableThread(target=self._run, name="penstock-maintenance", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Cancel a job that takes too long. Called in every iteration of the main loop."""
        since = self._since
        if since is not None and time.monotonic() - since > self._limit_seconds:
            self._jobs.cancel()

    def stop(self, *, finish: bool = False) -> None:
        """End the thread: at once, or with `finish` after one more round over all tables."""
        self._is_last = finish
        self._stopping.set()
        deadline = time.monotonic() + _STOP_SECONDS
        while (
            self._thread is not None and self._thread.is_alive() and (finish or time.monotonic() < deadline)
        ):
            self.check() if finish else self._jobs.cancel()
            self._thread.join(_POLL_SECONDS)
        self._thread = None

    def _run(self) -> None:
        self._jobs.settle()
        pause = _QUERY_SECONDS
        while not self._stopping.wait(pause):
            started = time.monotonic()
            self.maintain_all()
            # Maintenance of many tables takes at most half of the time.
            pause = max(_QUERY_SECONDS, time.monotonic() - started)
        if self._is_last:
            self.maintain_all()

    def maintain_all(self) -> None:
        """Maintain every streaming table once, and run the chores that are due."""
        for name, status in self._statuses().items():
            if self._stopping.is_set() and not self._is_last:
                return
            if status.state is TableState.STREAMING:
                self._run_job(name, lambda name=name: self._sink.maintain(name))  # type: ignore[misc]
        if time.monotonic() >= self._chores_due or self._is_last:
            for chore in self._chores:
                self._run_job(chore, chore)
            self._chores_due = time.monotonic() + _CHORES_SECONDS

    def _run_job(self, what: object, work: Callable[[], None]) -> None:
        """Run the job of a table or a chore, unless it waits for its retry."""
        backoff, until = self._failures.get(what, (Backoff(_FIRST_REST_SECONDS, _LONGEST_REST_SECONDS), 0.0))
        if time.monotonic() < until:
            return
        self._since = time.monotonic()
        try:
            work()
        except Exception as error:  # noqa: BLE001 the edge of a thread: the job is retried
            self._rest(what, backoff, error)
        else:
            if self._failures.pop(what, None) is not None:
                self._retries.clear(_subject(what))
        finally:
            self._since = None

    def _rest(self, what: object, backoff: Backoff, error: Exception) -> None:
        """Schedule another attempt. A table with a lost file fails after as many attempts as in epochs
        (`Verdict.attempts`).
        """
        backoff.fail()
        self._failures[what] = (backoff, time.monotonic() + backoff.seconds)
        is_cut_off = self._stopping.is_set() and not self._is_last
        _log.log(
            logging.DEBUG if is_cut_off else logging.WARNING,
            "maintenance failed",
            extra={"what": str(what), "pause_seconds": backoff.seconds, "error": describe(error)},
        )
        if is_cut_off or not isinstance(what, TableName):
            return
        verdict = decide(error, what, "maintaining")
        if isinstance(verdict.error, TargetFileLostError) and backoff.failures >= verdict.attempts:
            self._failures.pop(what)
            self._retries.clear(_subject(what))
            self._give_up(what, final(verdict.error, what))
        elif backoff.failures > 1:  # a single conflict with an epoch is normal
            hint = (
                "see the log; the table itself is up to date, and maintenance continues when the cause "
                "is removed"
            )
            shown = type(verdict.error)(verdict.error.message, hint=verdict.error.hint or hint)
            self._retries.note(_subject(what), shown, backoff.failures, backoff.seconds)


def _subject(what: object) -> str:
    return f"maintenance of {what}"
