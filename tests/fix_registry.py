"""One schema registry for the whole run, started by the first test that asks for it; it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.testing.registry import EmbeddedRegistry


@pytest.fixture(scope="session")
def registry() -> Iterator[EmbeddedRegistry]:
    with EmbeddedRegistry() as running:
        yield running
