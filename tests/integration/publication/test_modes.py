"""Table modes and the key or replica identity that each needs."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.model import PipelineConfig
from penstock.pipeline.table_selection import select_tables
from penstock.postgres.connection import SourceAddress, connect
from tests.support.fix_postgres import Database

STATEMENTS = (
    "CREATE TABLE keyed (id int PRIMARY KEY, note text)",
    "CREATE TABLE bare (note text)",
    "CREATE TABLE full_rows (note text)",
    "ALTER TABLE full_rows REPLICA IDENTITY FULL",
    "CREATE TABLE late (id int PRIMARY KEY DEFERRABLE, note text)",
    "ALTER TABLE late REPLICA IDENTITY FULL",
    "CREATE TABLE nothing (id int PRIMARY KEY)",
    "ALTER TABLE nothing REPLICA IDENTITY NOTHING",
    "CREATE TABLE parted (note text) PARTITION BY LIST (note)",
    "CREATE TABLE parted_a PARTITION OF parted FOR VALUES IN ('a')",
    "CREATE TABLE parted_b PARTITION OF parted FOR VALUES IN ('b')",
    "ALTER TABLE parted REPLICA IDENTITY FULL",
    "ALTER TABLE parted_a REPLICA IDENTITY FULL",
    "CREATE TABLE whole (note text) PARTITION BY LIST (note)",
    "CREATE TABLE whole_a PARTITION OF whole FOR VALUES IN ('a')",
    "ALTER TABLE whole_a REPLICA IDENTITY FULL",
    'CREATE TABLE named (id int PRIMARY KEY, "_Deleted" bool, _current int)',
)


@pytest.fixture
def tables(database: Database) -> Database:
    for statement in STATEMENTS:
        database.execute(statement)
    return database


def refused(database: Database, mode: str, sink: dict[str, Any] | None = None) -> dict[str, str]:
    document: dict[str, Any] = {
        "pipeline": "shop",
        "source": {"dsn": database.dsn},
        "tables": ["public.*"],
        "sink": sink or {"postgres": {"dsn": database.dsn}},
        "mode": mode,
    }
    with connect(SourceAddress.parse(database.dsn)) as connection:
        selection = select_tables(connection, PipelineConfig.model_validate(document))
    return {name.name: error.code for name, error in selection.refused.items()}


def test_R04_R05_a_table_without_key_can_be_appended_or_with_whole_old_rows_mirrored(
    tables: Database,
) -> None:
    without = dict.fromkeys(["bare", "nothing", "parted"], "PEN-1402")
    assert refused(tables, "mirror") == without
    assert refused(tables, "append") == {}
    kept = {**without, **dict.fromkeys(["full_rows", "late", "whole"], "PEN-1402"), "named": "PEN-1404"}
    assert refused(tables, "soft_delete") == kept
    assert refused(tables, "history") == kept
    assert refused(tables, "append", {"parquet": {"path": "/nowhere"}}) == {}
