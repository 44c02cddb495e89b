"""`penstock run` killed with SIGKILL repeatedly, under load: the tables end equal to their source, row by
row.

PENSTOCK_TEST_KILLS sets how often, in tens; `make test-kills` does it 20 times.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.pipeline.epoch_log import EpochLog
from penstock.spark.session import SHORT_LIVED
from penstock.testing.shop import ShopWorkload, create_shop
from tests.support.fix_pipeline import MirrorFactory
from tests.support.fix_postgres import Database
from tests.support.recovery.killable_run import COMMAND, kill, started, wait_for_word

Phase = tuple[str, float]
SHOP = ("shop.customers", "shop.orders", "shop.order_items")

# The output to wait for before a process is killed, and the longest delay after it. Purely random moments
# would mostly hit the start of the JVM; these cover start-up, snapshot, capture, MERGE, and the time between
# commit and record.
FEW = [("Snapshot", 3.0), ("Streaming", 8.0), ("epoch", 4.0), ("epoch", 4.0)]
MORE = [("", 8.0), *FEW, ("Streaming", 8.0)]
MANY = [("", 8.0)] + [("Snapshot", 3.0)] * 2 + [("Streaming", 8.0)] * 3 + [("epoch", 4.0)] * 4
TENS = int(os.environ.get("PENSTOCK_TEST_KILLS", "0")) // 10
# Cases that do not depend on the sink run with one sink only.
PHASES = {"delta": MANY * TENS or MORE, "iceberg": MANY * TENS or FEW}


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("kind", "phases"), PHASES.items(), ids=PHASES)
def test_L01_K01_tables_equal_the_source_after_kills_under_load(
    database: Database, mirror_into: MirrorFactory, tmp_path: Path, kind: str, phases: Sequence[Phase]
) -> None:
    """L01. Half of the kills hit the driver only, so that its JVM and the capture must notice; the other half
    hit all processes.
    """
    seed = int(os.environ.get("PENSTOCK_TEST_KILL_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"PENSTOCK_TEST_KILL_SEED={seed}")  # shown when the test fails
    choices = random.Random(seed)
    create_shop(database.dsn, customers=100, orders=5_000)
    # Small chunks and few rows an epoch, so that a kill may fall anywhere.
    spark = {"master": "local[2]", "conf": SHORT_LIVED}
    shop = mirror_into(
        kind, tables=["shop.*"], snapshot_chunk_bytes=262_144, max_rows_per_epoch=5_000, spark=spark
    )
    log = tmp_path / "run.log"
    kills = 0
    with ShopWorkload(database.dsn, seed=seed, pause_seconds=0.05) as workload:
        for phase, longest_seconds in _shuffled(choices, phases):
            with started(shop, log) as process:
                wait_for_word(phase, process, log)
                time.sleep(choices.uniform(0.0, longest_seconds))
                assert process.poll() is None, f"the run ended by itself:\n{log.read_text()[-3000:]}"
                kill(process, everything=kills % 2 == 0)
            kills += 1
    assert kills == len(phases)
    last = EpochLog(shop.config.sink.root, shop.config.pipeline).last()
    assert last is not None
    assert last.number >= len(phases) / 2, "the kills left no time for epochs, so nothing was tried"
    assert workload.changes > 100
    finished = subprocess.run(
        [*COMMAND, str(shop.path), "--once"], capture_output=True, text=True, timeout=900, check=False
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    verify = [*COMMAND[:-1], "verify", str(shop.path), "--json"]
    verified = subprocess.run(verify, capture_output=True, text=True, timeout=900, check=False)
    assert verified.returncode == 0, verified.stdout[-3000:] + verified.stderr[-3000:]
    report = json.loads(verified.stdout)
    assert {name: table["equal"] for name, table in report["tables"].items()} == dict.fromkeys(SHOP, True)


def _shuffled(choices: random.Random, phases: Sequence[Phase]) -> list[Phase]:
    """Random order, but runs that must be killed during the snapshot come first: later ones have none."""
    early = [phase for phase in phases if phase[0] in ("", "Snapshot")]
    late = [phase for phase in phases if phase not in early]
    choices.shuffle(early)
    choices.shuffle(late)
    return early + late
