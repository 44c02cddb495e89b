"""What a capture by triggers needs to know, declared once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from penstock.capture.confirming import Confirm
from penstock.capture.feeding import FeedSettings
from penstock.capture.settings import CaptureLimits
from penstock.errors import ConfigError
from penstock.location import absolute_path
from penstock.postgres.connection import SourceAddress
from penstock.postgres.slot import is_slot_name
from penstock.postgres.types.policy import TypePolicy

_LONGEST = 50
"""Names of triggers are made of it."""
NAME_RULE = f"use lower-case letters, digits and underscores, {_LONGEST} at most, and not pg_ in front"


def is_change_table_name(name: str) -> bool:
    return is_slot_name(name) and len(name) <= _LONGEST and not name.startswith("pg_")


@dataclass(frozen=True, slots=True)
class TriggerSettings:
    """One change table, one spool."""

    address: SourceAddress
    name: str
    """Of the schema that holds the change table, and of the triggers."""
    spool: Path
    limits: CaptureLimits = field(default_factory=CaptureLimits)
    types: TypePolicy = TypePolicy.DEFAULT
    confirm: Confirm = Confirm.APPLIED
    poll_seconds: float = 0.1
    """How long to wait before the next look when the last one has taken in everything."""
    page_changes: int = 20_000
    page_bytes: int = 16 << 20
    """Of text that is read at a time; a single change that is larger is read all the same."""

    @property
    def feed(self) -> FeedSettings:
        """Where the changes go."""
        return FeedSettings(self.spool, self.limits, self.types, self.confirm)

    def __post_init__(self) -> None:
        if not is_change_table_name(self.name):
            raise ConfigError(f"{self.name!r} cannot be the name of a change table", hint=NAME_RULE)
        object.__setattr__(self, "spool", absolute_path(self.spool, "spool"))
