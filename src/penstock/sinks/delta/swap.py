"""A resynced Delta table takes the place of the old one by a single commit, which reads and writes no rows.

The shadow's files are linked into the table's directory, under their own names, before the epoch that swaps; that epoch links only what the
shadow has got since. The commit removes every file of the table, adds those of the shadow with their deletion vectors, and has the shadow's
columns, the properties of both, and the position. Until it is made, nothing refers to the links.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from penstock.errors import SinkError
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.base import Target
from penstock.sinks.delta.commit import commit, commit_info, link, removed, transaction
from penstock.sinks.delta.definition import listed
from penstock.sinks.delta.log import COPY, KEY, MODE, ORIGIN, OWNER, SOURCE_OID, load_applied, record_position
from penstock.sinks.delta.paths import table_file
from penstock.sinks.delta.protocol import check_writable, joined_protocol
from penstock.sinks.delta.schema import FIELD_ID, PHYSICAL_NAME
from penstock.sinks.delta.sessions import failing
from penstock.sinks.delta.state import DataFile, DeltaState, Metadata, Unsupported, load_state
from penstock.sinks.delta.vectors import vector_file
from penstock.sinks.delta.writer import ATTEMPTS
from penstock.sinks.names import quoted
from penstock.spool import storage

_log = logging.getLogger(__name__)

RESYNC = "PENSTOCK RESYNC"
"""What the history of a table calls such a commit."""
_MAPPING, _MAX_ID = "delta.columnMapping.mode", "delta.columnMapping.maxColumnId"
_DESCRIBED = (OWNER, KEY, SOURCE_OID, MODE, ORIGIN, "delta.enableDeletionVectors", _MAPPING)
_OURS = (OWNER, KEY, SOURCE_OID, MODE, ORIGIN, COPY, _MAPPING)


@dataclass(frozen=True)
class DeltaSwap:
    """The table at `path`, which is `mine`, and the shadow at `place`, which is `other` and takes its place."""

    path: Path
    place: Path
    application: str
    mine: Target
    other: Target

    def make(self, session_at: Callable[[TableName, Position], SparkSession], position: Position) -> None:
        """`session_at` gives the session of a table, set to write a position."""
        try:
            self._swap(position)
        except Unsupported as reason:
            _log.info("resynced table is rewritten by Delta", extra={"table": str(self.mine.table), "reason": str(reason)})
            self._rewrite(session_at, position)

    def _swap(self, position: Position) -> None:
        for _ in range(ATTEMPTS):
            state, shadow = load_state(self.path), load_state(self.place)
            if state is None or shadow is None:
                raise Unsupported("its log is of a kind that is not known")
            link_files(self.path, self.place)
            if commit(self.path, state.version + 1, plan_swap(self.application, state, shadow, position)):
                return
        raise SinkError(f"others commit to {self.path} faster than a copy can be put in its place")

    def _rewrite(self, session_at: Callable[[TableName, Position], SparkSession], position: Position) -> None:
        """Have Delta write all rows again, into a table that we do not know how to write to."""
        mine, session = self.mine, session_at(self.mine.table, position)
        if mine.applied is not None and mine.applied >= position:
            # Delta leaves out what it takes for a repetition; and a crash right here only means that the table is copied once more.
            record_position(self.path, self.application, Position.ZERO)
        try:
            with failing(self.path, "replacing"):
                self._overwrite(session)
        except Exception:
            self._put_back(session, position)
            raise

    def _overwrite(self, session: SparkSession) -> None:
        mine, other = self.mine, self.other
        rows = session.read.format("delta").load(str(self.place))
        properties: dict[str, str] = {}
        if replace(other, applied=None, copy=None) != replace(mine, applied=None, copy=None):
            found = load_state(self.place)
            properties = {} if found is None else {name: found.metadata.properties.get(name, "") for name in _DESCRIBED}
        set_properties(self.path, session, {**properties, COPY: other.copy or ""})
        rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true").save(str(self.path))

    def _put_back(self, session: SparkSession, position: Position) -> None:
        """Whose it is comes first: a table that has the shadow's copy and is at the position counts as replaced."""
        now = load_applied(self.path, self.application)
        if now != position:
            set_properties(self.path, session, {COPY: self.mine.copy or ""})
            if self.mine.applied is not None and now is None:
                record_position(self.path, self.application, self.mine.applied)


def set_properties(path: Path, session: SparkSession, properties: Mapping[str, str]) -> None:
    with failing(path, "describing"):
        session.sql(f"ALTER TABLE delta.{quoted(str(path))} SET TBLPROPERTIES ({listed(properties)})")


def link_files(path: Path, place: Path) -> None:
    """Link the files of the shadow at `place` into the directory of the table at `path`; those that are there already cost a look."""
    shadow = load_state(place)
    if shadow is None:
        return
    try:
        for file in sorted(_files(place, shadow.files.values())):
            # A VACUUM that began before the swap takes away files that the table does not refer to, if they are old.
            os.utime(file)
            if file.parent != place or not link(file, path / file.name):
                raise Unsupported("its shadow has a file that cannot be linked into its directory")
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise Unsupported("its shadow is on another disk") from error
        raise SinkError(f"the files of a copy cannot be linked into {path}: {error.strerror}") from error


def remove_links(path: Path, place: Path) -> None:
    """Remove links to files of the shadow at `place` that no version of the table at `path` refers to.

    Deletion vectors go only with all data files, where the swap was never made: the log does not name their files in plain text.
    """
    linked = [path / name for name in storage.list_files(place) if _is_link(path / name, place / name)]
    data = {file for file in linked if file.suffix == ".parquet"}
    if not linked:
        return
    try:
        state = load_state(path)
    except Unsupported:  # then there was no swap
        state = None
    spare = data if state is None else data - set(_files(path, state.files.values()))
    named = _log_text(path) if spare else b""
    spare = {file for file in spare if file.name.encode() not in named}
    for file in linked if spare == data else spare:
        with suppress(OSError):  # VACUUM takes away what stays
            file.unlink()


def plan_swap(application: str, state: DeltaState, shadow: DeltaState, position: Position) -> list[Mapping[str, Any]]:
    """What the commit says that comes after `state`. Raises `Unsupported` where Delta itself has to make it."""
    check_writable(state)
    check_writable(shadow)
    protocol = joined_protocol(state.protocol, shadow.protocol)
    metadata = _joined_metadata(state.metadata, shadow.metadata)
    mine, others = ({(file.path, file.vector): file for file in each.files.values()} for each in (state, shadow))
    return [
        commit_info(RESYNC, {"position": str(position)}, adds_only=False),
        transaction(application, position),
        *([] if protocol == state.protocol else [{"protocol": protocol}]),
        {"metaData": metadata},
        *(removed(file) for key, file in mine.items() if key not in others),
        *({"add": {**file.action, "dataChange": True}} for key, file in others.items() if key not in mine),
    ]


def align_columns(place: Path, path: Path) -> None:
    """Give the columns of the shadow at `place`, which has no files yet, the names in files that the table at `path` has for the same ones.

    So the columns of the table stay what they are to those who follow its log.
    """
    try:
        shadow, table = load_state(place), load_state(path)
    except Unsupported:  # then Delta puts the shadow in place, and gives names itself
        return
    aligned = None if shadow is None or table is None else aligned_metadata(shadow.metadata, table.metadata)
    if shadow is not None and aligned is not None and not commit(place, shadow.version + 1, [{"metaData": aligned}]):
        raise SinkError(f"something else writes to {place}")


def aligned_metadata(shadow: Metadata, table: Metadata) -> dict[str, Any] | None:
    """The shadow's columns, under the physical names and numbers that the table has for the same ones; None if they are not mapped."""
    if any(each.properties.get(_MAPPING) != "name" for each in (shadow, table)):
        return None
    known = {field["name"]: field for field in table.fields}
    numbers = count(max(int(each.properties.get(_MAX_ID, "0")) for each in (shadow, table)) + 1)
    fields = []
    for field in shadow.fields:
        same = known.get(field["name"])
        if same is not None and _plain_type(same["type"]) == _plain_type(field["type"]):
            fields.append({**field, "type": same["type"], "metadata": {**field["metadata"], **_mapping(same)}})
        else:
            fields.append(_renumbered(field, numbers))
    schema = json.dumps({"type": "struct", "fields": fields})
    return {**shadow.action, "schemaString": schema, "configuration": {**shadow.properties, _MAX_ID: str(next(numbers) - 1)}}


def _joined_metadata(table: Metadata, shadow: Metadata) -> dict[str, Any]:
    """The shadow's columns, with comments that the table has on columns of the same name, and the properties of both."""
    comments = {field["name"]: field["metadata"]["comment"] for field in table.fields if "comment" in field.get("metadata", {})}
    fields = [
        {**field, "metadata": {"comment": comments[field["name"]], **field["metadata"]}} if field["name"] in comments else field
        for field in shadow.fields
    ]
    ours = {name: shadow.properties[name] for name in _OURS if name in shadow.properties}
    properties = {**shadow.properties, **table.properties, **ours}
    if _MAX_ID in properties:
        properties[_MAX_ID] = str(max(int(each.properties.get(_MAX_ID, "0")) for each in (table, shadow)))
    schema = json.dumps({"type": "struct", "fields": fields})
    return {**table.action, "schemaString": schema, "configuration": properties}


def _files(root: Path, files: Iterable[DataFile]) -> list[Path]:
    """Where the data files, and the files with their deletion vectors, are."""
    found = []
    for file in files:
        found.append(table_file(root, file.path))
        if file.vector is not None and file.vector.storage != "i":
            found.append(vector_file(root, file.vector))
    return list(dict.fromkeys(found))


def _is_link(file: Path, original: Path) -> bool:
    return file.is_file() and file.samefile(original)


def _log_text(path: Path) -> bytes:
    """All commits that are there."""
    log = path / "_delta_log"
    return b"\n".join(storage.read_bytes(log / name) or b"" for name in storage.list_files(log) if name.endswith(".json"))


def _mapping(field: Mapping[str, Any]) -> dict[str, Any]:
    return {name: field["metadata"][name] for name in (FIELD_ID, PHYSICAL_NAME) if name in field["metadata"]}


def _renumbered(document: Any, numbers: Iterator[int]) -> Any:
    """A column, and those inside of it, with numbers that no other column has."""
    if isinstance(document, list):
        return [_renumbered(each, numbers) for each in document]
    if not isinstance(document, Mapping):
        return document
    found = {name: _renumbered(value, numbers) for name, value in document.items()}
    return {**found, FIELD_ID: next(numbers)} if FIELD_ID in found else found


def _plain_type(document: Any) -> Any:
    """A type without the metadata of columns inside of it."""
    if isinstance(document, Mapping):
        return {name: _plain_type(value) for name, value in document.items() if name != "metadata"}
    if isinstance(document, list):
        return [_plain_type(each) for each in document]
    return document
