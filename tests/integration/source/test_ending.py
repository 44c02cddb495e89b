"""How a query ends: the slot is free for the next one at once."""

from __future__ import annotations

import pytest

from tests.integration.source.stream import ChangeSource

pytestmark = pytest.mark.source

RELEASE_SECONDS = 3.0


def test_stopping_an_idle_query_releases_the_slot(source: ChangeSource) -> None:
    run = source.start()
    source.wait_for_active_slot()
    run.stop()
    source.wait_for_idle_slot(RELEASE_SECONDS)
    assert not source.is_slot_active()


def test_stopping_a_busy_query_releases_the_slot_and_the_spool(source: ChangeSource) -> None:
    run = source.start()
    source.insert(1, 50_000)
    # Stopped before it has written its first offset, Spark would take its own temporary file for a foreign checkpoint.
    run.wait_for((source.checkpoint / "offsets" / "0").exists, "first batch")
    run.stop()
    source.wait_for_idle_slot(RELEASE_SECONDS)
    rest = source.start()
    rest.wait_for(lambda: len({row["id"] for row in run.rows + rest.rows}) == 50_000, "all rows")


def test_failing_query_releases_the_slot(source: ChangeSource) -> None:
    def refuse(number: int) -> None:
        raise ValueError(number)

    run = source.start(refuse)
    source.insert(1, 3)
    run.wait_for_failure()
    source.wait_for_idle_slot(RELEASE_SECONDS)
    assert not source.is_slot_active()
