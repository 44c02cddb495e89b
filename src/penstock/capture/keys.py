"""Asks the source which key a table has now, for the decoder, which needs it of tables with replica identity FULL."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

from typing_extensions import override

from penstock.errors import ConnectionLostError
from penstock.postgres.catalog import inspect_primary_key
from penstock.postgres.connection import Connection, SourceAddress, connect, source_errors
from penstock.postgres.pgoutput.keys import CatalogKey


class KeyCatalog(AbstractContextManager["KeyCatalog"]):
    """One connection, opened by the first question: most databases have no such table, and a thousand must not cost a thousand logins."""

    def __init__(self, address: SourceAddress) -> None:
        self._address = address
        self._stack = ExitStack()
        self._connection: Connection | None = None

    def load(self, oid: int) -> CatalogKey | None:
        """None if there is no such table, any more or for anybody but the transaction that makes it."""
        if self._connection is not None:
            try:
                return self._ask(self._connection, oid)
            except ConnectionLostError:
                # Hours may lie between two questions, and servers end connections that have nothing to say.
                self.close()
        self._connection = self._stack.enter_context(connect(self._address))
        return self._ask(self._connection, oid)

    def close(self) -> None:
        self._connection = None
        self._stack.close()

    @override
    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, connection: Connection, oid: int) -> CatalogKey | None:
        with source_errors(f"asking {self._address.describe()} for a key"):
            return inspect_primary_key(connection, oid)
