"""What the tests of the slot may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fix_postgres import Database
from tests.integration.slot.source import Source


@pytest.fixture
def source(database: Database, tmp_path: Path) -> Source:
    return Source(database, tmp_path / "spool")
