"""Makes `format("postgres-cdc")` known to Spark, which imports every top-level module called `pyspark_*` and
registers its `DefaultSource`.

Imports as little as possible: if one such module fails to import, Spark discovers none of them.
"""

from __future__ import annotations

from penstock.spark.datasource import PostgresCdcSource as DefaultSource

__all__ = ["DefaultSource"]
