"""The keys of tables with replica identity FULL, whose Relation messages flag every column and so tell nothing.

They come from the catalog, which knows the key of now, while the log may be far behind. So the catalog is asked whenever a table is
described, that is, at its first change and after everything that was altered. If it gives the key known already, that holds. If it gives
another one, somewhere between here and the place at which it was asked the key has changed, and nobody can tell where: the order of
transaction ids is not that of commits. Until the log has passed that place the table counts as one without a key, whose changes are given
as whole rows, which is right under any key; from then on it has the new one.

Pure: whoever owns a connection gives the function that asks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.schema import key_in_order


@dataclass(frozen=True, slots=True)
class CatalogKey:
    """A table's key as the catalog has it when asked; no columns if it has none."""

    columns: tuple[str, ...]
    asked_at: int
    """The place in the log that all transactions which the catalog showed had committed by."""


LoadKey = Callable[[int], CatalogKey | None]
"""Asks the catalog for the key of the table with this OID; None if the table is gone, or not there yet."""


class FullKey(NamedTuple):
    """The key of a table from its description on."""

    columns: tuple[str, ...]
    later: CatalogKey | None = None
    """What takes its place once the log has passed where the catalog was asked. Tell `settle`."""


class FullKeys:
    """The key of each table under FULL as of the place that the log has come to."""

    def __init__(self, known: Mapping[int, tuple[str, ...]], load: LoadKey | None = None) -> None:
        """`known` is what held at the end of what was captured before; without `load` it holds for good."""
        self._known = dict(known)
        self._load = load
        self._waiting: dict[int, CatalogKey] = {}

    def describe(self, oid: int, columns: Collection[str], place: int) -> FullKey:
        """The key of a table that has just been described with these columns, for changes which the log has from `place` on."""
        found = None if self._load is None else self._load(oid)
        if found is None:
            return FullKey(() if oid in self._waiting else key_in_order(self._known.get(oid, ()), columns))
        if self._holds(oid, found, columns):
            self._known[oid] = found.columns
            return FullKey(key_in_order(found.columns, columns))
        waiting = self._waiting.get(oid)
        # The same answer again: it is the earlier place from which it holds, or a table that is altered all the time would wait for good.
        later = waiting if waiting is not None and set(waiting.columns) == set(found.columns) else found
        self._waiting[oid] = later
        return FullKey(self.settle(oid, later, columns)) if place > later.asked_at else FullKey((), later)

    def has_seen(self, oid: int) -> bool:
        """Whether the catalog has ever shown the table. If not, it is gone, or the transaction that made it has not committed."""
        return oid in self._known or oid in self._waiting

    def settle(self, oid: int, later: CatalogKey, columns: Collection[str]) -> tuple[str, ...]:
        """The log has passed the place at which `later` was asked for."""
        if self._waiting.get(oid) is later:
            del self._waiting[oid]
            self._known[oid] = later.columns
        return key_in_order(later.columns, columns)

    def _holds(self, oid: int, found: CatalogKey, columns: Collection[str]) -> bool:
        """Whether the catalog's key is the one known. The first answer is taken as it is, if it can be the key of these columns."""
        if oid in self._waiting:
            return False
        return set(self._known[oid]) == set(found.columns) if oid in self._known else set(found.columns) <= set(columns)
