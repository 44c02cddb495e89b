"""Which changes of an epoch a Postgres target refuses: somebody put a constraint on the table, or its types are others by now.

The server names the rule, and never all rows that break it. So the epoch is tried in a transaction that is undone, its rows in halves until
those that are refused stand alone. A row of the target is the last of the changes under its key.

A constraint that is deferred is looked at when the transaction ends, and rows may need one another until then. There each row is tried
together with what it takes the place of, on a table that is otherwise as it was, which is what comes of it if others are put aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from penstock.change import COMMIT_VERSION, ORDINAL, ChangeType
from penstock.postgres.applied import target_transaction
from penstock.postgres.connection import Connection
from penstock.postgres.target_ddl import alter_columns
from penstock.postgres.target_tables import looks_late, try_rows, try_writing
from penstock.postgres.types.arrays import distinct
from penstock.sinks.fold import Outcome, fold
from penstock.sinks.gathering import NewRows, take
from penstock.sinks.keys import Codes, key_codes
from penstock.sinks.lives import ints_of, is_kind
from penstock.sinks.postgres.epoch import EpochTask, lookup_in, read_runs, write_outcome
from penstock.sinks.postgres.rows import stored_names, text_blocks
from penstock.sinks.source_truncates import source_column, spelled_by_source

Refused = dict[tuple[int, int], str]
"""By commit and ordinal, what the server has against it."""


class _Undone(Exception):
    """Ends the transaction without a trace."""


def find_refused(task: EpochTask) -> Refused:
    refused: Refused = {}
    try:
        with target_transaction(task.address, f"trying changes of {task.place}") as connection:
            if task.evolved is not None:
                alter_columns(connection, task.place, task.evolved[1])
            tried = _tried_late if looks_late(connection, task.place) else _tried
            for index, changes in enumerate(read_runs(task)):
                lookup = lookup_in(connection, task)
                spelled = spelled_by_source(changes, task.layout, source_column(task.views.values()), lookup)
                outcome = fold(spelled, task.layout, lookup)
                for row, reason in tried(connection, task, outcome, is_first=index == 0):
                    refused[_last_change(task, row, changes)] = reason
            raise _Undone
    except _Undone:
        return refused


def _tried(connection: Connection, task: EpochTask, outcome: Outcome, *, is_first: bool) -> Iterator[tuple[pa.Table, str]]:
    """The rows that are refused, each by itself; the others are in the table then."""
    names, rows = stored_names(task.layout), outcome.rows
    nothing = Outcome(outcome.emptied, outcome.gone, NewRows(rows.schema))
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


def _tried_late(connection: Connection, task: EpochTask, outcome: Outcome, *, is_first: bool) -> Iterator[tuple[pa.Table, str]]:
    """The same under constraints that may be deferred. What fails is tried again for as long as others have made way for it."""
    rows, gone, identity = outcome.rows, outcome.gone, task.layout.identity
    if outcome.emptied or not identity:
        write_outcome(connection, task.place, task.layout, Outcome(outcome.emptied, gone, NewRows(rows.schema)), is_first=is_first)
        gone = gone.slice(0, 0)
    codes, gone_codes = key_codes([rows, gone], identity) if identity else (np.arange(rows.num_rows), np.empty(0, np.int64))

    def why_not(chosen: Codes) -> str | None:
        own = Outcome(emptied=False, gone=_only(gone, gone_codes, chosen), new=NewRows.of(_only(rows, codes, chosen)))
        return try_writing(connection, lambda: write_outcome(connection, task.place, task.layout, own))

    waiting = distinct(np.concatenate([codes, gone_codes]))
    while len(failed := dict(_failing(why_not, waiting))) not in (0, len(waiting)):
        waiting = np.array(sorted(failed), np.int64)
    # That a row goes is never refused.
    yield from ((_only(rows, codes, np.array([code])), reason) for code, reason in failed.items() if code in codes)


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
    names = [COMMIT_VERSION, ORDINAL] if COMMIT_VERSION in row.column_names else list(task.layout.key or task.layout.columns.names)
    (code,), codes = key_codes([row, changes], names)
    deletes = is_kind(changes, ChangeType.DELETE) | is_kind(changes, ChangeType.TRUNCATE)
    last = take(changes, np.flatnonzero((codes == code) & ~deletes)[-1:])
    return int(ints_of(last.column(COMMIT_VERSION))[0]), int(ints_of(last.column(ORDINAL))[0])
