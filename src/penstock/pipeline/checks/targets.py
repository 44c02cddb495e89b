"""The part of a check that looks at what earlier runs have left: can a run go on from there? Nothing here imports Spark."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from penstock.errors import EnvironmentUnfitError, PenstockError
from penstock.pipeline.checks.findings import Finding, Step
from penstock.pipeline.checks.places import made_place
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.epochs import Epoch, EpochLog
from penstock.pipeline.membership import fail_rejoined, load_memberships
from penstock.pipeline.sinks import open_targets
from penstock.pipeline.standing import check_log, check_origin
from penstock.pipeline.states import TableState
from penstock.pipeline.tables import Selection, Tables, fail_unpublished, inspect_pipeline, refuse_indistinct
from penstock.position import Position
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.publication import inspect_memberships
from penstock.postgres.slot import inspect_slot
from penstock.postgres.timeline import identify_system
from penstock.schema import TableName
from penstock.sinks.base import Targets
from penstock.sinks.directories import tells_case_apart


def check_continuing(step: Step, config: PipelineConfig, address: SourceAddress, connection: Connection, selection: Selection) -> None:
    """What a run asks of the targets, the slot and the record of epochs before its first row, asked by the same functions."""
    root = config.sink.root
    looking = _Looking(step, config, address, connection, selection)
    try:
        is_new = not root.is_dir()
        targets = open_targets(config)
    except (ImportError, OSError):  # for the step that tries the target to say
        step.is_skipped = True
        return
    except EnvironmentUnfitError as error:
        what = f"{error.message}: whether its tables are as they were left, and of this pipeline, was not tried"
        step.warn("targets-not-asked", what, "penstock verify starts Spark and compares them, once they have been copied")
        looking.compare_record(lambda _, __: tells_case_apart(root))
        return
    with step.catching():
        for problem in targets.find_problems(selection.tables):
            step.problem(problem)
    if is_new:
        looking.refuse_twins(targets.tells_apart, targets.describe)
        step.detail = "nothing has been copied yet"
    else:
        looking.compare_targets(targets)


@dataclass(frozen=True, slots=True)
class _Looking:
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
            tables = inspect_pipeline(self.selection, targets, last, config.schema_rule, config.existing_policy)
        except PenstockError as error:  # what was recorded of the targets can be looked at without them
            step.problem(error)
            self.compare_record(targets.tells_apart)
            return
        step.detail = f"{len(tables.filled):,} tables are filled" + (f", recorded up to {last.position}" if last is not None else "")
        for name, policy in tables.foreign.items():
            step.detail += f"; {targets.describe(name)} is not of this pipeline, and existing is {policy}: {policy.consequence}"
        self._compare_source(tables, last, targets.describe)

    def compare_record(self, tells_apart: Callable[[TableName, TableName], bool]) -> None:
        """By what the last epoch says of the tables, where they cannot be asked themselves."""
        last = self.last
        self.refuse_twins(tells_apart, _unnamed)
        if last is None:
            self.step.detail = "no epoch is recorded"
            return
        self.step.detail = f"recorded up to {last.position}"
        recorded = {name: status for name, status in last.tables.items() if name in self.selection.tables}
        for name, status in recorded.items():
            if status.state is TableState.STREAMING:
                recorded[name] = replace(status, applied=max(status.applied or Position.ZERO, last.position))
        self._compare_source(Tables(dict(self.selection.tables), statuses=recorded), last, _unnamed)

    def refuse_twins(self, tells_apart: Callable[[TableName, TableName], bool], describe: Callable[[TableName], str]) -> None:
        """Whether a disk tells names apart is seen only where something can be written; that it cannot is for another step to say."""
        with suppress(EnvironmentUnfitError, OSError), made_place(self.config.sink.root):
            for name, error in refuse_indistinct(self.selection.tables, tells_apart, describe).items():
                self.step.problem(error, name)

    def _compare_source(self, tables: Tables, last: Epoch | None, describe: Callable[[TableName], str]) -> None:
        step, config, connection = self.step, self.config, self.connection
        with step.catching():
            slot = inspect_slot(connection, config.slot)
            check_origin(self.address, config, tables, last, system=identify_system(self.address), slot=slot)
            if slot is not None:
                published = inspect_memberships(connection, config.publication, tables.owners)
                missing = [source for name in tables.filled for source in tables.sources_of(name) if source not in published]
                fail_unpublished(tables, missing, describe)
                fail_rejoined(tables, load_memberships(config.state), published, describe)
                check_log(connection, config, tables, describe)
        for name, status in tables.statuses.items():
            if status.state is TableState.FAILED and name not in self.selection.refused:
                code, _, reason = (status.reason or "").partition(": ")
                step.problems.append(Finding(step.name, code, reason, status.remedy, (name,)))


def _unnamed(table: TableName) -> str:
    return f"the target of {table}"
