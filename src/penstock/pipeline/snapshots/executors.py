"""Snapshot work on Spark's executors: chunk tasks, chunks whose transform needs Spark, and repair by key.

A chunk whose transform needs Spark has three steps: an executor copies its source rows to a file, Spark
evaluates the expressions, an executor writes the target's file. Only the first step needs the exported
snapshot. The intermediate files are removed at the end, also after an error.

Repair: a row that did not change between the first and the last fence stays in the same block, so it is in
exactly one chunk, with the same values. For every other row, the spool has a change with the row's key. Spark
collects these keys into files. Executors read the rows with these keys as of the last fence. In the target,
these rows replace the rows of the chunks that have the same keys.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from typing_extensions import override

from penstock import storage
from penstock.errors import SinkError, SnapshotTaskError, SpoolFullError, SpoolGapError, TableRewrittenError
from penstock.pipeline.dead_letters.snapshot_rejections import RejectedRowsFile
from penstock.position import Position
from penstock.postgres.chunks import snapshot_schema, with_constants
from penstock.postgres.connection import SourceAddress
from penstock.postgres.rows_by_key import KeyBatch, can_query_key, read_keys
from penstock.postgres.snapshot_export import CopyFingerprint
from penstock.schema import TableSchema
from penstock.sinks.base import ChangedRows, ChunkWriter, SnapshotFile, SnapshotPlace
from penstock.sinks.dataframes import changed_keys, load_changes
from penstock.sinks.executors import Executors, Out, SparkExecutors, penstock_error
from penstock.sinks.repair_files import match_text_column, row_schema, text_column
from penstock.sinks.row_files import write_batches
from penstock.spool.reader import FileSlice, SpoolRange, SpoolReader
from penstock.spool.rows import check_identified
from penstock.spool.status import load_status, wait_for_end
from penstock.transforms.spark_exchange import Queries, write_questions
from penstock.transforms.staging import BatchTransform
from penstock.transforms.transform import Fitted

_POOL = "penstock-snapshot"


class SnapshotExecutors(Executors):
    """Executors for snapshot tasks. Any exception other than a `PenstockError` becomes a
    `SnapshotTaskError`.
    """

    @abstractmethod
    def enter(self) -> None:
        """Prepare the calling thread to use these executors. Each `InheritableThread` that it starts
        afterwards is prepared too.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Cancel the running tasks as far as possible. The calls of `run` that wait for these tasks raise an
        error.
        """

    @abstractmethod
    def write_keys(
        self, schema: TableSchema, slices: Sequence[FileSlice], directory: Path, constants: Sequence[str] = ()
    ) -> None:
        """Write the distinct keys of the changes in `slices` to Parquet files in `directory`, with the
        columns of `changed_keys`. `constants`: the values of the target's key columns that the source table
        lacks.
        """


class SparkSnapshotExecutors(SparkExecutors, SnapshotExecutors):
    def __init__(self, spark: SparkSession) -> None:
        super().__init__(spark, SnapshotTaskError)
        self._group = f"{_POOL}-{uuid4().hex}"

    @override
    def enter(self) -> None:
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", _POOL)
        self._spark.sparkContext.setJobGroup(self._group, "tables are copied", interruptOnCancel=True)

    @override
    def cancel(self) -> None:
        self._spark.sparkContext.cancelJobGroup(self._group)

    @override
    def write_keys(
        self, schema: TableSchema, slices: Sequence[FileSlice], directory: Path, constants: Sequence[str] = ()
    ) -> None:
        session = self._spark.newSession()
        session.conf.set("spark.sql.session.timeZone", "UTC")  # keys are sent to the source as text
        try:
            changed_keys(load_changes(session, schema, slices), schema, constants).write.mode(
                "append"
            ).parquet(str(directory))
        except (PySparkException, Py4JJavaError) as error:
            raise penstock_error(error, SinkError) from error


Batches = Iterator[pa.RecordBatch]
Finish = Callable[[Batches, ChunkWriter], Out]
"""Function that writes a chunk's rows with a `ChunkWriter`, and returns the result of the task. Runs on an
executor.
"""


@dataclass(frozen=True, slots=True)
class Copied:
    """The file with a chunk's source rows. It has one row group per batch."""

    path: str
    questions: tuple[str, ...]
    """Files with the input of the transform's Spark expressions, one per batch."""


@dataclass(frozen=True, slots=True)
class ChunkAsker:
    """Copies the chunks of a table whose transform needs Spark. Several driver threads use it at the same
    time.
    """

    fitted: Fitted
    writer: ChunkWriter
    queries: Queries
    directory: Path
    """Directory for intermediate files. Executors must be able to access it."""

    def copy(
        self,
        executors: Executors,
        read: Callable[[], Batches],
        finish: Finish[Out],
        rejected_path: Path | None = None,
    ) -> Out:
        """Copy one chunk: run `read` on an executor, evaluate the Spark expressions, and run `finish` with
        the transformed rows on an executor. Returns the result of `finish`. Rows that the transform rejects
        go to the file `rejected_path`. Without this path, a rejected row raises an error.
        """
        directory = self.directory / uuid4().hex
        storage.ensure_directory(directory)
        try:
            (copied,) = executors.run(partial(copy_rows, read, self.fitted), [str(directory)])
            answers = str(directory / "answers")
            if copied.questions:
                self._ask(copied, answers)
            transform = BatchTransform(self.fitted, answers)
            (done,) = executors.run(
                partial(_finished, transform, self.writer, finish, rejected_path), [copied]
            )
            return done
        finally:
            storage.discard_tree(directory)

    def _ask(self, copied: Copied, answers: str) -> None:
        try:
            self.queries.answer(self.fitted, copied.questions, answers)
        except SinkError as error:
            raise SnapshotTaskError(error.message) from error


class AskingSink(ABC):
    """A sink that may need Spark to transform rows before it writes them."""

    @abstractmethod
    def asker_for(self, schema: TableSchema) -> ChunkAsker | None:
        """Return the `ChunkAsker` of a source table whose transform needs Spark. Returns None for other
        tables, whose chunks executors write directly.
        """

    @abstractmethod
    def make_changed(self, schema: TableSchema, changed: ChangedRows) -> tuple[ChangedRows, Sequence[str]]:
        """Transform the rows that changed during a snapshot. Returns the transformed rows, and the paths of
        files with the rows that the transform rejected.
        """


def copy_rows(read: Callable[[], Batches], fitted: Fitted, directory: str) -> Copied:
    """Write the rows, and the input of the Spark expressions, to files in `directory`. Runs on an executor.
    Spark may run it more than once; each run uses new file names.
    """
    path = Path(directory) / f"{secrets.token_hex(8)}.rows"
    questions: list[str] = []
    schema = snapshot_schema(fitted.source)
    with (
        storage.open_new(path) as file,
        pq.ParquetWriter(
            file, schema, compression="none", use_dictionary=False, write_statistics=False
        ) as writer,
    ):
        for batch in read():
            if batch.num_rows:
                asked = write_questions(fitted, pa.Table.from_batches([batch]), directory, len(questions))
                questions += [] if asked is None else [asked]
                writer.write_batch(batch, row_group_size=batch.num_rows)
    return Copied(str(path.absolute()), tuple(questions))


def read_copied(copied: Copied) -> Batches:
    """Yield the batches that `copy_rows` wrote, with the same boundaries. This matters because Spark's
    results are numbered by batch.
    """
    with pq.ParquetFile(copied.path) as file:
        for group in range(file.num_row_groups):
            yield from file.read_row_group(group).combine_chunks().to_batches()


def _finished(
    transform: BatchTransform,
    writer: ChunkWriter,
    finish: Finish[Out],
    rejected_path: Path | None,
    copied: Copied,
) -> Out:
    if rejected_path is None:
        return finish(transform(read_copied(copied)), writer)
    rejected_file = RejectedRowsFile(rejected_path)
    return finish(
        rejected_file.watch(replace(transform, on_rejected=rejected_file)(read_copied(copied))), writer
    )


_KEYS_A_QUERY = 2_000
_WAIT_SECONDS = 0.5


def is_repairable(schema: TableSchema) -> bool:
    """Whether rows can be read by key: the table has a key whose columns can be sent to the server as
    text.
    """
    types = {column.name: column.arrow_type for column in schema.columns}
    return bool(schema.key) and all(can_query_key(types[name]) for name in schema.key)


def changed_between(
    spool: Path,
    outline: CopyFingerprint,
    start: Position,
    end: Position,
    is_stopping: Callable[[], bool],
    *,
    positions_are_polls: bool = False,
) -> list[FileSlice] | None:
    """Wait until the spool has all changes up to `end`, and return the slices with the table's changes in
    `(start, end]`. Returns None if the run is ending.

    With polling, the next poll may still contain changes from before `end`, so the function waits for that
    poll and includes all its changes. Rows that are read again without need do no harm.

    Raises `TableRewrittenError` if the table must be copied again: the spool no longer has the changes, or
    the table was truncated or altered. Raises `RowUnidentifiedError` for a change that lacks the key of its
    row.
    """
    reader = SpoolReader(spool)
    end = Position.of(end.value + 1) if positions_are_polls else end
    while (reached := wait_for_end(reader, end, timeout_seconds=_WAIT_SECONDS)) is None or reached < end:
        if is_stopping():
            return None
        status = load_status(spool)
        if status is not None and status.state == "full":
            raise SpoolFullError(
                f"the spool is full, so the snapshot of {outline.schema.name} cannot be finished",
                hint="raise max_spool_bytes, and resync the table",
            )
    try:
        found = reader.read(start, _end_of_poll(reader, end) if positions_are_polls else end)
    except SpoolGapError as error:
        words = (
            f"the spool no longer has the changes of {outline.schema.name} after {start}; its snapshot "
            "starts again"
        )
        raise TableRewrittenError(words) from error
    return _slices(found, outline)


def _end_of_poll(reader: SpoolReader, position: Position) -> Position:
    return min(segment.end for segment in reader.segments() if segment.end >= position)


def _slices(found: SpoolRange, outline: CopyFingerprint) -> list[FileSlice]:
    schemas = {part.schema.oid: part.schema for part in outline.parts}
    slices = [slice for table in found.tables.values() for slice in table.slices if slice.file.oid in schemas]
    check_identified(slices)
    for slice in slices:
        if slice.file.counts.truncates:
            raise TableRewrittenError(
                f"table {slice.file.table} was truncated while it was being copied; its snapshot starts again"
            )
        if not _is_alike(slice.file.schema, schemas[slice.file.oid]):
            raise TableRewrittenError(
                f"table {slice.file.table} was altered while it was being copied; its snapshot starts again"
            )
    return slices


def _is_alike(logged: TableSchema, schema: TableSchema) -> bool:
    """Whether two schemas have the same table name, column types and key. All other properties are compared
    with `CopyFingerprint`.
    """
    columns = [{column.name: column.arrow_type for column in each.columns} for each in (logged, schema)]
    return logged.name == schema.name and set(logged.key) == set(schema.key) and columns[0] == columns[1]


@dataclass(frozen=True, slots=True)
class KeyTask:
    """The input of `read_rows`: a file with changed keys of one table, and the place for the file with the
    rows that have these keys.
    """

    index: int
    path: str
    outline: CopyFingerprint
    place: SnapshotPlace
    constants: tuple[tuple[str, str], ...] = ()
    """The target's key columns that the source table lacks, each with its value, which is the same in all
    rows.
    """

    @property
    def rejected_file(self) -> Path:
        """The path of the file for those rows that are rejected."""
        return Path(self.place.directory).parent / f"refused-{self.index}.parquet"


def plan_rereading(
    executors: SnapshotExecutors, outline: CopyFingerprint, slices: Sequence[FileSlice], directory: Path
) -> list[KeyTask]:
    """Write the keys of the changes in `slices` to files under `directory`. Returns one task per file."""
    keys, rows = directory / "keys", directory / "rows"
    storage.discard_tree(directory)
    for each in (directory, rows):
        storage.ensure_directory(each)
    columns = pa.schema([pa.field(column.name, column.arrow_type) for column in outline.schema.columns])
    place = SnapshotPlace(str(rows), row_schema(columns), "rows")
    tasks: list[KeyTask] = []
    for part in outline.parts:
        own = [slice for slice in slices if slice.file.oid == part.schema.oid]
        if own:
            constants, before = outline.constants(part), set(storage.list_paths(keys, "*.parquet"))
            executors.write_keys(part.schema, own, keys, [text for _, text in constants])
            files = sorted(
                path
                for path in set(storage.list_paths(keys, "*.parquet")) - before
                if pq.read_metadata(path).num_rows
            )
            tasks += [
                KeyTask(index, str(path), part, place, constants)
                for index, path in enumerate(files, len(tasks))
            ]
    return tasks


def key_reader(
    address: SourceAddress, snapshot: str, *, reject_inexact: bool = False, diverts: bool = False
) -> Callable[[KeyTask], SnapshotFile]:
    """Return the function that executors run for each `KeyTask`. It reads the rows with the keys in the
    task's file, and writes them to another file.
    """
    return lambda task: read_rows(address, snapshot, task, reject_inexact=reject_inexact, diverts=diverts)


def read_rows(
    address: SourceAddress,
    snapshot: str,
    task: KeyTask,
    *,
    reject_inexact: bool = False,
    diverts: bool = False,
) -> SnapshotFile:
    rejected_file = RejectedRowsFile(task.rejected_file) if diverts else None
    batches: Iterator[pa.RecordBatch] = read_keys(
        address,
        snapshot,
        task.outline,
        _key_batches(task),
        reject_inexact=reject_inexact,
        on_rejected=rejected_file,
    )
    rows = batches if rejected_file is None else rejected_file.watch(batches)
    return write_batches(map(partial(with_constants, constants=task.constants), rows), task.place, task.index)


def _key_batches(task: KeyTask) -> Iterator[KeyBatch]:
    count = len(task.outline.schema.key)
    names = [*map(text_column, range(count)), *map(match_text_column, range(count))]
    with pq.ParquetFile(task.path) as file:
        for batch in file.iter_batches(batch_size=_KEYS_A_QUERY, columns=names):
            columns = [batch.column(name) for name in names]
            yield KeyBatch(tuple(columns[:count]), tuple(columns[count:]))
