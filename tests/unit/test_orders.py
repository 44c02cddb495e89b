from __future__ import annotations

import threading
from pathlib import Path

import pytest

from penstock.errors import SpoolCorruptError
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.orders import FILE, TableOrders, change_orders, load_orders
from penstock.schema import TableName

A, B = TableName("public", "a"), TableName("public", "b.c*")


def test_orders_are_what_is_wanted_not_what_was_said() -> None:
    orders = TableOrders().add([A]).add([A]).pause([A])
    assert orders == TableOrders(added=frozenset({A}), paused=frozenset({A}))
    assert orders.remove([A]) == TableOrders(removed=frozenset({A}))
    assert orders.remove([A]).add([A]) == TableOrders(added=frozenset({A}))
    assert orders.resume([A]).paused == frozenset()
    assert orders.renew([A]).renewed(A).resync == frozenset()


def test_orders_are_kept_and_none_is_lost_when_two_give_them(tmp_path: Path) -> None:
    names = [TableName("public", f"t{number}") for number in range(40)]
    threads = [threading.Thread(target=change_orders, args=(tmp_path, lambda orders, name=name: orders.pause([name]))) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert load_orders(tmp_path).paused == frozenset(names)
    change_orders(tmp_path, lambda orders: orders.add([B]))
    assert load_orders(tmp_path).added == {B}


def test_orders_that_cannot_be_understood_are_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"added": 3}', encoding="utf-8")
    with pytest.raises(SpoolCorruptError, match=FILE):
        load_orders(tmp_path)


def test_tables_are_selected_as_if_the_file_said_what_was_ordered() -> None:
    config = PipelineConfig.model_validate(
        {"pipeline": "p", "source": {"dsn": "dbname=x"}, "tables": ["public.a", "shop.*"], "sink": {"delta": {"path": "lake"}}}
    )
    ordered = config.with_tables([B], [A, TableName("shop", "x")])
    assert ordered.named_tables == [B]
    assert [ordered.selects(name) for name in (A, B, TableName("shop", "x"), TableName("shop", "y"))] == [False, True, False, True]
    assert config.selects(A)
    assert not ordered.selects(TableName("public", "b.cd")), "an ordered name is no pattern"
