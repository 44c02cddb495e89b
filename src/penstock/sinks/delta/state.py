"""State of a Delta table, replayed from the newest checkpoint and the commits after it: files, protocol
features, columns.

The newest checkpoint is found by listing the log; the hint in `_last_checkpoint` may be outdated. V2
checkpoints are not supported.

`Unsupported` is not a failure: the log or the table has something that this module does not support, and
Delta itself must handle the table. A table can require features from its writers. Some features do not affect
added files and deletion vectors. Others matter only if a property or a column uses them. All other features
are unsupported.

Columns are Arrow fields, with the table's logical names or with the physical names in its files. The two
differ if the table maps its columns (`delta.columnMapping.mode`). Physical names, also inside structs, never
change. The order of the columns is the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from penstock import storage
from penstock.errors import SinkError, TargetFileLostError
from penstock.foreign import describe
from penstock.sinks.delta.deletion_vectors import DeletionVector, name_in_table
from penstock.sinks.delta.lookup import Bounds, load_bounds

_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet")
_COMMIT = re.compile(r"(\d{20})\.json")
_PARTS = ["metaData", "protocol", "txn", "add"]
_FOREIGN_PARTS = {"checkpointMetadata", "sidecar"}
_RESTORE = "RESTORE"
_READING = (OSError, ValueError, KeyError, TypeError, pa.ArrowException)

_KnownBounds: TypeAlias = tuple[tuple[pa.Field, ...], Bounds]


class Unsupported(Exception):
    """Only Delta itself can handle the table; the message has the reason. Handled inside this package."""


@dataclass(frozen=True)
class DataFile:
    """One file of the table, as the log describes it."""

    action: Mapping[str, Any]
    _bounds: _KnownBounds | None = field(default=None, init=False, repr=False, compare=False)

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

    def bounds(self, fields: tuple[pa.Field, ...]) -> Bounds:
        """Minimum and maximum of `fields`. Parsed once, and freed together with the file."""
        if self._bounds is None or self._bounds[0] != fields:
            object.__setattr__(self, "_bounds", (fields, load_bounds(self.stats, fields)))
        assert self._bounds is not None
        return self._bounds[1]


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
        """The columns as in the log: name, type, nullable, metadata."""
        found: list[dict[str, Any]] = json.loads(self.action["schemaString"])["fields"]
        return found


@dataclass(frozen=True)
class DeltaState:
    """One version of a table."""

    version: int
    protocol: Mapping[str, Any]
    metadata: Metadata
    files: Mapping[str, DataFile]
    """The data files, by path as the log writes it."""
    transactions: Mapping[str, int]
    restored: frozenset[str] = frozenset()
    """The transaction ids that were last written before a RESTORE of the table. The table may no longer have
    the rows of these transactions.
    """
    mark: storage.FileVersion | None = field(default=None, compare=False)
    """Identifies the file of the last commit, to detect that another table replaced this one."""


class _Replay:
    """A state under construction."""

    def __init__(self, root: Path, begun: DeltaState | None = None, *, with_files: bool = True) -> None:
        self._root = root
        self._with_files = with_files
        self.protocol: Mapping[str, Any] | None = begun.protocol if begun else None
        self.metadata: Metadata | None = begun.metadata if begun else None
        self.files: dict[str, DataFile] = dict(begun.files) if begun else {}
        self.transactions: dict[str, int] = dict(begun.transactions) if begun else {}
        self.restored: set[str] = set(begun.restored) if begun else set()

    def commit(self, actions: list[Mapping[str, Any]]) -> None:
        """Apply the actions of a commit. Removals come first, because a commit may remove a file and add it
        again with another deletion vector.
        """
        if is_restore(actions):
            self.restored = set(self.transactions)
        for action in actions:
            if "remove" in action and self._with_files:
                self._remove(action["remove"])
        for action in actions:
            self.add(action)

    def add(self, action: Mapping[str, Any]) -> None:
        if "add" in action and self._with_files:
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
            raise Unsupported("its log lacks the initial protocol and metadata")
        return {
            "protocol": self.protocol,
            "metadata": self.metadata,
            "files": self.files,
            "transactions": self.transactions,
            "restored": frozenset(self.restored),
        }


class DeltaStates:
    """Cache of loaded tables. Loading a table again reads only the commits since its last load. Each table is
    used by one thread.
    """

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
    """Load the current state of the table at `path`, from `known` if that is an earlier state of the same
    table.
    """
    log = path / "_delta_log"
    try:
        if (
            known is not None
            and known.mark is not None
            and storage.file_version(commit_file(path, known.version)) == known.mark
        ):
            return _apply_commits(path, known)
        begun = _load_start(log)
        return None if begun is None else _apply_commits(path, begun)
    except _READING as error:
        raise unreadable_log(path, error) from error


def load_without_files(path: Path) -> DeltaState | None:
    """Load the current state of the table at `path` without its files, which are most of the log of a large
    table.
    """
    try:
        start = _load_start(path / "_delta_log", with_files=False)
        return None if start is None else _apply_commits(path, start, with_files=False)
    except _READING as error:
        raise unreadable_log(path, error) from error


def load_version(path: Path, version: int) -> DeltaState | None:
    """Load one version; None if the log does not reach back to it or has not reached it."""
    try:
        begun = _load_start(path / "_delta_log", version)
        state = None if begun is None else _apply_commits(path, begun, version)
    except _READING as error:
        raise unreadable_log(path, error) from error
    return state if state is not None and state.version == version else None


def unreadable_log(path: Path, error: Exception) -> SinkError:
    """The error for a log that cannot be read. It is a `TargetFileLostError` if the log could be read but is
    damaged, which is permanent.
    """
    what = f"the log of the Delta table at {path} cannot be read: {describe(error)}"
    return SinkError(what) if isinstance(error, OSError) else TargetFileLostError(what)


def commit_file(path: Path, version: int) -> Path:
    return path / "_delta_log" / f"{version:020d}.json"


def is_restore(actions: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a commit restored the files of an older version, which does not change the recorded
    positions.
    """
    return any(action.get("commitInfo", {}).get("operation") == _RESTORE for action in actions)


def _apply_commits(
    path: Path, state: DeltaState, upto: int | None = None, *, with_files: bool = True
) -> DeltaState:
    """Return the state after the existing commits that follow `state`; with `upto`, only up to that version.

    The file version (`mark`) of a commit is determined before the file is read. So the next load detects a
    file that was replaced in between.
    """
    version, newest = state.version, state.mark
    replay: _Replay | None = None
    while True:
        mark = storage.file_version(commit_file(path, version + 1)) if version != upto else None
        data = storage.read(commit_file(path, version + 1)) if mark is not None else None
        if data is None:
            return state if replay is None else replace(state, version=version, mark=newest, **replay.parts())
        replay = replay or _Replay(path, state, with_files=with_files)
        replay.commit(_actions(data))
        version, newest = version + 1, mark


def _actions(data: bytes) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in data.split(b"\n") if line.strip()]


def _load_start(log: Path, upto: int | None = None, *, with_files: bool = True) -> DeltaState | None:
    """Load the state at the newest checkpoint at or before `upto`, or, if there is none, after the first
    commit. Returns None if there is no log.
    """
    names = storage.list_files(log)
    numbers = {int(match[1]) for name in names if (match := _COMMIT.fullmatch(name))}
    commits = {number for number in numbers if upto is None or number <= upto}
    version, parts = checkpoint_parts(names, upto)
    if not commits and not parts:
        if any(".checkpoint." in name for name in names):
            raise Unsupported("its log has only checkpoints of an unsupported kind")
        return None
    if not parts and 0 not in commits:
        raise Unsupported(
            "the beginning of its log was removed, and its checkpoint is of an unsupported kind"
        )
    replay = _replay_checkpoint(log, parts, with_files=with_files)
    if not parts:
        version = 0
        with storage.open_input(log / f"{0:020d}.json") as first:
            replay.commit(_actions(first.read()))
    if commits and max(commits) > version and not commits >= set(range(version + 1, max(commits) + 1)):
        raise Unsupported("commits are missing after its newest checkpoint")
    return DeltaState(version, mark=storage.file_version(log / f"{version:020d}.json"), **replay.parts())


def _replay_checkpoint(log: Path, parts: Iterable[str], *, with_files: bool = True) -> _Replay:
    """Replay the files of a checkpoint."""
    replay = _Replay(log.parent, with_files=with_files)
    kinds = _PARTS if with_files else [kind for kind in _PARTS if kind != "add"]
    for action in _checkpointed(log, parts, kinds):
        replay.add(action)
    return replay


def newest_checkpoint(path: Path) -> int:
    """The version of the newest checkpoint that Penstock can read; -1 if there is none."""
    return checkpoint_parts(storage.list_files(path / "_delta_log"))[0]


def load_checkpointed(path: Path, version: int) -> DeltaState:
    """Load the table at `version`, which must have a checkpoint."""
    log = path / "_delta_log"
    found, parts = checkpoint_parts(storage.list_files(log), version)
    if found != version:
        raise Unsupported(f"there is no checkpoint of version {version}")
    return DeltaState(version, **_replay_checkpoint(log, parts).parts())


def checkpoint_parts(names: Iterable[str], upto: int | None = None) -> tuple[int, list[str]]:
    """Version and files of the newest complete checkpoint at or before `upto`; version -1 if there
    is none.
    """
    found: dict[tuple[int, int], list[str]] = {}
    for name in names:
        if match := _CHECKPOINT.fullmatch(name):
            found.setdefault((int(match[1]), int(match[3] or 0)), []).append(name)
    whole = [
        key
        for key, files in found.items()
        if len(files) == (key[1] or 1) and (upto is None or key[0] <= upto)
    ]
    return (max(whole)[0], sorted(found[max(whole)])) if whole else (-1, [])


def _checkpointed(log: Path, names: Iterable[str], kinds: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    for name in names:
        file = pq.ParquetFile(log / name)
        columns = set(file.schema_arrow.names)
        foreign = file.read(sorted(columns & _FOREIGN_PARTS)) if columns & _FOREIGN_PARTS else None
        if foreign is not None and any(column.null_count < foreign.num_rows for column in foreign.columns):
            raise Unsupported("its checkpoint is of an unsupported kind")
        for part in kinds:
            if part in columns:
                yield from ({part: _plain(row)} for row in _rows(file, part))


def _rows(file: pq.ParquetFile, part: str) -> list[dict[str, Any]]:
    """All actions of one kind in a checkpoint. Statistics in other formats than JSON are left out."""
    structs = file.read([part]).column(part).combine_chunks().drop_null()
    wanted = [child.name for child in structs.type if not child.name.endswith("_parsed")]
    rows: list[dict[str, Any]] = pa.table({name: structs.field(name) for name in wanted}).to_pylist(
        maps_as_pydicts="strict"
    )
    return rows


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """An action as the log's JSON would have it, without nulls."""
    return {
        name: _plain(value) if isinstance(value, dict) and name in _NESTED else value
        for name, value in row.items()
        if value is not None
    }


_NESTED = {"deletionVector", "format"}

_READER_VERSIONS = range(1, 4)
_WRITER_VERSIONS = range(1, 8)
_SAFE = frozenset(
    {
        "deletionVectors",
        "columnMapping",
        "timestampNtz",
        "vacuumProtocolCheck",
        "allowColumnDefaults",
        "domainMetadata",
    }
)
_SAFE_UNUSED = frozenset(
    {"appendOnly", "invariants", "checkConstraints", "generatedColumns", "changeDataFeed", "identityColumns"}
)
_PROPERTIES = frozenset({"delta.appendOnly", "delta.enableChangeDataFeed", "delta.enableRowTracking"})
_IMPLIED_READER = {2: ("columnMapping",)}
_IMPLIED_WRITER = {
    2: ("appendOnly", "invariants"),
    3: ("checkConstraints",),
    4: ("changeDataFeed", "generatedColumns"),
    5: ("columnMapping",),
    6: ("identityColumns",),
}
CONSTRAINT = "delta.constraints."
_NOT_NULL = "NOT NULL"
_COLUMN_METADATA = ("delta.invariants", "delta.generationExpression", "delta.identity.", _NOT_NULL)


def check_writable(state: DeltaState) -> None:
    """Raise `Unsupported` unless this package can add files to the table correctly."""
    reader, writer = state.protocol["minReaderVersion"], state.protocol["minWriterVersion"]
    if reader not in _READER_VERSIONS or writer not in _WRITER_VERSIONS:
        raise Unsupported(f"it requires protocol versions {reader} and {writer}")
    asked = {*(state.protocol.get("readerFeatures") or ()), *(state.protocol.get("writerFeatures") or ())}
    if unknown := sorted(asked - _SAFE - _SAFE_UNUSED):
        raise Unsupported(f"it has the feature {unknown[0]}")
    if state.metadata.partitions:
        raise Unsupported("it has partitions")
    properties = state.metadata.properties
    for name, value in properties.items():
        if name.startswith(CONSTRAINT) or (name in _PROPERTIES and value.lower() == "true"):
            raise Unsupported(f"it has the property {name}")
    if properties.get("delta.columnMapping.mode", "none") not in ("none", "name"):
        raise Unsupported("its columns are mapped by id")
    for name in _metadata_names(state.metadata.fields):
        if name.startswith(_COLUMN_METADATA):
            raise Unsupported(f"it has a column with {name}")


def joined_protocol(table: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """The protocol for a table that takes the files of another one: the features of both."""
    features = {
        kind: [*dict.fromkeys((*_features(table, kind), *_features(other, kind)))]
        for kind in ("readerFeatures", "writerFeatures")
    }
    if all(set(found) == set(_features(table, kind)) for kind, found in features.items()):
        return table
    if not set(features["writerFeatures"]) >= set(features["readerFeatures"]):
        raise Unsupported("its protocol is not supported")
    return {"minReaderVersion": _READER_VERSIONS[-1], "minWriterVersion": _WRITER_VERSIONS[-1], **features}


def _features(protocol: Mapping[str, Any], kind: str) -> list[str]:
    """The features that a protocol lists, or that an older protocol version implies."""
    listed = protocol.get(kind)
    if listed is not None:
        return list(listed)
    version = protocol["minReaderVersion" if kind == "readerFeatures" else "minWriterVersion"]
    implied = _IMPLIED_READER if kind == "readerFeatures" else _IMPLIED_WRITER
    return [feature for least, names in implied.items() if version >= least for feature in names]


def can_delete(state: DeltaState) -> bool:
    """Whether rows may be removed from files by deletion vectors."""
    features = state.protocol.get("writerFeatures") or ()
    return (
        "deletionVectors" in features
        and state.metadata.properties.get("delta.enableDeletionVectors", "").lower() == "true"
    )


def _metadata_names(found: Any) -> Iterator[str]:
    """The names of all column metadata, at any depth; NOT NULL is included."""
    if isinstance(found, Mapping):
        if isinstance(found.get("metadata"), Mapping):
            yield from found["metadata"]
        if found.get("nullable") is False:
            yield _NOT_NULL
        for name, value in found.items():
            if name != "metadata":
                yield from _metadata_names(value)
    elif isinstance(found, list):
        for each in found:
            yield from _metadata_names(each)


PHYSICAL_NAME = "delta.columnMapping.physicalName"
FIELD_ID = "delta.columnMapping.id"

_TYPES = {
    "string": pa.string(),
    "long": pa.int64(),
    "integer": pa.int32(),
    "short": pa.int16(),
    "byte": pa.int8(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}


_NAMES = {arrow_type: name for name, arrow_type in _TYPES.items()}


def type_document(
    arrow_type: pa.DataType, inner: Callable[[], dict[str, object]] = dict
) -> str | dict[str, object]:
    """A type as the log writes it; `inner` returns the metadata of each nested column."""
    if arrow_type in _NAMES:
        return _NAMES[arrow_type]
    if pa.types.is_decimal128(arrow_type):
        return f"decimal({arrow_type.precision},{arrow_type.scale})"
    if pa.types.is_list(arrow_type):
        return {
            "type": "array",
            "elementType": type_document(arrow_type.value_type, inner),
            "containsNull": True,
        }
    if pa.types.is_map(arrow_type):
        key, value = type_document(arrow_type.key_type, inner), type_document(arrow_type.item_type, inner)
        return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
    if pa.types.is_struct(arrow_type):
        fields = [
            {
                "name": each.name,
                "type": type_document(each.type, inner),
                "nullable": True,
                "metadata": inner(),
            }
            for each in arrow_type
        ]
        return {"type": "struct", "fields": fields}
    raise Unsupported(f"a column of type {arrow_type} cannot be added to it")


def table_schema(metadata: Metadata) -> pa.Schema:
    """The table's columns with their logical names."""
    return pa.schema([_field(field, physical=False) for field in metadata.fields])


def file_schema(metadata: Metadata) -> pa.Schema:
    """The table's columns with their physical names, and with their field ids if they have any."""
    return pa.schema([_field(field, physical=True) for field in metadata.fields])


def _field(found: Mapping[str, Any], *, physical: bool) -> pa.Field:
    metadata = found.get("metadata") or {}
    name = metadata.get(PHYSICAL_NAME, found["name"]) if physical else found["name"]
    number = {"PARQUET:field_id": str(metadata[FIELD_ID])} if physical and FIELD_ID in metadata else None
    return pa.field(name, _type(found["type"], physical=physical), metadata=number)


def _type(found: str | Mapping[str, Any], *, physical: bool) -> pa.DataType:
    if isinstance(found, str):
        if found in _TYPES:
            return _TYPES[found]
        if found.startswith("decimal("):
            precision, scale = found[len("decimal(") : -1].split(",")
            return pa.decimal128(int(precision), int(scale))
    elif found["type"] == "struct":
        return pa.struct([_field(field, physical=physical) for field in found["fields"]])
    elif found["type"] == "array":
        return pa.list_(_type(found["elementType"], physical=physical))
    elif found["type"] == "map":
        return pa.map_(
            _type(found["keyType"], physical=physical), _type(found["valueType"], physical=physical)
        )
    raise Unsupported("it has a column of unsupported type")
