"""The sink contract for Iceberg tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from typing_extensions import override

from penstock.errors import SinkError
from penstock.sinks.iceberg.catalog import IcebergCatalog
from penstock.sinks.iceberg.definition import IcebergPlace
from penstock.sinks.iceberg.maintenance import Maintenance
from penstock.sinks.iceberg.sink import IcebergSink
from tests.support.contract.sink_harness import PIPELINE, SinkHarness
from tests.support.sinks.iceberg_lake import new_catalog
from tests.support.sinks.source import Row, Value
from tests.support.snapshot.local import LocalExecutors


class IcebergHarness(SinkHarness):
    types = (pa.int64(), pa.string(), pa.string())

    def __init__(self, root: Path, spark: SparkSession) -> None:
        self.spark = spark
        self.place = IcebergPlace(new_catalog(), root / "warehouse", maintenance=Maintenance(0, 0, 0))
        self.describe(self.place.catalog, self.place.warehouse)
        super().__init__(root)

    def describe(self, name: str, warehouse: Path) -> None:
        """Register the catalog in the session. An unregistered one is a directory."""

    @override
    def open(self, pipeline: str = PIPELINE) -> IcebergSink:
        return IcebergSink(self.spark, self.place, pipeline, LocalExecutors())

    @override
    def rows(self) -> list[Row]:
        loaded = IcebergCatalog(self.spark, self.place.catalog, self.place.warehouse).load(
            ("public", "items")
        )
        assert loaded is not None
        jvm: Any = self.spark._jvm
        with closing(jvm.org.apache.iceberg.data.IcebergGenerics.read(loaded.java).build()) as records:
            rows = [
                {name: Value(record.getField(name)) for name in ("id", "note", "size")}
                for record in _all(records.iterator())
            ]
        return sorted(rows, key=repr)

    @override
    def put_foreign(self) -> None:
        self.spark.sql(f"CREATE TABLE {self.place.catalog}.public.items (id int) USING iceberg")

    @override
    @contextmanager
    def dying(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(IcebergCatalog, "commit", _die)
            yield

    @override
    @contextmanager
    def unanswered(self) -> Iterator[None]:
        commit = IcebergCatalog.commit

        def commit_and_die(*arguments: Any) -> None:
            commit(*arguments)
            _die()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(IcebergCatalog, "commit", commit_and_die)
            yield


def _all(iterator: Any) -> Iterator[Any]:
    while iterator.hasNext():
        yield iterator.next()


def _die(*_: object) -> None:
    raise SinkError("the answer was lost")
