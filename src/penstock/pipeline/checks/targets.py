"""Check whether a run can continue from the targets and epoch records of earlier runs, without Spark."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from penstock import storage
from penstock.config.model import PipelineConfig
from penstock.errors import EnvironmentUnfitError, PenstockError
from penstock.pipeline.checks.environment import temporary_place
from penstock.pipeline.checks.findings import Finding, Step
from penstock.pipeline.epoch_log import Epoch, EpochLog
from penstock.pipeline.sink_factory import open_targets
from penstock.pipeline.sources.resume_checks import check_log, check_origin, fail_rejoined, load_memberships
from penstock.pipeline.table_selection import Selection, find_indistinct, inspect_pipeline
from penstock.pipeline.table_states import TableState
from penstock.pipeline.tables import Tables, fail_unpublished
from penstock.position import Position
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.membership import inspect_memberships
from penstock.postgres.server import identify_system
from penstock.postgres.slot import inspect_slot
from penstock.schema import TableName
from penstock.sinks.base import Targets
from penstock.storage.temporary import is_case_sensitive


def check_continuing(
    step: Step, config: PipelineConfig, address: SourceAddress, connection: Connection, selection: Selection
) -> None:
    """Inspect targets, slot and epoch log with the functions that a run uses before its first row."""
    root = config.sink.root
    checks = _TargetChecks(step, config, address, connection, selection)
    try:
        is_new = not storage.is_directory(root)
        targets = open_targets(config)
    except (ImportError, OSError):  # the step that writes to the target reports the error
        step.is_skipped = True
        return
    except EnvironmentUnfitError as error:
        what = f"{error.message}: its tables were not checked"
        step.warn(
            "targets-not-asked",
            what,
            "penstock verify starts Spark and compares them, once they have been copied",
        )
        checks.compare_record(lambda _, __: is_case_sensitive(root))
        return
    with step.catching():
        for problem in targets.find_problems(selection.tables):
            step.problem(problem)
    if is_new:
        checks.check_distinct(targets.are_distinct, targets.describe)
        step.detail = "nothing has been copied yet"
    else:
        checks.compare_targets(targets)


@dataclass(frozen=True, slots=True)
class _TargetChecks:
    step: Step
    config: PipelineConfig
    address: SourceAddress
    connection: Connection
    selection: Selection

    @property
    def last(self) -> Epoch | None:
        return EpochLog(self.config.sink.root, self.config.pipeline).last()

    def compare_targets(self, targets: Targets) -> None:
        step, config, last = self.step, self.config, self.last
        try:
            tables = inspect_pipeline(
                self.selection, targets, last, config.schema_rule, config.existing_policy
            )
        except PenstockError as error:  # the epoch log can be read without the targets
            step.problem(error)
            self.compare_record(targets.are_distinct)
            return
        step.detail = f"{len(tables.filled):,} tables are filled" + (
            f", recorded up to {last.position}" if last is not None else ""
        )
        for name, policy in tables.foreign.items():
            step.detail += (
                f"; {targets.describe(name)} was not created by this pipeline, and existing is {policy}: "
                f"{policy.consequence}"
            )
        self._compare_source(tables, last, targets.describe)

    def compare_record(self, are_distinct: Callable[[TableName, TableName], bool]) -> None:
        """Compare the source with the last epoch record. Used if the targets cannot be read."""
        last = self.last
        self.check_distinct(are_distinct, _unnamed)
        if last is None:
            self.step.detail = "no epoch is recorded"
            return
        self.step.detail = f"recorded up to {last.position}"
        recorded = {name: status for name, status in last.tables.items() if name in self.selection.tables}
        for name, status in recorded.items():
            if status.state is TableState.STREAMING:
                recorded[name] = replace(status, applied=max(status.applied or Position.ZERO, last.position))
        self._compare_source(Tables(dict(self.selection.tables), statuses=recorded), last, _unnamed)

    def check_distinct(
        self, are_distinct: Callable[[TableName, TableName], bool], describe: Callable[[TableName], str]
    ) -> None:
        """Refuse tables whose names differ only in case. Writes a file to find out whether the target
        distinguishes case; another step reports a directory that cannot be written.
        """
        with suppress(EnvironmentUnfitError, OSError), temporary_place(self.config.sink.root):
            for name, error in find_indistinct(self.selection.tables, are_distinct, describe).items():
                self.step.problem(error, name)

    def _compare_source(
        self, tables: Tables, last: Epoch | None, describe: Callable[[TableName], str]
    ) -> None:
        step, config, connection = self.step, self.config, self.connection
        with step.catching():
            slot = inspect_slot(connection, config.slot)
            check_origin(self.address, config, tables, last, system=identify_system(self.address), slot=slot)
            if slot is not None:
                published = inspect_memberships(connection, config.publication, tables.owners)
                missing = [
                    source
                    for name in tables.filled
                    for source in tables.sources_of(name)
                    if source not in published
                ]
                fail_unpublished(tables, missing, describe)
                fail_rejoined(tables, load_memberships(config.state), published, describe)
                check_log(connection, config, tables, describe)
        for name, status in tables.statuses.items():
            if status.state is TableState.FAILED and name not in self.selection.refused:
                code, _, reason = (status.reason or "").partition(": ")
                step.problems.append(Finding(step.name, code, reason, status.remedy, (name,)))


def _unnamed(table: TableName) -> str:
    return f"the target of {table}"
