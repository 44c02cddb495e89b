"""Which tables lost or got rows by their partitions, at one look at the catalog after the other.

That a part was emptied may be in the log all the same, if it was by a TRUNCATE of the whole table: such a transaction is the last that
wrote about the part in the catalog. So nothing is said of it before everything is applied that had committed by the look.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from pathlib import Path

from penstock.pipeline.following.parts import KnownParts, load_parts, moved_parts, put_elsewhere, save_parts
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.connection import Connection
from penstock.postgres.parts import Part, Parts, has_older_row, inspect_parts
from penstock.schema import TableName

EMPTIED = "a partition of it was emptied by itself, or rewritten so that nobody can tell"

Ask = Callable[[int, Part], bool | None]
"""Whether a part has a row from before it was put elsewhere; None: it cannot be asked now."""


class Verdict(StrEnum):
    KEPT = "kept"
    EMPTIED = "emptied"
    BUSY = "busy"
    """It cannot be told at this look."""


def judge(known: KnownParts, now: Parts, truncates: Collection[int], ask: Ask) -> Verdict:
    """What became of parts that do not lie where they did. `truncates` are transactions that the log shows to have emptied the table."""
    for oid, part in put_elsewhere(known, now).items():
        if part.xid not in truncates and not (is_kept := ask(oid, part)):
            return Verdict.BUSY if is_kept is None else Verdict.EMPTIED
    return Verdict.KEPT


class PartsWatch:
    """Used by the pipeline's main thread alone. What a table was seen to have counts until the order to copy it stands."""

    def __init__(self, state: Path, truncates: Callable[[TableName], Collection[int]], renews: Callable[[TableName], bool]) -> None:
        """`truncates`: those of a table that the log has shown so far, 32 bits of each transaction. `renews`: whether it is copied anew."""
        self._state = state
        self._truncates = truncates
        self._renews = renews
        self._since: dict[TableName, Position] = {}
        self._copied: frozenset[TableName] = frozenset()
        """Tables that were being copied at the last look: what they had when that began counts until they have caught up."""
        self.open: frozenset[TableName] = frozenset()
        """Tables of which more is to be said soon."""

    def look(
        self,
        connection: Connection,
        tables: Mapping[TableName, CatalogTable],
        applied: Mapping[TableName, Position | None],
        resting: Collection[TableName],
        seen: Callable[[], Position | None],
        *,
        finds_deletes: bool,
    ) -> dict[TableName, str]:
        """The tables among `applied`, which have everything up to there, that lost or got rows, and how.

        Those that are `resting` are asked about when they go on. `seen` tells where everything is that has committed by then; None: not
        now. With `finds_deletes` the capture tells of rows that are gone in whatever way.
        """
        sources = {name: [source.oid for source in table.sources] for name, table in tables.items()}
        known = load_parts(self._state)
        parts = inspect_parts(connection, sources, {oid for each in known.values() for oid in each.filenodes})
        moved = {name: reason for name, reason in moved_parts(known, parts).items() if name in applied}
        waits, busy = set[TableName](), {name for name in resting if name in known}
        for name in (applied.keys() & known.keys() & parts.keys()) - moved.keys():
            verdict = Verdict.KEPT if finds_deletes else self._judge(connection, name, known[name], parts[name])
            if verdict is Verdict.KEPT:
                continue
            if verdict is Verdict.BUSY or (since := self._since.get(name) or seen()) is None:
                busy.add(name)
            elif (at := applied[name]) is None or at < since:
                waits.add(name)
                self._since[name] = since  # a table that is always written to is never at the end of the log
            else:
                moved[name] = EMPTIED
        self.open = frozenset(waits | {name for name in moved if self._renews(name)})
        self._since = {name: at for name, at in self._since.items() if name in waits}
        copied = parts.keys() - applied.keys() - set(resting)
        kept = self.open | busy | (copied & self._copied & known.keys())
        self._copied = frozenset(copied)
        save_parts(self._state, {name: known[name] if name in kept else KnownParts.of(each) for name, each in parts.items()})
        return moved

    def _judge(self, connection: Connection, name: TableName, known: KnownParts, now: Parts) -> Verdict:
        return judge(known, now, self._truncates(name), lambda oid, part: has_older_row(connection, oid, part.root, known.mark))
