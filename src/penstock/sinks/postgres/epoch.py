"""What an executor does for an epoch into Postgres: fold the changes of a table, and bring it to the epoch's end in one transaction.

Everything happens on one connection, so there is nothing to stage but the keys of rows that go: deleted first, then the new rows are copied
right into the table. The position is locked at the beginning and written at the end. An attempt that comes late finds that it has moved,
and does nothing. If the table's columns change for these changes, they do so first, in the same transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import SinkError
from penstock.position import Position
from penstock.postgres.applied import AppliedRecord, lock_position, record_evolved, record_position, target_transaction
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.target_ddl import Alteration, alter_columns, empty_table
from penstock.postgres.target_tables import Wanted, delete_counted, delete_keys, find_rows, insert_rows
from penstock.schema import TableName, TableSchema
from penstock.sinks.fold import COUNT, Outcome, fold
from penstock.sinks.layout import CURRENT, Layout, Mode
from penstock.sinks.postgres.rows import in_key_order, parse_rows, stored_names, text_blocks
from penstock.sinks.slice_reader import Part, read_groups, read_slices
from penstock.sinks.source_truncates import source_column, spelled_by_source
from penstock.sinks.values import Lookup
from penstock.sinks.views import View
from penstock.spool.range import FileSlice


@dataclass(frozen=True, slots=True)
class EpochTask:
    """The changes of one table in `(start, end]`.

    Applied part by part, so that the fold has to hold one of them; without `parts` a row group at a time, if every change concerns a row of
    its own.
    """

    address: SourceAddress
    pipeline: str
    place: TableName
    layout: Layout
    slices: tuple[FileSlice, ...]
    views: Mapping[TableSchema, View]
    parts: tuple[Part | None, ...]
    start: Position
    end: Position
    evolved: tuple[AppliedRecord, Alteration] | None
    """What the table becomes, and how; `layout` is that of the table as it is then."""


def apply_epoch(task: EpochTask) -> None:
    with target_transaction(task.address, f"applying changes to {task.place}") as connection:
        applied = lock_position(connection, task.place, task.pipeline)
        if applied is not None and applied >= task.end:
            return  # another attempt at this was first
        if applied != task.start:
            raise SinkError(f"{task.place} is at {applied}, and was at {task.start} when the epoch began")
        if task.evolved is not None:
            record, alteration = task.evolved
            alter_columns(connection, task.place, alteration)
            record_evolved(connection, task.place, record)
        for index, changes in enumerate(read_runs(task)):
            lookup = lookup_in(connection, task)
            spelled = spelled_by_source(changes, task.layout, source_column(task.views.values()), lookup)
            outcome = fold(spelled, task.layout, lookup)
            write_outcome(connection, task.place, task.layout, outcome, is_first=index == 0)
        record_position(connection, task.place, task.pipeline, task.end)


def read_runs(task: EpochTask) -> Iterator[pa.Table]:
    """The changes, in the runs in which they are taken."""
    if not task.parts:
        yield from read_groups(task.slices, task.layout, task.views)
        return
    yield from (read_slices(task.slices, task.layout, part, task.views) for part in task.parts)


def write_outcome(connection: Connection, place: TableName, layout: Layout, outcome: Outcome, *, is_first: bool = True) -> None:
    """Every part of an epoch that empties the table knows of it; the first does it."""
    if outcome.emptied and is_first:
        empty_table(connection, place)
    if not outcome.emptied and outcome.gone.num_rows:
        if layout.identity:
            delete_keys(connection, place, layout.identity, text_blocks(outcome.gone, layout.identity))
        else:
            names = layout.columns.names
            delete_counted(connection, place, names, text_blocks(outcome.gone, [*names, COUNT]))
    names = stored_names(layout)
    for rows in outcome.new.slices():
        insert_rows(connection, place, names, text_blocks(in_key_order(rows, layout.identity), names))


def lookup_in(connection: Connection, task: EpochTask) -> Lookup:
    """What the table has now: the transaction sees it, and nobody else writes it."""
    layout = task.layout
    current = {CURRENT: "t"} if layout.mode is Mode.HISTORY else {}

    def look_up(keys: pa.Table | None) -> pa.Table:
        names = layout.key if keys is None else [name for name in layout.columns.names if name in keys.column_names]
        wanted = Wanted(stored_names(layout), names, current)
        blocks = None if keys is None else text_blocks(keys, names)
        return parse_rows(find_rows(connection, task.place, wanted, blocks), layout)

    return look_up
