"""Source values as a transform needs them: typed values, values missing from a change, and values filled in
from earlier changes of the same row and epoch.

The filter decides on each change separately. It may leave out a change that has values which a later change
of the same row lacks. So `fill` first copies missing values from earlier changes of the epoch. A value that
is still missing did not change in the epoch, so the target has it if the target has the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow import Bools, Ragged, as_arrow, as_bools
from penstock.change import EXACT, UNCHANGED, ChangeType
from penstock.schema import Column
from penstock.sinks.keys import exact_texts, key_codes
from penstock.sinks.row_chains import RowChains, Rows, is_kind, unchanged_rows
from penstock.sinks.row_values import build_exact
from penstock.transforms.casts import is_text_form
from penstock.transforms.columns import Given, read_texts


def given_values(rows: pa.Table, name: str) -> Given:
    texts = exact_texts(rows.column(EXACT), name)
    return Given(whole(rows.column(name)), None if texts is None else whole(texts))


def typed_values(rows: pa.Table, column: Column) -> Given:
    """Return the column's values in their own type, even if the column stores the source's text."""
    given = given_values(rows, column.name)
    return read_texts(given.values, column) if is_text_form(column) else given


def inexact(given: Given) -> Bools:
    """Mask of the values that the column type cannot hold."""
    return np.zeros(len(given.values), np.bool_) if given.texts is None else as_bools(given.texts.is_valid())


class Absences:
    """Finds the changes that lack an unchanged TOAST value."""

    def __init__(self, rows: pa.Table) -> None:
        self._count = rows.num_rows
        self._rows = unchanged_rows(rows.column(UNCHANGED)) if UNCHANGED in rows.column_names else {}

    def of(self, name: str) -> Bools:
        found = np.zeros(self._count, np.bool_)
        if name in self._rows:
            found[self._rows[name]] = True
        return found


def whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """The result of `fill`: `changes` in commit order, with missing values copied from earlier changes of the
    same row.
    """

    changes: pa.Table
    chains: RowChains

    def orphans(self, left_out: Bools) -> Bools:
        """Mask of the changes that lack a value which the target lacks too, because the filter left out the
        insert of the row. `left_out`: mask of the changes that the filter left out.
        """
        count = self.changes.num_rows
        lacking = np.flatnonzero(np.asarray(self.changes.column(UNCHANGED).is_valid()))
        inserts = np.flatnonzero(left_out & self.chains.is_insert)
        since = np.full(count, count)
        np.minimum.at(since, self.chains.first(inserts), inserts)
        found: Bools = np.zeros(count, np.bool_)
        found[lacking] = since[self.chains.first(lacking)] < lacking
        return found


def fill(changes: pa.Table, key: tuple[str, ...]) -> Filled:
    chains = RowChains(changes, _codes(changes, key))
    unchanged = unchanged_rows(changes.column(UNCHANGED))
    rest: dict[str, Rows] = {}
    sources: dict[str, Rows] = {}
    for name, rows in unchanged.items():
        found = chains.sources(rows, name)
        sources[name] = np.arange(changes.num_rows)
        sources[name][rows[found >= 0]] = found[found >= 0]
        rest[name] = rows[found < 0]
    exact = changes.column(EXACT)
    texts = {
        name: values for name in changes.column_names if (values := exact_texts(exact, name)) is not None
    }
    for name, each in sources.items():
        at = changes.column_names.index(name)
        changes = changes.set_column(
            at, changes.field(at), changes.column(at).take(as_arrow(each, pa.int64()))
        )
        if name in texts:
            texts[name] = texts[name].take(as_arrow(each, pa.int64()))
    changes = _with(changes, EXACT, build_exact(texts, changes.num_rows))
    return Filled(_with(changes, UNCHANGED, _lists(rest, changes.num_rows)), chains)


def _codes(changes: pa.Table, key: tuple[str, ...]) -> Rows:
    """Return a number for each change; changes with the same key have the same number. After a truncate, each
    key has a new number. Each truncate has a number that no key has.
    """
    (codes,) = key_codes([changes], key)
    truncates = is_kind(changes, ChangeType.TRUNCATE)
    if not truncates.any():
        return codes
    codes = codes * (int(truncates.sum()) + 1) + np.cumsum(truncates)
    codes[truncates] = int(codes.max()) + 1 + np.arange(int(truncates.sum()))
    return codes


def _lists(rows: dict[str, Rows], count: int) -> pa.Array:
    arrow_type = pa.list_(pa.string())
    names = [name for name, each in rows.items() if len(each)]
    if not names:
        return pa.nulls(count, arrow_type)
    ragged = Ragged.plan(count, {at: rows[name] for at, name in enumerate(names)})
    return ragged.build(arrow_type, pa.array(names, pa.string()).take(as_arrow(ragged.columns, pa.int64())))


def _with(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    at = table.column_names.index(name)
    return table.set_column(at, table.field(at), column)


def target_lists(column: pa.ChunkedArray, names: Mapping[str, Sequence[str]]) -> pa.Array | pa.ChunkedArray:
    """Convert the lists in `_unchanged` from source columns to target columns. `names`: for each source
    column the target columns, of which there may be none or several. An empty list becomes null.
    """
    if column.null_count == len(column):
        return column
    lists = column.combine_chunks()
    known = [name for name in names if names[name]]
    found = pc.index_in(pc.list_flatten(lists), pa.array(known, pa.string()))
    parents = np.asarray(pc.list_parent_indices(lists))[np.asarray(found.is_valid())]
    places = np.asarray(found.drop_null().cast(pa.int64()))
    widths = np.array([len(names[name]) for name in known], np.int64)
    starts = np.concatenate([[0], np.cumsum(widths)])[:-1] if known else np.empty(0, np.int64)
    repeats = widths[places]
    counts = np.bincount(np.repeat(parents, repeats), minlength=len(lists))
    within = np.arange(int(repeats.sum())) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    spread = pa.array([each for name in known for each in names[name]], pa.string())
    values = spread.take(as_arrow((np.repeat(starts[places], repeats) + within).astype(np.int64), pa.int64()))
    offsets = as_arrow(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), pa.int32())
    return pa.ListArray.from_arrays(offsets, values, mask=pa.array(counts == 0))
