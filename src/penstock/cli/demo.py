"""`penstock demo`: a complete pipeline on one machine, in about a minute and a half.

It starts an embedded Postgres with three tables of a small shop, copies them to Delta, streams a live
workload of inserts, updates and deletes, and then compares source and target row by row.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import yaml
from rich.console import Console

from penstock import storage
from penstock.cli.run import LiveDisplay, start_session
from penstock.cli.verify import print_report
from penstock.config.model import PipelineConfig, load_config
from penstock.errors import ConfigError, StillDifferentError
from penstock.location import absolute_path
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.verify.verify import verify_tables
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.slot import current_position
from penstock.spark.session import SHORT_LIVED
from penstock.testing.embedded import EmbeddedPostgres
from penstock.testing.shop import ShopWorkload, create_shop

_MARK = ".penstock-demo"
_CUSTOMERS = 2_000
_ORDERS = 40_000
_CATCH_UP_SECONDS = 300.0


def run_demo(directory: Path, seconds: float, console: Console) -> int:
    """Run the demo from an empty directory.

    Returns the exit code. The files stay in `directory` for inspection.
    """
    directory = absolute_path(directory, "--directory")
    _clear(directory)
    console.print("[bold]Penstock demo[/]: Postgres → Spark → Delta, with no Kafka", highlight=False)
    with EmbeddedPostgres(directory / "postgres") as server:
        dsn = server.dsn("postgres")
        create_shop(dsn, customers=_CUSTOMERS, orders=_ORDERS)
        shop = f"a shop of {_CUSTOMERS:,} customers, {_ORDERS:,} orders and {_ORDERS * 3:,} items"
        console.print(f"  {shop}; starting Spark …", highlight=False)
        config = _write_config(directory, dsn)
        with LiveDisplay(console) as display:
            spark = start_session(config)
            _mirror(Pipeline(config, spark, display), display, dsn, seconds)
        report = verify_tables(spark, config)
    print_report(report, console)
    if not report.equal:
        raise StillDifferentError(
            "source and target are not equal", hint="keep the demo directory, and report this with the output"
        )
    _print_farewell(directory, config, console)
    return 0


def _mirror(pipeline: Pipeline, display: LiveDisplay, dsn: str, seconds: float) -> None:
    """Run the pipeline in this thread and the workload in another, until all changes are applied."""
    driver = threading.Thread(
        target=_drive, args=(pipeline, display, dsn, seconds), name="demo-driver", daemon=True
    )
    driver.start()
    pipeline.run()
    driver.join()


def _drive(pipeline: Pipeline, display: LiveDisplay, dsn: str, seconds: float) -> None:
    try:
        display.wait_for_streaming()
        with ShopWorkload(dsn, seed=7, pause_seconds=0.01) as workload:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                display.tick(f"workload {workload.changes:,} changes made")
                time.sleep(1.0)
        with connect(SourceAddress.parse(dsn)) as connection:
            goal = current_position(connection)
        deadline = time.monotonic() + _CATCH_UP_SECONDS
        while pipeline.position < goal and time.monotonic() < deadline:
            display.tick(f"workload {workload.changes:,} changes made, stopped")
            time.sleep(0.5)
    finally:
        pipeline.stop()


def _clear(directory: Path) -> None:
    """Empty the directory. Raises an error for a directory that was not created by an earlier demo."""
    if storage.exists(directory) and any(storage.list_paths(directory)):
        if not storage.exists(directory / _MARK):
            raise ConfigError(
                f"{directory} is not empty and was not created by the demo", hint="choose another --directory"
            )
        storage.delete_tree(directory)
    storage.ensure_directory(directory, shared=True)
    storage.ensure_touched(directory / _MARK)


def _write_config(directory: Path, dsn: str) -> PipelineConfig:
    path = directory / "pipeline.yaml"
    document = {
        "pipeline": "demo",
        "source": {"dsn": dsn},
        "tables": [{"match": "shop.*"}],
        "sink": {"delta": {"path": "lake"}},
        "state": "state",
        "spark": {"master": "local[2]", "conf": SHORT_LIVED},
    }
    storage.write(path, yaml.safe_dump(document, sort_keys=False).encode(), durable=False, shared=True)
    return load_config(path)


def _print_farewell(directory: Path, config: PipelineConfig, console: Console) -> None:
    orders = config.sink.root / "shop" / "orders"
    shown = orders.relative_to(Path.cwd()) if orders.is_relative_to(Path.cwd()) else orders
    console.print(f"\nThe tables stay in {directory}/lake. To query them:\n", highlight=False)
    console.print(
        "  .venv/bin/python - <<'EOF'\n"
        "  from penstock.spark.java import delta_package\n"
        "  from penstock.spark.session import build_session\n"
        "  spark = build_session('demo', packages=[delta_package()])\n"
        f"  spark.read.format('delta').load('{shown}').groupBy('status').count().show()\n"
        "  EOF",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
