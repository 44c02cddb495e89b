"""Contract of provisioning: the objects that a capture needs at the source, and who may create them.

A capture that can check its own prerequisites implements `CaptureProvisioning` in addition to its main
contract. Problems are data, not exceptions: the caller can show or log a report, or turn it into an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from penstock.schema import TableName


@dataclass(frozen=True, slots=True)
class Blocker:
    """One reason why changes of a table are not captured, or not completely: error code, problem and
    remedy.
    """

    code: str
    """Code of the error with which a run would stop; see the error reference."""
    what: str
    remedy: str
    """Instructions for a person: statements and the role that may run them, or a text if no statement helps.

    `CoverageReport.remediation` has the statements that close the gap when they are run as they are.
    """
    tables: tuple[TableName, ...] = ()
    """The affected tables; empty if all are."""


@dataclass(frozen=True, slots=True)
class CoverageReport:
    """Which of the required tables the source streams, at one moment.

    `satisfied` means that every required table is streamed completely. Otherwise `manageable` tells whether
    this capture may close the whole gap itself, and `remediation` has the statements that close it.
    `blockers` explain why the gap is not manageable, or why streamed tables are not complete. If they affect
    only some of the missing tables, this capture may add the others, which are in `addable`.
    """

    satisfied: bool
    present: frozenset[TableName] = frozenset()
    """Required tables that are already streamed."""
    missing: frozenset[TableName] = frozenset()
    """Required tables that are not streamed."""
    manageable: bool = False
    blockers: tuple[Blocker, ...] = ()
    remediation: tuple[str, ...] = ()

    @property
    def addable(self) -> frozenset[TableName]:
        """Missing tables that no blocker affects."""
        if any(not blocker.tables for blocker in self.blockers):
            return frozenset()
        return self.missing.difference(*(blocker.tables for blocker in self.blockers))


class CaptureProvisioning(ABC):
    """Interface of a capture that can inspect, and possibly create, the objects that it needs at the
    source.
    """

    @abstractmethod
    def inspect_coverage(self, required: AbstractSet[TableName]) -> CoverageReport:
        """Compare the required tables with those that the source streams now.

        Called at any time, from any process: before a start, by a check, by a dashboard. Opens its own
        short-lived connection. It never changes anything, neither at the source nor in the capture. Usual
        mistake: creating "just the publication" here. Raises only if the source cannot be queried at all.
        """

    @abstractmethod
    def ensure_coverage(self, required: AbstractSet[TableName], manage: bool) -> CoverageReport:
        """With `manage`, add the missing tables that this capture may add; without it, do nothing.

        Called once per start, before the first change is read, by the one process that captures. Returns the
        state *before* any action, so that the caller can report the actions: with `manage`, the tables in
        `addable` were added, and the blockers give the reasons why the others were not. The gap was closed if
        the report is `manageable`. Does nothing if the report is satisfied. It only adds: a table that is no
        longer required is not removed.
        """
