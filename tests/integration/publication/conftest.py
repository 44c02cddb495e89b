"""A database and its address."""

from __future__ import annotations

import pytest

from penstock.postgres.connection import SourceAddress
from tests.support.fix_postgres import Database


@pytest.fixture
def address(database: Database) -> SourceAddress:
    return SourceAddress.parse(database.dsn)
