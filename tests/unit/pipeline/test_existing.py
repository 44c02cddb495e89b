"""Existing tables in the place of a pipeline's targets."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from typing_extensions import override

from penstock.config.model import load_config
from penstock.config.policies import ExistingPolicy
from penstock.errors import TargetForeignError
from penstock.pipeline.table_overrides import load_overrides
from penstock.pipeline.table_reconciler import mark_adopted, take_over
from penstock.pipeline.table_selection import Selection, inspect_pipeline
from penstock.pipeline.table_states import TableState
from penstock.pipeline.tables import Tables
from penstock.postgres.catalog import CatalogTable
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import Target
from tests.support.pipeline.position_sink import PositionSink
from tests.support.spool.builders import ITEMS, ORDERS

HINT = "choose another path"


class Occupied(PositionSink):
    """A foreign object is in the place of every table, until it is adopted or removed."""

    def __init__(self, *, fits: bool = True) -> None:
        super().__init__()
        self.adopted: list[TableName] = []
        self.removed: list[TableName] = []
        self._fits = fits

    @override
    def load_target(self, table: TableName) -> Target | None:
        if table in self.removed:
            return None
        if table not in self.adopted:
            raise TargetForeignError(f"{table} was written by another program", hint=HINT)
        return Target(table, 1, ("id",), pa.schema([]), None)

    @override
    def adopt(self, schema: TableSchema) -> bool:
        if not self._fits:
            raise TargetForeignError("its column 'x' is not a column of the source", hint="alter it")
        self.adopted.append(schema.name)
        return True

    @override
    def remove_foreign(self, table: TableName) -> None:
        self.removed.append(table)


def _inspected(sink: Occupied, policy: ExistingPolicy) -> Tables:
    tables = {schema.name: CatalogTable(schema.oid, schema.name) for schema in (ORDERS, ITEMS)}
    selection = Selection(tables, {schema.name: schema for schema in (ORDERS, ITEMS)}, {})
    return inspect_pipeline(
        selection,
        sink,
        None,
        existing_of=lambda name: policy if name == ORDERS.name else ExistingPolicy.REFUSE,
    )


def test_K10_tables_of_another_pipeline_are_refused_unless_configured_and_the_fix_says_how() -> None:
    tables = _inspected(Occupied(), ExistingPolicy.REFUSE)
    for status in tables.statuses.values():
        assert status.state is TableState.FAILED
        assert HINT in (status.remedy or "")
        assert "existing: adopt" in (status.remedy or "")
    assert not tables.foreign


def test_K10_looking_at_the_targets_changes_nothing_and_taking_over_is_for_the_tables_that_were_named(
    tmp_path: Path,
) -> None:
    sink = Occupied()
    tables = _inspected(sink, ExistingPolicy.REPLACE)
    assert (sink.adopted, sink.removed) == ([], [])
    assert tables.foreign == {ORDERS.name: ExistingPolicy.REPLACE}
    take_over(tables, sink, tmp_path)
    assert (sink.adopted, sink.removed) == ([], [ORDERS.name])
    assert tables.statuses[ORDERS.name].state is TableState.PENDING
    assert tables.statuses[ITEMS.name].state is TableState.FAILED


def test_K10_an_adopted_table_waits_for_its_copy_also_in_the_next_run(tmp_path: Path) -> None:
    sink = Occupied()
    for _ in range(2):
        tables = _inspected(sink, ExistingPolicy.ADOPT)
        take_over(tables, sink, tmp_path)
        mark_adopted(tables, sink, load_overrides(tmp_path))
        assert tables.adopted == [ORDERS.name]
        assert not tables.pending, "a copy in its place would empty it first"
        assert load_overrides(tmp_path).resync == {ORDERS.name}
    assert sink.adopted == [ORDERS.name]


def test_K10_a_table_that_does_not_fit_fails_alone_and_nothing_is_ordered(tmp_path: Path) -> None:
    sink = Occupied(fits=False)
    tables = _inspected(sink, ExistingPolicy.ADOPT)
    take_over(tables, sink, tmp_path)
    assert "'x'" in (tables.statuses[ORDERS.name].reason or "")
    assert load_overrides(tmp_path).resync == frozenset()


@pytest.mark.parametrize("said", ["adopt", "replace"])
def test_the_last_rule_about_existing_tables_counts(tmp_path: Path, said: str) -> None:
    path = tmp_path / "pipeline.yaml"
    rules = f"[{{match: 'public.*', existing: {said}}}, {{table: public.items, existing: refuse}}]"
    path.write_text(
        f"pipeline: p\nsource: {{dsn: dbname=x}}\ntables: {rules}\nsink: {{delta: {{path: lake}}}}\n",
        encoding="utf-8",
    )
    config = load_config(path)
    assert [config.existing_policy(schema.name).value for schema in (ORDERS, ITEMS)] == [said, "refuse"]
