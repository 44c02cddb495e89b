"""Changes of other keys that a part of an epoch needs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from penstock.change import CHANGE_TYPE, COMMIT_VERSION, ORDINAL, UNCHANGED
from penstock.sinks import key_moves
from penstock.sinks.key_moves import ConnectedLimit, NeededKeys, find_needed
from penstock.sinks.modes import Layout, Mode
from penstock.sinks.slice_reader import Part

LAYOUT = Layout(pa.schema([("id", pa.int64())]), ("id",), Mode.MIRROR)
LIMIT = ConnectedLimit(None)


class Moves:
    """Key changes with unchanged values, one for each transaction, in two row groups."""

    def __init__(self, pairs: list[tuple[int, int]]) -> None:
        names = pa.array([None, ["note"]] * len(pairs), pa.list_(pa.string()))
        self._rows = pa.table(
            {
                "id": pa.array([key for pair in pairs for key in pair], pa.int64()),
                CHANGE_TYPE: ["delete", "insert"] * len(pairs),
                COMMIT_VERSION: np.repeat(np.arange(1, len(pairs) + 1), 2),
                ORDINAL: np.tile([1, 2], len(pairs)),
                UNCHANGED: names,
            }
        )
        self.times_read = 0

    def read(self) -> Iterator[pa.Table]:
        self.times_read += 1
        half = self._rows.num_rows // 2
        yield from (self._rows.slice(0, half), self._rows.slice(half))


def facts(needed: NeededKeys) -> list[list[int]]:
    return [column.tolist() for column in (needed.hashes, needed.versions, needed.ordinals)]


def test_a_long_chain_of_key_changes_is_read_twice() -> None:
    moves = Moves([(key, key + 1) for key in range(1000)])
    needed = find_needed(moves.read, LAYOUT, Part(0, 4, True, True).owns, LIMIT)
    assert len(needed.hashes) > 900
    assert moves.times_read == 2


@pytest.mark.parametrize("seed", range(8))
def test_key_changes_beyond_the_memory_limit_are_followed_to_the_same_result(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = random.Random(seed)
    moves = Moves([(numbers.randrange(30), numbers.randrange(30)) for _ in range(80)])
    for index in range(4):
        find = partial(find_needed, moves.read, LAYOUT, Part(index, 4, True, True).owns, LIMIT)
        in_memory = facts(find())
        with monkeypatch.context() as patch:
            patch.setattr(key_moves, "MOVES_IN_MEMORY", 0)
            assert facts(find()) == in_memory


def test_without_key_changes_nothing_is_needed() -> None:
    moves = Moves([])
    assert facts(find_needed(moves.read, LAYOUT, Part(0, 4, True, True).owns, LIMIT)) == [[], [], []]
