"""A truncate, for tables that keep what is gone: it deletes every row that is there at that moment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from penstock.change import CHANGE_TYPE, COMMIT_TIMESTAMP, COMMIT_VERSION, ORDINAL, XID, ChangeType
from penstock.sinks.keys import key_codes
from penstock.sinks.layout import Layout
from penstock.sinks.lives import firsts_and_lasts, is_kind
from penstock.sinks.values import Lookup, key_table, live_rows


def spelled_out(changes: pa.Table, layout: Layout, lookup: Lookup) -> tuple[pa.Table, Lookup]:
    """`changes` with each truncate spelled out as the deletes that it comes to, and what then answers lookups."""
    places = np.flatnonzero(is_kind(changes, ChangeType.TRUNCATE)).tolist()
    if not places:
        return changes, lookup
    stored = live_rows(lookup(None), layout)
    codes, stored_codes = key_codes([changes, stored.known], layout.key)
    is_delete = is_kind(changes, ChangeType.DELETE)
    untouched = np.flatnonzero(~np.isin(stored_codes, codes[: places[0]]))
    pieces = []
    low = 0
    for place in places:
        last = low + firsts_and_lasts(codes[low:place])[1]
        keys = [key_table(changes, np.sort(last[~is_delete[last]]), layout.key)]
        if low == 0:
            keys.append(key_table(stored.known, untouched, layout.key))
        pieces += [changes.slice(low, place - low), _deletes(changes, place, keys)]
        low = place + 1
    return pa.concat_tables([*pieces, changes.slice(low)]), lambda _: stored


def _deletes(changes: pa.Table, place: int, keys: Sequence[pa.Table]) -> pa.Table:
    """Deletes of these keys, at the place of a truncate."""
    found = pa.concat_tables([each.cast(keys[0].schema) for each in keys])
    shared = {name: changes.column(name)[place] for name in (COMMIT_VERSION, COMMIT_TIMESTAMP, ORDINAL, XID)}
    shared[CHANGE_TYPE] = pa.scalar(ChangeType.DELETE.value, changes.schema.field(CHANGE_TYPE).type)
    columns = []
    for field in changes.schema:
        if field.name in found.column_names:
            columns.append(found.column(field.name))
        elif field.name in shared:
            columns.append(pa.repeat(shared[field.name], found.num_rows))
        else:
            columns.append(pa.nulls(found.num_rows, field.type))
    return pa.table(columns, schema=changes.schema)
