"""What a comparison of source and target came to, for people and programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from penstock.errors import PenstockError
from penstock.pipeline.states import TableState
from penstock.pipeline.verification.comparing import Comparison
from penstock.position import Position
from penstock.schema import TableName


@dataclass(frozen=True, slots=True)
class TableVerdict:
    """One table: compared, or not, and then why."""

    table: TableName
    state: TableState
    position: Position
    """Where it was compared, or found in this state."""
    comparison: Comparison | None = None
    reason: str | None = None
    remedy: str | None = None
    error: PenstockError | None = None
    """What kept a table that streams from being compared."""

    def __post_init__(self) -> None:
        if self.error is not None:
            object.__setattr__(self, "reason", f"{self.error.code}: {self.error.message}")
            object.__setattr__(self, "remedy", self.error.hint)

    @property
    def equal(self) -> bool:
        """A table that was not compared is not known to be equal, and does not count as such."""
        return self.comparison is not None and self.comparison.equal

    @property
    def equal_but_held(self) -> bool:
        """The same, but for rows that are in dead letters."""
        return self.comparison is not None and self.comparison.equal_but_held

    def as_document(self) -> dict[str, object]:
        document: dict[str, object] = {
            "state": self.state.value,
            "position": str(self.position),
            "compared": self.comparison is not None,
            "equal": self.equal,
            "failed": self.error is not None,
            "reason": self.reason,
            "remedy": self.remedy,
        }
        if self.comparison is not None:
            found = asdict(self.comparison)
            document |= {
                name: found[name] for name in ("source_rows", "target_rows", "missing", "extra", "different", "held", "columns", "examples")
            }
        return document


@dataclass(frozen=True, slots=True)
class VerifyReport:
    pipeline: str
    verdicts: Sequence[TableVerdict]
    """In the order of the tables' names."""
    seconds: float

    @property
    def equal(self) -> bool:
        """Whether every table that was asked for equals its source."""
        return all(each.equal for each in self.verdicts)

    @property
    def equal_but_held(self) -> bool:
        """The same, but for rows that are in dead letters."""
        return all(each.equal_but_held for each in self.verdicts)

    @property
    def complete(self) -> bool:
        """Whether no error kept a table from being compared."""
        return all(each.error is None for each in self.verdicts)

    def as_document(self) -> dict[str, object]:
        """For programs: plain, stable names."""
        return {
            "pipeline": self.pipeline,
            "equal": self.equal,
            "complete": self.complete,
            "seconds": round(self.seconds, 3),
            "tables": {str(each.table): each.as_document() for each in self.verdicts},
        }
