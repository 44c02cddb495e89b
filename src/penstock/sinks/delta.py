"""`DeltaSink`: tables as Delta tables, one directory each.

Data and position commit together: the position is the version of the table's own transaction id, which Delta writes in the same commit. A
repeated or older version changes nothing, which Delta itself sees to. A snapshot is one commit of files that executors wrote; an epoch of
inserts is an append; any other epoch is one MERGE; an epoch that empties the table is one overwrite. Each of them commits, and so moves the
position, even if it comes to no change at all.

Before each epoch the table itself is asked how far it is. Changes that it has are left out, whatever the caller believes; if it has less
than it had before, somebody else dropped or restored it, and nothing is written.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from typing_extensions import override

from penstock.change import EXACT, EXACT_TYPE, ChangeCounts
from penstock.errors import (
    PenstockError,
    SchemaChangedError,
    SinkError,
    SinkRefusedError,
    TableRewrittenError,
    TargetRewoundError,
    parse_error,
)
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import SHADOWS, ChangedRows, Sink, SnapshotFile, SnapshotPlace, TableChanges, Target
from penstock.sinks.changed import replacements
from penstock.sinks.collapse import DELETE, OP, after, collapse, last_truncate, value_column
from penstock.sinks.delta_log import (
    KEY,
    OWNER,
    SOURCE_OID,
    active_files,
    adopt_files,
    application_id,
    load_applied,
    open_log,
    physical_names,
    record_position,
    version_at,
)
from penstock.sinks.delta_merge import merge_statement, replace_statement
from penstock.sinks.delta_targets import DeltaTargets
from penstock.sinks.names import quoted, sql_type, text_literal
from penstock.sinks.slices import load_changes, slices_after

_UNMAPPED = frozenset(" ,;{}()\n\t=")
_VIEW = "penstock_changes"
_FILES = "snapshot-*.parquet"


class DeltaSink(DeltaTargets, Sink):
    def __init__(self, spark: SparkSession, root: Path, pipeline: str) -> None:
        super().__init__(root, pipeline)
        self._spark = spark
        self._sessions: dict[TableName, SparkSession] = {}
        self._sessions_lock = threading.Lock()
        self._reached: dict[TableName, Position] = {}

    @override
    def load_target(self, table: TableName) -> Target | None:
        target = super().load_target(table)
        self._remember(table, target.applied if target is not None else None)
        return target

    @override
    def begin_snapshot(self, schema: TableSchema, fence: Position) -> SnapshotPlace:
        path = self.path(schema.name)
        target = self.load_target(schema.name)
        if target is not None and target.applied is not None:
            # A replaced table keeps its transaction ids: the old position would stand beside no rows.
            record_position(path, self._application(schema.name), Position.ZERO)
        self._remember(schema.name, None)
        leftovers = set(path.glob(_FILES)) - active_files(path)
        # CREATE OR REPLACE would not replace: for a table known by its path, Delta only compares the schemas.
        verb = "CREATE" if target is None else "REPLACE"
        with self._failing(schema.name, "creating"):
            self._spark.sql(f"{verb} TABLE {self._definition(schema)}")
        for leftover in leftovers:
            leftover.unlink()
        columns = self._file_columns(schema)
        if columns is None:
            raise SinkError(f"the Delta table at {path} vanished right after it was created")
        return SnapshotPlace(str(path), columns, f"snapshot-{fence.value:016X}")

    @override
    def can_resume_snapshot(self, schema: TableSchema, place: SnapshotPlace, files: Sequence[SnapshotFile]) -> bool:
        path = self.path(schema.name)
        target = self.load_target(schema.name)
        if target is None or target.applied is not None or place.directory != str(path) or target.source_oid != schema.oid:
            return False
        found = {entry.name: entry.stat().st_size for entry in path.glob(f"{place.prefix}-*.parquet")}
        return place.schema == self._file_columns(schema) and all(found.get(file.name) == file.bytes for file in files if file.rows)

    @override
    def finish_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], fence: Position) -> None:
        path = self.path(schema.name)
        self._check_empty(schema.name)
        adopt_files(path, self._application(schema.name), files, fence)
        self._remember(schema.name, fence)
        _remove_leftovers(path)

    @override
    def repair_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], changed: ChangedRows, fence: Position) -> None:
        path, application = self.path(schema.name), self._application(schema.name)
        self._check_empty(schema.name)
        # An attempt that did not get to its end may have come as far as this.
        if not {path / file.name for file in files} & active_files(path):
            adopt_files(path, application, files, Position.ZERO)
        session = self._transaction(schema.name, fence)
        columns = pa.schema([pa.field(column.name, column.arrow_type) for column in schema.columns])
        with self._failing(schema.name, "replacing changed rows of"):
            replacements(session, columns, schema.key, changed).createOrReplaceTempView(_VIEW)
            session.sql(replace_statement(str(path), _VIEW, columns, schema.key)).collect()
        self._check_reached(schema.name, fence)
        _remove_leftovers(path)

    @override
    def drop(self, table: TableName) -> None:
        shutil.rmtree(self.path(table), ignore_errors=True)
        self._remember(table, None)

    @override
    def disown(self, table: TableName) -> None:
        if load_applied(self.path(table), self._application(table)) is not None:
            record_position(self.path(table), self._application(table), Position.ZERO)
        self._remember(table, None)

    @override
    def replace(self, table: TableName, shadow: Sink, position: Position) -> None:
        found, mine = shadow.load_target(table), self.load_target(table)
        if not isinstance(shadow, DeltaSink) or found is None or mine is None:
            raise TargetRewoundError(
                f"{self.path(table)} is gone, so nothing can take its place", hint="restart the pipeline to copy the table anew"
            )
        if mine.applied is not None and mine.applied >= position:
            # Delta leaves out what it takes for a repetition; and a crash right here only means that the table is copied once more.
            record_position(self.path(table), self._application(table), Position.ZERO)
        try:
            self._overwrite(mine, found, shadow.path(table), position)
        except PenstockError:
            if mine.applied is not None and load_applied(self.path(table), self._application(table)) is None:
                record_position(self.path(table), self._application(table), mine.applied)
            raise
        self._remember(table, None)
        self._check_reached(table, position)

    @override
    def shadow(self, copy: str) -> Sink:
        return DeltaSink(self._spark, self._root / SHADOWS / self._pipeline / copy, self._pipeline)

    @override
    def drop_shadows(self) -> None:
        shutil.rmtree(self._root / SHADOWS / self._pipeline, ignore_errors=True)

    @override
    def version_at(self, table: TableName, position: Position) -> int | None:
        return version_at(self.path(table), self._application(table), position)

    @override
    def read(self, table: TableName, version: int | None = None) -> DataFrame:
        reader = self._spark.read.format("delta")
        reader = reader if version is None else reader.option("versionAsOf", version)
        return reader.load(str(self.path(table)))

    def _overwrite(self, mine: Target, other: Target, place: Path, position: Position) -> None:
        """Make the table what lies at `place`, with whatever columns and key that has."""
        session, table = self._transaction(mine.table, position), mine.table
        with self._failing(table, "replacing"):
            rows = session.read.format("delta").load(str(place))
            if (other.key, other.source_oid) != (mine.key, mine.source_oid) or other.schema.names != mine.schema.names:
                properties = _listed(self._properties(other.key, other.source_oid, other.schema.names))
                session.sql(f"ALTER TABLE delta.{quoted(str(self.path(table)))} SET TBLPROPERTIES ({properties})")
            rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true").save(str(self.path(table)))

    def _check_empty(self, table: TableName) -> None:
        """A snapshot goes into a table that counts as no copy yet; added to one that does, every row would be there twice."""
        if load_applied(self.path(table), self._application(table)) is not None:
            raise TableRewrittenError(f"{self.path(table)} has been filled by somebody else meanwhile; the snapshot starts again")

    @override
    def apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        schema = self._checked_schema(target, changes)
        applied = self._checked_position(target)
        if applied < end:
            slices = slices_after(changes.slices, applied)
            if slices:
                counts = sum((slice.file.counts for slice in slices), ChangeCounts())
                self._write(target, schema, TableChanges(target.table, slices, counts), end)
            else:
                record_position(self.path(target.table), self._application(target.table), end)
            self._check_reached(target.table, end)

    def _check_reached(self, table: TableName, position: Position) -> None:
        if load_applied(self.path(table), self._application(table)) != position:
            raise SinkError(f"{self.path(table)} is not at {position}, though Delta reported no error")
        self._remember(table, position)

    def _transaction(self, table: TableName, position: Position) -> SparkSession:
        """The table's session, set to write `position` with whatever is written next."""
        session = self._session(table)
        session.conf.set("spark.databricks.delta.write.txnAppId", self._application(table))
        session.conf.set("spark.databricks.delta.write.txnVersion", str(position.value))
        return session

    def _write(self, target: Target, schema: TableSchema, changes: TableChanges, end: Position) -> None:
        session = self._transaction(target.table, end)
        frame = self._load(session, schema, changes)
        with self._failing(target.table, "applying changes to"):
            emptied = last_truncate(frame) if changes.counts.truncates else None
            if emptied is not None:
                rest = collapse(after(frame, emptied), target.schema, target.key, changes.counts).where(f"{OP} <> '{DELETE}'")
                values = [F.col(value_column(index)).alias(name) for index, name in enumerate(target.schema.names)]
                self._save(rest.select(*values, EXACT), target.table, "overwrite")
            elif not (changes.counts.updates or changes.counts.deletes or changes.counts.moves):
                # Inserts alone cannot meet a row that is there: the target equals the source just before them, and the key is unique there.
                self._save(frame.select(*(quoted(name) for name in target.schema.names), EXACT), target.table, "append")
            else:
                collapse(frame, target.schema, target.key, changes.counts).createOrReplaceTempView(_VIEW)
                place = str(self.path(target.table))
                session.sql(merge_statement(place, _VIEW, target.schema, target.key, keeps=changes.counts.unchanged > 0)).collect()

    def _save(self, rows: DataFrame, table: TableName, mode: str) -> None:
        rows.write.format("delta").mode(mode).save(str(self.path(table)))

    def _load(self, session: SparkSession, schema: TableSchema, changes: TableChanges) -> DataFrame:
        try:
            return load_changes(session, schema, changes.slices)
        except AnalysisException as error:
            raise SinkError(f"the spooled changes of {changes.table} cannot be read: {_first_line(error)}") from error

    def _checked_position(self, target: Target) -> Position:
        """How far the table is, by its own word, which must not be less than it was."""
        applied = load_applied(self.path(target.table), self._application(target.table))
        known = max(self._reached.get(target.table, Position.ZERO), target.applied or Position.ZERO)
        if applied is None or applied < known:
            holds = "is gone, or was never filled" if applied is None else f"holds {target.table} only up to {applied}"
            raise TargetRewoundError(
                f"{self.path(target.table)} {holds}, and was at {known}",
                hint=f"restart to go on from where it is, or remove {self.path(target.table)} first to copy the table anew",
            )
        return applied

    def _remember(self, table: TableName, position: Position | None) -> None:
        if position is None:
            self._reached.pop(table, None)
        else:
            self._reached[table] = position

    def _application(self, table: TableName) -> str:
        return application_id(self._pipeline, table)

    def _checked_schema(self, target: Target, changes: TableChanges) -> TableSchema:
        """The one schema of all changes, which must be the target's."""
        for schema in changes.schemas:
            found = pa.schema([pa.field(column.name, column.arrow_type) for column in schema.columns])
            if schema.oid != target.source_oid or schema.key != target.key or not found.equals(target.schema):
                raise SchemaChangedError(
                    f"table {target.table} changed its columns, its key or its identity, and the target cannot follow that yet",
                    hint=f"remove {self.path(target.table)} and run again to copy the table anew",
                )
        return changes.schemas[0]

    def _file_columns(self, schema: TableSchema) -> pa.Schema | None:
        """The columns of a file of the table, under the names that they have there; None if there is no table that has them all."""
        log = open_log(self.path(schema.name))
        names = {} if log is None else physical_names(log)
        if not {*schema.column_names, EXACT} <= names.keys():
            return None
        fields = [pa.field(names[column.name], column.arrow_type) for column in schema.columns]
        return pa.schema([*fields, pa.field(names[EXACT], EXACT_TYPE)])

    def _definition(self, schema: TableSchema) -> str:
        columns = [f"{quoted(column.name)} {sql_type(column.arrow_type)}" for column in schema.columns]
        columns.append(f"{quoted(EXACT)} {sql_type(EXACT_TYPE)}")
        properties = self._properties(schema.key, schema.oid, schema.column_names)
        place = quoted(str(self.path(schema.name)))
        return f"delta.{place} ({', '.join(columns)}) USING delta TBLPROPERTIES ({_listed(properties)})"

    def _properties(self, key: Sequence[str], source_oid: int, columns: Sequence[str]) -> dict[str, str]:
        properties = {
            OWNER: self._pipeline,
            KEY: json.dumps(list(key)),
            SOURCE_OID: str(source_oid),
            "delta.enableDeletionVectors": "true",
        }
        if any(_UNMAPPED & set(name) for name in columns):
            properties["delta.columnMapping.mode"] = "name"
        return properties

    def _session(self, table: TableName) -> SparkSession:
        """The transaction id is a session setting: every table has a session of its own."""
        with self._sessions_lock:
            if table not in self._sessions:
                self._sessions[table] = self._spark.newSession()
            return self._sessions[table]

    @contextmanager
    def _failing(self, table: TableName, doing: str) -> Iterator[None]:
        """Turn what Spark says into an error of ours."""
        path = self.path(table)
        try:
            yield
        except AnalysisException as error:
            hint = "look at the message; removing the table copies it anew"
            raise SinkRefusedError(f"{doing} {path}: {_first_line(error)}", hint=hint) from error
        except (PySparkException, Py4JJavaError) as error:
            found = parse_error(str(error))
            if isinstance(found, SinkError):
                raise type(found)(f"{doing} {path}: {found.message}", hint=f"remove {path} and run again to copy the table anew") from error
            raise SinkError(f"{doing} {path}: {_first_line(error)}") from error


def _listed(properties: Mapping[str, str]) -> str:
    return ", ".join(f"{text_literal(name)} = {text_literal(value)}" for name, value in properties.items())


def _remove_leftovers(path: Path) -> None:
    """What attempts at chunks left that did not get to their end."""
    for leftover in set(path.glob(_FILES)) - active_files(path):
        leftover.unlink(missing_ok=True)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
