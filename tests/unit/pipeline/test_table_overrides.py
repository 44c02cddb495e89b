from __future__ import annotations

import threading
from pathlib import Path

import pytest

from penstock.config.model import PipelineConfig
from penstock.errors import SpoolCorruptError
from penstock.pipeline.table_overrides import FILE, TableOverrides, change_overrides, load_overrides
from penstock.schema import TableName

A, B = TableName("public", "a"), TableName("public", "b.c*")


def test_overrides_store_the_wanted_state_not_the_commands() -> None:
    orders = TableOverrides().add([A]).add([A]).pause([A])
    assert orders == TableOverrides(added=frozenset({A}), paused=frozenset({A}))
    assert orders.remove([A]) == TableOverrides(removed=frozenset({A}))
    assert orders.remove([A]).add([A]) == TableOverrides(added=frozenset({A}))
    assert orders.resume([A]).paused == frozenset()
    assert orders.request_resync([A]).clear_resync(A).resync == frozenset()


def test_orders_are_kept_and_none_is_lost_when_two_give_them(tmp_path: Path) -> None:
    names = [TableName("public", f"t{number}") for number in range(40)]
    threads = [
        threading.Thread(
            target=change_overrides, args=(tmp_path, lambda orders, name=name: orders.pause([name]))
        )
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert load_overrides(tmp_path).paused == frozenset(names)
    change_overrides(tmp_path, lambda orders: orders.add([B]))
    assert load_overrides(tmp_path).added == {B}


def test_orders_that_cannot_be_understood_are_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"added": 3}', encoding="utf-8")
    with pytest.raises(SpoolCorruptError, match=FILE):
        load_overrides(tmp_path)


def test_overrides_select_tables_as_if_the_file_said_so() -> None:
    config = PipelineConfig.model_validate(
        {
            "pipeline": "p",
            "source": {"dsn": "dbname=x"},
            "tables": ["public.a", "shop.*"],
            "sink": {"delta": {"path": "lake"}},
        }
    )
    ordered = config.with_tables([B], [A, TableName("shop", "x")])
    assert ordered.named_tables == [B]
    assert [ordered.selects(name) for name in (A, B, TableName("shop", "x"), TableName("shop", "y"))] == [
        False,
        True,
        False,
        True,
    ]
    assert config.selects(A)
    assert not ordered.selects(TableName("public", "b.cd")), "an ordered name is no pattern"
