"""Executor tasks of an epoch into Postgres: reduce and apply the changes in one transaction, or find the
changes that the target rejects.

A task uses one connection. It stages only the keys of rows to delete, deletes these rows, and then copies the
new rows into the table. It locks the position at the start and writes it at the end, so a late attempt sees
that the position has moved, and does nothing. A schema change is applied first, in the same transaction.

The server names a violated constraint, but never all rows that violate it. To find all rejected rows, the
epoch is tried in a transaction that is rolled back: rows are tried in halves until each rejected row is
isolated. A rejected row is reported as the last change of its key.

Deferred constraints are checked at the end of the transaction, and rows may depend on each other until then.
In a table with such constraints, a row is tried together with the deletion of the row that it replaces, and
rejected rows are tried again while others succeed. The result is correct if all rejected rows become dead
letters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from penstock.arrow import distinct
from penstock.change import COMMIT_VERSION, ORDINAL, ChangeType
from penstock.errors import SinkError
from penstock.position import Position
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.target.ddl import Alteration, alter_columns, empty_table
from penstock.postgres.target.rows import (
    Wanted,
    delete_counted,
    delete_keys,
    find_rows,
    has_deferred_checks,
    insert_rows,
    try_rows,
    try_writing,
)
from penstock.postgres.target.state import (
    AppliedRecord,
    lock_position,
    record_evolved,
    record_position,
    target_transaction,
)
from penstock.schema import TableName, TableSchema
from penstock.sinks.fold import COUNT, Outcome, expand_source_truncates, fold, source_column
from penstock.sinks.keys import Codes, key_codes
from penstock.sinks.modes import Layout
from penstock.sinks.postgres.rows import in_key_order, parse_rows, stored_names, text_blocks
from penstock.sinks.row_chains import NewRows, ints_of, is_kind, take
from penstock.sinks.row_values import Lookup, View
from penstock.sinks.slice_reader import Part, read_groups, read_slices
from penstock.spool.reader import FileSlice


@dataclass(frozen=True, slots=True)
class EpochTask:
    """The changes of one table after the position `start`, up to `end`.

    The changes are reduced part by part, which limits memory. If `parts` is empty, every change adds a
    separate row, and one row group is reduced at a time.
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
    """For a schema change: the new record of the table, and the change of its columns. `layout` is then the
    new layout.
    """


def apply_epoch(task: EpochTask) -> None:
    with target_transaction(task.address, f"applying changes to {task.place}") as connection:
        applied = lock_position(connection, task.place, task.pipeline)
        if applied is not None and applied >= task.end:
            return  # another attempt has applied this epoch
        if applied != task.start:
            raise SinkError(f"{task.place} is at {applied}, but was at {task.start} when the epoch began")
        if task.evolved is not None:
            record, alteration = task.evolved
            alter_columns(connection, task.place, alteration)
            record_evolved(connection, task.place, record)
        for index, changes in enumerate(read_runs(task)):
            lookup = lookup_in(connection, task)
            spelled = expand_source_truncates(
                changes, task.layout, source_column(task.views.values()), lookup
            )
            outcome = fold(spelled, task.layout, lookup)
            write_outcome(connection, task.place, task.layout, outcome, is_first=index == 0)
        record_position(connection, task.place, task.pipeline, task.end)


def read_runs(task: EpochTask) -> Iterator[pa.Table]:
    """Read the changes, one table for each part that is applied separately."""
    if not task.parts:
        yield from read_groups(task.slices, task.layout, task.views)
        return
    yield from (read_slices(task.slices, task.layout, part, task.views) for part in task.parts)


def write_outcome(
    connection: Connection, place: TableName, layout: Layout, outcome: Outcome, *, is_first: bool = True
) -> None:
    """Write the outcome of one part to the table. If the epoch empties the table, `emptied` is true in the
    outcomes of all parts, and the first part empties it.
    """
    if outcome.emptied and is_first:
        empty_table(connection, place)
    if not outcome.emptied and outcome.deleted.num_rows:
        if layout.identity:
            delete_keys(connection, place, layout.identity, text_blocks(outcome.deleted, layout.identity))
        else:
            names = layout.columns.names
            delete_counted(connection, place, names, text_blocks(outcome.deleted, [*names, COUNT]))
    names = stored_names(layout)
    for rows in outcome.new.slices():
        insert_rows(connection, place, names, text_blocks(in_key_order(rows, layout.identity), names))


def lookup_in(connection: Connection, task: EpochTask) -> Lookup:
    """Return the `Lookup` for the table in this transaction. No other process writes to the table."""
    layout = task.layout
    flag = layout.mode.current_flag
    current = {} if flag is None else {flag.column: "t" if flag.value else "f"}

    def look_up(keys: pa.Table | None) -> pa.Table:
        names = (
            layout.key
            if keys is None
            else [name for name in layout.columns.names if name in keys.column_names]
        )
        wanted = Wanted(stored_names(layout), names, current)
        blocks = None if keys is None else text_blocks(keys, names)
        return parse_rows(find_rows(connection, task.place, wanted, blocks), layout)

    return look_up


Refused = dict[tuple[int, int], str]
"""The server's reasons for rejecting changes, by commit version and ordinal."""


class _Undone(Exception):
    """Rolls the transaction back."""


def find_rejected(task: EpochTask) -> Refused:
    refused: Refused = {}
    try:
        with target_transaction(task.address, f"trying changes of {task.place}") as connection:
            if task.evolved is not None:
                alter_columns(connection, task.place, task.evolved[1])
            tried = _tried_late if has_deferred_checks(connection, task.place) else _tried
            for index, changes in enumerate(read_runs(task)):
                lookup = lookup_in(connection, task)
                spelled = expand_source_truncates(
                    changes, task.layout, source_column(task.views.values()), lookup
                )
                outcome = fold(spelled, task.layout, lookup)
                for row, reason in tried(connection, task, outcome, is_first=index == 0):
                    refused[_last_change(task, row, changes)] = reason
            raise _Undone
    except _Undone:
        return refused


def _tried(
    connection: Connection, task: EpochTask, outcome: Outcome, *, is_first: bool
) -> Iterator[tuple[pa.Table, str]]:
    """Yield each rejected row, with the server's reason. Afterwards the table has all other rows."""
    names, rows = stored_names(task.layout), outcome.rows
    nothing = Outcome(outcome.emptied, outcome.deleted, NewRows(rows.schema))
    write_outcome(connection, task.place, task.layout, nothing, is_first=is_first)
    waiting = [rows] if rows.num_rows else []
    while waiting:
        part = waiting.pop()
        reason = try_rows(connection, task.place, names, text_blocks(part, names))
        if reason is not None and part.num_rows == 1:
            yield part, reason
        elif reason is not None:
            half = part.num_rows // 2
            waiting += [part.slice(half), part.slice(0, half)]


def _tried_late(
    connection: Connection, task: EpochTask, outcome: Outcome, *, is_first: bool
) -> Iterator[tuple[pa.Table, str]]:
    """Like `_tried`, for tables with deferred constraints. Rejected rows are tried again after others were
    written, until none of them succeeds.
    """
    rows, deleted, identity = outcome.rows, outcome.deleted, task.layout.identity
    if outcome.emptied or not identity:
        write_outcome(
            connection,
            task.place,
            task.layout,
            Outcome(outcome.emptied, deleted, NewRows(rows.schema)),
            is_first=is_first,
        )
        deleted = deleted.slice(0, 0)
    codes, deleted_codes = (
        key_codes([rows, deleted], identity)
        if identity
        else (np.arange(rows.num_rows), np.empty(0, np.int64))
    )

    def why_not(chosen: Codes) -> str | None:
        own = Outcome(
            emptied=False,
            deleted=_only(deleted, deleted_codes, chosen),
            new=NewRows.of(_only(rows, codes, chosen)),
        )
        return try_writing(connection, lambda: write_outcome(connection, task.place, task.layout, own))

    waiting = distinct(np.concatenate([codes, deleted_codes]))
    while len(failed := dict(_failing(why_not, waiting))) not in (0, len(waiting)):
        waiting = np.array(sorted(failed), np.int64)
    # Deleting a row is never rejected.
    yield from (
        (_only(rows, codes, np.array([code])), reason) for code, reason in failed.items() if code in codes
    )


def _failing(why_not: Callable[[Codes], str | None], codes: Codes) -> Iterator[tuple[int, str]]:
    waiting = [codes] if len(codes) else []
    while waiting:
        part = waiting.pop()
        reason = why_not(part)
        if reason is not None and len(part) == 1:
            yield int(part[0]), reason
        elif reason is not None:
            half = len(part) // 2
            waiting += [part[half:], part[:half]]


def _only(table: pa.Table, codes: Codes, chosen: Codes) -> pa.Table:
    return take(table, np.flatnonzero(np.isin(codes, chosen)))


def _last_change(task: EpochTask, row: pa.Table, changes: pa.Table) -> tuple[int, int]:
    names = (
        [COMMIT_VERSION, ORDINAL]
        if COMMIT_VERSION in row.column_names
        else list(task.layout.key or task.layout.columns.names)
    )
    (code,), codes = key_codes([row, changes], names)
    deletes = is_kind(changes, ChangeType.DELETE) | is_kind(changes, ChangeType.TRUNCATE)
    last = take(changes, np.flatnonzero((codes == code) & ~deletes)[-1:])
    return int(ints_of(last.column(COMMIT_VERSION))[0]), int(ints_of(last.column(ORDINAL))[0])
