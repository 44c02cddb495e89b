"""Comparing source and target, table by table, at one position.

The source is read the way a snapshot reads it, by executors under one exported snapshot, and compared with the version of the target that
the pipeline made at the same position. Every column counts, `_exact` too. Tables of which no version is promised to equal the source,
because they are still being copied, paused or failed, are reported as that and not compared.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from penstock.change import EXACT
from penstock.errors import NoTablesError, PenstockError, Recovery, SchemaChangedError, SnapshotLostError
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.held_rows import check_held, load_held
from penstock.pipeline.letters.policy import RefusedPolicy
from penstock.pipeline.letters.store import LetterStore
from penstock.pipeline.orders import with_orders
from penstock.pipeline.scratch import scratch_directory
from penstock.pipeline.sides import side_of
from penstock.pipeline.sinks import open_sink
from penstock.pipeline.states import TableState
from penstock.pipeline.tables import select_tables
from penstock.pipeline.verification.comparing import Comparison, TableComparer
from penstock.pipeline.verification.meeting import Meeting, Tell, meet
from penstock.pipeline.verification.source_copy import copy_source
from penstock.pipeline.verification.verdicts import TableVerdict, VerifyReport
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable, inspect_schema, inspect_tables
from penstock.postgres.chunks import Chunk, cut_chunks, plan_chunks
from penstock.postgres.connection import connect
from penstock.postgres.exported import ExportedSnapshot
from penstock.postgres.health import log_wait
from penstock.postgres.outline import inspect_outline
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import Sink, Target
from penstock.sinks.layout import CURRENT, DELETED, Mode
from penstock.sinks.names import quoted
from penstock.spool import storage
from penstock.transforms.applying import transform_keys
from penstock.transforms.transform import Fitted

_ATTEMPTS = 3
_LIVE = {Mode.SOFT_DELETE: f"NOT {quoted(DELETED)}", Mode.HISTORY: quoted(CURRENT)}
"""The rows of a target that the source has now."""


def verify_tables(
    spark: SparkSession, config: PipelineConfig, names: Collection[TableName] = (), tell: Tell = lambda _: None
) -> VerifyReport:
    """Compare the tables `names`, or all that the configuration selects, whether the pipeline runs or not."""
    started = time.monotonic()
    has = with_orders(config).has
    foreign = [name for name in names if not has(name)]
    if foreign:
        raise NoTablesError(f"the configuration does not select {foreign[0]}", hint="check --table, and tables: in the configuration")
    verdicts: dict[TableName, TableVerdict] = {}
    lost: dict[TableName, TableVerdict] = {}
    for _ in range(_ATTEMPTS):
        lost = _compare_met(spark, config, names, verdicts, tell)
        if not lost:
            break
    verdicts |= lost
    if not verdicts:
        raise NoTablesError("no table of the source is selected", hint="check tables: in the configuration")
    return VerifyReport(config.pipeline, tuple(verdicts[name] for name in sorted(verdicts)), time.monotonic() - started)


def _compare_met(
    spark: SparkSession, config: PipelineConfig, names: Collection[TableName], verdicts: dict[TableName, TableVerdict], tell: Tell
) -> dict[TableName, TableVerdict]:
    """Add verdicts of tables that have none yet; gives back the tables that have to be met again, with the reason."""
    lost: dict[TableName, PenstockError] = {}
    with meet(spark, config, tell) as meeting, scratch_directory(config.state / "verify") as scratch:
        side = SideBySide(spark, config, scratch)
        tables = side.inspect()
        there = {name for name, status in meeting.tables.items() if status.state is not TableState.GONE}
        for name in sorted((set(names) or {*tables, *there}) - verdicts.keys()):
            tell(f"comparing {name}")
            try:
                verdicts[name] = judge(side, name, tables.get(name), meeting)
            except PenstockError as error:
                if error.recovery is not Recovery.RETRY:
                    raise
                lost[name] = error
        return {name: _not_compared(name, TableState.STREAMING, meeting.snapshot.fence, error) for name, error in lost.items()}


def compare_tables(spark: SparkSession, config: PipelineConfig, names: Collection[TableName] = ()) -> list[Comparison]:
    """Compare the tables `names`, or every one that has a target, as both sides are now, in name order.

    For a source at rest and a pipeline that has ended. Logs of changes have no rows that could equal the source's, and are left out.
    """
    with side_of(config).export(config.source.address(), log_wait) as snapshot, scratch_directory(config.state / "verify") as scratch:
        side = SideBySide(spark, config, scratch)
        wanted = [table for table in side.inspect().values() if not names or table.name in names]
        copies = [table for table in wanted if config.mode_of(table.name) is not Mode.APPEND]
        return [side.compare(table, snapshot, None) for table in copies if side.targets.load_target(table.name) is not None]


def judge(side: SideBySide, name: TableName, table: CatalogTable | None, meeting: Meeting) -> TableVerdict:
    """An error that time can mend, if the table has to be met again."""
    fence = meeting.snapshot.fence
    status = meeting.tables.get(name)
    if status is None:
        return TableVerdict(name, TableState.PENDING, fence, reason="the pipeline has not taken the table in yet")
    if status.state is not TableState.STREAMING:
        return TableVerdict(name, status.state, fence, reason=status.reason, remedy=status.remedy)
    if table is None:
        return TableVerdict(name, status.state, fence, reason="the source has no such table any more")
    if side.config.mode_of(name) is Mode.APPEND:
        return TableVerdict(name, status.state, fence, reason="a log of changes is not compared: it holds more than the rows of now")
    try:
        place = side.targets.describe(name)
        if side.targets.load_target(name) is None:
            remedy = f"copy the table anew: penstock tables resync CONFIG {name}"
            return TableVerdict(name, status.state, fence, reason=f"{place} is gone", remedy=remedy)
        version = side.targets.version_at(name, fence) if status.applied == fence else None
        if version is None:
            raise SnapshotLostError(f"{place} was filled anew while it was to be compared")
        return TableVerdict(name, status.state, fence, side.compare(table, meeting.snapshot, version))
    except PenstockError as error:
        if error.recovery is not Recovery.OPERATOR:
            raise
        return _not_compared(name, status.state, fence, error)


def _not_compared(name: TableName, state: TableState, fence: Position, error: PenstockError) -> TableVerdict:
    return TableVerdict(name, state, fence, reason=f"{error.code}: {error.message}", remedy=error.hint)


@dataclass(frozen=True)
class SideBySide:
    """Source and target of one pipeline. The source's rows go to `scratch`, a table at a time."""

    spark: SparkSession
    config: PipelineConfig
    scratch: Path

    @cached_property
    def targets(self) -> Sink:
        return open_sink(self.config, self.spark)

    def inspect(self) -> dict[TableName, CatalogTable]:
        """The tables of the pipeline that the source has, in name order."""
        selects = with_orders(self.config).selects
        with connect(self.config.source.address()) as connection:
            if self.config.is_routing:
                return dict(sorted(select_tables(connection, self.config).tables.items()))
            return {table.name: table for table in inspect_tables(connection) if selects(table.name)}

    def compare(self, table: CatalogTable, snapshot: ExportedSnapshot, version: int | None) -> Comparison:
        """The table under the snapshot, with a version of its target, or the newest."""
        source, chunks = self._plan(table)
        transform = self.config.transform_of(table.name)
        fitted = None if transform is None else transform.fit(source)
        schema = source if fitted is None else fitted.schema
        target = self.targets.load_target(table.name)
        if target is not None:
            _check_shape(schema, target, self.targets.describe(table.name))
        rows = self.targets.read(table.name, version)
        live = _LIVE.get(self.config.mode_of(table.name))
        right = (rows if live is None else rows.where(live)).select(*(quoted(name) for name in (*schema.column_names, EXACT)))
        held = load_held(self._letters, source, None if version is None else snapshot.fence)
        directory = self.scratch / str(table.oid)
        aside = directory / "refused" if fitted is not None and source.key and self._puts_aside(table.name) else None
        try:
            files = copy_source(self.spark, self.config.source.address(), snapshot.name, chunks, directory, fitted=fitted, aside=aside)
            left = self.spark.read.schema(right.schema).parquet(*files) if files else right.limit(0)
            if aside is not None:
                check_held(source, sorted(aside.glob("[!.]*")), held)
            comparer = TableComparer(schema, {field.name: field.dataType for field in right.schema})
            return comparer.compare(left, right, self._held(held, fitted, right, directory) if held.num_rows else None)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    @property
    def _letters(self) -> LetterStore:
        """As they are by now."""
        return LetterStore(self.config.sink.root, self.config.pipeline)

    def _puts_aside(self, name: TableName) -> bool:
        return self.config.refused_policy(name) is RefusedPolicy.DEAD_LETTERS

    def _held(self, keys: pa.Table, fitted: Fitted | None, like: DataFrame, directory: Path) -> DataFrame:
        """Keys of the source, as the target has them."""
        made = keys if fitted is None else transform_keys(fitted, keys)
        path = directory / "held.parquet"
        with storage.create_file(path) as file:
            pq.write_table(made, file)
        return self.spark.read.schema(like.select(*(quoted(name) for name in made.column_names)).schema).parquet(str(path))

    def _plan(self, table: CatalogTable) -> tuple[TableSchema, list[Chunk]]:
        config = self.config
        with connect(config.source.address()) as connection:
            if table.members:
                found = inspect_outline(connection, table, config.type_policy, config.published_by)
                return found.outline.schema, cut_chunks(found, config.snapshot_chunk_bytes)
            schema = inspect_schema(connection, table, config.type_policy, config.published_by)
            return schema, plan_chunks(connection, table, schema, config.snapshot_chunk_bytes, config.published_by)


def _check_shape(schema: TableSchema, target: Target, place: str) -> None:
    """What the target still has of columns that were dropped is nothing to compare."""
    there = {field.name: field.type for field in target.schema}
    is_there = all(there.get(column.name) == column.arrow_type for column in schema.columns)
    extra = set(there) - set(schema.column_names)
    if schema.oid != target.source_oid or schema.key != target.key or not is_there or (extra and target.origin is None):
        raise SchemaChangedError(
            f"table {schema.name} and {place} have not the same columns and key",
            hint="let the pipeline catch up with the change, or see penstock status for what keeps it from that",
        )
