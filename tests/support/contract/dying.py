"""Simulated crashes between two steps of a process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from tests.support.contract.sink_setups import Seam


class Death(BaseException):
    """Simulates SIGKILL: no code handles it, and nothing is cleaned up."""


class StepCounter:
    """Ends the process before step number `last`; no step follows.

    With `refusal`, that step raises this error instead, and the later steps are done.
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
def dying(seams: Sequence[Seam], last: int, refusal: Exception | None = None) -> Iterator[StepCounter]:
    """The block ends at that step, or at its own end if that comes first."""
    counter = StepCounter(last, refusal)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in seams:
            patch.setattr(owner, name, counter.counting(getattr(owner, name)))
        try:
            yield counter
        except Death:
            assert counter.is_over
