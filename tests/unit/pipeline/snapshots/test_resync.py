"""Copies of resyncs that were ended while their thread still copied."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from penstock.errors import TableFailedError
from penstock.pipeline.snapshots.resync import ResyncListener, Resyncs
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.base import Target
from penstock.sinks.modes import Mode
from tests.support.pipeline.epochs import open_resyncs
from tests.support.pipeline.position_sink import PositionSink

ITEMS = TableName("public", "items")


@pytest.fixture
def ended(tmp_path: Path) -> list[tuple[TableName, str | None]]:
    return []


@pytest.fixture
def resyncs(tmp_path: Path, ended: list[tuple[TableName, str | None]]) -> Resyncs:
    return open_resyncs(PositionSink(), tmp_path, on_done=lambda name, failure: ended.append((name, failure)))


def _begin(resyncs: Resyncs) -> ResyncListener:
    shadow = PositionSink()
    resyncs.begin(ITEMS, shadow, Position.of(100))
    return ResyncListener(resyncs, shadow)


def _copy() -> Target:
    return Target(ITEMS, 1, ("id",), pa.schema([("id", pa.int32())]), Position.of(100), Mode.MIRROR)


def test_a_copy_of_an_ended_resync_neither_ends_nor_completes_the_next_one(
    resyncs: Resyncs, ended: list[tuple[TableName, str | None]]
) -> None:
    former = _begin(resyncs)
    resyncs.abandon(ITEMS)
    assert ended == [(ITEMS, "it was abandoned")]
    current = _begin(resyncs)
    former.set_fence(ITEMS, Position.of(300))
    assert resyncs.holds == [Position.of(100)]
    former.add_copied(_copy())
    assert not resyncs.collect_copies()
    former.fail(ITEMS, TableFailedError("its directory is gone"))
    assert ITEMS in resyncs
    assert len(ended) == 1
    current.add_copied(_copy())
    assert resyncs.collect_copies()


def test_a_copy_that_was_complete_before_its_resync_ended_is_not_swapped_in_by_the_next_one(
    resyncs: Resyncs,
) -> None:
    _begin(resyncs).add_copied(_copy())
    resyncs.abandon(ITEMS)
    _begin(resyncs)
    assert not resyncs.collect_copies()
