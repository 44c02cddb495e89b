from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.capture.process import SharedSlot
from tests.support.fix_postgres import Database


@pytest.fixture
def shared(database: Database, tmp_path: Path) -> Iterator[SharedSlot]:
    """A slot that several pipelines read; captures of it end with the test."""
    made = SharedSlot(database, tmp_path)
    yield made
    made.close()
