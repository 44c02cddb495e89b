"""Which versions of rows a copy has, for the look that finds them again.

A row that changes after one look and before a copy is in the copy; the look after it finds that very version all the same. It must be given
out, since nobody knows here who has the copy, or whether it was ever finished. But it is given out where the copy stands: whoever has the
copy passes over what lies at or before it, and everybody else takes it.

A file for each table and copy, beside the keys (`known_keys.py`). One that is lost or cannot be read has rows come twice, no more.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.errors import SpoolError
from penstock.position import Position
from penstock.postgres.polled import RowBlock
from penstock.spool import storage

_log = logging.getLogger(__name__)

_FILE = re.compile(r"(\d+)-([0-9A-F]{16})\.versions")
_HORIZON = b"horizon"


@dataclass(frozen=True, slots=True, eq=False)
class CopiedVersions:
    """A copy at `position` has whatever transactions before `horizon` wrote, and these versions."""

    position: Position
    horizon: int
    versions: pa.StringArray

    def has(self, block: RowBlock, at: int) -> pa.BooleanArray:
        """Which rows it has; `horizon` is the one at `at` of those that the block was read with."""
        return pc.or_(block.is_before[at], pc.is_in(block.versions, self.versions))


class KnownCopies:
    """The files of one capture."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def store(self, oid: int, copied: CopiedVersions) -> None:
        """Keep what a copy of the table has, durably. From any process, while nobody looks."""
        path = self._path(oid, copied.position)
        temporary = path.with_name(f"{path.name}.tmp")
        schema = pa.schema([pa.field("version", pa.string())], {_HORIZON: str(copied.horizon).encode()})
        storage.make_directory(self._directory)
        try:
            with storage.create_file(temporary) as file:
                pq.write_table(pa.Table.from_arrays([copied.versions], schema=schema), file)
            storage.sync_file(temporary)
        except (OSError, pa.ArrowException) as error:
            raise SpoolError(f"what a copy has cannot be kept: {type(error).__name__}") from error
        storage.rename(temporary, path)
        storage.sync_directory(self._directory)

    def load(self, after: Position, before: Position) -> dict[int, list[CopiedVersions]]:
        """What is known of the copies between two looks, by table, in their order."""
        found: dict[int, list[CopiedVersions]] = {}
        for oid, position in sorted(self._list()):
            if after < position < before:
                copied = self._load(oid, position)
                if copied is not None:
                    found.setdefault(oid, []).append(copied)
        return found

    def forget(self, upto: Position) -> None:
        """Copies before a look that is known for good."""
        for oid, position in self._list():
            if position <= upto:
                storage.remove_file(self._path(oid, position))

    def _load(self, oid: int, position: Position) -> CopiedVersions | None:
        try:
            table = pq.read_table(self._path(oid, position))
            return CopiedVersions(position, int(table.schema.metadata[_HORIZON]), table.column(0).combine_chunks())
        except (OSError, pa.ArrowException, LookupError, TypeError, ValueError) as error:
            facts = {"oid": oid, "position": str(position), "error": type(error).__name__}
            _log.warning("what a copy has cannot be read, some rows come twice", extra=facts)
            return None

    def _list(self) -> list[tuple[int, Position]]:
        matches = map(_FILE.fullmatch, storage.list_files(self._directory))
        return [(int(match[1]), Position.of(int(match[2], 16))) for match in matches if match is not None]

    def _path(self, oid: int, position: Position) -> Path:
        return self._directory / f"{oid}-{position.value:016X}.versions"
