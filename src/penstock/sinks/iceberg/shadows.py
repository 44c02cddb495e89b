"""Shadows of Iceberg tables: how one takes the place of its table, and how what former runs left of them is removed.

A shadow's files are linked into the table's data directory before the epoch that swaps, and the swap is one commit of metadata that names
the links. The columns of a shadow get the numbers that the table has for the same columns when it is created, and numbers of their own
otherwise: a number stands for one column in all of a table's history. Where that does not hold, or the files are of a kind that we do not
write, Spark writes all rows again.
"""

from __future__ import annotations

import errno
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.errors import SinkError, SinkRefusedError
from penstock.position import Position
from penstock.sinks.executors import error_of_ours
from penstock.sinks.iceberg.catalog import FileGroup, IcebergCatalog, LoadedTable, ShadowContent, failing, local_path
from penstock.sinks.iceberg.scan import delete_files
from penstock.sinks.iceberg.scan import each as each_of
from penstock.sinks.iceberg.state import COPY, POSITION
from penstock.sinks.names import quoted
from penstock.spool import storage

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_FORMAT = 2
_SUFFIX = ".parquet"
_BY_VALUES = "EQUALITY_DELETES"
_ROOM = 100
"""Numbers that are left for columns that the table gets while its shadow is copied."""


def link_files(shadow: LoadedTable, table: LoadedTable) -> None:
    """Link the shadow's files, of rows and of deletes, into the directory of the table; those that are there already cost a look."""
    try:
        table.directory.mkdir(parents=True, exist_ok=True)
        for name in storage.list_files(shadow.directory):
            if name.endswith(_SUFFIX):
                # Who removes files that the table does not refer to, by what it was before the swap, leaves those that are new.
                os.utime(shadow.directory / name)
                if not _is_link(table.directory / name, shadow.directory / name):
                    os.link(shadow.directory / name, table.directory / name)
        storage.sync_directory(table.directory)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return  # then Spark writes all rows again
        raise SinkError(f"the files of a copy cannot be linked into {table.directory}: {error.strerror}") from error


def remove_links(shadow: LoadedTable, table: LoadedTable) -> None:
    """Remove links to the shadow's files from the directory of the table, unless the shadow has taken its place."""
    if shadow.properties.get(COPY) == table.properties.get(COPY):
        return
    for name in storage.list_files(shadow.directory):
        if _is_link(table.directory / name, shadow.directory / name):
            with suppress(OSError):
                (table.directory / name).unlink()


def _is_link(file: Path, original: Path) -> bool:
    return file.is_file() and file.samefile(original)


def plan_swap(jvm: Any, catalog: IcebergCatalog, shadow: LoadedTable, table: LoadedTable) -> ShadowContent | None:
    """What the table holds after the swap. None: it takes more than metadata, and Spark has to do it.

    So it does if the shadow has taken the table's place before, and the answer was lost. The same files would be removed and added
    again by one commit, and when its snapshot expires, Iceberg deletes files that a commit removed, whatever else refers to them.
    """
    if shadow.properties.get(COPY) == table.properties.get(COPY):
        return None
    if any(each.format_version != _FORMAT or each.problem is not None or each.base.sortOrder().isSorted() for each in (shadow, table)):
        return None
    files, deletes = _files(jvm, shadow)
    directory = f"{shadow.location}/data/"
    for file in (*files, *deletes):
        location = str(file.location())
        if not location.startswith(directory) or not _is_link(table.directory / location.removeprefix(directory), local_path(location)):
            return None
    if any(str(file.content()) != _BY_VALUES for file in deletes):
        return None  # deletes by position name the file in the shadow's directory
    mine, other = (catalog.schema_document(each.base.schema())["fields"] for each in (table, shadow))
    comments = {field["name"]: field["doc"] for field in mine if field.get("doc")}
    fields = [{**field, "doc": comments[field["name"]]} if field["name"] in comments else field for field in other]
    groups = _groups(catalog, table, files, deletes)
    if fields == mine:
        return ShadowContent(groups)
    known = [catalog.schema_document(each)["fields"] for each in each_of(table.base.schemas().iterator())]
    if any(_differ(numbered(former), numbered(fields)) for former in known):
        return None
    return ShadowContent(groups, catalog.java_schema(fields), int(shadow.base.lastColumnId()))


def _files(jvm: Any, loaded: LoadedTable) -> tuple[list[Any], list[Any]]:
    """Those of the current snapshot, as Java has them: of rows, and of deletes."""
    if loaded.delete_files is None:
        return [], []
    with failing(f"looking for the files of {loaded.location}"), closing(loaded.java.newScan().planFiles()) as tasks:
        return [task.file() for task in each_of(tasks.iterator())], list(delete_files(jvm, loaded))


def _groups(catalog: IcebergCatalog, table: LoadedTable, files: Sequence[Any], deletes: Sequence[Any]) -> list[FileGroup]:
    """In the order of their sequence numbers; a group begins with deletes."""
    starts = sorted({int(file.dataSequenceNumber()) for file in deletes})
    rows: list[list[Any]] = [[] for _ in range(len(starts) + 1)]
    gone: list[list[Any]] = [[] for _ in range(len(starts) + 1)]
    for found, into in ((files, rows), (deletes, gone)):
        for file in found:
            into[bisect_right(starts, int(file.dataSequenceNumber()))].append(catalog.moved_file(table, file))
    return [FileGroup(*each) for each in zip(rows, gone, strict=True)]


def align_columns(catalog: IcebergCatalog, shadow: LoadedTable, table: LoadedTable) -> None:
    """Give the columns of a shadow without rows the numbers that the same columns of the table have."""
    mine = {field["name"]: field for field in catalog.schema_document(table.base.schema())["fields"]}
    other = catalog.schema_document(shadow.base.schema())["fields"]
    numbers = count(max(int(each.base.lastColumnId()) for each in (shadow, table)) + _ROOM)
    fields = []
    for field in other:
        same = mine.get(field["name"])
        is_same = same is not None and _plain(same["type"]) == _plain(field["type"])
        fields.append({**field, "id": same["id"], "type": same["type"]} if same is not None and is_same else _renumbered(field, numbers))
    if fields != other:
        catalog.set_columns(shadow, catalog.java_schema(fields), max(number for number, _ in numbered(fields)))


def numbered(fields: Sequence[Mapping[str, Any]], prefix: str = "") -> list[tuple[int, str]]:
    """Every number in these columns, and what it stands for: name and type."""
    found: list[tuple[int, str]] = []
    for field in fields:
        name = f"{prefix}{field['name']}"
        found += [(int(field["id"]), f"{name} {json.dumps(_plain(field['type']), sort_keys=True)}"), *_inner(field["type"], f"{name}.")]
    return found


def _inner(kind: Any, prefix: str) -> list[tuple[int, str]]:
    if not isinstance(kind, Mapping):
        return []
    if kind["type"] == "struct":
        return numbered(kind["fields"], prefix)
    roles = ("element",) if kind["type"] == "list" else ("key", "value")
    return numbered([{"id": kind[f"{role}-id"], "name": role, "type": kind[role]} for role in roles], prefix)


def _differ(former: Sequence[tuple[int, str]], later: Sequence[tuple[int, str]]) -> bool:
    """Whether a number stands for two different columns."""
    known = dict(former)
    return any(known.get(number, text) != text for number, text in later)


def _plain(kind: Any) -> Any:
    """A type without the numbers in it."""
    if isinstance(kind, Mapping):
        return {name: _plain(value) for name, value in kind.items() if name != "id" and not name.endswith("-id")}
    return [_plain(each) for each in kind] if isinstance(kind, list) else kind


def _renumbered(document: Any, numbers: Iterator[int]) -> Any:
    """A column, and those inside of it, with numbers that no other column has."""
    if isinstance(document, Mapping):
        return {
            name: next(numbers) if name == "id" or name.endswith("-id") else _renumbered(value, numbers) for name, value in document.items()
        }
    return [_renumbered(each, numbers) for each in document] if isinstance(document, list) else document


def put_in_place(rows: DataFrame, name: str, properties: Mapping[str, str], position: Position) -> None:
    """Make the table `rows`, with their columns, in one commit. Its snapshots so far stay, and so do properties that are not given."""
    writer = rows.writeTo(name).using("iceberg")
    for key, value in properties.items():
        writer = writer.tableProperty(key, value)
    writer.option(f"snapshot-property.{POSITION}", str(position)).createOrReplace()


def commented(rows: DataFrame, comments: Mapping[str, str]) -> DataFrame:
    """The same rows, with what was said of columns of these names so far."""
    if not comments.keys() & set(rows.columns):
        return rows
    return rows.select(*(_commented(name, comments.get(name)) for name in rows.columns))


def _commented(name: str, comment: str | None) -> Column:
    column = F.col(quoted(name))
    return column if comment is None else column.alias(name, metadata={"comment": comment})


def drop_below(spark: SparkSession, namespace: Sequence[str], before: Callable[[Sequence[str], str], None]) -> None:
    """Drop a namespace with all that is in it, if it is there. What is in its directory besides tables stays, and then it does too.

    `before` is called with the namespace and the name of each table that is about to be dropped.
    """
    name = ".".join(map(quoted, namespace))
    try:
        inner = [str(row[0]) for row in spark.sql(f"SHOW NAMESPACES IN {name}").collect()]
        tables = [str(row["tableName"]) for row in spark.sql(f"SHOW TABLES IN {name}").collect()]
    except AnalysisException:  # it is not there
        return
    for table in tables:
        before(namespace, table)
        spark.sql(f"DROP TABLE IF EXISTS {name}.{quoted(table)} PURGE")
    for each in inner:
        drop_below(spark, (*namespace, each.rpartition(".")[2].strip("`")), before)
    with suppress(PySparkException):
        spark.sql(f"DROP NAMESPACE {name}")


@contextmanager
def by_spark(doing: str, hint: str = "look at the message") -> Iterator[None]:
    """Turn what Spark says of a statement into an error of ours: what it does not understand will not pass by itself."""
    try:
        yield
    except AnalysisException as error:
        raise SinkRefusedError(f"{doing}: {_first_line(error)}", hint=hint) from error
    except (PySparkException, Py4JJavaError) as error:
        raise error_of_ours(error, SinkError, doing) from error


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
