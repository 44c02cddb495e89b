"""Which column of a table is which, from one shape in the log to the next.

A column is its number in the catalog, which is never given twice: a rename keeps it, a drop ends it, what is added gets the next one. The
log shows only names, in the order of the numbers. So between what was known once and what the catalog has now, a shape of so many columns
is any choice of numbers that nothing contradicts: what is there before and after is there in between, and of what was added since, the
earlier was there before the later. If there is just one such choice, that is it, whatever the names are; else nobody can tell from the log,
and nothing is guessed: a name that is the same on both sides may well be another column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

Numbers = tuple[int, ...]
"""Of columns, in the order of the table, which is ascending."""


@dataclass(frozen=True, slots=True)
class Numbering:
    """The columns that a table has at one moment."""

    live: Numbers
    width: int
    """The greatest number that was given out by then."""


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of a shape from elsewhere."""

    before: tuple[Numbers, ...] = ()
    """The columns that there were at moments between the last shape and this one."""
    numbers: Numbers | None = None


def trace(counts: Sequence[int], before: Numbering, now: Numbering, told: Sequence[Told] = ()) -> list[Numbers | None]:
    """The numbers of the columns of shapes that the table had, one after the other, between `before` and `now`; of each as many as `counts`
    says. None: there is more than one answer, or none at all, since what is published has changed otherwise.

    `told`, if there is any, has what is known of each shape; nothing of it counts if it cannot be so.
    """
    known = [numbers for each in told for numbers in (*each.before, each.numbers) if numbers is not None]
    if not told or any(numbers[-1] > now.width for numbers in known):
        return _trace(counts, [None] * len(counts), before, now)
    lengths: list[int] = []
    found: list[Numbers | None] = []
    places: list[int] = []
    for count, each in zip(counts, told, strict=True):
        lengths += [*map(len, each.before), count]
        found += [*each.before, each.numbers]
        places.append(len(lengths) - 1)
    traced = _trace(lengths, found, before, now)
    return [traced[place] for place in places]


def _trace(counts: Sequence[int], found: list[Numbers | None], before: Numbering, now: Numbering) -> list[Numbers | None]:
    """Each shape that is known narrows down those beside it, so that they are gone through until that gives nothing new."""
    while True:
        known = list(found)
        for at, count in enumerate(counts):
            if found[at] is None:
                found[at] = _between(count, _last_known(found[:at], before), _next_known(found[at + 1 :], now))
        if found == known:
            return found


def _last_known(earlier: Sequence[Numbers | None], before: Numbering) -> Numbering:
    """A shape does not show numbers that were given out and dropped again: its width is what it is at least."""
    known = [numbers for numbers in earlier if numbers is not None]
    width = max([before.width, *(numbers[-1] for numbers in known if numbers)])
    return Numbering(known[-1] if known else before.live, width)


def _next_known(later: Sequence[Numbers | None], now: Numbering) -> Numbering:
    """As wide as it can be by then."""
    return Numbering(next((numbers for numbers in later if numbers is not None), now.live), now.width)


def _between(count: int, before: Numbering, after: Numbering) -> Numbers | None:
    stayed = set(before.live) & set(after.live)
    if any(number <= before.width and number not in stayed for number in after.live):
        return None
    dropped = [number for number in before.live if number not in stayed]
    added: list[int] = []
    """Those that are there afterwards, and so were ever since they were added."""
    passing: list[int] = []
    choices = [_choice(count, [*stayed], dropped)]
    for number in range(before.width + 1, after.width + 1):
        choices.append(_choice(count, [*stayed, *added, number], [*dropped, *passing]))
        (added if number in after.live else passing).append(number)
    sure = [choice for choice in choices if choice is not None]
    return sure[0] if len(sure) == 1 and sure[0] else None


def _choice(count: int, certain: Sequence[int], possible: Sequence[int]) -> Numbers | None:
    """`count` columns, all that are certain among them: the numbers; empty if there are several such choices; None if there is none."""
    rest = count - len(certain)
    if not 0 <= rest <= len(possible):
        return None
    return tuple(sorted([*certain, *possible[:rest]])) if comb(len(possible), rest) == 1 else ()
