"""Rules for every capture method: records and lag."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from penstock.contracts.records import Operation, Record
from penstock.records.builder import ChangePlace, RecordBuilder, parse_place
from penstock.records.reader import CaptureSnapshotter
from penstock.testing.capture_conformance import CaptureHarness, delete, upsert
from penstock.testing.streams import take, wait_for
from tests.support.contract.polling_harness import PollingHarness, idle
from tests.support.contract.tables_harness import end_connections
from tests.support.contract.trigger_harness import trigger_harness
from tests.support.contract.wal_harness import wal_harness
from tests.support.fix_postgres import Database


@contextmanager
def polling_harness(database: Database, directory: Path) -> Iterator[CaptureHarness]:
    with idle(PollingHarness(database, directory)) as harness:
        yield harness


HARNESSES = {"wal": wal_harness, "polling": polling_harness, "trigger": trigger_harness}


@pytest.mark.parametrize("kind", HARNESSES)
def test_records_of_any_capture_say_which_changes_a_snapshot_has_not(
    kind: str, shared_database: Database, tmp_path: Path
) -> None:
    with HARNESSES[kind](shared_database, tmp_path) as harness, closing(harness.capture().live()) as changes:
        builder = RecordBuilder(harness.table)
        harness.commit(upsert(harness.table, 1, "one"), upsert(harness.table, 2, "two"))
        with CaptureSnapshotter(harness.capture(), builder) as snapshotter:
            rows = list(snapshotter)
        harness.commit(upsert(harness.table, 3, "three"))
        harness.commit(delete(harness.table, 1))
        records = [builder.record(change) for change in take(changes, 4, harness.deadline_seconds)]
        assert {row.key["id"]: row.operation for row in rows} == {
            1: Operation.SNAPSHOT,
            2: Operation.SNAPSHOT,
        }
        assert len({record.position for record in (*rows, *records)}) == 6, "no two records have one position"
        end = place_of(rows[-1])
        assert [(record.operation, record.key["id"]) for record in records if place_of(record) > end] == [
            (Operation.UPSERT, 3),
            (Operation.DELETE, 1),
        ]
        assert {record.key["id"] for record in records if place_of(record) <= end} == {1, 2}


@pytest.mark.parametrize("kind", HARNESSES)
def test_lag_query_uses_and_closes_its_own_connection(
    kind: str, shared_database: Database, tmp_path: Path
) -> None:
    with HARNESSES[kind](shared_database, tmp_path) as harness, closing(harness.capture().live()) as changes:
        harness.commit(upsert(harness.table, 1, "one"))
        take(changes, 1, harness.deadline_seconds)
        before = harness.open_resources()
        end_connections(shared_database)
        assert (harness.capture().lag() or 0) > 0, "the stream's own connections are closed for the moment"
        wait_for(
            lambda: harness.open_resources() == before,
            f"as before, {before},",
            harness.open_resources,
            harness.deadline_seconds,
        )


def place_of(record: Record) -> ChangePlace:
    place = parse_place(record.position)
    assert isinstance(place, ChangePlace)
    return place
