"""A Delta table as a target: its applied position, owner and columns, adoption of snapshot files, and
leftover files.

The log keeps the last version of a transaction id even if RESTORE brings back older rows. So the applied
position is read from Penstock's last commit in the log. If the table was restored after that commit, the
position is that of the restored version.

If the log no longer has that commit, the position is the recorded version of the transaction id. If the table
was also restored, the position comes from a checkpoint.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from typing_extensions import override

from penstock import storage
from penstock.errors import SinkError, TargetFileLostError, TargetForeignError, TargetRewoundError
from penstock.foreign import describe
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.base import DirectoryTargets, SnapshotFile, Target
from penstock.sinks.delta.deletion_vectors import DeletionVector
from penstock.sinks.delta.state import (
    DeltaState,
    DeltaStates,
    Metadata,
    Unsupported,
    is_restore,
    load_checkpointed,
    load_state,
    load_without_files,
    table_schema,
)
from penstock.sinks.lineage import Origin
from penstock.sinks.modes import Mode


def committed_position(path: Path, application: str, version: int) -> Position | None:
    """The position in the commit `version`; None if that commit has no position of this pipeline, or is no
    longer in the log.
    """
    return _position(_actions(path, version, "txn") or [], application)


def has_moved(path: Path, application: str, version: int) -> bool:
    """Whether this pipeline committed after `version`."""
    while (actions := _actions(path, version := version + 1, "txn")) is not None:
        if _position(actions, application) is not None:
            return True
    return False


def held_position(path: Path, application: str, version: int) -> Position | None:
    """The position that the table holds at `version`, according to its commits.

    None if the log does not reach back to the commit with the position, and has no RESTORE. The table then
    holds the last recorded position.
    """
    was_restored = False
    while version >= 0:
        actions = _actions(path, version, "txn", "commitInfo")
        if actions is None:
            return _checkpointed_position(path, application, version + 1) if was_restored else None
        position = _position(actions, application)
        if position is not None:
            return position
        is_back = is_restore(actions)
        was_restored = was_restored or is_back
        version = _restored_version(path, version) if is_back else version - 1
    return Position.ZERO


def _checkpointed_position(path: Path, application: str, version: int) -> Position:
    """The position that the table held at the beginning of its log."""
    try:
        return Position.of(
            load_checkpointed(path, version).transactions.get(application, Position.ZERO.value)
        )
    except (Unsupported, OSError, pa.ArrowException) as error:
        raise _rewound(path) from error


def _restored_version(path: Path, version: int) -> int:
    """The newest version before `version` with the same files. Works for a RESTORE by time and by version."""
    changed: Counter[tuple[str, str | None]] = Counter()
    for number in range(version, -1, -1):
        actions = _actions(path, number, "add", "remove")
        if actions is None:
            break
        for action in actions:
            came, file = ("add" in action, action.get("add") or action["remove"])
            vector = file.get("deletionVector")
            changed[file["path"], DeletionVector.parse(vector).identity if vector else None] += (
                1 if came else -1
            )
        if not any(changed.values()):
            return number - 1
    raise _rewound(path)


def _rewound(path: Path) -> TargetRewoundError:
    return TargetRewoundError(
        f"{path} was restored, and its log does not reach back to the restored version",
        hint=f"penstock tables resync CONFIG TABLE, or remove {path} and restart the pipeline to copy the "
        "table again",
    )


def _position(actions: list[Mapping[str, Any]], application: str) -> Position | None:
    found = (action["txn"] for action in actions if "txn" in action)
    return next((Position.of(each["version"]) for each in found if each["appId"] == application), None)


def _actions(path: Path, version: int, *kinds: str) -> list[Mapping[str, Any]] | None:
    """The actions of these kinds in a commit; None if it does not exist."""
    data = storage.read(path / "_delta_log" / f"{version:020d}.json")
    begins = tuple(f'{{"{kind}"'.encode() for kind in kinds)
    return (
        None if data is None else [json.loads(line) for line in data.splitlines() if line.startswith(begins)]
    )


OWNER = "penstock.pipeline"
KEY = "penstock.key"
SOURCE_OID = "penstock.source_oid"
MODE = "penstock.mode"
ORIGIN = "penstock.origin"
COPY = "penstock.copy"


def application_id(pipeline: str, table: TableName) -> str:
    """The transaction id whose version is the applied position."""
    return f"penstock/{pipeline}/{table}"


@dataclass(frozen=True)
class TableSummary:
    """The newest version of a table: columns and properties, recorded positions, files."""

    version: int
    metadata: Metadata
    position_of: Callable[[str], int | None]
    """Function that returns the last version of a transaction id in the log; `RESTORE` does not change it."""
    files: Callable[[], set[str]]
    """Function that returns the paths or URIs of the data files."""


def load_summary(path: Path) -> TableSummary | None:
    """Load the current state of the table; None if there is no table.

    If Penstock's own reader does not support the log, deltalake reads it.
    """
    try:
        state = load_without_files(path)
    except Unsupported:
        log = open_log(path)
        return None if log is None else _summary_of(log)
    if state is None:
        return None
    return TableSummary(state.version, state.metadata, state.transactions.get, lambda: _files(path))


def _files(path: Path) -> set[str]:
    state = load_state(path)
    return set() if state is None else set(state.files)


def _summary_of(log: DeltaTable) -> TableSummary:
    metadata = Metadata(
        {"schemaString": log.schema().to_json(), "configuration": log.metadata().configuration}
    )
    return TableSummary(log.version(), metadata, log.transaction_version, lambda: set(log.file_uris()))


def open_log(path: Path) -> DeltaTable | None:
    """Open the log with deltalake, which also commits snapshot files and positions (see `_commit`). Returns
    None if there is no table.
    """
    try:
        return DeltaTable(path)
    except TableNotFoundError:
        return None
    except DeltaError as error:
        with suppress(Unsupported):
            load_state(path)  # raises `SinkError` if a file cannot be read, which may pass
        raise TargetFileLostError(
            f"the log of the Delta table at {path} is damaged: {describe(error)}"
        ) from error


def load_target(path: Path, pipeline: str, table: TableName) -> Target | None:
    """Load the state of a target.

    Returns None if there is no table. Raises `TargetForeignError` if this pipeline did not write it.
    """
    summary = load_summary(path)
    if summary is None:
        return None
    properties = summary.metadata.properties
    owner = properties.get(OWNER)
    if owner != pipeline:
        written_by = f"pipeline {owner!r}" if owner else "something that is not Penstock"
        raise TargetForeignError(
            f"the Delta table at {path} was written by {written_by}",
            hint="choose another path under sink.delta, or remove that table",
        )
    mode = Mode.parse(properties.get(MODE))
    columns = _source_columns(path, summary.metadata, mode)
    return Target(
        table=table,
        source_oid=int(properties[SOURCE_OID]),
        key=tuple(json.loads(properties[KEY])),
        schema=columns,
        applied=_applied(summary, path, application_id(pipeline, table)),
        mode=mode,
        origin=_origin(properties.get(ORIGIN), columns),
        copy=properties.get(COPY) or None,
    )


def _origin(text: str | None, columns: pa.Schema) -> Origin | None:
    """Parse the origin of a table from a table property. Returns None if there is none, or if it names
    columns that the table lacks, because it was written for a copy that did not finish.
    """
    origin = Origin.parse(text) if text else None
    is_there = origin is not None and all(
        column.target is None or column.target in columns.names for column in origin.columns.values()
    )
    return origin if is_there else None


def load_applied(path: Path, application: str) -> Position | None:
    """The applied position of the table; None if it has none, or if there is no table."""
    summary = load_summary(path)
    return None if summary is None else _applied(summary, path, application)


def load_with_position(
    states: DeltaStates, path: Path, application: str
) -> tuple[DeltaState | None, Position | None]:
    """Load the current state of the table, and its applied position.

    The state is None if there is no table, or if Penstock's own reader does not support its log.
    """
    try:
        state = states.load(path)
    except Unsupported:
        return None, load_applied(path, application)
    if state is not None and application in state.restored:
        return state, load_applied(path, application)
    applied = 0 if state is None else state.transactions.get(application, 0)
    return state, Position.of(applied) if applied else None


def version_at(path: Path, application: str, position: Position) -> int | None:
    """The newest version in which the pipeline has applied no change after `position`. None if the log no
    longer has that version, or if there is no table.

    The version includes later commits without a position, such as compaction or changes by other writers.
    """
    summary = load_summary(path)
    if summary is None:
        return None
    applied = _applied(summary, path, application)
    version = summary.version
    if applied is not None and applied <= position:
        return version
    for number in range(version, -1, -1):
        if not storage.exists(path / "_delta_log" / f"{number:020d}.json"):
            return None  # the log begins after it
        committed = committed_position(path, application, number)
        if committed is not None and Position.ZERO < committed <= position:
            return version
        if committed is not None:
            version = number - 1
    return None


def _applied(summary: TableSummary, path: Path, application: str) -> Position | None:
    """The applied position; None if the table has none, for example because its first snapshot did not
    finish.
    """
    recorded = summary.position_of(application)
    if recorded is None or recorded == Position.ZERO.value:
        return None
    held = held_position(path, application, summary.version)
    position = Position.of(recorded) if held is None else held
    return None if position == Position.ZERO else position


def settle_restored(path: Path, application: str) -> None:
    """After a RESTORE, commit the position that the table now holds, so that every reader of its log finds
    it.
    """
    summary = load_summary(path)
    applied = None if summary is None else _applied(summary, path, application)
    if summary is not None and summary.position_of(application) not in (
        None,
        (applied or Position.ZERO).value,
    ):
        record_position(path, application, applied or Position.ZERO)


def active_files(path: Path) -> set[Path]:
    """The files of the table that are directly in its directory."""
    summary = load_summary(path)
    return set() if summary is None else {path / file.rpartition("/")[2] for file in summary.files()}


def adopt_files(path: Path, application: str, files: Sequence[SnapshotFile], position: Position) -> None:
    """Add files in the table's directory and set the position, in one commit. `Position.ZERO` stands for no
    position.
    """
    now = int(time.time() * 1000)
    actions: list[AddAction | RemoveAction] = [
        AddAction(file.name, file.bytes, {}, now, True, file.stats) for file in files if file.rows
    ]
    _commit(path, application, actions, position, now)


def record_position(path: Path, application: str, position: Position) -> None:
    """Commit only the position. `Position.ZERO` stands for no position: the table is then no longer a copy of
    the source.
    """
    _commit(path, application, [], position, int(time.time() * 1000))


def _commit(
    path: Path, application: str, actions: list[AddAction | RemoveAction], position: Position, now: int
) -> None:
    log = open_log(path)
    if log is None:
        raise SinkError(f"the Delta table at {path} no longer exists")
    properties = CommitProperties(app_transactions=[Transaction(application, position.value, now)])
    # Checkpoints of deltalake would lack deletion vectors.
    hooks = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
    try:
        log.create_write_transaction(
            actions,
            "append",
            log.schema(),
            [],
            commit_properties=properties,
            post_commithook_properties=hooks,
        )
    except DeltaError as error:
        raise SinkError(f"cannot commit to {path}: {describe(error)}") from error


def _source_columns(path: Path, metadata: Metadata, mode: Mode) -> pa.Schema:
    """The source's columns as the target has them, without the columns that the mode adds."""
    try:
        schema = table_schema(metadata)
    except Unsupported:  # a type that Penstock's own reader does not support
        log = open_log(path)
        assert log is not None
        schema = pa.schema(log.schema().to_arrow())
    return pa.schema(
        [pa.field(field.name, _plain(field.type)) for field in schema if field.name not in mode.added_names]
    )


def _plain(arrow_type: pa.DataType) -> pa.DataType:
    """The plain form of a type. deltalake may return large or view types, and names list entries
    differently.
    """
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


_FILES = "snapshot-*.parquet"
_STAGED = "_staged_commits"
_NAMED = re.compile(rb'["/](snapshot-[0-9A-Za-z-]+\.parquet)"')


def unfinished_files(path: Path) -> set[Path]:
    """Files of unfinished snapshots, which were never part of the table at `path`.

    A file that was part of any readable version is either in the table now or named in a commit of the log.
    """
    found = set(storage.list_paths(path, _FILES)) - active_files(path)
    return found - {path / name for name in _named_files(path)} if found else set()


def remove_attempts(path: Path, files: Iterable[SnapshotFile]) -> None:
    """Remove the files of failed attempts to write the chunks of a snapshot. `files` are the files of the
    snapshot, which are now part of the table.
    """
    prefixes = {file.name.rsplit("-", 2)[0] for file in files}
    found = {attempt for prefix in prefixes for attempt in storage.list_paths(path, f"{prefix}-*.parquet")}
    for attempt in found - active_files(path):
        storage.delete(attempt)


def remove_half_made(path: Path) -> None:
    """Remove a log directory without a first commit, left by a CREATE TABLE that failed: Delta could not read
    such a table.

    All other files are kept.
    """
    log = path / "_delta_log"
    if not storage.is_directory(log):
        return
    found = storage.list_paths(log)
    staged = [entry for entry in found if entry.name == _STAGED and not any(storage.list_paths(entry))]
    unfinished = [log / name for name in storage.list_files(log) if name.startswith(".")]
    if len(found) == len(staged) + len(unfinished):
        for entry in unfinished:
            storage.delete(entry)
        for directory in (*staged, log):
            storage.delete_empty_directory(directory)


def _named_files(path: Path) -> set[str]:
    """The names of all snapshot files that the commits of the log name."""
    names: set[str] = set()
    for commit in storage.list_paths(path / "_delta_log", "*.json"):
        names.update(name.decode() for name in _NAMED.findall(storage.read(commit) or b""))
    return names


class DeltaTargets(DirectoryTargets):
    @override
    def load_target(self, table: TableName) -> Target | None:
        return load_target(self.path(table), self._pipeline, table)
