"""Making chunks that were read under different fences one table, exact at the last fence.

Rows that nobody touched between the first fence and the last are the same under both, and lie in the same blocks: they are in one chunk,
whichever fence that was read under. All others are under keys that the spool shows to have changed in between. Those keys are collected by
Spark into files, executors read the rows under them as they are at the last fence, and the target replaces whatever the chunks had.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import SpoolFullError, SpoolGapError, TableRewrittenError
from penstock.pipeline.letters.copy import Basket
from penstock.pipeline.snapshots.executors import SnapshotExecutors
from penstock.position import Position
from penstock.postgres.chunks import with_constants
from penstock.postgres.connection import SourceAddress
from penstock.postgres.keyed import KeyBatch, can_be_asked, read_keys
from penstock.postgres.outline import TableOutline
from penstock.schema import TableSchema
from penstock.sinks.base import SnapshotFile, SnapshotPlace
from penstock.sinks.changed import row_schema, text_column
from penstock.sinks.collapse import match_text_column
from penstock.sinks.row_files import write_batches
from penstock.spool import storage
from penstock.spool.range import FileSlice, SpoolRange
from penstock.spool.reader import SpoolReader
from penstock.spool.status import load_status
from penstock.spool.values import check_identified
from penstock.spool.waiting import wait_for_end

_KEYS_A_QUERY = 2_000
_WAIT_SECONDS = 0.5


def is_repairable(schema: TableSchema) -> bool:
    """Whether rows can be read by key: there is one, and the source can be asked for it."""
    types = {column.name: column.arrow_type for column in schema.columns}
    return bool(schema.key) and all(can_be_asked(types[name]) for name in schema.key)


def changed_between(
    spool: Path, outline: TableOutline, start: Position, end: Position, is_stopping: Callable[[], bool], *, is_by_looks: bool = False
) -> list[FileSlice] | None:
    """Where the spool has what changed in `(start, end]`; waits until it has all of that. None if the run is to end before.

    By looks, what happened right before `end` comes with the look after it: then that one is waited for, and is part of it. Some keys more
    are read again, and do no harm.

    `TableRewrittenError` if that is not to be had, or if the rows cannot be told by their keys alone: the table is to be read anew.
    """
    reader = SpoolReader(spool)
    end = Position.of(end.value + 1) if is_by_looks else end
    while (reached := wait_for_end(reader, end, timeout_seconds=_WAIT_SECONDS)) is None or reached < end:
        if is_stopping():
            return None
        status = load_status(spool)
        if status is not None and status.state == "full":
            raise SpoolFullError(
                f"the spool is full of what {outline.schema.name} needs to be finished",
                hint="raise max_spool_bytes, and copy the table anew",
            )
    try:
        found = reader.read(start, _end_of_look(reader, end) if is_by_looks else end)
    except SpoolGapError as error:
        words = f"the spool no longer has what changed in {outline.schema.name} since {start}; its snapshot starts again"
        raise TableRewrittenError(words) from error
    return _slices(found, outline)


def _end_of_look(reader: SpoolReader, position: Position) -> Position:
    return min(segment.end for segment in reader.segments() if segment.end >= position)


def _slices(found: SpoolRange, outline: TableOutline) -> list[FileSlice]:
    schemas = {part.schema.oid: part.schema for part in outline.parts}
    slices = [slice for table in found.tables.values() for slice in table.slices if slice.file.oid in schemas]
    check_identified(slices)
    for slice in slices:
        if slice.file.counts.truncates:
            raise TableRewrittenError(f"table {slice.file.table} was emptied while it was being copied; its snapshot starts again")
        if not _is_alike(slice.file.schema, schemas[slice.file.oid]):
            raise TableRewrittenError(f"table {slice.file.table} was altered while it was being copied; its snapshot starts again")
    return slices


def _is_alike(logged: TableSchema, schema: TableSchema) -> bool:
    """Whether changes under one can be taken for changes of the other; what else the catalog knows, the outline is compared by."""
    columns = [{column.name: column.arrow_type for column in each.columns} for each in (logged, schema)]
    return logged.name == schema.name and set(logged.key) == set(schema.key) and columns[0] == columns[1]


@dataclass(frozen=True, slots=True)
class KeyTask:
    """A file of keys of one table, and the place for the rows under them."""

    index: int
    path: str
    outline: TableOutline
    place: SnapshotPlace
    constants: tuple[tuple[str, str], ...] = ()
    """What all these rows have in columns that the table has not."""

    @property
    def basket(self) -> Path:
        """For rows that are refused."""
        return Path(self.place.directory).parent / f"refused-{self.index}.parquet"


def plan_rereading(executors: SnapshotExecutors, outline: TableOutline, slices: Sequence[FileSlice], directory: Path) -> list[KeyTask]:
    """Have the keys collected into files under `directory`; gives a task for each."""
    keys, rows = directory / "keys", directory / "rows"
    shutil.rmtree(directory, ignore_errors=True)
    for each in (directory, rows):
        storage.make_directory(each)
    columns = pa.schema([pa.field(column.name, column.arrow_type) for column in outline.schema.columns])
    place = SnapshotPlace(str(rows), row_schema(columns), "rows")
    tasks: list[KeyTask] = []
    for part in outline.parts:
        own = [slice for slice in slices if slice.file.oid == part.schema.oid]
        if own:
            constants, before = outline.constants(part), set(keys.glob("*.parquet"))
            executors.write_keys(part.schema, own, keys, [text for _, text in constants])
            files = sorted(path for path in set(keys.glob("*.parquet")) - before if pq.read_metadata(path).num_rows)
            tasks += [KeyTask(index, str(path), part, place, constants) for index, path in enumerate(files, len(tasks))]
    return tasks


def key_reader(
    address: SourceAddress, snapshot: str, *, refuse_inexact: bool = False, puts_aside: bool = False
) -> Callable[[KeyTask], SnapshotFile]:
    """The function that travels to the executors: it reads the rows under a file of keys, and writes them to a file."""
    return lambda task: read_rows(address, snapshot, task, refuse_inexact=refuse_inexact, puts_aside=puts_aside)


def read_rows(
    address: SourceAddress, snapshot: str, task: KeyTask, *, refuse_inexact: bool = False, puts_aside: bool = False
) -> SnapshotFile:
    basket = Basket(task.basket) if puts_aside else None
    batches: Iterator[pa.RecordBatch] = read_keys(
        address, snapshot, task.outline, _key_batches(task), refuse_inexact=refuse_inexact, aside=basket
    )
    rows = batches if basket is None else basket.watch(batches)
    return write_batches(map(partial(with_constants, constants=task.constants), rows), task.place, task.index)


def _key_batches(task: KeyTask) -> Iterator[KeyBatch]:
    count = len(task.outline.schema.key)
    names = [*map(text_column, range(count)), *map(match_text_column, range(count))]
    with pq.ParquetFile(task.path) as file:
        for batch in file.iter_batches(batch_size=_KEYS_A_QUERY, columns=names):
            columns = [batch.column(name) for name in names]
            yield KeyBatch(tuple(columns[:count]), tuple(columns[count:]))
