"""`spark.read`: the current rows, in parallel, under one snapshot."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from penstock.spark.holder import hold_snapshot
from tests.support.source.stream import ChangeSource
from tests.support.waiting import wait_for

TYPES = """
CREATE TABLE many (
    id int PRIMARY KEY, word text, amount numeric(12,2), any_amount numeric, at timestamptz, day date,
      ok boolean,
    f float8, code char(4)
)
"""
FILL = """
INSERT INTO many SELECT g, CASE g % 5 WHEN 0 THEN NULL WHEN 1 THEN 'a%b_' || g ELSE 'W' || g END, g / 7.0,
    CASE g % 11 WHEN 0 THEN 'NaN' ELSE g::numeric END,
    '2024-01-01'::timestamptz + g * interval '1 hour',
      CASE g % 13 WHEN 0 THEN 'infinity'::date ELSE '2024-01-01'::date + g END, g % 3 = 0,
    CASE g % 17 WHEN 0 THEN 'NaN' ELSE g::float8 END, 'c' || g % 9
FROM generate_series(1, 500) g
"""
FILTERS = [
    "id = 7",
    "id IN (1, 2, 1000)",
    "word = 'W7'",
    "word > 'a'",
    "word <= 'W3' AND word IS NOT NULL",
    "word LIKE 'a\\\\%b%'",
    "word LIKE '%b%'",
    "amount >= 10.00 AND amount < 11",
    "any_amount IS NULL",
    "NOT any_amount = 5",
    "day = date'2024-03-01'",
    "at < timestamp'2024-01-02 00:00:00Z'",
    "ok",
    "f > 480",
    "code = 'c1'",  # blanks at the end count
    "id <=> 3",
]
NOTHING = {"code = 'c1'"}


def read(source: ChangeSource, **options: str) -> DataFrame:
    given = {name: value for name, value in source.options.items() if name in ("dsn", "password", "table")}
    return source.spark.read.format("postgres-cdc").options(**{**given, **options}).load()


@pytest.mark.source
@pytest.mark.newest
def test_rows_of_now_come_in_parallel_from_one_moment(source: ChangeSource) -> None:
    source.insert(1, 5000)
    frame = read(source, chunkBytes="8192").select("id", "note")
    planned = frame.rdd.getNumPartitions()
    assert planned > 5
    # The batch is planned and its snapshot taken: it does not contain later commits.
    source.database.execute("UPDATE orders SET note = 'late'")
    source.database.execute("DELETE FROM orders WHERE id <= 100")
    rows = frame.rdd.collect()
    assert sorted(row["id"] for row in rows) == list(range(1, 5001))
    assert {row["note"] for row in rows} == {f"n{number}" for number in range(1, 5001)}


def test_batch_makes_neither_slot_nor_publication(source: ChangeSource) -> None:
    source.drop_slot()
    source.database.execute(f"DROP PUBLICATION {source.slot}")
    source.insert(1, 3)
    assert sorted(row["id"] for row in read(source).collect()) == [1, 2, 3]
    assert source.database.query(
        "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
    ) == [(0,)]
    assert source.database.query("SELECT count(*) FROM pg_publication") == [(0,)]


@pytest.mark.source
def test_values_are_those_of_the_stream_and_say_that_they_are_a_snapshot(source: ChangeSource) -> None:
    source.database.execute(
        "CREATE TABLE wide (id int PRIMARY KEY, amount numeric(12,2), at timestamptz, day date, raw bytea)"
    )
    source.database.execute(
        "INSERT INTO wide VALUES (1, 12.50, '2024-02-29 12:00:00+02', 'infinity', '\\x00ff')"
    )
    (row,) = read(source, table="public.wide").collect()
    assert (row["amount"], row["at"].astimezone(UTC), row["day"], bytes(row["raw"])) == (
        Decimal("12.50"),
        datetime(2024, 2, 29, 10, tzinfo=UTC),
        None,
        b"\x00\xff",
    )
    assert (row["_change_type"], row["_commit_version"], row["_exact"]) == (
        "snapshot",
        None,
        {"day": "infinity"},
    )
    frame = read(source, table="public.wide")
    assert frame.schema == source.reader({"table": "public.wide"}).load().schema


def test_columns_are_chosen_by_name_and_only_these_are_read(source: ChangeSource) -> None:
    source.database.execute("CREATE TABLE few (id int PRIMARY KEY, endless date, day date)")
    source.database.execute("INSERT INTO few VALUES (1, 'infinity', '2024-01-01')")
    with pytest.raises(PySparkException, match="PEN-1411"):
        read(source, table="public.few", onUnrepresentable="error").collect()
    frame = read(source, table="public.few", onUnrepresentable="error", columns="day, id")
    assert frame.columns == ["day", "id"]
    assert [tuple(row) for row in frame.collect()] == [(date(2024, 1, 1), 1)]
    with pytest.raises(PySparkException, match="has no column 'nothing'"):
        read(source, columns="nothing")
    assert "only for spark.read" in source.start(table="public.few", columns="id").wait_for_failure()


@pytest.mark.source
@pytest.mark.newest
def test_filters_reach_the_source_and_never_change_the_result(source: ChangeSource) -> None:
    source.database.execute(TYPES)
    source.database.execute(FILL)
    spark = source.spark
    verdicts = [F.expr(condition).alias(f"c{place}") for place, condition in enumerate(FILTERS)]
    whole = read(source, table="public.many").select("id", *verdicts).collect()
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        for place, condition in enumerate(FILTERS):
            wanted = sorted(row["id"] for row in whole if row[f"c{place}"])
            found = read(
                source, table="public.many", columns="id, word, amount, any_amount, at, day, ok, f, code"
            ).where(condition)
            assert sorted(row["id"] for row in found.select("id").collect()) == wanted, condition
            assert wanted or condition in NOTHING, condition
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_snapshot_that_is_gone_is_an_error_and_not_another_moment(source: ChangeSource) -> None:
    source.insert(1, 1000)
    frame = read(source, chunkBytes="8192")
    assert len(frame.rdd.collect()) == 1000
    held = (
        "SELECT pid FROM pg_stat_activity "
        "WHERE application_name = 'penstock holder' AND datname = current_database()"
    )
    assert source.database.query(held)
    source.database.execute(f"SELECT pg_terminate_backend(pid) FROM ({held}) h")
    wait_for(lambda: not source.database.query(held), "end of the holder's sessions")
    with pytest.raises(Exception, match="PEN-4002"):
        frame.rdd.collect()


def test_holder_ends_without_readers_or_without_its_spark(source: ChangeSource) -> None:
    held = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE application_name = 'penstock holder' AND datname = current_database()"
    )
    assert hold_snapshot(source.address, 3600, idle_seconds=0.1)
    wait_for(lambda: source.database.query(held) == [(0,)], "end of an idle holder")
    hold_snapshot(source.address, 0.5, idle_seconds=3600)
    wait_for(lambda: source.database.query(held) == [(0,)], "end of a holder whose time is over")


def test_small_table_needs_no_holder_and_can_be_read_again_at_any_time(source: ChangeSource) -> None:
    source.insert(1, 3)
    frame = read(source)
    assert len(frame.rdd.collect()) == 3
    assert (
        source.database.query("SELECT 1 FROM pg_stat_activity WHERE application_name = 'penstock holder'")
        == []
    )
    source.insert(4, 4)
    assert len(frame.rdd.collect()) == 4


def test_a_partition_that_is_created_after_planning_is_part_of_no_row(source: ChangeSource) -> None:
    """A task that reads the only partition later would find half of a transaction."""
    source.database.execute(
        "CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id); "
        "CREATE TABLE low PARTITION OF parted FOR VALUES FROM (0) TO (10); INSERT INTO parted VALUES (1)"
    )
    rows = read(source, table="public.parted").select("id").rdd
    assert rows.getNumPartitions() == 1
    source.database.execute(
        "CREATE TABLE high PARTITION OF parted FOR VALUES FROM (10) TO (20); "
        "INSERT INTO parted VALUES (2), (12)"
    )
    assert [row.id for row in rows.collect()] == [1]


def test_several_tables_cannot_be_read_at_once(source: ChangeSource) -> None:
    with pytest.raises(PySparkException, match="PEN-1001"):
        read(source, table="", tables="public.*").collect()
