"""What a pipeline has at its source, and the end of it: the slot, the publication, the event trigger, the change table.

Only what is this pipeline's alone is dropped. A slot behind which others read, a publication that the configuration names, an event trigger
while other slots are there: they are left, and named. The targets and the state stay as they are; without its slot the pipeline cannot go
on, only begin anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import PipelineBusyError, SlotBusyError
from penstock.pipeline.config import PipelineConfig
from penstock.postgres.capture_triggers import inspect_change_table, remove
from penstock.postgres.change_table import ChangeTable
from penstock.postgres.connection import Connection, connect
from penstock.postgres.ddl_trigger import drop_trigger, is_installed
from penstock.postgres.publication import drop_publication, inspect_publication
from penstock.postgres.slot import check_idle, drop_slot, inspect_other_slots, inspect_server, inspect_slot
from penstock.spark.lock import is_locked
from penstock.spool.consumers import inspect_consumers
from penstock.spool.layout import SpoolLayout
from penstock.spool.lock import is_locked as is_captured


@dataclass(frozen=True, slots=True)
class DropPlan:
    """What would be dropped, and what stays, with the reason."""

    slot: str | None = None
    publication: str | None = None
    trigger: bool = False
    changes: str | None = None
    """The schema of the change table."""
    kept: tuple[str, ...] = ()

    @property
    def dropped(self) -> list[str]:
        noted = None if self.changes is None else f"{self.changes}, with the triggers of all tables, and what nobody has read"
        named = (("replication slot", self.slot), ("publication", self.publication), ("change table", noted))
        found = [f"{kind} {name}" for kind, name in named if name is not None]
        return [*found, "event triggers penstock_ddl_altered and penstock_ddl_dropped, with schema penstock_ddl"] if self.trigger else found


def plan_drop(config: PipelineConfig) -> DropPlan:
    """Look at the source. Raises if a run, or whoever else reads the slot, is active."""
    _check_stopped(config)
    others = [each.name for each in inspect_consumers(config.spool) if each.name != config.pipeline]
    with connect(config.source.address()) as connection:
        kept: list[str] = []
        slot = _slot(connection, config, others, kept)
        publication = _publication(connection, config, others, kept)
        trigger, changes = _drops_trigger(connection, config, kept), _change_table(connection, config, others, kept)
        return DropPlan(slot, publication, trigger, changes, tuple(kept))


def run_drop(config: PipelineConfig, plan: DropPlan) -> None:
    """Do it, slot first: that is what makes the server keep its log. Doing it twice is doing it once."""
    _check_stopped(config)
    with connect(config.source.address()) as connection:
        if plan.slot is not None and _is_idle(connection, plan.slot):
            drop_slot(connection, plan.slot)
        if plan.publication is not None:
            drop_publication(connection, plan.publication)
        if plan.trigger:
            drop_trigger(connection)
        if plan.changes is not None and _is_unread(connection, plan.changes):
            remove(connection, plan.changes)


def _check_stopped(config: PipelineConfig) -> None:
    if is_locked(config.lock) or is_locked(SpoolLayout(config.spool).consumer_lock(config.pipeline)):
        raise PipelineBusyError(f"pipeline {config.pipeline} runs", hint="stop it, and say it again")
    if is_captured(config.spool):
        raise PipelineBusyError(f"somebody captures into {config.spool}", hint="stop `penstock capture`, or the query, and say it again")


def _slot(connection: Connection, config: PipelineConfig, others: list[str], kept: list[str]) -> str | None:
    found = inspect_slot(connection, config.slot)
    if found is None:
        return None
    if found.database != inspect_server(connection).database:
        kept.append(f"replication slot {found.name}: it is one of database {found.database}")
        return None
    if others:
        kept.append(f"replication slot {found.name}: {', '.join(others)} read behind it (penstock capture --forget takes them out)")
        return None
    _is_idle(connection, found.name)
    return found.name


def _change_table(connection: Connection, config: PipelineConfig, others: list[str], kept: list[str]) -> str | None:
    if config.source.capture != "trigger":
        return None
    found = inspect_change_table(connection, config.slot)
    if found is None:
        return None
    if others:
        kept.append(f"change table {config.slot}: {', '.join(others)} read behind it (penstock capture --forget takes them out)")
    elif not found.is_ours:
        kept.append(f"change table {config.slot}: it belongs to {found.owner}")
    elif _is_unread(connection, config.slot):
        return config.slot
    return None


def _is_unread(connection: Connection, schema: str) -> bool:
    """Raises if somebody reads it; otherwise nobody does until this session ends."""
    holder = ChangeTable(connection, schema).take_lease()
    if holder is not None:
        raise SlotBusyError(f"another process reads the change table {schema}: {holder}", hint="stop it, and say it again")
    return True


def _is_idle(connection: Connection, name: str) -> bool:
    """Whether it is there; raises if somebody reads it."""
    found = inspect_slot(connection, name)
    if found is not None and found.reader is not None:
        check_idle(found)
    return found is not None


def _publication(connection: Connection, config: PipelineConfig, others: list[str], kept: list[str]) -> str | None:
    found = inspect_publication(connection, config.publication)
    if found is None:
        return None
    if config.source.publication is not None:
        kept.append(f"publication {found.name}: the configuration names it, so others may read it too")
    elif others:
        kept.append(f"publication {found.name}: {', '.join(others)} need it")
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
        serves = f"they may serve those who read the slots {', '.join(others)}"
        kept.append(f"event triggers penstock_ddl_altered and penstock_ddl_dropped: {serves}")
    return not others
