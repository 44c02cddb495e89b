"""What an executor does for an epoch of a Delta table: it finds where the rows that go are, and writes a file of those that come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pyarrow as pa

from penstock.schema import TableSchema
from penstock.sinks.base import SnapshotFile, SnapshotPlace
from penstock.sinks.delta.deletions import REPORTED_BYTES, Deletions, report
from penstock.sinks.delta.rows import FoundRows, TableFiles, all_rows, find_counted, find_rows, read_rows
from penstock.sinks.fold import COUNT, Outcome, fold
from penstock.sinks.gathering import StoredRows
from penstock.sinks.layout import CURRENT, Layout, Mode, known_columns
from penstock.sinks.lives import bools_of, ints_of
from penstock.sinks.row_files import removed_on_failure, write_batches
from penstock.sinks.slice_reader import Part, read_groups, read_slices
from penstock.sinks.source_truncates import source_column, spelled_by_source
from penstock.sinks.views import View
from penstock.spool.range import FileSlice


@dataclass(frozen=True, slots=True)
class EpochTask:
    """A part of an epoch. Travels to an executor."""

    slices: tuple[FileSlice, ...]
    part: Part | None
    layout: Layout
    adds_only: bool
    table: TableFiles
    place: SnapshotPlace
    index: int
    views: Mapping[TableSchema, View] = field(default_factory=dict)
    reported_bytes: int = REPORTED_BYTES
    """Positions of deleted rows that the task may report to the driver."""


@dataclass(frozen=True, slots=True)
class EpochPart:
    """What came of a task."""

    emptied: bool
    deletions: Deletions
    file: SnapshotFile


def run_part(task: EpochTask) -> EpochPart:
    """What an executor does."""
    if task.adds_only:
        return EpochPart(False, Deletions(), _write(task, read_groups(task.slices, task.layout, task.views)))
    lookup = partial(_look_up, task)
    found = read_slices(task.slices, task.layout, task.part, task.views)
    changes = spelled_by_source(found, task.layout, source_column(task.views.values()), lookup)
    outcome = fold(changes, task.layout, lookup)
    gone = [] if outcome.emptied else _gone(task, outcome)
    file = _write(task, outcome.new.slices())
    with removed_on_failure(Path(task.place.directory) / file.name):
        return EpochPart(outcome.emptied, report(gone, task.place, task.index, task.reported_bytes), file)


def _look_up(task: EpochTask, keys: pa.Table | None) -> StoredRows:
    table, layout = task.table, task.layout
    asked = [] if keys is None else [name for name in layout.columns.names if name in keys.column_names]
    found = all_rows(table) if keys is None else find_rows(table, keys, asked)
    rows = read_rows(table, found, known_columns(layout, asked))
    return rows.only(bools_of(rows.known.column(CURRENT))) if layout.mode is Mode.HISTORY else rows


def _gone(task: EpochTask, outcome: Outcome) -> list[FoundRows]:
    identity = task.layout.identity
    if identity or not outcome.gone.num_rows:
        return find_rows(task.table, outcome.gone, identity)
    return find_counted(task.table, outcome.gone, task.layout.columns.names, ints_of(outcome.gone.column(COUNT)))


def _write(task: EpochTask, rows: Iterable[pa.Table]) -> SnapshotFile:
    batches = (batch for each in rows for batch in _completed(each, task.table.schema).to_batches())
    return write_batches(batches, task.place, task.index)


def _completed(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """With the columns of the table, in their order; those that somebody else added are null."""
    columns = [
        rows.column(field.name) if field.name in rows.column_names else pa.chunked_array([pa.nulls(rows.num_rows, field.type)])
        for field in schema
    ]
    return pa.table(columns, schema=schema)
