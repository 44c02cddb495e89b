"""A consumer of the spool from any position receives the rest, nothing twice, however the log is cut into
segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.change import change_schema, snapshot_batch, truncate_batch
from penstock.connectors.feed import ChangedRows, Range
from penstock.connectors.progress import Offset, Progress
from penstock.contracts.connector import SourceCheckpoint
from penstock.postgres.chunks import snapshot_schema
from penstock.spool import SpoolReader, SpoolWriter
from tests.support.spool.builders import ITEMS, ORDERS, Commit, Seen, at, capture, committed, piece

TABLES = (ITEMS.name, ORDERS.name)


@st.composite
def logs(draw: st.DrawFn) -> list[Commit]:
    shapes = draw(
        st.lists(st.lists(st.sampled_from([ORDERS, ITEMS]), min_size=1, max_size=5), min_size=1, max_size=6)
    )
    return [Commit(10 * (number + 1), tuple(tables)) for number, tables in enumerate(shapes)]


def cut(log: list[Commit], ends: set[int]) -> list[list[Commit]]:
    segments: list[list[Commit]] = [[]]
    for number, commit in enumerate(log):
        segments[-1].append(commit)
        if number in ends and commit is not log[-1]:
            segments.append([])
    return segments


def consume(spool: Path, progress: Progress, size: int) -> Iterator[tuple[list[Seen], Progress]]:
    """Batches of at most `size` rows, each with the place behind it."""
    reader = SpoolReader(spool)
    skip = progress.ahead
    while (upto := reader.limit(progress.floor, max_rows=1)) > progress.floor:
        for rows in Range.of(reader.read(progress.floor, upto), skip, lambda _: True).rows():
            for start in range(0, rows.records.num_rows, size):
                part = ChangedRows(rows.table, rows.records.slice(start, size))
                progress = progress.changed(part.table, *part.last_commit)
                yield seen(part), progress
        progress = progress.reached(upto)
        yield [], progress


def seen(part: ChangedRows) -> list[Seen]:
    columns = (part.records.column(name).to_pylist() for name in ("_commit_version", "_ordinal"))
    return [(part.table.name, version, ordinal) for version, ordinal in zip(*columns, strict=True)]


@settings(max_examples=30)
@given(logs(), st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)), st.integers(1, 3), st.integers(0, 40))
def test_from_every_position_the_rest_is_returned_and_nothing_twice(
    log: list[Commit], before: set[int], after: set[int], size: int, batches: int
) -> None:
    with TemporaryDirectory() as directory:
        first, second = Path(directory, "first"), Path(directory, "second")
        capture(first, 0, cut(log, before))
        capture(second, 0, cut(log, after))
        progress = Progress().covering(TABLES, copies=False)
        found: list[Seen] = []
        for rows, place in islice(consume(first, progress, size), batches):
            found, progress = found + rows, place
        stored = SourceCheckpoint.from_json(progress.to_checkpoint(1, "s", None).to_json())
        for rows, _ in consume(second, Progress.from_checkpoint(stored), size):
            found += rows
    expected = [each for commit in log for each in commit.seen()]
    for table in TABLES:
        assert [each for each in found if each[0] == table.name] == [
            each for each in expected if each[0] == table.name
        ]


def test_rows_behind_a_rolled_back_savepoint_are_identified_by_count_and_not_by_their_ordinals(
    tmp_path: Path,
) -> None:
    """In a streamed transaction, rolled-back rows have used ordinals; in a whole one, the same rows have
    others.
    """
    writer = SpoolWriter(tmp_path / "pieces", at(0))
    writer.append(piece(7, (ORDERS, 0), (ORDERS, 5), (ORDERS, 6)))
    writer.append(committed(7, 40))
    writer.close()
    capture(tmp_path / "whole", 0, [[Commit(40, (ORDERS, ORDERS, ORDERS))]])
    first, progress = next(consume(tmp_path / "pieces", Progress().covering(TABLES, copies=False), 1))
    rest = [row for rows, _ in consume(tmp_path / "whole", progress, 1) for row in rows]
    assert (first, rest) == ([("orders", 40, 0)], [("orders", 40, 1), ("orders", 40, 2)])


def test_rows_of_a_snapshot_are_not_repeated(tmp_path: Path) -> None:
    capture(
        tmp_path, 0, [[Commit(10, (ORDERS, ITEMS)), Commit(20, (ORDERS, ITEMS)), Commit(30, (ORDERS, ITEMS))]]
    )
    progress = Progress().covering(TABLES, copies=True).copied(ORDERS.name, at(20)).copied(ITEMS.name, at(30))
    assert progress.ahead == {ORDERS.name: Offset(at(20)), ITEMS.name: Offset(at(30))}
    found = list(consume(tmp_path, progress, 10))
    assert [row for rows, _ in found for row in rows] == [("orders", 30, 0)]
    assert found[-1][1].ahead == {}


def test_rows_of_a_snapshot_and_a_truncate_have_the_shape_of_changes() -> None:
    schema = snapshot_schema(ITEMS)
    rows = pa.RecordBatch.from_arrays(
        [pa.array([1, 2]), pa.array(["x", None]), pa.nulls(2, schema.field(2).type)], schema=schema
    )
    copied, emptied = snapshot_batch(rows, ITEMS, 77, 5), truncate_batch(ITEMS, at(77))
    assert copied.schema == emptied.schema == change_schema(ITEMS)
    places = [
        (row["_change_type"], row["_commit_version"], row["_ordinal"], row["id"])
        for row in [*copied.to_pylist(), *emptied.to_pylist()]
    ]
    assert places == [("snapshot", 77, 5, 1), ("snapshot", 77, 6, 2), ("truncate", 77, 0, None)]
