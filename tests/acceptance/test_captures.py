"""The same for every capture: a copy, live changes, a kill, changes while nothing runs, and a target that equals its source after all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.spark.session import SHORT_LIVED
from penstock.testing.shop import ShopWorkload, create_shop
from penstock.testing.streams import wait_for
from tests.fix_pipeline import MirrorFactory
from tests.fix_postgres import Database

SHOP = ("shop.customers", "shop.orders", "shop.order_items")
DEADLINE_SECONDS = 300.0

CAPTURES: dict[str, dict[str, Any]] = {"trigger": {}}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("capture", CAPTURES)
def test_target_equals_the_source_after_a_kill_under_load(database: Database, mirror: MirrorFactory, tmp_path: Path, capture: str) -> None:
    create_shop(database.dsn, customers=100, orders=1_000)
    source = {"dsn": database.dsn, "capture": capture, **CAPTURES[capture]}
    shop = mirror(source=source, tables=["shop.*"], spark={"master": "local[2]", "conf": SHORT_LIVED})
    log = tmp_path / "run.log"
    with ShopWorkload(database.dsn, seed=7, pause_seconds=0.02) as workload:
        with started(shop.path, log) as process:
            wait_for(lambda: "epoch" in log.read_text() or process.poll() is not None, "an epoch", log.read_text, DEADLINE_SECONDS)
            assert process.poll() is None, f"the run ended by itself:\n{log.read_text()[-3000:]}"
        killed_at = workload.transactions
        wait_for(lambda: workload.transactions > killed_at + 50, "changes meanwhile", lambda: workload.transactions, DEADLINE_SECONDS)
    shop.run_once()
    shop.assert_equal(*SHOP)


@contextmanager
def started(config: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`penstock run`, killed with its JVM and everything when the block ends."""
    with log.open("wb") as output:
        command = [sys.executable, "-m", "penstock.cli.main", "run", str(config)]
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
