"""Pipelines stopped by a signal, and pipelines that continue from the state of another version of
Penstock.
"""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from penstock.cli.run import run_pipeline
from penstock.errors import SpoolFormatError
from penstock.sinks.delta.sink import DeltaSink
from tests.support.fix_pipeline import MirrorFactory, two_tables
from tests.support.fix_postgres import Database
from tests.support.pipeline.signals import is_active, own_handlers, signalled_once
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLES = ("public.good", "public.bad")


def test_K07_a_signal_in_the_middle_of_an_epoch_ends_the_run_in_order(
    database: Database, mirror: MirrorFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_tables(database)
    both = mirror()
    both.run_once()
    for number, (sent, code) in enumerate([(signal.SIGTERM, 0), (signal.SIGINT, 130)]):
        for table in ("good", "bad"):
            database.execute(f"INSERT INTO {table} VALUES ({10 + number}, 'b')")
        waiting = signalled_once(monkeypatch, DeltaSink, sent)
        with own_handlers():
            assert run_pipeline(both.path, once=False, console=Console(quiet=True)) == code
        monkeypatch.undo()
        assert not waiting
        wait_for(
            lambda: not is_active(database, both), "the slot to be let go of", lambda: "it is taken", 60.0
        )
    both.run_once()
    both.assert_equal(*TABLES)


def test_K08_state_of_a_former_version_continues_and_state_of_a_later_one_is_left_alone(
    database: Database, mirror: MirrorFactory, spark: SparkSession
) -> None:
    two_tables(database)
    both = mirror()
    both.run_once()
    for name in ("good", "bad"):
        path = both.config.sink.root / "public" / name
        spark.sql(f"ALTER TABLE delta.`{path}` UNSET TBLPROPERTIES ('penstock.mode', 'penstock.origin')")
    for path in both.config.spool.rglob("*.json"):
        document = json.loads(path.read_text())
        if document.get("format") == 2:
            path.write_text(json.dumps({**document, "format": 1}))
    database.execute("INSERT INTO good VALUES (2, 'b'); UPDATE bad SET v = 'c'")
    assert not both.run_once().failed
    both.assert_equal(*TABLES)
    records = both.config.sink.root / "penstock_epochs" / both.config.pipeline
    last = max(records.glob("*.json"))
    last.write_text(json.dumps({**json.loads(last.read_text()), "format": 99}))
    database.execute("INSERT INTO good VALUES (3, 'c')")
    with pytest.raises(SpoolFormatError, match="has format 99"):
        both.run_once()
    assert len(both.rows("public.good")) == 2
