"""What the configuration says about polling."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from penstock.capture.polling_rules import XMIN, PollingRules
from penstock.pipeline.durations import checked_duration, parse_seconds
from penstock.pipeline.references import Model
from penstock.schema import TableName


class PollingConfig(Model):
    """How tables are asked what has changed, with `capture: polling`."""

    interval: str = Field(default="1 second", description="how long to pause between two looks at the tables")
    cursor: str = Field(
        default=XMIN,
        description="the column that goes up with every change of a row, by which tables are asked; `xmin`, which needs no such column: "
        "every look then reads the whole table",
    )
    cursors: dict[str, str] = Field(default_factory=dict, description="the same for single tables: `{public.orders: updated_at}`")
    deletes: bool = Field(default=True, description="find rows that are gone, by comparing all keys of a table at every look")
    resume: Literal["state", "source"] = Field(
        default="state",
        description="where it is kept from where to go on: in the state directory, or in the table penstock.polling of the source",
    )

    _durations = field_validator("interval")(checked_duration)

    @field_validator("cursors")
    @classmethod
    def _names(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            TableName.parse(name)
        return value

    def rules(self, state: Path) -> PollingRules:
        return PollingRules(
            parse_seconds(self.interval),
            self.cursor,
            tuple((TableName.parse(name), column) for name, column in self.cursors.items()),
            self.deletes,
            state / "polling" if self.resume == "state" else None,
        )
