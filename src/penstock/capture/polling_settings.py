"""What a polling capture needs to know, declared once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from penstock.capture.confirming import Confirm
from penstock.capture.feeding import FeedSettings
from penstock.capture.polling_resume import FileResume, ResumeStore, SourceResume
from penstock.capture.polling_rules import PollingRules
from penstock.capture.settings import CaptureLimits
from penstock.location import absolute_path
from penstock.postgres.connection import SourceAddress
from penstock.postgres.types.policy import TypePolicy
from penstock.schema import TableName
from penstock.spool.lock import MomentLock

_TURN_SECONDS = 60.0
"""A copy of tables keeps the lock while it stores their keys; then a look is tried again."""


@dataclass(frozen=True, slots=True)
class PollingSettings:
    """One source, some of its tables, one spool."""

    address: SourceAddress
    name: str
    """Tells this capture from others of the same source."""
    spool: Path
    tables: tuple[TableName, ...]
    rules: PollingRules = PollingRules.DEFAULT
    limits: CaptureLimits = field(default_factory=CaptureLimits)
    types: TypePolicy = TypePolicy.DEFAULT
    confirm: Confirm = Confirm.APPLIED

    def __post_init__(self) -> None:
        object.__setattr__(self, "spool", absolute_path(self.spool, "spool"))

    @property
    def resume(self) -> ResumeStore:
        return SourceResume(self.address, self.name) if self.rules.resume is None else FileResume(self.rules.resume)

    @property
    def keys(self) -> Path:
        """Where the keys are kept that tables had."""
        return self.spool / "keys"

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The lock under which the processes of this capture take moments of the source, one at a time."""
        lock = MomentLock(self.spool)
        lock.wait(_TURN_SECONDS)
        try:
            yield
        finally:
            lock.release()

    @property
    def feed(self) -> FeedSettings:
        return FeedSettings(self.spool, self.limits, self.types, self.confirm)
