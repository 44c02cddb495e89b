"""Row operations (edge cases R, and K02 to K05) as data.

Each operation has its own keys, so all of them are played in one run: each does its part in transaction `t`
of epoch `e`. An operation does not state the expected rows: a model computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from tests.support.contract.shapes import WIDE

ALL = ("*",)
"""All columns that an update may leave unchanged are unchanged."""


@dataclass(frozen=True)
class Insert:
    at: int
    n: int = 0


@dataclass(frozen=True)
class Update:
    """The row becomes the row `n`, except for `keeps`, which are unchanged TOAST values. `to`: under another
    key.
    """

    at: int
    n: int
    keeps: Sequence[str] = ()
    to: int | None = None


@dataclass(frozen=True)
class Delete:
    at: int


Statement = Insert | Update | Delete
Epoch = Sequence[Sequence[Statement]]
"""The transactions of an epoch."""


@dataclass(frozen=True)
class Operation:
    """`first`: the initial keys, each with the row 0, which has no nulls."""

    name: str
    first: Sequence[int]
    epochs: Sequence[Epoch]


def _move(at: int, to: int, n: int, keeps: Sequence[str] = ()) -> Update:
    return Update(at, n, keeps, to)


def _every_order() -> tuple[Sequence[int], Epoch]:
    """Every sequence of up to four changes of one key: each with its own key, in one transaction or in
    several.
    """
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
                made: Statement = (
                    Insert(at, n) if kind == "I" else Update(at, n) if kind == "U" else Delete(at)
                )
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
            "R01 inserts, updates and deletes",
            (0, 1, 2),
            (
                [[Insert(3, 1), Update(0, 1), Delete(1)]],
                [[Update(3, 2), Delete(0)], [Insert(0, 3), Insert(1, 4)]],
            ),
        ),
        Operation(
            "R06 key changes",
            (0, 1, 2, 3, 4, 5),
            (
                [[_move(0, 10, 1, ALL), _move(1, 11, 2), Delete(2), _move(3, 2, 5, ALL)]],
                # Two swap their keys, one returns to its old key, one takes a new key.
                [
                    [_move(4, 12, 1, ALL), _move(5, 4, 2, ALL), _move(12, 5, 3, ALL), _move(11, 1, 4)],
                    [Insert(11, 5)],
                ],
                # Through several keys in one transaction, and further in the next.
                [
                    [_move(10, 13, 6, ALL), _move(13, 14, 7, ALL), Update(14, 8, ALL)],
                    [_move(14, 10, 9, ALL), Delete(10)],
                ],
            ),
        ),
        Operation(
            "R07 unchanged TOAST in one column at a time",
            tuple(range(len(WIDE.kept))),
            (
                [[Update(at, at + 1, (name,)) for at, name in enumerate(WIDE.kept)]],
                [[Update(at, at + 2, ALL)] for at in range(len(WIDE.kept))],
            ),
        ),
        Operation(
            "R11 an update sets a value, the next leaves it unchanged",
            (0, 1, 2),
            (
                [[Update(0, 1), Update(0, 2, ALL), Update(1, 1), Update(2, 1)], [Update(1, 2, ALL)]],
                [[Update(2, 2, ALL), Update(0, 3, ALL), Update(0, 1)]],
            ),
        ),
        Operation(
            "R13 nulls are values, and a delete carries none",
            (2, 6),
            ([[Update(2, 6), Delete(6)]], [[Insert(6, 2), Delete(2)], [Insert(2, 14)]]),
        ),
        Operation(
            "R14 updates without a difference",
            (0, 1),
            ([[Update(0, 0), Update(1, 1, ALL)]], [[Update(0, 0, ALL), Update(0, 0)], [Update(1, 1)]]),
        ),
        Operation(
            "R16 many changes at one LSN",
            tuple(range(5)),
            (
                [[Update(at, n) for n in range(4) for at in range(5)]],
                [
                    [
                        step
                        for at in range(5)
                        for step in (
                            Delete(at),
                            Insert(at, at + 20),
                            Update(at, at + 21, ALL),
                            Delete(at),
                            Insert(at, at),
                        )
                    ]
                ],
            ),
        ),
        Operation("K02 every order of changes", _ORDERS[0], (_ORDERS[1],)),
        Operation(
            "K03 keys that share a column value",
            tuple(range(21)),
            ([[Delete(0), Delete(8), Delete(16), Update(1, 5), Update(7, 6)]], [[Insert(8, 9), Delete(1)]]),
        ),
    )
}


@dataclass(frozen=True)
class Change:
    """For a table without key: delete one row equal to `old`, insert one equal to `new`."""

    old: int | None = None
    new: int | None = None


HEAP_OPERATIONS: dict[str, tuple[Sequence[int], Sequence[Sequence[Change]]]] = {
    "R04 inserts only": ((0, 0, 1), ([Change(new=0), Change(new=2)], [Change(new=2), Change(new=0)])),
    "R05 delete one of several equal rows": (
        (0, 0, 0, 1, 2, 2, 3, 3, 7),
        (
            [Change(old=0), Change(2, 3), Change(old=1), Change(new=1), Change(7, 7)],
            [
                Change(old=0),
                Change(0, 3),
                Change(old=3),
                Change(new=5),
                Change(old=5),
                Change(new=6),
                Change(6, 7),
            ],
        ),
    ),
}
"""By name: the initial rows, and the changes in each epoch."""
