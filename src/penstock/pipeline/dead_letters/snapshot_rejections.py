"""Rows that are rejected while a table is copied. They are stored next to the chunk records, and become dead
letters when the target commits the copy.

A chunk's rejected rows are durable before the chunk is recorded as read. Rows that changed during the copy
are read again, and may be rejected again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock import storage
from penstock.change import EXACT, METADATA_FIELDS, ChangeType, change_schema
from penstock.errors import PenstockError
from penstock.pipeline.dead_letters.files import CHANGES_SUFFIX, LETTERS_SUFFIX, write_changes, write_durably
from penstock.pipeline.dead_letters.rejections import Name, Rejection, Screened, build_dead_letters
from penstock.position import Position
from penstock.postgres.chunks import snapshot_schema
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import ChangedRows
from penstock.sinks.keys import key_codes
from penstock.sinks.modes import Mode
from penstock.sinks.repair_files import match_column, match_text_column
from penstock.sinks.row_values import build_exact

_CODE, _REASON = "code\0", "reason\0"  # no source column can have this name
_FIRST_ORDINAL = 1 << 40
"""The lowest ordinal of a rejected snapshot row. The row's position is the fence, and changes at the same
position have lower ordinals.
"""


class RejectedRowsFile:
    """Callable that collects rejected rows. `close` writes them to a file, or creates no file if no row was
    rejected.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tables: list[pa.Table] = []

    def __call__(self, rows: pa.RecordBatch, errors: Sequence[PenstockError]) -> None:
        table = pa.Table.from_batches([rows])
        table = table.append_column(_CODE, pa.array([error.code for error in errors], pa.string()))
        self._tables.append(
            table.append_column(_REASON, pa.array([error.message for error in errors], pa.string()))
        )

    def watch(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield `batches` unchanged, and call `close` after the last one. So the file is durable when the
        iterator ends.
        """
        yield from batches
        self.close()

    def close(self) -> None:
        """Write the rejected rows to the file. The file is durable when this method returns."""
        if self._tables:
            with storage.open_output(self._path) as file:
                pq.write_table(pa.concat_tables(self._tables), file)


def chunk_rejected_file(records: Path, number: int, fence: Position) -> Path:
    """Return the path of the file for rows that are rejected when a chunk is read from the source at this
    fence.
    """
    return records / f"refused-{number}-{fence.value:016X}.parquet"


def open_rejected_file(records: Path, number: int, fence: Position) -> Path:
    """Return the path of the file for rows that are rejected when a chunk is transformed. It differs from
    that of `chunk_rejected_file`, because a transform that needs Spark runs in a task after the one that
    reads the chunk.
    """
    return records / f"refused-{number}-{fence.value:016X}-made.parquet"


@dataclass(frozen=True, slots=True)
class RejectedRows:
    """The files of rows that were rejected while a table, or a member of a routed table, was copied."""

    schema: TableSchema
    chunks: tuple[str, ...] = ()
    """Files of rows that were rejected when chunks were read or transformed."""
    repaired: tuple[str, ...] = ()
    """Files of rows that were read again, because they changed during the copy, and were then rejected."""
    constants: tuple[tuple[str, str], ...] = ()
    """The target's key columns that the source table lacks, each with its value, which is the same in all
    rows.
    """


@dataclass(frozen=True, slots=True)
class SnapshotRejectionsTask:
    """The rejected rows of one table's copy, to be written as dead letters. Sent to an executor."""

    table: TableName
    schema: TableSchema
    mode: Mode
    fence: Position
    parts: tuple[RejectedRows, ...]
    changed: ChangedRows | None
    directory: str
    stem: str


def write_snapshot_rejections(task: SnapshotRejectionsTask) -> tuple[str, ...]:
    """Write dead letters for the rejected rows of a copy. Returns the stems of the files, one for each part
    with dead letters. A rejected row of a chunk gets no dead letter if it changed later in the copy, because
    it was then read again.
    """
    stems: list[str] = []
    first = _FIRST_ORDINAL
    for at, part in enumerate(task.parts):
        rows = _refused(task, part)
        if rows.num_rows:
            stems.append(f"{task.stem}-{at}")
            _write(task, part.schema, rows, stems[-1], first)
            first += rows.num_rows
    return tuple(stems)


def _refused(task: SnapshotRejectionsTask, part: RejectedRows) -> pa.Table:
    words = [pa.field(_CODE, pa.string()), pa.field(_REASON, pa.string())]
    schema = pa.schema([*snapshot_schema(part.schema), *words])
    before, again = (
        pa.concat_tables(
            [
                schema.empty_table(),
                *(pq.read_table(path).rename_columns(schema.names).cast(schema) for path in paths),
            ]
        )
        for paths in (part.chunks, part.repaired)
    )
    if task.changed is not None and before.num_rows:
        before = _untouched(before, task.schema, part, task.changed)
    return pa.concat_tables([before, again])


def _write(task: SnapshotRejectionsTask, schema: TableSchema, rows: pa.Table, stem: str, first: int) -> None:
    now = datetime.now(UTC)
    names = [(task.fence.value, first + at) for at in range(rows.num_rows)]
    reasons = zip(rows.column(_CODE).to_pylist(), rows.column(_REASON).to_pylist(), strict=True)
    screened = Screened(
        refused={name: Rejection(code, reason) for name, (code, reason) in zip(names, reasons, strict=True)}
    )
    kinds = (ChangeType.SNAPSHOT, ChangeType.SNAPSHOT if task.mode.is_log else ChangeType.INSERT)
    shown, kept = (_changes(schema, rows, kind, names, now) for kind in kinds)
    write_changes(Path(task.directory, f"{stem}{CHANGES_SUFFIX}"), schema, kept.to_batches())
    letters = [build_dead_letters(task.table, batch, schema, screened, now) for batch in shown.to_batches()]
    write_durably(Path(task.directory, f"{stem}{LETTERS_SUFFIX}"), pa.concat_tables(letters))


def _changes(
    schema: TableSchema, rows: pa.Table, kind: ChangeType, names: Sequence[Name], now: datetime
) -> pa.Table:
    count = rows.num_rows
    ordinals = pa.array([ordinal for _, ordinal in names], pa.int64())
    values = [kind.value, names[0][0], now, None, 0, None, None]
    columns = [
        pa.repeat(pa.scalar(value, field.type), count)
        for value, field in zip(values, METADATA_FIELDS, strict=True)
    ]
    columns[3], columns[6] = ordinals, rows.column(EXACT).combine_chunks()
    own = [rows.column(at) for at in range(len(schema.columns))]
    return pa.table([*own, *columns], schema=change_schema(schema)).combine_chunks()


def _untouched(rows: pa.Table, schema: TableSchema, part: RejectedRows, changed: ChangedRows) -> pa.Table:
    """Return the rows whose keys are not among the changed keys of the copy."""
    types = {column.name: column.arrow_type for column in schema.columns}
    files = [
        pq.read_table(path, coerce_int96_timestamp_unit="us")
        for path in storage.list_paths(Path(changed.keys), "*.parquet")
    ]
    keys = pa.concat_tables(files)
    columns = {name: keys.column(match_column(at)).cast(types[name]) for at, name in enumerate(schema.key)}
    texts = {name: keys.column(match_text_column(at)) for at, name in enumerate(schema.key)}
    named = pa.table({**columns, EXACT: build_exact(texts, keys.num_rows)})
    seen = rows
    for name, text in part.constants:
        seen = seen.append_column(name, pa.repeat(pa.scalar(text, pa.string()), rows.num_rows))
    mine, theirs = key_codes([seen, named], schema.key)
    return rows.filter(pa.array(~np.isin(mine, theirs)))
