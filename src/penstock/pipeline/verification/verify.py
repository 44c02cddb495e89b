"""Comparing source and target, table by table, at one position.

The source is read the way a snapshot reads it, by executors under one exported snapshot, and compared with the version of the target that
the pipeline made at the same position. Every column counts, `_exact` too. Tables of which no version is promised to equal the source,
because they are still being copied, paused or failed, are reported as that and not compared.

A small table is read on both sides by this process: that takes milliseconds, where planning Spark's jobs takes a second or more. Only a
table that is large, or that turns out to differ, is compared by Spark. Whatever ends the comparison of one table, the others are compared
and reported.
"""

from __future__ import annotations

import gc
import logging
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession

from penstock.change import EXACT
from penstock.errors import ComparisonFailedError, NoTablesError, PenstockError, Recovery, SchemaChangedError, SnapshotLostError
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
from penstock.pipeline.verification.canonical import count_rows
from penstock.pipeline.verification.comparing import Comparison, TableComparer
from penstock.pipeline.verification.meeting import Meeting, Tell, meet
from penstock.pipeline.verification.source_copy import copy_chunk, copy_source
from penstock.pipeline.verification.verdicts import TableVerdict, VerifyReport
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable, inspect_schema, inspect_tables
from penstock.postgres.chunks import Chunk, cut_chunks, plan_chunks, snapshot_schema
from penstock.postgres.connection import connect
from penstock.postgres.exported import ExportedSnapshot
from penstock.postgres.health import log_wait
from penstock.postgres.outline import inspect_outline
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import Sink, Target
from penstock.sinks.iceberg.catalog import java_class
from penstock.sinks.layout import CURRENT, DELETED, Mode
from penstock.sinks.names import quoted
from penstock.spool import storage
from penstock.transforms.applying import transform_keys
from penstock.transforms.transform import Fitted

_log = logging.getLogger(__name__)

_ATTEMPTS = 3
_LIVE = {Mode.SOFT_DELETE: f"NOT {quoted(DELETED)}", Mode.HISTORY: quoted(CURRENT)}
_LIVE_ROWS = {Mode.SOFT_DELETE: ~pc.field(DELETED), Mode.HISTORY: pc.field(CURRENT)}
"""The rows of a target that the source has now: for Spark, and for Arrow."""
SMALL_BYTES = 16 << 20
"""As objects of Python, this much takes about ten times the memory."""
_FEW_ROWS = 10_000


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
        try:
            _compare_met(spark, config, names, verdicts, lost, tell=tell)
        except PenstockError as error:
            if not verdicts:
                raise
            lost = {name: replace(each, error=error) for name, each in lost.items()}
            break
        if not lost:
            break
    verdicts |= lost
    if not verdicts:
        raise NoTablesError("no table of the source is selected", hint="check tables: in the configuration")
    return VerifyReport(config.pipeline, tuple(verdicts[name] for name in sorted(verdicts)), time.monotonic() - started)


def _compare_met(
    spark: SparkSession,
    config: PipelineConfig,
    names: Collection[TableName],
    verdicts: dict[TableName, TableVerdict],
    lost: dict[TableName, TableVerdict],
    *,
    tell: Tell,
) -> None:
    """Add verdicts of tables that have none yet. `lost` gets the tables that have to be compared again, with the reason.

    Both are complete even if letting go of the snapshot fails: the connection that held it may be what was lost.
    """
    with meet(spark, config, tell) as meeting, scratch_directory(config.state / "verify") as scratch:
        side = SideBySide(spark, config, scratch)
        tables = side.inspect()
        there = {name for name, status in meeting.tables.items() if status.state is not TableState.GONE}
        for name in sorted((set(names) or {*tables, *there}) - verdicts.keys()):
            tell(f"comparing {name}")
            lost.pop(name, None)
            try:
                verdicts[name] = judge(side, name, tables.get(name), meeting)
            except PenstockError as error:
                into = lost if error.recovery is Recovery.RETRY else verdicts
                into[name] = _not_compared(name, TableState.STREAMING, meeting.snapshot.fence, error)
            except Exception as error:  # noqa: BLE001 one table must not cost the report of the others
                _log.debug("comparison failed", extra={"table": str(name)}, exc_info=True)
                verdicts[name] = _not_compared(name, TableState.STREAMING, meeting.snapshot.fence, _unexpected(name, error))


def _unexpected(name: TableName, error: Exception) -> ComparisonFailedError:
    """Only the kind of the error is told: its text may hold values of rows."""
    kind = type(error).__name__
    with suppress(Py4JError, OSError):  # the JVM may be gone
        kind = java_class(error) or kind
    hint = "see spark.log in the state directory; raise spark.driver.memory under spark.conf if it ran out of memory"
    return ComparisonFailedError(f"comparing {name} ended with {kind}", hint=hint)


def compare_tables(spark: SparkSession, config: PipelineConfig, names: Collection[TableName] = ()) -> list[Comparison]:
    """Compare the tables `names`, or every one that has a target, as both sides are now, in name order.

    For a source at rest and a pipeline that has ended. Logs of changes have no rows that could equal the source's, and are left out.
    Targets are read by Spark, so this also shows that readers other than our own find the rows.
    """
    with side_of(config).export(config.source.address(), log_wait) as snapshot, scratch_directory(config.state / "verify") as scratch:
        side = SideBySide(spark, config, scratch, reads_by_spark=True)
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
        # This is what the comparison found, and not what kept it from being made.
        return TableVerdict(name, status.state, fence, reason=f"{error.code}: {error.message}", remedy=error.hint)


def _not_compared(name: TableName, state: TableState, fence: Position, error: PenstockError) -> TableVerdict:
    return TableVerdict(name, state, fence, error=error)


@dataclass(frozen=True)
class SideBySide:
    """Source and target of one pipeline. The source's rows go to `scratch`, a table at a time."""

    spark: SparkSession
    config: PipelineConfig
    scratch: Path
    small_bytes: int = SMALL_BYTES
    """Up to this much of each side is compared by this process."""
    reads_by_spark: bool = False
    """Whether Spark reads small targets too, in place of the sink's own reader."""

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
        held = load_held(self._letters, source, None if version is None else snapshot.fence)
        directory = self.scratch / str(table.oid)
        aside = directory / "refused" if fitted is not None and source.key and self._puts_aside(table.name) else None
        try:
            files = self._copy(snapshot.name, chunks, directory, fitted, aside)
            if aside is not None:
                check_held(source, sorted(aside.glob("[!.]*")), held)
            equal = None if held.num_rows else self._count_equal(schema, files, version)
            if equal is not None:
                return Comparison(schema.name, equal, equal)
            return self._compare_by_spark(schema, files, version, lambda like: self._held(held, fitted, like, directory))
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _copy(self, snapshot: str, chunks: Sequence[Chunk], directory: Path, fitted: Fitted | None, aside: Path | None) -> list[str]:
        """The source's rows, put into files: by this process if they are few, else by executors."""
        address = self.config.source.address()
        is_small = sum(chunk.heap_bytes for chunk in chunks) <= self.small_bytes
        if not is_small or (fitted is not None and fitted.query is not None):
            return copy_source(self.spark, address, snapshot, chunks, directory, fitted=fitted, aside=aside)
        for place in (directory, aside):
            if place is not None:
                storage.make_directory(place)
        found = [copy_chunk(address, snapshot, chunk, directory, fitted, aside=aside) for chunk in chunks]
        return [path for path in found if path is not None]

    def _count_equal(self, schema: TableSchema, files: Sequence[str], version: int | None) -> int | None:
        """How many rows a small table has, if both sides have the same rows. None: it is for Spark to compare them."""
        if sum(Path(path).stat().st_size for path in files) > self.small_bytes:
            return None
        found = self._read_small(schema.name, version)
        if found is None:
            return None
        live = _LIVE_ROWS.get(self.config.mode_of(schema.name))
        target = (found if live is None else found.filter(live)).select([*schema.column_names, EXACT])
        source = pa.concat_tables([snapshot_schema(schema).empty_table(), *map(pq.read_table, files)])
        wanted = [_wider(one, other) for one, other in zip(source.schema.types, target.schema.types, strict=True)]
        if None in wanted:
            return None
        same = pa.schema([pa.field(name, kind) for name, kind in zip(target.column_names, wanted, strict=True)])
        return target.num_rows if count_rows(source.cast(same)) == count_rows(target.cast(same)) else None

    def _read_small(self, name: TableName, version: int | None) -> pa.Table | None:
        """All rows of a target; None if they are too many for this process."""
        if not self.reads_by_spark:
            return self.targets.read_small(name, version, self.small_bytes)
        rows = self.targets.read(name, version).limit(_FEW_ROWS + 1).toArrow()
        return rows if rows.num_rows <= _FEW_ROWS and rows.nbytes <= self.small_bytes else None

    def _compare_by_spark(
        self, schema: TableSchema, files: Sequence[str], version: int | None, held: Callable[[DataFrame], DataFrame | None]
    ) -> Comparison:
        rows = self.targets.read(schema.name, version)
        live = _LIVE.get(self.config.mode_of(schema.name))
        right = (rows if live is None else rows.where(live)).select(*(quoted(name) for name in (*schema.column_names, EXACT)))
        left = self.spark.read.schema(right.schema).parquet(*files) if files else right.limit(0)
        comparer = TableComparer(schema, {field.name: field.dataType for field in right.schema})
        try:
            return comparer.compare(left, right, held(right))
        finally:
            gc.collect()  # the JVM keeps plans and cached rows for as long as Python keeps what stands for them

    @property
    def _letters(self) -> LetterStore:
        """As they are by now."""
        return LetterStore(self.config.sink.root, self.config.pipeline)

    def _puts_aside(self, name: TableName) -> bool:
        return self.config.refused_policy(name) is RefusedPolicy.DEAD_LETTERS

    def _held(self, keys: pa.Table, fitted: Fitted | None, like: DataFrame, directory: Path) -> DataFrame | None:
        """Keys of the source, as the target has them; None if there are none."""
        if not keys.num_rows:
            return None
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


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both; None if they are of different kinds. Some targets have no small integers."""
    if one == other:
        return one
    if pa.types.is_signed_integer(one) and pa.types.is_signed_integer(other):
        return max((one, other), key=lambda kind: int(kind.bit_width))
    return None


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
