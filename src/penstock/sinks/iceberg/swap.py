"""Replace an Iceberg table by its resynced copy (the shadow) in one commit, and remove copies left by earlier
runs.

Before the epoch that swaps, the shadow's files are hard-linked into the table's data directory. The swap is
one metadata commit that names the links.

An id identifies the same column throughout a table's history. So when a shadow is created, its columns get
the field ids of the same columns of the table, and other columns get unused ids. If such a commit is not
possible, for example because the shadow has files of a kind that Penstock does not write, Spark writes all
rows again.
"""

from __future__ import annotations

import errno
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock import storage
from penstock.errors import SinkError, SinkRefusedError
from penstock.position import Position
from penstock.sinks.dataframes import quoted
from penstock.sinks.executors import penstock_error
from penstock.sinks.iceberg.catalog import (
    FileGroup,
    IcebergCatalog,
    LoadedTable,
    SwapContent,
    TableMovedError,
    first_line,
    local_path,
    translated_errors,
)
from penstock.sinks.iceberg.reader import delete_files
from penstock.sinks.iceberg.reader import each as each_of
from penstock.sinks.iceberg.state import COPY, POSITION

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_ATTEMPTS = 5
_FORMAT = 2
_SUFFIX = ".parquet"
_BY_VALUES = "EQUALITY_DELETES"
_ROOM = 100
"""Number of ids reserved for columns that are added to the table while its shadow is filled."""


@dataclass(frozen=True, slots=True)
class TableSwap:
    """Replace one table by its shadow. `shadow` and `table` are functions that load the two tables; each
    attempt calls them again.
    """

    catalog: IcebergCatalog
    shadow: Callable[[], LoadedTable]
    table: Callable[[], LoadedTable]
    place: str

    def commit(self, jvm: Any, properties: Mapping[str, str], position: Position) -> bool:
        """Swap the shadow in with one metadata commit. Returns False if that is not possible. Then Spark has
        to rewrite the rows.
        """
        for _ in range(_ATTEMPTS):
            table, shadow = self.table(), self.shadow()
            link_files(shadow, table)
            content = plan_swap(jvm, self.catalog, shadow, table)
            if content is None:
                return False
            with suppress(TableMovedError):
                self.catalog.swap(table, content, properties, position)
                return True
        raise SinkError(
            f"other writers commit to {self.place} faster than it can be replaced by the resynced copy"
        )

    def rewrite(self, rows: DataFrame, name: str, properties: Mapping[str, str], position: Position) -> None:
        """Let Spark write all rows of the shadow into the table again."""
        comments = self.catalog.comments(self.table())
        with spark_errors(f"replacing {self.place}"):
            _overwrite(_with_comments(rows, comments), name, properties, position)
        self.catalog.save_position(self.table(), position)


def link_files(shadow: LoadedTable, table: LoadedTable) -> None:
    """Link the shadow's data and delete files into the directory of the table. Existing links are only
    checked.
    """
    try:
        storage.ensure_directory(table.directory, shared=True)
        for name in storage.list_files(shadow.directory):
            if name.endswith(_SUFFIX):
                # A cleanup that began before the swap removes old files that the table does not refer to, so
                # set the modification time to now.
                storage.touch(shadow.directory / name)
                if not storage.link(shadow.directory / name, table.directory / name):
                    raise FileExistsError(errno.EEXIST, f"{name} exists and is another file")
        storage.sync_directory(table.directory)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return  # then Spark writes all rows again
        raise SinkError(
            f"cannot link the files of the resynced copy into {table.directory}: {error.strerror}"
        ) from error


def remove_links(shadow: LoadedTable, table: LoadedTable) -> None:
    """Remove links to the shadow's files from the directory of the table, unless the swap happened."""
    if shadow.properties.get(COPY) == table.properties.get(COPY):
        return
    for name in storage.list_files(shadow.directory):
        if storage.is_link_of(table.directory / name, shadow.directory / name):
            with suppress(OSError):
                storage.delete(table.directory / name)


def plan_swap(
    jvm: Any, catalog: IcebergCatalog, shadow: LoadedTable, table: LoadedTable
) -> SwapContent | None:
    """The content of the table after the swap. None if a metadata commit is not possible, and Spark has to
    rewrite the rows.

    One such case is a swap that already happened, but whose reply was lost. A second commit would remove and
    add the same files. When its snapshot expires, Iceberg deletes the files that the commit removed, even if
    other snapshots refer to them.
    """
    if shadow.properties.get(COPY) == table.properties.get(COPY):
        return None
    if any(
        each.format_version != _FORMAT or each.problem is not None or each.base.sortOrder().isSorted()
        for each in (shadow, table)
    ):
        return None
    files, deletes = _files(jvm, shadow)
    directory = f"{shadow.location}/data/"
    for file in (*files, *deletes):
        location = str(file.location())
        linked = table.directory / location.removeprefix(directory)
        if not location.startswith(directory) or not storage.is_link_of(linked, local_path(location)):
            return None
    if any(str(file.content()) != _BY_VALUES for file in deletes):
        return None  # position deletes name the path of the file in the shadow's directory
    mine, other = (catalog.schema_document(each.base.schema())["fields"] for each in (table, shadow))
    comments = {field["name"]: field["doc"] for field in mine if field.get("doc")}
    fields = [
        {**field, "doc": comments[field["name"]]} if field["name"] in comments else field for field in other
    ]
    groups = _groups(catalog, table, files, deletes)
    if fields == mine:
        return SwapContent(groups)
    known = [catalog.schema_document(each)["fields"] for each in each_of(table.base.schemas().iterator())]
    if any(_differ(numbered(former), numbered(fields)) for former in known):
        return None
    return SwapContent(groups, catalog.java_schema(fields), int(shadow.base.lastColumnId()))


def _files(jvm: Any, loaded: LoadedTable) -> tuple[list[Any], list[Any]]:
    """The data and delete files of the current snapshot, as Java objects."""
    if loaded.delete_files is None:
        return [], []
    with (
        translated_errors(f"listing the files of {loaded.location}"),
        closing(loaded.java.newScan().planFiles()) as tasks,
    ):
        return [task.file() for task in each_of(tasks.iterator())], list(delete_files(jvm, loaded))


def _groups(
    catalog: IcebergCatalog, table: LoadedTable, files: Sequence[Any], deletes: Sequence[Any]
) -> list[FileGroup]:
    """Groups of files in the order of their sequence numbers. Each sequence number with delete files begins a
    new group.
    """
    starts = sorted({int(file.dataSequenceNumber()) for file in deletes})
    rows: list[list[Any]] = [[] for _ in range(len(starts) + 1)]
    gone: list[list[Any]] = [[] for _ in range(len(starts) + 1)]
    for found, into in ((files, rows), (deletes, gone)):
        for file in found:
            into[bisect_right(starts, int(file.dataSequenceNumber()))].append(catalog.moved_file(table, file))
    return [FileGroup(*each) for each in zip(rows, gone, strict=True)]


def align_columns(catalog: IcebergCatalog, shadow: LoadedTable, table: LoadedTable) -> None:
    """Give the columns of an empty shadow the ids of the same columns of the table. Other columns get unused
    ids.
    """
    mine = {field["name"]: field for field in catalog.schema_document(table.base.schema())["fields"]}
    other = catalog.schema_document(shadow.base.schema())["fields"]
    numbers = count(max(int(each.base.lastColumnId()) for each in (shadow, table)) + _ROOM)
    fields = []
    for field in other:
        same = mine.get(field["name"])
        is_same = same is not None and _plain(same["type"]) == _plain(field["type"])
        fields.append(
            {**field, "id": same["id"], "type": same["type"]}
            if same is not None and is_same
            else _renumbered(field, numbers)
        )
    if fields != other:
        catalog.set_columns(
            shadow, catalog.java_schema(fields), max(number for number, _ in numbered(fields))
        )


def numbered(fields: Sequence[Mapping[str, Any]], prefix: str = "") -> list[tuple[int, str]]:
    """Each field id in these columns, nested ones included, with the field's name and type as one text."""
    found: list[tuple[int, str]] = []
    for field in fields:
        name = f"{prefix}{field['name']}"
        found += [
            (int(field["id"]), f"{name} {json.dumps(_plain(field['type']), sort_keys=True)}"),
            *_inner(field["type"], f"{name}."),
        ]
    return found


def _inner(kind: Any, prefix: str) -> list[tuple[int, str]]:
    if not isinstance(kind, Mapping):
        return []
    if kind["type"] == "struct":
        return numbered(kind["fields"], prefix)
    roles = ("element",) if kind["type"] == "list" else ("key", "value")
    return numbered([{"id": kind[f"{role}-id"], "name": role, "type": kind[role]} for role in roles], prefix)


def _differ(former: Sequence[tuple[int, str]], later: Sequence[tuple[int, str]]) -> bool:
    """Whether an id stands for another column in `former` than in `later`."""
    known = dict(former)
    return any(known.get(number, text) != text for number, text in later)


def _plain(kind: Any) -> Any:
    """A type without its nested ids."""
    if isinstance(kind, Mapping):
        return {
            name: _plain(value) for name, value in kind.items() if name != "id" and not name.endswith("-id")
        }
    return [_plain(each) for each in kind] if isinstance(kind, list) else kind


def _renumbered(document: Any, numbers: Iterator[int]) -> Any:
    """A column and its nested columns with new, unused ids."""
    if isinstance(document, Mapping):
        return {
            name: next(numbers) if name == "id" or name.endswith("-id") else _renumbered(value, numbers)
            for name, value in document.items()
        }
    return [_renumbered(each, numbers) for each in document] if isinstance(document, list) else document


def _overwrite(rows: DataFrame, name: str, properties: Mapping[str, str], position: Position) -> None:
    """Replace the content and columns of the table in one commit. The table keeps its older snapshots and its
    other properties.
    """
    writer = rows.writeTo(name).using("iceberg")
    for key, value in properties.items():
        writer = writer.tableProperty(key, value)
    writer.option(f"snapshot-property.{POSITION}", str(position)).createOrReplace()


def _with_comments(rows: DataFrame, comments: Mapping[str, str]) -> DataFrame:
    """The rows with these comments on their columns, by column name."""
    if not comments.keys() & set(rows.columns):
        return rows
    return rows.select(*(_commented(name, comments.get(name)) for name in rows.columns))


def _commented(name: str, comment: str | None) -> Column:
    column = F.col(quoted(name))
    return column if comment is None else column.alias(name, metadata={"comment": comment})


def drop_namespace(
    spark: SparkSession, namespace: Sequence[str], before: Callable[[Sequence[str], str], None]
) -> None:
    """Drop a namespace with all its tables, if it exists. Its directory stays if it contains other files.

    `before` is called with the namespace and name of each table before it is dropped.
    """
    name = ".".join(map(quoted, namespace))
    try:
        inner = [str(row[0]) for row in spark.sql(f"SHOW NAMESPACES IN {name}").collect()]
        tables = [str(row["tableName"]) for row in spark.sql(f"SHOW TABLES IN {name}").collect()]
    except AnalysisException:  # it does not exist
        return
    for table in tables:
        before(namespace, table)
        spark.sql(f"DROP TABLE IF EXISTS {name}.{quoted(table)} PURGE")
    for each in inner:
        drop_namespace(spark, (*namespace, each.rpartition(".")[2].strip("`")), before)
    with suppress(PySparkException):
        spark.sql(f"DROP NAMESPACE {name}")


@contextmanager
def spark_errors(doing: str, hint: str = "fix the cause in the message") -> Iterator[None]:
    """Convert Spark errors in a statement to Penstock errors. An analysis error is not retried."""
    try:
        yield
    except AnalysisException as error:
        raise SinkRefusedError(f"{doing}: {first_line(error)}", hint=hint) from error
    except (PySparkException, Py4JJavaError) as error:
        raise penstock_error(error, SinkError, doing) from error
