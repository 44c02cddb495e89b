"""A pipeline from the test's database into a lake of its own, run in this process on the shared Spark session."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from penstock.pipeline.config import PipelineConfig, load_config
from penstock.pipeline.orders import TableOrders, load_orders
from penstock.position import Position
from penstock.schema import TableName
from tests.fix_postgres import Database, PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

    from penstock.pipeline.observer import PipelineObserver
    from penstock.pipeline.pipeline import Pipeline, RunResult
    from penstock.pipeline.verification.comparing import Comparison
    from penstock.sinks.base import Sink


class Mirror:
    """One configuration file, and what a test does with it."""

    def __init__(self, spark: SparkSession, database: Database, directory: Path, document: dict[str, Any]) -> None:
        self._spark = spark
        self._database = database
        self.path = directory / "pipeline.yaml"
        self.path.write_text(yaml.safe_dump(document), encoding="utf-8")

    @property
    def config(self) -> PipelineConfig:
        return load_config(self.path)

    @property
    def slot(self) -> str:
        return self.config.slot

    def pipeline(self, observer: PipelineObserver | None = None, reload: Callable[[], PipelineConfig] | None = None) -> Pipeline:
        from penstock.pipeline.pipeline import Pipeline

        return Pipeline(self.config, self._spark, observer, reload)

    def orders(self) -> TableOrders:
        return load_orders(self.config.state)

    def damage(self, table: str, statement: str) -> None:
        """Change a target behind the pipeline's back; `{}` in the statement is the table."""
        schema, name = table.split(".")
        self._spark.sql(statement.format(f"delta.`{self.config.sink.root / schema / name}`"))

    def run_once(self, observer: PipelineObserver | None = None) -> RunResult:
        return self.pipeline(observer).run(once=True)

    def open_sink(self) -> Sink:
        from penstock.pipeline.sinks import open_sink

        return open_sink(self.config, self._spark)

    def rows(self, table: str, columns: str = "*") -> list[Row]:
        sink = self.open_sink()  # which some DataFrames need for as long as they are read
        return sink.read(TableName.parse(table)).selectExpr(*columns.split(", ")).collect()

    def confirmed(self) -> Position:
        rows = self._database.query("SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", self.slot)
        return Position.parse(rows[0][0])

    def compare(self, names: Collection[str] = ()) -> list[Comparison]:
        from penstock.pipeline.verification.verify import compare_tables

        return compare_tables(self._spark, self.config, [TableName.parse(name) for name in names])

    def assert_equal(self, *tables: str) -> None:
        """Source and target are the same, row by row; the tables compared are those named."""
        found = self.compare()
        assert {str(each.table) for each in found} == set(tables)
        different = [each for each in found if not each.equal]
        assert not different, different


MirrorFactory = Callable[..., Mirror]
LakeFactory = Callable[..., tuple[Database, Mirror]]

_catalogs = count()


def mirror_document(database: Database, **changes: Any) -> dict[str, Any]:
    """The configuration for everything in schema public; keyword arguments replace parts of it."""
    document: dict[str, Any] = {
        "pipeline": f"t{database.name.rsplit('_', 1)[-1]}_{database.name.split('_')[2]}",
        "source": {"dsn": database.dsn},
        "tables": ["public.*"],
        "sink": {"delta": {"path": "lake"}},
        "trigger": "100 ms",
    }
    return {**document, **changes}


def two_tables(database: Database) -> None:
    """One that goes well and one that is to fail."""
    for name in ("good", "bad"):
        database.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v text); INSERT INTO {name} VALUES (1, 'a')")


@pytest.fixture
def mirror(spark: SparkSession, database: Database, tmp_path: Path) -> MirrorFactory:
    """`mirror()` for everything in schema public; keyword arguments replace parts of the configuration."""

    def make(**changes: Any) -> Mirror:
        return Mirror(spark, database, tmp_path, mirror_document(database, **changes))

    return make


@pytest.fixture
def target_database(postgres_server: PostgresServer) -> Iterator[Database]:
    """A second database, for those who write into Postgres."""
    created = postgres_server.create_database()
    yield created
    created.close()
    postgres_server.drop_database(created.name)


@pytest.fixture
def mirror_into(mirror: MirrorFactory, request: pytest.FixtureRequest) -> MirrorFactory:
    """`mirror_into("iceberg")`: as `mirror()`, into a sink of that kind."""

    def make(kind: str, **changes: Any) -> Mirror:
        return mirror(sink=_sink_document(kind, request), **changes)

    return make


@pytest.fixture(scope="module")
def lake_of(
    spark: SparkSession, postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[LakeFactory]:
    """`lake_of("iceberg")`: as `mirror_into`, with a database of its own, for many tests of what became of one pipeline."""
    made: list[Database] = []

    def make(kind: str, source: Mapping[str, Any] | None = None, **changes: Any) -> tuple[Database, Mirror]:
        made.append(database := postgres_server.create_database())
        document = mirror_document(database, sink=_sink_document(kind, request), **changes)
        document["source"] |= source or {}
        return database, Mirror(spark, database, tmp_path_factory.mktemp(kind), document)

    yield make
    for database in made:
        database.close()
        postgres_server.drop_database(database.name)


def _sink_document(kind: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    if kind == "iceberg":
        # A session keeps the catalogs that it has loaded.
        return {"iceberg": {"catalog": f"mirror_{next(_catalogs)}", "warehouse": "lake"}}
    if kind == "postgres":
        target: Database = request.getfixturevalue("target_database")
        return {"postgres": {"dsn": target.dsn, "schema_prefix": "copy_"}}
    return {kind: {"path": "lake"}}
