"""`PollingCapture` passes the capture suite, by `xmin` and by a column, within the limits that its harness
declares.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.testing.capture_conformance import ChangeCaptureConformance
from tests.support.contract.polling_harness import CursorHarness, PollingHarness, idle
from tests.support.fix_postgres import Database


class TestPollingByXmin(ChangeCaptureConformance):
    @pytest.fixture
    def harness(self, shared_database: Database, tmp_path: Path) -> PollingHarness:
        with idle(PollingHarness(shared_database, tmp_path)) as harness:
            return harness


class TestPollingByColumn(ChangeCaptureConformance):
    @pytest.fixture
    def harness(self, shared_database: Database, tmp_path: Path) -> PollingHarness:
        with idle(CursorHarness(shared_database, tmp_path)) as harness:
            return harness
