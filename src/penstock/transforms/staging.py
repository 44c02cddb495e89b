"""Write transformed changes to files in the format of the spool, so that sinks need not know about
transforms.

Runs on executors. Each group of slices becomes one file, or no file if no row is left.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock import storage
from penstock.change import EXACT, EXACT_TYPE, ChangeCounts
from penstock.errors import RowRefusedError
from penstock.position import Position
from penstock.postgres.chunks import OnRejected
from penstock.schema import TableSchema
from penstock.sinks.base import SnapshotFile, SnapshotPlace
from penstock.sinks.keys import exact_texts
from penstock.sinks.modes import Layout, Mode
from penstock.sinks.repair_files import match_column, match_text_column, row_schema, value_column
from penstock.sinks.row_files import write_batches
from penstock.sinks.row_values import build_exact
from penstock.sinks.slice_reader import read_slices
from penstock.spool.manifest import SegmentFile
from penstock.spool.reader import FileSlice
from penstock.transforms.apply import (
    Outcome,
    count_changes,
    transform_changes,
    transform_keys,
    transform_rows,
)
from penstock.transforms.spark_exchange import read_answers, write_questions
from penstock.transforms.transform import Fitted


@dataclass(frozen=True, slots=True)
class StageTask:
    """Slices of changes to transform, in order. All are of one table and one schema. Sent to an executor."""

    slices: tuple[FileSlice, ...]
    fitted: Fitted
    directory: str
    together: bool
    """Whether all slices form one group, because results may depend on values in other slices."""
    first: int = 0
    """The number of the task's first group. Groups are numbered across all tasks of one table and schema."""
    answers: str | None = None
    """The directory with the results of Spark expressions; None if the transform has no Spark expressions."""

    @property
    def groups(self) -> Iterator[tuple[int, Sequence[FileSlice]]]:
        """The slices that are transformed together, with the number of each such group."""
        groups = [self.slices] if self.together else [(slice,) for slice in self.slices]
        return enumerate(groups, self.first)


def plan_stages(
    slices: Sequence[FileSlice], fitted: Fitted, directory: Path, parallelism: int
) -> list[StageTask]:
    """Divide the slices into at most `parallelism` tasks. All slices are in one task if some changes lack
    unchanged TOAST values on which a result of the transform may depend.
    """
    if needs_all_changes(slices, fitted):
        return [StageTask(tuple(slices), fitted, str(directory), together=True)]
    size = -(-len(slices) // max(1, parallelism))
    return [
        StageTask(tuple(slices[at : at + size]), fitted, str(directory), False, at)
        for at in range(0, len(slices), size)
    ]


def needs_all_changes(slices: Sequence[FileSlice], fitted: Fitted) -> bool:
    """Whether some changes lack unchanged TOAST values on which a result of the transform may depend."""
    counts = sum((slice.file.counts for slice in slices), ChangeCounts())
    return bool(fitted.needs_earlier_values and counts.unchanged)


def ask(task: StageTask) -> list[str]:
    """Write the input of Spark expressions to files. Returns the paths of the files."""
    fitted = task.fitted
    found = (
        write_questions(fitted, read_source(group, fitted.source), task.directory, number)
        for number, group in task.groups
    )
    return [path for path in found if path is not None]


def stage(task: StageTask) -> list[FileSlice]:
    """Write the transformed changes to files. Returns these files as slices, in the order of the changes.
    Raises `RowRefusedError` if the transform rejects a change.
    """
    return [found for number, group in task.groups if (found := _stage(group, number, task)) is not None]


def _stage(slices: Sequence[FileSlice], number: int, task: StageTask) -> FileSlice | None:
    fitted = task.fitted
    changes = read_source(slices, fitted.source)
    answers = None if task.answers is None else read_answers(fitted, task.answers, number, changes.num_rows)
    kept = kept_of(transform_changes(fitted, changes, answers), fitted.source)
    if not kept.num_rows:
        return None
    path = Path(task.directory) / f"{secrets.token_hex(8)}.parquet"
    with storage.open_new(path) as file:
        # Uncompressed, as in the spool: file sizes are used as the amount of data to read.
        pq.write_table(kept, file, compression="none", use_dictionary=False)
    counts = count_changes(kept, sum(slice.file.counts.moves for slice in slices))
    # The range is that of the slices: replayed dead letters keep earlier positions in their rows.
    low = min(
        slice.file.min_position if slice.after is None else Position.of(slice.after.value + 1)
        for slice in slices
    )
    high = max(slice.upto or slice.file.max_position for slice in slices)
    file = SegmentFile(fitted.schema, path.name, kept.num_rows, storage.size_bytes(path), counts, low, high)
    return FileSlice(path.absolute(), file, None, None)


def read_source(slices: Sequence[FileSlice], source: TableSchema) -> pa.Table:
    """Read spooled changes. The result has the source's columns and the metadata columns."""
    columns = pa.schema([pa.field(column.name, column.arrow_type) for column in source.columns])
    return read_slices(slices, Layout(columns, source.key, Mode.MIRROR))


def kept_of(outcome: Outcome, source: TableSchema) -> pa.Table:
    """Return the kept rows. Raises `RowRefusedError` if the transform rejected any row."""
    if outcome.refused.num_rows:
        reason, count = next(iter(outcome.reasons.items()))
        raise RowRefusedError(
            f"{count:,} rows of {source.name} cannot be transformed: {reason}",
            hint="correct the rows or the rule, then resync the table: penstock tables resync CONFIG "
            f"{source.name}",
        )
    return outcome.kept


def divert_rejected(outcome: Outcome, source: TableSchema, on_rejected: OnRejected | None) -> pa.Table:
    """Return the kept rows, and pass the rejected rows to `on_rejected`. Without `on_rejected`, a rejected
    row raises `RowRefusedError`.
    """
    if on_rejected is None:
        return kept_of(outcome, source)
    for batch in outcome.refused.to_batches():
        own = batch.num_columns - 1  # the last column is `REASON`
        on_rejected(
            batch.select(list(range(own))),
            [RowRefusedError(reason) for reason in batch.column(own).to_pylist()],
        )
    return outcome.kept


@dataclass(frozen=True, slots=True)
class BatchTransform:
    """Callable that transforms the rows of a snapshot chunk. Sent to executors."""

    fitted: Fitted
    answers: str | None = None
    """The directory with the results of Spark expressions, numbered by batch; None if the transform has no
    Spark expressions.
    """
    on_rejected: OnRejected | None = None
    """The function that takes rejected rows. It gets all rejected rows of a batch before the next batch is
    requested. None: a rejected row raises an error.
    """

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        fitted = self.fitted
        for number, batch in enumerate(batches):
            answers = (
                None if self.answers is None else read_answers(fitted, self.answers, number, batch.num_rows)
            )
            outcome = transform_rows(fitted, pa.Table.from_batches([batch]), answers)
            yield from divert_rejected(outcome, fitted.source, self.on_rejected).to_batches()


@dataclass(frozen=True, slots=True)
class KeysTask:
    """A file to transform. It contains the keys of rows that changed during a snapshot (`is_keys`), or these
    rows.
    """

    path: str
    fitted: Fitted
    directory: str
    index: int
    is_keys: bool = field(kw_only=True)
    answers: str | None = None


def ask_rows(task: KeysTask) -> str | None:
    """Write the input of Spark expressions to a file. Returns its path; None if there are no rows."""
    return write_questions(task.fitted, _source_rows(task), task.directory, task.index)


def restage(task: KeysTask, on_rejected: OnRejected | None = None) -> SnapshotFile:
    """Write the transformed keys or rows to a new file, and return this file. `on_rejected` takes rejected
    rows; without it, a rejected row raises an error.
    """
    return _keys(task) if task.is_keys else _rows(task, on_rejected)


def _read(path: str) -> pa.Table:
    with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
        return file.read()


def _keys(task: KeysTask) -> SnapshotFile:
    source, found = task.fitted.source, _read(task.path)
    types = {column.name: column.arrow_type for column in source.columns}
    columns = {name: found.column(match_column(at)).cast(types[name]) for at, name in enumerate(source.key)}
    texts = {name: found.column(match_text_column(at)) for at, name in enumerate(source.key)}
    made = transform_keys(task.fitted, pa.table({**columns, EXACT: build_exact(texts, found.num_rows)}))
    named: dict[str, pa.Array | pa.ChunkedArray] = {}
    for at, name in enumerate(task.fitted.key):
        exact = exact_texts(made.column(EXACT), name)
        named[match_column(at)] = made.column(name)
        named[match_text_column(at)] = pa.nulls(made.num_rows, pa.string()) if exact is None else exact
    table = pa.table(named)
    return write_batches(
        iter(table.to_batches()), SnapshotPlace(task.directory, table.schema, "keys"), task.index
    )


def _rows(task: KeysTask, on_rejected: OnRejected | None) -> SnapshotFile:
    fitted, rows = task.fitted, _source_rows(task)
    answers = None if task.answers is None else read_answers(fitted, task.answers, task.index, rows.num_rows)
    kept = divert_rejected(transform_rows(fitted, rows, answers), fitted.source, on_rejected)
    place = SnapshotPlace(task.directory, row_schema(fitted.arrow_schema), "rows")
    return write_batches(iter(kept.to_batches()), place, task.index)


def _source_rows(task: KeysTask) -> pa.Table:
    source = task.fitted.source
    names = [*(value_column(at) for at in range(len(source.columns))), EXACT]
    rows = _read(task.path).select(names).rename_columns([*source.column_names, EXACT])
    return rows.cast(
        pa.schema(
            [
                *(pa.field(column.name, column.arrow_type) for column in source.columns),
                pa.field(EXACT, EXACT_TYPE),
            ]
        )
    )
