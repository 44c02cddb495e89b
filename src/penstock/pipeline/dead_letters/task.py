"""Executor task that finds the rejected changes of one table in an epoch, and writes them to files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

import pyarrow as pa

from penstock.change import COMMIT_VERSION, ORDINAL
from penstock.errors import RowRefusedError
from penstock.pipeline.dead_letters.files import CHANGES_SUFFIX, LETTERS_SUFFIX, write_changes, write_durably
from penstock.pipeline.dead_letters.rejections import (
    DEAD_LETTER_SCHEMA,
    Name,
    Rejection,
    Screened,
    build_dead_letters,
    rejected_values,
    screen,
)
from penstock.schema import TableName, TableSchema
from penstock.sinks.modes import Layout
from penstock.sinks.row_values import View
from penstock.sinks.slice_reader import changes_at, in_order, read_slices
from penstock.spool.reader import FileSlice
from penstock.spool.rows import metadata_column, read_rows
from penstock.transforms.apply import REASON, transform_changes
from penstock.transforms.spark_exchange import read_answers, write_questions
from penstock.transforms.staging import read_source
from penstock.transforms.transform import Fitted

_MAX_ROWS, _MAX_BYTES = 65_536, 64 << 20


@dataclass(frozen=True, slots=True)
class ScreeningTask:
    """The input of `run_screening`: the changes of one table in an epoch. Sent to an executor."""

    table: TableName
    slices: tuple[FileSlice, ...]
    letters: tuple[FileSlice, ...]
    """The table's open dead letters."""
    layout: Layout
    views: Mapping[TableSchema, View]
    reject_inexact: bool
    replays: bool
    """Whether to apply the open dead letters with this epoch."""
    directory: str
    stem: str
    """The start of the names of new dead-letter files."""
    known: Mapping[Name, Rejection] = field(default_factory=dict)
    """Rejections that are known beforehand: those that earlier attempts found, and those of dead letters with
    another schema, which cannot be replayed.
    """
    fitted: Mapping[TableSchema, Fitted] = field(default_factory=dict)
    """The table's transform, which may reject rows, adapted to each source schema. Empty if the table has no
    transform. Otherwise the changes have the source's columns.
    """
    answers: str | None = None
    """The directory with the results of Spark expressions; None if the transform has no Spark expressions."""

    @property
    def applied(self) -> Sequence[FileSlice]:
        """The slices to apply to the target, in order. With `replays`, the open dead letters come first."""
        return (*self.letters, *self.slices) if self.replays else self.slices

    @property
    def shapes(self) -> list[tuple[Fitted, list[FileSlice]]]:
        """The slices of `applied`, divided into runs of adjacent slices with the same schema. Each run has
        its transform.
        """
        return [
            (self.fitted[schema], list(group))
            for schema, group in groupby(self.applied, lambda slice: slice.file.schema)
        ]


@dataclass(frozen=True, slots=True)
class ScreeningReport:
    screened: Screened
    files: tuple[str, ...]
    """Stems of the names of the files with the new dead letters."""


def run_screening(task: ScreeningTask) -> ScreeningReport:
    narrow = _narrowed(task.layout)
    rejections = dict(task.known)
    tables = []
    for group in (task.letters, task.slices):
        read = []
        for slice in group:
            changes = read_slices([slice], narrow, None, task.views)
            has_unreadable = slice.file.counts.unreadable > 0
            rejections |= rejected_values(
                task.table, changes, reject_inexact=task.reject_inexact, has_unreadable=has_unreadable
            )
            read.append(changes)
        tables.append(pa.concat_tables([read_slices([], narrow), *read]))
    letters, changes = in_order(tables[0]), tables[1]
    if any(slice.file.is_old for slice in task.slices):
        changes = in_order(changes)
    source = next((view.source for view in task.views.values() if view.source is not None), None)
    needs_earlier_values = any(each.needs_earlier_values for each in task.fitted.values())
    while True:
        screened = screen(
            changes,
            letters,
            narrow,
            rejections,
            replays=task.replays,
            source=source,
            needs_earlier_values=needs_earlier_values,
        )
        found = _transform_rejections(task, screened) if task.fitted else {}
        if found.keys() <= rejections.keys():
            break
        rejections |= found  # screen again: other changes may need values of the rejected ones
    return ScreeningReport(screened, _written(task, screened) if screened.refused else ())


def ask_screening(task: ScreeningTask) -> list[tuple[int, Fitted, str]]:
    """Write the input of Spark expressions to files. For each run of `ScreeningTask.shapes` that has such
    input, returns the run's index, its transform and the path of its file.
    """
    directory = Path(str(task.answers))
    found = []
    for number, (fitted, group) in enumerate(task.shapes):
        path = (
            None
            if fitted.query is None
            else write_questions(fitted, read_source(group, fitted.source), str(directory), 0)
        )
        if path is not None:
            found.append((number, fitted, path))
    return found


def _transform_rejections(task: ScreeningTask, screened: Screened) -> dict[Name, Rejection]:
    """Return the rejections by the transform of changes that are not excluded yet.

    Spark evaluated its expressions for the excluded changes too. This does not affect the result: a change
    that needs values of an excluded change is excluded itself, or the transform rejects it because it lacks
    these values.
    """
    found: dict[Name, Rejection] = {}
    for number, (fitted, group) in enumerate(task.shapes):
        rows = read_source(group, fitted.source)
        answers = (
            None
            if fitted.query is None
            else read_answers(fitted, f"{task.answers}/{number}", 0, rows.num_rows)
        )
        kept = ~changes_at(rows, screened.excluded)
        refused = transform_changes(
            fitted, rows.filter(pa.array(kept)), None if answers is None else answers.only(kept)
        ).refused
        named = (refused.column(name).to_pylist() for name in (COMMIT_VERSION, ORDINAL, REASON))
        found |= {
            (version, ordinal): Rejection(RowRefusedError.code, reason)
            for version, ordinal, reason in zip(*named, strict=True)
        }
    return found


def _narrowed(layout: Layout) -> Layout:
    """Return the layout with only the key columns, which identify a row. A layout without a key is returned
    unchanged, because all columns together identify its rows.
    """
    return (
        Layout(pa.schema([layout.columns.field(name) for name in layout.key]), layout.key, layout.mode)
        if layout.key
        else layout
    )


def _written(task: ScreeningTask, screened: Screened) -> tuple[str, ...]:
    """Write two files for each schema in which changes were rejected: dead letters for operators, and changes
    for replays. Returns the stems of the file names.
    """
    found: dict[TableSchema, list[pa.RecordBatch]] = {}
    for slice in task.slices:
        for batch in _refused_rows(slice, screened.refused):
            found.setdefault(slice.file.schema, []).append(batch)
    now = datetime.now(UTC)
    stems = []
    for at, (schema, batches) in enumerate(found.items()):
        stem = f"{task.stem}-{at}"
        letters = [build_dead_letters(task.table, batch, schema, screened, now) for batch in batches]
        write_changes(Path(task.directory, f"{stem}{CHANGES_SUFFIX}"), schema, batches)
        write_durably(
            Path(task.directory, f"{stem}{LETTERS_SUFFIX}"),
            pa.concat_tables([DEAD_LETTER_SCHEMA.empty_table(), *letters]),
        )
        stems.append(stem)
    return tuple(stems)


def _refused_rows(slice: FileSlice, names: Mapping[Name, Rejection]) -> list[pa.RecordBatch]:
    low, high = slice.file.min_position.value, slice.file.max_position.value
    if not any(low <= version <= high for version, _ in names):
        return []
    kept = []
    for batch in read_rows(slice, _MAX_ROWS, _MAX_BYTES):
        versions, ordinals = (
            metadata_column(batch, slice, name).to_pylist() for name in (COMMIT_VERSION, ORDINAL)
        )
        wanted = [name in names for name in zip(versions, ordinals, strict=True)]
        if any(wanted):
            kept.append(batch.filter(pa.array(wanted)))
    return kept
