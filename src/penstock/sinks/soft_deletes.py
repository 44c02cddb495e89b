"""The fold of a soft_delete table: a row that is gone stays as it was last, and says since when.

Under each key the target has one row, of the last life that the key had. A row that comes back under its key is no longer deleted.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.change import COMMIT_TIMESTAMP
from penstock.postgres.types.arrays import as_arrow, bitmap
from penstock.sinks.gathering import NewRows
from penstock.sinks.keys import key_codes
from penstock.sinks.layout import DELETED, DELETED_AT, Layout
from penstock.sinks.lives import Lives, Rows, firsts_and_lasts
from penstock.sinks.truncates import spelled_out
from penstock.sinks.values import Lookup, Stored, Values, key_table, required


def fold_soft_deletes(changes: pa.Table, layout: Layout, lookup: Lookup) -> tuple[pa.Table, NewRows]:
    """The keys whose rows go, and the rows that come."""
    changes, lookup = spelled_out(changes, layout, lookup)
    (codes,) = key_codes([changes], layout.key)
    lives = Lives(changes, codes)
    values = Values.plan(layout, lives, np.sort(firsts_and_lasts(codes)[1]))
    former = Values.plan(layout, lives, _ends(values, codes))
    stored = _find(codes, values, former, lookup)
    missing = values.lacking & (stored.met[values.bases] < 0)
    required(~missing | lives.is_delete[values.rows])
    # What is not there need not be flagged; but what was there before it, under its key, is gone since then.
    flagged = [
        values.only(~missing),
        former.only(np.isin(codes[former.rows], codes[values.rows[missing]]) & (stored.met[former.bases] >= 0)),
    ]
    return (
        pa.concat_tables([key_table(changes, each.rows, layout.key) for each in flagged]),
        reduce(NewRows.__add__, (each.new_rows(stored, layout.schema, _flagged) for each in flagged)),
    )


def _find(codes: Rows, values: Values, former: Values, lookup: Lookup) -> Stored:
    """What the target has for both, each key asked for once."""
    asked = values.asked
    more = former.asked
    asked = np.concatenate([asked, more[~np.isin(codes[more], codes[asked])]])
    stored = Stored.find(values.lives.changes, asked, values.layout, lookup)
    by_code = np.full(int(codes.max()) + 1 if len(codes) else 0, -1)
    by_code[codes[asked]] = stored.met[asked]
    stored.met[more] = by_code[codes[more]]
    return stored


def _ends(values: Values, codes: Rows) -> Rows:
    """Where the rows end that the target has under keys of which a later row came from elsewhere, lacks values, and is gone too.

    The target has nothing of such a row if a filter left it out where it was.
    """
    deletes = np.flatnonzero(values.lives.is_delete)
    first = np.full(int(codes.max()) + 1 if len(codes) else 0, -1)
    first[codes[deletes[::-1]]] = deletes[::-1]
    later = values.rows[values.lacking & values.lives.is_delete[values.rows]]
    ends = first[codes[later]]
    return np.compress(ends != later, ends)


def _flagged(values: Values, table: pa.Table) -> pa.Table:
    rows, lives = values.rows, values.lives
    deleted = pa.Array.from_buffers(pa.bool_(), len(rows), [None, bitmap(lives.is_delete[rows])])
    times = lives.changes.column(COMMIT_TIMESTAMP).take(as_arrow(rows, pa.int64()))
    at = pc.if_else(deleted, times, pa.scalar(None, times.type))
    return table.append_column(DELETED, deleted).append_column(DELETED_AT, at).select(values.layout.schema.names)
