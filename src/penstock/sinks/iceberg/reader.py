"""Rows that an Iceberg table holds: those that an epoch needs to be worked out, or all, read by Spark to be written anew."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.errors import SinkError
from penstock.sinks.base import SnapshotPlace
from penstock.sinks.executors import Executors, error_of_ours
from penstock.sinks.iceberg.catalog import LoadedTable, NewFile, with_catalog
from penstock.sinks.iceberg.evolution import Past
from penstock.sinks.iceberg.files import AnewTask, Stored, Wanted, write_anew
from penstock.sinks.iceberg.lookup import FindTask, find_rows, read_all
from penstock.sinks.iceberg.names import stored_name
from penstock.sinks.iceberg.scan import plan_scan
from penstock.sinks.iceberg.schema import field_ids
from penstock.sinks.layout import CURRENT, Layout, Mode
from penstock.sinks.names import quoted, sql_type

_ROWS_A_FILE = 1_000_000
_FILES_A_TASK = 32
_FEW = 200
"""Iceberg looks into no longer list of values, to leave out files."""
_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # Files that pyarrow reads: times of any year, and none of Spark's oldest form of them.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
}


@dataclass(frozen=True, slots=True)
class EpochTarget:
    """The table that is written to: its name in SQL, its layout, the place for its files; and what it was until then."""

    name: str
    layout: Layout
    place: SnapshotPlace
    past: Past = field(default_factory=Past)
    loaded: LoadedTable | None = None
    """The table itself, as it was when it was looked at."""


class LakeReader:
    """Used by several threads. It has one session of its own: each opens the catalog anew, with whatever connections that takes."""

    def __init__(self, spark: SparkSession, catalog: str, executors: Executors) -> None:
        self._spark = spark
        self._executors = executors
        self._catalog = catalog
        self._lock = threading.Lock()
        self._session: SparkSession | None = None

    def fetch(self, target: EpochTarget, wanted: Sequence[Wanted], directory: Path) -> Stored:
        """Have the rows that are wanted written to files. If we cannot look for them ourselves, Spark does by a join with the keys."""
        found = self._find(target, wanted, directory)
        if found is not None:
            return Stored(tuple(found), target.past.fills)
        try:
            rows = self._rows(target)
            if target.layout.mode is Mode.HISTORY and wanted[0].is_old:
                rows = rows.where(F.col(CURRENT))
            files = [each.keys for each in wanted if each.keys is not None]
            if len(files) == len(wanted):
                rows = self._met(rows, files, wanted[0].columns)
            names = target.layout.schema.names
            rows.select(*(F.col(quoted(name)).alias(f"v_{at}") for at, name in enumerate(names))).write.parquet(str(directory))
        except (PySparkException, Py4JJavaError) as error:
            raise error_of_ours(error, SinkError) from error
        return Stored(tuple(sorted(map(str, directory.glob("*.parquet")))), target.past.fills)

    def _find(self, target: EpochTarget, wanted: Sequence[Wanted], directory: Path) -> list[str] | None:
        """None: all rows are wanted, or there are files of a kind that we do not write."""
        files, columns = [each.keys for each in wanted if each.keys is not None], wanted[0].columns
        schema = pa.schema([target.place.schema.field(name) for name in target.layout.schema.names])
        if target.loaded is None or len(files) < len(wanted) or any(_has_inside(field.type) for field in schema):
            return None
        keys = pa.concat_tables([pq.read_table(file) for file in files])
        names = {name: stored_name(target.past.names.get(name, name), target.layout.mode) for name in columns}
        known = {names[name]: keys.column(at) for at, name in enumerate(columns) if name not in target.past.added}
        plan = plan_scan(self._spark._jvm, target.loaded, known)  # noqa: SLF001
        if plan is None:
            return None
        rows, deletes = plan
        if not {number for file in deletes for number in file.columns} <= set(field_ids(schema, schema.names)):
            return None
        is_current = target.layout.mode is Mode.HISTORY and wanted[0].is_old
        task = FindTask((), tuple(deletes), columns, tuple(files), schema, str(directory), is_current)
        count = max(1, min(self._executors.parallelism, len(rows) // _FILES_A_TASK))
        tasks = [replace(task, files=tuple(rows[at::count])) for at in range(count)]
        found = self._executors.run(find_rows, tasks) if rows else []
        return [each.path for each in found if each.path is not None] if all(each.is_known for each in found) else None

    def read_small(self, loaded: LoadedTable, snapshot: int | None, limit_bytes: int) -> pa.Table | None:
        """All rows of one snapshot, or the newest, read by this process. None: they are too many, or only Spark can read them."""
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
        """Have all rows written to new files, as they are from then on. Spark's own do not number columns that are inside of others."""
        directory = scratch / uuid4().hex
        try:
            rows = self._rows(target).select(*(quoted(name) for name in target.place.schema.names))
            numbered = rows.toDF(*(f"v_{at}" for at in range(len(rows.columns))))
            numbered.write.option("maxRecordsPerFile", _ROWS_A_FILE).parquet(str(directory))
            tasks = [AnewTask(str(file), target.place, target.past.fills) for file in sorted(directory.glob("*.parquet"))]
            written = executors.run(write_anew, tasks) if tasks else []
        except (PySparkException, Py4JJavaError) as error:
            raise error_of_ours(error, SinkError) from error
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return [NewFile(file.name, file.rows, file.bytes) for file in written if file.rows]

    def _met(self, rows: DataFrame, files: Sequence[str], names: Sequence[str]) -> DataFrame:
        keys = rows.sparkSession.read.parquet(*files).distinct()
        found = pa.concat_tables([pq.read_table(file) for file in files])
        for at, name in enumerate(names):
            within = _within(F.col(quoted(name)), found.column(f"k_{at}"))
            rows = rows if within is None else rows.where(within)
        alike = [rows[quoted(name)].eqNullSafe(keys[f"k_{at}"]) for at, name in enumerate(names)]
        return rows.join(F.broadcast(keys), reduce(lambda one, other: one & other, alike), "left_semi")

    def _rows(self, target: EpochTarget) -> DataFrame:
        """The table as it is now, under the names that its columns have from then on, without what fills new ones."""
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
        return rows.select(*(column.alias(name) for name, column in zip(target.place.schema.names, columns, strict=True)))

    def _reading(self) -> SparkSession:
        with self._lock:
            if self._session is None:
                self._session = with_catalog(self._spark, self._catalog)
                for name, value in _SETTINGS.items():
                    self._session.conf.set(name, value)
            return self._session


def _has_inside(kind: pa.DataType) -> bool:
    """Whether there are names inside of a column, which files may spell in another way."""
    inner = [kind.field(at).type for at in range(kind.num_fields)]
    if pa.types.is_map(kind):
        return _has_inside(kind.key_type) or _has_inside(kind.item_type)
    return pa.types.is_struct(kind) or any(map(_has_inside, inner))


def _within(column: Column, keys: pa.ChunkedArray) -> Column | None:
    """What lets files be left out by their bounds: a join does not."""
    kind = keys.type
    if keys.null_count or not len(keys) or not (pa.types.is_integer(kind) or pa.types.is_string(kind)):
        return None
    values = pc.unique(keys)
    if len(values) <= _FEW:
        return column.isin(values.to_pylist())
    bounds = pc.min_max(values).as_py()
    return column.between(F.lit(bounds["min"]), F.lit(bounds["max"]))
