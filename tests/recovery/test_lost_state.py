"""Invariant 2, the target owns the position: a lost or restored checkpoint or spool loses no row and repeats
none.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.config.model import PipelineConfig
from penstock.errors import SlotLostError
from penstock.testing.shop import ShopWorkload, create_shop
from tests.support.fix_pipeline import Mirror, MirrorFactory
from tests.support.fix_postgres import Database

SHOP = ("shop.customers", "shop.orders", "shop.order_items")

LOSSES: dict[str, Callable[[PipelineConfig], list[Path]]] = {
    "checkpoint": lambda config: [config.checkpoint],
    "spool": lambda config: [config.spool],
    "checkpoint and spool": lambda config: [config.checkpoint, config.spool],
    "the whole state": lambda config: [config.state],
}


def test_no_row_is_lost_or_doubled_when_something_is_deleted_between_runs(
    database: Database, mirror: MirrorFactory
) -> None:
    create_shop(database.dsn, customers=50, orders=100)
    shop = mirror(tables=["shop.*"])
    shop.run_once()
    for seed, loss in enumerate(LOSSES):
        _work(database, seed)
        _lose(shop, loss)
        shop.run_once()
        _check(shop, f"without {loss}")


def test_no_row_is_lost_or_doubled_when_something_is_put_back_as_it_was_runs_ago(
    database: Database, mirror: MirrorFactory, tmp_path: Path
) -> None:
    """A restored backup: its WAL position is old, and the slot does not go back."""
    create_shop(database.dsn, customers=50, orders=100)
    shop = mirror(tables=["shop.*"])
    shop.run_once()
    shutil.copytree(shop.config.state, old := tmp_path / "old")
    for seed in (1, 2):
        _work(database, seed)
        shop.run_once()
    for seed, loss in enumerate(("checkpoint", "spool", "the whole state"), 3):
        _work(database, seed)
        _lose(shop, loss)
        for path in LOSSES[loss](shop.config):
            shutil.copytree(old / path.relative_to(shop.config.state), path)
        shop.run_once()
        _check(shop, f"{loss} put back")


def test_a_batch_that_was_planned_but_not_applied_survives_the_loss_of_the_spool(
    database: Database, mirror: MirrorFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint then has an end that the spool must reach again, even if nothing new is written."""
    create_shop(database.dsn, customers=50, orders=100)
    shop = mirror(tables=["shop.*"])
    shop.run_once()
    _work(database, 3)
    _crash_in_the_first_epoch(shop, monkeypatch)
    _lose(shop, "spool")
    shop.run_once()
    shop.assert_equal(*SHOP)


def test_tables_that_were_applied_are_not_applied_again_after_a_crash_before_the_record(
    database: Database, mirror: MirrorFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L01: after the sink's commit, before the epoch is recorded.

    Inserts are appended, so a repeat would show as doubled rows.
    """
    database.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (0)")
    items = mirror()
    items.run_once()
    database.execute("INSERT INTO t SELECT g FROM generate_series(1, 1000) g")

    def crash(*_: object) -> None:
        raise _CrashError

    with monkeypatch.context() as patch:
        patch.setattr("penstock.pipeline.epoch_log.EpochLog.record", crash)
        with pytest.raises(Exception, match="_CrashError"):
            items.run_once()
    assert len(items.rows("public.t")) == 1001
    database.execute("INSERT INTO t VALUES (2000)")
    items.run_once()
    items.assert_equal("public.t")


class _CrashError(Exception):
    pass


def _work(database: Database, seed: int) -> None:
    workload = ShopWorkload(database.dsn, seed=seed)
    with workload:
        while workload.transactions < 100:
            time.sleep(0.01)


def _check(shop: Mirror, what: str) -> None:
    try:
        shop.assert_equal(*SHOP)
    except AssertionError as error:
        error.add_note(what)
        raise


def _lose(shop: Mirror, loss: str) -> None:
    for path in LOSSES[loss](shop.config):
        shutil.rmtree(path)


def _crash_in_the_first_epoch(shop: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise SlotLostError("crash")  # an error with a shared cause: the run ends, and no table is retried

    with monkeypatch.context() as patch:
        patch.setattr("penstock.sinks.delta.sink.DeltaSink.apply", crash)
        with pytest.raises(SlotLostError, match="crash"):
            shop.run_once()
