"""Roles created for one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.postgres.connection import SourceAddress
from tests.support.fix_postgres import Database


class Roles:
    """Roles belong to the whole server: they are named after the test's database and removed with it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._names: list[str] = []

    def create(self, purpose: str, options: str = "") -> str:
        name = f"{purpose}_{self._database.name}"
        self._database.execute(f"CREATE ROLE {name} LOGIN {options}")
        self._names.append(name)
        return name

    def address(self, role: str) -> SourceAddress:
        return SourceAddress.parse(self._database.dsn.replace("postgres@", f"{role}@"))

    def drop(self) -> None:
        for name in reversed(self._names):
            self._database.execute(f"DROP OWNED BY {name} CASCADE; DROP ROLE {name}")


@pytest.fixture
def roles(database: Database) -> Iterator[Roles]:
    made = Roles(database)
    yield made
    made.drop()
