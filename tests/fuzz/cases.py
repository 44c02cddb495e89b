"""A batch of cases: small valid streams, built once, and for each case one of them, damaged.

They are small because a case then takes a fraction of a millisecond, and because most damage to a long stream
can also be done to a short one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from tests.fuzz.damage import damage
from tests.support.pgoutput_streams import PREFIXES, StreamWriter

LOT_CASES = 25_000

_LOT_STREAMS = 400
WHOLE = 50_000


@dataclass(frozen=True)
class FuzzCase:
    """Input of a decoder: the messages, split into calls at the indexes `cuts`."""

    messages: tuple[bytes, ...]
    keys: Mapping[int, tuple[str, ...]]
    prefixes: frozenset[str] = frozenset()
    cuts: tuple[int, ...] = ()
    max_open_messages: int = WHOLE
    old_rows: bool = False

    def calls(self) -> list[tuple[bytes, ...]]:
        if not self.cuts:
            return [self.messages]
        bounds = [0, *(min(cut, len(self.messages)) for cut in self.cuts), len(self.messages)]
        return [self.messages[low:high] for low, high in pairwise(bounds)]


class Lot:
    def __init__(self, number: int) -> None:
        self._number = number
        random = Random(number)
        self._streams = [_stream(random) for _ in range(_LOT_STREAMS)]
        self._donors = [message for stream in self._streams for message in stream.messages]

    def case(self, index: int) -> FuzzCase:
        random = Random(self._number << 32 | index)
        stream = self._streams[int(random.random() * _LOT_STREAMS)]
        messages = list(stream.messages)
        for _ in range(_damage_count(random)):
            damage(random, messages, self._donors)
        return _divided(random, replace(stream, messages=tuple(messages), old_rows=index % 4 == 0))


def _stream(random: Random) -> FuzzCase:
    """Mostly the smallest streams in which everything can go wrong, and some larger ones."""
    is_small = random.random() < 0.85
    writer = StreamWriter.start(random.getrandbits(32), 1 if is_small else 3)
    in_blocks = random.random() < 0.5
    for _ in range(random.choice([1, 1, 1, 2] if is_small else [3, 8])):
        change_count = random.choice([0, 1, 1, 1, 1, 2]) if is_small else random.choice([1, 2, 3, 6])
        if in_blocks and random.random() < 0.7:
            writer.block(change_count)
        else:
            writer.transaction(change_count)
    if random.random() < 0.8:
        writer.finish()
    prefixes = frozenset(PREFIXES[:2]) if random.random() < 0.3 else frozenset[str]()
    return FuzzCase(tuple(writer.messages), writer.keys, prefixes)


def _damage_count(random: Random) -> int:
    chance = random.random()
    return 1 if chance < 0.6 else 2 if chance < 0.85 else 3 if chance < 0.97 else 8


def _divided(random: Random, case: FuzzCase) -> FuzzCase:
    """Mostly one call; each more costs as much again."""
    chance = random.random()
    if chance < 0.85:
        return case
    cuts = sorted(random.randrange(len(case.messages) + 1) for _ in range(1 if chance < 0.96 else 3))
    return replace(case, cuts=tuple(cuts), max_open_messages=random.choice([1, 3, WHOLE]))
