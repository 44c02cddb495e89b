"""How far a look by a cursor column has to go back, so that no late commit is missed.

A transaction writes no value of the column below those that were there when it began: a time that is the server's, a number from a
sequence. But it may commit, and its values appear, long after higher ones. So for every transaction that is open we keep what was there
before it can have begun, and go back to the oldest of these; if none is open, to what was there at the look before.

Transactions are known by their virtual ids, which they have from their first moment on, before they have written anything. One that is
prepared loses that; while there is any, nothing moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.postgres.connection import Connection
from penstock.postgres.queries import query


@dataclass(frozen=True, slots=True)
class OpenNow:
    """What was open at one time."""

    virtual_ids: frozenset[str] = frozenset()
    is_prepared: bool = False


def inspect_open(connection: Connection) -> OpenNow:
    """Ask before the moment is taken: whoever is neither open now nor seen by then has begun in between."""
    rows: list[Any] = connection.execute(query("polling", "open_transactions")).fetchall()
    # Asked last: one that was open a moment ago is in the list, one that is prepared by now is found here.
    prepared: Any = connection.execute(query("polling", "prepared")).fetchone()
    return OpenNow(frozenset(str(row[0]) for row in rows), prepared[0] > 0)


class SafeLooks:
    """Looks are counted from 1; 0 is what was known before the first. Each has a highest value of the column, seen after it was listed."""

    def __init__(self) -> None:
        self._looks = 0
        self._safe = 0
        self._before: dict[str, int] = {}
        """Of every open transaction, the look at which it was not there yet."""

    def look(self, now: OpenNow) -> int:
        """Take in what is open at the next look; gives the one below whose highest value nothing more will appear.

        One that is new has begun after the look before, and writes nothing below what that had been preceded by.
        """
        before, self._looks = self._looks, self._looks + 1
        self._before = {each: self._before.get(each, max(0, before - 1)) for each in now.virtual_ids}
        if not now.is_prepared:
            self._safe = max(self._safe, min(self._before.values(), default=before))
        return self._safe

    @property
    def looks(self) -> int:
        return self._looks


class FirstOnes:
    """Whether all those have ended that were open when something was first looked at."""

    def __init__(self) -> None:
        self._left: frozenset[str] | None = None
        self._are_gone = False

    def look(self, now: OpenNow) -> bool:
        if self._left is None:
            self._left = now.virtual_ids
        elif not now.is_prepared:
            self._left &= now.virtual_ids
        self._are_gone = self._are_gone or not (self._left or now.is_prepared)
        return self._are_gone
