"""Remove what a pipeline created at its source: slot, publication, event trigger, change table.

Only objects that no other pipeline uses are dropped. Objects that may have other users are kept and reported:
a slot with other consumers, a publication named in the configuration, and an event trigger if other slots
exist. Targets and state are not changed. Without its slot the pipeline cannot continue; it can only start
from a new snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.model import PipelineConfig
from penstock.errors import PipelineBusyError, SlotBusyError
from penstock.pipeline.sources.adapter import source_adapter
from penstock.postgres.capture_triggers import inspect_change_table, remove
from penstock.postgres.change_table import ChangeTable
from penstock.postgres.connection import Connection, connect
from penstock.postgres.publication import drop_publication, drop_trigger, inspect_publication, is_installed
from penstock.postgres.slot import check_idle, drop_slot, inspect_other_slots, inspect_server, inspect_slot
from penstock.spool.manifest import SpoolLayout
from penstock.spool.ownership import is_spool_locked as is_captured
from penstock.spool.retention import inspect_consumers
from penstock.storage.locks import is_locked_by_jvm


@dataclass(frozen=True, slots=True)
class DropPlan:
    """The objects to drop, and the objects to keep, each of these with the reason."""

    slot: str | None = None
    publication: str | None = None
    trigger: bool = False
    changes: str | None = None
    """The schema of the change table."""
    kept: tuple[str, ...] = ()

    @property
    def dropped(self) -> list[str]:
        noted = (
            None
            if self.changes is None
            else f"{self.changes}, with its triggers on all tables and all unread changes"
        )
        named = (("replication slot", self.slot), ("publication", self.publication), ("change table", noted))
        found = [f"{kind} {name}" for kind, name in named if name is not None]
        return (
            [*found, "event triggers penstock_ddl_altered and penstock_ddl_dropped, with schema penstock_ddl"]
            if self.trigger
            else found
        )


def plan_drop(config: PipelineConfig) -> DropPlan:
    """Inspect the source, and plan what to drop. Raises an error if a run, a capture or another reader of the
    slot is active.
    """
    _check_stopped(config)
    others = [each.name for each in inspect_consumers(config.spool) if each.name != config.pipeline]
    with connect(config.source.address()) as connection:
        kept: list[str] = []
        slot = _slot(connection, config, others, kept)
        publication = _publication(connection, config, others, kept)
        trigger, changes = (
            _drops_trigger(connection, config, kept),
            _change_table(connection, config, others, kept),
        )
        return DropPlan(slot, publication, trigger, changes, tuple(kept))


def run_drop(config: PipelineConfig, plan: DropPlan) -> None:
    """Drop the objects of the plan. The slot is first, because it makes the server retain WAL. Idempotent."""
    _check_stopped(config)
    with connect(config.source.address()) as connection:
        if plan.slot is not None and _exists_idle(connection, plan.slot):
            drop_slot(connection, plan.slot)
        if plan.publication is not None:
            drop_publication(connection, plan.publication)
        if plan.trigger:
            drop_trigger(connection)
        if plan.changes is not None:
            _take_lease(connection, plan.changes)
            remove(connection, plan.changes)


def _check_stopped(config: PipelineConfig) -> None:
    if is_locked_by_jvm(config.lock) or is_locked_by_jvm(
        SpoolLayout(config.spool).consumer_lock(config.pipeline)
    ):
        raise PipelineBusyError(
            f"pipeline {config.pipeline} is running", hint="stop it, then run the command again"
        )
    if is_captured(config.spool):
        hint = "stop `penstock capture` or the query, then run the command again"
        raise PipelineBusyError(f"a capture is writing to {config.spool}", hint=hint)


def _slot(connection: Connection, config: PipelineConfig, others: list[str], kept: list[str]) -> str | None:
    found = inspect_slot(connection, config.slot)
    if found is None:
        return None
    if found.database != inspect_server(connection).database:
        kept.append(f"replication slot {found.name}: it belongs to database {found.database}")
        return None
    if others:
        kept.append(
            f"replication slot {found.name}: used by {', '.join(others)} (penstock capture CONFIG "
            "--forget CONSUMER removes one)"
        )
        return None
    _exists_idle(connection, found.name)
    return found.name


def _change_table(
    connection: Connection, config: PipelineConfig, others: list[str], kept: list[str]
) -> str | None:
    name = source_adapter(config).change_table
    found = None if name is None else inspect_change_table(connection, name)
    if found is None:
        return None
    if others:
        kept.append(
            f"change table {config.slot}: used by {', '.join(others)} (penstock capture CONFIG --forget "
            "CONSUMER removes one)"
        )
    elif not found.is_ours:
        kept.append(f"change table {config.slot}: it belongs to {found.owner}")
    else:
        _take_lease(connection, config.slot)
        return config.slot
    return None


def _take_lease(connection: Connection, schema: str) -> None:
    """Take the lease of the change table, which lasts until this session ends. Raises an error if another
    process reads the change table.
    """
    holder = ChangeTable(connection, schema).take_lease()
    if holder is not None:
        hint = "stop it, then run the command again"
        raise SlotBusyError(f"another process reads the change table {schema}: {holder}", hint=hint)


def _exists_idle(connection: Connection, name: str) -> bool:
    """Whether the slot exists. Raises an error if it exists and a process is reading it."""
    found = inspect_slot(connection, name)
    if found is not None and found.reader is not None:
        check_idle(found)
    return found is not None


def _publication(
    connection: Connection, config: PipelineConfig, others: list[str], kept: list[str]
) -> str | None:
    found = inspect_publication(connection, config.publication)
    if found is None:
        return None
    if config.source.publication is not None:
        kept.append(
            f"publication {found.name}: it is named in the configuration, so it may have other readers"
        )
    elif others:
        kept.append(f"publication {found.name}: used by {', '.join(others)}")
    elif not found.is_ours:
        kept.append(f"publication {found.name}: it belongs to {found.owner}")
    else:
        return found.name
    return None


def _drops_trigger(connection: Connection, config: PipelineConfig, kept: list[str]) -> bool:
    if not config.source.event_trigger or not is_installed(connection):
        return False
    others = inspect_other_slots(connection, config.slot)
    if others:
        serves = f"readers of the slots {', '.join(others)} may use them"
        kept.append(f"event triggers penstock_ddl_altered and penstock_ddl_dropped: {serves}")
    return not others
