"""The Delta log of one table: read and committed directly, without a Spark job.

Applied position, key and origin are read from here, and files that executors have already written become part of the table here. The rows
themselves are always read and merged by Spark.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from penstock.errors import SinkError, TargetForeignError
from penstock.foreign import describe
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.base import SnapshotFile, Target
from penstock.sinks.delta.commits import committed_position, held_position
from penstock.sinks.layout import Mode, added_names
from penstock.sinks.origin import Origin

OWNER = "penstock.pipeline"
KEY = "penstock.key"
SOURCE_OID = "penstock.source_oid"
MODE = "penstock.mode"
ORIGIN = "penstock.origin"
COPY = "penstock.copy"


def application_id(pipeline: str, table: TableName) -> str:
    """Under this name the table's transaction log keeps the applied position."""
    return f"penstock/{pipeline}/{table}"


def open_log(path: Path) -> DeltaTable | None:
    """The log as it is now."""
    try:
        return DeltaTable(path)
    except TableNotFoundError:
        return None
    except DeltaError as error:
        raise SinkError(f"the Delta table at {path} cannot be opened: {describe(error)}") from error


def load_target(path: Path, pipeline: str, table: TableName) -> Target | None:
    """How the table stands, or None if there is none. What this pipeline did not write is refused."""
    log = open_log(path)
    if log is None:
        return None
    properties = log.metadata().configuration
    owner = properties.get(OWNER)
    if owner != pipeline:
        written_by = f"pipeline {owner!r}" if owner else "something that is not Penstock"
        raise TargetForeignError(
            f"the Delta table at {path} was written by {written_by}",
            hint="choose another path under sink.delta, or remove that table",
        )
    mode = Mode(properties.get(MODE, Mode.MIRROR.value))
    columns = _own_columns(log, mode)
    return Target(
        table=table,
        source_oid=int(properties[SOURCE_OID]),
        key=tuple(json.loads(properties[KEY])),
        schema=columns,
        applied=_applied(log, path, application_id(pipeline, table)),
        mode=mode,
        origin=_origin(properties.get(ORIGIN), columns),
        copy=properties.get(COPY) or None,
    )


def _origin(text: str | None, columns: pa.Schema) -> Origin | None:
    """None also if it is of other columns: those that a copy was to bring which never came."""
    origin = Origin.parse(text) if text else None
    is_there = origin is not None and all(column.target is None or column.target in columns.names for column in origin.columns.values())
    return origin if is_there else None


def load_applied(path: Path, application: str) -> Position | None:
    """The position that the table holds. None also if there is no table."""
    log = open_log(path)
    return None if log is None else _applied(log, path, application)


def version_at(path: Path, application: str, position: Position) -> int | None:
    """The newest version of the table that holds nothing of ours beyond `position`. None if there is none, or no table.

    What others committed after our commit up to there belongs to it: compaction, or a change behind our back.
    """
    log = open_log(path)
    if log is None:
        return None
    applied = _applied(log, path, application)
    version: int = log.version()
    if applied is not None and applied <= position:
        return version
    for number in range(version, -1, -1):
        if not (path / "_delta_log" / f"{number:020d}.json").exists():
            return None  # the log begins after it
        committed = committed_position(path, application, number)
        if committed is not None and Position.ZERO < committed <= position:
            return version
        if committed is not None:
            version = number - 1
    return None


def _applied(log: DeltaTable, path: Path, application: str) -> Position | None:
    """None also for a table that was begun and never filled."""
    recorded = log.transaction_version(application)
    if recorded is None or recorded == Position.ZERO.value:
        return None
    held = held_position(path, application, log.version())
    position = Position.of(recorded) if held is None else held
    return None if position == Position.ZERO else position


def settle_restored(path: Path, application: str) -> None:
    """Have a table that somebody restored say by itself how far it is, to everybody who asks its log."""
    log = open_log(path)
    applied = None if log is None else _applied(log, path, application)
    if log is not None and log.transaction_version(application) not in (None, (applied or Position.ZERO).value):
        record_position(path, application, applied or Position.ZERO)


def active_files(path: Path) -> set[Path]:
    """The files that the table consists of, as far as they lie right in its directory."""
    log = open_log(path)
    return set() if log is None else {path / uri.rpartition("/")[2] for uri in log.file_uris()}


def adopt_files(path: Path, application: str, files: Sequence[SnapshotFile], position: Position) -> None:
    """Make files that lie in the table's directory part of it, with the position, in one commit. `Position.ZERO` stands for none."""
    now = int(time.time() * 1000)
    actions: list[AddAction | RemoveAction] = [AddAction(file.name, file.bytes, {}, now, True, file.stats) for file in files if file.rows]
    _commit(path, application, actions, position, now)


def record_position(path: Path, application: str, position: Position) -> None:
    """Commit the position alone. `Position.ZERO` stands for none: what the table holds no longer counts as a copy."""
    _commit(path, application, [], position, int(time.time() * 1000))


def _commit(path: Path, application: str, actions: list[AddAction | RemoveAction], position: Position, now: int) -> None:
    log = open_log(path)
    if log is None:
        raise SinkError(f"there is no Delta table at {path} any more")
    properties = CommitProperties(app_transactions=[Transaction(application, position.value, now)])
    # Checkpoints are left to Spark, the one that also writes the deletion vectors that they would have to hold.
    hooks = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
    try:
        log.create_write_transaction(actions, "append", log.schema(), [], commit_properties=properties, post_commithook_properties=hooks)
    except DeltaError as error:
        raise SinkError(f"nothing could be committed to {path}: {describe(error)}") from error


def _own_columns(log: DeltaTable, mode: Mode) -> pa.Schema:
    """The source's columns as the target has them, without those that the mode adds."""
    schema = pa.schema(log.schema().to_arrow())
    return pa.schema([pa.field(field.name, _plain(field.type)) for field in schema if field.name not in added_names(mode)])


def _plain(arrow_type: pa.DataType) -> pa.DataType:
    """delta-rs may answer with the large or view form of a type, and names entries its own way; our own schemas have the plain form."""
    if pa.types.is_large_string(arrow_type) or pa.types.is_string_view(arrow_type):
        return pa.string()
    if pa.types.is_large_binary(arrow_type) or pa.types.is_binary_view(arrow_type):
        return pa.binary()
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type):
        return pa.list_(_plain(arrow_type.value_type))
    if pa.types.is_map(arrow_type):
        return pa.map_(_plain(arrow_type.key_type), _plain(arrow_type.item_type))
    if pa.types.is_struct(arrow_type):
        return pa.struct([(field.name, _plain(field.type)) for field in arrow_type])
    return arrow_type
