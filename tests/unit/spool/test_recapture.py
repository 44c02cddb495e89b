"""WAL captured again with other boundaries: every change is read once, in order."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.change import LogStep
from penstock.errors import SpoolGapError
from penstock.spool import SpoolReader, SpoolWriter
from tests.support.spool.builders import (
    ITEMS,
    ORDERS,
    Commit,
    Seen,
    at,
    changes,
    committed,
    piece,
    transactions,
)


@dataclass(frozen=True)
class Pass:
    """One run of a capture: the commit it starts after, the commits it seals after, and those it gets in
    pieces.
    """

    skip: int
    seals: frozenset[int]
    long: frozenset[int]


@dataclass(frozen=True)
class Story:
    log: tuple[Commit, ...]
    passes: tuple[Pass, ...]
    lost: tuple[frozenset[int], ...]
    """For each pass, which of the existing segments (by number) are lost before it."""
    bounds: tuple[int, ...]


@st.composite
def stories(draw: st.DrawFn) -> Story:
    gaps = draw(st.lists(st.integers(1, 5), min_size=1, max_size=12))
    tables = st.lists(st.sampled_from((ORDERS, ITEMS)), min_size=0, max_size=3).map(tuple)
    log = tuple(Commit(sum(gaps[: index + 1]), draw(tables)) for index in range(len(gaps)))
    numbers = st.frozensets(st.integers(0, len(log)))
    first = Pass(0, draw(numbers), draw(numbers))
    later = draw(st.lists(st.builds(Pass, st.integers(0, len(log)), numbers, numbers), max_size=3))
    bounds = draw(st.lists(st.integers(0, log[-1].position), max_size=5))
    lost = (frozenset[int](), *(draw(numbers) for _ in later))
    return Story(log, (first, *later), lost, tuple(sorted({0, *bounds, log[-1].position})))


def _steps(commit: Commit, *, is_long: bool) -> list[LogStep]:
    if not is_long:
        return [transactions(commit)]
    xid = 700 + commit.position
    pieces: list[LogStep] = [
        piece(xid),
        *(piece(xid, (table, ordinal)) for ordinal, table in enumerate(commit.tables)),
    ]
    return [*pieces, committed(xid, commit.position)]


def _capture(root: Path, log: tuple[Commit, ...], run: Pass) -> None:
    start = log[run.skip - 1].position if run.skip else 0
    writer = SpoolWriter(root, at(start))
    for index, commit in enumerate(log[run.skip :], run.skip):
        for step in _steps(commit, is_long=index in run.long):
            writer.append(step)
        if index in run.seals:
            writer.seal(quiet=True)
    writer.seal(quiet=True)
    writer.close()


def _lose(root: Path, numbers: frozenset[int]) -> None:
    for index, path in enumerate(sorted((root / "segments").iterdir())):
        if index in numbers:
            shutil.rmtree(path)


@settings(max_examples=100, deadline=None)
@given(stories())
def test_consecutive_ranges_give_each_change_once_and_in_order(story: Story) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        reader = SpoolReader(root)
        for run, lost in zip(story.passes, story.lost, strict=True):
            reader.segments()
            if lost:
                _lose(root, lost)
            _capture(root, story.log, run)
        seen: dict[str, list[Seen]] = {"orders": [], "items": []}
        expected: dict[str, list[Seen]] = {"orders": [], "items": []}
        for start, end in zip(story.bounds, story.bounds[1:], strict=False):
            if not _holds(reader, start, end):
                with pytest.raises(SpoolGapError):
                    reader.read(at(start), at(end))
                continue
            for table, rows in changes(reader.read(at(start), at(end))).items():
                seen[table] += rows
            for row in (
                row for commit in story.log if start < commit.position <= end for row in commit.seen()
            ):
                expected[row[0]].append(row)
        assert seen == expected


def _holds(reader: SpoolReader, start: int, end: int) -> bool:
    """Whether the segments cover all of `(start, end]`, the slow way."""
    ground = [(segment.start.value, segment.end.value) for segment in SpoolReader(reader.root).segments()]
    return all(any(first < place <= last for first, last in ground) for place in range(start + 1, end + 1))


@settings(max_examples=40, deadline=None)
@given(stories(), st.integers(0, 10))
def test_admission_by_rows_walks_the_whole_log_in_whole_transactions(story: Story, max_rows: int) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        for run in reversed(story.passes):
            _capture(root, story.log, run)
        reader = SpoolReader(root)
        positions = {0, *(commit.position for commit in story.log)}
        reached, last, seen = 0, story.log[-1].position, 0
        while reached < last:
            end = reader.limit(at(reached), max_rows=max_rows)
            assert end.value > reached
            assert end.value in positions
            seen += sum(len(rows) for rows in changes(reader.read(at(reached), end)).values())
            reached = end.value
        assert seen == sum(len(commit.tables) for commit in story.log)
