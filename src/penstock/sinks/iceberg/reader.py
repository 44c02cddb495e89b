"""Read rows of an Iceberg table: plan the files that can contain them with Iceberg's scan, then look them up
on executors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock import storage
from penstock.errors import SinkError
from penstock.sinks.base import SnapshotPlace
from penstock.sinks.dataframes import quoted, sql_type
from penstock.sinks.executors import Executors, penstock_error
from penstock.sinks.iceberg.catalog import (
    FormerColumns,
    LoadedTable,
    NewFile,
    local_path,
    translated_errors,
    with_catalog,
)
from penstock.sinks.iceberg.files import RewriteTask, RowRequest, StoredFiles, rewrite_file
from penstock.sinks.iceberg.lookup import FindTask, LakeFile, find_rows, read_all
from penstock.sinks.iceberg.schema import field_ids, stored_name
from penstock.sinks.modes import Layout

_FEW = 200
"""Iceberg ignores longer IN lists when it filters files."""
_FORMAT = 2
_SUFFIX = ".parquet"
_BY_VALUES = "EQUALITY_DELETES"


def plan_scan(
    jvm: Any, loaded: LoadedTable, keys: Mapping[str, pa.ChunkedArray], snapshot: int | None = None
) -> tuple[list[LakeFile], list[LakeFile]] | None:
    """Plan a scan of a snapshot, by default the current one. Returns the data files that may contain one of
    `keys`, and all delete files. `keys` has the values by column name.

    Returns None if the format version is not 2, or if some files are of a kind that Penstock does not write.
    """
    if loaded.format_version != _FORMAT or loaded.problem is not None:
        return None
    if loaded.delete_files is None:
        return [], []
    with translated_errors(f"finding rows in {loaded.location}"):
        scan = loaded.java.newScan() if snapshot is None else loaded.java.newScan().useSnapshot(snapshot)
        scan = scan.filter(_within(jvm, keys)).ignoreResiduals()
        with closing(scan.planFiles()) as tasks:
            files = [_row_file(task.file()) for task in each(tasks.iterator())]
        deletes = [_delete_file(file) for file in delete_files(jvm, loaded, snapshot)]
    known = [file for file in (*files, *deletes) if file is not None]
    if len(known) < len(files) + len(deletes):
        return None
    return known[: len(files)], known[len(files) :]


def delete_files(jvm: Any, loaded: LoadedTable, snapshot: int | None = None) -> Iterator[Any]:
    """The delete files of a snapshot, or of the current one, as Java objects."""
    io, specs = loaded.java.io(), loaded.java.specs()
    found = loaded.java.currentSnapshot() if snapshot is None else loaded.java.snapshot(snapshot)
    for manifest in each(found.deleteManifests(io).iterator()):
        with closing(jvm.org.apache.iceberg.ManifestFiles.readDeleteManifest(manifest, io, specs)) as reader:
            yield from each(reader.iterator())


def each(iterator: Any) -> Iterator[Any]:
    while iterator.hasNext():
        yield iterator.next()


def _row_file(file: Any) -> LakeFile | None:
    location, sequence = str(file.location()), file.dataSequenceNumber()
    return (
        LakeFile(str(local_path(location)), int(sequence))
        if location.endswith(_SUFFIX) and sequence is not None
        else None
    )


def _delete_file(file: Any) -> LakeFile | None:
    location, sequence = str(file.location()), file.dataSequenceNumber()
    if not location.endswith(_SUFFIX) or sequence is None or str(file.content()) != _BY_VALUES:
        return None
    return LakeFile(
        str(local_path(location)), int(sequence), tuple(int(number) for number in file.equalityFieldIds())
    )


def _within(jvm: Any, keys: Mapping[str, pa.ChunkedArray]) -> Any:
    """A filter with which Iceberg excludes files whose bounds contain none of the keys."""
    expressions = jvm.org.apache.iceberg.expressions.Expressions
    found = expressions.alwaysTrue()
    for name, values in keys.items():
        kind = values.type
        if (
            values.null_count
            or not len(values)
            or not (pa.types.is_integer(kind) or pa.types.is_string(kind))
        ):
            continue
        within = _among(jvm, name, pc.unique(values))
        found = getattr(expressions, "and")(found, within)
    return found


def _among(jvm: Any, name: str, values: pa.Array) -> Any:
    expressions = jvm.org.apache.iceberg.expressions.Expressions
    if len(values) <= _FEW:
        listed = jvm.java.util.ArrayList()
        for value in values.to_pylist():
            listed.add(value)
        return getattr(expressions, "in")(name, listed)
    bounds = pc.min_max(values).as_py()
    low, high = (
        expressions.greaterThanOrEqual(name, bounds["min"]),
        expressions.lessThanOrEqual(name, bounds["max"]),
    )
    return getattr(expressions, "and")(low, high)


_ROWS_A_FILE = 1_000_000
_FILES_A_TASK = 32
"""Data files per lookup task."""
_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # Write files that pyarrow can read: times of any year, and no INT96.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
}


@dataclass(frozen=True, slots=True)
class EpochTarget:
    """The table that an epoch writes to: its SQL name, its layout, the place of new files, and the mapping
    for reading its existing rows (`past`).
    """

    name: str
    layout: Layout
    place: SnapshotPlace
    past: FormerColumns = field(default_factory=FormerColumns)
    loaded: LoadedTable | None = None
    """The table as loaded for the epoch."""


class TableReader:
    """Reads rows of tables. Used by several threads, which share one session, because each session opens the
    catalog with separate connections.
    """

    def __init__(self, spark: SparkSession, catalog: str, executors: Executors) -> None:
        self._spark = spark
        self._executors = executors
        self._catalog = catalog
        self._lock = threading.Lock()
        self._session: SparkSession | None = None

    def fetch(self, target: EpochTarget, wanted: Sequence[RowRequest], directory: Path) -> StoredFiles:
        """Write the requested rows to files. If only Spark can read the table's files, Spark joins the table
        with the keys.
        """
        found = self._find(target, wanted, directory)
        if found is not None:
            return StoredFiles(tuple(found), target.past.fills)
        try:
            rows = self._rows(target)
            flag = target.layout.mode.current_flag if wanted[0].is_old else None
            if flag is not None:
                rows = rows.where(F.col(flag.column) == flag.value)
            files = [each.keys for each in wanted if each.keys is not None]
            if len(files) == len(wanted):
                rows = self._matching_rows(rows, files, wanted[0].columns)
            names = target.layout.schema.names
            rows.select(
                *(F.col(quoted(name)).alias(f"v_{at}") for at, name in enumerate(names))
            ).write.parquet(str(directory))
        except (PySparkException, Py4JJavaError) as error:
            raise penstock_error(error, SinkError) from error
        return StoredFiles(
            tuple(sorted(map(str, storage.list_paths(directory, "*.parquet")))), target.past.fills
        )

    def _find(self, target: EpochTarget, wanted: Sequence[RowRequest], directory: Path) -> list[str] | None:
        """Look up the requested rows on executors. Returns the files with the found rows; None if all rows
        are requested, or if only Spark can read the table's files.
        """
        files, columns = [each.keys for each in wanted if each.keys is not None], wanted[0].columns
        schema = pa.schema([target.place.schema.field(name) for name in target.layout.schema.names])
        if (
            target.loaded is None
            or len(files) < len(wanted)
            or any(_has_inside(field.type) for field in schema)
        ):
            return None
        keys = pa.concat_tables([pq.read_table(file) for file in files])
        names = {name: stored_name(target.past.names.get(name, name), target.layout.mode) for name in columns}
        known = {
            names[name]: keys.column(at) for at, name in enumerate(columns) if name not in target.past.added
        }
        plan = plan_scan(self._spark._jvm, target.loaded, known)  # noqa: SLF001
        if plan is None:
            return None
        rows, deletes = plan
        if not {number for file in deletes for number in file.columns} <= set(
            field_ids(schema, schema.names)
        ):
            return None
        is_current = wanted[0].is_old and target.layout.mode.current_flag is not None
        task = FindTask((), tuple(deletes), columns, tuple(files), schema, str(directory), is_current)
        count = max(1, min(self._executors.parallelism, len(rows) // _FILES_A_TASK))
        tasks = [replace(task, files=tuple(rows[at::count])) for at in range(count)]
        found = self._executors.run(find_rows, tasks) if rows else []
        return (
            [each.path for each in found if each.path is not None]
            if all(each.is_known for each in found)
            else None
        )

    def read_small(self, loaded: LoadedTable, snapshot: int | None, limit_bytes: int) -> pa.Table | None:
        """Read all rows of one snapshot, by default the current one, in this process. Returns None if they
        exceed `limit_bytes`, or if only Spark can read them.
        """
        made = loaded.base.currentSnapshot() if snapshot is None else loaded.base.snapshot(snapshot)
        is_of_now = made is not None and made.schemaId() == loaded.base.currentSchemaId()
        if not is_of_now or any(_has_inside(each.type) for each in loaded.schema):
            return None
        plan = plan_scan(self._spark._jvm, loaded, {}, int(made.snapshotId()))  # noqa: SLF001
        if plan is None:
            return None
        rows, deletes = plan
        numbers = set(field_ids(loaded.schema, loaded.schema.names))
        if not {number for file in deletes for number in file.columns} <= numbers:
            return None
        return read_all(rows, deletes, loaded.schema, limit_bytes)

    def rewrite(self, target: EpochTarget, executors: Executors, scratch: Path) -> list[NewFile]:
        """Rewrite all rows with the new columns, and return the new files. Spark writes temporary files,
        which lack field ids of nested columns. Executors write these files again with ids.
        """
        directory = scratch / uuid4().hex
        try:
            rows = self._rows(target).select(*(quoted(name) for name in target.place.schema.names))
            numbered = rows.toDF(*(f"v_{at}" for at in range(len(rows.columns))))
            numbered.write.option("maxRecordsPerFile", _ROWS_A_FILE).parquet(str(directory))
            tasks = [
                RewriteTask(str(file), target.place, target.past.fills)
                for file in storage.list_paths(directory, "*.parquet")
            ]
            written = executors.run(rewrite_file, tasks) if tasks else []
        except (PySparkException, Py4JJavaError) as error:
            raise penstock_error(error, SinkError) from error
        finally:
            storage.discard_tree(directory)
        return [NewFile(file.name, file.rows, file.bytes) for file in written if file.rows]

    def _matching_rows(self, rows: DataFrame, files: Sequence[str], names: Sequence[str]) -> DataFrame:
        keys = rows.sparkSession.read.parquet(*files).distinct()
        found = pa.concat_tables([pq.read_table(file) for file in files])
        for at, name in enumerate(names):
            within = _within_reader(F.col(quoted(name)), found.column(f"k_{at}"))
            rows = rows if within is None else rows.where(within)
        alike = [rows[quoted(name)].eqNullSafe(keys[f"k_{at}"]) for at, name in enumerate(names)]
        return rows.join(F.broadcast(keys), reduce(lambda one, other: one & other, alike), "left_semi")

    def _rows(self, target: EpochTarget) -> DataFrame:
        """The table's current rows with the new column names. Added columns are NULL."""
        session, past = self._reading(), target.past
        session.sql(f"REFRESH TABLE {target.name}")
        rows = session.table(target.name)
        types = {each.name: sql_type(each.type) for each in target.place.schema}
        columns = [
            F.lit(None).cast(types[name])
            if name in past.added
            else F.col(quoted(stored_name(past.names.get(name, name), target.layout.mode))).cast(types[name])
            for name in target.place.schema.names
        ]
        return rows.select(
            *(column.alias(name) for name, column in zip(target.place.schema.names, columns, strict=True))
        )

    def _reading(self) -> SparkSession:
        with self._lock:
            if self._session is None:
                self._session = with_catalog(self._spark, self._catalog)
                for name, value in _SETTINGS.items():
                    self._session.conf.set(name, value)
            return self._session


def _has_inside(kind: pa.DataType) -> bool:
    """Whether a type contains a struct, whose field names may differ between files."""
    inner = [kind.field(at).type for at in range(kind.num_fields)]
    if pa.types.is_map(kind):
        return _has_inside(kind.key_type) or _has_inside(kind.item_type)
    return pa.types.is_struct(kind) or any(map(_has_inside, inner))


def _within_reader(column: Column, keys: pa.ChunkedArray) -> Column | None:
    """A filter with which Spark excludes files by their bounds, because a join does not do that. None if the
    keys allow no filter.
    """
    kind = keys.type
    if keys.null_count or not len(keys) or not (pa.types.is_integer(kind) or pa.types.is_string(kind)):
        return None
    values = pc.unique(keys)
    if len(values) <= _FEW:
        return column.isin(values.to_pylist())
    bounds = pc.min_max(values).as_py()
    return column.between(F.lit(bounds["min"]), F.lit(bounds["max"]))
