"""The sink contract for Delta tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from typing_extensions import override

from penstock.errors import SinkError
from penstock.sinks.delta import epoch as delta_step
from penstock.sinks.delta.commit import commit
from penstock.sinks.delta.sink import DeltaSink
from tests.support.contract.sink_harness import ITEMS, PIPELINE, SinkHarness
from tests.support.delta_tables import InlineExecutors, rows_of
from tests.support.sinks.source import Row, Value


class DeltaHarness(SinkHarness):
    types = (pa.int64(), pa.string(), pa.string())

    def __init__(self, root: Path, spark: SparkSession) -> None:
        self._spark = spark
        self._lake = root / "lake"
        super().__init__(root)

    @override
    def open(self, pipeline: str = PIPELINE) -> DeltaSink:
        sink = DeltaSink(self._spark, self._lake, pipeline)
        sink._executors = InlineExecutors()
        return sink

    @override
    def rows(self) -> list[Row]:
        path = DeltaSink(self._spark, self._lake, PIPELINE).path(ITEMS)
        found = rows_of(path) if path.exists() else []
        return sorted(
            ({name: Value(row[name]) for name in ("id", "note", "size")} for row in found), key=repr
        )

    @override
    def put_foreign(self) -> None:
        path = DeltaSink(self._spark, self._lake, PIPELINE).path(ITEMS)
        self._spark.range(3).write.format("delta").save(str(path))

    @override
    @contextmanager
    def dying(self) -> Iterator[None]:
        with self._commits(lambda *_: False):
            yield

    @override
    @contextmanager
    def unanswered(self) -> Iterator[None]:
        with self._commits(commit):
            yield

    @contextmanager
    def _commits(self, really: Callable[..., bool]) -> Iterator[None]:
        def fails(*arguments: object) -> bool:
            really(*arguments)
            raise SinkError("no server answers")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(delta_step, "commit", fails)
            yield
