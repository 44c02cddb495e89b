"""What polling has to know of a copy: which keys it has, and which versions of rows.

A row that comes after one look, is copied, and goes before the next look, is known to no look; its delete would never be told. And one that
changes after a look and is copied would come again with the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import pyarrow as pa

from penstock.capture.copied_versions import CopiedVersions, KnownCopies
from penstock.capture.known_keys import KnownKeys
from penstock.capture.polling_settings import PollingSettings
from penstock.capture.polling_state import NONE_SEEN
from penstock.capture.polling_tables import inspect_polled
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.chunks import lock_table, reading
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.exported import ExportedSnapshot
from penstock.postgres.moments import Moment, ensure_flushed, export_moment
from penstock.postgres.polled import PolledTable, Window, read_keys_in_order, read_versions
from penstock.postgres.slot import OnWait

_MOST_VERSIONS = 2_000_000
"""Of a table, among rows written since the oldest transaction that is open. With more, some come twice."""


@dataclass(frozen=True, slots=True)
class CopiedTables:
    """Keeps what some tables have at the moment at which they are copied."""

    settings: PollingSettings
    tables: Sequence[CatalogTable]

    def __call__(self, connection: Connection, moment: Moment) -> None:
        if not self.tables:
            return
        # A server that forgets the moment in a crash would give its place, and its transactions' numbers, to others.
        with connect(self.settings.address) as other:
            ensure_flushed(other, moment.position)
        keys, copies = KnownKeys(self.settings.keys), KnownCopies(self.settings.keys)
        for table in inspect_polled(connection, self.settings, self.tables).tables:
            with reading(table.schema.name):
                lock_table(connection, table.schema.name, table.schema.oid, only=not table.is_partitioned)
            if self.settings.rules.deletes:
                keys.store_copied(table.schema, moment.position, read_keys_in_order(connection, table))
            versions = _read_latest(connection, table, moment)
            copies.store(table.schema.oid, CopiedVersions(moment.position, moment.xmin, versions))


def _read_latest(connection: Connection, table: PolledTable, moment: Moment) -> pa.StringArray:
    """The versions that are there although older transactions than theirs are open. Whatever is older yet is known by its number."""
    if moment.xmin == moment.xmax:
        return NONE_SEEN
    return read_versions(connection, replace(table, cursor=None), Window(horizon=moment.xmin), moment, _MOST_VERSIONS)


@dataclass(frozen=True, slots=True)
class CopyExport:
    """An `Export`: a snapshot to copy tables under, and what they have at that moment kept."""

    settings: PollingSettings

    def __call__(
        self, address: SourceAddress, on_wait: OnWait, tables: Sequence[CatalogTable] = ()
    ) -> AbstractContextManager[ExportedSnapshot]:
        return export_moment(address, on_wait, CopiedTables(self.settings, tables), self.settings.turn)
