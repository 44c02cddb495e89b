"""Rows that are refused while a table is copied: kept beside the chunks that lack them, and made letters when the copy is complete.

A chunk's refused rows are durable before the chunk counts as read. Those under keys that changed while the table was copied are read again
with all others, and refused again, or not.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.change import EXACT, METADATA_FIELDS, ChangeType, change_schema
from penstock.errors import PenstockError
from penstock.pipeline.letters.files import write_changes, write_durably
from penstock.pipeline.letters.folding import CHANGES_SUFFIX, LETTERS_SUFFIX
from penstock.pipeline.letters.letter import describe_letters
from penstock.pipeline.letters.screening import Name, Refusal, Screened
from penstock.position import Position
from penstock.postgres.chunks import snapshot_schema
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import ChangedRows
from penstock.sinks.collapse import match_column, match_text_column
from penstock.sinks.keys import key_codes
from penstock.sinks.layout import Mode
from penstock.sinks.values import build_exact
from penstock.spool import storage

_CODE, _REASON = "code\0", "reason\0"  # no column of any source can be called so
_FIRST_ORDINAL = 1 << 40
"""Rows of a copy come at its fence, where a change of the log may be too."""


class Basket:
    """Takes what is refused of some rows, and writes it down, if there is any, before the last of the others is given out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tables: list[pa.Table] = []

    def __call__(self, rows: pa.RecordBatch, errors: Sequence[PenstockError]) -> None:
        table = pa.Table.from_batches([rows])
        table = table.append_column(_CODE, pa.array([error.code for error in errors], pa.string()))
        self._tables.append(table.append_column(_REASON, pa.array([error.message for error in errors], pa.string())))

    def watch(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        self.close()

    def close(self) -> None:
        """There is no more to come; it is durable when this returns."""
        if self._tables:
            temporary = self._path.with_name(f".{self._path.name}-{secrets.token_hex(4)}")
            write_durably(temporary, pa.concat_tables(self._tables))
            storage.rename(temporary, self._path)
            storage.sync_directory(self._path.parent)


def chunk_basket(records: Path, number: int, fence: Position) -> Path:
    """Of the attempt at a chunk under this fence."""
    return records / f"refused-{number}-{fence.value:016X}.parquet"


def made_basket(records: Path, number: int, fence: Position) -> Path:
    """The same for rows that are read in one step, and refused in another."""
    return records / f"refused-{number}-{fence.value:016X}-made.parquet"


@dataclass(frozen=True, slots=True)
class RefusedRows:
    """Files of what was refused of a table while it was copied, or of one of those that are routed into it."""

    schema: TableSchema
    """Of what was read."""
    chunks: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()
    """Of rows that were read once more, since they changed."""
    constants: tuple[tuple[str, str], ...] = ()
    """What all these rows have in columns of the target's key that the source has not."""


@dataclass(frozen=True, slots=True)
class CopyLettersTask:
    """Travels to an executor."""

    table: TableName
    schema: TableSchema
    mode: Mode
    fence: Position
    parts: tuple[RefusedRows, ...]
    changed: ChangedRows | None
    directory: str
    stem: str


def write_copy_letters(task: CopyLettersTask) -> tuple[str, ...]:
    """The stems of the files of letters, for each part its own; none if nothing was refused, or all of it has changed since."""
    stems: list[str] = []
    first = _FIRST_ORDINAL
    for at, part in enumerate(task.parts):
        rows = _refused(task, part)
        if rows.num_rows:
            stems.append(f"{task.stem}-{at}")
            _write(task, part.schema, rows, stems[-1], first)
            first += rows.num_rows
    return tuple(stems)


def _refused(task: CopyLettersTask, part: RefusedRows) -> pa.Table:
    words = [pa.field(_CODE, pa.string()), pa.field(_REASON, pa.string())]
    schema = pa.schema([*snapshot_schema(part.schema), *words])
    before, again = (
        pa.concat_tables([schema.empty_table(), *(pq.read_table(path).rename_columns(schema.names).cast(schema) for path in paths)])
        for paths in (part.chunks, part.repaired)
    )
    if task.changed is not None and before.num_rows:
        before = _untouched(before, task.schema, part, task.changed)
    return pa.concat_tables([before, again])


def _write(task: CopyLettersTask, schema: TableSchema, rows: pa.Table, stem: str, first: int) -> None:
    now = datetime.now(UTC)
    names = [(task.fence.value, first + at) for at in range(rows.num_rows)]
    reasons = zip(rows.column(_CODE).to_pylist(), rows.column(_REASON).to_pylist(), strict=True)
    screened = Screened(refused={name: Refusal(code, reason) for name, (code, reason) in zip(names, reasons, strict=True)})
    kinds = (ChangeType.SNAPSHOT, ChangeType.SNAPSHOT if task.mode is Mode.APPEND else ChangeType.INSERT)
    shown, kept = (_changes(schema, rows, kind, names, now) for kind in kinds)
    write_changes(Path(task.directory, f"{stem}{CHANGES_SUFFIX}"), schema, kept.to_batches())
    letters = [describe_letters(task.table, batch, schema, screened, now) for batch in shown.to_batches()]
    write_durably(Path(task.directory, f"{stem}{LETTERS_SUFFIX}"), pa.concat_tables(letters))


def _changes(schema: TableSchema, rows: pa.Table, kind: ChangeType, names: Sequence[Name], now: datetime) -> pa.Table:
    count = rows.num_rows
    ordinals = pa.array([ordinal for _, ordinal in names], pa.int64())
    values = [kind.value, names[0][0], now, None, 0, None, None]
    columns = [pa.repeat(pa.scalar(value, field.type), count) for value, field in zip(values, METADATA_FIELDS, strict=True)]
    columns[3], columns[6] = ordinals, rows.column(EXACT).combine_chunks()
    own = [rows.column(at) for at in range(len(schema.columns))]
    return pa.table([*own, *columns], schema=change_schema(schema)).combine_chunks()


def _untouched(rows: pa.Table, schema: TableSchema, part: RefusedRows, changed: ChangedRows) -> pa.Table:
    """Rows under keys that are not among those that changed, which are of the whole table."""
    types = {column.name: column.arrow_type for column in schema.columns}
    files = [pq.read_table(path, coerce_int96_timestamp_unit="us") for path in sorted(Path(changed.keys).glob("*.parquet"))]
    keys = pa.concat_tables(files)
    columns = {name: keys.column(match_column(at)).cast(types[name]) for at, name in enumerate(schema.key)}
    texts = {name: keys.column(match_text_column(at)) for at, name in enumerate(schema.key)}
    named = pa.table({**columns, EXACT: build_exact(texts, keys.num_rows)})
    seen = rows
    for name, text in part.constants:
        seen = seen.append_column(name, pa.repeat(pa.scalar(text, pa.string()), rows.num_rows))
    mine, theirs = key_codes([seen, named], schema.key)
    return rows.filter(pa.array(~np.isin(mine, theirs)))
