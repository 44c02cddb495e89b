"""The fold of a history: each row of the source as it was from one commit to another.

There is one version for each key and commit that leaves a row under it, whatever the transaction did to it on the way; it is valid from
that commit to the next one that touches the key. So versions of a key never overlap, and have no gap but while the key was gone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from penstock.change import COMMIT_TIMESTAMP, COMMIT_VERSION
from penstock.postgres.types.arrays import Bools, bitmap
from penstock.sinks.gathering import NewRows
from penstock.sinks.keys import key_codes
from penstock.sinks.layout import CURRENT, VALID_FROM, VALID_FROM_TIME, VALID_TO, VALID_TO_TIME, Layout
from penstock.sinks.lives import Lives, Rows, differs, ints_of
from penstock.sinks.truncates import spelled_out
from penstock.sinks.values import Lookup, Stored, Values, key_table, required


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """The commits that touch each key: the last change of each, key by key, in order."""

    rows: Rows
    opens: Bools
    """Whether it is the key's first."""
    first: Rows
    """The first change of each key."""

    @classmethod
    def of(cls, codes: Rows, versions: Rows) -> _Steps:
        order = np.argsort(codes, kind="stable")
        begins = differs(codes[order])
        ends = np.ones(len(order), np.bool_)
        ends[:-1] = begins[1:] | differs(versions[order])[1:]
        rows = order[ends]
        return cls(rows, differs(codes[rows]), order[begins])

    @property
    def following(self) -> Rows:
        """For each step the next of the same key; -1 if it is the last."""
        following = np.full(len(self.rows), -1)
        following[:-1] = np.where(self.opens[1:], -1, self.rows[1:])
        return following


def fold_versions(changes: pa.Table, layout: Layout, lookup: Lookup) -> tuple[pa.Table, NewRows]:
    """The versions that go, by `Layout.identity`, since they are closed; and those that come."""
    changes, lookup = spelled_out(changes, layout, lookup)
    (codes,) = key_codes([changes], layout.key)
    lives = Lives(changes, codes)
    steps = _Steps.of(codes, ints_of(changes.column(COMMIT_VERSION)))
    stored = Stored.find(changes, steps.first[~lives.is_insert[steps.first]], layout, lookup)

    stays = ~lives.is_delete[steps.rows]
    values = Values.plan(layout, lives, steps.rows[stays])
    required(~values.lacking | (stored.met[values.bases] >= 0))
    following = np.full(changes.num_rows, -1)
    following[steps.rows] = steps.following
    opened = values.new_rows(stored, layout.schema, lambda some, table: _bounded(table, layout, changes, some.rows, following[some.rows]))

    met = stored.met[steps.first]
    order = np.argsort(met[met >= 0], kind="stable")
    old, closing = met[met >= 0][order], steps.rows[steps.opens][met >= 0][order]

    def close(rows: Rows) -> pa.Table:
        found = stored.rows.take(old[rows]).select(layout.schema.names)
        return _closed(found, changes, closing[rows]).cast(layout.schema)

    closed = NewRows(layout.schema, ((stored.rows.sizes[old], close),) if len(old) else ())
    return key_table(stored.rows.known, old, layout.identity), closed + opened


def _closed(old: pa.Table, changes: pa.Table, at: Rows) -> pa.Table:
    ends = {VALID_TO: _taken(changes, COMMIT_VERSION, at), VALID_TO_TIME: _taken(changes, COMMIT_TIMESTAMP, at), CURRENT: _flags(at < 0)}
    for name, values in ends.items():
        old = old.set_column(old.column_names.index(name), name, values)
    return old


def _bounded(table: pa.Table, layout: Layout, changes: pa.Table, start: Rows, end: Rows) -> pa.Table:
    bounds = {
        VALID_FROM: _taken(changes, COMMIT_VERSION, start),
        VALID_FROM_TIME: _taken(changes, COMMIT_TIMESTAMP, start),
        VALID_TO: _taken(changes, COMMIT_VERSION, end),
        VALID_TO_TIME: _taken(changes, COMMIT_TIMESTAMP, end),
        CURRENT: _flags(end < 0),
    }
    for name, values in bounds.items():
        table = table.append_column(name, values)
    return table.select(layout.schema.names)


def _taken(changes: pa.Table, name: str, rows: Rows) -> pa.ChunkedArray:
    """The values of these rows; null for -1."""
    known = rows >= 0
    places = pa.Array.from_buffers(pa.int64(), len(rows), [bitmap(known), pa.py_buffer(np.ascontiguousarray(rows))])
    return changes.column(name).take(places)


def _flags(values: Bools) -> pa.Array:
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, bitmap(values)])
