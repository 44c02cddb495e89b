"""Beside the epochs, a thread that looks at every table that streams, again and again, and has its sink do what is due for it.

Nobody waits for it, and what fails in it fails nothing else: it is due again, later and later. How often something that takes long is done
for a table is for its sink to say.
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

from penstock.errors import PenstockError, TargetFileLostError
from penstock.foreign import describe
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.epochs import EpochLog
from penstock.pipeline.error_policy import decide, final
from penstock.pipeline.letters.store import LetterStore
from penstock.pipeline.retries import RetryLog
from penstock.pipeline.states import TableState, TableStatus
from penstock.retry import Backoff
from penstock.schema import TableName
from penstock.sinks.base import Sink

_log = logging.getLogger(__name__)

_POOL = "penstock-maintenance"
_LOOK_SECONDS = 1.0
_FIRST_REST_SECONDS = 10.0
_LONGEST_REST_SECONDS = 3600.0
_CHORES_SECONDS = 60.0
_POLL_SECONDS = 0.1
_STOP_SECONDS = 10.0
"""What is not a job of Spark's cannot be cut off; the thread ends with the process then."""


def forgetting(config: PipelineConfig, letters: LetterStore) -> list[Callable[[], None]]:
    """What is forgotten after a while that is not a table's: records of epochs, and letters that are settled."""
    chosen = config.maintenance
    if not chosen.vacuum:
        return []
    epochs = EpochLog(config.sink.root, config.pipeline)

    def forget_letters() -> None:
        letters.forget(datetime.now(UTC) - timedelta(seconds=chosen.letters_keep_seconds))

    return [lambda: epochs.forget(chosen.delta_keep_seconds, chosen.delta.versions), forget_letters]


class Jobs:
    """Of Spark's: those that the thread starts which called `settle` have the time that others leave, and end with `cancel`."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext
        self._group = f"penstock-maintenance-{uuid4().hex}"

    def settle(self) -> None:
        self._context.setLocalProperty("spark.scheduler.pool", _POOL)
        self._context.setJobGroup(self._group, "penstock maintenance")

    def cancel(self) -> None:
        self._context.cancelJobGroup(self._group)


class TableUpkeep:
    """`check` and `stop` are called by the thread that called `start`."""

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
        """What takes longer than `limit_seconds` for one table is given up. `chores` are done once a minute, besides.

        `give_up` fails a table whose files are found to be lost. Nothing else that fails here does: the table's rows are right.
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
        """What failed how often, and until when it rests."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = InheritableThread(target=self._run, name="penstock-maintenance", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """See that nothing takes too long. Called all the while."""
        since = self._since
        if since is not None and time.monotonic() - since > self._limit_seconds:
            self._jobs.cancel()

    def stop(self, *, finish: bool = False) -> None:
        """End it, in the midst of what it does; or, to `finish`, after one more look at every table."""
        self._is_last = finish
        self._stopping.set()
        deadline = time.monotonic() + _STOP_SECONDS
        while self._thread is not None and self._thread.is_alive() and (finish or time.monotonic() < deadline):
            self.check() if finish else self._jobs.cancel()
            self._thread.join(_POLL_SECONDS)
        self._thread = None

    def _run(self) -> None:
        self._jobs.settle()
        pause = _LOOK_SECONDS
        while not self._stopping.wait(pause):
            started = time.monotonic()
            self.look()
            # Of very many tables, it is not to be a burden by itself.
            pause = max(_LOOK_SECONDS, time.monotonic() - started)
        if self._is_last:
            self.look()

    def look(self) -> None:
        """Once at every table that streams, and at what there is besides."""
        for name, status in self._statuses().items():
            if self._stopping.is_set() and not self._is_last:
                return
            if status.state is TableState.STREAMING:
                self._do(name, lambda name=name: self._sink.maintain(name))  # type: ignore[misc]
        if time.monotonic() >= self._chores_due or self._is_last:
            for chore in self._chores:
                self._do(chore, chore)
            self._chores_due = time.monotonic() + _CHORES_SECONDS

    def _do(self, what: object, work: Callable[[], None]) -> None:
        """Unless it rests, because it failed."""
        backoff, until = self._failures.get(what, (Backoff(_FIRST_REST_SECONDS, _LONGEST_REST_SECONDS), 0.0))
        if time.monotonic() < until:
            return
        self._since = time.monotonic()
        try:
            work()
        except Exception as error:  # noqa: BLE001 the edge of a thread, whose work is only due again
            self._rest(what, backoff, error)
        else:
            if self._failures.pop(what, None) is not None:
                self._retries.clear(_subject(what))
        finally:
            self._since = None

    def _rest(self, what: object, backoff: Backoff, error: Exception) -> None:
        """Try again later; a table of which a file is lost fails after as many attempts as an epoch would have."""
        backoff.fail()
        self._failures[what] = (backoff, time.monotonic() + backoff.seconds)
        is_cut_off = self._stopping.is_set() and not self._is_last
        _log.log(
            logging.DEBUG if is_cut_off else logging.WARNING,
            "something could not be maintained",
            extra={"what": str(what), "pause_seconds": backoff.seconds, "error": describe(error)},
        )
        if is_cut_off or not isinstance(what, TableName):
            return
        verdict = decide(error, what, "maintaining")
        if isinstance(verdict.error, TargetFileLostError) and backoff.failures >= verdict.attempts:
            self._failures.pop(what)
            self._retries.clear(_subject(what))
            self._give_up(what, final(verdict.error, what))
        elif backoff.failures > 1:  # one that met an epoch is nothing to show
            hint = "see the log; the table itself is up to date, and is maintained again by itself once the cause is gone"
            shown = type(verdict.error)(verdict.error.message, hint=verdict.error.hint or hint)
            self._retries.note(_subject(what), shown, backoff.failures, backoff.seconds)


def _subject(what: object) -> str:
    return f"maintenance of {what}"
