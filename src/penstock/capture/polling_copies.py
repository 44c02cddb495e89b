"""What polling has to know of a copy: which keys it has.

A row that comes after one look, is copied, and goes before the next look, is known to no look; its delete would never be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from penstock.capture.known_keys import KnownKeys
from penstock.capture.polling_settings import PollingSettings
from penstock.capture.polling_tables import inspect_polled
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.exported import ExportedSnapshot
from penstock.postgres.moments import Moment, export_moment
from penstock.postgres.polled import read_keys_in_order
from penstock.postgres.slot import OnWait


@dataclass(frozen=True, slots=True)
class CopiedKeys:
    """Keeps the keys of some tables at the moment at which they are copied."""

    settings: PollingSettings
    tables: Sequence[CatalogTable]

    def __call__(self, connection: Connection, moment: Moment) -> None:
        if not self.settings.rules.deletes:
            return
        keys = KnownKeys(self.settings.keys)
        for table in inspect_polled(connection, self.settings, self.tables).tables:
            keys.store_copied(table.schema, moment.position, read_keys_in_order(connection, table))


@dataclass(frozen=True, slots=True)
class CopyExport:
    """An `Export`: a snapshot to copy tables under, and their keys at that moment kept."""

    settings: PollingSettings

    def __call__(
        self, address: SourceAddress, on_wait: OnWait, tables: Sequence[CatalogTable] = ()
    ) -> AbstractContextManager[ExportedSnapshot]:
        return export_moment(address, on_wait, CopiedKeys(self.settings, tables))
