"""Tables are looked after while epochs go on, and stay what the source is."""

from __future__ import annotations

import pytest

from penstock.pipeline import upkeep
from penstock.sinks.delta_state import newest_checkpoint
from tests.fix_pipeline import MirrorFactory
from tests.fix_postgres import Database
from tests.integration.pipeline.test_online import running
from tests.waiting import wait_for

pytestmark = pytest.mark.spark


def test_files_are_made_one_and_checkpoints_written_beside_the_epochs(
    database: Database, mirror: MirrorFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(upkeep, "_REST", 0)
    database.execute("CREATE TABLE items (id int PRIMARY KEY, n int); INSERT INTO items SELECT i, 0 FROM generate_series(1, 60) i")
    made = mirror(maintenance={"compact_after": 3, "checkpoint_after": 5})
    path = made.config.sink.root / "public" / "items"

    def compactions() -> int:
        return sum("PENSTOCK COMPACTION" in commit.read_text(encoding="utf-8") for commit in (path / "_delta_log").glob("*.json"))

    def is_kept() -> bool:
        """Every row of every file so far may go, while its file is made one with others."""
        database.execute(
            "UPDATE items SET n = n + 1 WHERE id % 7 = floor(random() * 7); DELETE FROM items WHERE id = 1 + floor(random() * 20)"
        )
        database.execute("INSERT INTO items SELECT max(id) + 1, 0 FROM items")
        return compactions() >= 3 and newest_checkpoint(path) >= 5

    with running(made) as run:
        wait_for(lambda: is_kept() or run.failure is not None, "maintenance", lambda: (compactions(), newest_checkpoint(path)), 240)
    made.run_once()
    made.assert_equal("public.items")
