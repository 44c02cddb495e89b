"""What the catalog has shown of the tables that stream, and no change in the log has: a `Follower` asked about a `TableLedger`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from penstock.pipeline.following.follower import Follower
from penstock.pipeline.following.sightings import Look
from penstock.pipeline.ledger import TableLedger
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.spool.range import SpoolRange


class CatalogWatch:
    """Without a follower nothing is ever seen, and no table is ever routed, renamed or gone."""

    def __init__(self, follower: Follower | None, ledger: TableLedger) -> None:
        self._follower = follower
        self._ledger = ledger

    @property
    def routed(self) -> Mapping[int, TableSchema]:
        """What comes into one table out of several, by the identity that it has in the log."""
        return {} if self._follower is None else self._follower.routed

    def notice(self, look: Look) -> dict[TableName, str]:
        """Take a look in. Gives tables that have to be resynced, also if they are retrying, and why."""
        found = {} if self._follower is None else self._follower.notice(self._ledger.targets, look)
        followed = {name for name, status in self._ledger.statuses.items() if status.is_followed}
        return {name: reason for name, reason in found.items() if name in followed}

    def renews(self, name: TableName) -> bool:
        """Whether a table that cannot be followed is to be copied anew."""
        return self._follower is not None and self._follower.renews(name)

    def truncates(self, name: TableName) -> Collection[int]:
        """The transactions that the log has shown to empty a table, 32 bits of each."""
        return () if self._follower is None else self._follower.truncates(name)

    def gone(self, name: TableName, end: Position | None) -> str | None:
        """Why nothing comes into this table after `end`."""
        return None if self._follower is None else self._follower.gone(name, end)

    def is_ahead(self, name: TableName, end: Position | None) -> bool:
        """A target that has this very epoch has been through the commit that it could become something else with."""
        target, committed = self._ledger.targets.get(name), self._ledger.committed(name)
        if self._follower is None or target is None or (end is not None and committed is not None and committed >= end):
            return False
        return self._follower.ahead(target, end) is not None

    def has_seen_more(self, end: Position | None) -> bool:
        """Whether there is something that an epoch up to `end` can act on; None: that any epoch ever could."""
        return any(self.gone(name, end) is not None or self.is_ahead(name, end) for name in self._ledger.live())

    @property
    def is_stuck(self) -> bool:
        """Whether a target has yet to become what the catalog was seen to have, and holds all of the log already: no epoch can do it."""
        if self._follower is None:
            return False
        live = {name: target for name in self._ledger.live() if (target := self._ledger.targets.get(name)) is not None}
        return any(
            (committed := self._ledger.committed(name)) is not None and self._follower.ahead(target, committed) is not None
            for name, target in live.items()
        )

    def renamed(self, ranges: Mapping[Position, SpoolRange], end: Position) -> dict[TableName, str]:
        """Tables whose changes come under another name, and what is to be said of them."""
        if self._follower is None:
            return {}
        statuses, targets = self._ledger.statuses, self._ledger.targets
        live = {name: (targets[name].source_oid, statuses[name].applied) for name in self._ledger.live() if name in targets}
        return self._follower.renamed(live, ranges, end)
