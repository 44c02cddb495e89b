"""Every program in the records guide runs; the one that stores rows may stop anywhere and ends equal to the
table.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.testing.streams import wait_for
from tests.support.contract.wal_harness import WalHarness

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "records.md"
LONG = 5_000
"""Long text that is stored out of line and is not sent by an update that leaves it unchanged."""


@pytest.fixture
def programs(wal: WalHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every block of the guide, for the tables of the test."""
    monkeypatch.chdir(tmp_path)
    programs = []
    for number, text in enumerate(
        re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    ):
        program = text.replace("postgresql://cdc@db.example/shop", wal.database.dsn).replace(
            "public.orders", str(wal.table)
        )
        program = program.replace('"slot": "orders"', f'"slot": "{wal.settings.slot}"')
        program = program.replace('slot="orders"', f'slot="{wal.settings.slot}"')
        program = program.replace('"public", "orders"', f'"{wal.table.schema}", "{wal.table.name}"')
        program = program.replace('publication="orders"', f'publication="{wal.settings.publication}"')
        programs.append(tmp_path / f"program{number}.py")
        programs[-1].write_text(program, encoding="utf-8")
    return programs


def test_every_program_in_the_records_guide_is_tried(programs: list[Path]) -> None:
    assert len(programs) == 3


def test_snapshot_in_the_records_guide_shows_every_row(wal: WalHarness, programs: list[Path]) -> None:
    wal.database.execute(f"INSERT INTO {wal.table} SELECT i, 'row ' || i FROM generate_series(-1, 3) i")
    shown: list[tuple[object, object]] = []
    runpy.run_path(
        str(programs[1]), init_globals={"show": lambda key, row: shown.append((key["id"], row["note"]))}
    )
    assert sorted(shown, key=repr) == sorted(((each, f"row {each}") for each in range(-1, 4)), key=repr)


def test_buffer_in_the_records_guide_returns_unconfirmed_records_again(
    wal: WalHarness, programs: list[Path]
) -> None:
    keys = iter(range(1, 7))

    def stop_after(turns: int) -> Callable[[], bool]:
        """Each run commits what the next one will read."""
        left = iter(range(turns + 1))

        def stop_asked() -> bool:
            if next(left) == turns:
                wal.database.execute(f"INSERT INTO {wal.table} VALUES (1{next(keys)}, 'not read')")
                return True
            wal.database.execute(f"INSERT INTO {wal.table} VALUES ({next(keys)}, 'x')")
            return False

        return stop_asked

    shown: list[object] = []
    for turns in (2, 2):
        runpy.run_path(
            str(programs[2]),
            init_globals={"show": lambda key, row: shown.append(key["id"]), "stop_asked": stop_after(turns)},
        )
    assert shown == [1, 2, 13, 4], "13 was not read by the first run, and 5 was not by the second"


def test_the_program_in_the_records_guide_keeps_its_rows(
    wal: WalHarness, tmp_path: Path, programs: list[Path]
) -> None:
    database = wal.database
    database.execute(f"ALTER TABLE {wal.table} ADD long text")
    database.execute(f"ALTER TABLE {wal.table} ALTER long SET STORAGE EXTERNAL")
    database.execute(
        f"INSERT INTO {wal.table} SELECT i, 'row', repeat(i::text, {LONG}) FROM generate_series(1, 4) i"
    )

    def run(stop_asked: Callable[[], bool]) -> dict[str, object]:
        runpy.run_path(str(programs[0]), init_globals={"stop_asked": stop_asked})
        rows: dict[str, object] = json.loads((tmp_path / "place.json").read_text(encoding="utf-8"))["rows"]
        return rows

    def after(turns: int) -> Callable[[], bool]:
        left = iter(range(turns + 1))
        return lambda: next(left) == turns

    assert len(run(after(2))) == 2, "in the middle of the snapshot"
    database.execute(f"DELETE FROM {wal.table} WHERE id = 1")
    assert len(run(after(1 + 3))) == 3, "one more run to start again"
    database.execute(f"UPDATE {wal.table} SET id = 30 WHERE id = 3")
    database.execute(f"UPDATE {wal.table} SET note = 'zwei' WHERE id = 2")
    database.execute(f"INSERT INTO {wal.table} VALUES (5, 'five')")
    expected = {
        str(key): {"id": key, "note": note, "long": long}
        for key, note, long in database.query(f"SELECT * FROM {wal.table}")
    }

    turns = iter(range(100))

    def is_equal() -> bool:
        assert next(turns, None) is not None, "it does not end with the rows of the table"
        return bool(json.loads((tmp_path / "place.json").read_text(encoding="utf-8"))["rows"] == expected)

    assert run(is_equal) == expected


def test_the_program_in_the_records_guide_loses_nothing_when_it_is_killed(
    wal: WalHarness, tmp_path: Path, programs: list[Path]
) -> None:
    database, place = wal.database, tmp_path / "place.json"
    database.execute(f"INSERT INTO {wal.table} SELECT i, 'row' FROM generate_series(1, 100) i")
    program = "def stop_asked():\n    return False\n\n\n" + programs[0].read_text(encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def position() -> object:
        return json.loads(place.read_text(encoding="utf-8"))["position"] if place.exists() else None

    def has_all() -> bool:
        return bool(json.loads(place.read_text(encoding="utf-8"))["rows"] == rows_of(wal))

    for number in range(3):
        before = position()
        database.execute(f"UPDATE {wal.table} SET id = id + 1000 WHERE id % 7 = {number}")
        process = subprocess.Popen([sys.executable, "-c", program], env=environment, cwd=tmp_path)
        try:
            # The first run is usually killed during its snapshot, the others when they have everything.
            wait_for(lambda: position() not in (None, before), "progress", position, 60)  # noqa: B023 - called at once
            database.execute(
                f"DELETE FROM {wal.table} WHERE id % 11 = {number}; "
                f"INSERT INTO {wal.table} VALUES ({-number}, NULL)"
            )
            if number > 0:
                wait_for(has_all, "every row", position, 60)
        finally:
            process.kill()
            process.wait()
    assert has_all()


def rows_of(wal: WalHarness) -> dict[str, object]:
    return {
        str(key): {"id": key, "note": note}
        for key, note in wal.database.query(f"SELECT id, note FROM {wal.table}")
    }
