"""Check whether the source can still provide the changes that the targets lack, and that tables were
published without interruption.

The server decides whether to publish a change by the catalog as of that change. So a table that was removed
from the publication between two runs, and added again, has lost changes, although it looks unchanged. The
same holds for a table that had another row filter for some time. To detect both cases, the state directory
records the transaction that added each table. If the state directory is lost, earlier interruptions are not
detected.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from penstock import storage
from penstock.capture.source_checks import check_continuity, check_system
from penstock.config.model import PipelineConfig
from penstock.errors import (
    PositionGapError,
    SlotMissingError,
    SpoolCorruptError,
    SystemChangedError,
    TargetRewoundError,
)
from penstock.pipeline.epoch_log import Epoch
from penstock.pipeline.retries import check_format
from penstock.pipeline.snapshots.state import SnapshotStore
from penstock.pipeline.table_states import TableStatus
from penstock.pipeline.tables import Tables, fail_over_holes
from penstock.position import Position
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.membership import CapturedTables, Membership
from penstock.postgres.server import SystemIdentity
from penstock.postgres.slot import Slot, current_position, inspect_slot
from penstock.schema import TableName
from penstock.spool.reader import SpoolReader
from penstock.storage.locks import exclusive

_FILE = "membership.json"
_LOCK = "membership.lock"
_FORMAT = 1


def load_memberships(state: Path) -> dict[TableName, Membership]:
    """Load the memberships that the last run recorded, without OIDs. Empty before the first run."""
    data = storage.read(state / _FILE)
    if data is None:
        return {}
    try:
        document = json.loads(data)
        check_format(document, _FORMAT, state / _FILE)
        return {TableName.parse(name): Membership(None, str(act)) for name, act in document["tables"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "remove the file if the publication has not been changed since the last run"
        raise SpoolCorruptError(f"{state / _FILE} has invalid content", hint=hint) from error


def save_memberships(state: Path, memberships: Mapping[TableName, Membership]) -> None:
    tables = {str(name): memberships[name].act for name in sorted(memberships)}
    storage.put(state / _FILE, json.dumps({"format": _FORMAT, "tables": tables}).encode())


def update_memberships(state: Path, found: Mapping[TableName, Membership]) -> None:
    """Replace the recorded memberships of some tables. A lock is necessary, because a resync ends in the
    thread of an epoch while the main thread may add tables.
    """
    storage.ensure_directory(state)
    with exclusive(state / _LOCK):
        save_memberships(state, {**load_memberships(state), **found})


def fail_rejoined(
    tables: Tables,
    recorded: Mapping[TableName, Membership],
    found: Mapping[TableName, Membership],
    describe: Callable[[TableName], str],
) -> dict[TableName, Membership]:
    """Fail the filled tables whose membership was interrupted, and return the memberships to record.

    A failed table keeps its recorded membership, so it fails again if this run ends before the state of the
    table is stored. Adds interrupted tables without a complete snapshot to `tables.unpublished`, paused
    tables too. Their unfinished snapshots cannot be continued, because changes after the chunks are missing.
    """
    pending = [
        name for name, status in tables.statuses.items() if status.applied is None and not status.is_over
    ]
    compared = [source for name in (*tables.filled, *pending) for source in tables.sources_of(name)]
    interrupted = interrupted_tables(recorded, found, compared)
    tables.unpublished |= {
        name for name in pending if not interrupted.keys().isdisjoint(tables.sources_of(name))
    }
    for name in tables.filled:
        for source in tables.sources_of(name):
            if source in interrupted:
                error = interrupted_error(source, interrupted[source], name, describe(name))
                tables.statuses[name] = TableStatus.failed(error, tables.statuses[name].applied)
    capturable = set(tables.capturable)
    known = {source for name in tables.statuses for source in tables.sources_of(name)}
    kept = {name: before for name, before in recorded.items() if name in known and name not in capturable}
    return kept | {name: now for name, now in found.items() if name in capturable}


def record_memberships(
    config: PipelineConfig,
    tables: Tables,
    recorded: Mapping[TableName, Membership],
    found: Mapping[TableName, Membership],
    describe: Callable[[TableName], str],
    *,
    is_alone: bool,
) -> None:
    """Fail tables whose membership was interrupted, and record the memberships of the others. `is_alone`:
    the pipeline has no other tables.
    """
    joined = fail_rejoined(tables, recorded, found, describe)
    # First forget unfinished snapshots: once the new memberships are stored, no later run can detect the
    # interruption.
    snapshots = SnapshotStore(config.sink.root, config.pipeline)
    for name in tables.unpublished:
        snapshots.forget(name)
    if is_alone:
        save_memberships(config.state, joined)
    else:
        update_memberships(config.state, joined)


def interrupted_tables(
    recorded: Mapping[TableName, Membership],
    found: Mapping[TableName, Membership],
    tables: Iterable[TableName],
) -> dict[TableName, str]:
    """Return the tables among `tables` whose membership was interrupted, each with the reason."""
    compared = {name: recorded[name] for name in tables if name in recorded}
    return CapturedTables(found).interruptions(compared)


def interrupted_error(source: TableName, reason: str, name: TableName, target: str) -> TargetRewoundError:
    """Return the error for the pipeline table `name`. The interrupted table `source` is its source table, or
    a member of it.
    """
    return TargetRewoundError(
        f"table {source} {reason}, so changes of {source} may be missing",
        hint=f"penstock tables resync CONFIG {name}, or remove {target} and run again to copy the table "
        "again",
    )


def check_origin(
    address: SourceAddress,
    config: PipelineConfig,
    tables: Tables,
    last: Epoch | None,
    *,
    system: SystemIdentity,
    slot: Slot | None,
) -> None:
    """Raise an error if the targets were filled from another server, or the slot no longer exists."""
    if last is not None:
        held = max(last.position, *tables.filled.values(), Position.ZERO)
        check_system(address, system, SystemIdentity.parse(last.system), held, slot=slot, name=config.slot)
    if tables.filled and slot is None:
        raise slot_missing(config)


def check_log(
    connection: Connection,
    config: PipelineConfig,
    tables: Tables,
    describe: Callable[[TableName], str],
    *,
    is_alone: bool = True,
) -> None:
    """Fail tables whose next changes are lost. `is_alone`: no other tables are streaming."""
    slot = inspect_slot(connection, config.slot)
    server = current_position(connection)
    if slot is None:
        raise slot_missing(config)
    ahead = [name for name, applied in tables.filled.items() if applied > server]
    if ahead:
        raise SystemChangedError(
            f"{describe(ahead[0])} holds changes up to {tables.filled[ahead[0]]}, and the server is only "
            f"at {server}",
            hint="the server was restored to an earlier time: remove the targets and the state directory "
            "to start again",
        )
    fail_over_holes(
        tables, SpoolReader(config.spool).extent, slot.confirmed, config.slot, describe, is_alone=is_alone
    )


def over_holes(
    begin: Position, config: PipelineConfig, held: Mapping[TableName, Position]
) -> list[TableName]:
    """Return the tables in `held` for which some changes after their position are neither in the spool nor in
    the source. The source has all changes after `begin`.
    """
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
        f"slot {config.slot} no longer exists: the changes since the targets were last updated are lost",
        hint=f"remove {config.sink.root} and {config.state}, and run again to copy the tables again",
    )
