"""The offsets of a stream of changes, as Spark stores and compares them: JSON with one order of keys.

`{"position": "0/0"}` is a query that has not begun; `{"position": F, "chunk": 3}` one that has read three steps of its snapshot at the
fence F; `{"position": P}` one that holds every change up to P, and, if it began with a snapshot, that too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.position import Position


@dataclass(frozen=True, slots=True)
class ChangeOffset:
    position: Position
    chunk: int | None = None
    """How many steps of the snapshot are done; None before it begins, and when it is over."""

    INITIAL: ClassVar[ChangeOffset]

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> ChangeOffset:
        chunk = document.get("chunk")
        return cls(Position.parse(document["position"]), None if chunk is None else int(chunk))

    def to_document(self) -> dict[str, Any]:
        plain = {"position": str(self.position)}
        return plain if self.chunk is None else {**plain, "chunk": self.chunk}


ChangeOffset.INITIAL = ChangeOffset(Position.ZERO)
