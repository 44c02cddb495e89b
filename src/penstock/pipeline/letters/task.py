"""What an executor does about letters: it reads an epoch's changes of a table, and writes down those that are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

import pyarrow as pa

from penstock.change import COMMIT_VERSION, ORDINAL
from penstock.errors import RowRefusedError
from penstock.pipeline.letters.files import write_changes, write_durably
from penstock.pipeline.letters.folding import CHANGES_SUFFIX, LETTERS_SUFFIX
from penstock.pipeline.letters.letter import LETTERS, describe_letters
from penstock.pipeline.letters.screening import Name, Refusal, Screened, refused_values, screen
from penstock.schema import TableName, TableSchema
from penstock.sinks.layout import Layout
from penstock.sinks.slice_reader import in_order, named_changes, read_slices
from penstock.sinks.views import View
from penstock.spool.range import FileSlice
from penstock.spool.rows import metadata_column, read_rows
from penstock.transforms.applying import transform_changes
from penstock.transforms.asking import read_answers, write_questions
from penstock.transforms.outcome import REASON
from penstock.transforms.staging import read_source
from penstock.transforms.transform import Fitted

_MAX_ROWS, _MAX_BYTES = 65_536, 64 << 20


@dataclass(frozen=True, slots=True)
class ScreeningTask:
    """Travels to an executor."""

    table: TableName
    slices: tuple[FileSlice, ...]
    letters: tuple[FileSlice, ...]
    """Those of the table that are open."""
    layout: Layout
    views: Mapping[TableSchema, View]
    refuse_inexact: bool
    replays: bool
    directory: str
    stem: str
    """For the names of files of new letters."""
    known: Mapping[Name, Refusal] = field(default_factory=dict)
    """What has been found to be refused already, by whoever else looked."""
    fitted: Mapping[TableSchema, Fitted] = field(default_factory=dict)
    """What is done later to rows of each shape, which may refuse some. The layout is the source's then."""
    answers: str | None = None
    """Where Spark's answers are, if it was asked."""

    @property
    def applied(self) -> Sequence[FileSlice]:
        """What would reach the target, if nothing were refused."""
        return (*self.letters, *self.slices) if self.replays else self.slices

    @property
    def shapes(self) -> list[tuple[Fitted, list[FileSlice]]]:
        """The same in runs of one shape, in order."""
        return [(self.fitted[schema], list(group)) for schema, group in groupby(self.applied, lambda slice: slice.file.schema)]


@dataclass(frozen=True, slots=True)
class ScreeningReport:
    screened: Screened
    files: tuple[str, ...]


def run_screening(task: ScreeningTask) -> ScreeningReport:
    narrow = _narrowed(task.layout)
    refusals = dict(task.known)
    tables = []
    for group in (task.letters, task.slices):
        read = []
        for slice in group:
            changes = read_slices([slice], narrow, None, task.views)
            has_unreadable = slice.file.counts.unreadable > 0
            refusals |= refused_values(task.table, changes, refuse_inexact=task.refuse_inexact, has_unreadable=has_unreadable)
            read.append(changes)
        tables.append(pa.concat_tables([read_slices([], narrow), *read]))
    letters, changes = in_order(tables[0]), tables[1]
    if any(slice.file.is_old for slice in task.slices):
        changes = in_order(changes)
    source = next((view.source for view in task.views.values() if view.source is not None), None)
    looks_back = any(each.looks_back for each in task.fitted.values())
    while True:
        screened = screen(changes, letters, narrow, refusals, replays=task.replays, source=source, looks_back=looks_back)
        found = _judged(task, screened) if task.fitted else {}
        if found.keys() <= refusals.keys():
            break
        refusals |= found  # without them, others may lack values
    return ScreeningReport(screened, _written(task, screened) if screened.refused else ())


def ask_screening(task: ScreeningTask) -> list[tuple[int, Fitted, str]]:
    """Write what Spark needs to know; gives, for each run of one shape that it is asked about, its number and the file."""
    directory = Path(str(task.answers))
    found = []
    for number, (fitted, group) in enumerate(task.shapes):
        path = None if fitted.query is None else write_questions(fitted, read_source(group, fitted.source), str(directory), 0)
        if path is not None:
            found.append((number, fitted, path))
    return found


def _judged(task: ScreeningTask, screened: Screened) -> dict[Name, Refusal]:
    """What the transform refuses of all that is left.

    Spark was asked about all of them. Where one is left out that another had a value from, that other one is refused, or lacks the value.
    """
    found: dict[Name, Refusal] = {}
    for number, (fitted, group) in enumerate(task.shapes):
        rows = read_source(group, fitted.source)
        answers = None if fitted.query is None else read_answers(fitted, f"{task.answers}/{number}", 0, rows.num_rows)
        kept = ~named_changes(rows, screened.left_out)
        refused = transform_changes(fitted, rows.filter(pa.array(kept)), None if answers is None else answers.only(kept)).refused
        named = (refused.column(name).to_pylist() for name in (COMMIT_VERSION, ORDINAL, REASON))
        found |= {(version, ordinal): Refusal(RowRefusedError.code, reason) for version, ordinal, reason in zip(*named, strict=True)}
    return found


def _narrowed(layout: Layout) -> Layout:
    """Rows with a key are told by that; the other columns need not be read."""
    return Layout(pa.schema([layout.columns.field(name) for name in layout.key]), layout.key, layout.mode) if layout.key else layout


def _written(task: ScreeningTask, screened: Screened) -> tuple[str, ...]:
    """One pair of files for each shape that the table had: the letters for people, the changes for a replay."""
    found: dict[TableSchema, list[pa.RecordBatch]] = {}
    for slice in task.slices:
        for batch in _refused_rows(slice, screened.refused):
            found.setdefault(slice.file.schema, []).append(batch)
    now = datetime.now(UTC)
    stems = []
    for at, (schema, batches) in enumerate(found.items()):
        stem = f"{task.stem}-{at}"
        letters = [describe_letters(task.table, batch, schema, screened, now) for batch in batches]
        write_changes(Path(task.directory, f"{stem}{CHANGES_SUFFIX}"), schema, batches)
        write_durably(Path(task.directory, f"{stem}{LETTERS_SUFFIX}"), pa.concat_tables([LETTERS.empty_table(), *letters]))
        stems.append(stem)
    return tuple(stems)


def _refused_rows(slice: FileSlice, names: Mapping[Name, Refusal]) -> list[pa.RecordBatch]:
    low, high = slice.file.min_position.value, slice.file.max_position.value
    if not any(low <= version <= high for version, _ in names):
        return []
    kept = []
    for batch in read_rows(slice, _MAX_ROWS, _MAX_BYTES):
        versions, ordinals = (metadata_column(batch, slice, name).to_pylist() for name in (COMMIT_VERSION, ORDINAL))
        wanted = [name in names for name in zip(versions, ordinals, strict=True)]
        if any(wanted):
            kept.append(batch.filter(pa.array(wanted)))
    return kept
