"""A pipeline from the test's database into its own lake, run in this process on the shared Spark session."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from penstock.config.model import PipelineConfig, load_config
from penstock.pipeline.table_overrides import TableOverrides, load_overrides
from penstock.position import Position
from penstock.postgres.server import log_wait
from penstock.schema import TableName
from tests.support.fix_postgres import Database, PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

    from penstock.pipeline.observer import PipelineObserver
    from penstock.pipeline.pipeline import Pipeline, RunResult
    from penstock.pipeline.verify.compare import Comparison
    from penstock.sinks.base import Sink


class Mirror:
    """One configuration file, and operations on it."""

    def __init__(
        self, spark: SparkSession, database: Database, directory: Path, document: dict[str, Any]
    ) -> None:
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

    def pipeline(
        self, observer: PipelineObserver | None = None, reload: Callable[[], PipelineConfig] | None = None
    ) -> Pipeline:
        from penstock.pipeline.pipeline import Pipeline

        return Pipeline(self.config, self._spark, observer, reload)

    def orders(self) -> TableOverrides:
        return load_overrides(self.config.state)

    def damage(self, table: str, statement: str) -> None:
        """Change a target behind the pipeline's back; `{}` in the statement is the table."""
        schema, name = table.split(".")
        self._spark.sql(statement.format(f"delta.`{self.config.sink.root / schema / name}`"))

    def run_once(self, observer: PipelineObserver | None = None) -> RunResult:
        return self.pipeline(observer).run(once=True)

    def open_sink(self) -> Sink:
        from penstock.pipeline.sink_factory import open_sink

        return open_sink(self.config, self._spark)

    def rows(self, table: str, columns: str = "*") -> list[Row]:
        sink = self.open_sink()  # needed by some DataFrames while they are read
        return sink.read(TableName.parse(table)).selectExpr(*columns.split(", ")).collect()

    def confirmed(self) -> Position:
        rows = self._database.query(
            "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", self.slot
        )
        return Position.parse(rows[0][0])

    def compare(self, names: Collection[str] = ()) -> list[Comparison]:
        """Compare these tables, or every one with a target, as both sides are now, in name order.

        For a source at rest and a pipeline that has ended. Tables of mode append have no rows that could
        equal the source's, and are left out. Targets are read by Spark, so this also shows that other readers
        find the rows.
        """
        from penstock.pipeline.sources.adapter import source_adapter
        from penstock.pipeline.verify.verify import SideBySide
        from penstock.storage.temporary import scratch_directory

        wanted = [TableName.parse(name) for name in names]
        with (
            source_adapter(self.config).export(self.config.source.address(), log_wait) as snapshot,
            scratch_directory(self.config.state / "verify") as scratch,
        ):
            side = SideBySide(self._spark, self.config, scratch, reads_by_spark=True)
            tables = [table for table in side.inspect().values() if not wanted or table.name in wanted]
            copies = [table for table in tables if not self.config.mode_of(table.name).is_log]
            return [
                side.compare(table, snapshot, None)
                for table in copies
                if side.targets.load_target(table.name) is not None
            ]

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
    """Two tables: one whose epochs succeed and one whose epochs are to fail."""
    for name in ("good", "bad"):
        database.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, v text); INSERT INTO {name} VALUES (1, 'a')"
        )


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
    spark: SparkSession,
    postgres_server: PostgresServer,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[LakeFactory]:
    """`lake_of("iceberg")`: as `mirror_into`, with a separate database, for many tests of one pipeline's
    results.
    """
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
