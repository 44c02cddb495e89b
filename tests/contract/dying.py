"""Processes that die between two steps of what they do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from tests.contract.places import Seam


class Death(BaseException):
    """As by SIGKILL: nobody handles it, and nothing is tidied up after it."""


class Life:
    """Ends with its step number `last`, before that is done; there is none after it either.

    Or, with `refusal`, that one step is refused in this way, and what follows is done.
    """

    def __init__(self, last: int, refusal: Exception | None = None) -> None:
        self.last = last
        self.steps = 0
        self._refusal = refusal
        self._thread = threading.get_ident()

    @property
    def is_over(self) -> bool:
        return self.steps >= self.last

    def counting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() != self._thread:
                return step(*arguments, **options)
            self.steps += 1
            if self._refusal is not None:
                if self.steps == self.last:
                    raise self._refusal
            elif self.is_over:
                for each in arguments:
                    if isinstance(each, psycopg.Connection):
                        each.pgconn.finish()  # the system closes what a process had open
                raise Death
            return step(*arguments, **options)

        return counted


@contextmanager
def dying(seams: Sequence[Seam], last: int, refusal: Exception | None = None) -> Iterator[Life]:
    """What is done inside is cut off there, unless it comes to its end before."""
    life = Life(last, refusal)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in seams:
            patch.setattr(owner, name, life.counting(getattr(owner, name)))
        try:
            yield life
        except Death:
            assert life.is_over
