"""Compare source and target, table by table, at one position, and report the result.

Executors read the source as a snapshot does, under one exported snapshot, and compare it with the target
version of the same position. All columns are compared, `_exact` too. Tables that are being copied, paused or
failed are reported with their state and not compared.

This process reads small tables itself, which takes milliseconds; planning Spark jobs takes a second or more.
Spark compares only large tables, and tables that differ. If the comparison of one table fails, the others are
still compared and reported.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession

from penstock import storage
from penstock.change import EXACT
from penstock.config.model import PipelineConfig
from penstock.config.policies import RefusedPolicy
from penstock.errors import (
    ComparisonFailedError,
    NoTablesError,
    PenstockError,
    Recovery,
    SchemaChangedError,
    SnapshotLostError,
)
from penstock.pipeline.dead_letters.store import DeadLetterStore, check_held, load_held
from penstock.pipeline.sink_factory import open_sink
from penstock.pipeline.table_overrides import with_overrides
from penstock.pipeline.table_selection import select_tables
from penstock.pipeline.table_states import TableState
from penstock.pipeline.verify.alignment import AlignedSnapshot, Tell, align
from penstock.pipeline.verify.compare import Comparison, TableComparer, count_rows
from penstock.pipeline.verify.source_rows import copy_chunk, copy_source
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable, inspect_tables
from penstock.postgres.chunked_table import ChunkedTable, chunk_tables
from penstock.postgres.chunks import Chunk, snapshot_schema
from penstock.postgres.connection import connect
from penstock.postgres.snapshot_export import ExportedSnapshot
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import Sink, Target
from penstock.sinks.dataframes import quoted
from penstock.sinks.iceberg.catalog import java_class
from penstock.storage.temporary import scratch_directory
from penstock.transforms.apply import transform_keys
from penstock.transforms.transform import Fitted


@dataclass(frozen=True, slots=True)
class TableVerdict:
    """The result for one table: the comparison, or the reason why the table was not compared."""

    table: TableName
    state: TableState
    position: Position
    """The position of the comparison. If the table was not compared, it has `state` at this position."""
    comparison: Comparison | None = None
    reason: str | None = None
    remedy: str | None = None
    error: PenstockError | None = None
    """The error that prevented the comparison of a streaming table."""

    def __post_init__(self) -> None:
        if self.error is not None:
            object.__setattr__(self, "reason", f"{self.error.code}: {self.error.message}")
            object.__setattr__(self, "remedy", self.error.hint)

    @property
    def equal(self) -> bool:
        """Whether the table was compared and is equal."""
        return self.comparison is not None and self.comparison.equal

    @property
    def equal_but_held(self) -> bool:
        """Whether the table was compared and is equal, except for rows in the dead-letter queue."""
        return self.comparison is not None and self.comparison.equal_but_held

    def as_document(self) -> dict[str, object]:
        document: dict[str, object] = {
            "state": self.state.value,
            "position": str(self.position),
            "compared": self.comparison is not None,
            "equal": self.equal,
            "failed": self.error is not None,
            "reason": self.reason,
            "remedy": self.remedy,
        }
        if self.comparison is not None:
            found = asdict(self.comparison)
            document |= {
                name: found[name]
                for name in (
                    "source_rows",
                    "target_rows",
                    "missing",
                    "extra",
                    "different",
                    "held",
                    "columns",
                    "examples",
                )
            }
        return document


@dataclass(frozen=True, slots=True)
class VerifyReport:
    pipeline: str
    verdicts: Sequence[TableVerdict]
    """The verdicts, in the order of table names."""
    seconds: float

    @property
    def equal(self) -> bool:
        """Whether every requested table equals its source."""
        return all(each.equal for each in self.verdicts)

    @property
    def equal_but_held(self) -> bool:
        """Whether every requested table equals its source, except for rows in the dead-letter queue."""
        return all(each.equal_but_held for each in self.verdicts)

    @property
    def complete(self) -> bool:
        """Whether no error prevented a comparison."""
        return all(each.error is None for each in self.verdicts)

    def as_document(self) -> dict[str, object]:
        """Return the report as a JSON document for programs. The names of its keys are stable."""
        return {
            "pipeline": self.pipeline,
            "equal": self.equal,
            "complete": self.complete,
            "seconds": round(self.seconds, 3),
            "tables": {str(each.table): each.as_document() for each in self.verdicts},
        }


_log = logging.getLogger(__name__)

_ATTEMPTS = 3
SMALL_BYTES = 16 << 20
"""Maximum bytes of a side that is compared without Spark. Python objects take about ten times as much
memory.
"""
_FEW_ROWS = 10_000


def verify_tables(
    spark: SparkSession,
    config: PipelineConfig,
    names: Collection[TableName] = (),
    tell: Tell = lambda _: None,
) -> VerifyReport:
    """Compare the tables `names`; by default all selected tables. The pipeline may be running or stopped."""
    started = time.monotonic()
    has = with_overrides(config).has
    foreign = [name for name in names if not has(name)]
    if foreign:
        raise NoTablesError(
            f"the configuration does not select {foreign[0]}",
            hint="check --table, and the setting `tables` in the configuration",
        )
    verdicts: dict[TableName, TableVerdict] = {}
    lost: dict[TableName, TableVerdict] = {}
    for _ in range(_ATTEMPTS):
        try:
            _compare_aligned(spark, config, names, verdicts, lost, tell=tell)
        except PenstockError as error:
            if not verdicts:
                raise
            lost = {name: replace(each, error=error) for name, each in lost.items()}
            break
        if not lost:
            break
    verdicts |= lost
    if not verdicts:
        raise NoTablesError(
            "no table of the source is selected", hint="check the setting `tables` in the configuration"
        )
    return VerifyReport(
        config.pipeline, tuple(verdicts[name] for name in sorted(verdicts)), time.monotonic() - started
    )


def _compare_aligned(
    spark: SparkSession,
    config: PipelineConfig,
    names: Collection[TableName],
    verdicts: dict[TableName, TableVerdict],
    lost: dict[TableName, TableVerdict],
    *,
    tell: Tell,
) -> None:
    """Compare the tables that have no verdict yet, and add their verdicts to `verdicts`. If the comparison of
    a table has to be repeated, its verdict is added to `lost` instead, with the reason.

    Both dicts are complete even if the release of the snapshot raises an error, for example because its
    connection was lost.
    """
    with align(spark, config, tell) as meeting, scratch_directory(config.state / "verify") as scratch:
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
                verdicts[name] = _not_compared(
                    name, TableState.STREAMING, meeting.snapshot.fence, _unexpected(name, error)
                )


def _unexpected(name: TableName, error: Exception) -> ComparisonFailedError:
    """Return an error that names only the class of `error`, because the text of `error` may contain row
    values.
    """
    kind = type(error).__name__
    with suppress(Py4JError, OSError):  # the JVM may have ended
        kind = java_class(error) or kind
    hint = (
        "see spark.log in the state directory; raise spark.driver.memory under spark.conf if it ran out "
        "of memory"
    )
    return ComparisonFailedError(f"comparing {name} ended with {kind}", hint=hint)


def judge(
    side: SideBySide, name: TableName, table: CatalogTable | None, meeting: AlignedSnapshot
) -> TableVerdict:
    """Compare one table, and return its verdict. Raises transient errors; the caller then compares the table
    again.
    """
    fence = meeting.snapshot.fence
    status = meeting.tables.get(name)
    if status is None:
        return TableVerdict(
            name, TableState.PENDING, fence, reason="the pipeline has not added the table yet"
        )
    if status.state is not TableState.STREAMING:
        return TableVerdict(name, status.state, fence, reason=status.reason, remedy=status.remedy)
    if table is None:
        return TableVerdict(name, status.state, fence, reason="the source no longer has the table")
    if side.config.mode_of(name).is_log:
        return TableVerdict(
            name,
            status.state,
            fence,
            reason="a table of mode append is not compared: it has more than the current rows",
        )
    try:
        place = side.targets.describe(name)
        if side.targets.load_target(name) is None:
            remedy = f"resync the table: penstock tables resync CONFIG {name}"
            return TableVerdict(name, status.state, fence, reason=f"{place} is gone", remedy=remedy)
        version = side.targets.version_at(name, fence) if status.applied == fence else None
        if version is None:
            raise SnapshotLostError(f"{place} was replaced during the comparison")
        return TableVerdict(name, status.state, fence, side.compare(table, meeting.snapshot, version))
    except PenstockError as error:
        if error.recovery is not Recovery.OPERATOR:
            raise
        # the error is the result of the comparison
        return TableVerdict(
            name, status.state, fence, reason=f"{error.code}: {error.message}", remedy=error.hint
        )


def _not_compared(name: TableName, state: TableState, fence: Position, error: PenstockError) -> TableVerdict:
    return TableVerdict(name, state, fence, error=error)


@dataclass(frozen=True)
class SideBySide:
    """Source and target of one pipeline. Source rows are written to `scratch`, one table at a time."""

    spark: SparkSession
    config: PipelineConfig
    scratch: Path
    small_bytes: int = SMALL_BYTES
    """Maximum bytes of each side for a comparison by this process, without Spark."""
    reads_by_spark: bool = False
    """Whether Spark reads small targets too, instead of the sink's own reader."""

    @cached_property
    def targets(self) -> Sink:
        return open_sink(self.config, self.spark)

    def inspect(self) -> dict[TableName, CatalogTable]:
        """The pipeline's tables that exist in the source, in name order."""
        selects = with_overrides(self.config).selects
        with connect(self.config.source.address()) as connection:
            if self.config.is_routing:
                return dict(sorted(select_tables(connection, self.config).tables.items()))
            return {table.name: table for table in inspect_tables(connection) if selects(table.name)}

    def compare(self, table: CatalogTable, snapshot: ExportedSnapshot, version: int | None) -> Comparison:
        """Compare the table as of the snapshot with its target at `version`, or at the newest version if this
        is None.
        """
        planned = self._plan(table)
        source, chunks = planned.schema, planned.chunks
        transform = self.config.transform_of(table.name)
        fitted = None if transform is None else transform.fit(source)
        schema = source if fitted is None else fitted.schema
        target = self.targets.load_target(table.name)
        if target is not None:
            _check_shape(schema, target, self.targets.describe(table.name))
        held = load_held(self._letters, source, None if version is None else snapshot.fence)
        directory = self.scratch / str(table.oid)
        rejected_directory = (
            directory / "refused" if fitted is not None and source.key and self._diverts(table.name) else None
        )
        try:
            files = self._copy(snapshot.name, chunks, directory, fitted, rejected_directory)
            if rejected_directory is not None:
                check_held(source, storage.list_paths(rejected_directory, "[!.]*"), held)
            equal = None if held.num_rows else self._count_equal(schema, files, version)
            if equal is not None:
                return Comparison(schema.name, equal, equal)
            return self._compare_by_spark(
                schema, files, version, lambda like: self._held(held, fitted, like, directory)
            )
        finally:
            storage.discard_tree(directory)

    def _copy(
        self,
        snapshot: str,
        chunks: Sequence[Chunk],
        directory: Path,
        fitted: Fitted | None,
        rejected_directory: Path | None,
    ) -> list[str]:
        """Write the source's rows into files: by this process if the table is small, otherwise by
        executors.
        """
        address = self.config.source.address()
        is_small = sum(chunk.heap_bytes for chunk in chunks) <= self.small_bytes
        if not is_small or (fitted is not None and fitted.query is not None):
            return copy_source(
                self.spark,
                address,
                snapshot,
                chunks,
                directory,
                fitted=fitted,
                rejected_directory=rejected_directory,
            )
        for place in (directory, rejected_directory):
            if place is not None:
                storage.ensure_directory(place)
        found = [
            copy_chunk(address, snapshot, chunk, directory, fitted, rejected_directory=rejected_directory)
            for chunk in chunks
        ]
        return [path for path in found if path is not None]

    def _count_equal(self, schema: TableSchema, files: Sequence[str], version: int | None) -> int | None:
        """Return the row count of a small table whose sides are equal; None if Spark has to compare the
        sides.
        """
        if sum(storage.size_bytes(Path(path)) for path in files) > self.small_bytes:
            return None
        found = self._read_small(schema.name, version)
        if found is None:
            return None
        live = self.config.mode_of(schema.name).live_flag
        live_rows = found if live is None else found.filter(pc.field(live.column) == live.value)
        target = live_rows.select([*schema.column_names, EXACT])
        source = pa.concat_tables([snapshot_schema(schema).empty_table(), *map(pq.read_table, files)])
        wanted = [
            _wider(one, other) for one, other in zip(source.schema.types, target.schema.types, strict=True)
        ]
        if None in wanted:
            return None
        same = pa.schema(
            [pa.field(name, kind) for name, kind in zip(target.column_names, wanted, strict=True)]
        )
        return target.num_rows if count_rows(source.cast(same)) == count_rows(target.cast(same)) else None

    def _read_small(self, name: TableName, version: int | None) -> pa.Table | None:
        """Return all rows of a target; None if they are too many for this process."""
        if not self.reads_by_spark:
            return self.targets.read_small(name, version, self.small_bytes)
        rows = self.targets.read(name, version).limit(_FEW_ROWS + 1).toArrow()
        return rows if rows.num_rows <= _FEW_ROWS and rows.nbytes <= self.small_bytes else None

    def _compare_by_spark(
        self,
        schema: TableSchema,
        files: Sequence[str],
        version: int | None,
        held: Callable[[DataFrame], DataFrame | None],
    ) -> Comparison:
        rows = self.targets.read(schema.name, version)
        live = self.config.mode_of(schema.name).live_flag
        live_rows = rows if live is None else rows.where(f"{quoted(live.column)} = {str(live.value).lower()}")
        right = live_rows.select(*(quoted(name) for name in (*schema.column_names, EXACT)))
        left = self.spark.read.schema(right.schema).parquet(*files) if files else right.limit(0)
        comparer = TableComparer(schema, {field.name: field.dataType for field in right.schema})
        try:
            return comparer.compare(left, right, held(right))
        finally:
            gc.collect()  # the JVM keeps plans and cached rows until Python releases their references

    @property
    def _letters(self) -> DeadLetterStore:
        """The dead letters of the pipeline."""
        return DeadLetterStore(self.config.sink.root, self.config.pipeline)

    def _diverts(self, name: TableName) -> bool:
        return self.config.refused_policy(name) is RefusedPolicy.DEAD_LETTERS

    def _held(
        self, keys: pa.Table, fitted: Fitted | None, like: DataFrame, directory: Path
    ) -> DataFrame | None:
        """Return the keys of rows with dead letters, transformed and with the target's types; None if `keys`
        is empty.
        """
        if not keys.num_rows:
            return None
        made = keys if fitted is None else transform_keys(fitted, keys)
        path = directory / "held.parquet"
        with storage.open_new(path) as file:
            pq.write_table(made, file)
        return self.spark.read.schema(
            like.select(*(quoted(name) for name in made.column_names)).schema
        ).parquet(str(path))

    def _plan(self, table: CatalogTable) -> ChunkedTable:
        config = self.config
        with connect(config.source.address()) as connection:
            (planned,) = chunk_tables(
                connection, [table], config.type_policy, config.published_by, config.snapshot_chunk_bytes
            )
        return planned


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the type that holds the values of both types; None if they are of different kinds. They may
    differ, because some targets lack small integers.
    """
    if one == other:
        return one
    if pa.types.is_signed_integer(one) and pa.types.is_signed_integer(other):
        return max((one, other), key=lambda kind: int(kind.bit_width))
    return None


def _check_shape(schema: TableSchema, target: Target, place: str) -> None:
    """Raise an error if source and target do not have the same columns and key. Target columns that the
    source dropped are ignored.
    """
    there = {field.name: field.type for field in target.schema}
    is_there = all(there.get(column.name) == column.arrow_type for column in schema.columns)
    extra = set(there) - set(schema.column_names)
    if (
        schema.oid != target.source_oid
        or schema.key != target.key
        or not is_there
        or (extra and target.origin is None)
    ):
        raise SchemaChangedError(
            f"table {schema.name} and {place} do not have the same columns and key",
            hint="wait until the pipeline has applied the change; penstock status CONFIG shows why it has "
            "not",
        )
