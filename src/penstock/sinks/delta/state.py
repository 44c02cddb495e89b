"""A Delta table as its log says it is: replayed here, from the newest checkpoint and the commits after it, and kept up with from then on.

`Unsupported` is no failure: it says that the log or the table has something that this module does not know for certain, and that whoever
asked is to leave the table to Delta itself. The newest checkpoint is found by looking, not by the hint in `_last_checkpoint`, which may be
behind. Checkpoints of the second kind are not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import SinkError
from penstock.foreign import describe
from penstock.sinks.delta.paths import name_in_table
from penstock.sinks.delta.vectors import DeletionVector
from penstock.spool import storage

_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet")
_COMMIT = re.compile(r"(\d{20})\.json")
_PARTS = ["metaData", "protocol", "txn", "add"]
_FOREIGN_PARTS = {"checkpointMetadata", "sidecar"}
_RESTORE = "RESTORE"


class Unsupported(Exception):
    """The table is to be left to Delta itself; the words say why. Never leaves this package."""


@dataclass(frozen=True)
class DataFile:
    """One file of the table, as the log has it."""

    action: Mapping[str, Any]

    @property
    def path(self) -> str:
        return str(self.action["path"])

    @property
    def bytes(self) -> int:
        return int(self.action["size"])

    @property
    def stats(self) -> str | None:
        return self.action.get("stats")

    @cached_property
    def vector(self) -> DeletionVector | None:
        found = self.action.get("deletionVector")
        return None if found is None else DeletionVector.parse(found)


@dataclass(frozen=True)
class Metadata:
    """The table's columns and properties."""

    action: Mapping[str, Any]

    @property
    def properties(self) -> Mapping[str, str]:
        return self.action.get("configuration") or {}

    @property
    def partitions(self) -> list[str]:
        return list(self.action.get("partitionColumns") or [])

    @cached_property
    def fields(self) -> list[dict[str, Any]]:
        """The columns as the log writes them: name, type, nullable, metadata."""
        found: list[dict[str, Any]] = json.loads(self.action["schemaString"])["fields"]
        return found


@dataclass(frozen=True)
class DeltaState:
    """One version of a table."""

    version: int
    protocol: Mapping[str, Any]
    metadata: Metadata
    files: Mapping[str, DataFile]
    """By path, as the log writes it."""
    transactions: Mapping[str, int]
    restored: frozenset[str] = frozenset()
    """Of `transactions`, those that were written before the table was restored, and speak of rows that it need not hold."""
    mark: storage.Mark | None = field(default=None, compare=False)
    """Of the last commit's file: a table that was put in the place of this one has another."""


class _Replay:
    """A state that is being put together."""

    def __init__(self, root: Path, begun: DeltaState | None = None) -> None:
        self._root = root
        self.protocol: Mapping[str, Any] | None = begun.protocol if begun else None
        self.metadata: Metadata | None = begun.metadata if begun else None
        self.files: dict[str, DataFile] = dict(begun.files) if begun else {}
        self.transactions: dict[str, int] = dict(begun.transactions) if begun else {}
        self.restored: set[str] = set(begun.restored) if begun else set()

    def commit(self, actions: list[Mapping[str, Any]]) -> None:
        """In a commit, what goes may be the same file as what comes, with another vector; so whatever goes, goes first."""
        if is_restore(actions):
            self.restored = set(self.transactions)
        for action in actions:
            if "remove" in action:
                self._remove(action["remove"])
        for action in actions:
            self.add(action)

    def add(self, action: Mapping[str, Any]) -> None:
        if "add" in action:
            name_in_table(self._root, action["add"]["path"])
            self.files[action["add"]["path"]] = DataFile(action["add"])
        elif "txn" in action:
            self.transactions[action["txn"]["appId"]] = int(action["txn"]["version"])
            self.restored.discard(action["txn"]["appId"])
        elif "metaData" in action:
            self.metadata = Metadata(action["metaData"])
        elif "protocol" in action:
            self.protocol = action["protocol"]

    def _remove(self, action: Mapping[str, Any]) -> None:
        found = self.files.get(action["path"])
        vector = action.get("deletionVector")
        gone = None if vector is None else DeletionVector.parse(vector).identity
        if found is not None and gone == (found.vector.identity if found.vector else None):
            del self.files[action["path"]]

    def parts(self) -> dict[str, Any]:
        if self.protocol is None or self.metadata is None:
            raise Unsupported("its log does not begin with a protocol and columns")
        return {
            "protocol": self.protocol,
            "metadata": self.metadata,
            "files": self.files,
            "transactions": self.transactions,
            "restored": frozenset(self.restored),
        }


class DeltaStates:
    """The tables that were looked at, each as it was then; the next look reads only what was committed since. One table, one thread."""

    def __init__(self) -> None:
        self._known: dict[Path, DeltaState] = {}

    def load(self, path: Path) -> DeltaState | None:
        """The table as it is now; None if there is none."""
        known = self._known.pop(path, None)
        state = load_state(path, known)
        if state is not None:
            self._known[path] = state
        return state


def load_state(path: Path, known: DeltaState | None = None) -> DeltaState | None:
    """The table at `path` as it is now, read anew unless it has become so from `known`."""
    log = path / "_delta_log"
    try:
        if known is not None and known.mark is not None and storage.mark(commit_file(path, known.version)) == known.mark:
            return _advanced(path, known)
        begun = _begun(log)
        return None if begun is None else _advanced(path, begun)
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise SinkError(f"the log of the Delta table at {path} cannot be read: {describe(error)}") from error


def load_version(path: Path, version: int) -> DeltaState | None:
    """The table at `path` as it was at `version`; None if the log does not reach back to it, or does not go that far."""
    try:
        begun = _begun(path / "_delta_log", version)
        state = None if begun is None else _advanced(path, begun, version)
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise SinkError(f"the log of the Delta table at {path} cannot be read: {describe(error)}") from error
    return state if state is not None and state.version == version else None


def commit_file(path: Path, version: int) -> Path:
    return path / "_delta_log" / f"{version:020d}.json"


def is_restore(actions: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a commit brought back the files of an older version, and left the positions as they were."""
    return any(action.get("commitInfo", {}).get("operation") == _RESTORE for action in actions)


def _advanced(path: Path, state: DeltaState, upto: int | None = None) -> DeltaState:
    """After all commits that are there, or up to a version.

    The mark is taken before a file is read: one that is replaced meanwhile is seen next time.
    """
    version, newest = state.version, state.mark
    replay: _Replay | None = None
    while True:
        mark = storage.mark(commit_file(path, version + 1)) if version != upto else None
        data = storage.read_bytes(commit_file(path, version + 1)) if mark is not None else None
        if data is None:
            return state if replay is None else replace(state, version=version, mark=newest, **replay.parts())
        replay = replay or _Replay(path, state)
        replay.commit(_actions(data))
        version, newest = version + 1, mark


def _actions(data: bytes) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in data.split(b"\n") if line.strip()]


def _begun(log: Path, upto: int | None = None) -> DeltaState | None:
    """The newest checkpoint, up to a version, or the first commit; None if there is no log."""
    names = storage.list_files(log)
    numbers = {int(match[1]) for name in names if (match := _COMMIT.fullmatch(name))}
    commits = {number for number in numbers if upto is None or number <= upto}
    version, parts = checkpoint_parts(names, upto)
    if not commits and not parts:
        if any(".checkpoint." in name for name in names):
            raise Unsupported("its log has only a checkpoint of another kind")
        return None
    if not parts and 0 not in commits:
        raise Unsupported("the beginning of its log is gone, and its checkpoint is of another kind")
    replay = _replayed(log, parts)
    if not parts:
        version = 0
        replay.commit(_actions((log / f"{0:020d}.json").read_bytes()))
    if commits and max(commits) > version and not commits >= set(range(version + 1, max(commits) + 1)):
        raise Unsupported("commits are missing after its newest checkpoint")
    return DeltaState(version, mark=storage.mark(log / f"{version:020d}.json"), **replay.parts())


def _replayed(log: Path, parts: Iterable[str]) -> _Replay:
    """What the files of a checkpoint come to."""
    replay = _Replay(log.parent)
    for action in _checkpointed(log, parts):
        replay.add(action)
    return replay


def newest_checkpoint(path: Path) -> int:
    """The version of the newest checkpoint of the table at `path` that we can read; -1 if there is none."""
    return checkpoint_parts(storage.list_files(path / "_delta_log"))[0]


def load_checkpointed(path: Path, version: int) -> DeltaState:
    """The table at `path` as it was at `version`, of which there is a checkpoint."""
    log = path / "_delta_log"
    found, parts = checkpoint_parts(storage.list_files(log), version)
    if found != version:
        raise Unsupported(f"there is no checkpoint of version {version}")
    return DeltaState(version, **_replayed(log, parts).parts())


def checkpoint_parts(names: Iterable[str], upto: int | None = None) -> tuple[int, list[str]]:
    """Version and files of the newest checkpoint that is whole, up to a version; -1 if there is none."""
    found: dict[tuple[int, int], list[str]] = {}
    for name in names:
        if match := _CHECKPOINT.fullmatch(name):
            found.setdefault((int(match[1]), int(match[3] or 0)), []).append(name)
    whole = [key for key, files in found.items() if len(files) == (key[1] or 1) and (upto is None or key[0] <= upto)]
    return (max(whole)[0], sorted(found[max(whole)])) if whole else (-1, [])


def _checkpointed(log: Path, names: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    for name in names:
        file = pq.ParquetFile(log / name)
        columns = set(file.schema_arrow.names)
        foreign = file.read(sorted(columns & _FOREIGN_PARTS)) if columns & _FOREIGN_PARTS else None
        if foreign is not None and any(column.null_count < foreign.num_rows for column in foreign.columns):
            raise Unsupported("its checkpoint is of another kind")
        for part in _PARTS:
            if part in columns:
                yield from ({part: _plain(row)} for row in _rows(file, part))


def _rows(file: pq.ParquetFile, part: str) -> list[dict[str, Any]]:
    """All that the checkpoint has of one kind of action; statistics in another form than JSON are left out."""
    structs = file.read([part]).column(part).combine_chunks().drop_null()
    wanted = [child.name for child in structs.type if not child.name.endswith("_parsed")]
    rows: list[dict[str, Any]] = pa.table({name: structs.field(name) for name in wanted}).to_pylist(maps_as_pydicts="strict")
    return rows


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON would have it: what is null is not there."""
    return {
        name: _plain(value) if isinstance(value, dict) and name in _NESTED else value for name, value in row.items() if value is not None
    }


_NESTED = {"deletionVector", "format"}
