"""Iceberg's own Java API, as far as the sink needs it: tables of a catalog loaded, and changed by one commit.

A commit is made against the very metadata that was loaded, and fails if the table has changed since by anybody's hand (in a REST catalog:
if its rows have, see decision 23). What Iceberg's own `commit()` does instead, applying the change to whatever the table has become, is
right for rows; but the position that was read decides which rows these are. So a transaction of Iceberg's is only used to work out the
metadata, columns and rows and properties at once, which then takes the place of what was loaded, or does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock.errors import ConfigError, SinkError, SinkRefusedError
from penstock.position import Position
from penstock.sinks.executors import error_of_ours
from penstock.sinks.iceberg.active import active
from penstock.sinks.iceberg.names import own_names
from penstock.sinks.iceberg.schema import field_ids, parse_columns, type_document
from penstock.sinks.iceberg.state import MODE, POSITION, PROPERTIES, SnapshotMark, position_properties
from penstock.sinks.layout import Mode

_CATALOG = "org.apache.iceberg.spark.SparkCatalog"
_GONE = ("org.apache.iceberg.exceptions.NoSuchTableException", "org.apache.iceberg.exceptions.NoSuchNamespaceException")
_STALE = ("org.apache.iceberg.exceptions.CommitFailedException",)


class TableMovedError(Exception):
    """The table is no longer what was loaded, and nothing has been committed."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file in the table's data directory that is to become part of it."""

    name: str
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TableChange:
    """What one commit does: `is_whole`, all rows go; then the rows that `deletes` name by `columns` go, and `files` come."""

    files: Sequence[NewFile] = ()
    deletes: Sequence[NewFile] = ()
    columns: Sequence[str] = ()
    is_whole: bool = False
    rewritten: Sequence[NewFile] | None = None
    """Before that, these take the place of all files that are there; they hold the same rows."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """Of the table, from then on."""


@dataclass(frozen=True, slots=True)
class LoadedTable:
    """A table as it was when it was loaded."""

    java: Any
    base: Any
    location: str
    schema: pa.Schema
    """Of its files."""
    properties: Mapping[str, str]
    """Those of ours."""
    delete_files: int | None = None
    """How many the current snapshot has; None if there is no snapshot."""
    data_files: int = 0
    transaction: Any = None
    """With what is to be changed about the columns, if anything; `schema` reckons with that."""
    problem: SinkRefusedError | None = None
    """Why it cannot be written to as it is, whoever it belongs to; then `schema` may lack columns."""

    @property
    def format_version(self) -> int:
        return int(self.base.formatVersion())

    @property
    def directory(self) -> Path:
        """Where its data files lie."""
        return local_path(self.location) / "data"

    def ancestors(self) -> Iterator[SnapshotMark]:
        """The current snapshot and those before it, newest first."""
        snapshot = self.base.currentSnapshot()
        while snapshot is not None:
            text, parent = snapshot.summary().get(POSITION), snapshot.parentId()
            yield SnapshotMark(snapshot.snapshotId(), parent, None if text is None else Position.parse(str(text)))
            snapshot = None if parent is None else self.base.snapshot(parent)


def local_path(location: str) -> Path:
    """A table's location as executors reach it."""
    if location.startswith("file:"):
        return Path("/" + location.removeprefix("file:").lstrip("/"))
    if not location.startswith("/"):
        raise SinkRefusedError(
            f"the catalog puts the table at {location}, and files are written only to mounted file systems",
            hint="choose a catalog whose warehouse is a directory that all executors reach",
        )
    return Path(location)


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Files as Java has them: the deletes reach the rows of all groups before this one."""

    rows: Sequence[Any]
    deletes: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class ShadowContent:
    """What a table is to hold in the place of all that it does."""

    groups: Sequence[FileGroup]
    schema: Any = None
    """Its columns from then on, as Java has them; None: they stay."""
    last_column: int = 0
    """The greatest number that was given to one of them."""


class IcebergCatalog:
    """One catalog of one Spark session. Safe to use from several threads, each with tables of its own."""

    def __init__(self, spark: SparkSession, name: str, warehouse: Path) -> None:
        self._spark = spark
        self.name = name
        ensure_catalog(spark, name, warehouse)

    @cached_property
    def _iceberg(self) -> Any:
        """Iceberg's own package: each name on the way to it is a question to the JVM."""
        jvm: Any = self._spark._jvm  # noqa: SLF001 - pyspark's own door to the JVM
        return jvm.org.apache.iceberg

    def load(self, identifier: Sequence[str]) -> LoadedTable | None:
        """The table as it is now; None if there is none."""
        try:
            table = self._java.loadTable(self._name(identifier))
            table.refresh()
        except (Py4JJavaError, PySparkException) as error:
            if java_class(error) in _GONE:
                return None
            raise error_of_ours(error, SinkError, f"the Iceberg table {'.'.join(identifier)} cannot be loaded") from error
        base = table.operations().current()
        snapshot = base.currentSnapshot()
        # Each value by itself: to walk through a map of Java's takes several calls an entry.
        found = base.properties()
        properties = {name: str(value) for name in PROPERTIES if (value := found.get(name)) is not None}
        schema, problem = self._columns(base, Mode(properties.get(MODE, Mode.MIRROR.value)), ".".join(identifier))
        if snapshot is None:
            return LoadedTable(table, base, base.location(), schema, properties, problem=problem)
        deletes = _count(snapshot, "total-delete-files", lambda: snapshot.deleteManifests(table.io()))
        files = _count(snapshot, "total-data-files", lambda: snapshot.dataManifests(table.io()))
        return LoadedTable(table, base, base.location(), schema, properties, deletes, files, problem=problem)

    def _columns(self, base: Any, mode: Mode, name: str) -> tuple[pa.Schema, SinkRefusedError | None]:
        """Those of its files, and what is wrong with the table."""
        try:
            schema = self.columns(base.schema(), mode)
        except ValueError as error:
            return pa.schema([]), SinkRefusedError(f"the Iceberg table {name} was altered: {error}", hint="drop the table")
        if not base.spec().isPartitioned():
            return schema, None
        # An equality delete reaches the files of its own partition alone: rows in all others would stay.
        return schema, SinkRefusedError(
            f"the Iceberg table {name} has been given partitions, and would keep rows that are to go",
            hint="ALTER TABLE … DROP PARTITION FIELD …, or drop the table to have it copied anew",
        )

    def drop(self, identifier: Sequence[str]) -> None:
        with failing(f"dropping {'.'.join(identifier)}"):
            self._java.dropTable(self._name(identifier), True)

    def columns(self, java_schema: Any, mode: Mode) -> pa.Schema:
        """`ValueError` for what none of our tables has."""
        return own_names(parse_columns(json.loads(self._iceberg.SchemaParser.toJson(java_schema))), mode)

    def comments(self, loaded: LoadedTable) -> dict[str, str]:
        """What is said of its columns, by their names in the table."""
        document = json.loads(self._iceberg.SchemaParser.toJson(loaded.base.schema()))
        return {each["name"]: each["doc"] for each in document["fields"] if each.get("doc")}

    def java_type(self, arrow_type: pa.DataType) -> Any:
        document = {"type": "struct", "fields": [{"id": 1, "name": "c", "required": False, "type": type_document(arrow_type)}]}
        return self._iceberg.SchemaParser.fromJson(json.dumps(document)).findType(1)

    def literal(self, value: object) -> Any:
        return self._iceberg.expressions.Expressions.lit(value)

    def begin(self, loaded: LoadedTable) -> Any:
        """A transaction on the very table that was loaded; `TableMovedError` if there is another by now."""
        transaction = loaded.java.newTransaction()
        if not transaction.startMetadata().equals(loaded.base):
            raise TableMovedError
        return transaction

    def commit(self, loaded: LoadedTable, change: TableChange, position: Position) -> None:
        """Change the table and its position at once; `TableMovedError` if it is not what was loaded. `Position.ZERO` stands for none."""
        with failing(f"committing to {loaded.location}"):
            transaction = loaded.transaction or self.begin(loaded)
            if change.rewritten is not None:
                # It says no position: it is the same rows. Nobody sees it without what follows.
                self._overwrite(transaction, loaded, change.rewritten).commit()
            self._set_position(self._update(transaction, loaded, change), position)
            self._finish(loaded, transaction, change.properties, position)

    def swap(self, loaded: LoadedTable, shadow: ShadowContent, properties: Mapping[str, str], position: Position) -> None:
        """Let files that are linked into the table's directory take the place of all that are there. `TableMovedError` as with `commit`.

        Deletes reach only rows of earlier snapshots, so it takes as many snapshots as there are groups, in one commit of metadata. All of
        them have the position: nobody is to take one of them for what the table was before.
        """
        with failing(f"committing to {loaded.location}"):
            transaction = self.begin(loaded) if shadow.schema is None else self._begin_as(loaded, shadow)
            for at, group in enumerate(shadow.groups):
                update = transaction.newRowDelta() if at else self._overwrite(transaction, loaded, ())
                for file in group.rows:
                    (update.addRows if at else update.addFile)(file)
                for file in group.deletes:
                    update.addDeletes(file)
                self._set_position(update, position)
            self._finish(loaded, transaction, properties, position)

    def _begin_as(self, loaded: LoadedTable, shadow: ShadowContent) -> Any:
        """A transaction on the table that was loaded, with other columns."""
        last = max(int(loaded.base.lastColumnId()), shadow.last_column)
        start = self._iceberg.TableMetadata.buildFrom(loaded.base).setCurrentSchema(shadow.schema, last).build()
        return self._iceberg.Transactions.replaceTableTransaction(loaded.location, loaded.java.operations(), start)

    def set_columns(self, loaded: LoadedTable, schema: Any, last_column: int) -> None:
        """Give a table without rows other columns, with the numbers that they have in `schema`."""
        with failing(f"committing to {loaded.location}"):
            made = self._iceberg.TableMetadata.buildFrom(loaded.base).setCurrentSchema(schema, last_column).build()
            loaded.java.operations().commit(loaded.base, made)

    def schema_document(self, java_schema: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._iceberg.SchemaParser.toJson(java_schema))
        return found

    def java_schema(self, fields: Sequence[Mapping[str, Any]]) -> Any:
        return self._iceberg.SchemaParser.fromJson(json.dumps({"type": "struct", "fields": list(fields)}))

    def moved_file(self, loaded: LoadedTable, file: Any) -> Any:
        """A file of another table as one that is linked into the directory of this one, with the same statistics."""
        spec, name = loaded.java.spec(), str(file.location()).rpartition("/")[2]
        builder = self._iceberg.DataFiles.builder(spec).copy(file) if str(file.content()) == "DATA" else self._copied_deletes(spec, file)
        return builder.withPath(f"{loaded.location}/data/{name}").build()

    def _copied_deletes(self, spec: Any, file: Any) -> Any:
        """Iceberg's own copy of deletes leaves out by which columns they name rows."""
        columns = self._int_array([int(number) for number in file.equalityFieldIds()])
        return self._iceberg.FileMetadata.deleteFileBuilder(spec).copy(file).ofEqualityDeletes(columns)

    def _set_position(self, update: Any, position: Position) -> None:
        update.scanManifestsWith(self._at_once)
        update.set(POSITION, str(position))
        update.commit()

    def _finish(self, loaded: LoadedTable, transaction: Any, properties: Mapping[str, str], position: Position) -> None:
        snapshot = transaction.currentMetadata().currentSnapshot().snapshotId()
        update = transaction.updateProperties()
        for name, value in {**properties, **position_properties(position, snapshot)}.items():
            update.set(name, value)
        update.commit()
        self._put(loaded, transaction.currentMetadata(), snapshot)

    def _put(self, loaded: LoadedTable, metadata: Any, snapshot: int) -> None:
        """Let `metadata`, with that snapshot, take the place of what was loaded.

        A catalog that is reached by HTTP may do so and answer that it has no time; Iceberg's client then asks again by itself, and is told
        that the table is another by now. So it is: it has our snapshot, and the files are not to be discarded.
        """
        operations = loaded.java.operations()
        try:
            operations.commit(loaded.base, metadata)
        except Py4JJavaError as error:
            if java_class(error) not in _STALE or operations.refresh().snapshot(snapshot) is None:
                raise

    @cached_property
    def _at_once(self) -> Any:
        """Iceberg looks every 10 ms whether its threads are done, five times in a commit; what is done on the thread that asks is done."""
        return self._iceberg.relocated.com.google.common.util.concurrent.MoreExecutors.newDirectExecutorService()

    def save_position(self, loaded: LoadedTable, position: Position) -> None:
        """Write down what the current snapshot says, for when that has expired."""
        with failing(f"committing to {loaded.location}"):
            properties = loaded.java.updateProperties()
            for name, value in position_properties(position, loaded.base.currentSnapshot().snapshotId()).items():
                properties.set(name, value)
            properties.commit()

    def _update(self, transaction: Any, loaded: LoadedTable, change: TableChange) -> Any:
        if change.is_whole:
            return self._overwrite(transaction, loaded, change.files)
        if not change.deletes:
            return self._filled(transaction.newAppend(), "appendFile", loaded, change.files)
        update = self._filled(transaction.newRowDelta(), "addRows", loaded, change.files)
        iceberg, columns = self._iceberg, self._ints(loaded, change.columns)
        for each in change.deletes:
            builder = iceberg.FileMetadata.deleteFileBuilder(loaded.java.spec()).ofEqualityDeletes(columns)
            update.addDeletes(self._built(loaded, builder, each))
        return update

    def _overwrite(self, transaction: Any, loaded: LoadedTable, files: Sequence[NewFile]) -> Any:
        everything = self._iceberg.expressions.Expressions.alwaysTrue()
        return self._filled(transaction.newOverwrite().overwriteByRowFilter(everything), "addFile", loaded, files)

    def _filled(self, update: Any, method: str, loaded: LoadedTable, files: Sequence[NewFile]) -> Any:
        for each in files:
            getattr(update, method)(self.data_file(loaded, each))
        return update

    def data_file(self, loaded: LoadedTable, file: NewFile) -> Any:
        """A file of rows as Java has it; it is no part of the table yet."""
        return self._built(loaded, self._iceberg.DataFiles.builder(loaded.java.spec()), file)

    def _built(self, loaded: LoadedTable, builder: Any, file: NewFile) -> Any:
        iceberg = self._iceberg
        path = f"{loaded.location}/data/{file.name}"
        config = iceberg.MetricsConfig.forTable(loaded.java)
        metrics = iceberg.parquet.ParquetUtil.fileMetrics(loaded.java.io().newInputFile(path), config)
        return builder.withPath(path).withFormat("PARQUET").withFileSizeInBytes(file.bytes).withMetrics(metrics).build()

    def _ints(self, loaded: LoadedTable, columns: Sequence[str]) -> Any:
        return self._int_array(field_ids(loaded.schema, columns))

    def _int_array(self, numbers: Sequence[int]) -> Any:
        gateway = self._spark.sparkContext._gateway  # noqa: SLF001
        assert gateway is not None
        array = gateway.new_array(gateway.jvm.int, len(numbers))
        for at, number in enumerate(numbers):
            array[at] = number
        return array

    @cached_property
    def _java(self) -> Any:
        """A session keeps its catalogs, so that to ask once is enough."""
        with active(self._spark):
            return self._iceberg.spark.Spark3Util.loadIcebergCatalog(self._spark._jsparkSession, self.name)  # noqa: SLF001

    def _name(self, identifier: Sequence[str]) -> Any:
        gateway = self._spark.sparkContext._gateway  # noqa: SLF001
        assert gateway is not None
        array = gateway.new_array(gateway.jvm.java.lang.String, len(identifier))
        for at, part in enumerate(identifier):
            array[at] = part
        return self._iceberg.catalog.TableIdentifier.of(array)


def _count(snapshot: Any, name: str, manifests: Callable[[], Any]) -> int:
    """By the snapshot's summary; whoever committed it need not have said so there."""
    told = snapshot.summary().get(name)
    if told is not None:
        return int(told)
    return sum(int(each.addedFilesCount() or 0) + int(each.existingFilesCount() or 0) for each in manifests())


def is_hadoop(conf: Mapping[str, str], catalog: str) -> bool:
    """Whether the catalog is one of ours: a directory, which no setting of the user's describes as something else."""
    return f"spark.sql.catalog.{catalog}" not in conf


def ensure_catalog(spark: SparkSession, name: str, warehouse: Path) -> None:
    """A catalog that nobody has described to this session is a Hadoop catalog in `warehouse`."""
    prefix = f"spark.sql.catalog.{name}"
    ours = {prefix: _CATALOG, f"{prefix}.type": "hadoop", f"{prefix}.warehouse": str(warehouse), f"{prefix}.cache-enabled": "false"}
    if spark.conf.get(prefix, None) is None:
        for key, value in ours.items():
            spark.conf.set(key, value)
    elif spark.conf.get(f"{prefix}.type", None) == "hadoop" and spark.conf.get(f"{prefix}.warehouse", None) != str(warehouse):
        raise ConfigError(
            f"the catalog {name} of this Spark session lies elsewhere than in {warehouse}", hint="choose another sink.iceberg.catalog"
        )


def with_catalog(spark: SparkSession, name: str) -> SparkSession:
    """A session of its own that has the catalog as this one knows it, by whichever settings: a new one has only those of the start."""
    session, prefix = spark.newSession(), f"spark.sql.catalog.{name}"
    for key, value in spark.conf.getAll.items():
        if key == prefix or key.startswith(f"{prefix}."):
            session.conf.set(key, value)
    return session


def java_class(error: BaseException) -> str:
    """The class of the Java exception behind an error of py4j's or pyspark's; empty if there is none."""
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    return "" if java is None else str(java.getClass().getName())


def first_line(error: BaseException) -> str:
    lines = [line for line in str(getattr(error, "java_exception", None) or error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextmanager
def failing(doing: str) -> Iterator[None]:
    """Turn what Iceberg says into an error of ours."""
    try:
        yield
    except (Py4JError, PySparkException) as error:
        if java_class(error) in _STALE:
            raise TableMovedError from error
        raise error_of_ours(error, SinkError, doing) from error
