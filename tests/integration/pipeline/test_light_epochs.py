"""The driver applies epochs of a few changes, executors apply the others; the targets are equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.sinks.delta.epoch import write_epoch
from penstock.sinks.executors import SparkExecutors
from penstock.sinks.iceberg.files import write_epoch as write_iceberg
from penstock.sinks.parquet.files import write_epoch as write_parquet
from tests.support.fix_pipeline import MirrorFactory
from tests.support.fix_postgres import Database
from tests.support.sinks.iceberg_lake import new_catalog

MANY = "INSERT INTO {0} SELECT g, repeat(md5(g::text), 10) FROM generate_series(1000, 3000) g"
FEW = "INSERT INTO {0} SELECT g, 'few' FROM generate_series(10, 20) g"
CHANGED = "UPDATE {0} SET v = 'changed' WHERE id = 1"
UNKNOWN = "UPDATE {0} SET n = n + 1 WHERE id = 2"
"""The new row lacks a long value, which has to be looked up."""

Work = dict[Callable[..., Any], list[bool]]


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """By function, whether it was light, each time that it was run."""
    found: Work = {}
    run = SparkExecutors.run

    def noted(self: SparkExecutors, function: Any, tasks: Sequence[Any], *, light: bool = False) -> list[Any]:
        found.setdefault(function, []).append(light)
        return run(self, function, tasks, light=light)

    monkeypatch.setattr(SparkExecutors, "run", noted)
    return found


def _sink(kind: str) -> dict[str, Any]:
    return (
        {"iceberg": {"catalog": new_catalog(), "warehouse": "lake"}}
        if kind == "iceberg"
        else {kind: {"path": "lake"}}
    )


BY_SINK: dict[str, tuple[Callable[..., Any], dict[str, list[bool]]]] = {
    "delta": (write_epoch, {FEW: [True], MANY: [False], CHANGED: [False]}),
    "iceberg": (write_iceberg, {FEW: [True], MANY: [False], CHANGED: [True], UNKNOWN: [True, False]}),
    "parquet": (write_parquet, {FEW: [True], MANY: [False], CHANGED: [True]}),
}


@pytest.mark.parametrize("kind", BY_SINK)
def test_the_driver_alone_applies_epochs_of_few_changes(
    database: Database, mirror: MirrorFactory, work: Work, kind: str
) -> None:
    function, statements = BY_SINK[kind]
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text, n int DEFAULT 0)")
    database.execute("ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    database.execute("INSERT INTO t SELECT g, repeat('long', 2000) FROM generate_series(1, 5) g")
    tables: list[Any] = [{"table": "public.t", "mode": "append"}] if kind == "parquet" else ["public.t"]
    made = mirror(sink=_sink(kind), tables=tables)
    made.run_once()
    work.clear()
    for statement, expected in statements.items():
        database.execute(statement.format("t"))
        made.run_once()
        assert work.pop(function) == expected, statement
    if kind != "parquet":
        made.assert_equal("public.t")
