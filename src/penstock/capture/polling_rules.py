"""How a polling capture asks tables. It has a plain text form, since it travels as one option of the Spark source."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from penstock.errors import ConfigError
from penstock.location import absolute_path
from penstock.schema import TableName

XMIN = "xmin"
"""In the place of a column's name: rows are asked for by the transaction that wrote them."""


@dataclass(frozen=True, slots=True)
class PollingRules:
    """How tables are asked."""

    interval_seconds: float = 1.0
    """How long to pause between two looks."""
    cursor: str = XMIN
    """The column by which tables are asked, or `xmin`."""
    cursors: tuple[tuple[TableName, str], ...] = ()
    """The same for single tables."""
    deletes: bool = False
    """Whether rows that are gone are looked for, by comparing all keys at every look."""
    resume: Path | None = None
    """The directory in which to keep where to go on; None: in the table `penstock.polling` of the source."""

    DEFAULT: ClassVar[PollingRules]

    def __post_init__(self) -> None:
        if not 0 <= self.interval_seconds < math.inf:
            raise ConfigError(f"the time between two looks is {self.interval_seconds} s", hint="give a number of seconds, 0 or more")
        if self.resume is not None:
            object.__setattr__(self, "resume", absolute_path(self.resume, "resume"))

    def cursor_of(self, table: TableName) -> str:
        return dict(self.cursors).get(table, self.cursor)

    def to_text(self) -> str:
        return json.dumps(
            {
                "interval_seconds": self.interval_seconds,
                "cursor": self.cursor,
                "cursors": {str(table): column for table, column in self.cursors},
                "deletes": self.deletes,
                "resume": None if self.resume is None else str(self.resume),
            }
        )

    @classmethod
    def parse(cls, text: str) -> PollingRules:
        document = json.loads(text)
        return cls(
            interval_seconds=document["interval_seconds"],
            cursor=document["cursor"],
            cursors=tuple((TableName.parse(table), column) for table, column in document["cursors"].items()),
            deletes=document["deletes"],
            resume=None if document["resume"] is None else Path(document["resume"]),
        )


PollingRules.DEFAULT = PollingRules()
