"""What can happen to rows (EDGE_CASES R, and K02 to K05), as data.

Each operation has keys of its own, so all of them are played at once: in the transaction `t` of the epoch `e`, what each of them does
there. What must come of it, no operation says: that is for a model to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from tests.contract.shapes import WIDE

ALL = ("*",)
"""Every value that an update may leave out is left out."""


@dataclass(frozen=True)
class Insert:
    at: int
    n: int = 0


@dataclass(frozen=True)
class Update:
    """The row becomes the row `n`, except for `keeps`, whose values stay, and do not travel. `to`: under another key."""

    at: int
    n: int
    keeps: Sequence[str] = ()
    to: int | None = None


@dataclass(frozen=True)
class Delete:
    at: int


Statement = Insert | Update | Delete
Epoch = Sequence[Sequence[Statement]]
"""Its transactions."""


@dataclass(frozen=True)
class Operation:
    """`first`: the keys that are there before, each with the row 0, which has no nulls."""

    name: str
    first: Sequence[int]
    epochs: Sequence[Epoch]


def _move(at: int, to: int, n: int, keeps: Sequence[str] = ()) -> Update:
    return Update(at, n, keeps, to)


def _every_order() -> tuple[Sequence[int], Epoch]:
    """Everything that can happen to one key in up to four changes: each sequence to a key of its own, in one transaction or in several."""
    first: list[int] = []
    transactions: list[list[Statement]] = [[], [], []]
    at = 0
    for length, is_there, spread in product((1, 2, 3, 4), (False, True), (False, True)):
        for kinds in product("IUD", repeat=length):
            if not _can_be(kinds, is_there) or (spread and length == 4):
                continue
            if is_there:
                first.append(at)
            for step, kind in enumerate(kinds):
                n = 10 * at + step
                made: Statement = Insert(at, n) if kind == "I" else Update(at, n) if kind == "U" else Delete(at)
                transactions[step if spread else 0].append(made)
            at += 1
    return first, transactions


def _can_be(kinds: Sequence[str], is_there: bool) -> bool:
    for kind in kinds:
        if (kind == "I") == is_there:
            return False
        is_there = kind != "D"
    return True


_ORDERS = _every_order()

OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            "R01 rows come, change and go",
            (0, 1, 2),
            ([[Insert(3, 1), Update(0, 1), Delete(1)]], [[Update(3, 2), Delete(0)], [Insert(0, 3), Insert(1, 4)]]),
        ),
        Operation(
            "R06 keys change",
            (0, 1, 2, 3, 4, 5),
            (
                [[_move(0, 10, 1, ALL), _move(1, 11, 2), Delete(2), _move(3, 2, 5, ALL)]],
                # Two swap their keys, one goes back to where it came from, one takes a key that is new.
                [[_move(4, 12, 1, ALL), _move(5, 4, 2, ALL), _move(12, 5, 3, ALL), _move(11, 1, 4)], [Insert(11, 5)]],
                # Through several keys at once, and on from there.
                [[_move(10, 13, 6, ALL), _move(13, 14, 7, ALL), Update(14, 8, ALL)], [_move(14, 10, 9, ALL), Delete(10)]],
            ),
        ),
        Operation(
            "R07 values that do not travel, one by one",
            tuple(range(len(WIDE.kept))),
            (
                [[Update(at, at + 1, (name,)) for at, name in enumerate(WIDE.kept)]],
                [[Update(at, at + 2, ALL)] for at in range(len(WIDE.kept))],
            ),
        ),
        Operation(
            "R11 one update brings a value, the next leaves it out",
            (0, 1, 2),
            (
                [[Update(0, 1), Update(0, 2, ALL), Update(1, 1), Update(2, 1)], [Update(1, 2, ALL)]],
                [[Update(2, 2, ALL), Update(0, 3, ALL), Update(0, 1)]],
            ),
        ),
        Operation(
            "R13 nulls are values, and a delete shows none",
            (2, 6),
            ([[Update(2, 6), Delete(6)]], [[Insert(6, 2), Delete(2)], [Insert(2, 14)]]),
        ),
        Operation(
            "R14 updates that change nothing",
            (0, 1),
            ([[Update(0, 0), Update(1, 1, ALL)]], [[Update(0, 0, ALL), Update(0, 0)], [Update(1, 1)]]),
        ),
        Operation(
            "R16 many changes in one place of the log",
            tuple(range(5)),
            (
                [[Update(at, n) for n in range(4) for at in range(5)]],
                [
                    [
                        step
                        for at in range(5)
                        for step in (Delete(at), Insert(at, at + 20), Update(at, at + 21, ALL), Delete(at), Insert(at, at))
                    ]
                ],
            ),
        ),
        Operation("K02 every order of changes", _ORDERS[0], (_ORDERS[1],)),
        Operation(
            "K03 keys that share a part",
            tuple(range(21)),
            ([[Delete(0), Delete(8), Delete(16), Update(1, 5), Update(7, 6)]], [[Insert(8, 9), Delete(1)]]),
        ),
    )
}


@dataclass(frozen=True)
class Change:
    """Of a table without key: one row that looks like `old` goes, one that looks like `new` comes."""

    old: int | None = None
    new: int | None = None


HEAP_OPERATIONS: dict[str, tuple[Sequence[int], Sequence[Sequence[Change]]]] = {
    "R04 rows are only added": ((0, 0, 1), ([Change(new=0), Change(new=2)], [Change(new=2), Change(new=0)])),
    "R05 one of several equal rows goes": (
        (0, 0, 0, 1, 2, 2, 3, 3, 7),
        (
            [Change(old=0), Change(2, 3), Change(old=1), Change(new=1), Change(7, 7)],
            [Change(old=0), Change(0, 3), Change(old=3), Change(new=5), Change(old=5), Change(new=6), Change(6, 7)],
        ),
    ),
}
"""By name: the rows that are there before, and what happens in each epoch."""
