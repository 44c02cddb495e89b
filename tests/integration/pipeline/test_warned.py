"""A run warns at its start about a slot in danger, and continues."""

from __future__ import annotations

import io
from pathlib import Path

import psycopg
from pyspark.sql import SparkSession
from rich.console import Console

from penstock.cli.run import LiveDisplay
from penstock.testing.embedded import EmbeddedPostgres
from tests.support.fix_pipeline import Mirror
from tests.support.fix_postgres import Database, server_directory


def test_L06_a_run_warns_of_a_slot_that_the_next_checkpoint_may_invalidate_and_applies_its_changes(
    spark: SparkSession, tmp_path: Path
) -> None:
    settings = {"max_slot_wal_keep_size": "16MB", "checkpoint_timeout": "1h"}
    with (
        server_directory() as directory,
        EmbeddedPostgres(directory / "data", 18, settings, fsync=False) as server,
    ):
        database = Database("postgres", server.dsn())
        document = {
            "pipeline": "strained",
            "source": {"dsn": server.dsn()},
            "tables": ["public.*"],
            "sink": {"delta": {"path": "lake"}},
            "trigger": "100 ms",
        }
        database.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)")
        mirror = Mirror(spark, database, tmp_path, document)
        assert "PEN-1220" not in _said(mirror)
        database.execute("INSERT INTO t VALUES (2)")
        with psycopg.connect(server.dsn(), autocommit=True) as session:
            for _ in range(4):
                session.execute("SELECT pg_logical_emit_message(false, 'filler', 'x')")
                session.execute("SELECT pg_switch_wal()")
        said = _said(mirror)
        assert "warning PEN-1220: slot penstock_strained retains more WAL than max_slot_wal_keep_size" in said
        assert "fix: let the reader of the slot catch up now" in said
        mirror.assert_equal("public.t")
        database.close()


def _said(mirror: Mirror) -> str:
    out = io.StringIO()
    with LiveDisplay(Console(file=out, width=400)) as display:
        mirror.run_once(display)
    return out.getvalue()
