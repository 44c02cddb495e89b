"""Whether the source can still give what the targets lack. A run asks before the first row, and a check asks the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.capture.continuity import check_continuity, check_system
from penstock.errors import PositionGapError, SlotMissingError, SystemChangedError
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.epochs import Epoch
from penstock.pipeline.tables import Tables, fail_over_holes
from penstock.position import Position
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.slot import Slot, current_position, inspect_slot
from penstock.postgres.timeline import SystemIdentity
from penstock.schema import TableName
from penstock.spool.reader import SpoolReader


def check_origin(
    address: SourceAddress, config: PipelineConfig, tables: Tables, last: Epoch | None, *, system: SystemIdentity, slot: Slot | None
) -> None:
    """What the targets hold must come from this server, and its slot must be there to go on from."""
    if last is not None:
        held = max(last.position, *tables.filled.values(), Position.ZERO)
        check_system(address, system, SystemIdentity.parse(last.system), held, slot=slot, name=config.slot)
    if tables.filled and slot is None:
        raise slot_missing(config)


def check_log(
    connection: Connection, config: PipelineConfig, tables: Tables, describe: Callable[[TableName], str], *, is_alone: bool = True
) -> None:
    """Everything after what each table holds must still be there to be had. `is_alone`: there are no other tables that go on."""
    slot = inspect_slot(connection, config.slot)
    server = current_position(connection)
    if slot is None:
        raise slot_missing(config)
    ahead = [name for name, applied in tables.filled.items() if applied > server]
    if ahead:
        raise SystemChangedError(
            f"{describe(ahead[0])} holds changes up to {tables.filled[ahead[0]]}, and the server is only at {server}",
            hint="the server was restored to an earlier time: remove the targets and the state directory to start anew",
        )
    fail_over_holes(tables, SpoolReader(config.spool).extent, slot.confirmed, config.slot, describe, is_alone=is_alone)


def over_holes(begin: Position, config: PipelineConfig, held: Mapping[TableName, Position]) -> list[TableName]:
    """The tables after whose position something is gone from the spool, and from the source, which gives what comes after `begin`."""
    ground = SpoolReader(config.spool).extent
    gone = []
    for name, position in held.items():
        try:
            check_continuity(position, ground, begin, config.slot)
        except PositionGapError:
            gone.append(name)
    return gone


def slot_missing(config: PipelineConfig) -> SlotMissingError:
    return SlotMissingError(
        f"slot {config.slot} is gone: what committed since the targets were last updated cannot be had any more",
        hint=f"remove {config.sink.root} and {config.state}, and run again to copy the tables anew",
    )
