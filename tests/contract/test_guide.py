"""The guide's program runs, and does what the guide says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.contract.wal_harness import WalHarness

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "changes-in-python.md"


def test_the_program_in_the_guide_keeps_its_index(wal: WalHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    program = program.replace("postgresql://cdc@db.example/shop", wal.database.dsn).replace('slot="search"', f'slot="{wal.settings.slot}"')
    monkeypatch.chdir(tmp_path)
    wal.database.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    wal.database.execute("INSERT INTO orders VALUES (1, 'one'), (2, 'two')")
    steps = iter(
        ["UPDATE orders SET note = 'zwei' WHERE id = 2", "INSERT INTO orders VALUES (3, 'three')", "DELETE FROM orders WHERE id = 1"]
    )

    def stop_asked() -> bool:
        statement = next(steps, None)
        if statement is not None:
            wal.database.execute(statement)
        return statement is None

    # The first statement has to come from elsewhere: until then the program waits for a change.
    program = program.replace("    for change in changes:", "    stop_asked()\n    for change in changes:")
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    names = runpy.run_path(str(tmp_path / "program.py"), init_globals={"stop_asked": stop_asked})
    assert names["index"] == {2: {"id": 2, "note": "zwei"}, 3: {"id": 3, "note": "three"}}
