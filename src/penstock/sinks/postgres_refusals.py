"""Which changes of an epoch a Postgres target refuses: somebody put a constraint on the table, or its types are others by now.

The server names the rule, and never all rows that break it. So the epoch is tried in a transaction that is undone, its rows in halves until
those that are refused stand alone. A row of the target is the last of the changes under its key.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from penstock.change import COMMIT_VERSION, ORDINAL, ChangeType
from penstock.postgres.applied import target_transaction
from penstock.postgres.connection import Connection
from penstock.postgres.target_ddl import alter_columns
from penstock.postgres.target_tables import try_rows
from penstock.sinks.fold import Outcome, fold
from penstock.sinks.keys import key_codes
from penstock.sinks.lives import ints_of, is_kind
from penstock.sinks.postgres_epoch import EpochTask, lookup_in, read_runs, write_outcome
from penstock.sinks.postgres_rows import stored_names, text_blocks
from penstock.sinks.source_truncates import source_column, spelled_by_source
from penstock.sinks.values import take

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
            for index, changes in enumerate(read_runs(task)):
                lookup = lookup_in(connection, task)
                spelled = spelled_by_source(changes, task.layout, source_column(task.views.values()), lookup)
                outcome = fold(spelled, task.layout, lookup)
                nothing = Outcome(outcome.emptied, outcome.gone, outcome.rows.slice(0, 0))
                write_outcome(connection, task.place, task.layout, nothing, is_first=index == 0)
                for row, reason in _tried(connection, task, outcome.rows):
                    refused[_last_change(task, row, changes)] = reason
            raise _Undone
    except _Undone:
        return refused


def _tried(connection: Connection, task: EpochTask, rows: pa.Table) -> Iterator[tuple[pa.Table, str]]:
    """The rows that are refused, each by itself; the others are in the table then."""
    names = stored_names(task.layout)
    waiting = [rows] if rows.num_rows else []
    while waiting:
        part = waiting.pop()
        reason = try_rows(connection, task.place, names, text_blocks(part, names))
        if reason is not None and part.num_rows == 1:
            yield part, reason
        elif reason is not None:
            half = part.num_rows // 2
            waiting += [part.slice(half), part.slice(0, half)]


def _last_change(task: EpochTask, row: pa.Table, changes: pa.Table) -> tuple[int, int]:
    names = [COMMIT_VERSION, ORDINAL] if COMMIT_VERSION in row.column_names else list(task.layout.key or task.layout.columns.names)
    (code,), codes = key_codes([row, changes], names)
    deletes = is_kind(changes, ChangeType.DELETE) | is_kind(changes, ChangeType.TRUNCATE)
    last = take(changes, np.flatnonzero((codes == code) & ~deletes)[-1:])
    return int(ints_of(last.column(COMMIT_VERSION))[0]), int(ints_of(last.column(ORDINAL))[0])
