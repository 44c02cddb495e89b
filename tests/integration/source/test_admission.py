"""Admission of segments to a batch: a batch holds whole segments, at least one."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from penstock.errors import ConfigError
from penstock.spark.java import spark_minor
from penstock.spark.options import Admission, ReadAllAvailable, ReadMaxRows
from tests.support.source.stream import BatchRefusedError, ChangeSource, RunningQuery
from tests.support.waiting import wait_for

pytestmark = pytest.mark.source

HAS_LIMITS = spark_minor() != "4.1"


def pile_up(source: ChangeSource, segments: int, rows: int) -> None:
    """Leave a spool with this number of segments that Spark has not committed, and a checkpoint with one
    failed batch.
    """
    held, entered = threading.Event(), threading.Event()

    def hold(number: int) -> None:
        entered.set()
        assert held.wait(60)
        raise BatchRefusedError(f"batch {number}")

    source.insert(1, rows)
    run = source.start(hold)
    wait_for(entered.is_set, "batch")
    source.insert_segments(segments - 1, rows, first=rows + 1)
    held.set()
    run.wait_for_failure()
    source.wait_for_idle_slot()


def sizes(run: RunningQuery) -> list[int]:
    return [len(batch.rows) for batch in run.filled]


def test_batches_are_bounded_also_across_restarts(source: ChangeSource) -> None:
    pile_up(source, segments=6, rows=10)

    def fail_on_the_third(number: int) -> None:
        if len(run.filled) == 2:
            raise BatchRefusedError(f"batch {number}")

    run = source.start(fail_on_the_third, maxRowsPerBatch="20")
    run.wait_for_failure()
    rest = source.start(maxRowsPerBatch="20")
    rest.wait_for_rows(60 - len(run.rows))
    assert [row["id"] for row in run.rows + rest.rows] == list(range(1, 61))
    assert max(sizes(run) + sizes(rest)) == 20


def test_available_now_takes_everything_committed_before_and_ends(source: ChangeSource) -> None:
    pile_up(source, segments=5, rows=10)
    source.insert(51, 55)  # in no spool yet
    run = source.start(trigger={"availableNow": True}, maxRowsPerBatch="20")
    assert run.query is not None
    assert run.query.awaitTermination(60)
    if HAS_LIMITS:
        assert [row["id"] for row in run.rows] == list(range(1, 56))
        assert max(sizes(run)) <= 20
    else:
        # Spark 4.1 has no limits and repeats only the failed batch.
        assert sizes(run) == [10]


def test_trigger_once_takes_everything_whatever_the_limit(source: ChangeSource) -> None:
    pile_up(source, segments=4, rows=10)
    runs = [source.start(trigger={"once": True}, maxRowsPerBatch="10")]
    while sum(len(run.rows) for run in runs) < (40 if HAS_LIMITS else 20):
        query = runs[-1].query
        assert query is not None
        assert query.awaitTermination(60)
        runs.append(source.start(trigger={"once": True}, maxRowsPerBatch="10"))
    # The failed batch is first; after it the limits of Spark 4.2's trigger apply. Spark 4.1 has no limits.
    assert [size for run in runs for size in sizes(run)] == ([10, 30] if HAS_LIMITS else [10, 10])


def test_transaction_is_never_split_between_batches(source: ChangeSource) -> None:
    pile_up(source, segments=4, rows=7)
    for number in range(4, 12):
        source.insert(number * 7 + 1, number * 7 + 7)
    run = source.start(maxRowsPerBatch="1", segmentRows="1")
    run.wait_for_rows(84)
    for batch in run.filled:
        assert set(Counter(row["_commit_version"] for row in batch.rows).values()) == {7}
    assert len(run.filled) >= 4
    versions = [row["_commit_version"] for row in run.rows]
    assert versions == sorted(versions)


def test_long_transaction_arrives_whole_in_one_batch(source: ChangeSource) -> None:
    # So little memory that the server sends the transaction in pieces, long before it commits.
    source.database.execute(f"ALTER DATABASE {source.database.name} SET logical_decoding_work_mem = '64kB'")
    with source.database.transaction():
        source.insert(1, 60_000)
        source.database.execute("SAVEPOINT s")
        source.insert(200_001, 201_000)
        source.database.execute("ROLLBACK TO s")
        source.insert(60_001, 120_000)
    source.insert(120_001, 120_001)
    run = source.start(maxRowsPerBatch="1000")
    run.wait_for_rows(120_001)
    batch = run.filled[0]
    assert len(batch.rows) == 120_000
    assert len({row["_commit_version"] for row in batch.rows}) == 1
    assert [row["id"] for row in run.rows] == list(range(1, 120_002))
    ordinals = [row["_ordinal"] for row in batch.rows]
    assert ordinals == sorted(set(ordinals))


@pytest.mark.parametrize(
    ("limit", "admission"),
    [
        (None, Admission(500, 1 << 30)),
        (ReadMaxRows(20), Admission(20, 1 << 30)),
        (ReadAllAvailable(), Admission(None, None)),
    ],
)
def test_limit_of_the_trigger_overrides_the_option(limit: object, admission: Admission) -> None:
    assert Admission.from_options({"maxrowsperbatch": "500"}).under(limit) == admission


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", ""])
def test_limit_that_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="maxBytesPerBatch"):
        Admission.from_options({"maxBytesPerBatch": text})


def test_transactions_bound_a_batch_too(source: ChangeSource) -> None:
    pile_up(source, segments=5, rows=2)
    run = source.start(maxTransactionsPerBatch="2")
    run.wait_for_rows(10)
    assert sizes(run)[0] == 2  # the batch that had failed
    assert max(len({row["_commit_version"] for row in batch.rows}) for batch in run.filled) == 2
