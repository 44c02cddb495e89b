"""The offsets of a stream of changes, as Spark stores and compares them: JSON with one order of keys.

`{"position": "0/0"}` is a query that has not begun; `{"position": F, "chunk": 3}` one that has read three steps of its snapshot at the
fence F; `{"position": P}` one that holds every change up to P, and, if it began with a snapshot, that too. An offset at which a first batch
ends also says what that batch holds, `"begins": "slot"`, since the option may say something else when the batch is repeated. Offsets of
earlier versions do not; there the option counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.position import Position

ANEW = "start the query anew, with a new checkpoint and into a new target"
"""What is left to do where an offset leads nowhere any more."""

GIVEN = "position"
"""How a query began whose position a person gave."""


@dataclass(frozen=True, slots=True)
class ChangeOffset:
    position: Position
    chunk: int | None = None
    """How many steps of the snapshot are done; None before it begins, and when it is over."""
    begins: str | None = None
    """How the query began: `snapshot`, `now`, `slot` or `position`. At the end of its first batch, unless chunks are left to be read."""

    INITIAL: ClassVar[ChangeOffset]

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> ChangeOffset:
        chunk = document.get("chunk")
        return cls(Position.parse(document["position"]), None if chunk is None else int(chunk), document.get("begins"))

    def to_document(self) -> dict[str, Any]:
        plain = {"position": str(self.position), "chunk": self.chunk, "begins": self.begins}
        return {name: value for name, value in plain.items() if value is not None}


ChangeOffset.INITIAL = ChangeOffset(Position.ZERO)
