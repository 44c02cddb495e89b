"""The keys of tables with replica identity FULL, whose Relation messages flag every column and so tell nothing.

They come from the catalog, which knows the key of now, while the log may be far behind. So the catalog is asked whenever a table is
described, that is, at its first change and after everything that was altered; and a key that a later transaction made than the one being
decoded waits until the log has come to that transaction. Until then the last key known holds.

Pure: whoever owns a connection gives the function that asks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

_XIDS = 1 << 32


@dataclass(frozen=True, slots=True)
class CatalogKey:
    """A table's key as the catalog has it now; no columns if it has none."""

    columns: tuple[str, ...]
    xid: int | None = None
    """The transaction that made it so, as far as the catalog tells."""


LoadKey = Callable[[int], CatalogKey | None]
"""Asks the catalog for the key of the table with this OID; None if the table is gone."""


class FullKeys:
    """The key of each table under FULL as of the place that the log has come to."""

    def __init__(self, known: Mapping[int, tuple[str, ...]], load: LoadKey | None = None) -> None:
        """`known` is what held at the end of what was captured before; without `load` it holds for good."""
        self._known = dict(known)
        self._load = load
        self._waiting: dict[int, CatalogKey] = {}

    def key(self, oid: int, columns: Collection[str], xid: int) -> tuple[str, ...]:
        """The key of a table that has just been described with these columns, to the transaction `xid`."""
        self._waiting.pop(oid, None)
        if self._load is not None:
            found = self._load(oid)
            if found is not None and oid in self._known and _is_later(found.xid, xid):
                self._waiting[oid] = found
            elif found is not None and set(found.columns) <= set(columns):
                self._known[oid] = found.columns
        return self._holding(oid, columns)

    def ripe(self, xid: int) -> list[int]:
        """Tables whose key has been waiting for the transaction `xid`, or one before it. Ask `settle` about them."""
        return [oid for oid, found in self._waiting.items() if not _is_later(found.xid, xid)]

    def settle(self, oid: int, columns: Collection[str]) -> tuple[str, ...]:
        found = self._waiting.pop(oid)
        if set(found.columns) <= set(columns):
            self._known[oid] = found.columns
        return self._holding(oid, columns)

    def _holding(self, oid: int, columns: Collection[str]) -> tuple[str, ...]:
        known = self._known.get(oid, ())
        names = tuple(name for name in columns if name in known)
        # A key of which a column is gone, by a rename or a drop, tells nothing apart any more.
        return names if len(names) == len(known) else ()


def _is_later(xid: int | None, other: int) -> bool:
    """Transaction ids go round."""
    return xid is not None and 0 < (xid - other) % _XIDS < _XIDS // 2
