"""What is to become of a table that stands where one of the pipeline's is to go: `existing` of a pipeline, or of a rule."""

from __future__ import annotations

from enum import StrEnum


class ExistingPolicy(StrEnum):
    REFUSE = "refuse"
    """The table of the pipeline fails, and what is there stays as it is."""
    ADOPT = "adopt"
    """It becomes the pipeline's: it stays as it is until a copy of the source is complete, whose rows then take the place of its own."""
    REPLACE = "replace"
    """It is removed with all that it holds, and the pipeline makes its own."""

    @property
    def consequence(self) -> str:
        return "its rows are replaced once a copy is complete" if self is ExistingPolicy.ADOPT else "it is removed with all that it holds"
