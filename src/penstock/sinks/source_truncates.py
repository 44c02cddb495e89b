"""A truncate of one of several tables that go into one: it takes the rows that are from that table, and leaves the others.

The fold knows truncates of whole tables alone. So each of these is spelled out, before the fold, as the deletes that it comes to: of rows
that the target has, and of rows that came, or were touched, earlier in the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.change import CHANGE_TYPE, COMMIT_TIMESTAMP, COMMIT_VERSION, EXACT, EXACT_TYPE, ORDINAL, XID, ChangeType
from penstock.postgres.types.arrays import Bools, bitmap
from penstock.sinks.gathering import StoredRows, take
from penstock.sinks.keys import key_codes
from penstock.sinks.layout import Layout, Mode
from penstock.sinks.lives import Rows, bools_of, firsts_and_lasts, ints_of, is_kind
from penstock.sinks.values import Lookup, key_table, live_rows
from penstock.sinks.views import View


def source_column(views: Iterable[View]) -> str | None:
    """The column that says from which table a row is, where rows of several come together."""
    return next((view.source for view in views if view.source is not None), None)


def spelled_by_source(changes: pa.Table, layout: Layout, source: str | None, lookup: Lookup) -> pa.Table:
    """`changes` without truncates, where `source` is the column that says which table's they were.

    `lookup` is asked once, for the rows that have one of some values in that column alone, and may give more. A log keeps truncates.
    """
    truncates = np.flatnonzero(is_kind(changes, ChangeType.TRUNCATE)) if source is not None and layout.mode is not Mode.APPEND else ()
    if source is None or not len(truncates):
        return changes
    changes = _in_order(changes)
    names = pc.unique(take(changes, np.flatnonzero(is_kind(changes, ChangeType.TRUNCATE))).column(source))
    stored = live_rows(lookup(pa.table({source: names, EXACT: pa.nulls(len(names), EXACT_TYPE)})), layout)
    for name in names.to_pylist():
        own = stored.only(_is_from(stored.known, source, name))
        changes = _spelled(changes, layout, _is_from(changes, source, name), own)
    return changes


def _spelled(changes: pa.Table, layout: Layout, own: Bools, stored: StoredRows) -> pa.Table:
    """With the truncates among its `own` changes spelled out, for one table, of which the target has `stored`."""
    places = np.flatnonzero(own & is_kind(changes, ChangeType.TRUNCATE)).tolist()
    if not layout.key:
        return _forgotten(changes, layout, own, stored, places[-1])
    codes, stored_codes = key_codes([changes, stored.known], layout.key)
    is_delete = is_kind(changes, ChangeType.DELETE)
    mine = np.flatnonzero(own)
    pieces, low = [], 0
    for place in places:
        since = mine[(mine >= low) & (mine < place)]
        _, lasts = firsts_and_lasts(codes[since])
        last = since[lasts]
        keys = [key_table(changes, np.sort(last[~is_delete[last]]), layout.key)]
        if place == places[0]:
            keys.append(key_table(stored.known, np.flatnonzero(~np.isin(stored_codes, codes[since])), layout.key))
        pieces += [changes.slice(low, place - low), _deletes(changes, place, keys)]
        low = place + 1
    return pa.concat_tables([*pieces, changes.slice(low)])


def _forgotten(changes: pa.Table, layout: Layout, own: Bools, stored: StoredRows, last: int) -> pa.Table:
    """Without a key all that counts is how many equal rows there are: what the table was through before its last truncate comes to none."""
    kept = ~own | (np.arange(len(own)) > last)
    rest = changes.filter(pa.Array.from_buffers(pa.bool_(), len(kept), [None, bitmap(kept)]))
    whole = [*layout.columns.names, EXACT]
    deletes = _deletes(changes, last, [stored.take(np.arange(stored.known.num_rows)).select(whole)])
    return _in_order(pa.concat_tables([deletes, rest]))


def _deletes(changes: pa.Table, place: int, keys: Sequence[pa.Table]) -> pa.Table:
    """Deletes of these rows, at the place of a truncate."""
    first = keys[0].schema
    found = pa.concat_tables([each.select(first.names).cast(first) for each in keys])
    shared = {name: changes.column(name)[place] for name in (COMMIT_VERSION, COMMIT_TIMESTAMP, ORDINAL, XID)}
    shared[CHANGE_TYPE] = pa.scalar(ChangeType.DELETE.value, changes.schema.field(CHANGE_TYPE).type)
    columns = []
    for field in changes.schema:
        if field.name in found.column_names:
            columns.append(found.column(field.name).cast(field.type))
        elif field.name in shared:
            columns.append(pa.chunked_array([pa.repeat(shared[field.name], found.num_rows)], field.type))
        else:
            columns.append(pa.chunked_array([pa.nulls(found.num_rows, field.type)]))
    return pa.table(columns, schema=changes.schema)


def _is_from(rows: pa.Table, source: str, name: str) -> Bools:
    return bools_of(pc.fill_null(pc.equal(rows.column(source), pa.scalar(name, pa.string())), False))


def _in_order(changes: pa.Table) -> pa.Table:
    """As the log has them: files of different tables come one after the other."""
    versions, ordinals = (ints_of(changes.column(name)) for name in (COMMIT_VERSION, ORDINAL))
    order: Rows = np.lexsort((ordinals, versions))
    return take(changes, order)
