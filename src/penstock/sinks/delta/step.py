"""One step of a Delta table from a version that we know to the next: what executors found and wrote, committed in one piece.

Positions of deleted rows are written as deletion vectors, and then all of it goes, with the position, into the next commit of the log.
Until that commit nothing of it is part of the table: what a crash leaves behind are files that VACUUM takes away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.errors import PenstockError
from penstock.position import Position
from penstock.sinks.base import SnapshotFile
from penstock.sinks.delta.bounds import load_bounds
from penstock.sinks.delta.commit import EPOCH, added, commit, commit_info, marked, removed, transaction
from penstock.sinks.delta.deletions import mark_files, remove_reports
from penstock.sinks.delta.protocol import can_delete, check_writable
from penstock.sinks.delta.rows import ScanFile, TableFiles, read_within
from penstock.sinks.delta.schema import file_schema, table_schema
from penstock.sinks.delta.state import DeltaState, Unsupported, load_state, load_version
from penstock.sinks.delta.task import EpochPart
from penstock.sinks.delta.vectors import vector_file
from penstock.sinks.executors import Executors
from penstock.sinks.layout import Layout


@dataclass(frozen=True)
class DeltaStep:
    """From `state`, of the table at `path`, to the position `end`."""

    path: Path
    application: str
    layout: Layout
    state: DeltaState
    end: Position
    declared: tuple[dict[str, Any], ...] = field(default=(), kw_only=True)
    """What else the commit says of the table, with which `state` already reckons: its columns and properties, as they are from then on."""

    def check(self, *, deletes: bool) -> None:
        """Raise `Unsupported` where the table is to be left to Delta itself."""
        check_writable(self.state)
        if deletes and not can_delete(self.state):
            raise Unsupported("it has no deletion vectors")
        strange = set(table_schema(self.state.metadata).names) - set(self.layout.schema.names)
        if deletes and strange:
            # A row that goes and comes again would lose what somebody else keeps there; a MERGE leaves it alone.
            raise Unsupported(f"it has a column {sorted(strange)[0]!r} that is not the source's")

    def table(self, *, scanned: bool) -> TableFiles:
        """As executors know it; `scanned`: with the files that are there."""
        names, own = file_schema(self.state.metadata), table_schema(self.state.metadata)
        key = self.layout.identity if scanned else ()
        fields = tuple(names.field(own.get_field_index(name)) for name in key)
        files = self.state.files.values() if scanned else ()
        scans = tuple(ScanFile(file.path, load_bounds(file.stats, fields), file.vector) for file in files)
        return TableFiles(str(self.path), own, names, key, scans)

    def commit(
        self,
        parts: Sequence[EpochPart],
        executors: Executors,
        *,
        adds_only: bool,
        rewritten: Mapping[str, SnapshotFile] | None = None,
    ) -> bool:
        """Make the one commit that follows. False: somebody else made it meanwhile, and the table is to be looked at again.

        Then, and where it cannot be made at all, nothing is left behind. `rewritten` has, for every file that is there, the one that takes
        its place, without the rows that go.
        """
        deletions = [part.deletions for part in parts]
        try:
            if rewritten is None:
                changed, written = self._changed(parts, executors)
            else:
                changed = [removed(file) for file in self.state.files.values()] + added(rewritten.values())
                written = {self.path / file.name for file in rewritten.values()}
        except PenstockError:
            _remove(self.path / part.file.name for part in parts)
            raise
        finally:
            remove_reports(self.path, deletions)
        actions = [
            commit_info(EPOCH, {"position": str(self.end)}, adds_only=adds_only),
            transaction(self.application, self.end),
            *self.declared,
            *changed,
            *added(part.file for part in parts),
        ]
        is_ours = False
        try:
            is_ours = commit(self.path, self.state.version + 1, actions)
        except Unsupported:
            _remove([*written, *(self.path / part.file.name for part in parts)])
            raise
        if not is_ours:
            _remove([*written, *(self.path / part.file.name for part in parts)])
        return is_ours

    def _changed(self, parts: Sequence[EpochPart], executors: Executors) -> tuple[list[dict[str, Any]], set[Path]]:
        """The actions for files that lose rows, and the files of vectors that were written for them."""
        files = self.state.files
        if any(part.emptied for part in parts):
            return [removed(file) for file in files.values()], set()
        scans = (ScanFile(file.path, (), file.vector) for file in files.values())
        marks = mark_files(self.path, scans, [part.deletions for part in parts], executors)
        actions: list[dict[str, Any]] = []
        for mark in marks:
            file = files[mark.path]
            actions += [removed(file)] if mark.vector is None else marked(file, mark.vector, mark.file_rows)
        return actions, {vector_file(self.path, mark.vector) for mark in marks if mark.vector is not None}


def read_small(path: Path, version: int | None, limit_bytes: int) -> pa.Table | None:
    """One version of a small table, or the newest. None: it is larger than that, or has something that only Delta itself can read."""
    try:
        state = load_state(path) if version is None else load_version(path, version)
        if state is None or sum(file.bytes for file in state.files.values()) > limit_bytes:
            return None
        check_writable(state)
        files = tuple(ScanFile(file.path, (), file.vector) for file in state.files.values())
        return read_within(TableFiles(str(path), table_schema(state.metadata), file_schema(state.metadata), (), files), limit_bytes)
    except Unsupported:
        return None


def _remove(files: Iterable[Path]) -> None:
    """They never became part of the table."""
    for file in files:
        file.unlink(missing_ok=True)
