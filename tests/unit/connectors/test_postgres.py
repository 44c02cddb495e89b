"""`PostgresConnector` without a server."""

from __future__ import annotations

import pytest

from penstock.connectors.postgres import PostgresConnector
from penstock.errors import ConnectorStateError


def test_connector_that_was_closed_and_never_opened_says_so() -> None:
    connector = PostgresConnector()
    connector.close()
    with pytest.raises(ConnectorStateError, match="has been closed") as raised:
        connector.open({})
    assert raised.value.hint == "create another connector"
