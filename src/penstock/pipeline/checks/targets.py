"""The part of a check that looks at what earlier runs have left: can a run go on from there? Nothing here imports Spark."""

from __future__ import annotations

from penstock.errors import EnvironmentUnfitError
from penstock.pipeline.checks.findings import Finding, Step
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.epochs import EpochLog
from penstock.pipeline.membership import fail_rejoined, load_memberships
from penstock.pipeline.sinks import open_targets
from penstock.pipeline.standing import check_log, check_origin
from penstock.pipeline.states import TableState
from penstock.pipeline.tables import Selection, fail_unpublished, inspect_pipeline
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.publication import inspect_memberships
from penstock.postgres.slot import inspect_slot
from penstock.postgres.timeline import identify_system


def check_continuing(step: Step, config: PipelineConfig, address: SourceAddress, connection: Connection, selection: Selection) -> None:
    """What a run asks of the targets, the slot and the record of epochs before its first row, asked by the same functions."""
    root = config.sink.root
    try:
        targets = open_targets(config)
        is_new = not root.is_dir()
    except (ImportError, OSError, EnvironmentUnfitError):  # for the step that tries the target to say
        step.is_skipped = True
        return
    with step.catching():
        for problem in targets.find_problems(selection.tables):
            step.problem(problem)
    if is_new:
        step.detail = "nothing has been copied yet"
        return
    last = EpochLog(root, config.pipeline).last()
    tables = inspect_pipeline(selection, targets, last, config.schema_rule, config.existing_policy)
    step.detail = f"{len(tables.filled):,} tables are filled" + (f", recorded up to {last.position}" if last is not None else "")
    for name, policy in tables.foreign.items():
        step.detail += f"; {targets.describe(name)} is not of this pipeline, and existing is {policy}: {policy.consequence}"
    with step.catching():
        slot = inspect_slot(connection, config.slot)
        check_origin(address, config, tables, last, system=identify_system(address), slot=slot)
        if slot is not None:
            published = inspect_memberships(connection, config.publication, tables.owners)
            fail_unpublished(
                tables,
                [source for name in tables.filled for source in tables.sources_of(name) if source not in published],
                targets.describe,
            )
            fail_rejoined(tables, load_memberships(config.state), published, targets.describe)
            check_log(connection, config, tables, targets.describe)
    for name, status in tables.statuses.items():
        if status.state is TableState.FAILED and name not in selection.refused:
            code, _, reason = (status.reason or "").partition(": ")
            step.problems.append(Finding(step.name, code, reason, status.remedy, (name,)))
