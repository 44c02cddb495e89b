"""Replace a Delta table by its resynced copy (the shadow) with one commit, without reading or writing rows.

The shadow's files are hard-linked into the table's directory before the epoch that swaps, so that this epoch
has to link only newer files. The commit removes every file of the table, adds those of the shadow with their
deletion vectors, and sets the position, the columns of the shadow, and the properties of both. Nothing refers
to the links before that commit.
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from penstock import storage
from penstock.errors import SinkError
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.base import Target
from penstock.sinks.dataframes import quoted
from penstock.sinks.delta.commit import ATTEMPTS, commit, commit_info, removed, transaction
from penstock.sinks.delta.definition import listed
from penstock.sinks.delta.deletion_vectors import table_file, vector_file
from penstock.sinks.delta.log import COPY, KEY, MODE, ORIGIN, OWNER, SOURCE_OID, load_applied, record_position
from penstock.sinks.delta.spark_merge import translated_errors
from penstock.sinks.delta.state import (
    FIELD_ID,
    PHYSICAL_NAME,
    DataFile,
    DeltaState,
    Metadata,
    Unsupported,
    check_writable,
    joined_protocol,
    load_state,
)

_log = logging.getLogger(__name__)

RESYNC = "PENSTOCK RESYNC"
"""The operation name of a swap in the table's history."""
_MAPPING, _MAX_ID = "delta.columnMapping.mode", "delta.columnMapping.maxColumnId"
_DESCRIBED = (OWNER, KEY, SOURCE_OID, MODE, ORIGIN, "delta.enableDeletionVectors", _MAPPING)
_OURS = (OWNER, KEY, SOURCE_OID, MODE, ORIGIN, COPY, _MAPPING)


@dataclass(frozen=True)
class DeltaSwap:
    """The swap of the table at `path`, whose state is `mine`, for the shadow at `place`, whose state is
    `other`.
    """

    path: Path
    place: Path
    application: str
    mine: Target
    other: Target

    def make(self, session_at: Callable[[TableName, Position], SparkSession], position: Position) -> None:
        """Replace the table and set its position. If only Delta can do that, Delta writes all rows again.

        `session_at` returns the session of a table that writes a position with its next commit.
        """
        try:
            self._swap(position)
        except Unsupported as reason:
            _log.info(
                "resynced table rewritten by Delta",
                extra={"table": str(self.mine.table), "reason": str(reason)},
            )
            self._rewrite(session_at, position)

    def _swap(self, position: Position) -> None:
        for _ in range(ATTEMPTS):
            state, shadow = load_state(self.path), load_state(self.place)
            if state is None or shadow is None:
                raise Unsupported("its log has an unsupported format")
            link_files(self.path, self.place)
            if commit(self.path, state.version + 1, plan_swap(self.application, state, shadow, position)):
                return
        raise SinkError(
            f"other writers commit to {self.path} faster than it can be replaced by the resynced copy"
        )

    def _rewrite(self, session_at: Callable[[TableName, Position], SparkSession], position: Position) -> None:
        """Let Delta write all rows again, into a table that our own commits do not support."""
        mine, session = self.mine, session_at(self.mine.table, position)
        if mine.applied is not None and mine.applied >= position:
            # Delta skips a commit whose transaction id and version are already in the log. A crash after this
            # line only causes another resync.
            record_position(self.path, self.application, Position.ZERO)
        try:
            with translated_errors(self.path, "replacing"):
                self._overwrite(session)
        except Exception:
            self._restore_position(session, position)
            raise

    def _overwrite(self, session: SparkSession) -> None:
        mine, other = self.mine, self.other
        rows = session.read.format("delta").load(str(self.place))
        properties: dict[str, str] = {}
        if replace(other, applied=None, copy=None) != replace(mine, applied=None, copy=None):
            found = load_state(self.place)
            properties = (
                {}
                if found is None
                else {name: found.metadata.properties.get(name, "") for name in _DESCRIBED}
            )
        set_properties(self.path, session, {**properties, COPY: other.copy or ""})
        rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true").save(str(self.path))

    def _restore_position(self, session: SparkSession, position: Position) -> None:
        """After a failed rewrite, set the table's copy id back, and then its position. The order matters,
        because a table with the shadow's copy id at `position` counts as replaced.
        """
        now = load_applied(self.path, self.application)
        if now != position:
            set_properties(self.path, session, {COPY: self.mine.copy or ""})
            if self.mine.applied is not None and now is None:
                record_position(self.path, self.application, self.mine.applied)


def set_properties(path: Path, session: SparkSession, properties: Mapping[str, str]) -> None:
    with translated_errors(path, "describing"):
        session.sql(f"ALTER TABLE delta.{quoted(str(path))} SET TBLPROPERTIES ({listed(properties)})")


def link_files(path: Path, place: Path) -> None:
    """Link the files of the shadow at `place` into the directory of the table at `path`. Existing links are
    only checked.
    """
    shadow = load_state(place)
    if shadow is None:
        return
    try:
        for file in sorted(_files(place, shadow.files.values())):
            # A VACUUM that began before the swap removes old files that the table does not refer to, so set
            # the modification time to now.
            storage.touch(file)
            if file.parent != place or not storage.link(file, path / file.name):
                raise Unsupported("the resynced copy has a file that cannot be linked into its directory")
    except storage.LinksUnsupportedError as error:
        raise Unsupported("its file system has no hard links") from error
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise Unsupported("the resynced copy is on another file system") from error
        raise SinkError(
            f"cannot link the files of the resynced copy into {path}: {error.strerror}"
        ) from error


def remove_links(path: Path, place: Path) -> None:
    """Remove links to files of the shadow at `place` that no version of the table at `path` refers to.

    The log encodes the names of deletion vector files, so it cannot be searched for such a name. Links to
    these files are removed only if no linked data file is in use, which shows that the swap did not happen.
    """
    linked = [
        path / name for name in storage.list_files(place) if storage.is_link_of(path / name, place / name)
    ]
    data = {file for file in linked if file.suffix == ".parquet"}
    if not linked:
        return
    try:
        state = load_state(path)
    except Unsupported:  # then no swap happened
        state = None
    spare = data if state is None else data - set(_files(path, state.files.values()))
    named = _log_text(path) if spare else b""
    spare = {file for file in spare if file.name.encode() not in named}
    for file in linked if spare == data else spare:
        with suppress(OSError):  # VACUUM removes it later
            storage.delete(file)


def plan_swap(
    application: str, state: DeltaState, shadow: DeltaState, position: Position
) -> list[Mapping[str, Any]]:
    """The actions of the commit that swaps the shadow in. Raises `Unsupported` if only Delta can make it."""
    check_writable(state)
    check_writable(shadow)
    protocol = joined_protocol(state.protocol, shadow.protocol)
    metadata = _joined_metadata(state.metadata, shadow.metadata)
    mine, others = (
        {(file.path, file.vector): file for file in each.files.values()} for each in (state, shadow)
    )
    return [
        commit_info(RESYNC, {"position": str(position)}, adds_only=False),
        transaction(application, position),
        *([] if protocol == state.protocol else [{"protocol": protocol}]),
        {"metaData": metadata},
        *(removed(file) for key, file in mine.items() if key not in others),
        *({"add": {**file.action, "dataChange": True}} for key, file in others.items() if key not in mine),
    ]


def align_columns(place: Path, path: Path) -> None:
    """Give the columns of the empty shadow at `place` the physical names of the same columns of the table at
    `path`.

    Readers that follow the table's log then see the same columns after the swap.
    """
    try:
        shadow, table = load_state(place), load_state(path)
    except Unsupported:  # then Delta rewrites the rows and assigns names itself
        return
    aligned = None if shadow is None or table is None else aligned_metadata(shadow.metadata, table.metadata)
    if (
        shadow is not None
        and aligned is not None
        and not commit(place, shadow.version + 1, [{"metaData": aligned}])
    ):
        raise SinkError(f"cannot set the columns of {place}: another process writes to it")


def aligned_metadata(shadow: Metadata, table: Metadata) -> dict[str, Any] | None:
    """The shadow's metadata, in which its columns have the physical names and ids of the same columns of the
    table. None if one of the two does not map its columns.
    """
    if any(each.properties.get(_MAPPING) != "name" for each in (shadow, table)):
        return None
    known = {field["name"]: field for field in table.fields}
    numbers = count(max(int(each.properties.get(_MAX_ID, "0")) for each in (shadow, table)) + 1)
    fields = []
    for field in shadow.fields:
        same = known.get(field["name"])
        if same is not None and _plain_type(same["type"]) == _plain_type(field["type"]):
            fields.append(
                {**field, "type": same["type"], "metadata": {**field["metadata"], **_mapping(same)}}
            )
        else:
            fields.append(_renumbered(field, numbers))
    schema = json.dumps({"type": "struct", "fields": fields})
    return {
        **shadow.action,
        "schemaString": schema,
        "configuration": {**shadow.properties, _MAX_ID: str(next(numbers) - 1)},
    }


def _joined_metadata(table: Metadata, shadow: Metadata) -> dict[str, Any]:
    """The metadata of the table after the swap: the shadow's columns, with the table's comments on columns of
    the same name, and the properties of both.
    """
    comments = {
        field["name"]: field["metadata"]["comment"]
        for field in table.fields
        if "comment" in field.get("metadata", {})
    }
    fields = [
        {**field, "metadata": {"comment": comments[field["name"]], **field["metadata"]}}
        if field["name"] in comments
        else field
        for field in shadow.fields
    ]
    ours = {name: shadow.properties[name] for name in _OURS if name in shadow.properties}
    properties = {**shadow.properties, **table.properties, **ours}
    if _MAX_ID in properties:
        properties[_MAX_ID] = str(max(int(each.properties.get(_MAX_ID, "0")) for each in (table, shadow)))
    schema = json.dumps({"type": "struct", "fields": fields})
    return {**table.action, "schemaString": schema, "configuration": properties}


def _files(root: Path, files: Iterable[DataFile]) -> list[Path]:
    """The paths of data files, and of the files with their deletion vectors."""
    found = []
    for file in files:
        found.append(table_file(root, file.path))
        if file.vector is not None and file.vector.storage != "i":
            found.append(vector_file(root, file.vector))
    return list(dict.fromkeys(found))


def _log_text(path: Path) -> bytes:
    """The text of all commits in the log."""
    log = path / "_delta_log"
    return b"\n".join(
        storage.read(log / name) or b"" for name in storage.list_files(log) if name.endswith(".json")
    )


def _mapping(field: Mapping[str, Any]) -> dict[str, Any]:
    return {name: field["metadata"][name] for name in (FIELD_ID, PHYSICAL_NAME) if name in field["metadata"]}


def _renumbered(document: Any, numbers: Iterator[int]) -> Any:
    """A column and its nested columns with new, unused ids."""
    if isinstance(document, list):
        return [_renumbered(each, numbers) for each in document]
    if not isinstance(document, Mapping):
        return document
    found = {name: _renumbered(value, numbers) for name, value in document.items()}
    return {**found, FIELD_ID: next(numbers)} if FIELD_ID in found else found


def _plain_type(document: Any) -> Any:
    """A type without the metadata of nested columns."""
    if isinstance(document, Mapping):
        return {name: _plain_type(value) for name, value in document.items() if name != "metadata"}
    if isinstance(document, list):
        return [_plain_type(each) for each in document]
    return document
