"""EDGE_CASES K in a pipeline into Iceberg: one run after the other with a table or two for each case, and what is found in between."""

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
from penstock.pipeline.orders import change_orders
from penstock.pipeline.states import TableStatus
from penstock.schema import TableName
from penstock.sinks.iceberg.sink import IcebergSink
from tests.fix_pipeline import Mirror, mirror_document
from tests.fix_postgres import Database, PostgresServer
from tests.integration.pipeline.test_queries import ORDERS
from tests.integration.pipeline.test_signals_and_versions import is_active, own_handlers, signalled_once
from tests.integration.pipeline.test_transforms import KEY, LEAVE_AND_ENTER, PEOPLE, RULE, expected, people
from tests.integration.sinks.iceberg_lake import new_catalog
from tests.waiting import wait_for

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
    CREATE TABLE "select" (id int PRIMARY KEY, "from" text, "where" int); INSERT INTO "select" VALUES (1, 'a', 2);
    CREATE TABLE files (id int PRIMARY KEY); CREATE TABLE "Files" (id int PRIMARY KEY); INSERT INTO files VALUES (1)
"""
ODD_CHANGES = """
    UPDATE wide SET c1598 = -1 WHERE id = 2; INSERT INTO wide (id) VALUES (3);
    INSERT INTO long VALUES (2, repeat('y', 100000000)); UPDATE "select" SET "from" = 'b';
    INSERT INTO "Files" VALUES (1), (2); DELETE FROM files
"""
QUERY = {
    "table": "public.orders",
    "sql": "SELECT sha2(concat('pepper', note), 256) AS remark, id AS order_id, CAST(price AS decimal(10,2)) * qty AS total, long "
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
class Told:
    """What the runs came to, in their order."""

    catalog: str
    spark: SparkSession
    database: Database
    lake: Mirror
    failed: list[Failed] = field(default_factory=list)
    rows: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    codes: list[int] = field(default_factory=list)
    others: Failed = field(default_factory=dict)
    """What came of a pipeline that was to write to tables of this one."""
    newer: str = ""
    """What a run said that found what a later version had written."""

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


def _begin(told: Told) -> None:
    """K10, K14: what is there before the first run, in the source and in the lake."""
    for name in ("good", "bad", *DAMAGED, *THERE):
        told.database.execute(PLAIN.format(name))
    told.database.execute(ODD)
    told.database.execute("CREATE PUBLICATION everything FOR ALL TABLES WITH (publish_via_partition_root = true)")
    told.database.execute(f"{ORDERS}; DELETE FROM orders WHERE id = 10")
    told.database.execute(PEOPLE)
    told.database.execute("ALTER TABLE people ADD score int DEFAULT 7")
    for name in THERE:
        told.sql("CREATE TABLE {} (id int, v string COMMENT 'of theirs') USING iceberg TBLPROPERTIES ('theirs' = 'yes')", name)
        told.sql("INSERT INTO {} VALUES (7, 'theirs')", name)
    told.sql("ALTER TABLE {} ADD COLUMN more INT", "unfit")
    told.run()
    told.note("copied", "people", "id, email, score")


def _change(told: Told) -> None:
    """K06, K12, K13: an alteration that is not to be followed, and rows that leave a filter and come in. S08: a table that is new."""
    told.database.execute(f"{PLAIN.format('late')}; UPDATE late SET v = 'late'")
    told.database.execute(ORDERS_CHANGES)
    told.database.execute("ALTER TABLE bad ADD extra int DEFAULT 5; INSERT INTO bad VALUES (3, 'b', 6)")
    for name in ("good", *DAMAGED, *THERE):
        told.database.execute(f"UPDATE {name} SET v = 'b' WHERE id = 1; INSERT INTO {name} VALUES (3, 'b')")
    told.database.execute(ODD_CHANGES)
    told.database.execute(LEAVE_AND_ENTER)
    told.run()
    told.note("good beside bad", "good")


def _damage(told: Told) -> None:
    """K08, K09: tables as former versions wrote them, and tables that somebody else has been at."""
    for name in ("good", "adopted"):
        told.sql(f"ALTER TABLE {{}} UNSET TBLPROPERTIES ({', '.join(map(repr, _LATER_PROPERTIES))})", name)
    told.sql("ALTER TABLE {} ADD COLUMN theirs INT", "added")
    told.sql("ALTER TABLE {} RENAME COLUMN v TO w", "taken")
    told.sql("DROP TABLE {}", "gone")
    table = told.sink._catalog.load(told.sink.identifier(TableName("public", "back")))
    assert table is not None
    table.java.manageSnapshots().rollbackTo(list(table.ancestors())[1].id).commit()
    for name in ("good", *DAMAGED, *THERE):
        told.database.execute(f"UPDATE {name} SET v = 'c' WHERE id = 2; DELETE FROM {name} WHERE id = 1")
    told.run()
    told.note("good goes on", "good")


_LATER_PROPERTIES = ("penstock.mode", "penstock.origin", "penstock.position", "penstock.snapshot")


def _mend(told: Told) -> None:
    told.sql("DROP TABLE {}", "bad")
    failed = [TableName.parse(name) for name in told.failed[-1].keys() & {f"public.{name}" for name in DAMAGED}]
    change_orders(told.lake.config.state, lambda orders: orders.renew(failed))
    told.run()


def _signal(told: Told) -> None:
    """K07."""
    for number, sent in enumerate((signal.SIGTERM, signal.SIGINT)):
        for table in ("good", "added"):
            told.database.execute(f"INSERT INTO {table} VALUES ({10 + number}, 'signalled')")
        with pytest.MonkeyPatch.context() as patch, own_handlers():
            waiting = signalled_once(patch, IcebergSink, sent)
            told.codes.append(run_pipeline(told.lake.path, once=False, console=Console(quiet=True)))
        assert not waiting
        wait_for(lambda: not is_active(told.database, told.lake), "the slot to be let go of", lambda: "it is taken", 60.0)
    told.run()


def _meet(told: Told) -> None:
    """K08, K10: another pipeline comes to the lake, and a version of a time to come has been there."""
    there = told.lake.config
    sink = {"iceberg": {"catalog": told.catalog, "warehouse": str(there.sink.root)}}
    directory = there.sink.root.parent / "other"
    directory.mkdir()
    document = mirror_document(told.database, pipeline="other", tables=["public.good", "public.late"], sink=sink)
    told.others = Mirror(told.spark, told.database, directory, document).run_once().failed
    last = max((there.sink.root / "penstock_epochs" / there.pipeline).glob("*.json"))
    written = last.read_text()
    last.write_text(json.dumps({**json.loads(written), "format": 99}))
    told.database.execute("INSERT INTO good VALUES (99, 'unseen')")
    with pytest.raises(SpoolFormatError) as refused:
        told.lake.run_once()
    told.newer = str(refused.value)
    told.database.execute("DELETE FROM good WHERE id = 99")
    last.write_text(written)


@pytest.fixture(scope="module")
def told(spark: SparkSession, postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    database = postgres_server.create_database()
    catalog = new_catalog()
    sink = {"iceberg": {"catalog": catalog, "warehouse": "lake"}}
    source = {"dsn": database.dsn, "publication": "everything"}
    document = mirror_document(database, tables=RULES, source=source, sink=sink, hash_key={"env": "HASH_KEY"})
    told = Told(catalog, spark, database, Mirror(spark, database, tmp_path_factory.mktemp("told"), document))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HASH_KEY", KEY)
        for chapter in (_begin, _change, _damage, _mend, _signal, _meet):
            chapter(told)
        yield told
    database.close()
    postgres_server.drop_database(database.name)


def _equal(told: Told, *names: str) -> None:
    found = told.lake.compare({f"public.{name}" for name in names})
    assert len(found) == len(names)
    assert not [each for each in found if not each.equal]


def _reasons(failed: Failed) -> dict[str, str]:
    return {name.removeprefix("public."): (status.reason or "")[:8] for name, status in failed.items()}


def test_K06_one_bad_table_does_not_stop_the_others(told: Told) -> None:
    first, changed, damaged, mended, _ = map(_reasons, told.failed)
    assert "bad" not in first
    assert (changed["bad"], damaged["bad"]) == ("PEN-1403", "PEN-1403"), "it stays failed"
    assert "good" not in {*changed, *damaged}
    assert told.rows["good beside bad"] == [(1, "b", None), (2, "a", None), (3, "b", None)]
    assert "bad" not in mended
    _equal(told, "good", "bad")


def test_K07_a_signal_in_the_middle_of_an_epoch_ends_the_run_in_order(told: Told) -> None:
    assert told.codes == [0, 130]
    assert {row["id"] for row in told.lake.rows("public.good")} == {2, 3, 10, 11}


def test_K08_what_a_former_version_wrote_goes_on(told: Told) -> None:
    assert "good" not in _reasons(told.failed[2])
    assert told.rows["good goes on"] == [(2, "c", None), (3, "b", None)]


def test_K08_what_a_later_version_wrote_is_left_alone(told: Told) -> None:
    assert "has format 99" in told.newer
    assert 99 not in {row["id"] for row in told.lake.rows("public.good")}


def test_K09_a_target_that_somebody_altered_dropped_or_put_back_is_not_trusted(told: Told) -> None:
    failed = {name.removeprefix("public."): status for name, status in told.failed[2].items()}
    assert failed.keys() & set(DAMAGED) <= {"taken", "back"}
    assert "taken" in failed
    assert all(status.remedy for status in failed.values())
    assert not _reasons(told.failed[3]).keys() & set(DAMAGED)
    _equal(told, *DAMAGED)


def test_K10_tables_that_are_there_are_refused_adopted_or_replaced_as_the_rules_say(told: Told) -> None:
    assert _reasons(told.failed[0]) == {"kept": "PEN-3001", "unfit": "PEN-3001"}
    assert "'more' is none of the source's" in (told.failed[0]["public.unfit"].reason or "")
    _equal(told, "adopted", "replaced")
    for name, properties in (("adopted", {"theirs"}), ("replaced", set())):
        loaded = told.sink._catalog.load(told.sink.identifier(TableName("public", name)))
        assert loaded is not None
        assert {key for key in ("theirs",) if loaded.base.properties().get(key)} == properties
        assert bool(loaded.base.schema().findField("v").doc()) is bool(properties)
    for name in ("kept", "unfit"):
        told.note(name, name, "id, v")
        assert told.rows[name] == [(7, "theirs")], "it is not touched"


def test_K10_tables_of_another_pipeline_are_refused(told: Told) -> None:
    assert _reasons(told.others) == {"good": "PEN-3001", "late": "PEN-3001"}
    _equal(told, "good", "late")


def test_S08_a_table_that_is_made_while_nobody_runs_is_copied_also_where_the_publication_is_for_all_tables(told: Told) -> None:
    _equal(told, "late")
    assert {row["v"] for row in told.lake.rows("public.late")} == {"late"}


def test_K12_K13_rows_come_and_go_by_a_query_that_makes_hashes(told: Told) -> None:
    def remark(text: str) -> str:
        return hashlib.sha256(f"pepper{text}".encode()).hexdigest()

    rows = told.lake.rows("public.orders", "order_id, remark, total, length(long), substring(long,1,1)")
    assert sorted(tuple(row) for row in rows) == [
        (1, None, Decimal("12.00"), 2, "z"),
        (4, remark("note 4"), Decimal("4.00"), 5000, "d"),
        (8, None, Decimal("0.50"), 1, "n"),
        (60, remark("note 6"), Decimal("39.00"), 5000, "f"),
    ]
    _equal(told, "orders")


def test_K12_K13_rows_come_and_go_by_a_filter_and_only_hashes_of_columns_arrive(told: Told) -> None:
    first = expected(("1", "a@x", None, None), ("3", None, None, None))
    assert [row[:2] for row in told.rows["copied"]] == [row[:2] for row in first]
    assert {row[2] for row in told.rows["copied"]} == {"7"}, "a text"
    assert people(told.lake) == expected(("2", "b@x", "***", "NaN"), ("4", "d@x", "***5678", "7"), ("6", None, None, "1.5"))
    _equal(told, "people")
    table = told.lake.config.sink.root / "public" / "people"
    files = [path.read_bytes() for path in table.rglob("*") if path.is_file()]
    assert not any(word in data for data in files for word in (KEY.encode(), b"a@x", b"4111111111111111")), "in the clear"


def test_K14_what_is_very_wide_very_long_or_oddly_named_arrives(told: Told) -> None:
    assert sorted(map(tuple, told.lake.rows("public.wide", "id, c0, c1598"))) == [(1, 0, 1598), (2, 0, -1), (3, 0, 1598)]
    assert _lengths(told.lake.config.sink.root / "public" / "long" / "data") == [(1, 100_000_000), (2, 100_000_000)]
    assert [tuple(row) for row in told.lake.rows("public.select", "id, `from`, `where`")] == [(1, "b", 2)]
    _equal(told, "files", "Files")


def _lengths(data: Path) -> list[tuple[int, int]]:
    """Without Spark, whose JVM would need a larger heap for such rows than the tests give it. Nothing was deleted from the table."""
    rows = pa.concat_tables([pq.read_table(file, columns=["id", "v"]) for file in data.glob("*.parquet")])
    return sorted(zip(rows.column("id").to_pylist(), pc.utf8_length(rows.column("v")).to_pylist(), strict=True))
