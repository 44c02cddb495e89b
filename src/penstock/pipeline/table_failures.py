"""Tables that an epoch could not be applied to: counted, left where they are for a while, taken up again, or failed.

A table that backs off is left out of epochs like a paused one: its applied position stays, and holds everything after it in the spool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from penstock.errors import ConnectionLostError, PenstockError, TargetRewoundError
from penstock.pipeline.error_policy import Action, TableRetries, Verdict, decide, final
from penstock.pipeline.ledger import TableLedger
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.states import TableState, TableStatus
from penstock.schema import TableName
from penstock.sinks.base import Sink

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class TableFailures:
    """Of one run. `take` and `take_up_due` are called by the thread of the epoch, between its work on tables."""

    ledger: TableLedger
    sink: Sink
    observer: PipelineObserver
    check_shared: Callable[[], None]
    """Raises if something that all tables need does not work: a table is not blamed for that."""
    fail: Callable[[TableName, PenstockError], None]
    retries: TableRetries = field(default_factory=TableRetries)

    def take(self, failures: Mapping[TableName, Exception]) -> None:
        """Tables fail one by one; but if all targets are gone at once, what holds them is away, and no table is at fault."""
        gone = [error for error in failures.values() if isinstance(error, TargetRewoundError)]
        if gone and all(self.sink.load_target(name) is None for name in self.ledger.live()):
            raise gone[0]
        verdicts = {name: decide(error, name) for name, error in failures.items()}
        for name, verdict in verdicts.items():
            if verdict.action is Action.STOP:
                raise verdict.error from failures[name]
        if any(verdict.action is Action.RETRY_TABLE for verdict in verdicts.values()):
            self.check_shared()
        for name in [name for name, error in failures.items() if isinstance(error, ConnectionLostError)][:1]:
            self.sink.load_target(name)  # raises the same if the target does not answer at all
        for name, verdict in verdicts.items():
            if verdict.action is Action.FAIL_TABLE:
                self.fail(name, verdict.error)
            else:
                self._back_off(name, verdict, failures[name])

    def _back_off(self, name: TableName, verdict: Verdict, cause: Exception) -> None:
        """Leave the table where it is and keep its changes; a later epoch tries again, unless this was the last attempt."""
        pause = self.retries.count(name, verdict)
        shown = final(verdict.error, name)
        facts = {"table": str(name), "code": shown.code, "cause": type(cause).__name__, "pause_seconds": pause}
        # What others say may quote rows.
        _log.warning("applying changes to a table failed", extra=facts, exc_info=cause if _log.isEnabledFor(logging.DEBUG) else None)
        if pause is None:
            self.fail(name, shown)
            return
        before = self.ledger.statuses[name]
        status = replace(TableStatus.failed(shown, before.applied), state=TableState.RETRYING, committed=before.committed)
        tried = f"failed {self.retries.failures(name)} times in a row, next attempt in about {pause:.0f} s"
        self.ledger.write({name: replace(status, reason=f"{status.reason}; {tried}")})
        self.observer.interrupted(f"{shown.code}: {shown.message}", pause)

    def take_up_due(self) -> None:
        """Tables whose next attempt is due have an epoch again, from where their target is: the answer to a commit may have been lost."""
        retrying = [name for name, status in self.ledger.statuses.items() if status.state is TableState.RETRYING]
        for name in filter(self.retries.is_due, retrying):
            status = replace(self.ledger.statuses[name], state=TableState.CATCHING_UP)
            with suppress(Exception):  # the attempt finds out
                target = self.sink.load_target(name)
                if target is not None and target.applied is not None and status.applied is not None:
                    self.ledger.targets[name] = target
                    status = replace(status, applied=max(status.applied, target.applied))
            self.ledger.write({name: status})
