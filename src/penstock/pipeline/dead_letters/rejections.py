"""Decide which changes of an epoch are rejected, and which dead letters later changes supersede; build the
stored form of dead letters.

A rejected change becomes a dead letter. Until the dead letter is *settled*, the target keeps the row's
earlier version, or has no such row. A dead letter is settled when a later change supersedes it (a change with
the whole row, a delete or a truncate), or when it is replayed. A change with unchanged TOAST values cannot be
applied to a row with an open dead letter, because the target may lack these values. Such a change becomes a
dead letter too.

A delete is never rejected. Otherwise the deleted row would stay in the target, where it could collide with a
later row of the same key. A row without a key is identified by all its values. If such a row has an open dead
letter, a delete of the row supersedes the dead letter and is not applied to the target.

A dead letter is identified by its table and its change: commit version and ordinal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow import Bools
from penstock.change import (
    CHANGE_TYPE,
    COMMIT_TIMESTAMP,
    COMMIT_VERSION,
    EXACT,
    ORDINAL,
    REPLACED,
    UNCHANGED,
    ChangeType,
)
from penstock.errors import ChangeHeldError, PenstockError, UnreadableTextError, UnrepresentableError
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.sinks.keys import key_codes
from penstock.sinks.modes import Layout
from penstock.sinks.row_chains import Rows, bools_of, ints_of, is_kind
from penstock.spark.envelope import to_envelopes

Name = tuple[int, int]
"""`_commit_version` and `_ordinal` of a change."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a change is not applied to the target: an error code, and the reason in words."""

    code: str
    reason: str

    @classmethod
    def of(cls, error: PenstockError) -> Rejection:
        return cls(error.code, error.message)


@dataclass(slots=True)
class Screened:
    """The result of `screen`."""

    excluded: set[Name] = field(default_factory=set)
    """Changes and dead letters that must not reach the target."""
    refused: dict[Name, Rejection] = field(default_factory=dict)
    """The changes among `excluded` that become new dead letters, each with its rejection."""
    superseded: dict[Name, int] = field(default_factory=dict)
    """Old and new dead letters that are superseded, each with the version of the commit that supersedes it.
    """
    replayed: set[Name] = field(default_factory=set)
    """Dead letters that are applied with this epoch."""


def rejected_values(
    table: TableName, changes: pa.Table, *, reject_inexact: bool, has_unreadable: bool
) -> dict[Name, Rejection]:
    """Return the rejections of changes with unreadable text, and with `reject_inexact` also of changes with
    values that the column type cannot hold. Deletes are not checked, because only their key is used.
    """
    found: dict[Name, Rejection] = {}
    exact = changes.column(EXACT)
    held = bools_of(exact.is_valid()) & ~is_kind(changes, ChangeType.DELETE)
    if not (reject_inexact or has_unreadable) or not held.any():
        return found
    for row, name in _names(changes, np.flatnonzero(held)):
        entries = exact[row].as_py()
        unreadable = next((column for column, text in entries if has_unreadable and REPLACED in text), None)
        if unreadable is not None:
            found[name] = Rejection.of(UnreadableTextError.of(table, unreadable))
        elif reject_inexact and entries:
            found[name] = Rejection.of(UnrepresentableError.of(table, entries[0][0]))
    return found


def screen(
    changes: pa.Table,
    letters: pa.Table,
    layout: Layout,
    rejections: Mapping[Name, Rejection],
    *,
    replays: bool = False,
    source: str | None = None,
    needs_earlier_values: bool = False,
) -> Screened:
    """Decide which of `changes` and of the open dead letters (`letters`) to apply, reject or supersede.

    Changes and dead letters are in the order of `read_slices`, and `rejections` may contain both. With
    `replays`, the dead letters are applied before the changes. For a routed table, `source` is the column
    that contains the name of the member (source table). `needs_earlier_values`: the transform, which runs
    later, takes unchanged TOAST values from earlier changes of the same row.
    """
    both = pa.concat_tables([letters, changes])
    if layout.mode.is_log:
        gaps = _Gaps(both, layout.key) if needs_earlier_values and layout.key else None
        return _screen_log(both, letters.num_rows, rejections, replays=replays, gaps=gaps)
    (codes,) = key_codes([both], layout.key or layout.columns.names)
    rows = _affected_rows(both, codes, letters.num_rows, rejections)
    screener = _Screener(
        both, codes, letters.num_rows, rejections, is_keyed=bool(layout.key), replays=replays
    )
    if source is not None:
        screener.sources = both.column(source).to_pylist()
    for row, name in _names(both, rows):
        screener.take(row, name)
    return screener.screened


def _screen_log(
    both: pa.Table, letters: int, rejections: Mapping[Name, Rejection], *, replays: bool, gaps: _Gaps | None
) -> Screened:
    """Do what `screen` does, for an `append` table. There no change supersedes a dead letter. With `gaps`, a
    change that needs values of a rejected change is rejected too.
    """
    names = dict(_names(both, np.arange(both.num_rows)))
    deletes = is_kind(both, ChangeType.DELETE)
    screened = Screened()
    for row, name in names.items():
        if row < letters and not replays:
            screened.excluded.add(name)
            continue
        rejection = None if deletes[row] else rejections.get(name)
        if rejection is None and gaps is not None and gaps.is_behind(row):
            rejection = Rejection.of(ChangeHeldError.after_another())
        if gaps is not None:
            gaps.take(row, leaves=rejection is not None or row < letters)
        if rejection is None and row < letters:
            screened.replayed.add(name)
        elif rejection is not None:
            screened.excluded.add(name)
            if row >= letters:
                screened.refused[name] = rejection
    return screened


class _Gaps:
    """Tracks the rows of an `append` table for which unchanged TOAST values must not be taken from earlier
    changes. The previous change of such a row was rejected, or is a dead letter that is replayed after newer
    changes.

    A mirror does not need this: there, an open dead letter is the last version of its row. Call `take` in the
    order of the changes.
    """

    def __init__(self, both: pa.Table, key: Sequence[str]) -> None:
        (self._codes,) = key_codes([both], key)
        self._is_delete, self._is_truncate = (
            is_kind(both, kind) for kind in (ChangeType.DELETE, ChangeType.TRUNCATE)
        )
        self._lacks = bools_of(both.column(UNCHANGED).is_valid())
        versions, ordinals = (ints_of(both.column(name)) for name in (COMMIT_VERSION, ORDINAL))
        self._moved = _moved(both, versions, ordinals)
        self._open: set[int] = set()
        self._left = False
        """Whether the row that the last delete removed was tracked."""

    def is_behind(self, row: int) -> bool:
        """Whether the change at index `row` lacks values, and these must not be taken from earlier
        changes.
        """
        return bool(
            self._lacks[row] and (self._left if self._moved[row] else int(self._codes[row]) in self._open)
        )

    def take(self, row: int, *, leaves: bool) -> None:
        """Process the next change. `leaves`: later changes of the same row must not take values from this
        change or from earlier changes.
        """
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


def _affected_rows(both: pa.Table, codes: Rows, letters: int, rejections: Mapping[Name, Rejection]) -> Rows:
    """Return the indexes of truncates, and of changes whose key has a dead letter or may get one."""
    versions, ordinals = (ints_of(both.column(name)) for name in (COMMIT_VERSION, ORDINAL))
    seeds = np.isin(versions, [version for version, _ in rejections])
    for row in np.flatnonzero(seeds).tolist():
        seeds[row] = (int(versions[row]), int(ordinals[row])) in rejections
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
    """Mask of the inserts with unchanged TOAST values that directly follow the delete of the row's old
    key.
    """
    moved = is_kind(both, ChangeType.INSERT) & bools_of(both.column(UNCHANGED).is_valid())
    follows = np.zeros(len(moved), np.bool_)
    follows[1:] = (
        (versions[1:] == versions[:-1])
        & (ordinals[1:] == ordinals[:-1] + 1)
        & is_kind(both, ChangeType.DELETE)[:-1]
    )
    return np.logical_and(moved, follows)


def _names(changes: pa.Table, rows: Rows) -> list[tuple[int, Name]]:
    versions, ordinals = (ints_of(changes.column(name))[rows].tolist() for name in (COMMIT_VERSION, ORDINAL))
    return list(zip(rows.tolist(), zip(versions, ordinals, strict=True), strict=True))


class _Screener:
    """Processes changes in order, and tracks the open dead letters of each key."""

    def __init__(
        self,
        both: pa.Table,
        codes: Rows,
        letters: int,
        rejections: Mapping[Name, Rejection],
        *,
        is_keyed: bool,
        replays: bool,
    ) -> None:
        self.screened = Screened()
        self.sources: Sequence[object] | None = None
        """The source table of each row of a routed table."""
        self._codes = codes
        self._letters = letters
        self._refusals = rejections
        self._is_keyed = is_keyed
        self._replays = replays
        self._open: dict[int, list[Name]] = {}
        self._last: dict[int, int] = {}
        """For each key with open dead letters, the index of the last change that became one of them."""
        self._is_delete, self._is_insert, self._is_truncate = (
            is_kind(both, kind) for kind in (ChangeType.DELETE, ChangeType.INSERT, ChangeType.TRUNCATE)
        )
        self._is_whole = bools_of(pc.is_null(both.column(UNCHANGED)))
        self._settled_delete: int | None = None
        """The index of the last delete if it superseded dead letters, otherwise None. If a delete supersedes
        dead letters, the target has an older version of the deleted row, or no such row.
        """

    def take(self, row: int, name: Name) -> None:
        code = int(self._codes[row])
        if self._is_truncate[row]:
            for emptied in [each for each in self._open if self._is_of_one(row, each)]:
                self._supersede(self._open.pop(emptied), name)
        elif self._is_delete[row]:
            self._take_delete(row, code, name)
        elif row < self._letters and not self._replays:
            self.screened.excluded.add(name)
            self._hold_back(row, code, name)
        else:
            self._take_row(row, code, name)

    def _is_of_one(self, row: int, code: int) -> bool:
        return self.sources is None or self.sources[row] == self.sources[self._last[code]]

    def _take_delete(self, row: int, code: int, name: Name) -> None:
        if self._is_keyed:
            held = self._open.pop(code, [])
            self._supersede(held, name)
            self._settled_delete = row if held else None
        elif self._open.get(code):
            self._supersede([self._open[code].pop()], name)
            self.screened.excluded.add(name)

    def _take_row(self, row: int, code: int, name: Name) -> None:
        rejection = self._refusals.get(name) or self._hold(row, code)
        if self._is_keyed and (rejection is None or self._is_whole[row]):
            self._supersede(self._open.pop(code, []), name)
        if rejection is not None:
            self.screened.excluded.add(name)
            self._hold_back(row, code, name)
            if row >= self._letters:
                self.screened.refused[name] = rejection
        elif row < self._letters:
            self.screened.replayed.add(name)

    def _hold_back(self, row: int, code: int, name: Name) -> None:
        self._open.setdefault(code, []).append(name)
        self._last[code] = row

    def _hold(self, row: int, code: int) -> Rejection | None:
        """Return the rejection of a change whose unchanged TOAST values the target may lack. Returns None if
        the target has the values.
        """
        if self._is_whole[row]:
            return None
        if self._open.get(code):
            return Rejection.of(ChangeHeldError.after_another())
        lacks_values = self._is_insert[row] and (row < self._letters or self._settled_delete == row - 1)
        return Rejection.of(ChangeHeldError.under_another_key()) if lacks_values else None

    def _supersede(self, names: list[Name], by: Name) -> None:
        for name in names:
            self.screened.superseded[name] = by[0]


_TIME = pa.timestamp("us", "UTC")

DEAD_LETTER_SCHEMA = pa.schema(
    [
        pa.field("table", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("code", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("change_type", pa.string(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("row", pa.string()),
        pa.field("unchanged", pa.list_(pa.string())),
        pa.field("position", pa.string(), nullable=False),
        pa.field("commit_version", pa.int64(), nullable=False),
        pa.field("ordinal", pa.int64(), nullable=False),
        pa.field("commit_timestamp", _TIME),
        pa.field("refused_at", _TIME, nullable=False),
        pa.field("settled_version", pa.int64()),
        pa.field("settled_at", _TIME),
    ]
)
"""The columns of a stored dead letter. `key` and `row` are JSON with the exact values of the source.
`settled_version` is the commit version of the superseding change, or the end of the epoch or resync that
settled the dead letter.
"""


class DeadLetterStatus(StrEnum):
    OPEN = "open"
    SUPERSEDED = "superseded"
    """A later change wrote, deleted or truncated the row, or the table was resynced. So the dead letter is no
    longer the current version of the row.
    """
    REPLAYED = "replayed"


def build_dead_letters(
    table: TableName, changes: pa.RecordBatch, schema: TableSchema, screened: Screened, refused_at: datetime
) -> pa.Table:
    """Build the dead letters for `changes`, which are rejected changes in the format of the spool. `table` is
    the pipeline's table. For a routed table, `schema` is the schema of the member.
    """
    refused, superseded = screened.refused, screened.superseded
    shown = to_envelopes(changes, schema)
    names = list(
        zip(shown.column(COMMIT_VERSION).to_pylist(), shown.column(ORDINAL).to_pylist(), strict=True)
    )
    statuses = [
        DeadLetterStatus.SUPERSEDED if name in superseded else DeadLetterStatus.OPEN for name in names
    ]
    columns: dict[str, object] = {
        "table": [str(table)] * len(names),
        "status": [status.value for status in statuses],
        "code": [refused[name].code for name in names],
        "reason": [refused[name].reason for name in names],
        "change_type": shown.column(CHANGE_TYPE),
        "key": shown.column("key"),
        "row": shown.column("after"),
        "unchanged": shown.column(UNCHANGED),
        "position": [str(Position.of(version)) for version, _ in names],
        "commit_version": shown.column(COMMIT_VERSION),
        "ordinal": shown.column(ORDINAL),
        "commit_timestamp": shown.column(COMMIT_TIMESTAMP),
        "refused_at": [refused_at] * len(names),
        "settled_version": [superseded.get(name) for name in names],
        "settled_at": [refused_at if name in superseded else None for name in names],
    }
    return pa.table(columns, schema=DEAD_LETTER_SCHEMA)


def settled(letters: pa.Table, marks: Mapping[Name, tuple[DeadLetterStatus, int]]) -> pa.Table:
    """Return the dead letters with those in `marks` settled: an open dead letter gets the status and the
    settled version that `marks` has for it.
    """
    rows, now = letters.to_pylist(), datetime.now(UTC)
    for row in rows:
        mark = marks.get((row["commit_version"], row["ordinal"]))
        if mark is not None and row["status"] == DeadLetterStatus.OPEN:
            row["status"], row["settled_version"], row["settled_at"] = mark[0].value, mark[1], now
    return pa.Table.from_pylist(rows, DEAD_LETTER_SCHEMA)
