"""Edge cases K in a pipeline into Iceberg: consecutive runs, a table or two per case, checked between the
runs.
"""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from penstock.cli.run import run_pipeline
from penstock.errors import SpoolFormatError
from penstock.pipeline.table_overrides import change_overrides
from penstock.pipeline.table_states import TableStatus
from penstock.schema import TableName
from penstock.sinks.iceberg.sink import IcebergSink
from tests.support.fix_pipeline import Mirror, mirror_document
from tests.support.fix_postgres import Database, PostgresServer
from tests.support.pipeline.signals import is_active, own_handlers, signalled_once
from tests.support.pipeline.transformed import KEY, LEAVE_AND_ENTER, ORDERS, PEOPLE, RULE, expected, people
from tests.support.sinks.iceberg_lake import new_catalog
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

PLAIN = "CREATE TABLE {0} (id int PRIMARY KEY, v text); INSERT INTO {0} VALUES (1, 'a'), (2, 'a')"
DAMAGED = ("added", "taken", "gone", "back")
THERE = ("kept", "adopted", "replaced", "unfit")
_WIDE = ", ".join(f"c{number} int DEFAULT {number}" for number in range(1599))
ODD = f"""
    CREATE TABLE wide (id int PRIMARY KEY, {_WIDE}); INSERT INTO wide (id) VALUES (1), (2);
    CREATE TABLE long (id int PRIMARY KEY, v text); INSERT INTO long VALUES (1, repeat('x', 100000000));
    CREATE TABLE "select" (id int PRIMARY KEY, "from" text, "where" int); INSERT INTO "select" VALUES (1,
      'a', 2);
    CREATE TABLE files (id int PRIMARY KEY); CREATE TABLE "Files" (id int PRIMARY KEY);
    INSERT INTO files VALUES (1)
"""
ODD_CHANGES = """
    UPDATE wide SET c1598 = -1 WHERE id = 2; INSERT INTO wide (id) VALUES (3);
    INSERT INTO long VALUES (2, repeat('y', 100000000)); UPDATE "select" SET "from" = 'b';
    INSERT INTO "Files" VALUES (1), (2); DELETE FROM files
"""
QUERY = {
    "table": "public.orders",
    "sql": "SELECT sha2(concat('pepper', note), 256) AS remark, id AS order_id, CAST(price "
    "AS decimal(10,2)) * qty AS total, long "
    "FROM source WHERE qty % 2 = 0",
}
ORDERS_CHANGES = """
    UPDATE orders SET qty = 3 WHERE id = 2; UPDATE orders SET qty = 8, long = 'zz', note = NULL WHERE id = 1;
    UPDATE orders SET price = '1.00' WHERE id = 4; UPDATE orders SET id = 60 WHERE id = 6;
    INSERT INTO orders VALUES (7, '7', 1, NULL, NULL), (8, '0.25', 2, NULL, 'n')
"""
RULES = [
    "public.*",
    QUERY,
    {**RULE, "columns": {**RULE["columns"], "cast": {"score": "string"}}},  # type: ignore[dict-item]
    {"table": "public.bad", "schema_changes": "stop"},
    *({"table": f"public.{name}", "existing": "adopt"} for name in ("adopted", "unfit")),
    {"table": "public.replaced", "existing": "replace"},
]
Failed = Mapping[str, TableStatus]


@dataclass
class Results:
    """The results of the runs, in order."""

    catalog: str
    spark: SparkSession
    database: Database
    lake: Mirror
    failed: list[Failed] = field(default_factory=list)
    rows: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    codes: list[int] = field(default_factory=list)
    others: Failed = field(default_factory=dict)
    """The results of a second pipeline that was configured to write to this one's tables."""
    newer: str = ""
    """The error of a run that found state of a later version."""

    @property
    def sink(self) -> IcebergSink:
        sink = self.lake.open_sink()
        assert isinstance(sink, IcebergSink)
        return sink

    def run(self) -> None:
        self.failed.append(self.lake.run_once().failed)

    def sql(self, statement: str, table: str) -> None:
        """Behind the pipeline's back; `{}` is the table."""
        self.spark.sql(statement.format(self.sink.sql_name(TableName("public", table))))

    def note(self, when: str, table: str, columns: str = "*") -> None:
        self.rows[when] = sorted((tuple(row) for row in self.lake.rows(f"public.{table}", columns)), key=str)


def _begin(results: Results) -> None:
    """K10, K14: tables that exist before the first run, in the source and in the lake."""
    for name in ("good", "bad", *DAMAGED, *THERE):
        results.database.execute(PLAIN.format(name))
    results.database.execute(ODD)
    results.database.execute(
        "CREATE PUBLICATION everything FOR ALL TABLES WITH (publish_via_partition_root = true)"
    )
    results.database.execute(f"{ORDERS}; DELETE FROM orders WHERE id = 10")
    results.database.execute(PEOPLE)
    results.database.execute("ALTER TABLE people ADD score int DEFAULT 7")
    for name in THERE:
        results.sql(
            "CREATE TABLE {} (id int, "
            "v string COMMENT 'their comment') USING iceberg TBLPROPERTIES ('theirs' = 'yes')",
            name,
        )
        results.sql("INSERT INTO {} VALUES (7, 'theirs')", name)
    results.sql("ALTER TABLE {} ADD COLUMN more INT", "unfit")
    results.run()
    results.note("copied", "people", "id, email, score")


def _change(results: Results) -> None:
    """K06, K12, K13: a forbidden schema change, and rows that leave and enter a filter. S08: a new table."""
    results.database.execute(f"{PLAIN.format('late')}; UPDATE late SET v = 'late'")
    results.database.execute(ORDERS_CHANGES)
    results.database.execute("ALTER TABLE bad ADD extra int DEFAULT 5; INSERT INTO bad VALUES (3, 'b', 6)")
    for name in ("good", *DAMAGED, *THERE):
        results.database.execute(
            f"UPDATE {name} SET v = 'b' WHERE id = 1; INSERT INTO {name} VALUES (3, 'b')"
        )
    results.database.execute(ODD_CHANGES)
    results.database.execute(LEAVE_AND_ENTER)
    results.run()
    results.note("good beside bad", "good")


def _damage(results: Results) -> None:
    """K08, K09: tables as former versions wrote them, and tables changed by another writer."""
    for name in ("good", "adopted"):
        results.sql(f"ALTER TABLE {{}} UNSET TBLPROPERTIES ({', '.join(map(repr, _LATER_PROPERTIES))})", name)
    results.sql("ALTER TABLE {} ADD COLUMN theirs INT", "added")
    results.sql("ALTER TABLE {} RENAME COLUMN v TO w", "taken")
    results.sql("DROP TABLE {}", "gone")
    table = results.sink._catalog.load(results.sink.identifier(TableName("public", "back")))
    assert table is not None
    table.java.manageSnapshots().rollbackTo(list(table.ancestors())[1].id).commit()
    for name in ("good", *DAMAGED, *THERE):
        results.database.execute(f"UPDATE {name} SET v = 'c' WHERE id = 2; DELETE FROM {name} WHERE id = 1")
    results.run()
    results.note("good goes on", "good")


_LATER_PROPERTIES = ("penstock.mode", "penstock.origin", "penstock.position", "penstock.snapshot")


def _mend(results: Results) -> None:
    results.sql("DROP TABLE {}", "bad")
    failed = [
        TableName.parse(name) for name in results.failed[-1].keys() & {f"public.{name}" for name in DAMAGED}
    ]
    change_overrides(results.lake.config.state, lambda orders: orders.request_resync(failed))
    results.run()


def _signal(results: Results) -> None:
    """K07."""
    for number, sent in enumerate((signal.SIGTERM, signal.SIGINT)):
        for table in ("good", "added"):
            results.database.execute(f"INSERT INTO {table} VALUES ({10 + number}, 'signalled')")
        with pytest.MonkeyPatch.context() as patch, own_handlers():
            waiting = signalled_once(patch, IcebergSink, sent)
            results.codes.append(run_pipeline(results.lake.path, once=False, console=Console(quiet=True)))
        assert not waiting
        wait_for(
            lambda: not is_active(results.database, results.lake),
            "the slot to be let go of",
            lambda: "it is taken",
            60.0,
        )
    results.run()


def _meet(results: Results) -> None:
    """K08, K10: another pipeline uses the lake, and a future version has written to it."""
    there = results.lake.config
    sink = {"iceberg": {"catalog": results.catalog, "warehouse": str(there.sink.root)}}
    directory = there.sink.root.parent / "other"
    directory.mkdir()
    document = mirror_document(
        results.database, pipeline="other", tables=["public.good", "public.late"], sink=sink
    )
    results.others = Mirror(results.spark, results.database, directory, document).run_once().failed
    last = max((there.sink.root / "penstock_epochs" / there.pipeline).glob("*.json"))
    written = last.read_text()
    last.write_text(json.dumps({**json.loads(written), "format": 99}))
    results.database.execute("INSERT INTO good VALUES (99, 'unseen')")
    with pytest.raises(SpoolFormatError) as refused:
        results.lake.run_once()
    results.newer = str(refused.value)
    results.database.execute("DELETE FROM good WHERE id = 99")
    last.write_text(written)


@pytest.fixture(scope="module")
def results(
    spark: SparkSession, postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Results]:
    database = postgres_server.create_database()
    catalog = new_catalog()
    sink = {"iceberg": {"catalog": catalog, "warehouse": "lake"}}
    source = {"dsn": database.dsn, "publication": "everything"}
    document = mirror_document(database, tables=RULES, source=source, sink=sink, hash_key={"env": "HASH_KEY"})
    results = Results(
        catalog, spark, database, Mirror(spark, database, tmp_path_factory.mktemp("results"), document)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HASH_KEY", KEY)
        for chapter in (_begin, _change, _damage, _mend, _signal, _meet):
            chapter(results)
        yield results
    database.close()
    postgres_server.drop_database(database.name)


def _equal(results: Results, *names: str) -> None:
    found = results.lake.compare({f"public.{name}" for name in names})
    assert len(found) == len(names)
    assert not [each for each in found if not each.equal]


def _reasons(failed: Failed) -> dict[str, str]:
    return {name.removeprefix("public."): (status.reason or "")[:8] for name, status in failed.items()}


def test_K06_one_bad_table_does_not_stop_the_others(results: Results) -> None:
    first, changed, damaged, mended, _ = map(_reasons, results.failed)
    assert "bad" not in first
    assert (changed["bad"], damaged["bad"]) == ("PEN-1403", "PEN-1403"), "it stays failed"
    assert "good" not in {*changed, *damaged}
    assert results.rows["good beside bad"] == [(1, "b", None), (2, "a", None), (3, "b", None)]
    assert "bad" not in mended
    _equal(results, "good", "bad")


def test_K07_a_signal_in_the_middle_of_an_epoch_ends_the_run_in_order(results: Results) -> None:
    assert results.codes == [0, 130]
    assert {row["id"] for row in results.lake.rows("public.good")} == {2, 3, 10, 11}


def test_K08_state_of_a_former_version_continues(results: Results) -> None:
    assert "good" not in _reasons(results.failed[2])
    assert results.rows["good goes on"] == [(2, "c", None), (3, "b", None)]


def test_K08_state_of_a_later_version_is_left_alone(results: Results) -> None:
    assert "has format 99" in results.newer
    assert 99 not in {row["id"] for row in results.lake.rows("public.good")}


def test_K09_a_target_altered_dropped_or_restored_by_another_writer_is_not_trusted(results: Results) -> None:
    failed = {name.removeprefix("public."): status for name, status in results.failed[2].items()}
    assert failed.keys() & set(DAMAGED) <= {"taken", "back"}
    assert "taken" in failed
    assert all(status.remedy for status in failed.values())
    assert not _reasons(results.failed[3]).keys() & set(DAMAGED)
    _equal(results, *DAMAGED)


def test_K10_existing_tables_are_refused_adopted_or_replaced_as_configured(results: Results) -> None:
    assert _reasons(results.failed[0]) == {"kept": "PEN-3001", "unfit": "PEN-3001"}
    assert "'more' is not a column of the source" in (results.failed[0]["public.unfit"].reason or "")
    _equal(results, "adopted", "replaced")
    for name, properties in (("adopted", {"theirs"}), ("replaced", set())):
        loaded = results.sink._catalog.load(results.sink.identifier(TableName("public", name)))
        assert loaded is not None
        assert {key for key in ("theirs",) if loaded.base.properties().get(key)} == properties
        assert bool(loaded.base.schema().findField("v").doc()) is bool(properties)
    for name in ("kept", "unfit"):
        results.note(name, name, "id, v")
        assert results.rows[name] == [(7, "theirs")], "it is not touched"


def test_K10_tables_of_another_pipeline_are_refused(results: Results) -> None:
    assert _reasons(results.others) == {"good": "PEN-3001", "late": "PEN-3001"}
    _equal(results, "good", "late")


def test_S08_a_table_created_while_no_pipeline_runs_is_copied_also_with_a_publication_for_all_tables(
    results: Results,
) -> None:
    _equal(results, "late")
    assert {row["v"] for row in results.lake.rows("public.late")} == {"late"}


def test_K12_K13_rows_come_and_go_by_a_query_that_makes_hashes(results: Results) -> None:
    def remark(text: str) -> str:
        return hashlib.sha256(f"pepper{text}".encode()).hexdigest()

    rows = results.lake.rows("public.orders", "order_id, remark, total, length(long), substring(long,1,1)")
    assert sorted(tuple(row) for row in rows) == [
        (1, None, Decimal("12.00"), 2, "z"),
        (4, remark("note 4"), Decimal("4.00"), 5000, "d"),
        (8, None, Decimal("0.50"), 1, "n"),
        (60, remark("note 6"), Decimal("39.00"), 5000, "f"),
    ]
    _equal(results, "orders")


def test_K12_K13_rows_come_and_go_by_a_filter_and_only_hashes_of_columns_arrive(results: Results) -> None:
    first = expected(("1", "a@x", None, None), ("3", None, None, None))
    assert [row[:2] for row in results.rows["copied"]] == [row[:2] for row in first]
    assert {row[2] for row in results.rows["copied"]} == {"7"}, "a text"
    assert people(results.lake) == expected(
        ("2", "b@x", "***", "NaN"), ("4", "d@x", "***5678", "7"), ("6", None, None, "1.5")
    )
    _equal(results, "people")
    table = results.lake.config.sink.root / "public" / "people"
    files = [path.read_bytes() for path in table.rglob("*") if path.is_file()]
    assert not any(word in data for data in files for word in (KEY.encode(), b"a@x", b"4111111111111111")), (
        "in the clear"
    )


def test_K14_very_wide_very_long_and_oddly_named_tables_arrive(results: Results) -> None:
    assert sorted(map(tuple, results.lake.rows("public.wide", "id, c0, c1598"))) == [
        (1, 0, 1598),
        (2, 0, -1),
        (3, 0, 1598),
    ]
    assert _lengths(results.lake.config.sink.root / "public" / "long" / "data") == [
        (1, 100_000_000),
        (2, 100_000_000),
    ]
    assert [tuple(row) for row in results.lake.rows("public.select", "id, `from`, `where`")] == [(1, "b", 2)]
    _equal(results, "files", "Files")


def _lengths(data: Path) -> list[tuple[int, int]]:
    """Without Spark, whose JVM would need a larger heap for such rows than the tests give it.

    Nothing was deleted from the table.
    """
    rows = pa.concat_tables([pq.read_table(file, columns=["id", "v"]) for file in data.glob("*.parquet")])
    return sorted(
        zip(rows.column("id").to_pylist(), pc.utf8_length(rows.column("v")).to_pylist(), strict=True)
    )
