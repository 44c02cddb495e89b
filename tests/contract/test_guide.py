"""The program in the guide runs and prints what the guide says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.support.contract.trigger_harness import TriggerHarness
from tests.support.contract.wal_harness import WalHarness

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "changes-in-python.md"
TRIGGER_GUIDE = GUIDE.with_name("capture-by-triggers.md")
LONG = 5_000
"""Long text that is stored out of line and is not sent by an update that leaves it unchanged."""


def test_the_program_in_the_guide_keeps_its_index(
    wal: WalHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    program = program.replace("postgresql://cdc@db.example/shop", wal.database.dsn).replace(
        'slot="search"', f'slot="{wal.settings.slot}"'
    )
    monkeypatch.chdir(tmp_path)
    wal.database.execute("CREATE TABLE orders (id int PRIMARY KEY, note text, long text)")
    wal.database.execute("ALTER TABLE orders ALTER long SET STORAGE EXTERNAL")
    wal.database.execute(
        f"INSERT INTO orders SELECT i, 'row', repeat(i::text, {LONG}) FROM generate_series(1, 4) i"
    )

    def change_before_snapshot() -> None:
        wal.database.execute("UPDATE orders SET id = 40 WHERE id = 4")  # two changes
        wal.database.execute("INSERT INTO orders VALUES (4, 'again', 'short')")

    def change_after_snapshot() -> None:
        wal.database.execute("UPDATE orders SET note = 'zwei' WHERE id = 2")
        wal.database.execute("UPDATE orders SET id = 30 WHERE id = 3")  # two changes
        wal.database.execute("INSERT INTO orders VALUES (5, 'five')")
        wal.database.execute("DELETE FROM orders WHERE id = 1")

    changes = iter(range(1, 9))
    program = program.replace(
        "    for change in changes:", "    change_after_snapshot()\n    for change in changes:"
    )
    program = program.replace(
        "    for change in capture.snapshot",
        "    change_before_snapshot()\n    for change in capture.snapshot",
    )
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    named = {
        "stop_asked": lambda: next(changes) == 8,
        "change_before_snapshot": change_before_snapshot,
        "change_after_snapshot": change_after_snapshot,
    }
    names = runpy.run_path(str(tmp_path / "program.py"), init_globals=named)
    assert names["index"] == {
        2: {"id": 2, "note": "zwei", "long": "2" * LONG},
        4: {"id": 4, "note": "again", "long": "short"},
        5: {"id": 5, "note": "five", "long": None},
        30: {"id": 30, "note": "row", "long": "3" * LONG},
        40: {"id": 40, "note": "row", "long": "4" * LONG},
    }


def test_the_program_in_the_guide_to_triggers_runs(
    trigger: TriggerHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", TRIGGER_GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    program = program.replace("postgresql://cdc@db.example/shop", trigger.database.dsn).replace(
        "penstock_search", trigger.settings.name
    )
    program = program.replace(
        "    for change in changes:", "    change_orders()\n    for change in changes:"
    ).replace('"orders"', '"orders_noted"')
    monkeypatch.chdir(tmp_path)
    trigger.database.execute("CREATE TABLE orders_noted (id int PRIMARY KEY)")
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    seen: list[str] = []
    named = {
        "change_orders": lambda: trigger.database.execute("INSERT INTO orders_noted VALUES (1), (2)"),
        "print": lambda event: seen.append(str(event.key)),
        "stop_asked": lambda: len(seen) == 2,
    }
    runpy.run_path(str(tmp_path / "program.py"), init_globals=named)
    assert seen == ["{'id': 1}", "{'id': 2}"]
