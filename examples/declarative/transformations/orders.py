"""Streaming tables that read from Postgres.

Every run processes the changes committed since the last run, and ends.

Settings come from the environment of `spark-pipelines`: SHOP_DSN, SHOP_STATE (a directory that the executors
reach), and PGPASSWORD.
"""

from __future__ import annotations

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()


def changes(table: str) -> DataFrame:
    name = table.replace(".", "_")
    options = {
        "dsn": os.environ["SHOP_DSN"],
        "password": os.environ.get("PGPASSWORD", ""),
        "table": table,
        "slot": f"declarative_{name}",
        "spool": f"{os.environ['SHOP_STATE']}/{name}",
    }
    return spark.readStream.format("postgres-cdc").options(**options).load()


@dp.table(comment="Every change of public.orders, its first rows among them")
def order_changes() -> DataFrame:
    return changes("public.orders")


@dp.materialized_view(comment="How much happened to the orders")
def order_activity() -> DataFrame:
    return spark.read.table("order_changes").groupBy("_change_type").count()


# AUTO CDC applies changes to a mirror of the table. Spark 4.2 and later have it, but refuse every open table
# format as its target so far. Set SHOP_MIRROR=true when your table format supports MERGE.
if os.environ.get("SHOP_MIRROR") == "true":
    dp.create_streaming_table("orders")
    dp.create_auto_cdc_flow(  # type: ignore[attr-defined]  # not in Spark 4.1
        target="orders",
        source="order_changes",
        keys=["id"],
        sequence_by="struct(_commit_version, _ordinal)",
        apply_as_deletes="_change_type = 'delete'",
        except_column_list=[
            "_change_type",
            "_commit_version",
            "_commit_timestamp",
            "_ordinal",
            "_xid",
            "_unchanged",
            "_exact",
        ],
        stored_as_scd_type=1,
    )
