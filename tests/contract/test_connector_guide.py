"""The program in the connectors guide runs, and resumes after it was stopped."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.testing.streams import wait_for
from tests.support.contract.postgres_connector import unwritable
from tests.support.contract.wal_harness import WalHarness

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "connectors.md"


def test_the_program_in_the_guide_keeps_its_totals(
    wal: WalHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    program = program.replace("postgresql://cdc@db.example/shop", wal.database.dsn).replace(
        '"totals",', f'"{wal.settings.slot}",'
    )
    (tmp_path / "program.py").write_text(
        program.replace("ready.wait(10)", "ready.wait(0.1)"), encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    wal.database.execute("CREATE TABLE orders (id int PRIMARY KEY, total int)")
    wal.database.execute("INSERT INTO orders SELECT i, i * 10 FROM generate_series(1, 5) i")

    def run_until(condition: Callable[[], bool]) -> None:
        runpy.run_path(str(tmp_path / "program.py"), init_globals={"stop_asked": condition})

    def totals() -> dict[str, int]:
        state = tmp_path / "totals.json"
        return dict(json.loads(state.read_text(encoding="utf-8"))["totals"]) if state.exists() else {}

    def source() -> dict[str, int]:
        return {str(key): total for key, total in wal.database.query("SELECT id, total FROM orders")}

    run_until(lambda: totals() == source())
    confirmed = wal.confirmed
    wal.database.execute("UPDATE orders SET total = total + 1 WHERE id < 3")
    wal.database.execute("DELETE FROM orders WHERE id = 4")
    with ExitStack() as stack:
        obstacles: list[object] = []

        def is_done() -> bool:
            if not obstacles:  # not before the loop: `restore` writes to it
                obstacles.append(stack.enter_context(unwritable(tmp_path / "spool")))
            return totals() == source()

        run_until(is_done)
    assert "not acknowledged: PEN-2000" in caplog.text, "it continues"
    wal.database.execute("TRUNCATE orders")
    wal.database.execute("INSERT INTO orders VALUES (7, 70)")
    run_until(lambda: totals() == {"7": 70})
    assert totals() == source() == {"7": 70}
    wait_for(
        lambda: wal.confirmed > confirmed,
        f"confirmed beyond {confirmed}",
        lambda: wal.confirmed,
        wal.deadline_seconds,
    )
