"""Publication, then slot: what must be there before the first change can be captured."""

from __future__ import annotations

from collections.abc import Collection

from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.publication import ensure_publication
from penstock.postgres.slot import Slot, check_server, check_slot, ensure_slot, inspect_server
from penstock.schema import TableName


def ensure_capture(address: SourceAddress, slot: str, publication: str, tables: Collection[TableName]) -> tuple[Slot, list[TableName]]:
    """Create what is missing, in the one order that is safe; gives back the slot, and the tables that were not being published.

    Changes that such a table had so far are in no log of ours. Does nothing when all is there.
    """
    with connect(address) as connection:
        server = inspect_server(connection)
        check_server(server)
        added = ensure_publication(connection, publication, tables)
        found = ensure_slot(address, connection, slot)
        check_slot(found, server.database)
        return found, added
