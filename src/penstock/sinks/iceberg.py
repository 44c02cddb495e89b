"""`IcebergSink`: tables in an Iceberg catalog of Spark's.

Data and position commit together: the position stands in the summary of the snapshot that brings the rows, and the commit is made only
against the very table whose position was read (`iceberg_catalog.py`). A repeated or older epoch is found out before that. A snapshot of the
source is one commit of files that executors wrote. An epoch is one commit of a file of rows and a file of equality deletes, whose cost is
that of the changes, not of the table; an epoch of inserts is an append; one that empties the table is an overwrite. Reading such a table
costs more with each delete, until it is rewritten (`iceberg_maintenance.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from typing_extensions import override

from penstock.change import EXACT, EXACT_TYPE, ChangeCounts
from penstock.errors import SchemaChangedError, SinkError, SinkRefusedError, TableRewrittenError, TargetRewoundError
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import SHADOWS, ChangedRows, Sink, SnapshotFile, SnapshotPlace, TableChanges, Target
from penstock.sinks.directories import folds_case
from penstock.sinks.executors import Executors, SparkExecutors
from penstock.sinks.iceberg_catalog import IcebergCatalog, LoadedTable, NewFile, TableChange, TableMovedError
from penstock.sinks.iceberg_epoch import EpochTarget, EpochWriter, discard
from penstock.sinks.iceberg_maintenance import Maintainer, Maintenance
from penstock.sinks.iceberg_state import POSITION, find_applied, find_version, identity_properties, owned_target, position_properties
from penstock.sinks.iceberg_targets import identifier
from penstock.sinks.layout import Layout, Mode
from penstock.sinks.names import quoted, sql_type, text_literal
from penstock.sinks.slices import slices_after

_FILES = "snapshot-*.parquet"
_METADATA_VERSIONS = 100


@dataclass(frozen=True, slots=True)
class IcebergPlace:
    """Which catalog the tables are in, under which namespaces, and where it keeps them."""

    catalog: str
    warehouse: Path
    namespace: tuple[str, ...] = ()
    format_version: int = 2
    maintenance: Maintenance = field(default_factory=Maintenance)


class IcebergSink(Sink):
    def __init__(self, spark: SparkSession, place: IcebergPlace, pipeline: str, executors: Executors | None = None) -> None:
        self._spark = spark
        self._place = place
        self._pipeline = pipeline
        self._catalog = IcebergCatalog(spark, place.catalog, place.warehouse)
        self._executors = executors or SparkExecutors(spark)
        scratch = place.warehouse / "penstock_scratch" / pipeline
        self._writer = EpochWriter(spark, self._executors, place.catalog, place.warehouse, scratch)
        self._reached: dict[TableName, Position] = {}
        self._maintainers: dict[TableName, Maintainer] = {}

    def identifier(self, table: TableName) -> tuple[str, ...]:
        return identifier(self._place.namespace, table)

    def sql_name(self, table: TableName) -> str:
        return ".".join(quoted(part) for part in (self._place.catalog, *self.identifier(table)))

    # --- how it stands ---------------------------------------------------------------------------------------------------

    @override
    def describe(self, table: TableName) -> str:
        return ".".join((self._place.catalog, *self.identifier(table)))

    @override
    def tells_apart(self, one: TableName, other: TableName) -> bool:
        self._place.warehouse.mkdir(parents=True, exist_ok=True)
        return not folds_case(self._place.warehouse)

    @override
    def load_target(self, table: TableName) -> Target | None:
        loaded = self._catalog.load(self.identifier(table))
        target = None if loaded is None else self._target(table, loaded)
        self._remember(table, target.applied if target is not None else None)
        return target

    @override
    def version_at(self, table: TableName, position: Position) -> int | None:
        loaded = self._catalog.load(self.identifier(table))
        return None if loaded is None else find_version(loaded.ancestors(), loaded.properties, position)

    @override
    def read(self, table: TableName, version: int | None = None) -> DataFrame:
        name = self.sql_name(table)
        self._spark.sql(f"REFRESH TABLE {name}")
        reader = self._spark.read if version is None else self._spark.read.option("versionAsOf", version)
        return reader.table(name)

    def _target(self, table: TableName, loaded: LoadedTable) -> Target:
        applied = find_applied(loaded.ancestors(), loaded.properties)
        return owned_target(table, self.describe(table), self._pipeline, loaded.properties, applied)

    def _loaded(self, table: TableName) -> LoadedTable:
        loaded = self._catalog.load(self.identifier(table))
        if loaded is None:
            raise TargetRewoundError(f"{self.describe(table)} is gone", hint="restart the pipeline to copy the table anew")
        return loaded

    def _remember(self, table: TableName, position: Position | None) -> None:
        if position is None:
            self._reached.pop(table, None)
        else:
            self._reached[table] = position

    # --- snapshots -------------------------------------------------------------------------------------------------------

    @override
    def begin_snapshot(self, schema: TableSchema, fence: Position) -> SnapshotPlace:
        self.load_target(schema.name)  # what is another's is refused
        self._place.warehouse.mkdir(parents=True, exist_ok=True)
        columns = pa.schema([pa.field(column.name, column.arrow_type) for column in schema.columns])
        listed = [f"{quoted(each.name)} {sql_type(each.type)}" for each in (*columns, pa.field(EXACT, EXACT_TYPE))]
        properties = _listed(self._properties(schema.key, schema.oid, columns))
        # A replaced table has no current snapshot, and so no position.
        self._define(schema.name, f"({', '.join(listed)}) USING iceberg TBLPROPERTIES ({properties})")
        self._remember(schema.name, None)
        loaded = self._loaded(schema.name)
        loaded.directory.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers(schema.name, loaded, ())
        return self._snapshot_place(loaded, f"snapshot-{fence.value:016X}")

    def _define(self, table: TableName, definition: str) -> None:
        try:
            levels = self.identifier(table)[:-1]
            for depth in range(len(levels)):
                namespace = ".".join(quoted(part) for part in (self._place.catalog, *levels[: depth + 1]))
                self._spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {namespace}")
            self._spark.sql(f"CREATE OR REPLACE TABLE {self.sql_name(table)} {definition}")
        except AnalysisException as error:
            raise SinkRefusedError(
                f"creating {self.describe(table)}: {_first_line(error)}", hint="look at the message; dropping the table copies it anew"
            ) from error
        except PySparkException as error:
            raise SinkError(f"creating {self.describe(table)}: {_first_line(error)}") from error

    def _properties(self, key: Sequence[str], source_oid: int, columns: pa.Schema) -> dict[str, str]:
        return {
            **identity_properties(self._pipeline, key, source_oid, columns),
            "format-version": str(self._place.format_version),
            "write.metadata.delete-after-commit.enabled": "true",
            "write.metadata.previous-versions-max": str(_METADATA_VERSIONS),
        }

    @staticmethod
    def _snapshot_place(loaded: LoadedTable, prefix: str) -> SnapshotPlace:
        return SnapshotPlace(str(loaded.directory), loaded.schema, prefix)

    @override
    def can_resume_snapshot(self, schema: TableSchema, place: SnapshotPlace, files: Sequence[SnapshotFile]) -> bool:
        loaded = self._catalog.load(self.identifier(schema.name))
        if loaded is None:
            return False
        target = self._target(schema.name, loaded)
        if target.applied is not None or target.source_oid != schema.oid or place.directory != str(loaded.directory):
            return False
        found = {entry.name: entry.stat().st_size for entry in loaded.directory.glob(f"{place.prefix}-*.parquet")}
        same = place.schema.equals(loaded.schema, check_metadata=True)
        return same and all(found.get(file.name) == file.bytes for file in files if file.rows)

    @override
    def finish_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], fence: Position) -> None:
        self._fill(schema.name, files, fence)
        self._remember(schema.name, fence)

    def _fill(self, table: TableName, files: Sequence[SnapshotFile], position: Position) -> None:
        """Make the table exactly `files`. It must count as no copy yet: somebody else's rows are not to be lost."""
        loaded = self._loaded(table)
        if self._target(table, loaded).applied is not None:
            raise TableRewrittenError(f"{self.describe(table)} has been filled by somebody else meanwhile; the snapshot starts again")
        new = [NewFile(file.name, file.rows, file.bytes) for file in files if file.rows]
        self._commit(loaded, TableChange(new, is_whole=loaded.delete_files is not None), position)
        self._remove_leftovers(table, loaded, [file.name for file in new])

    @override
    def repair_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], changed: ChangedRows, fence: Position) -> None:
        if not self._holds(schema.name, files):
            self._fill(schema.name, files, Position.ZERO)
        loaded = self._loaded(schema.name)
        target = self._target(schema.name, loaded)
        change = self._writer.repair(self._epoch_target(target, loaded, fence), changed)
        self._commit(loaded, change, fence)
        self._remember(schema.name, fence)

    def _holds(self, table: TableName, files: Sequence[SnapshotFile]) -> bool:
        """Whether an attempt that did not get to its end has put these files in already.

        They must not be put in once more: a file that one snapshot both drops and adds is removed when older snapshots expire.
        """
        loaded = self._loaded(table)
        if loaded.delete_files != 0 or self._target(table, loaded).applied is not None:
            return False
        self._spark.sql(f"REFRESH TABLE {self.sql_name(table)}")
        rows = self._spark.table(f"{self.sql_name(table)}.files").select("file_path").collect()
        return {str(row["file_path"]).rpartition("/")[2] for row in rows} == {file.name for file in files if file.rows}

    def _remove_leftovers(self, table: TableName, loaded: LoadedTable, current: Sequence[str]) -> None:
        """What attempts at chunks left that did not get to their end. Older versions of the table have files too."""
        found = {path.name: path for path in loaded.directory.glob(_FILES)}
        if found.keys() <= set(current):
            return
        self._spark.sql(f"REFRESH TABLE {self.sql_name(table)}")
        rows = self._spark.table(f"{self.sql_name(table)}.all_data_files").select("file_path").distinct().collect()
        held = {str(row["file_path"]).rpartition("/")[2] for row in rows}
        for name in found.keys() - held - set(current):
            found[name].unlink(missing_ok=True)

    # --- epochs ----------------------------------------------------------------------------------------------------------

    @override
    def apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        loaded = self._catalog.load(self.identifier(target.table))
        found = None if loaded is None else self._target(target.table, loaded)
        self._check_schema(found or target, changes)
        if loaded is not None:
            self._check_columns(target, loaded)
        applied = self._checked_position(target, found)
        if loaded is None or applied >= end:
            return
        slices = slices_after(changes.slices, applied)
        change = TableChange()
        if slices:
            counts = sum((slice.file.counts for slice in slices), ChangeCounts())
            change = self._writer.write(self._epoch_target(target, loaded, end), TableChanges(target.table, slices, counts))
        self._commit(loaded, change, end)
        self._remember(target.table, end)

    def _epoch_target(self, target: Target, loaded: LoadedTable, end: Position) -> EpochTarget:
        layout = Layout(target.schema, target.key, Mode.MIRROR)
        return EpochTarget(self.sql_name(target.table), layout, self._snapshot_place(loaded, f"epoch-{end.value:016X}"))

    def _commit(self, loaded: LoadedTable, change: TableChange, position: Position) -> None:
        try:
            self._catalog.commit(loaded, change, position)
        except TableMovedError as error:
            discard(self._snapshot_place(loaded, ""), change)
            raise SinkError(f"the table at {loaded.location} was changed by somebody else meanwhile; it is tried again") from error

    @override
    def maintain(self, table: TableName) -> None:
        maintainer = self._maintainers.setdefault(table, Maintainer(self._spark, self._place.maintenance))
        loaded = self._catalog.load(self.identifier(table))
        if loaded is not None and maintainer.is_due(loaded):
            maintainer.keep(loaded)

    def _check_schema(self, target: Target, changes: TableChanges) -> None:
        """All changes must have the one schema that the target has."""
        for schema in changes.schemas:
            found = pa.schema([pa.field(column.name, column.arrow_type) for column in schema.columns])
            if schema.oid != target.source_oid or schema.key != target.key or not found.equals(target.schema):
                raise SchemaChangedError(
                    f"table {target.table} changed its columns, its key or its identity, and the target cannot follow that yet",
                    hint=f"drop {self.describe(target.table)} and run again to copy the table anew",
                )

    def _check_columns(self, target: Target, loaded: LoadedTable) -> None:
        """What the table is said to have must be what it has: a value for a column that somebody renamed would go nowhere."""
        lacking = [name for name in (*target.schema.names, EXACT) if name not in loaded.schema.names]
        if lacking:
            raise SchemaChangedError(
                f"{self.describe(target.table)} has no column {lacking[0]} any more",
                hint=f"give the column its name again, or drop {self.describe(target.table)} and run again to copy the table anew",
            )

    def _checked_position(self, target: Target, found: Target | None) -> Position:
        """How far the table is, by its own word, which must not be less than it was."""
        applied = None if found is None else found.applied
        known = max(self._reached.get(target.table, Position.ZERO), target.applied or Position.ZERO)
        if applied is None or applied < known:
            holds = "is gone, or was never filled" if applied is None else f"holds {target.table} only up to {applied}"
            name = self.describe(target.table)
            raise TargetRewoundError(
                f"{name} {holds}, and was at {known}",
                hint=f"restart to go on from where it is, or drop {name} first to copy the table anew",
            )
        return applied

    # --- tables as a whole -----------------------------------------------------------------------------------------------

    @override
    def drop(self, table: TableName) -> None:
        self._catalog.drop(self.identifier(table))
        self._remember(table, None)

    @override
    def disown(self, table: TableName) -> None:
        loaded = self._catalog.load(self.identifier(table))
        if loaded is not None and self._target(table, loaded).applied is not None:
            self._commit(loaded, TableChange(), Position.ZERO)
        self._remember(table, None)

    @override
    def replace(self, table: TableName, shadow: Sink, position: Position) -> None:
        found = shadow.load_target(table)
        if not isinstance(shadow, IcebergSink) or found is None or self.load_target(table) is None:
            raise TargetRewoundError(
                f"{self.describe(table)} is gone, so nothing can take its place", hint="restart the pipeline to copy the table anew"
            )
        writer = shadow.read(table).writeTo(self.sql_name(table)).using("iceberg")
        for name, value in (self._properties(found.key, found.source_oid, found.schema) | position_properties(position, 0)).items():
            writer = writer.tableProperty(name, value)
        try:
            writer.option(f"snapshot-property.{POSITION}", str(position)).createOrReplace()
        except AnalysisException as error:
            raise SinkRefusedError(f"replacing {self.describe(table)}: {_first_line(error)}", hint="look at the message") from error
        except PySparkException as error:
            raise SinkError(f"replacing {self.describe(table)}: {_first_line(error)}") from error
        after = self.load_target(table)
        if after is None or after.applied != position:
            raise SinkError(f"{self.describe(table)} is not at {position}, though Iceberg reported no error")

    @override
    def shadow(self, copy: str) -> Sink:
        place = replace(self._place, namespace=(*self._shadows(), copy), maintenance=Maintenance(delete_files=0, expire_every=0))
        return IcebergSink(self._spark, place, self._pipeline, self._executors)

    @override
    def drop_shadows(self) -> None:
        try:
            _drop_below(self._spark, (self._place.catalog, *self._shadows()))
        except PySparkException as error:
            raise SinkError(f"shadows of former runs cannot be dropped: {_first_line(error)}") from error

    def _shadows(self) -> tuple[str, ...]:
        return (*self._place.namespace, SHADOWS, self._pipeline)


def _drop_below(spark: SparkSession, namespace: Sequence[str]) -> None:
    """Drop a namespace with all that is in it, if it is there. What is in its directory besides tables stays, and then it does too."""
    name = ".".join(map(quoted, namespace))
    try:
        inner = [str(row[0]) for row in spark.sql(f"SHOW NAMESPACES IN {name}").collect()]
        tables = [str(row["tableName"]) for row in spark.sql(f"SHOW TABLES IN {name}").collect()]
    except AnalysisException:  # it is not there
        return
    for table in tables:
        spark.sql(f"DROP TABLE IF EXISTS {name}.{quoted(table)} PURGE")
    for each in inner:
        _drop_below(spark, (*namespace, each.rpartition(".")[2].strip("`")))
    with suppress(PySparkException):
        spark.sql(f"DROP NAMESPACE {name}")


def _listed(properties: Mapping[str, str]) -> str:
    return ", ".join(f"{text_literal(name)} = {text_literal(value)}" for name, value in properties.items())


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
