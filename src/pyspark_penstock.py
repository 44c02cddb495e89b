"""Makes `format("postgres-cdc")` known to Spark: Spark imports every top-level module called `pyspark_*` and
registers its `DefaultSource`.

This module imports as little as possible: if one of these modules fails to import, Spark discovers none of
them.
"""

from __future__ import annotations

from penstock.spark.datasource import PostgresCdcSource as DefaultSource

__all__ = ["DefaultSource"]
