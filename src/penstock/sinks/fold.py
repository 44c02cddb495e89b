"""An epoch's changes of one table, folded to what they come to: rows of the target that go, and rows that come.

The order is `(_commit_version, _ordinal)`, always. `fold` is pure but for `lookup`, and runs where the rows are: in a task on an executor.
Whatever an epoch is cut into, the outcomes of its parts, one after the other, leave the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from penstock.change import COMMIT_VERSION, EXACT, EXACT_TYPE, ORDINAL, UNCHANGED, ChangeType
from penstock.errors import SinkRefusedError
from penstock.postgres.types.arrays import Bools, as_arrow, bitmap
from penstock.sinks.gathering import NewRows, take
from penstock.sinks.keys import key_codes
from penstock.sinks.layout import Layout, Mode
from penstock.sinks.lives import Lives, Rows, firsts_and_lasts, ints_of, is_kind
from penstock.sinks.soft_deletes import fold_soft_deletes
from penstock.sinks.values import Lookup, Stored, Values, key_table, required
from penstock.sinks.versions import fold_versions

COUNT = "_count\0"
"""No column of any source can be called so."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Rows of the target that are named in `gone` go, or all if it is `emptied`; then `rows` come."""

    emptied: bool
    gone: pa.Table
    """`Layout.identity` and `_exact`, each row once: rows that the target may have or not. Of a table without key the whole rows, and how
    many of each go, as `COUNT`."""
    new: NewRows
    """`Layout.schema`."""

    @property
    def rows(self) -> pa.Table:
        """All that are inserted, at once."""
        return self.new.whole()


def fold(changes: pa.Table, layout: Layout, lookup: Lookup) -> Outcome:
    """`changes` as `read_slices` gives them."""
    return _FOLDS[layout.mode](_in_order(changes), layout, lookup)


def _mirror(changes: pa.Table, layout: Layout, lookup: Lookup) -> Outcome:
    truncates = np.flatnonzero(is_kind(changes, ChangeType.TRUNCATE))
    emptied = len(truncates) > 0
    if emptied:
        changes = changes.slice(truncates[-1] + 1)
    if not layout.key:
        return _counted(changes, layout, emptied=emptied)
    (codes,) = key_codes([changes], layout.key)
    first, last = firsts_and_lasts(codes)
    # An insert cannot meet a row that is there: the target equals the source just before it, and the key is unique there.
    there = np.sort(first[~is_kind(changes, ChangeType.INSERT)[first]])
    upserts = last[~is_kind(changes, ChangeType.DELETE)[last]]
    gone = key_table(changes, there, layout.key)
    if changes.column(UNCHANGED).null_count == changes.num_rows:
        return Outcome(emptied, gone, NewRows.of(_chosen(changes.select(layout.schema.names), upserts)))
    values = Values.plan(layout, Lives(changes, codes), np.sort(upserts))
    stored = Stored.find(changes, values.asked, layout, lookup)
    required(~values.lacking | (stored.met[values.bases] >= 0))
    return Outcome(emptied, gone, values.new_rows(stored, layout.schema, lambda _, built: built))


def _counted(changes: pa.Table, layout: Layout, *, emptied: bool) -> Outcome:
    """Rows without key are told apart by nothing: all that counts is how many equal ones there are."""
    inserted, deleted = is_kind(changes, ChangeType.INSERT), is_kind(changes, ChangeType.DELETE)
    if not (inserted | deleted).all() or changes.column(UNCHANGED).null_count < changes.num_rows:
        raise SinkRefusedError(
            "an update of a row without key does not show the row as it was",
            hint="ALTER TABLE … REPLICA IDENTITY FULL, or give the table a primary key, or choose the mode append",
        )
    (codes,) = key_codes([changes], layout.columns.names)
    first, _ = firsts_and_lasts(codes)
    net = np.bincount(codes, inserted.astype(np.int64) - deleted)[codes[first]].astype(np.int64)
    whole = changes.select(layout.schema.names)
    gone = take(whole, first[net < 0])
    counts = as_arrow(-net[net < 0], pa.int64())
    return Outcome(emptied, gone.append_column(COUNT, counts), NewRows.of(take(whole, np.repeat(first, np.maximum(net, 0)))))


def _append(changes: pa.Table, layout: Layout, lookup: Lookup) -> Outcome:
    del lookup
    rows = changes.select(layout.schema.names).cast(layout.schema)
    return Outcome(False, pa.table({EXACT: pa.nulls(0, EXACT_TYPE)}), NewRows.of(rows))


_FOLDS: Mapping[Mode, Callable[[pa.Table, Layout, Lookup], Outcome]] = {
    Mode.MIRROR: _mirror,
    Mode.SOFT_DELETE: lambda *given: Outcome(False, *fold_soft_deletes(*given)),
    Mode.HISTORY: lambda *given: Outcome(False, *fold_versions(*given)),
    Mode.APPEND: _append,
}


def _in_order(changes: pa.Table) -> pa.Table:
    versions, ordinals = ints_of(changes.column(COMMIT_VERSION)), ints_of(changes.column(ORDINAL))
    later = (versions[1:] > versions[:-1]) | ((versions[1:] == versions[:-1]) & (ordinals[1:] > ordinals[:-1]))
    return changes if later.all() else take(changes, np.lexsort((ordinals, versions)))


def _chosen(table: pa.Table, rows: Rows) -> pa.Table:
    """These rows, in the table's own order."""
    if len(rows) == table.num_rows:
        return table
    wanted: Bools = np.zeros(table.num_rows, np.bool_)
    wanted[rows] = True
    return table.filter(pa.Array.from_buffers(pa.bool_(), len(wanted), [None, bitmap(wanted)]))
