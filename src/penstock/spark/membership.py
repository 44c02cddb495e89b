"""Whether the tables of a query have been in the publication all the while, and are still the tables that they were.

A query chooses tables by their names, so one that is called otherwise by now is a gap too. What was seen is kept in the spool.
"""

from __future__ import annotations

import time

from penstock.capture.membership import load_members, save_members
from penstock.errors import LockWaitError, TableGapError
from penstock.postgres.membership import inspect_members
from penstock.spark.offsets import ANEW
from penstock.spark.request import SourceRequest

LOOK_SECONDS = 30.0
"""How often a query that runs looks again. Whatever it has not seen, the next run finds."""


class TableWatch:
    """The tables of one query. Used by one thread, that of Spark's calls."""

    def __init__(self, request: SourceRequest, look_seconds: float = LOOK_SECONDS) -> None:
        self._request = request
        self._settings = request.capture()
        self._look_seconds = look_seconds
        self._due = 0.0

    def begin(self, *, anew: bool) -> None:
        """Write down what is there; with `anew`, whatever an earlier query saw. Call it after the publication, and before the fence."""
        self._due = 0.0
        if anew:
            save_members(self._settings.spool, self._request.consumer, {})
        self.check()

    def check(self) -> None:
        """Raise if changes may be missing. Looks at the first call, and then now and then."""
        if time.monotonic() < self._due:
            return
        is_first, self._due = self._due == 0.0, time.monotonic() + self._look_seconds
        try:
            found = inspect_members(
                self._settings.address, self._settings.publication, self._request.choice.selects, old_rows=self._settings.old_rows
            )
        except LockWaitError:  # somebody has a table to himself, perhaps for hours: the stream goes on meanwhile
            if is_first:
                raise
            return
        recorded = load_members(self._settings.spool, self._request.consumer)
        for name, member in recorded.items():
            reason = found.gap(name, member, must_be_published=bool(self._request.choice.patterns))
            if reason is not None:
                raise TableGapError(
                    f"table {name} {reason}, so changes of it may be missing", hint=f"{ANEW}, and with startingPosition snapshot"
                )
        known = {**found.members, **recorded}
        if known != recorded or not recorded:
            save_members(self._settings.spool, self._request.consumer, known)
