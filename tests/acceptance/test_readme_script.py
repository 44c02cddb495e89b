"""The script of the README, run unchanged by spark-submit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from penstock.postgres.connection import SourceAddress
from penstock.spark.java import ensure_java
from tests.support.fix_postgres import Database

ROOT = Path(__file__).parents[2]
DSN = "postgresql://cdc@db.example:5432/shop"


def script() -> str:
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return str(text)


def spark_submit() -> str:
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "bin" / "spark-submit")


def seen(folder: Path) -> set[tuple[str, int]]:
    """The rows of the files that are in Spark's commit log."""
    found = set()
    logs = [path.read_text(encoding="utf-8") for path in (folder / "_spark_metadata").glob("[0-9]*")]
    for name in re.findall(r"part-[^/]*\.parquet", "".join(logs)):
        table = pq.read_table(folder / name, columns=["_change_type", "id"])
        found |= set(zip(table["_change_type"].to_pylist(), table["id"].to_pylist(), strict=True))
    return found


def wait_for(process: subprocess.Popen[bytes], condition: Callable[[], bool], what: str, log: Path) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"no {what}: {log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.1)


@pytest.mark.timeout(600)
def test_ten_lines_write_a_tables_rows_and_its_changes(database: Database, tmp_path: Path) -> None:
    lines = [line for line in script().splitlines() if line and not line.startswith(("#", "import", "from"))]
    assert len(lines) <= 10
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    database.execute("INSERT INTO orders VALUES (1, 'a'), (2, 'b')")
    address = SourceAddress.parse(database.dsn)
    assert DSN in script()
    (tmp_path / "orders.py").write_text(script().replace(DSN, address.dsn), encoding="utf-8")
    ensure_java()
    environment = {
        **os.environ,
        "PGPASSWORD": address.password.reveal() if address.password is not None else "",
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT / "src"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    settings = [
        "--master",
        "local[2]",
        "--conf",
        "spark.ui.enabled=false",
        "--conf",
        "spark.driver.host=127.0.0.1",
    ]
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [spark_submit(), *settings, "orders.py"],
            cwd=tmp_path,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            wait_for(
                process, lambda: seen(tmp_path / "orders") == {("snapshot", 1), ("snapshot", 2)}, "rows", log
            )
            database.execute("DELETE FROM orders WHERE id = 1")
            wait_for(process, lambda: ("delete", 1) in seen(tmp_path / "orders"), "change", log)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
