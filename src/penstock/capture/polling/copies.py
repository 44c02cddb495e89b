"""Files with the row versions that a copy of a table (a snapshot) contains, so that a consumer does not
receive a row twice.

Suppose that a row changes after one poll and before a copy. The copy contains the new version, and the next
poll finds it too. The poll must return it, since the capture does not know which consumers have the copy, or
whether the copy was completed. So the version is returned at the position of the copy: a consumer that has
the copy skips it, other consumers apply it. At the position of the poll, a consumer that has the copy would
receive the version a second time.

A row that is inserted after one poll, copied, and deleted before the next poll is found by neither poll, so
its delete would be missed. So the keys of the copy are stored too (`known_keys.py`).

There is one file per table and copy, next to the files of known keys. If a file is lost or unreadable, the
only effect is that some rows are delivered twice.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock import storage
from penstock.capture.polling.known_keys import KnownKeys
from penstock.capture.polling.settings import PollingSettings
from penstock.capture.polling.tables import NONE_SEEN, inspect_polled
from penstock.errors import SpoolError
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.chunks import lock_table, reading
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.consistent_read import ConsistentRead, ensure_flushed, export_consistent_read
from penstock.postgres.polled_tables import PolledTable, RowBlock, Window, read_keys_in_order, read_versions
from penstock.postgres.slot import OnWait
from penstock.postgres.snapshot_export import ExportedSnapshot

_log = logging.getLogger(__name__)

_FILE = re.compile(r"(\d+)-([0-9A-F]{16})\.versions")
_HORIZON = b"horizon"


@dataclass(frozen=True, slots=True, eq=False)
class CopiedVersions:
    """The rows that a copy at `position` contains: all rows that transactions before `horizon` wrote, and the
    row versions in `versions`.
    """

    position: Position
    horizon: int
    versions: pa.StringArray

    def has(self, block: RowBlock, at: int) -> pa.BooleanArray:
        """Return for each row of the block whether the copy contains it. `at` is the index of the copy's
        `horizon` among the horizons with which the block was read.
        """
        return pc.or_(block.is_before[at], pc.is_in(block.versions, self.versions))


class KnownCopies:
    """The files with copied row versions of one capture."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def store(self, oid: int, copied: CopiedVersions) -> None:
        """Store, durably, the row versions that a copy of the table contains. Any process may call it while
        no poll runs.
        """
        path = self._path(oid, copied.position)
        schema = pa.schema([pa.field("version", pa.string())], {_HORIZON: str(copied.horizon).encode()})
        storage.ensure_directory(self._directory)
        try:
            with storage.open_output(path) as file:
                pq.write_table(pa.Table.from_arrays([copied.versions], schema=schema), file)
        except (OSError, pa.ArrowException) as error:
            raise SpoolError(
                f"row versions of a copied table cannot be stored: {type(error).__name__}"
            ) from error

    def load(self, after: Position, before: Position) -> dict[int, list[CopiedVersions]]:
        """Return the copies whose positions are between `after` and `before`, the positions of two polls.
        They are grouped by OID of the table, in order of position.
        """
        found: dict[int, list[CopiedVersions]] = {}
        for oid, position in sorted(self._list()):
            if after < position < before:
                copied = self._load(oid, position)
                if copied is not None:
                    found.setdefault(oid, []).append(copied)
        return found

    def forget(self, upto: Position) -> None:
        """Delete the files of copies at or before `upto`, the position of a confirmed poll."""
        for oid, position in self._list():
            if position <= upto:
                storage.delete(self._path(oid, position))

    def _load(self, oid: int, position: Position) -> CopiedVersions | None:
        try:
            table = pq.read_table(self._path(oid, position))
            return CopiedVersions(
                position, int(table.schema.metadata[_HORIZON]), table.column(0).combine_chunks()
            )
        except (OSError, pa.ArrowException, LookupError, TypeError, ValueError) as error:
            facts = {"oid": oid, "position": str(position), "error": type(error).__name__}
            _log.warning("copied versions unreadable, some rows are delivered twice", extra=facts)
            return None

    def _list(self) -> list[tuple[int, Position]]:
        matches = map(_FILE.fullmatch, storage.list_files(self._directory))
        return [(int(match[1]), Position.of(int(match[2], 16))) for match in matches if match is not None]

    def _path(self, oid: int, position: Position) -> Path:
        return self._directory / f"{oid}-{position.value:016X}.versions"


_MOST_VERSIONS = 2_000_000
"""The maximum number of versions that are stored for a copied table, counting rows that were written since
the oldest open transaction. With more of them, some rows are delivered twice.
"""


@dataclass(frozen=True, slots=True)
class CopiedTables:
    """Callback that reads the row versions and keys of tables in the same consistent read as the copy of
    these tables, and stores them.
    """

    settings: PollingSettings
    tables: Sequence[CatalogTable]

    def __call__(self, connection: Connection, read: ConsistentRead) -> None:
        if not self.tables:
            return
        # Wait until the WAL up to this position is on disk. After a crash that loses it, the server would
        # assign the position and the transaction ids a second time.
        with connect(self.settings.address) as other:
            ensure_flushed(other, read.position)
        keys, copies = KnownKeys(self.settings.keys), KnownCopies(self.settings.keys)
        for table in inspect_polled(connection, self.settings, self.tables).tables:
            with reading(table.schema.name):
                lock_table(connection, table.schema.name, table.schema.oid, only=not table.is_partitioned)
            if self.settings.rules.deletes:
                keys.store_copied(table.schema, read.position, read_keys_in_order(connection, table))
            versions = _read_latest(connection, table, read)
            copies.store(table.schema.oid, CopiedVersions(read.position, read.xmin, versions))


def _read_latest(connection: Connection, table: PolledTable, read: ConsistentRead) -> pa.StringArray:
    """Return the visible row versions that were written since the oldest open transaction.

    Older versions are identified by `horizon` alone.
    """
    if read.xmin == read.xmax:
        return NONE_SEEN
    return read_versions(
        connection, replace(table, cursor=None), Window(horizon=read.xmin), read, _MOST_VERSIONS
    )


@dataclass(frozen=True, slots=True)
class CopyExport:
    """An `Export` for polling: it also stores the row versions and keys of the copied tables."""

    settings: PollingSettings

    def __call__(
        self, address: SourceAddress, on_wait: OnWait, tables: Sequence[CatalogTable] = ()
    ) -> AbstractContextManager[ExportedSnapshot]:
        return export_consistent_read(
            address, on_wait, CopiedTables(self.settings, tables), self.settings.poll_lock
        )
