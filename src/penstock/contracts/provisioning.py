"""What must be set up at the source before its changes can be captured, and who may set it up.

A capture that can look after its own prerequisites implements `CaptureProvisioning` beside its main contract. What is in the way is data,
not an exception: a report can be shown, logged, or turned into an error by the caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from penstock.schema import TableName


@dataclass(frozen=True, slots=True)
class Blocker:
    """One reason why a table's changes do not arrive, or not whole: an error code, what is wrong, and what mends it."""

    code: str
    """The code of the error that a run would stop with, as in the reference of errors."""
    what: str
    remedy: str
    """What to do about it, for a person: statements, behind the words that say who may run them, or words alone where no statement helps.

    What can be pasted as it is, and closes the gap, stands in `CoverageReport.remediation`.
    """
    tables: tuple[TableName, ...] = ()
    """The tables that it concerns; empty if it concerns all."""


@dataclass(frozen=True, slots=True)
class CoverageReport:
    """How far the source streams the tables that are required, as observed at one moment.

    `satisfied` means that every required table is streamed, whole; then there is nothing to do. Otherwise `manageable` says whether this
    capture may close the gap by itself, and `remediation` has the statements that close it, whoever runs them. `blockers` say why it is not
    manageable, or why what is streamed is not whole.
    """

    satisfied: bool
    present: frozenset[TableName] = frozenset()
    """Required tables that are streamed already."""
    missing: frozenset[TableName] = frozenset()
    """Required tables that are not."""
    manageable: bool = False
    blockers: tuple[Blocker, ...] = ()
    remediation: tuple[str, ...] = ()


class CaptureProvisioning(ABC):
    """Implemented by a capture that can inspect, and perhaps create, what it needs at the source."""

    @abstractmethod
    def inspect_coverage(self, required: AbstractSet[TableName]) -> CoverageReport:
        """Compare what is required with what the source streams now.

        Called at any time, from any process, as often as one likes: before a start, by a check, by a dashboard. Opens its own short-lived
        connection. It never changes anything, neither at the source nor in the capture; the usual mistake is to create "just the
        publication" here. Raises only if the source cannot be asked at all.
        """

    @abstractmethod
    def ensure_coverage(self, required: AbstractSet[TableName], manage: bool) -> CoverageReport:
        """Close the gap, if `manage` is set and the gap is manageable; otherwise do nothing.

        Called once at each start, before the first change is asked for, by the one process that captures. Gives back what was observed
        *before* acting, so that the caller can tell what was done, or would have been: a report with `missing` and `manageable` and with
        `manage` set means that it has been done. Does nothing for a set that is satisfied. It adds and never takes away: a table that is
        no longer required stays where it is.
        """
