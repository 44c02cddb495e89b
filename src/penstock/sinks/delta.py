"""`DeltaSink`: tables as Delta tables, one directory each.

Data and position commit together: the position is the version of the table's own transaction id, which Delta writes in the same commit. A
repeated or older version changes nothing, which Delta itself sees to. A snapshot is one commit of files that executors wrote; an epoch of
inserts is an append; any other epoch is one MERGE; an epoch that empties the table is one overwrite.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from typing_extensions import override

from penstock.change import EXACT, EXACT_TYPE
from penstock.errors import SchemaChangedError, SinkError, SinkRefusedError
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import Sink, SnapshotFile, SnapshotPlace, TableChanges, Target
from penstock.sinks.collapse import DELETE, OP, after_last_truncate, collapse
from penstock.sinks.delta_log import KEY, OWNER, SOURCE_OID, adopt_files, application_id, load_target, open_log, physical_names
from penstock.sinks.delta_merge import merge_statement
from penstock.sinks.names import quoted, sql_type, text_literal
from penstock.sinks.slices import load_changes

_UNMAPPED = frozenset(" ,;{}()\n\t=")
_VIEW = "penstock_changes"


class DeltaSink(Sink):
    def __init__(self, spark: SparkSession, root: Path, pipeline: str) -> None:
        self._spark = spark
        self._root = root
        self._pipeline = pipeline
        self._sessions: dict[TableName, SparkSession] = {}
        self._sessions_lock = threading.Lock()

    def path(self, table: TableName) -> Path:
        return self._root / quote(table.schema, safe=" ") / quote(table.name, safe=" ")

    @override
    def describe(self, table: TableName) -> str:
        return str(self.path(table))

    @override
    def load_target(self, table: TableName) -> Target | None:
        return load_target(self.path(table), self._pipeline, table)

    @override
    def begin_snapshot(self, schema: TableSchema, fence: Position) -> SnapshotPlace:
        path = self.path(schema.name)
        self._run(lambda: self._spark.sql(self._create_statement(schema)), f"creating the Delta table at {path}")
        for leftover in path.glob("snapshot-*.parquet"):
            leftover.unlink()
        log = open_log(path)
        if log is None:
            raise SinkError(f"the Delta table at {path} vanished right after it was created")
        names = physical_names(log)
        fields = [pa.field(names[column.name], column.arrow_type) for column in schema.columns]
        return SnapshotPlace(str(path), pa.schema([*fields, pa.field(names[EXACT], EXACT_TYPE)]), f"snapshot-{fence.value:016X}")

    @override
    def finish_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], fence: Position) -> None:
        adopt_files(self.path(schema.name), application_id(self._pipeline, schema.name), files, fence)

    @override
    def apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        schema = self._checked_schema(target, changes)
        session = self._session(target.table)
        session.conf.set("spark.databricks.delta.write.txnAppId", application_id(self._pipeline, target.table))
        session.conf.set("spark.databricks.delta.write.txnVersion", str(end.value))
        frame = load_changes(session, schema, changes.slices)
        self._run(lambda: self._write(session, target, frame, changes), f"applying changes to {self.path(target.table)}")

    def _write(self, session: SparkSession, target: Target, frame: DataFrame, changes: TableChanges) -> None:
        counts = changes.counts
        columns = target.schema.names
        own = [quoted(name) for name in columns] + [EXACT]
        place = str(self.path(target.table))
        if counts.truncates:
            rest = collapse(after_last_truncate(frame, counts), target.key, columns, counts).where(f"{OP} <> '{DELETE}'")
            rest.select(*own).write.format("delta").mode("overwrite").save(place)
        elif not (counts.updates or counts.deletes or counts.moves):
            # Inserts alone cannot meet a row that is there: the target equals the source just before them, and the key is unique there.
            frame.select(*own).write.format("delta").mode("append").save(place)
        else:
            collapse(frame, target.key, columns, counts).createOrReplaceTempView(_VIEW)
            session.sql(merge_statement(place, _VIEW, target.key, columns, keeps=counts.unchanged > 0)).collect()

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

    def _create_statement(self, schema: TableSchema) -> str:
        columns = [f"{quoted(column.name)} {sql_type(column.arrow_type)}" for column in schema.columns]
        columns.append(f"{quoted(EXACT)} {sql_type(EXACT_TYPE)}")
        properties = {
            OWNER: self._pipeline,
            KEY: json.dumps(list(schema.key)),
            SOURCE_OID: str(schema.oid),
            "delta.enableDeletionVectors": "true",
        }
        if any(_UNMAPPED & set(name) for name in schema.column_names):
            properties["delta.columnMapping.mode"] = "name"
        listed = ", ".join(f"{text_literal(name)} = {text_literal(value)}" for name, value in properties.items())
        place = quoted(str(self.path(schema.name)))
        return f"CREATE OR REPLACE TABLE delta.{place} ({', '.join(columns)}) USING delta TBLPROPERTIES ({listed})"

    def _session(self, table: TableName) -> SparkSession:
        """The transaction id is a session setting: every table has a session of its own."""
        with self._sessions_lock:
            if table not in self._sessions:
                self._sessions[table] = self._spark.newSession()
            return self._sessions[table]

    def _run(self, action: Callable[[], object], doing: str) -> None:
        try:
            action()
        except AnalysisException as error:
            raise SinkRefusedError(f"{doing}: {_first_line(error)}", hint="look at the message; removing the table copies it anew") from error
        except (PySparkException, Py4JJavaError) as error:
            raise SinkError(f"{doing}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
