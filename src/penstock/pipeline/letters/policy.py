"""What is to happen to a row that cannot be applied: `refused` of a pipeline, or of a rule."""

from __future__ import annotations

from enum import StrEnum


class RefusedPolicy(StrEnum):
    STOP = "stop"
    """Its table stops."""
    DEAD_LETTERS = "dead_letters"
    """It is put aside, and the table goes on without it."""
