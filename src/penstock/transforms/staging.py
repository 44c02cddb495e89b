"""Transformed changes, as files like those of the spool: whoever applies them need not know that they were ever otherwise.

Runs on executors. A file is written for each that was read; what nothing is left of has none.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.change import EXACT, EXACT_TYPE, ChangeCounts
from penstock.errors import RowRefusedError
from penstock.position import Position
from penstock.postgres.chunks import Aside
from penstock.schema import TableSchema
from penstock.sinks.base import SnapshotFile, SnapshotPlace
from penstock.sinks.changed import row_schema
from penstock.sinks.collapse import match_column, match_text_column, value_column
from penstock.sinks.keys import exact_texts
from penstock.sinks.layout import Layout, Mode
from penstock.sinks.row_files import write_batches
from penstock.sinks.slice_reader import read_slices
from penstock.sinks.values import build_exact
from penstock.spool import storage
from penstock.spool.manifest import SegmentFile
from penstock.spool.range import FileSlice
from penstock.transforms.applying import count_changes, transform_changes, transform_keys, transform_rows
from penstock.transforms.asking import read_answers, write_questions
from penstock.transforms.outcome import Outcome
from penstock.transforms.transform import Fitted


@dataclass(frozen=True, slots=True)
class StageTask:
    """Changes of one table, all of one shape, in order. Travels to an executor."""

    slices: tuple[FileSlice, ...]
    fitted: Fitted
    directory: str
    together: bool
    """Whether they have to be looked at as a whole."""
    first: int = 0
    """The number of the first group of changes that is looked at as a whole, among all of the table and shape."""
    answers: str | None = None
    """Where Spark's answers are, if it was asked."""

    @property
    def groups(self) -> Iterator[tuple[int, Sequence[FileSlice]]]:
        groups = [self.slices] if self.together else [(slice,) for slice in self.slices]
        return enumerate(groups, self.first)


def plan_stages(slices: Sequence[FileSlice], fitted: Fitted, directory: Path, parallelism: int) -> list[StageTask]:
    """Changes that lack values are looked at as a whole where something depends on these; others by file."""
    counts = sum((slice.file.counts for slice in slices), ChangeCounts())
    if fitted.looks_back and counts.unchanged:
        return [StageTask(tuple(slices), fitted, str(directory), together=True)]
    size = -(-len(slices) // max(1, parallelism))
    return [StageTask(tuple(slices[at : at + size]), fitted, str(directory), False, at) for at in range(0, len(slices), size)]


def ask(task: StageTask) -> list[str]:
    """Write what Spark needs to know of the changes; gives the files."""
    fitted = task.fitted
    found = (write_questions(fitted, read_source(group, fitted.source), task.directory, number) for number, group in task.groups)
    return [path for path in found if path is not None]


def stage(task: StageTask) -> list[FileSlice]:
    """Write what becomes of the changes; gives the files, in the order of the changes. `RowRefusedError` if some cannot be transformed."""
    return [found for number, group in task.groups if (found := _stage(group, number, task)) is not None]


def _stage(slices: Sequence[FileSlice], number: int, task: StageTask) -> FileSlice | None:
    fitted = task.fitted
    changes = read_source(slices, fitted.source)
    answers = None if task.answers is None else read_answers(fitted, task.answers, number, changes.num_rows)
    kept = kept_of(transform_changes(fitted, changes, answers), fitted.source)
    if not kept.num_rows:
        return None
    path = Path(task.directory) / f"{secrets.token_hex(8)}.parquet"
    with storage.create_file(path) as file:
        pq.write_table(kept, file, compression="none", use_dictionary=False)  # as in the spool: it is as long as what is read of it
    counts = count_changes(kept, sum(slice.file.counts.moves for slice in slices))
    # Not those of the rows: letters that are replayed come at a position that is later than their own.
    low = min(slice.file.min_position if slice.after is None else Position.of(slice.after.value + 1) for slice in slices)
    high = max(slice.upto or slice.file.max_position for slice in slices)
    file = SegmentFile(fitted.schema, path.name, kept.num_rows, path.stat().st_size, counts, low, high)
    return FileSlice(path.absolute(), file, None, None)


def read_source(slices: Sequence[FileSlice], source: TableSchema) -> pa.Table:
    """Spooled changes with the source's own columns."""
    columns = pa.schema([pa.field(column.name, column.arrow_type) for column in source.columns])
    return read_slices(slices, Layout(columns, source.key, Mode.MIRROR))


def kept_of(outcome: Outcome, source: TableSchema) -> pa.Table:
    """What is kept, where nothing may be refused."""
    if outcome.refused.num_rows:
        reason, count = next(iter(outcome.reasons.items()))
        raise RowRefusedError(
            f"{count:,} rows of {source.name} cannot be transformed: {reason}",
            hint=f"mend the rows, or the rule, and copy the table anew: penstock tables resync CONFIG {source.name}",
        )
    return outcome.kept


def sorted_out(outcome: Outcome, source: TableSchema, aside: Aside | None) -> pa.Table:
    """What is kept; `aside` takes what is refused. Without it, nothing may be."""
    if aside is None:
        return kept_of(outcome, source)
    for batch in outcome.refused.to_batches():
        own = batch.num_columns - 1  # a table may have a column of the same name as the reason
        aside(batch.select(list(range(own))), [RowRefusedError(reason) for reason in batch.column(own).to_pylist()])
    return outcome.kept


@dataclass(frozen=True, slots=True)
class BatchTransform:
    """What is done to the rows of a snapshot's chunk. Travels to the executors."""

    fitted: Fitted
    answers: str | None = None
    """Where Spark's answers are, if it was asked about these rows; batch by batch, as they come."""
    aside: Aside | None = None
    """Takes the rows that are refused; all of a batch before the next is asked for."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        fitted = self.fitted
        for number, batch in enumerate(batches):
            answers = None if self.answers is None else read_answers(fitted, self.answers, number, batch.num_rows)
            outcome = transform_rows(fitted, pa.Table.from_batches([batch]), answers)
            yield from sorted_out(outcome, fitted.source, self.aside).to_batches()


@dataclass(frozen=True, slots=True)
class KeysTask:
    """A file of keys, or of rows, that changed while a table was copied."""

    path: str
    fitted: Fitted
    directory: str
    index: int
    is_keys: bool = field(kw_only=True)
    answers: str | None = None


def ask_rows(task: KeysTask) -> str | None:
    """Write what Spark needs to know of the rows; gives the file, if there are any."""
    return write_questions(task.fitted, _source_rows(task), task.directory, task.index)


def restage(task: KeysTask, aside: Aside | None = None) -> SnapshotFile:
    """The same as the target has them. `aside` takes rows that are refused."""
    return _keys(task) if task.is_keys else _rows(task, aside)


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
    return write_batches(iter(table.to_batches()), SnapshotPlace(task.directory, table.schema, "keys"), task.index)


def _rows(task: KeysTask, aside: Aside | None) -> SnapshotFile:
    fitted, rows = task.fitted, _source_rows(task)
    answers = None if task.answers is None else read_answers(fitted, task.answers, task.index, rows.num_rows)
    kept = sorted_out(transform_rows(fitted, rows, answers), fitted.source, aside)
    place = SnapshotPlace(task.directory, row_schema(fitted.arrow_schema), "rows")
    return write_batches(iter(kept.to_batches()), place, task.index)


def _source_rows(task: KeysTask) -> pa.Table:
    source = task.fitted.source
    names = [*(value_column(at) for at in range(len(source.columns))), EXACT]
    rows = _read(task.path).select(names).rename_columns([*source.column_names, EXACT])
    return rows.cast(pa.schema([*(pa.field(column.name, column.arrow_type) for column in source.columns), pa.field(EXACT, EXACT_TYPE)]))
