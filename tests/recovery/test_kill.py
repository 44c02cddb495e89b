"""Killing `penstock run` with SIGKILL, again and again, under load; at the end the tables must equal their source, row by row."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.testing.shop import ShopWorkload, create_shop
from tests.fix_pipeline import Mirror, MirrorFactory
from tests.fix_postgres import Database

KILLS = 20
LONGEST_LIFE_SECONDS = 14.0
SHOP = ("shop.customers", "shop.orders", "shop.order_items")


@pytest.mark.timeout(1500)
def test_tables_equal_the_source_after_twenty_kills_under_load(
    database: Database, mirror: MirrorFactory, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """L01. Half of the kills take only the driver, and leave its JVM and the capture to notice; the other half take all at once."""
    seed = int(os.environ.get("PENSTOCK_TEST_KILL_SEED", random.SystemRandom().randrange(1 << 30)))
    record_property("seed", seed)
    print(f"seed {seed}")
    choices = random.Random(seed)
    create_shop(database.dsn, customers=100, orders=5_000)
    # Small chunks and few rows an epoch, so that a kill may fall anywhere.
    shop = mirror(tables=["shop.*"], snapshot_chunk_bytes=262_144, max_rows_per_epoch=2_000, spark={"master": "local[2]"})
    log = tmp_path / "run.log"
    with ShopWorkload(database.dsn, seed=seed, pause_seconds=0.02) as workload:
        for kill in range(KILLS):
            process = _start(shop, log)
            # The first lives are spread over start-up and snapshot; every fourth one may get well into the stream.
            time.sleep(choices.uniform(1.0, LONGEST_LIFE_SECONDS * (2 if kill % 4 == 3 else 1)))
            assert process.poll() is None, f"run ended by itself (seed {seed}):\n{log.read_text()[-3000:]}"
            _kill(process, everything=kill % 2 == 0)
        assert workload.changes > 100
    finished = subprocess.run([*_COMMAND, str(shop.path), "--once"], capture_output=True, text=True, timeout=600, check=False)
    assert finished.returncode == 0, f"seed {seed}\n{finished.stderr[-3000:]}"
    shop.assert_equal(*SHOP)


_COMMAND = [sys.executable, "-m", "penstock.cli.main", "run"]


def _start(shop: Mirror, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen([*_COMMAND, str(shop.path)], stdout=output, stderr=output, start_new_session=True)


def _kill(process: subprocess.Popen[bytes], *, everything: bool) -> None:
    """The driver alone, or its whole session: JVM, capture and Python workers with it."""
    if everything:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait(timeout=30)
