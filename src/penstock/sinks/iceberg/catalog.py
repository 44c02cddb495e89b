"""The parts of Iceberg's Java API that the sink uses: load tables, commit changes, evolve columns in the same
transaction.

A commit is made against exactly the metadata that was loaded, and fails if anything changed since (in a REST
catalog: if rows changed, see decision 23). Iceberg's own `commit()` would apply the change to the current
table instead. That suits plain appends, but the rows that an epoch adds depend on the position that was read.
So Iceberg's transaction only computes the new metadata, with columns, rows and properties, which then
replaces the loaded metadata atomically.

Columns have ids that never change, so renaming and widening change only metadata. Existing files lack an
added column: readers see null, or the default value in the table's metadata, if the table's format supports
one. If neither is the column's default value, the same commit rewrites those files.

Some Spark calls use the active session of the thread, which may be any session of the application, or none;
see `active`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock.errors import ConfigError, SinkError, SinkRefusedError
from penstock.position import Position
from penstock.sinks.evolution import Evolution
from penstock.sinks.executors import penstock_error
from penstock.sinks.iceberg.schema import field_ids, own_names, parse_columns, stored_name, type_document
from penstock.sinks.iceberg.state import MODE, POSITION, PROPERTIES, SnapshotMark, position_properties
from penstock.sinks.modes import Mode


@contextmanager
def active(spark: SparkSession) -> Iterator[None]:
    """Make `spark` the active session of the thread inside the block."""
    jvm: Any = spark._jvm  # noqa: SLF001 - pyspark's access to the JVM
    sessions = jvm.org.apache.spark.sql.classic.SparkSession
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)  # noqa: SLF001
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


_CATALOG = "org.apache.iceberg.spark.SparkCatalog"
_GONE = (
    "org.apache.iceberg.exceptions.NoSuchTableException",
    "org.apache.iceberg.exceptions.NoSuchNamespaceException",
)
_STALE = ("org.apache.iceberg.exceptions.CommitFailedException",)


class TableMovedError(Exception):
    """The table changed after it was loaded; nothing was committed."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file in the table's data directory that a commit adds."""

    name: str
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TableChange:
    """The changes of one commit. It deletes all rows if `is_whole`, otherwise the rows that match the
    equality deletes in `deletes`, which name `columns`. Then it adds the data files `files`.
    """

    files: Sequence[NewFile] = ()
    deletes: Sequence[NewFile] = ()
    columns: Sequence[str] = ()
    is_whole: bool = False
    rewritten: Sequence[NewFile] | None = None
    """Files that replace all existing files before the other changes, and have the same rows."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """Table properties to set."""


@dataclass(frozen=True, slots=True)
class LoadedTable:
    """A table as it was when it was loaded."""

    java: Any
    base: Any
    location: str
    schema: pa.Schema
    """The schema of the table's files, with field ids, and with the column names of the layout."""
    properties: Mapping[str, str]
    """The table properties that Penstock sets."""
    delete_files: int | None = None
    """The number of delete files in the current snapshot; None if there is no snapshot."""
    data_files: int = 0
    transaction: Any = None
    """A transaction that changes the columns; None if there is none. `schema` already has the new columns."""
    problem: SinkRefusedError | None = None
    """The reason why the table cannot be written to, regardless of its owner; None if there is none. With a
    reason, `schema` may lack columns.
    """

    @property
    def format_version(self) -> int:
        return int(self.base.formatVersion())

    @property
    def directory(self) -> Path:
        """The directory of the table's data files."""
        return local_path(self.location) / "data"

    def ancestors(self) -> Iterator[SnapshotMark]:
        """The current snapshot and its ancestors, newest first."""
        snapshot = self.base.currentSnapshot()
        while snapshot is not None:
            text, parent = snapshot.summary().get(POSITION), snapshot.parentId()
            yield SnapshotMark(
                snapshot.snapshotId(), parent, None if text is None else Position.parse(str(text))
            )
            snapshot = None if parent is None else self.base.snapshot(parent)


def local_path(location: str) -> Path:
    """The local path of a location in the catalog. Raises `SinkRefusedError` if it is not on a mounted file
    system.
    """
    if location.startswith("file:"):
        return Path("/" + location.removeprefix("file:").lstrip("/"))
    if not location.startswith("/"):
        raise SinkRefusedError(
            f"the catalog places the table at {location}, but Penstock writes files only to mounted file "
            "systems",
            hint="choose a catalog whose warehouse is a directory that all executors can access",
        )
    return Path(location)


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Data and delete files as Java objects. The deletes apply to the rows of earlier groups."""

    rows: Sequence[Any]
    deletes: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class SwapContent:
    """The content that replaces everything in a table."""

    groups: Sequence[FileGroup]
    schema: Any = None
    """The new columns as a Java object; None if they stay the same."""
    last_column: int = 0
    """The greatest column id in use."""


class IcebergCatalog:
    """One catalog of one Spark session. Usable by several threads, each with its own tables."""

    def __init__(self, spark: SparkSession, name: str, warehouse: Path) -> None:
        self._spark = spark
        self.name = name
        ensure_catalog(spark, name, warehouse)

    @cached_property
    def _iceberg(self) -> Any:
        """Iceberg's Java package, cached because each name on the path is a call to the JVM."""
        jvm: Any = self._spark._jvm  # noqa: SLF001 - pyspark's access to the JVM
        return jvm.org.apache.iceberg

    def load(self, identifier: Sequence[str]) -> LoadedTable | None:
        """Load the current state of the table; None if there is no table."""
        try:
            table = self._java.loadTable(self._name(identifier))
            table.refresh()
        except (Py4JJavaError, PySparkException) as error:
            if java_class(error) in _GONE:
                return None
            raise penstock_error(
                error, SinkError, f"the Iceberg table {'.'.join(identifier)} cannot be loaded"
            ) from error
        base = table.operations().current()
        snapshot = base.currentSnapshot()
        # Read single values: iterating over a Java map takes several calls per entry.
        found = base.properties()
        properties = {name: str(value) for name in PROPERTIES if (value := found.get(name)) is not None}
        schema, problem = self._columns(base, Mode.parse(properties.get(MODE)), ".".join(identifier))
        if snapshot is None:
            return LoadedTable(table, base, base.location(), schema, properties, problem=problem)
        deletes = _count(snapshot, "total-delete-files", lambda: snapshot.deleteManifests(table.io()))
        files = _count(snapshot, "total-data-files", lambda: snapshot.dataManifests(table.io()))
        return LoadedTable(table, base, base.location(), schema, properties, deletes, files, problem=problem)

    def _columns(self, base: Any, mode: Mode, name: str) -> tuple[pa.Schema, SinkRefusedError | None]:
        """The schema of the table's files, and the reason why the table cannot be written to, if there is
        one.
        """
        try:
            schema = self.columns(base.schema(), mode)
        except ValueError as error:
            return pa.schema([]), SinkRefusedError(
                f"the Iceberg table {name} was altered: {error}",
                hint="drop the table to have it copied again",
            )
        if not base.spec().isPartitioned():
            return schema, None
        # An equality delete applies to its own partition only, so rows in other partitions would remain.
        return schema, SinkRefusedError(
            f"the Iceberg table {name} has a partition field, so deletes would miss rows",
            hint="ALTER TABLE … DROP PARTITION FIELD …, or drop the table to have it copied again",
        )

    def drop(self, identifier: Sequence[str]) -> None:
        with translated_errors(f"dropping {'.'.join(identifier)}"):
            self._java.dropTable(self._name(identifier), True)

    def columns(self, java_schema: Any, mode: Mode) -> pa.Schema:
        """The Arrow schema of the table's files, with the column names of the layout. Raises `ValueError` for
        types that Penstock's tables do not have.
        """
        return own_names(parse_columns(json.loads(self._iceberg.SchemaParser.toJson(java_schema))), mode)

    def comments(self, loaded: LoadedTable) -> dict[str, str]:
        """The comments of the table's columns, by column name."""
        document = json.loads(self._iceberg.SchemaParser.toJson(loaded.base.schema()))
        return {each["name"]: each["doc"] for each in document["fields"] if each.get("doc")}

    def java_type(self, arrow_type: pa.DataType) -> Any:
        document = {
            "type": "struct",
            "fields": [{"id": 1, "name": "c", "required": False, "type": type_document(arrow_type)}],
        }
        return self._iceberg.SchemaParser.fromJson(json.dumps(document)).findType(1)

    def literal(self, value: object) -> Any:
        return self._iceberg.expressions.Expressions.lit(value)

    def begin(self, loaded: LoadedTable) -> Any:
        """Begin a transaction on the loaded metadata. Raises `TableMovedError` if the table has changed."""
        transaction = loaded.java.newTransaction()
        if not transaction.startMetadata().equals(loaded.base):
            raise TableMovedError
        return transaction

    def commit(self, loaded: LoadedTable, change: TableChange, position: Position) -> None:
        """Commit rows and position together. Raises `TableMovedError` if the table has changed.
        `Position.ZERO` stands for no position.
        """
        with translated_errors(f"committing to {loaded.location}"):
            transaction = loaded.transaction or self.begin(loaded)
            if change.rewritten is not None:
                # This snapshot has the same rows and no position. It becomes visible only together with the
                # next one.
                self._overwrite(transaction, loaded, change.rewritten).commit()
            self._set_position(self._update(transaction, loaded, change), position)
            self._finish(loaded, transaction, change.properties, position)

    def swap(
        self, loaded: LoadedTable, shadow: SwapContent, properties: Mapping[str, str], position: Position
    ) -> None:
        """Replace all files of the table by those of `shadow`, which are linked into the table's directory.
        Raises `TableMovedError` if the table has changed.

        Deletes apply only to rows of earlier snapshots, so each group of files becomes a separate snapshot.
        One metadata commit adds all these snapshots. Each of them has the position, so that none looks like
        an earlier state of the table.
        """
        with translated_errors(f"committing to {loaded.location}"):
            transaction = self.begin(loaded) if shadow.schema is None else self._begin_as(loaded, shadow)
            for at, group in enumerate(shadow.groups):
                update = transaction.newRowDelta() if at else self._overwrite(transaction, loaded, ())
                for file in group.rows:
                    (update.addRows if at else update.addFile)(file)
                for file in group.deletes:
                    update.addDeletes(file)
                self._set_position(update, position)
            self._finish(loaded, transaction, properties, position)

    def _begin_as(self, loaded: LoadedTable, shadow: SwapContent) -> Any:
        """Begin a transaction on the loaded table that also changes its columns to those of `shadow`."""
        last = max(int(loaded.base.lastColumnId()), shadow.last_column)
        start = (
            self._iceberg.TableMetadata.buildFrom(loaded.base).setCurrentSchema(shadow.schema, last).build()
        )
        return self._iceberg.Transactions.replaceTableTransaction(
            loaded.location, loaded.java.operations(), start
        )

    def set_columns(self, loaded: LoadedTable, schema: Any, last_column: int) -> None:
        """Replace the columns and column ids of a table without rows by those of `schema`."""
        with translated_errors(f"committing to {loaded.location}"):
            made = (
                self._iceberg.TableMetadata.buildFrom(loaded.base)
                .setCurrentSchema(schema, last_column)
                .build()
            )
            loaded.java.operations().commit(loaded.base, made)

    def schema_document(self, java_schema: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._iceberg.SchemaParser.toJson(java_schema))
        return found

    def java_schema(self, fields: Sequence[Mapping[str, Any]]) -> Any:
        return self._iceberg.SchemaParser.fromJson(json.dumps({"type": "struct", "fields": list(fields)}))

    def moved_file(self, loaded: LoadedTable, file: Any) -> Any:
        """The Java object of a file of another table that is linked into this table's directory, with the
        same statistics.
        """
        spec, name = loaded.java.spec(), str(file.location()).rpartition("/")[2]
        builder = (
            self._iceberg.DataFiles.builder(spec).copy(file)
            if str(file.content()) == "DATA"
            else self._copied_deletes(spec, file)
        )
        return builder.withPath(f"{loaded.location}/data/{name}").build()

    def _copied_deletes(self, spec: Any, file: Any) -> Any:
        """Copy a delete file. Iceberg's own copy drops the ids of the equality columns."""
        columns = self._int_array([int(number) for number in file.equalityFieldIds()])
        return self._iceberg.FileMetadata.deleteFileBuilder(spec).copy(file).ofEqualityDeletes(columns)

    def _set_position(self, update: Any, position: Position) -> None:
        update.scanManifestsWith(self._inline_executor)
        update.set(POSITION, str(position))
        update.commit()

    def _finish(
        self, loaded: LoadedTable, transaction: Any, properties: Mapping[str, str], position: Position
    ) -> None:
        snapshot = transaction.currentMetadata().currentSnapshot().snapshotId()
        update = transaction.updateProperties()
        for name, value in {**properties, **position_properties(position, snapshot)}.items():
            update.set(name, value)
        update.commit()
        self._put(loaded, transaction.currentMetadata(), snapshot)

    def _put(self, loaded: LoadedTable, metadata: Any, snapshot: int) -> None:
        """Replace the loaded metadata by `metadata`, whose last snapshot is `snapshot`.

        A REST catalog may commit and then report a timeout. Iceberg's client then retries, and the catalog
        reports that the table has changed. In that case the table contains the snapshot of this commit, so
        its files must not be discarded.
        """
        operations = loaded.java.operations()
        try:
            operations.commit(loaded.base, metadata)
        except Py4JJavaError as error:
            if java_class(error) not in _STALE or operations.refresh().snapshot(snapshot) is None:
                raise

    @cached_property
    def _inline_executor(self) -> Any:
        """An executor that runs in the calling thread. Iceberg's default executor polls its threads every 10
        ms, and each commit uses it five times.
        """
        return (
            self._iceberg.relocated.com.google.common.util.concurrent.MoreExecutors.newDirectExecutorService()
        )

    def save_position(self, loaded: LoadedTable, position: Position) -> None:
        """Store the position of the current snapshot as a table property, which remains when the snapshot
        expires.
        """
        with translated_errors(f"committing to {loaded.location}"):
            properties = loaded.java.updateProperties()
            for name, value in position_properties(
                position, loaded.base.currentSnapshot().snapshotId()
            ).items():
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
        return self._filled(
            transaction.newOverwrite().overwriteByRowFilter(everything), "addFile", loaded, files
        )

    def _filled(self, update: Any, method: str, loaded: LoadedTable, files: Sequence[NewFile]) -> Any:
        for each in files:
            getattr(update, method)(self.data_file(loaded, each))
        return update

    def data_file(self, loaded: LoadedTable, file: NewFile) -> Any:
        """A data file as a Java object, not yet part of the table."""
        return self._built(loaded, self._iceberg.DataFiles.builder(loaded.java.spec()), file)

    def _built(self, loaded: LoadedTable, builder: Any, file: NewFile) -> Any:
        iceberg = self._iceberg
        path = f"{loaded.location}/data/{file.name}"
        config = iceberg.MetricsConfig.forTable(loaded.java)
        metrics = iceberg.parquet.ParquetUtil.fileMetrics(loaded.java.io().newInputFile(path), config)
        return (
            builder.withPath(path)
            .withFormat("PARQUET")
            .withFileSizeInBytes(file.bytes)
            .withMetrics(metrics)
            .build()
        )

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
        """The Java object of the catalog. It is looked up once, because a session keeps its catalogs."""
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
    """The count in the snapshot's summary, or, if the writer omitted it, the number of files in its
    manifests.
    """
    count = snapshot.summary().get(name)
    if count is not None:
        return int(count)
    return sum(int(each.addedFilesCount() or 0) + int(each.existingFilesCount() or 0) for each in manifests())


def ensure_catalog(spark: SparkSession, name: str, warehouse: Path) -> None:
    """Configure a Hadoop catalog in `warehouse`, unless the session has a catalog of this name. Raises
    `ConfigError` if the existing catalog is a Hadoop catalog in another directory.
    """
    prefix = f"spark.sql.catalog.{name}"
    ours = {
        prefix: _CATALOG,
        f"{prefix}.type": "hadoop",
        f"{prefix}.warehouse": str(warehouse),
        f"{prefix}.cache-enabled": "false",
    }
    if spark.conf.get(prefix, None) is None:
        for key, value in ours.items():
            spark.conf.set(key, value)
    elif spark.conf.get(f"{prefix}.type", None) == "hadoop" and spark.conf.get(
        f"{prefix}.warehouse", None
    ) != str(warehouse):
        raise ConfigError(
            f"the catalog {name} of this Spark session has another warehouse than {warehouse}",
            hint="set sink.iceberg.catalog to another name",
        )


def with_catalog(spark: SparkSession, name: str) -> SparkSession:
    """Return a new session that has the catalog's current settings. A plain new session has only the settings
    with which the application started.
    """
    session, prefix = spark.newSession(), f"spark.sql.catalog.{name}"
    for key, value in spark.conf.getAll.items():
        if key == prefix or key.startswith(f"{prefix}."):
            session.conf.set(key, value)
    return session


def java_class(error: BaseException) -> str:
    """The Java class of the error behind a py4j or pyspark error; empty if there is none."""
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    return "" if java is None else str(java.getClass().getName())


def first_line(error: BaseException) -> str:
    lines = [
        line for line in str(getattr(error, "java_exception", None) or error).splitlines() if line.strip()
    ]
    return lines[0] if lines else type(error).__name__


@contextmanager
def translated_errors(doing: str) -> Iterator[None]:
    """Convert Iceberg's errors to Penstock errors, and commit conflicts to `TableMovedError`."""
    try:
        yield
    except (Py4JError, PySparkException) as error:
        if java_class(error) in _STALE:
            raise TableMovedError from error
        raise penstock_error(error, SinkError, doing) from error


_SAYS_DEFAULTS = 3


@dataclass(frozen=True, slots=True)
class FormerColumns:
    """How to read rows from before a schema change with the new columns."""

    names: Mapping[str, str] = field(default_factory=dict)
    """The former names of renamed columns, by new name."""
    added: frozenset[str] = frozenset()
    fills: Mapping[str, pa.Scalar] = field(default_factory=dict)
    """The default values of added columns. Columns whose default value is NULL are not included."""
    is_rewritten: bool = False
    """Whether existing files have to be rewritten to show the new columns."""


def former_columns(evolution: Evolution, format_version: int) -> FormerColumns:
    fills = {each.name: each.fill for each in evolution.added if each.fill.is_valid}
    names, added = (
        {new: old for old, new in evolution.renamed.items()},
        frozenset(each.name for each in evolution.added),
    )
    return FormerColumns(
        names, added, fills, not all(_can_store_default(fill, format_version) for fill in fills.values())
    )


def _can_store_default(fill: pa.Scalar, format_version: int) -> bool:
    """Whether a table of this format can store the default value of a column in such a way that all readers
    understand it alike.
    """
    kind = fill.type
    is_plain = pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_boolean(kind)
    return bool(is_plain and fill.is_valid and format_version >= _SAYS_DEFAULTS)


def evolve_table(
    catalog: IcebergCatalog, loaded: LoadedTable, evolution: Evolution, mode: Mode
) -> LoadedTable:
    """Change the columns in a transaction, without committing it. Returns the table with that transaction.
    Raises `SinkError` or `ValueError` if the table cannot have these columns.
    """
    with translated_errors(f"altering {loaded.location}"):
        transaction = catalog.begin(loaded)
        former = {new: old for old, new in evolution.renamed.items()}
        update = transaction.updateSchema()
        for name, arrow_type in evolution.widened.items():
            update.updateColumn(former.get(name, name), catalog.java_type(arrow_type))
        for old, new in evolution.renamed.items():
            update.renameColumn(old, new)
        update.commit()
        # A separate step, because the former name of a renamed column is free only after the first step.
        update = transaction.updateSchema()
        following = next((each for each in loaded.schema.names if each in mode.added_names), None)
        for added in evolution.added:
            literal = (
                catalog.literal(added.fill.as_py())
                if _can_store_default(added.fill, loaded.format_version)
                else None
            )
            update.addColumn(None, added.name, catalog.java_type(added.arrow_type), None, literal)
            if following is not None:
                update.moveBefore(added.name, stored_name(following, mode))
        update.commit()
        return replace(
            loaded, transaction=transaction, schema=catalog.columns(transaction.table().schema(), mode)
        )
