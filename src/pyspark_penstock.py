"""Lets Spark find the format by name: it imports every top-level module called `pyspark_*` and takes its
`DefaultSource`.

Kept light on purpose: a module of this kind that fails to import would disable the discovery of all of them.
"""

from __future__ import annotations

from penstock.spark.datasource import PostgresCdcSource as DefaultSource

__all__ = ["DefaultSource"]
