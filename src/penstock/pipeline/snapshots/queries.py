"""Chunks of a snapshot whose rows go through Spark: read from the source once, into a file; asked about; then written where they belong.

The source's snapshot is needed for the first step alone. What lies between the steps is gone when the chunk is done, however that ends.
"""

from __future__ import annotations

import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import SinkError, SnapshotTaskError
from penstock.pipeline.letters.copy import Basket
from penstock.postgres.chunks import snapshot_schema
from penstock.schema import TableSchema
from penstock.sinks.base import ChangedRows, ChunkWriter
from penstock.sinks.executors import Executors, Out
from penstock.spool import storage
from penstock.transforms.asking import Queries, write_questions
from penstock.transforms.staging import BatchTransform
from penstock.transforms.transform import Fitted

Batches = Iterator[pa.RecordBatch]
Finish = Callable[[Batches, ChunkWriter], Out]
"""Writes rows by a writer, and says what came of it. Travels to an executor."""


@dataclass(frozen=True, slots=True)
class Copied:
    """The rows of a chunk as the source has them: a file with a row group for each batch, and what Spark needs to know of them."""

    path: str
    questions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChunkAsker:
    """Copies chunks of one table. Used by several threads of the driver at once."""

    fitted: Fitted
    writer: ChunkWriter
    queries: Queries
    directory: Path
    """Executors reach it."""

    def copy(self, executors: Executors, read: Callable[[], Batches], finish: Finish[Out], aside: Path | None = None) -> Out:
        """Have `read` read the chunk and `finish` write it, each on an executor. Rows that are refused go to the file `aside`."""
        directory = self.directory / uuid4().hex
        storage.make_directory(directory)
        try:
            (copied,) = executors.run(partial(copy_rows, read, self.fitted), [str(directory)])
            answers = str(directory / "answers")
            if copied.questions:
                self._ask(copied, answers)
            transform = BatchTransform(self.fitted, answers)
            (done,) = executors.run(partial(_finished, transform, self.writer, finish, aside), [copied])
            return done
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _ask(self, copied: Copied, answers: str) -> None:
        try:
            self.queries.answer(self.fitted, copied.questions, answers)
        except SinkError as error:
            raise SnapshotTaskError(error.message) from error


class AskingSink(ABC):
    """A sink before which rows may have to go through Spark."""

    @abstractmethod
    def asker_for(self, schema: TableSchema) -> ChunkAsker | None:
        """Who copies the chunks of a table of the source; None: they are written as they are read."""

    @abstractmethod
    def make_changed(self, schema: TableSchema, changed: ChangedRows) -> tuple[ChangedRows, Sequence[str]]:
        """What changed while a table was copied, as the target has it, and files with the rows that are refused."""


def copy_rows(read: Callable[[], Batches], fitted: Fitted, directory: str) -> Copied:
    """Runs on an executor, and perhaps more than once: the files have names of their own each time."""
    path = Path(directory) / f"{secrets.token_hex(8)}.rows"
    questions: list[str] = []
    schema = snapshot_schema(fitted.source)
    with (
        storage.create_file(path) as file,
        pq.ParquetWriter(file, schema, compression="none", use_dictionary=False, write_statistics=False) as writer,
    ):
        for batch in read():
            if batch.num_rows:
                asked = write_questions(fitted, pa.Table.from_batches([batch]), directory, len(questions))
                questions += [] if asked is None else [asked]
                writer.write_batch(batch, row_group_size=batch.num_rows)
    return Copied(str(path.absolute()), tuple(questions))


def read_copied(copied: Copied) -> Batches:
    """The same batches again."""
    with pq.ParquetFile(copied.path) as file:
        for group in range(file.num_row_groups):
            yield from file.read_row_group(group).combine_chunks().to_batches()


def _finished(transform: BatchTransform, writer: ChunkWriter, finish: Finish[Out], aside: Path | None, copied: Copied) -> Out:
    if aside is None:
        return finish(transform(read_copied(copied)), writer)
    basket = Basket(aside)
    return finish(basket.watch(replace(transform, aside=basket)(read_copied(copied))), writer)
