"""`PostgresSink` against a real server, without Spark: the sink rules and its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import (
    ConnectionLostError,
    PipelineBusyError,
    SchemaChangedError,
    SinkError,
    SinkRefusedError,
    TableRewrittenError,
    TargetForeignError,
)
from penstock.position import Position
from penstock.postgres.target.ddl import probe_target
from penstock.schema import Column, TableName, TableSchema
from penstock.sinks.base import ChangedRows
from penstock.sinks.postgres.sink import PostgresSink
from penstock.sinks.postgres.targets import Naming
from tests.support.contract.postgres_harness import PostgresHarness
from tests.support.contract.sink_harness import ITEMS, PIPELINE
from tests.support.contract.sink_rules import LoadingRules, MirrorRules
from tests.support.fix_postgres import Database
from tests.support.sinks.source import Value


@pytest.fixture
def harness(shared_database: Database, tmp_path: Path) -> Iterator[PostgresHarness]:
    shared_database.execute("DROP SCHEMA IF EXISTS penstock, copy_public, mirror CASCADE")
    made = PostgresHarness(tmp_path, shared_database)
    yield made
    made.sink.close()


class TestRules(MirrorRules, LoadingRules):
    pass


# chunks
# ------------------------------------------------------------------------------------------------------------


def test_of_two_attempts_at_a_chunk_the_first_counts_with_its_fence(harness: PostgresHarness) -> None:
    place = harness.begin()
    rows = harness.source.sorted_rows()
    first, fence = harness.write(place, 0, rows)
    later = Position.of(harness.fence.value + 50)
    again, read_at = harness.write(place, 0, rows[:3], later)
    assert (again, read_at, fence) == (first, harness.fence, harness.fence)
    harness.sink.finish_snapshot(harness.table, [again], harness.fence)
    assert harness.rows() == rows


def test_a_snapshot_is_not_finished_with_other_chunks_than_exist(harness: PostgresHarness) -> None:
    place = harness.begin()
    rows = harness.source.sorted_rows()
    file, _ = harness.write(place, 0, rows[:5])
    harness.write(place, 1, rows[5:])
    with pytest.raises(TableRewrittenError):
        harness.sink.finish_snapshot(harness.table, [file], harness.fence)
    assert (harness.rows(), harness.target().applied) == ([], None)


def test_a_chunk_that_fails_leaves_no_row_and_is_loaded_by_the_next_attempt(harness: PostgresHarness) -> None:
    place = harness.begin()
    rows = harness.source.sorted_rows()
    broken = {**rows[0], "id": Value("not a number")}
    with pytest.raises(SinkRefusedError):
        harness.write(place, 0, [*rows, broken])
    file, _ = harness.write(place, 0, rows)
    harness.sink.finish_snapshot(harness.table, [file], harness.fence)
    assert harness.rows() == rows


def test_a_chunk_of_an_abandoned_snapshot_is_not_written(harness: PostgresHarness) -> None:
    old = harness.begin()
    place = harness.begin()
    with pytest.raises(SinkRefusedError):
        harness.write(old, 0, harness.source.sorted_rows())
    harness.sink.finish_snapshot(harness.table, [harness.write(place, 0, [])[0]], harness.fence)
    assert harness.rows() == []


def test_N03_a_repaired_snapshot_has_each_key_once_as_it_is_at_the_last_fence(
    harness: PostgresHarness, tmp_path: Path
) -> None:
    """Row 1 moved to a block that was read later, so both chunks have it; row 2 was deleted in between."""
    rows = harness.source.sorted_rows()
    place = harness.begin()
    first, _ = harness.write(place, 0, rows[:5])
    fence = Position.of(harness.fence.value + 50)
    second, _ = harness.write(place, 1, [*rows[5:], harness.item(1, "moved")], fence)
    keys, changed = tmp_path / "keys", tmp_path / "rows.parquet"
    keys.mkdir()
    pq.write_table(
        pa.table({"match_0": ["1", "2"], "match_text_0": pa.nulls(2, pa.string())}), keys / "part.parquet"
    )
    pq.write_table(pa.table({"value_0": ["1"], "value_1": ["moved"], "value_2": ["0.10"]}), changed)
    harness.sink.repair_snapshot(
        harness.table, [first, second], ChangedRows(str(keys), (str(changed),)), fence
    )
    assert harness.target().applied == fence
    assert harness.rows() == sorted([harness.item(1, "moved", "0.10"), *rows[2:]], key=repr)


# --- target contents ---


def test_a_table_has_the_source_s_types_and_its_key(harness: PostgresHarness) -> None:
    named = {
        "a": (23, -1, "integer"),
        "b": (1043, 14, "character varying(10)"),
        "c": (1700, (10 << 16 | 2) + 4, "numeric(10,2)"),
        "d": (1185, -1, "timestamp with time zone[]"),
        "e": (18, -1, '"char"'),
        "f": (1042, 9, "character(5)"),
        "an enum": (99_999, -1, "text"),
        "g": (2205, -1, "text"),
    }
    columns = tuple(
        Column(name, pa.string(), oid, modifier, "text") for name, (oid, modifier, _) in named.items()
    )
    table = TableSchema(7, ITEMS, columns, ("a", "an enum"))
    harness.sink.begin_snapshot(table, harness.fence)
    harness.sink.finish_snapshot(table, [], harness.fence)
    found = harness.database.query(
        "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
        "WHERE attrelid = 'copy_public.items'::regclass AND attnum > 0"
    )
    assert dict(found) == {name: type_name for name, (_, _, type_name) in named.items()}
    keys = harness.database.query(
        "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE contype = 'p' AND conrelid = 'copy_public.items'::regclass"
    )
    assert keys == [("items_pkey", 'PRIMARY KEY (a, "an enum")')]


def test_S04_a_column_of_another_type_is_noticed_though_its_values_are_text(harness: PostgresHarness) -> None:
    harness.copy()
    harness.source.insert(harness.item(20))
    changed = harness.table.columns[2]
    columns = (*harness.table.columns[:2], Column(changed.name, changed.arrow_type, 25))
    harness.source.table = harness.table = TableSchema(harness.table.oid, ITEMS, columns, ("id",))
    end = harness.commit()
    with pytest.raises(SchemaChangedError):
        harness.apply(harness.fence, end)


def test_a_resynced_table_keeps_dependent_objects(harness: PostgresHarness) -> None:
    harness.copy()
    harness.database.execute("CREATE VIEW copy_public.notes AS SELECT note FROM copy_public.items")
    harness.database.execute("CREATE INDEX by_note ON copy_public.items (note)")
    harness.sink.release_ownership(ITEMS)
    harness.copy()
    assert harness.database.query("SELECT count(*) FROM copy_public.notes") == [(9,)]
    assert harness.database.query("SELECT to_regclass('copy_public.by_note') IS NOT NULL") == [(True,)]


def test_a_table_stays_readable_during_a_resync_and_only_differing_rows_are_written(
    harness: PostgresHarness,
) -> None:
    harness.copy()
    harness.database.execute(
        "UPDATE copy_public.items SET size = '1.5' WHERE id = 1; DELETE FROM copy_public.items WHERE id = 2"
    )
    harness.database.execute("INSERT INTO copy_public.items VALUES (50, 'not there', NULL)")
    places = "SELECT id, ctid::text FROM copy_public.items WHERE id BETWEEN 3 AND 9 ORDER BY id"
    kept = harness.database.query(places)
    with harness.database.connect() as reader:
        before = reader.execute(
            "SELECT count(*) FROM copy_public.items"
        ).fetchone()  # and keeps it until its end
        harness.sink.release_ownership(ITEMS)
        harness.copy()
        assert reader.execute("SELECT count(*) FROM copy_public.items").fetchone() == before
    assert harness.rows() == harness.source.sorted_rows()
    assert harness.database.query(places) == kept


def test_a_snapshot_whose_end_was_not_learned_is_finished_by_the_next_attempt(
    harness: PostgresHarness, tmp_path: Path
) -> None:
    rows = harness.source.sorted_rows()
    file, _ = harness.write(harness.begin(), 0, rows)
    keys = tmp_path / "keys"
    keys.mkdir()
    changed = ChangedRows(str(keys), ())
    harness.executors.is_silent = True
    with pytest.raises(ConnectionLostError):
        harness.sink.repair_snapshot(harness.table, [file], changed, harness.fence)
    assert harness.target().applied == harness.fence
    harness.executors.is_silent = False
    harness.sink.repair_snapshot(harness.table, [file], changed, harness.fence)
    assert (harness.rows(), harness.target().applied) == (rows, harness.fence)
    with pytest.raises(TableRewrittenError):  # the swap was committed
        harness.sink.repair_snapshot(harness.table, [file], changed, harness.fence)


def test_only_our_position_table_remains_in_the_schema(harness: PostgresHarness) -> None:
    harness.begin()
    harness.copy()
    harness.source.delete(harness.at(1))
    harness.follow()
    tables = harness.database.query(
        "SELECT tablename FROM pg_tables WHERE schemaname = 'penstock' ORDER BY 1"
    )
    assert tables == [("applied",), ("chunks",), ("leases",)]
    assert harness.database.query("SELECT count(*) FROM penstock.chunks") == [(0,)]


def test_two_tables_of_the_source_never_share_one_of_the_target(harness: PostgresHarness) -> None:
    harness.copy()
    other = TableName("sales", "items")
    naming = Naming({"sales": "copy_public"}, "copy_")
    sink = PostgresSink(harness.executors, harness.address, PIPELINE, naming)
    with pytest.raises(TargetForeignError, match=r"as the copy of public\.items"):
        sink.load_target(other)
    assert sink.describe(other) == sink.describe(ITEMS)


def test_an_unstorable_value_is_not_shown(harness: PostgresHarness) -> None:
    place = harness.begin()
    with pytest.raises(SinkRefusedError) as refused:
        harness.write(place, 0, [harness.item(1, "a note", "secret")])
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is None


# two at the same time
# ------------------------------------------------------------------------------------------------------------


def test_a_second_run_of_the_pipeline_is_kept_away_until_the_first_is_gone(harness: PostgresHarness) -> None:
    harness.copy()
    second = harness.open()
    with pytest.raises(PipelineBusyError, match=r"process \d+ \(role postgres, penstock target\)"):
        second.drop_shadows()
    assert second.load_target(ITEMS) is not None  # reading needs no lock
    harness.sink.close()
    second.drop_shadows()
    second.close()


def test_the_lock_is_taken_again_when_its_session_was_lost(harness: PostgresHarness) -> None:
    harness.copy()
    harness.database.query(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
        "WHERE application_name = 'penstock target'"
    )
    harness.source.insert(harness.item(20))
    harness.follow()
    assert len(harness.rows()) == 10


def test_tables_that_are_begun_and_finished_at_the_same_time_do_not_collide_over_schemas(
    harness: PostgresHarness,
) -> None:
    def copy(number: int) -> None:
        table = TableSchema(number, TableName("public", f"t{number}"), harness.table.columns, ("id",))
        harness.sink.begin_snapshot(table, harness.fence)
        begun.wait(timeout=60)
        harness.sink.finish_snapshot(table, [], harness.fence)

    count = 6
    begun = Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(copy, number) for number in range(1, count + 1)]:
            done.result(timeout=120)
    assert harness.database.query("SELECT count(*) FROM pg_tables WHERE schemaname = 'copy_public'") == [
        (count,)
    ]


def test_a_late_attempt_does_nothing(harness: PostgresHarness) -> None:
    """A task of an abandoned run finishes after the next run has continued."""
    harness.copy()
    harness.executors.is_late = True
    harness.source.insert(harness.item(20))
    end = harness.commit()
    with pytest.raises(Exception, match="is not at"):
        harness.apply(harness.fence, end)
    harness.executors.is_late = False
    harness.apply(harness.fence, end)
    harness.source.delete(harness.at(20))
    harness.follow()
    shown = harness.rows()
    harness.executors.kept[0]()
    assert harness.rows() == shown


def test_an_attempt_at_an_epoch_that_has_begun_elsewhere_does_nothing(harness: PostgresHarness) -> None:
    harness.copy()
    harness.source.insert(harness.item(20))
    first = harness.commit()
    harness.source.insert(harness.item(21))
    second = harness.commit()
    harness.executors.is_late = True
    with pytest.raises(SinkError):
        harness.apply(harness.fence, second)
    harness.executors.is_late = False
    harness.apply(harness.fence, first)
    with pytest.raises(SinkError, match="when the epoch began"):
        harness.executors.kept[0]()
    assert (len(harness.rows()), harness.target().applied) == (10, first)


def test_a_check_leaves_no_trace(harness: PostgresHarness) -> None:
    probe_target(harness.address)
    assert harness.database.query("SELECT nspname FROM pg_namespace WHERE nspname ~ '^penstock'") == []
