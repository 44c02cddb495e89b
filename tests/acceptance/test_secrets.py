"""Invariant 12: a secret never appears in a log, status, error, plan, checkpoint, spool or target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.fix_postgres import Database

PASSWORD = "correct-horse-battery-staple"


@pytest.mark.timeout(600)
def test_the_password_is_nowhere_to_be_found_after_a_run(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'a')")
    path = tmp_path / "pipeline.yaml"
    document = {
        "pipeline": "secretive",
        "source": {"dsn": database.dsn, "password": {"env": "PENSTOCK_TEST_SECRET"}},
        "tables": ["public.*"],
        "sink": {"delta": {"path": "lake"}},
        "spark": {"master": "local[1]"},
    }
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    printed = _penstock(path, "run", "--once", "--log-level=debug", "--log-format=json", code=0)
    _check_logged(printed, tmp_path / "state" / "spark.log")
    database.execute("INSERT INTO t VALUES (2, 'b'); UPDATE t SET v = 'c' WHERE id = 1")
    printed += _penstock(path, "run", "--once", code=0)
    printed += _penstock(path, "status", "--json", code=0)
    # An error on the way shows no secret either.
    database.execute("SELECT pg_drop_replication_slot('penstock_secretive')")
    printed += _penstock(path, "run", "--once", code=3)
    assert "PEN-1201" in printed
    assert PASSWORD not in printed
    found = [
        file for file in tmp_path.rglob("*") if file.is_file() and PASSWORD.encode() in file.read_bytes()
    ]
    assert found == []
    assert (tmp_path / "state" / "spark.log").exists()


def _check_logged(printed: str, spark_log: Path) -> None:
    """Everything on standard error is JSON, and so is what the capture logs in the process that Spark keeps
    for it.
    """
    events = {json.loads(line)["message"]: json.loads(line)["facts"] for line in printed.splitlines()}
    assert {"snapshot finished", "epoch recorded", "run ended"} <= events.keys()
    assert (events["snapshot finished"]["table"], events["run ended"]["failed"]) == ("public.t", 0)
    captured = [
        json.loads(line)
        for line in spark_log.read_text(encoding="utf-8").splitlines()
        if line.startswith('{"time"')
    ]
    assert "capture started" in {each["message"] for each in captured}


def _penstock(path: Path, command: str, *options: str, code: int) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", command, str(path), *options],
        env={**os.environ, "PENSTOCK_TEST_SECRET": PASSWORD},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr
