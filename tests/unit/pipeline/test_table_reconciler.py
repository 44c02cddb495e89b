"""Operator overrides of single tables, applied to a running pipeline. The source is given."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.errors import MembersDifferError, SinkError
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.retries import RetryLog, load_retries
from penstock.pipeline.table_overrides import change_overrides, load_overrides
from penstock.pipeline.table_reconciler import TableReconciler
from penstock.pipeline.table_selection import Selection
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.pipeline.tables import Tables
from penstock.postgres.catalog import CatalogTable
from penstock.schema import TableName
from tests.support.pipeline.position_sink import PositionSink
from tests.support.spool.builders import ITEMS, ORDERS, at

TABLES = {schema.name: CatalogTable(schema.oid, schema.name) for schema in (ITEMS, ORDERS)}


class Orders:
    """Overrides for two filled tables in a given state; calls to other parts are recorded."""

    def __init__(self, state: Path, status: TableStatus) -> None:
        self.resynced: list[TableName] = []
        self.ordered: list[TableName] = []
        self.lost: list[TableName] = []
        self.told: list[TableName] = []
        self.copied: list[CatalogTable] = []
        self.sink = PositionSink()
        self.sink.applied = dict.fromkeys(TABLES, at(100))
        tables: Any = SimpleNamespace(
            statuses=dict.fromkeys(TABLES, status),
            request_dropped=lambda name, _reason: self.lost.append(name),
            resync_failed=lambda name, _reason: self.told.append(name),
            add_pending=lambda _name: None,
            order_resync=lambda name, _reason: self.ordered.append(name),
        )
        applier: Any = SimpleNamespace(tables=tables, truncates=lambda _name: ())
        snapshots: Any = SimpleNamespace(is_copying=lambda _name: False, start=self.copied.extend)
        self.roster = TableReconciler(
            cast(
                "Any",
                SimpleNamespace(state=state, schema_rule=lambda _name: SimpleNamespace(auto_resync=True)),
            ),
            self.sink,
            applier,
            snapshots,
            lambda table, _act: self.resynced.append(table.name),
            lambda _name: None,
            PipelineObserver(),
            retries=RetryLog(state),
        )

    def resync(self, selection: Selection, gone: dict[TableName, str]) -> None:
        self.roster._resync(TABLES, selection, gone)


@pytest.fixture(autouse=True)
def _no_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "penstock.pipeline.table_reconciler.source_adapter",
        lambda _config: SimpleNamespace(provision_resync=lambda _names: {}),
    )


def test_a_table_whose_target_cannot_be_read_holds_up_no_other_resync_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = Orders(tmp_path, TableStatus(TableState.FAILED, at(100)))
    load = orders.sink.load_target

    def broken(table: TableName) -> object:
        if table == ITEMS.name:
            raise SinkError("its log cannot be read")
        return load(table)

    monkeypatch.setattr(orders.sink, "load_target", broken)
    for _ in range(2):
        orders.resync(Selection(TABLES, {}, {}), {})
    assert set(orders.resynced) == {ORDERS.name}
    (shown,) = load_retries(tmp_path)
    assert (shown.subject, shown.failures) == (f"resync of {ITEMS.name}", 2)
    assert "its log cannot be read" in shown.reason
    assert shown.remedy
    monkeypatch.undo()
    monkeypatch.setattr(
        "penstock.pipeline.table_reconciler.source_adapter",
        lambda _config: SimpleNamespace(provision_resync=lambda _names: {}),
    )
    orders.resync(Selection(TABLES, {}, {}), {})
    assert ITEMS.name in orders.resynced
    assert load_retries(tmp_path) == ()


def test_K11_a_routed_table_is_resynced_once_its_members_match_again(tmp_path: Path) -> None:
    """Also if the members differed only while a resync for another reason copied them.

    The resync is ordered, so that it is not lost if it cannot start yet.
    """
    reason = f"PEN-1403: public.a was altered; and its resync failed: {MembersDifferError.code}: not alike"
    orders = Orders(tmp_path, TableStatus(TableState.FAILED, at(100), reason=reason))
    for _ in range(2):
        orders.roster._resync_matching_members(Selection({ORDERS.name: TABLES[ORDERS.name]}, {}, {}))
    assert orders.ordered == [ORDERS.name]


@pytest.mark.parametrize(
    ("state", "is_lost"),
    [(TableState.STREAMING, False), (TableState.RETRYING, False), (TableState.FAILED, True)],
)
def test_a_dropped_table_that_changes_are_kept_for_is_not_gone_before_it_has_them(
    tmp_path: Path, *, state: TableState, is_lost: bool
) -> None:
    orders = Orders(tmp_path, TableStatus(state, at(100)))
    orders.resync(Selection({}, {}, {}), dict.fromkeys(TABLES, "it was dropped"))
    assert bool(orders.lost) is is_lost


def test_a_resync_ordered_before_a_table_is_copied_makes_no_second_copy(tmp_path: Path) -> None:
    orders = Orders(tmp_path, TableStatus(TableState.STREAMING, at(100)))
    change_overrides(tmp_path, lambda overrides: overrides.request_resync(TABLES))
    new = Tables({ITEMS.name: TABLES[ITEMS.name]}, {}, {ITEMS.name: TableStatus(TableState.PENDING)})
    orders.roster._admit(new, load_overrides(tmp_path))
    assert orders.copied == [TABLES[ITEMS.name]]
    assert load_overrides(tmp_path).resync == {ORDERS.name}
