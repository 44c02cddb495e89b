"""Which changes of an epoch are not to reach the target, and which letters are settled by those that do.

A change that is refused becomes a letter. The target then has the row as it was before, or has none, until something settles the letter: a
later change that brings the whole row, a delete, a truncate, or a replay. A change that leaves values as they were cannot be applied to a
row whose letter is open, since the target may not have those values: it becomes a letter too, and hangs on the first.

A delete is never refused: a row of the target that the source does not have could meet one that comes later under the same key. A row
without key is known by all its values: its delete takes back the letter, if there is one, and does not reach the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.change import COMMIT_VERSION, EXACT, ORDINAL, REPLACED, UNCHANGED, ChangeType
from penstock.errors import ChangeHeldError, PenstockError, UnreadableTextError, UnrepresentableError
from penstock.postgres.types.arrays import Bools
from penstock.schema import TableName
from penstock.sinks.keys import key_codes
from penstock.sinks.layout import Layout, Mode
from penstock.sinks.lives import Rows, bools_of, ints_of, is_kind

Name = tuple[int, int]
"""Of a change: its `_commit_version` and its `_ordinal`."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a change does not reach the target."""

    code: str
    reason: str

    @classmethod
    def of(cls, error: PenstockError) -> Refusal:
        return cls(error.code, error.message)


@dataclass(slots=True)
class Screened:
    left_out: set[Name] = field(default_factory=set)
    """Changes that must not reach the target."""
    refused: dict[Name, Refusal] = field(default_factory=dict)
    """Those of them that are letters from now on."""
    superseded: dict[Name, int] = field(default_factory=dict)
    """Letters, new ones too, that no longer matter, each with the commit that came after them."""
    replayed: set[Name] = field(default_factory=set)
    """Letters that are applied with this epoch."""


def refused_values(table: TableName, changes: pa.Table, *, refuse_inexact: bool, has_unreadable: bool) -> dict[Name, Refusal]:
    """Changes with texts that cannot be read or, with `refuse_inexact`, values beyond their type. Deletes only name rows that go."""
    found: dict[Name, Refusal] = {}
    exact = changes.column(EXACT)
    held = bools_of(exact.is_valid()) & ~is_kind(changes, ChangeType.DELETE)
    if not (refuse_inexact or has_unreadable) or not held.any():
        return found
    for row, name in _names(changes, np.flatnonzero(held)):
        entries = exact[row].as_py()
        unreadable = next((column for column, text in entries if has_unreadable and REPLACED in text), None)
        if unreadable is not None:
            found[name] = Refusal.of(UnreadableTextError.of(table, unreadable))
        elif refuse_inexact and entries:
            found[name] = Refusal.of(UnrepresentableError.of(table, entries[0][0]))
    return found


def screen(
    changes: pa.Table,
    letters: pa.Table,
    layout: Layout,
    refusals: Mapping[Name, Refusal],
    *,
    replays: bool = False,
    source: str | None = None,
    looks_back: bool = False,
) -> Screened:
    """`changes` and the open `letters`, both as `read_slices` gives them, in order; `refusals` may name changes of both.

    With `replays` the letters are to be applied, before the changes. Of several tables in one, the column `source` tells which.
    `looks_back`: values that a change lacks are looked for in those before it, later.
    """
    both = pa.concat_tables([letters, changes])
    if layout.mode is Mode.APPEND:
        gaps = _Gaps(both, layout.key) if looks_back and layout.key else None
        return _screen_log(both, letters.num_rows, refusals, replays=replays, gaps=gaps)
    (codes,) = key_codes([both], layout.key or layout.columns.names)
    rows = _concerned(both, codes, letters.num_rows, refusals)
    sieve = _Sieve(both, codes, letters.num_rows, refusals, is_keyed=bool(layout.key), replays=replays)
    if source is not None:
        sieve.sources = both.column(source).to_pylist()
    for row, name in _names(both, rows):
        sieve.take(row, name)
    return sieve.screened


def _screen_log(both: pa.Table, letters: int, refusals: Mapping[Name, Refusal], *, replays: bool, gaps: _Gaps | None) -> Screened:
    """In a log of changes nothing settles another; but where there are `gaps`, some have to wait."""
    names = dict(_names(both, np.arange(both.num_rows)))
    deletes = is_kind(both, ChangeType.DELETE)
    screened = Screened()
    for row, name in names.items():
        if row < letters and not replays:
            screened.left_out.add(name)
            continue
        refusal = None if deletes[row] else refusals.get(name)
        if refusal is None and gaps is not None and gaps.is_behind(row):
            refusal = Refusal.of(ChangeHeldError.after_another())
        if gaps is not None:
            gaps.take(row, leaves=refusal is not None or row < letters)
        if refusal is None and row < letters:
            screened.replayed.add(name)
        elif refusal is not None:
            screened.left_out.add(name)
            if row >= letters:
                screened.refused[name] = refusal
    return screened


class _Gaps:
    """Rows of which the change before is not there, or is a letter that comes late: what others lack must not be had from earlier ones.

    A mirror needs none of this: there a letter that is open is the last word on its row. Takes the changes in order.
    """

    def __init__(self, both: pa.Table, key: Sequence[str]) -> None:
        (self._codes,) = key_codes([both], key)
        self._is_delete, self._is_truncate = (is_kind(both, kind) for kind in (ChangeType.DELETE, ChangeType.TRUNCATE))
        self._lacks = bools_of(both.column(UNCHANGED).is_valid())
        versions, ordinals = (ints_of(both.column(name)) for name in (COMMIT_VERSION, ORDINAL))
        self._moved = _moved(both, versions, ordinals)
        self._open: set[int] = set()
        self._left = False
        """Whether the row that was deleted last had one."""

    def is_behind(self, row: int) -> bool:
        return bool(self._lacks[row] and (self._left if self._moved[row] else int(self._codes[row]) in self._open))

    def take(self, row: int, *, leaves: bool) -> None:
        """`leaves`: what comes after this change of the row must not look for values in it, or before it."""
        code = int(self._codes[row])
        if self._is_truncate[row]:
            self._open.clear()
        elif self._is_delete[row]:
            self._left = code in self._open
            self._open.discard(code)
        elif leaves:
            self._open.add(code)
        elif not self._lacks[row]:
            self._open.discard(code)


def _concerned(both: pa.Table, codes: Rows, letters: int, refusals: Mapping[Name, Refusal]) -> Rows:
    """The rows whose key has, or may get, a letter; and truncates."""
    versions, ordinals = (ints_of(both.column(name)) for name in (COMMIT_VERSION, ORDINAL))
    seeds = np.isin(versions, [version for version, _ in refusals])
    for row in np.flatnonzero(seeds).tolist():
        seeds[row] = (int(versions[row]), int(ordinals[row])) in refusals
    seeds[:letters] = True
    truncates = is_kind(both, ChangeType.TRUNCATE)
    moved = _moved(both, versions, ordinals)
    while True:
        found: Bools = np.isin(codes, codes[seeds & ~truncates])
        more = seeds | (moved & np.concatenate([[False], found[:-1]]))
        if (more == seeds).all():
            return np.flatnonzero(found | truncates)
        seeds = more


def _moved(both: pa.Table, versions: Rows, ordinals: Rows) -> Bools:
    """Inserts that leave values behind under the key that the delete right before them names."""
    moved = is_kind(both, ChangeType.INSERT) & bools_of(both.column(UNCHANGED).is_valid())
    follows = np.zeros(len(moved), np.bool_)
    follows[1:] = (versions[1:] == versions[:-1]) & (ordinals[1:] == ordinals[:-1] + 1) & is_kind(both, ChangeType.DELETE)[:-1]
    return np.logical_and(moved, follows)


def _names(changes: pa.Table, rows: Rows) -> list[tuple[int, Name]]:
    versions, ordinals = (ints_of(changes.column(name))[rows].tolist() for name in (COMMIT_VERSION, ORDINAL))
    return list(zip(rows.tolist(), zip(versions, ordinals, strict=True), strict=True))


class _Sieve:
    """Takes changes in order, and knows which letters of each key are open at that moment."""

    def __init__(
        self, both: pa.Table, codes: Rows, letters: int, refusals: Mapping[Name, Refusal], *, is_keyed: bool, replays: bool
    ) -> None:
        self.screened = Screened()
        self.sources: Sequence[object] | None = None
        """Of each row, from which table it is, where that is not the same for all."""
        self._codes = codes
        self._letters = letters
        self._refusals = refusals
        self._is_keyed = is_keyed
        self._replays = replays
        self._open: dict[int, list[Name]] = {}
        self._last: dict[int, int] = {}
        """By key, a row that has a letter."""
        self._is_delete, self._is_insert, self._is_truncate = (
            is_kind(both, kind) for kind in (ChangeType.DELETE, ChangeType.INSERT, ChangeType.TRUNCATE)
        )
        self._is_whole = bools_of(pc.is_null(both.column(UNCHANGED)))
        self._bereft: int | None = None
        """The row of the last delete that settled letters: what it deleted in the target was not what the source had."""

    def take(self, row: int, name: Name) -> None:
        code = int(self._codes[row])
        if self._is_truncate[row]:
            for emptied in [each for each in self._open if self._is_of_one(row, each)]:
                self._supersede(self._open.pop(emptied), name)
        elif self._is_delete[row]:
            self._take_delete(row, code, name)
        elif row < self._letters and not self._replays:
            self.screened.left_out.add(name)
            self._hold_back(row, code, name)
        else:
            self._take_row(row, code, name)

    def _is_of_one(self, row: int, code: int) -> bool:
        return self.sources is None or self.sources[row] == self.sources[self._last[code]]

    def _take_delete(self, row: int, code: int, name: Name) -> None:
        if self._is_keyed:
            held = self._open.pop(code, [])
            self._supersede(held, name)
            self._bereft = row if held else None
        elif self._open.get(code):
            self._supersede([self._open[code].pop()], name)
            self.screened.left_out.add(name)

    def _take_row(self, row: int, code: int, name: Name) -> None:
        refusal = self._refusals.get(name) or self._hold(row, code)
        if self._is_keyed and (refusal is None or self._is_whole[row]):
            self._supersede(self._open.pop(code, []), name)
        if refusal is not None:
            self.screened.left_out.add(name)
            self._hold_back(row, code, name)
            if row >= self._letters:
                self.screened.refused[name] = refusal
        elif row < self._letters:
            self.screened.replayed.add(name)

    def _hold_back(self, row: int, code: int, name: Name) -> None:
        self._open.setdefault(code, []).append(name)
        self._last[code] = row

    def _hold(self, row: int, code: int) -> Refusal | None:
        """Values that did not travel are those of a row that the target may not have."""
        if self._is_whole[row]:
            return None
        if self._open.get(code):
            return Refusal.of(ChangeHeldError.after_another())
        is_half = self._is_insert[row] and (row < self._letters or self._bereft == row - 1)
        return Refusal.of(ChangeHeldError.under_another_key()) if is_half else None

    def _supersede(self, names: list[Name], by: Name) -> None:
        for name in names:
            self.screened.superseded[name] = by[0]
