"""What is done for tables besides epochs, so that they stay quick to read and their disks do not fill up: when, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Of Delta tables."""

    compact_after: int = 64
    """A table with so many small files has them made one; 0: nothing is written anew."""
    checkpoint_after: int = 50
    """Commits; 0: never."""
    keep_seconds: float | None = 7 * 86400.0
    """What no version needs that is younger than this is removed; None: nothing is."""
    vacuum_every_seconds: float = 86400.0
