"""What is done for tables besides epochs, so that they stay quick to read and their disks do not fill up: when, and how much of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_TIMES = 10


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Of Delta tables."""

    compact_after: int = 64
    """A table with so many small files has them made one; 0: nothing is written anew."""
    checkpoint_after: int = 50
    """Commits; 0: never."""
    keep_seconds: float | None = 7 * 86400.0
    """What no version needs that is younger than this is removed; None: nothing is."""
    versions: int = 20_000
    """Of those, at most so many are kept; and in any case all that are younger than `hold_seconds`."""
    hold_seconds: float = 3600.0
    vacuum_every_seconds: float = 86400.0


class Rest:
    """What took a second is not done again for ten: however large a table is, that takes no more than a tenth of the time."""

    def __init__(self) -> None:
        self._until = 0.0

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    @contextmanager
    def after(self) -> Iterator[None]:
        """Begin it with the end of what is done here, whatever becomes of that."""
        started = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            self._until = ended + _TIMES * (ended - started)
