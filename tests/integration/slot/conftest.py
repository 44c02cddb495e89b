"""Fixtures of the slot tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.fix_postgres import Database, server_directory
from tests.support.slot.scratch_server import ScratchServer
from tests.support.slot.source import Source


@pytest.fixture
def source(database: Database, tmp_path: Path) -> Source:
    return Source(database, tmp_path / "spool")


@pytest.fixture(scope="session")
def scratch_servers() -> Iterator[dict[int, ScratchServer]]:
    """One server for each version, started at its first use."""
    with ExitStack() as stack:
        yield _ScratchServers(stack)


class _ScratchServers(dict[int, ScratchServer]):
    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, version: int) -> ScratchServer:
        self[version] = ScratchServer(self._stack.enter_context(server_directory()), version)
        self._stack.callback(self[version].postgres.stop, "immediate")
        self[version].postgres.start()
        return self[version]


@pytest.fixture
def scratch_server(
    scratch_servers: dict[int, ScratchServer], postgres_version: int
) -> Iterator[ScratchServer]:
    server = scratch_servers[postgres_version]
    yield server
    server.tidy()


@pytest.fixture
def scratch_source(scratch_server: ScratchServer, tmp_path: Path) -> Iterator[Source]:
    source = Source(scratch_server.create_database(), tmp_path / "spool")
    yield source
    source.database.close()
