"""`PostgresSink` against a real server, without Spark: the rules of all sinks, and those of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Barrier

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typing_extensions import override

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
from penstock.postgres.connection import SourceAddress
from penstock.postgres.target_ddl import probe_target
from penstock.schema import Column, TableName, TableSchema
from penstock.sinks.base import ChangedRows
from penstock.sinks.executors import In, Out
from penstock.sinks.postgres.sink import PostgresSink
from penstock.sinks.postgres.targets import Naming
from tests.contract.sink_harness import ITEMS, PIPELINE, SinkHarness
from tests.contract.sink_rules import LoadingRules, MirrorRules
from tests.fix_postgres import Database
from tests.integration.sinks.source import Row, Value
from tests.integration.snapshot.local import LocalExecutors


class ForgetfulExecutors(LocalExecutors):
    """Does what it is told, and may not tell; or does not, and keeps it for later."""

    is_silent = is_late = False

    def __init__(self) -> None:
        self.kept: list[Callable[[], object]] = []

    @override
    def run(self, function: Callable[[In], Out], tasks: Sequence[In], *, light: bool = False) -> list[Out]:
        if self.is_late:
            self.kept += [partial(function, task) for task in tasks]
            return []
        done = super().run(function, tasks)
        if self.is_silent:
            raise ConnectionLostError("the answer was lost")
        return done


class PostgresHarness(SinkHarness):
    def __init__(self, root: Path, database: Database) -> None:
        self.database = database
        self.address = SourceAddress.parse(database.dsn)
        self.executors = ForgetfulExecutors()
        super().__init__(root)

    @override
    def open(self, pipeline: str = PIPELINE) -> PostgresSink:
        return PostgresSink(self.executors, self.address, pipeline, Naming(prefix="copy_"))

    @override
    def rows(self) -> list[Row]:
        if self.database.query("SELECT to_regclass('copy_public.items') IS NULL") == [(True,)]:
            return []
        found = self.database.query("SELECT id::text, note, size::text FROM copy_public.items")
        return sorted(({name: Value(value) for name, value in zip(("id", "note", "size"), row, strict=True)} for row in found), key=repr)

    @override
    def put_foreign(self) -> None:
        self.database.execute("CREATE SCHEMA copy_public; CREATE TABLE copy_public.items (id int)")

    @override
    @contextmanager
    def dying(self) -> Iterator[None]:
        self.database.execute(
            """
            CREATE FUNCTION copy_public.die() RETURNS trigger LANGUAGE plpgsql AS
                'BEGIN PERFORM pg_catalog.pg_terminate_backend(pg_catalog.pg_backend_pid()); RETURN NULL; END';
            CREATE CONSTRAINT TRIGGER die AFTER INSERT ON copy_public.items DEFERRABLE INITIALLY DEFERRED
                FOR EACH ROW EXECUTE FUNCTION copy_public.die()
            """
        )
        yield
        self.database.execute("DROP TRIGGER die ON copy_public.items; DROP FUNCTION copy_public.die()")

    @override
    @contextmanager
    def unanswered(self) -> Iterator[None]:
        self.executors.is_silent = True
        yield
        self.executors.is_silent = False


@pytest.fixture
def harness(shared_database: Database, tmp_path: Path) -> Iterator[PostgresHarness]:
    shared_database.execute("DROP SCHEMA IF EXISTS penstock, copy_public, mirror CASCADE")
    made = PostgresHarness(tmp_path, shared_database)
    yield made
    made.sink.close()


class TestRules(MirrorRules, LoadingRules):
    pass


# chunks ---------------------------------------------------------------------------------------------------------------------------


def test_of_two_attempts_at_a_chunk_the_first_counts_with_its_fence(harness: PostgresHarness) -> None:
    place = harness.begin()
    rows = harness.source.sorted_rows()
    first, fence = harness.write(place, 0, rows)
    later = Position.of(harness.fence.value + 50)
    again, read_at = harness.write(place, 0, rows[:3], later)
    assert (again, read_at, fence) == (first, harness.fence, harness.fence)
    harness.sink.finish_snapshot(harness.table, [again], harness.fence)
    assert harness.rows() == rows


def test_a_snapshot_is_not_finished_with_other_chunks_than_are_there(harness: PostgresHarness) -> None:
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


def test_a_chunk_of_a_snapshot_that_was_begun_anew_goes_nowhere(harness: PostgresHarness) -> None:
    old = harness.begin()
    place = harness.begin()
    with pytest.raises(SinkRefusedError):
        harness.write(old, 0, harness.source.sorted_rows())
    harness.sink.finish_snapshot(harness.table, [harness.write(place, 0, [])[0]], harness.fence)
    assert harness.rows() == []


def test_N03_a_repaired_snapshot_has_each_key_once_as_it_is_at_the_last_fence(harness: PostgresHarness, tmp_path: Path) -> None:
    """Row 1 moved to a block that was read later, so both chunks have it; row 2 is gone by then."""
    rows = harness.source.sorted_rows()
    place = harness.begin()
    first, _ = harness.write(place, 0, rows[:5])
    fence = Position.of(harness.fence.value + 50)
    second, _ = harness.write(place, 1, [*rows[5:], harness.item(1, "moved")], fence)
    keys, changed = tmp_path / "keys", tmp_path / "rows.parquet"
    keys.mkdir()
    pq.write_table(pa.table({"match_0": ["1", "2"], "match_text_0": pa.nulls(2, pa.string())}), keys / "part.parquet")
    pq.write_table(pa.table({"value_0": ["1"], "value_1": ["moved"], "value_2": ["0.10"]}), changed)
    harness.sink.repair_snapshot(harness.table, [first, second], ChangedRows(str(keys), (str(changed),)), fence)
    assert harness.target().applied == fence
    assert harness.rows() == sorted([harness.item(1, "moved", "0.10"), *rows[2:]], key=repr)


# what stands there ------------------------------------------------------------------------------------------------------------------


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
    columns = tuple(Column(name, pa.string(), oid, modifier, "text") for name, (oid, modifier, _) in named.items())
    table = TableSchema(7, ITEMS, columns, ("a", "an enum"))
    harness.sink.begin_snapshot(table, harness.fence)
    harness.sink.finish_snapshot(table, [], harness.fence)
    found = harness.database.query(
        "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = 'copy_public.items'::regclass AND attnum > 0"
    )
    assert dict(found) == {name: type_name for name, (_, _, type_name) in named.items()}
    keys = harness.database.query(
        "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'p' AND conrelid = 'copy_public.items'::regclass"
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


def test_a_table_that_is_copied_anew_keeps_what_hangs_on_it(harness: PostgresHarness) -> None:
    harness.copy()
    harness.database.execute("CREATE VIEW copy_public.notes AS SELECT note FROM copy_public.items")
    harness.database.execute("CREATE INDEX by_note ON copy_public.items (note)")
    harness.sink.disown(ITEMS)
    harness.copy()
    assert harness.database.query("SELECT count(*) FROM copy_public.notes") == [(9,)]
    assert harness.database.query("SELECT to_regclass('copy_public.by_note') IS NOT NULL") == [(True,)]


def test_a_table_that_is_copied_anew_is_read_all_the_while_and_only_rows_that_differ_are_written(harness: PostgresHarness) -> None:
    harness.copy()
    harness.database.execute("UPDATE copy_public.items SET size = '1.5' WHERE id = 1; DELETE FROM copy_public.items WHERE id = 2")
    harness.database.execute("INSERT INTO copy_public.items VALUES (50, 'not there', NULL)")
    places = "SELECT id, ctid::text FROM copy_public.items WHERE id BETWEEN 3 AND 9 ORDER BY id"
    kept = harness.database.query(places)
    with harness.database.connect() as reader:
        before = reader.execute("SELECT count(*) FROM copy_public.items").fetchone()  # and holds on to it until its end
        harness.sink.disown(ITEMS)
        harness.copy()
        assert reader.execute("SELECT count(*) FROM copy_public.items").fetchone() == before
    assert harness.rows() == harness.source.sorted_rows()
    assert harness.database.query(places) == kept


def test_a_snapshot_whose_end_was_not_learned_is_finished_by_the_next_attempt(harness: PostgresHarness, tmp_path: Path) -> None:
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
    with pytest.raises(TableRewrittenError):  # that was it
        harness.sink.repair_snapshot(harness.table, [file], changed, harness.fence)


def test_nothing_is_left_in_the_schema_of_ours_but_the_record(harness: PostgresHarness) -> None:
    harness.begin()
    harness.copy()
    harness.source.delete(harness.at(1))
    harness.follow()
    tables = harness.database.query("SELECT tablename FROM pg_tables WHERE schemaname = 'penstock' ORDER BY 1")
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


def test_a_value_that_cannot_be_stored_is_not_told(harness: PostgresHarness) -> None:
    place = harness.begin()
    with pytest.raises(SinkRefusedError) as refused:
        harness.write(place, 0, [harness.item(1, "a note", "secret")])
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is None


# two at once ------------------------------------------------------------------------------------------------------------------------


def test_a_second_run_of_the_pipeline_is_kept_away_until_the_first_is_gone(harness: PostgresHarness) -> None:
    harness.copy()
    second = harness.open()
    with pytest.raises(PipelineBusyError, match=r"process \d+ \(role postgres, penstock target\)"):
        second.drop_shadows()
    assert second.load_target(ITEMS) is not None  # anybody may look
    harness.sink.close()
    second.drop_shadows()
    second.close()


def test_the_lock_is_taken_again_when_its_session_was_lost(harness: PostgresHarness) -> None:
    harness.copy()
    harness.database.query("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 'penstock target'")
    harness.source.insert(harness.item(20))
    harness.follow()
    assert len(harness.rows()) == 10


def test_tables_that_are_begun_and_finished_at_the_same_time_do_not_collide_over_schemas(harness: PostgresHarness) -> None:
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
    assert harness.database.query("SELECT count(*) FROM pg_tables WHERE schemaname = 'copy_public'") == [(count,)]


def test_an_attempt_that_comes_late_does_nothing(harness: PostgresHarness) -> None:
    """What a task of a run that was given up still does, when the next has gone on."""
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
