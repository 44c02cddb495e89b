"""Reduce one table's changes in an epoch to rows to delete and rows to insert, for each table mode.

`fold` processes changes in the order `(_commit_version, _ordinal)`. It is pure except for `lookup`, and runs
in a task on an executor. However an epoch is split, applying the outcomes of its parts in order results in
the same table.

Soft delete: the target has one row per key, with the values of the key's last chain of changes (see
`row_chains`). A row that is inserted again is no longer flagged as deleted.

History: a commit creates one version of a key if it changed the row with that key, and the row exists after
it. The version is valid until the next commit that changes the key. Versions of a key never overlap, and have
gaps only while the key did not exist.

Truncates: in a mirror, a truncate deletes all rows. In soft_delete and history tables, and if several source
tables share one target, each truncate is first expanded to deletes of the rows that it removes: rows of the
target, and rows inserted or updated earlier in the epoch. In append tables, a truncate is a row like every
other change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow import Bools, as_arrow, bitmap
from penstock.change import (
    CHANGE_TYPE,
    COMMIT_TIMESTAMP,
    COMMIT_VERSION,
    EXACT,
    EXACT_TYPE,
    ORDINAL,
    UNCHANGED,
    XID,
    ChangeType,
)
from penstock.errors import SinkRefusedError
from penstock.sinks.key_moves import HELPER
from penstock.sinks.keys import key_codes
from penstock.sinks.modes import (
    CURRENT,
    DELETED,
    DELETED_AT,
    VALID_FROM,
    VALID_FROM_TIME,
    VALID_TO,
    VALID_TO_TIME,
    Layout,
    Mode,
)
from penstock.sinks.row_chains import (
    NewRows,
    RowChains,
    Rows,
    StoredRows,
    bools_of,
    differs,
    firsts_and_lasts,
    ints_of,
    is_kind,
    take,
)
from penstock.sinks.row_values import Lookup, Stored, Values, View, check_found, key_table, live_rows


def _expand_truncates(changes: pa.Table, layout: Layout, lookup: Lookup) -> tuple[pa.Table, Lookup]:
    """Replace each truncate by equivalent deletes. Returns the changes, and the lookup to use with them,
    which returns the rows that this function has looked up.
    """
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
    """Return a delete for each of `keys`, with the commit and ordinal of the truncate at row `place`."""
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


def source_column(views: Iterable[View]) -> str | None:
    """The column with the name of each row's source table, if several source tables share the target;
    otherwise None.
    """
    return next((view.source for view in views if view.source is not None), None)


def expand_source_truncates(
    changes: pa.Table, layout: Layout, source: str | None, lookup: Lookup
) -> pa.Table:
    """If several source tables share the target, replace each truncate of one of them by deletes. `source` is
    the column with the name of the source table; if it is None, `changes` is returned unchanged.

    `lookup` is called at most once, with values of the source column only. It may return rows of other source
    tables as well. An append table keeps its truncates.
    """
    truncates = (
        np.flatnonzero(is_kind(changes, ChangeType.TRUNCATE))
        if source is not None and not layout.mode.is_log
        else ()
    )
    if source is None or not len(truncates):
        return changes
    changes = _in_order(changes)
    names = pc.unique(take(changes, np.flatnonzero(is_kind(changes, ChangeType.TRUNCATE))).column(source))
    stored = live_rows(lookup(pa.table({source: names, EXACT: pa.nulls(len(names), EXACT_TYPE)})), layout)
    for name in names.to_pylist():
        own = stored.only(_is_from(stored.known, source, name))
        changes = _expand_for_source(changes, layout, _is_from(changes, source, name), own)
    return changes


def _expand_for_source(changes: pa.Table, layout: Layout, own: Bools, stored: StoredRows) -> pa.Table:
    """Replace the truncates of one source table by deletes. `own` marks the changes of that table; `stored`
    has the rows of the target that come from it.
    """
    places = np.flatnonzero(own & is_kind(changes, ChangeType.TRUNCATE)).tolist()
    if not layout.key:
        return _drop_truncated(changes, layout, own, stored, places[-1])
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
            keys.append(
                key_table(stored.known, np.flatnonzero(~np.isin(stored_codes, codes[since])), layout.key)
            )
        pieces += [changes.slice(low, place - low), _source_deletes(changes, place, keys)]
        low = place + 1
    return pa.concat_tables([*pieces, changes.slice(low)])


def _drop_truncated(changes: pa.Table, layout: Layout, own: Bools, stored: StoredRows, last: int) -> pa.Table:
    """Like `_expand_for_source`, for a target without a key, where only the number of equal rows counts: drop
    the source table's changes up to its last truncate, and delete its rows in the target.
    """
    kept = ~own | (np.arange(len(own)) > last)
    rest = changes.filter(pa.Array.from_buffers(pa.bool_(), len(kept), [None, bitmap(kept)]))
    whole = [*layout.columns.names, EXACT]
    deletes = _source_deletes(changes, last, [stored.take(np.arange(stored.known.num_rows)).select(whole)])
    return _in_order(pa.concat_tables([deletes, rest]))


def _source_deletes(changes: pa.Table, place: int, keys: Sequence[pa.Table]) -> pa.Table:
    """Return a delete for each of `keys` (keys or whole rows), with the commit and ordinal of the truncate at
    row `place`.
    """
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
    """Sort changes into commit order. They are read by file, and each source table has separate files."""
    versions, ordinals = (ints_of(changes.column(name)) for name in (COMMIT_VERSION, ORDINAL))
    order: Rows = np.lexsort((ordinals, versions))
    return take(changes, order)


def fold_soft_deletes(changes: pa.Table, layout: Layout, lookup: Lookup) -> tuple[pa.Table, NewRows]:
    """Reduce the changes of a soft_delete table. Returns the keys of the rows to delete, and the rows to
    insert.
    """
    changes, lookup = _expand_truncates(changes, layout, lookup)
    (codes,) = key_codes([changes], layout.key)
    chains = RowChains(changes, codes)
    values = Values.plan(layout, chains, np.sort(firsts_and_lasts(codes)[1]))
    former = Values.plan(layout, chains, _ends(values, codes))
    stored = _find(codes, values, former, lookup)
    missing = values.incomplete & (stored.met[values.bases] < 0)
    check_found(~missing | chains.is_delete[values.rows])
    # A deleted row that the target lacks needs no flag. If the target has an earlier row with the same key,
    # that row is flagged as deleted instead.
    flagged = [
        values.only(~missing),
        former.only(
            np.isin(codes[former.rows], codes[values.rows[missing]]) & (stored.met[former.bases] >= 0)
        ),
    ]
    return (
        pa.concat_tables([key_table(changes, each.rows, layout.key) for each in flagged]),
        reduce(NewRows.__add__, (each.new_rows(stored, layout.schema, _with_flags) for each in flagged)),
    )


def _find(codes: Rows, values: Values, former: Values, lookup: Lookup) -> Stored:
    """Look up the rows of the target that `values` and `former` need, each key once."""
    looked_up = values.looked_up
    more = former.looked_up
    looked_up = np.concatenate([looked_up, more[~np.isin(codes[more], codes[looked_up])]])
    stored = Stored.find(values.chains.changes, looked_up, values.layout, lookup)
    by_code = np.full(int(codes.max()) + 1 if len(codes) else 0, -1)
    by_code[codes[looked_up]] = stored.met[looked_up]
    stored.met[more] = by_code[codes[more]]
    return stored


def _ends(values: Values, codes: Rows) -> Rows:
    """Return the first delete of each key that was deleted several times in the epoch, if the key's last
    delete lacks values.

    The first delete ends the row that the target has. The target may lack the later row with the same key,
    because a filter (`where`) excluded it.
    """
    deletes = np.flatnonzero(values.chains.is_delete)
    first = np.full(int(codes.max()) + 1 if len(codes) else 0, -1)
    first[codes[deletes[::-1]]] = deletes[::-1]
    later = values.rows[values.incomplete & values.chains.is_delete[values.rows]]
    ends = first[codes[later]]
    return np.compress(ends != later, ends)


def _with_flags(values: Values, table: pa.Table) -> pa.Table:
    rows, chains = values.rows, values.chains
    deleted = pa.Array.from_buffers(pa.bool_(), len(rows), [None, bitmap(chains.is_delete[rows])])
    times = chains.changes.column(COMMIT_TIMESTAMP).take(as_arrow(rows, pa.int64()))
    at = pc.if_else(deleted, times, pa.scalar(None, times.type))
    return (
        table.append_column(DELETED, deleted).append_column(DELETED_AT, at).select(values.layout.schema.names)
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """The last change that each commit made to each key, ordered by key and commit."""

    rows: Rows
    opens: Bools
    """For each of `rows`, whether its commit is the first one of its key."""
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
        """For each of `rows`, the last change of the next commit to the same key; -1 if there is no next
        commit.
        """
        following = np.full(len(self.rows), -1)
        following[:-1] = np.where(self.opens[1:], -1, self.rows[1:])
        return following


def fold_versions(changes: pa.Table, layout: Layout, lookup: Lookup) -> tuple[pa.Table, NewRows]:
    """Reduce the changes of a history table. Returns the identities of the versions that end, whose rows have
    to be deleted, and the rows to insert: the same versions with their end, and new versions.
    """
    changes, lookup = _expand_truncates(changes, layout, lookup)
    (codes,) = key_codes([changes], layout.key)
    chains = RowChains(changes, codes)
    steps = _Steps.of(codes, ints_of(changes.column(COMMIT_VERSION)))
    stored = Stored.find(changes, steps.first[~chains.is_insert[steps.first]], layout, lookup)

    stays = ~chains.is_delete[steps.rows]
    values = Values.plan(layout, chains, steps.rows[stays])
    check_found(~values.incomplete | (stored.met[values.bases] >= 0))
    following = np.full(changes.num_rows, -1)
    following[steps.rows] = steps.following
    opened = values.new_rows(
        stored,
        layout.schema,
        lambda some, table: _with_validity(table, layout, changes, some.rows, following[some.rows]),
    )

    met = stored.met[steps.first]
    order = np.argsort(met[met >= 0], kind="stable")
    old, closing = met[met >= 0][order], steps.rows[steps.opens][met >= 0][order]

    def close(rows: Rows) -> pa.Table:
        found = stored.rows.take(old[rows]).select(layout.schema.names)
        return _close_versions(found, changes, closing[rows]).cast(layout.schema)

    closed = NewRows(layout.schema, ((stored.rows.sizes[old], close),) if len(old) else ())
    return key_table(stored.rows.known, old, layout.identity), closed + opened


def _close_versions(old: pa.Table, changes: pa.Table, at: Rows) -> pa.Table:
    ends = {
        VALID_TO: _values_or_null(changes, COMMIT_VERSION, at),
        VALID_TO_TIME: _values_or_null(changes, COMMIT_TIMESTAMP, at),
        CURRENT: _flags(at < 0),
    }
    for name, values in ends.items():
        old = old.set_column(old.column_names.index(name), name, values)
    return old


def _with_validity(table: pa.Table, layout: Layout, changes: pa.Table, start: Rows, end: Rows) -> pa.Table:
    bounds = {
        VALID_FROM: _values_or_null(changes, COMMIT_VERSION, start),
        VALID_FROM_TIME: _values_or_null(changes, COMMIT_TIMESTAMP, start),
        VALID_TO: _values_or_null(changes, COMMIT_VERSION, end),
        VALID_TO_TIME: _values_or_null(changes, COMMIT_TIMESTAMP, end),
        CURRENT: _flags(end < 0),
    }
    for name, values in bounds.items():
        table = table.append_column(name, values)
    return table.select(layout.schema.names)


def _values_or_null(changes: pa.Table, name: str, rows: Rows) -> pa.ChunkedArray:
    """The values of column `name` in `rows`; null where the row is -1."""
    known = rows >= 0
    places = pa.Array.from_buffers(
        pa.int64(), len(rows), [bitmap(known), pa.py_buffer(np.ascontiguousarray(rows))]
    )
    return changes.column(name).take(places)


def _flags(values: Bools) -> pa.Array:
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, bitmap(values)])


COUNT = "_count\0"
"""Column of `Outcome.deleted` with the number of equal rows to delete, for tables without a key. No source
column can have this name.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The result of `fold`. Apply it in this order: delete rows (all rows if `emptied`), insert rows."""

    emptied: bool
    deleted: pa.Table
    """The rows to delete, each once: the columns `Layout.identity` and `_exact`. The target may lack some of
    these rows. For a table without a key: whole rows, and in `COUNT` the number of equal rows to delete.
    """
    new: NewRows
    """Rows to insert, with the columns of `Layout.schema`."""

    @property
    def rows(self) -> pa.Table:
        """All rows to insert, in one table."""
        return self.new.whole()


def fold(changes: pa.Table, layout: Layout, lookup: Lookup) -> Outcome:
    """Reduce `changes`, which have the columns that `read_slices` returns, as the table mode requires."""
    return _REDUCTIONS[layout.mode](_in_commit_order(changes), layout, lookup)


def _mirror(changes: pa.Table, layout: Layout, lookup: Lookup) -> Outcome:
    truncates = np.flatnonzero(is_kind(changes, ChangeType.TRUNCATE))
    emptied = len(truncates) > 0
    if emptied:
        changes = changes.slice(truncates[-1] + 1)
    if not layout.key:
        return _counted(changes, layout, emptied=emptied)
    (codes,) = key_codes([changes], layout.key)
    first, last = firsts_and_lasts(codes)
    # An insert never conflicts with a row of the target: right before the insert, the target equals the
    # source, whose keys are unique.
    there = np.sort(first[~is_kind(changes, ChangeType.INSERT)[first]])
    upserts = last[~is_kind(changes, ChangeType.DELETE)[last]]
    if HELPER in changes.column_names:
        own = ~bools_of(changes.column(HELPER))
        there, upserts = there[own[there]], upserts[own[upserts]]
    deleted = key_table(changes, there, layout.key)
    if changes.column(UNCHANGED).null_count == changes.num_rows:
        return Outcome(emptied, deleted, NewRows.of(_chosen(changes.select(layout.schema.names), upserts)))
    values = Values.plan(layout, RowChains(changes, codes), np.sort(upserts))
    stored = Stored.find(changes, values.looked_up, layout, lookup)
    check_found(~values.incomplete | (stored.met[values.bases] >= 0))
    return Outcome(emptied, deleted, values.new_rows(stored, layout.schema, lambda _, built: built))


def _counted(changes: pa.Table, layout: Layout, *, emptied: bool) -> Outcome:
    """Reduce the changes of a mirror without a key. Its rows are indistinguishable: only the number of equal
    rows counts.
    """
    inserted, deleted = is_kind(changes, ChangeType.INSERT), is_kind(changes, ChangeType.DELETE)
    if not (inserted | deleted).all() or changes.column(UNCHANGED).null_count < changes.num_rows:
        raise SinkRefusedError(
            "an update in a table without a key lacks the old row",
            hint="ALTER TABLE … REPLICA IDENTITY FULL, or give the table a primary key, "
            "or choose the mode append",
        )
    (codes,) = key_codes([changes], layout.columns.names)
    first, _ = firsts_and_lasts(codes)
    net = np.bincount(codes, inserted.astype(np.int64) - deleted)[codes[first]].astype(np.int64)
    whole = changes.select(layout.schema.names)
    deleted = take(whole, first[net < 0])
    counts = as_arrow(-net[net < 0], pa.int64())
    return Outcome(
        emptied,
        deleted.append_column(COUNT, counts),
        NewRows.of(take(whole, np.repeat(first, np.maximum(net, 0)))),
    )


def _append(changes: pa.Table, layout: Layout, lookup: Lookup) -> Outcome:
    del lookup
    rows = changes.select(layout.schema.names).cast(layout.schema)
    return Outcome(False, pa.table({EXACT: pa.nulls(0, EXACT_TYPE)}), NewRows.of(rows))


def _soft_delete(changes: pa.Table, layout: Layout, lookup: Lookup) -> Outcome:
    deleted, new = fold_soft_deletes(changes, layout, lookup)
    return Outcome(False, deleted, new)


def _history(changes: pa.Table, layout: Layout, lookup: Lookup) -> Outcome:
    closed, new = fold_versions(changes, layout, lookup)
    return Outcome(False, closed, new)


_REDUCTIONS: Mapping[Mode, Callable[[pa.Table, Layout, Lookup], Outcome]] = {
    Mode.MIRROR: _mirror,
    Mode.SOFT_DELETE: _soft_delete,
    Mode.HISTORY: _history,
    Mode.APPEND: _append,
}


def _in_commit_order(changes: pa.Table) -> pa.Table:
    versions, ordinals = ints_of(changes.column(COMMIT_VERSION)), ints_of(changes.column(ORDINAL))
    later = (versions[1:] > versions[:-1]) | (
        (versions[1:] == versions[:-1]) & (ordinals[1:] > ordinals[:-1])
    )
    return changes if later.all() else take(changes, np.lexsort((ordinals, versions)))


def _chosen(table: pa.Table, rows: Rows) -> pa.Table:
    """The given rows, in the order of the table."""
    if len(rows) == table.num_rows:
        return table
    wanted: Bools = np.zeros(table.num_rows, np.bool_)
    wanted[rows] = True
    return table.filter(pa.Array.from_buffers(pa.bool_(), len(wanted), [None, bitmap(wanted)]))
