"""Run snapshot work on Spark's executors: chunk tasks, chunks that Spark transforms, and repair by re-reading
changed keys.

Only the first step of a chunk needs the source's snapshot. Intermediate files are removed when the chunk
ends, with or without success.

Repair: a row that did not change between the first and the last fence is the same under both, in the same
block, and so in exactly one chunk. The spool has a change for the key of every other row. Spark collects
these keys into files, executors read their rows as of the last fence, and the target replaces the rows of the
chunks.
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
    """An exception that is not a `PenstockError` becomes a `SnapshotTaskError`."""

    @abstractmethod
    def enter(self) -> None:
        """Every thread that uses these executors calls this first, before it starts other threads."""

    @abstractmethod
    def cancel(self) -> None:
        """Cancel all tasks as far as possible; `run` then raises."""

    @abstractmethod
    def write_keys(
        self, schema: TableSchema, slices: Sequence[FileSlice], directory: Path, constants: Sequence[str] = ()
    ) -> None:
        """Write all distinct keys in `slices` as Parquet files with the columns of `changed_keys`."""


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
        session.conf.set(
            "spark.sql.session.timeZone", "UTC"
        )  # keys are text when they are sent to the source
        try:
            changed_keys(load_changes(session, schema, slices), schema, constants).write.mode(
                "append"
            ).parquet(str(directory))
        except (PySparkException, Py4JJavaError) as error:
            raise penstock_error(error, SinkError) from error


Batches = Iterator[pa.RecordBatch]
Finish = Callable[[Batches, ChunkWriter], Out]
"""Writes rows with a writer and returns its result. Sent to an executor."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A chunk's source rows: a file with one row group per batch, and what Spark needs to read it."""

    path: str
    questions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChunkAsker:
    """Copies chunks of one table. Used by several driver threads at once."""

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
        """Run `read` and then `finish` on executors. Rejected rows go to the file `rejected_path`."""
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
    """A sink whose rows may have to be transformed by Spark first."""

    @abstractmethod
    def asker_for(self, schema: TableSchema) -> ChunkAsker | None:
        """The object that copies the chunks of a source table whose transform needs Spark. None if executors
        can write chunks directly.
        """

    @abstractmethod
    def make_changed(self, schema: TableSchema, changed: ChangedRows) -> tuple[ChangedRows, Sequence[str]]:
        """Transform the rows that changed during a snapshot; returns them with the files of rejected rows."""


def copy_rows(read: Callable[[], Batches], fitted: Fitted, directory: str) -> Copied:
    """Runs on an executor, possibly more than once, so file names are unique for each run."""
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
    """Pass the batches on unchanged."""
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
    """Whether rows can be read by key: the table has one, and the source supports it."""
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
    """The spool files with the changes in `(start, end]`, once the spool has all of them. None if the run
    ends first.

    With polling, changes right before `end` arrive with the next poll, so the function waits for that poll
    and includes it. The additional keys do no harm.

    Raises `TableRewrittenError` if the changes are lost, or do not identify rows by key: the table is copied
    again.
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
            f"the spool no longer has the changes of {outline.schema.name} since {start}; its snapshot "
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
    """Whether two schemas have the same columns and key. The copy fingerprint compares everything else."""
    columns = [{column.name: column.arrow_type for column in each.columns} for each in (logged, schema)]
    return logged.name == schema.name and set(logged.key) == set(schema.key) and columns[0] == columns[1]


@dataclass(frozen=True, slots=True)
class KeyTask:
    """A file of keys of one table, and the place for their rows."""

    index: int
    path: str
    outline: CopyFingerprint
    place: SnapshotPlace
    constants: tuple[tuple[str, str], ...] = ()
    """Constant values for target columns that the source table lacks."""

    @property
    def rejected_file(self) -> Path:
        """The file for rejected rows."""
        return Path(self.place.directory).parent / f"refused-{self.index}.parquet"


def plan_rereading(
    executors: SnapshotExecutors, outline: CopyFingerprint, slices: Sequence[FileSlice], directory: Path
) -> list[KeyTask]:
    """Collect the keys into files under `directory`; returns a task for each."""
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
    """Function for executors that reads the rows with the keys of a file, and writes them to a file."""
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
