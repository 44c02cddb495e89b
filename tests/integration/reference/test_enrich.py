"""A stream of changes joined with a reference table, in Spark: the result equals a SQL join."""

from __future__ import annotations

import re
import runpy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.capture.settings import CaptureLimits, CaptureSettings
from penstock.errors import ConfigError
from penstock.postgres.connection import SourceAddress
from penstock.reference import (
    KeptReference,
    ParquetReferenceTable,
    PostgresKeyedTable,
    PostgresReferenceTable,
    enrich,
    keep,
    lookup,
)
from penstock.reference.join import ReferenceCopy
from penstock.schema import TableName
from tests.support.fix_postgres import Database
from tests.support.reference.commerce import Commerce, check_against_sql
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "reference-tables.md"
PATIENCE_SECONDS = 180.0
TTL_SECONDS = 1.0
CUSTOMERS, ORDERS = TableName("public", "customers"), TableName("public", "orders")


class Join:
    """The orders of a shop, joined with its customers, by queries that share one checkpoint."""

    def __init__(self, spark: SparkSession, database: Database, root: Path) -> None:
        self.spark = spark
        self.database = database
        self.root = root
        self.settings = CaptureSettings(
            SourceAddress.parse(database.dsn),
            slot=database.name,
            publication=database.name,
            spool=root / "spool",
            limits=CaptureLimits(quiet_seconds=0.3),
        )
        self.rows: dict[tuple[int, int], Row] = {}
        self.loses_answer = False
        """Whether the next batch is taken, and then fails."""
        self.repeated: list[tuple[Row, Row]] = []
        self._queries: list[StreamingQuery] = []

    def stream(self, **options: str) -> DataFrame:
        given = self.settings.to_options()
        shared = ("dsn", "password", "slot", "publication", "spool", "quietSeconds")
        wanted: dict[str, str] = {name: given[name] for name in shared if name in given}
        wanted |= {"table": str(ORDERS), "maxTransactionsPerBatch": "40", **options}
        return self.spark.readStream.format("postgres-cdc").options(**wanted).load()

    def start(self, enriched: DataFrame) -> StreamingQuery:
        query = (
            enriched.writeStream.foreachBatch(self._take)
            .option("checkpointLocation", str(self.root / "checkpoint"))
            .start()
        )
        self._queries.append(query)
        return query

    def _take(self, frame: DataFrame, _number: int) -> None:
        rows = frame.collect()
        for row in rows:
            place = (row["_commit_version"], row["_ordinal"])
            if place in self.rows:
                self.repeated.append((self.rows[place], row))
            self.rows[place] = row
        if rows and self.loses_answer:
            self.loses_answer = False
            raise ConnectionError("the rows are written, and the answer is lost")

    def wait_for(self, query: StreamingQuery, tx: int) -> None:
        """Wait until the stream has this transaction."""

        def there() -> bool:
            if (error := query.exception()) is not None:
                raise AssertionError(f"the query failed: {error}")
            return any(row["tx"] == tx and row["id"] >= 1_000_000 for row in list(self.rows.values()))

        wait_for(there, f"transaction {tx}", lambda: len(self.rows), PATIENCE_SECONDS)

    def wait_for_start(self, query: StreamingQuery) -> None:
        """Wait until the stream knows its start."""
        wait_for(
            lambda: query.lastProgress is not None or not query.isActive,
            "the first batch",
            query.exception,
            PATIENCE_SECONDS,
        )

    def close(self) -> None:
        for query in self._queries:
            query.stop()


@pytest.fixture
def join(spark: SparkSession, database: Database, tmp_path: Path) -> Iterator[Join]:
    made = Join(spark, database, tmp_path)
    yield made
    made.close()


def test_every_change_is_joined_with_the_customers_at_its_commit(join: Join) -> None:
    commerce = Commerce(join.database)
    commerce.trade(people=2, transactions=5)
    with keep(
        PostgresReferenceTable(join.settings, CUSTOMERS), join.root / "customers", as_of_commit=True
    ) as kept:
        query = join.start(
            enrich(join.stream(), kept, on={"customer": "id"}, prefix="customer_", matched="found")
        )
        commerce.trade(people=3, transactions=15)
        join.wait_for(query, commerce.order[-1])
        join.loses_answer = True
        commerce.trade(people=3, transactions=10)
        wait_for(
            lambda: not query.isActive, "the end of the query", lambda: query.lastProgress, PATIENCE_SECONDS
        )
        commerce.clear_out()
    # Both were stopped and continue: the stream repeats a batch, and the table is far behind it.
    commerce.trade(people=3, transactions=15)
    with keep(
        PostgresReferenceTable(join.settings, CUSTOMERS), join.root / "customers", as_of_commit=True
    ) as kept:
        query = join.start(
            enrich(join.stream(), kept, on={"customer": "id"}, prefix="customer_", matched="found")
        )
        commerce.trade(people=3, transactions=15)
        join.wait_for(query, commerce.order[-1])
        query.stop()
    assert check_against_sql(commerce, (row.asDict() for row in join.rows.values())) > 200
    assert join.repeated, "a batch was repeated"
    assert [pair for pair in join.repeated if pair[0] != pair[1]] == [], (
        "a batch that is repeated is the same"
    )


def test_files_and_tables_are_followed_and_rows_looked_up_by_a_query_that_runs(join: Join) -> None:
    Commerce(join.database)
    looked_up = lookup(
        PostgresKeyedTable.inspect(join.settings, CUSTOMERS), ttl_seconds=TTL_SECONDS, negative_ttl_seconds=0
    )
    path = join.root / "customers.parquet"

    def write(name: str) -> None:
        pq.write_table(pa.table({"id": [1, 2], "name": [name, None]}), path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    write("first")
    table = PostgresReferenceTable(join.settings, CUSTOMERS)
    with (
        keep(ParquetReferenceTable(path, ["id"]), join.root / "kept") as kept,
        keep(table, join.root / "customers") as rows,
    ):
        enriched = enrich(join.stream(startingPosition="now"), kept, on={"customer": "id"}, matched="found")
        enriched = enrich(enriched, rows, on={"customer": "id"}, columns=["name"], prefix="kept_")
        query = join.start(
            enrich(enriched, looked_up, on={"customer": "id"}, columns=["name"], prefix="asked_")
        )
        for number, name in enumerate(["first", "second"]):
            write(name)
            join.database.execute("UPDATE customers SET name = %s WHERE id = 1", f"{name} 1")
            changed = time.monotonic()
            wait_for(lambda name=name: name_of(kept, 1) == name, f"{name} in the directory")  # type: ignore[misc]
            wait_for(lambda name=name: name_of(rows, 1) == f"{name} 1", f"{name} 1 in the copy")  # type: ignore[misc]
            wait_for(
                lambda changed=changed: time.monotonic() > changed + TTL_SECONDS,  # type: ignore[misc]
                "the end of what is cached",
            )
            join.wait_for_start(query)
            join.database.execute(
                "INSERT INTO orders VALUES (%s, 1, %s), (%s, 99, 0)",
                1_000_001 + number,
                number,
                1_000_101 + number,
            )
            join.wait_for(query, number)
            join.database.execute("INSERT INTO customers VALUES (99, 'new') ON CONFLICT DO NOTHING")
            wait_for(lambda: name_of(rows, 99) == "new", "the new customer in the copy")
        query.stop()
    found = [
        (row["customer"], row["name"], row["found"], row["kept_name"], row["asked_name"])
        for row in join.rows.values()
    ]
    assert found == [
        (1, "first", True, "first 1", "first 1"),
        (99, None, False, None, None),
        (1, "second", True, "second 1", "second 1"),
        (99, None, False, "new", "new"),
    ]


def name_of(kept: KeptReference, key: int) -> str | None:
    history = ReferenceCopy(kept.directory, kept.identity).newest()
    names: list[str | None] = history.take(history.find([(key,)])).column("name").to_pylist()
    return names[0]


def test_the_program_in_the_guide_runs(join: Join) -> None:
    join.database.execute("CREATE TABLE customers (id bigint PRIMARY KEY, name text, tier int)")
    join.database.execute("CREATE TABLE orders (id bigint PRIMARY KEY, customer bigint)")
    join.database.execute("INSERT INTO customers VALUES (1, 'one', 10)")
    join.database.execute("INSERT INTO orders VALUES (1, 1), (2, 2)")
    program, lookups, *_ = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    for there, here in {
        "postgresql://cdc@db.example/shop": join.settings.address.dsn,
        '"shop"': f'"{join.settings.slot}"',
        "/shared/": f"{join.root}/",
        "/lake/": f"{join.root}/",
        "query.awaitTermination()": "finish(query)",
    }.items():
        assert there in program
        program = program.replace(there, here)

    def finish(query: StreamingQuery) -> None:
        def written() -> bool:
            return (
                not query.isActive or sum(progress["numInputRows"] for progress in query.recentProgress) >= 2
            )

        wait_for(
            written,
            "two rows",
            lambda: (query.exception(), query.status, query.lastProgress),
            PATIENCE_SECONDS,
        )
        assert query.exception() is None
        query.stop()

    def rows() -> set[tuple[object, ...]]:
        found = join.spark.read.format("delta").load(f"{join.root}/orders_log").collect()
        return {(row["id"], row["customer_name"], row["customer_tier"]) for row in found}

    names = run(program, join.root, {"spark": join.spark, "finish": finish})
    assert rows() == {(1, "one", 10), (2, None, None)}
    assert run(lookups, join.root, names)["named"].columns[-1] == "name"


def run(program: str, directory: Path, names: dict[str, Any]) -> dict[str, Any]:
    path = directory / "program.py"
    path.write_text(program, encoding="utf-8")
    return runpy.run_path(str(path), init_globals=names)


def test_join_that_cannot_be_is_refused_before_it_starts(join: Join) -> None:
    Commerce(join.database)
    stream = join.stream()
    table = lookup(PostgresKeyedTable.inspect(join.settings, CUSTOMERS))
    for wrong in ({"customer": "name"}, {"nothing": "id"}, {}, {"_change_type": "id"}):
        with pytest.raises(ConfigError):
            enrich(stream, table, on=wrong)
    with pytest.raises(ConfigError, match="two columns"):
        enrich(stream, table, on={"customer": "id"}, columns=["id"])
    with pytest.raises(ConfigError, match="no column"):
        enrich(stream, table, on={"customer": "id"}, columns=["nothing"])
