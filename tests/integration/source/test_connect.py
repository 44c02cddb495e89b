"""Spark Connect: a client that is not the driver, and Declarative Pipelines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import pyarrow.dataset as ds
import pytest

from penstock.postgres.connection import SourceAddress
from penstock.spark.java import ensure_java
from tests.support.fix_postgres import Database

pytestmark = [pytest.mark.connect, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "declarative"

CLIENT = """
import json, sys, time
from pyspark.sql import SparkSession
options, folder = json.loads(sys.argv[1]), sys.argv[2]
spark = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false").getOrCreate()
assert type(spark).__module__.startswith("pyspark.sql.connect"), type(spark)
batch = {name: value for name, value in options.items() if name != "spool"}
rows = spark.read.format("postgres-cdc").options(**batch).load().collect()
print("batch", sorted(row["id"] for row in rows))
stream = spark.readStream.format("postgres-cdc").options(**options).load()
writer = stream.writeStream.format("parquet").option("checkpointLocation", folder + "/checkpoint")
query = writer.trigger(availableNow=True).start(folder + "/rows")
query.awaitTermination()
rows = spark.read.parquet(folder + "/rows").select("id", "_change_type").collect()
print("stream", sorted((row["id"], row["_change_type"]) for row in rows))
spark.stop()
"""


def environment() -> dict[str, str]:
    ensure_java()
    settings = {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONWARNINGS": "default",
    }
    return {**os.environ, **settings}


def run(command: list[str], folder: Path, settings: Mapping[str, str] = MappingProxyType({})) -> str:
    environ = {**environment(), **settings}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=540
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def fill(database: Database) -> SourceAddress:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    database.execute("INSERT INTO orders VALUES (1, 'a'), (2, 'b')")
    return SourceAddress.parse(database.dsn)


def test_stream_and_batch_work_over_spark_connect(database: Database, tmp_path: Path) -> None:
    address = fill(database)
    password = {"password": address.password.reveal()} if address.password is not None else {}
    options = {"dsn": address.dsn, **password, "table": "public.orders", "spool": str(tmp_path / "spool")}
    output = run([sys.executable, "-c", CLIENT, json.dumps(options), str(tmp_path)], tmp_path)
    assert "batch [1, 2]" in output
    assert "stream [(1, 'snapshot'), (2, 'snapshot')]" in output


def test_declarative_pipeline_is_fed_by_the_source(database: Database, tmp_path: Path) -> None:
    address = fill(database)
    (tmp_path / "transformations").symlink_to(EXAMPLE / "transformations")
    spec = (EXAMPLE / "spark-pipeline.yml").read_text(encoding="utf-8")
    assert "file:///var/lib/penstock/declarative" in spec
    (tmp_path / "spark-pipeline.yml").write_text(
        spec.replace("file:///var/lib/penstock/declarative", f"file://{tmp_path}/storage")
    )
    password = address.password.reveal() if address.password is not None else ""
    settings = {"SHOP_DSN": address.dsn, "SHOP_STATE": str(tmp_path / "state"), "PGPASSWORD": password}
    found = find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    program = str(Path(found.origin).parent / "bin" / "spark-pipelines")
    run([program, "run", "--conf", "spark.driver.host=127.0.0.1"], tmp_path, settings)
    assert rows(tmp_path) == [(1, "snapshot"), (2, "snapshot")]


def rows(folder: Path) -> list[tuple[int, str]]:
    (place,) = folder.glob("spark-warehouse/**/order_changes")
    files = [str(path) for path in place.glob("*.parquet")]
    table = ds.dataset(files, format="parquet").to_table(columns=["id", "_change_type"])
    return sorted(zip(table["id"].to_pylist(), table["_change_type"].to_pylist(), strict=True))
