"""One schema registry for the whole run, started when a test first needs it; it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.registry import EmbeddedRegistry


@pytest.fixture(scope="session")
def registry() -> Iterator[EmbeddedRegistry]:
    with EmbeddedRegistry() as running:
        yield running
