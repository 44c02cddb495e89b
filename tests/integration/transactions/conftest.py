from __future__ import annotations

from pathlib import Path

import pytest

from penstock.capture import slot_capture as spooling
from tests.support.fix_postgres import Database
from tests.support.transactions.source import TransactionSource, WatchedDecoder


@pytest.fixture
def source(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TransactionSource:
    WatchedDecoder.reset()
    monkeypatch.setattr(spooling, "PgOutputDecoder", WatchedDecoder)
    return TransactionSource(database, tmp_path / "spool")
