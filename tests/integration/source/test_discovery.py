"""Spark finds the format by its name or by registration."""

from __future__ import annotations

import pytest

import penstock
from tests.support.source.stream import ChangeSource

pytestmark = pytest.mark.source


def test_format_is_found_by_its_name_alone(source: ChangeSource) -> None:
    # A new session knows nothing that another test registered.
    frame = source.reader(spark=source.spark.newSession()).load()
    assert frame.isStreaming
    assert frame.columns[:3] == ["id", "note", "_change_type"]


def test_format_is_found_in_a_session_that_registered_it(source: ChangeSource) -> None:
    session = source.spark.newSession()
    penstock.register(session)
    assert source.reader(spark=session).load().isStreaming


def test_publication_and_slot_are_made_where_they_are_missing(source: ChangeSource) -> None:
    source.drop_slot()
    source.database.execute(f"DROP PUBLICATION {source.slot}")
    run = source.start()
    source.wait_for_active_slot()
    source.insert(1, 3)
    assert [row["id"] for row in run.wait_for_rows(3)] == [1, 2, 3]
