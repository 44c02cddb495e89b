"""The program in the guide to records runs, stops anywhere, and ends in what the table holds."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.wal_harness import WalHarness

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "records.md"
LONG = 5_000
"""Characters that are stored out of line, and do not travel with an update that leaves them alone."""


def test_the_program_in_the_records_guide_keeps_its_rows(wal: WalHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    program = program.replace("postgresql://cdc@db.example/shop", wal.database.dsn).replace("public.orders", str(wal.table))
    program = program.replace('"slot": "orders"', f'"slot": "{wal.settings.slot}"')
    monkeypatch.chdir(tmp_path)
    database = wal.database
    database.execute(f"ALTER TABLE {wal.table} ADD long text")
    database.execute(f"ALTER TABLE {wal.table} ALTER long SET STORAGE EXTERNAL")
    database.execute(f"INSERT INTO {wal.table} SELECT i, 'row', repeat(i::text, {LONG}) FROM generate_series(1, 4) i")

    def run(stop_asked: Callable[[], bool]) -> dict[str, object]:
        (tmp_path / "program.py").write_text(program, encoding="utf-8")
        runpy.run_path(str(tmp_path / "program.py"), init_globals={"stop_asked": stop_asked})
        rows: dict[str, object] = json.loads((tmp_path / "place.json").read_text(encoding="utf-8"))["rows"]
        return rows

    def after(turns: int) -> Callable[[], bool]:
        left = iter(range(turns + 1))
        return lambda: next(left) == turns

    assert len(run(after(2))) == 2, "in the middle of the snapshot"
    database.execute(f"DELETE FROM {wal.table} WHERE id = 1")
    assert len(run(after(1 + 3))) == 3, "one turn to begin anew"
    database.execute(f"UPDATE {wal.table} SET id = 30 WHERE id = 3")
    database.execute(f"UPDATE {wal.table} SET note = 'zwei' WHERE id = 2")
    database.execute(f"INSERT INTO {wal.table} VALUES (5, 'five')")
    expected = {str(key): {"id": key, "note": note, "long": long} for key, note, long in database.query(f"SELECT * FROM {wal.table}")}

    turns = iter(range(100))

    def is_equal() -> bool:
        assert next(turns, None) is not None, "it does not end in what the table holds"
        return bool(json.loads((tmp_path / "place.json").read_text(encoding="utf-8"))["rows"] == expected)

    assert run(is_equal) == expected
