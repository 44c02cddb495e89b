"""From a feed into the spool: changes and mark are stored together, and only released positions are
confirmed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typing_extensions import override

from penstock.capture.polling.feed import PollSteps
from penstock.capture.pull import ChangeFeed, FeedCapture, FeedSession, FeedSettings, Mark, spooled_marks
from penstock.capture.settings import CaptureLimits, CaptureMethod, Confirm
from penstock.change import ChangeType, LogStep
from penstock.errors import ConfigError, ConnectionLostError, PenstockError
from penstock.position import Position
from penstock.postgres.server import SystemIdentity
from penstock.schema import Column, TableName, TableSchema
from penstock.spool.reader import SpoolReader
from penstock.spool.retention import release
from penstock.testing.streams import wait_for

TABLE = TableSchema(1, TableName("public", "t"), (Column("id", pa.int64(), 20),), ("id",))
DEADLINE_SECONDS = 60.0


class ListFeed(ChangeFeed):
    """A feed of numbers in a list. A poll returns the new ones; the mark's state is their count."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.confirmed = Mark(Position.of(100), "0")
        self.position = 100
        self.sessions = 0
        self.failures: list[PenstockError] = []
        self.is_due = False

    @override
    def ensure(self) -> Mark:
        return self.confirmed

    @override
    def open(self, mark: Mark) -> FeedSession:
        self.sessions += 1
        return ListSession(self, mark)


class ListSession(FeedSession):
    def __init__(self, feed: ListFeed, mark: Mark) -> None:
        self._feed = feed
        self.system = SystemIdentity("7", 1)
        self.mark = mark

    @override
    def poll(self) -> Iterator[LogStep]:
        if self._feed.failures:
            raise self._feed.failures.pop()
        new = self._feed.numbers[int(self.mark.state) :]
        self._feed.position += 1
        position = Position.of(self._feed.position)
        steps = PollSteps(position, datetime.now(UTC))
        steps.is_due = self._feed.is_due
        if new:
            yield from steps.add(
                TABLE, ChangeType.UPDATE_POSTIMAGE, [pa.array([str(each) for each in new], pa.string())]
            )
        self.mark = Mark(position, str(int(self.mark.state) + len(new)))
        yield from steps.finish()

    @override
    def confirm(self, mark: Mark) -> None:
        self._feed.confirmed = mark


@contextmanager
def running(
    feed: ListFeed, spool: Path, *, quiet_seconds: float = 3600.0, confirm: Confirm = Confirm.APPLIED
) -> Iterator[FeedCapture]:
    capture = FeedCapture(
        feed,
        FeedSettings(
            "list",
            CaptureMethod.POLLING,
            spool,
            CaptureLimits(quiet_seconds=quiet_seconds),
            confirm=confirm,
            interval_seconds=0.001,
        ),
    )
    capture.start()
    try:
        yield capture
    finally:
        capture.stop()


def spooled(spool: Path) -> list[int]:
    reader = SpoolReader(spool)
    start, end = reader.start, reader.end
    if start is None or end is None:
        return []
    found = reader.read(start, end)
    return [row for table in found.tables.values() for each in table.slices for row in _numbers(each.path)]


def _numbers(path: Path) -> list[int]:
    numbers: list[int] = pq.read_table(path).column("id").to_pylist()
    return numbers


def wait(condition: Callable[[], bool], what: str, spool: Path) -> None:
    wait_for(condition, what, lambda: spooled(spool), DEADLINE_SECONDS)


def test_changes_and_mark_lie_in_one_segment(tmp_path: Path) -> None:
    feed = ListFeed()
    feed.numbers += [1, 2]
    with running(feed, tmp_path):
        wait(lambda: spooled(tmp_path) == [1, 2], "two numbers", tmp_path)
        feed.numbers += [3]
        wait(lambda: spooled(tmp_path) == [1, 2, 3], "three numbers", tmp_path)
    segments = SpoolReader(tmp_path).segments()
    assert [[mark.state for mark in spooled_marks([segment])] for segment in segments] == [["2"], ["3"]]
    assert [spooled_marks([segment])[0].position for segment in segments] == [
        segment.end for segment in segments
    ]


def test_capture_resumes_from_the_mark_in_the_spool(tmp_path: Path) -> None:
    feed = ListFeed()
    for number in range(1, 4):
        feed.numbers.append(number)
        with running(feed, tmp_path):
            wait(lambda: spooled(tmp_path) == feed.numbers, "each number once", tmp_path)
    assert feed.confirmed.state == "0"


def test_nothing_is_confirmed_that_a_consumer_has_not_released(tmp_path: Path) -> None:
    feed = ListFeed()
    feed.numbers += [1]
    release(tmp_path, "reader", Position.of(100))
    with running(feed, tmp_path):
        wait(lambda: spooled(tmp_path) == [1], "a number", tmp_path)
        first = SpoolReader(tmp_path).end
        assert first is not None
        feed.numbers += [2]
        wait(lambda: 2 in spooled(tmp_path), "another", tmp_path)
        assert feed.confirmed.state == "0"
        release(tmp_path, "reader", first)
        wait(lambda: feed.confirmed.state != "0", "a confirmed mark", tmp_path)
    assert feed.confirmed == Mark(first, "1")


def test_spooled_confirms_sealed_positions(tmp_path: Path) -> None:
    feed = ListFeed()
    feed.numbers += [1]
    release(tmp_path, "reader", Position.of(100))
    with running(feed, tmp_path, confirm=Confirm.SPOOLED):
        wait(lambda: feed.confirmed.state == "1", "a confirmed mark", tmp_path)
    assert spooled(tmp_path) == [1], "not released"


def test_spool_that_is_lost_is_filled_again_from_the_confirmed_mark(tmp_path: Path) -> None:
    feed, spool = ListFeed(), tmp_path / "spool"
    feed.numbers += [1]
    release(spool, "reader", Position.of(100))
    with running(feed, spool):
        wait(lambda: spooled(spool) == [1], "a number", spool)
        release(spool, "reader", SpoolReader(spool).end or Position.ZERO)
        wait(lambda: feed.confirmed.state == "1", "a confirmed mark", spool)
        feed.numbers += [2, 3]
        wait(lambda: 3 in spooled(spool), "two more", spool)
    shutil.rmtree(spool)
    with running(feed, spool):
        wait(lambda: spooled(spool) == [2, 3], "the unconfirmed changes", spool)
    assert spooled(spool) == [2, 3], "and nothing besides"


def test_quiet_source_moves_the_mark_now_and_then(tmp_path: Path) -> None:
    feed = ListFeed()
    release(tmp_path, "reader", Position.of(100))
    with running(feed, tmp_path, quiet_seconds=0.0) as capture:
        wait(lambda: (capture.end or Position.ZERO) > Position.of(105), "quiet ground", tmp_path)
        release(tmp_path, "reader", Position.of(104))
        wait(lambda: feed.confirmed.position == Position.of(104), "a confirmed mark", tmp_path)
    assert feed.confirmed.state == "0", "nothing has arrived"


def test_mark_that_must_not_be_lost_is_kept_without_a_row(tmp_path: Path) -> None:
    feed = ListFeed()
    feed.is_due = True
    with running(feed, tmp_path):
        wait(lambda: spooled_marks(SpoolReader(tmp_path).segments()) != [], "a mark", tmp_path)
    assert spooled(tmp_path) == []


def test_look_that_fails_is_made_again_from_the_last_mark(tmp_path: Path) -> None:
    feed = ListFeed()
    feed.numbers += [1]
    with running(feed, tmp_path) as capture:
        wait(lambda: spooled(tmp_path) == [1], "a number", tmp_path)
        feed.failures.append(ConnectionLostError("gone"))
        feed.numbers += [2]
        wait(lambda: spooled(tmp_path) == [1, 2], "each number once", tmp_path)
        assert feed.sessions == 2
        feed.failures.append(ConfigError("no"))
        with pytest.raises(ConfigError):
            wait(lambda: capture.wait_beyond(Position.of(1 << 40), 0.1), "an error", tmp_path)


def test_large_poll_is_still_one_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.capture.polling.feed._PIECE_BYTES", 10)
    feed = ListFeed()
    feed.numbers += range(1000)
    with running(feed, tmp_path):
        wait(lambda: spooled(tmp_path) == feed.numbers, "all numbers", tmp_path)
    (segment,) = SpoolReader(tmp_path).segments()
    assert segment.transactions == 1
    assert spooled_marks([segment]) == [Mark(segment.end, "1000")]
