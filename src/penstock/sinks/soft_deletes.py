"""The fold of a soft_delete table: a row that is gone stays as it was last, and says since when.

Under each key the target has one row, of the last life that the key had. A row that comes back under its key is no longer deleted.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.change import COMMIT_TIMESTAMP
from penstock.postgres.types.arrays import as_arrow, bitmap
from penstock.sinks.keys import key_codes
from penstock.sinks.layout import DELETED, DELETED_AT, Layout
from penstock.sinks.lives import Lives, firsts_and_lasts
from penstock.sinks.truncates import spelled_out
from penstock.sinks.values import Lookup, Stored, Values, key_table, required


def fold_soft_deletes(changes: pa.Table, layout: Layout, lookup: Lookup) -> tuple[pa.Table, pa.Table]:
    """The keys whose rows go, and the rows that come."""
    changes, lookup = spelled_out(changes, layout, lookup)
    (codes,) = key_codes([changes], layout.key)
    lives = Lives(changes, codes)
    values = Values.plan(layout, lives, np.sort(firsts_and_lasts(codes)[1]))
    stored = Stored.find(changes, values.asked, layout, lookup)
    missing = values.lacking & (stored.met[values.bases] < 0)
    required(~missing | lives.is_delete[values.rows])
    # What is not there need not be flagged.
    values = values.only(~missing)
    return key_table(changes, values.rows, layout.key), _flagged(values, stored)


def _flagged(values: Values, stored: Stored) -> pa.Table:
    rows, lives = values.rows, values.lives
    deleted = pa.Array.from_buffers(pa.bool_(), len(rows), [None, bitmap(lives.is_delete[rows])])
    times = lives.changes.column(COMMIT_TIMESTAMP).take(as_arrow(rows, pa.int64()))
    at = pc.if_else(deleted, times, pa.scalar(None, times.type))
    table = values.build(stored)
    return table.append_column(DELETED, deleted).append_column(DELETED_AT, at).select(values.layout.schema.names)
