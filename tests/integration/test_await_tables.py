"""A run whose patterns match no table yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.model import load_config
from penstock.errors import NoTablesError
from penstock.pipeline.table_selection import await_tables, check_selected, select_tables
from penstock.postgres.connection import connect
from tests.support.fix_check import write_config
from tests.support.fix_postgres import Database


def test_patterns_without_a_match_are_waited_for_and_reported_once(
    database: Database, tmp_path: Path
) -> None:
    path = write_config(database, tmp_path, {"tables": ["later.*"]})
    told: list[str] = []
    pauses: list[float] = []

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        if len(pauses) == 3:
            database.execute("CREATE SCHEMA later; CREATE TABLE later.t (id int PRIMARY KEY)")
        return False

    config = await_tables(lambda: load_config(path), told.append, pause)
    assert config == load_config(path)
    assert pauses == [10.0, 10.0, 10.0]
    (words,) = told
    assert "matches a pattern of tables: yet; looking again every 10 s" in words


def test_waiting_for_tables_ends_when_the_run_is_stopped(database: Database, tmp_path: Path) -> None:
    config = load_config(write_config(database, tmp_path, {"tables": ["later.*"]}))
    assert await_tables(lambda: config, lambda _: None, lambda _: True) is None


def test_a_named_table_that_does_not_exist_is_an_error_and_not_waited_for(
    database: Database, tmp_path: Path
) -> None:
    config = load_config(write_config(database, tmp_path, {"tables": ["later.*", {"table": "later.t"}]}))
    assert await_tables(lambda: config, lambda _: pytest.fail("it waits"), lambda _: True) is config
    with connect(config.source.address()) as connection, pytest.raises(NoTablesError, match=r"later\.t"):
        check_selected(select_tables(connection, config), "the source")
