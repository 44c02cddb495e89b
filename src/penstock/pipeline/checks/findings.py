"""The findings of a check: steps, problems that would stop a run, and warnings that would not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.contracts.provisioning import Blocker
from penstock.errors import ConfigError, EnvironmentUnfitError, NoTablesError, PenstockError, SecretError
from penstock.schema import TableName

_CONFIGURATION = frozenset({ConfigError.code, SecretError.code, NoTablesError.code})
_SOURCE = ("PEN-11", "PEN-12", "PEN-14")  # connection and server, slot, tables


def exit_code(code: str) -> int:
    """Return the exit code for an error code: 2 for errors of the configuration, 3 for those of the source or
    this machine, 1 otherwise.
    """
    if code in _CONFIGURATION:
        return 2
    return 3 if code == EnvironmentUnfitError.code or code.startswith(_SOURCE) else 1


class StepState(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    SKIPPED = "skipped"
    """Skipped because an earlier step failed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem or a warning."""

    step: str
    code: str
    """For a problem, the code of the error that would stop a run. For a warning, a name such as `no-match`,
    or the code of an error that would not stop a run.
    """
    what: str
    fix: str | None = None
    tables: tuple[TableName, ...] = ()

    def as_document(self) -> dict[str, object]:
        return {
            "step": self.step,
            "code": self.code,
            "what": self.what,
            "fix": self.fix,
            "tables": [str(table) for table in self.tables],
        }


@dataclass(slots=True)
class Step:
    """One step of a check. `detail` describes its result."""

    name: str
    detail: str = ""
    is_skipped: bool = False
    problems: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)

    def problem(self, found: PenstockError | Blocker, table: TableName | None = None) -> None:
        if isinstance(found, Blocker):
            finding = Finding(self.name, found.code, found.what, found.remedy, found.tables)
        else:
            finding = Finding(
                self.name, found.code, found.message, found.hint, () if table is None else (table,)
            )
        if finding not in self.problems:
            self.problems.append(finding)

    def warn(self, code: str, what: str, fix: str | None = None, tables: Iterable[TableName] = ()) -> None:
        self.warnings.append(Finding(self.name, code, what, fix, tuple(tables)))

    @contextmanager
    def catching(self, table: TableName | None = None) -> Iterator[None]:
        """Context manager that records an error of its block as a problem, so that the check continues."""
        try:
            yield
        except PenstockError as error:
            self.problem(error, table)

    @property
    def state(self) -> StepState:
        if self.problems:
            return StepState.PROBLEM
        if self.is_skipped:
            return StepState.SKIPPED
        return StepState.WARNING if self.warnings else StepState.OK


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The steps of a check, in order."""

    pipeline: str | None
    steps: Sequence[Step]

    @property
    def problems(self) -> list[Finding]:
        return [finding for step in self.steps for finding in step.problems]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for step in self.steps for finding in step.warnings]

    @property
    def exit_code(self) -> int:
        """Exit code: 0 ready to run, 2 problems in the configuration, 3 problems of the source or this
        machine.
        """
        codes = {exit_code(finding.code) for finding in self.problems}
        if 2 in codes:
            return 2
        return 3 if codes else 0

    def as_document(self) -> dict[str, object]:
        """Return the report as a JSON document for programs. The names of its keys are stable."""
        return {
            "pipeline": self.pipeline,
            "ok": not self.problems,
            "exit_code": self.exit_code,
            "steps": [
                {"name": step.name, "state": step.state.value, "detail": step.detail} for step in self.steps
            ],
            "problems": [finding.as_document() for finding in self.problems],
            "warnings": [finding.as_document() for finding in self.warnings],
        }
