"""`penstock demo`, and the summary that it prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_the_demo_ends_with_equal_tables_and_a_lake_that_can_be_queried(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "demo", "--seconds", "8", "--directory", "demo"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    output = result.stdout
    assert result.returncode == 0, output + result.stderr
    for table in ("shop.customers", "shop.orders", "shop.order_items"):
        line = next(line for line in output.splitlines() if table in line and "equal" in line)
        assert line.split()[-4:] == ["0", "0", "0", "equal"]
    assert "lag" in output
    script = output[output.index("<<'EOF'\n") + len("<<'EOF'\n") : output.rindex("  EOF")]
    plain = "\n".join(line.removeprefix("  ") for line in script.splitlines())
    query = subprocess.run(
        [sys.executable, "-c", plain], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert query.returncode == 0, query.stderr
    assert "paid" in query.stdout


def test_the_demo_does_not_touch_a_directory_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    command = [sys.executable, "-m", "penstock.cli.main", "demo", "--directory", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert (tmp_path / "precious.txt").read_text() == "mine"
