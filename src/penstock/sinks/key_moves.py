"""Key changes with unchanged TOAST values: find the changes of other keys that a part of an epoch needs.

An update that changes the key is a delete of the old key, followed by an insert of the new key with the next
ordinal. Unchanged columns of the insert have the values of the row with the old key, so a task that applies
the new key also needs the changes of the old key. There are two ways: all keys that such key changes connect
are in one part (`join_keys`), or a part also reads the changes of other keys that it needs (`find_needed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from penstock.arrow import Bools
from penstock.change import COMMIT_VERSION, ORDINAL, UNCHANGED, ChangeType
from penstock.errors import KeyChangesTooLargeError
from penstock.schema import TableName
from penstock.sinks.keys import Hashes, key_hashes
from penstock.sinks.modes import Layout
from penstock.sinks.row_chains import Rows, bools_of, ints_of, is_kind, take

Owns = Callable[[Hashes], Bools]
"""Function that returns a mask of the keys that belong to a part, from the hashes of the keys (`Part.owns`).
"""

_PLACE_FACTOR = 0x9E37_79B9_7F4A_7C15

HELPER = "_helper\0"
"""Column that marks changes whose keys belong to another part. The part reads them only because values of
their rows moved to its own keys. No source column can have this name.
"""

CONNECTED_ROWS = 2_000_000
CONNECTED_BYTES = 512 << 20
"""Maximum number and size of the changes in one task whose keys are connected by key changes. These changes
cannot be divided among more tasks.
"""
MOVES_IN_MEMORY = 1_000_000
"""Maximum number of key changes with unchanged values that a task holds in memory to follow chains of key
changes.
"""


class ConnectedLimit:
    """Limits the connected changes in one task: raises `KeyChangesTooLargeError` before they exceed the
    memory of a worker.
    """

    def __init__(self, table: TableName | None) -> None:
        self._table = table
        self._rows = self._bytes = 0

    def hold(self, rows: pa.Table) -> None:
        self._rows += rows.num_rows
        self._bytes += rows.nbytes
        self.check(self._rows, self._bytes)

    def check(self, rows: int, size: int = 0) -> None:
        if rows > CONNECTED_ROWS or size > CONNECTED_BYTES:
            raise KeyChangesTooLargeError(
                f"key changes of {self._table} with unchanged TOAST values connect more than "
                f"{CONNECTED_ROWS:,} changes "
                f"or {CONNECTED_BYTES >> 20} MiB, which one task would have to hold",
                hint=f"penstock tables resync CONFIG {self._table}",
            )


@dataclass(frozen=True, slots=True, eq=False)
class JoinedKeys:
    """Keys that must be in the same part as other keys. `hashes` has the hashes of these keys, ascending.
    `roots` has for each of them the hash that represents all keys connected with it.
    """

    hashes: Hashes
    roots: Hashes

    def replaced(self, hashes: Hashes) -> Hashes:
        if not len(self.hashes):
            return hashes
        at = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return np.where(self.hashes[at] == hashes, self.roots[at], hashes)


def join_keys(read: Callable[[], Iterable[pa.Table]], layout: Layout) -> JoinedKeys:
    """Find the keys that are connected by key changes with unchanged values. Such a key change is an insert
    with unchanged values, and the delete with the preceding ordinal.

    Reads the changes twice, so that only the halves of such key changes are held in memory.
    """
    inserts = [_numbered_keys(_moved(rows), layout, 1) for rows in read()]
    places, hashes = _concatenated(inserts)
    order = np.argsort(places)
    places, hashes = places[order], hashes[order]
    deletes = []
    for rows in read() if len(places) else ():
        own, others = _numbered_keys(_deletes(rows), layout, 0)
        at = np.minimum(np.searchsorted(places, own), len(places) - 1)
        met = places[at] == own
        deletes.append((others[met], hashes[at[met]]))
    return _connect(*_concatenated(deletes))


def _connect(ones: Hashes, others: Hashes) -> JoinedKeys:
    """Connected components of the pairs of `ones` and `others`, each represented by its smallest hash."""
    known, numbers = np.unique(np.concatenate([ones, others]), return_inverse=True)
    one, other = numbers[: len(ones)], numbers[len(ones) :]
    label = np.arange(len(known))
    while not np.array_equal(label[one], label[other]):
        low = np.minimum(label[one], label[other])
        for end in (label[one], label[other]):
            np.minimum.at(label, end, low)
        while not np.array_equal(label, label[label]):
            label = label[label]
    return JoinedKeys(known, known[label])


def _numbered_keys(rows: pa.Table, layout: Layout, before: int) -> tuple[Hashes, Hashes]:
    """Return two arrays with one value for each of `rows`: the number (see `_change_numbers`) of the change
    that is `before` ordinals earlier, and the hash of the row's key.
    """
    hashes, versions, ordinals = _identify(rows, layout)
    return _change_numbers(versions, ordinals - before), hashes


def _concatenated(pairs: Sequence[tuple[Hashes, Hashes]]) -> tuple[Hashes, Hashes]:
    empty = np.empty(0, np.uint64)
    return np.concatenate([empty, *(one for one, _ in pairs)]), np.concatenate(
        [empty, *(other for _, other in pairs)]
    )


@dataclass(frozen=True, slots=True, eq=False)
class NeededKeys:
    """Keys of other parts whose changes a part needs: the hashes of the keys, ascending, and for each key the
    version and ordinal of the last change that is needed.
    """

    hashes: Hashes
    versions: Rows
    ordinals: Rows

    @classmethod
    def of(cls, found: Sequence[tuple[Hashes, Rows, Rows]]) -> NeededKeys:
        hashes = np.concatenate([np.empty(0, np.uint64), *(each[0] for each in found)])
        versions, ordinals = (
            np.concatenate([np.empty(0, np.int64), *(each[at] for each in found)]) for at in (1, 2)
        )
        order = np.lexsort((ordinals, versions, hashes))
        hashes, versions, ordinals = hashes[order], versions[order], ordinals[order]
        last = np.append(hashes[1:] != hashes[:-1], True)[: len(hashes)]
        return cls(hashes[last], versions[last], ordinals[last])

    def covers(self, hashes: Hashes, versions: Rows, ordinals: Rows) -> Bools:
        if not len(self.hashes):
            return np.zeros(len(hashes), np.bool_)
        at = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        last, ordinal = self.versions[at], self.ordinals[at]
        covers: Bools = (versions < last) | ((versions == last) & (ordinals <= ordinal))
        covers &= self.hashes[at] == hashes
        return covers


def find_needed(
    read: Callable[[], Iterable[pa.Table]], layout: Layout, owns: Owns, limit: ConnectedLimit
) -> NeededKeys:
    """Find the changes of other keys that a part needs. If values moved from another key to a key of the
    part, the part needs the changes of the other key, up to the delete that is half of the key change.

    The other key may have got values by an earlier key change, so chains of key changes are followed. If all
    key changes with unchanged values fit into memory, the changes are read twice. Otherwise the search is
    repeated until it finds no further key change. Each repetition reads all changes, but holds only the
    needed key changes in memory.
    """
    moves = _load_moves(read, layout)
    if moves is not None:
        found = _follow_moves(moves, owns)
        limit.check(len(found[0]))
        return NeededKeys.of([found])
    return _search_needed(read, layout, owns, limit)


def _load_moves(read: Callable[[], Iterable[pa.Table]], layout: Layout) -> tuple[Hashes, ...] | None:
    """Return the key changes with unchanged values, latest first, as four columns: hash of the new key; hash,
    version and ordinal of the delete of the old key. Returns None if there are too many key changes, or if
    two of them have the same number (see `_change_numbers`).
    """
    inserts, count = [], 0
    for rows in read():
        found = _identify(_moved(rows), layout)
        inserts.append(found)
        count += len(found[0])
        if count > MOVES_IN_MEMORY:
            return None
    if not count:
        return (np.empty(0, np.uint64),) * 4
    keys, versions, ordinals = (np.concatenate(column) for column in zip(*inserts, strict=True))
    numbers = _change_numbers(versions, ordinals - 1)
    order = np.argsort(numbers)
    numbers, keys = numbers[order], keys[order]
    if np.any(numbers[1:] == numbers[:-1]):
        return None
    moves = []
    for rows in read():
        hashes, versions, ordinals = _identify(_deletes(rows), layout)
        own = _change_numbers(versions, ordinals)
        at = np.minimum(np.searchsorted(numbers, own), len(numbers) - 1)
        met = numbers[at] == own
        moves.append((keys[at[met]], hashes[met], versions[met], ordinals[met]))
    columns = [np.concatenate(column) for column in zip(*moves, strict=True)]
    latest = np.lexsort((columns[3], columns[2]))[::-1]
    return tuple(column[latest] for column in columns)


def _follow_moves(moves: tuple[Hashes, ...], owns: Owns) -> tuple[Hashes, Rows, Rows]:
    """Return hash, version and ordinal of the deletes whose values a part needs. A part that needs one change
    of a key also needs the earlier changes of that key. So one pass from the latest key change to the first
    is enough.
    """
    mine = owns(moves[0])
    needed: set[int] = set()
    wanted = np.zeros(len(mine), np.bool_)
    for at, (is_mine, key, old) in enumerate(
        zip(mine.tolist(), moves[0].tolist(), moves[1].tolist(), strict=True)
    ):
        if is_mine or key in needed:
            wanted[at] = True
            needed.add(old)
    return moves[1][wanted], moves[2][wanted].astype(np.int64), moves[3][wanted].astype(np.int64)


def _deletes(rows: pa.Table) -> pa.Table:
    return take(rows, np.flatnonzero(is_kind(rows, ChangeType.DELETE)))


def _search_needed(
    read: Callable[[], Iterable[pa.Table]], layout: Layout, owns: Owns, limit: ConnectedLimit
) -> NeededKeys:
    needed, known = NeededKeys.of([]), 0
    while True:
        halves = []
        for rows in read():
            hashes, versions, ordinals = _identify(_moved(rows), layout)
            mine = owns(hashes) | needed.covers(hashes, versions, ordinals)
            halves.append(_change_numbers(versions, ordinals - 1)[mine])
        wanted = np.unique(np.concatenate([np.empty(0, np.uint64), *halves]))
        limit.check(len(wanted))
        if len(wanted) == known:
            return needed
        found = []
        for rows in read():
            hashes, versions, ordinals = _identify(_deletes(rows), layout)
            met = np.isin(_change_numbers(versions, ordinals), wanted)
            found.append((hashes[met], versions[met], ordinals[met]))
        needed, known = NeededKeys.of(found), len(wanted)


def _moved(rows: pa.Table) -> pa.Table:
    """Inserts with unchanged values, which are the second half of a key change."""
    inserts = is_kind(rows, ChangeType.INSERT) & bools_of(rows.column(UNCHANGED).is_valid())
    return take(rows, np.flatnonzero(inserts))


def _identify(rows: pa.Table, layout: Layout) -> tuple[Hashes, Rows, Rows]:
    """The key hash, version and ordinal of each row."""
    return key_hashes(rows, layout.key), ints_of(rows.column(COMMIT_VERSION)), ints_of(rows.column(ORDINAL))


def with_helpers(rows: pa.Table, layout: Layout, owns: Owns, needed: NeededKeys) -> pa.Table:
    """The changes of a part, plus the changes of other parts that it needs, marked in column `HELPER`."""
    hashes, versions, ordinals = _identify(rows, layout)
    mine = owns(hashes) | is_kind(rows, ChangeType.TRUNCATE)
    chosen = np.flatnonzero(mine | needed.covers(hashes, versions, ordinals))
    helps = pa.array(~mine[chosen])
    return take(rows, chosen).append_column(HELPER, helps)


def _change_numbers(versions: Rows, ordinals: Rows) -> Hashes:
    """One number for each version and ordinal. A collision only puts more changes than necessary into one
    part.
    """
    return versions.astype(np.uint64) * np.uint64(_PLACE_FACTOR) + ordinals.astype(np.uint64)
