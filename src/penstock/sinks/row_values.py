"""Values of rows after a change, taken from earlier changes to the same row (its chain) or from the target.
Also mappings from the changes of older schema versions to the target's columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow import Bools, Ragged, as_arrow, distinct
from penstock.change import EXACT, EXACT_TYPE, METADATA_NAMES, UNCHANGED
from penstock.errors import ValuesMissingError
from penstock.sinks.keys import exact_texts, key_codes
from penstock.sinks.modes import Layout
from penstock.sinks.row_chains import (
    NewRows,
    RowChains,
    Rows,
    Sizes,
    StoredRows,
    bools_of,
    gather,
    row_sizes,
    take,
    value_sizes,
)

Lookup = Callable[[pa.Table | None], pa.Table | StoredRows]
"""Function that returns the rows of the target that have one of the given keys.

The argument has the key columns, and `_exact` with the exact texts of keys. To expand the truncates of one of
several source tables, it has the source column instead. None asks for all rows. The result has the columns of
`Layout.schema` and may contain other rows too. A lookup in a history table returns only current versions, a
lookup in a soft_delete table also deleted rows. `fold` makes at most one lookup, and none for a mirror whose
changes carry all values.
"""


def key_table(changes: pa.Table, rows: Rows, key: Sequence[str]) -> pa.Table:
    """The keys of `rows`: the key columns, and `_exact` with the texts of the key columns only."""
    found = take(changes.select([*key, EXACT]), rows)
    return found.set_column(len(key), EXACT, _only_texts_of(found.column(EXACT), key))


def live_rows(found: pa.Table | StoredRows, layout: Layout) -> StoredRows:
    """The rows that a lookup found, without deleted rows and without older versions."""
    rows = StoredRows.of(found) if isinstance(found, pa.Table) else found
    flag = layout.mode.live_flag
    return rows if flag is None else rows.only(bools_of(rows.known.column(flag.column)) == flag.value)


def check_found(met: Bools) -> None:
    """Raise an error if any of `met` is false, which means that the target lacks a row that it must have.
    Values of that row would become NULL.
    """
    if not met.all():
        raise ValuesMissingError(
            "a row that was copied or applied before is no longer in the target",
            hint="remove the target table and restart the pipeline to copy it again",
        )


def build_exact(texts: Mapping[str, pa.ChunkedArray], count: int) -> pa.Array:
    """Build the column `_exact` of `count` rows from the exact texts of each column."""
    names = list(texts)
    rows = {at: np.flatnonzero(bools_of(texts[name].is_valid())) for at, name in enumerate(names)}
    if not any(len(each) for each in rows.values()):
        return pa.nulls(count, EXACT_TYPE)
    ragged = Ragged.plan(count, rows)
    values = pa.chunked_array(
        [chunk for name in names for chunk in texts[name].drop_null().chunks], pa.string()
    )
    entries = pa.StructArray.from_arrays(
        [
            pa.array(names, pa.string()).take(as_arrow(ragged.columns, pa.int64())),
            values.take(as_arrow(ragged.order, pa.int64())).combine_chunks(),
        ],
        fields=[EXACT_TYPE.key_field, EXACT_TYPE.item_field],
    )
    return ragged.build(EXACT_TYPE, entries)


def _only_texts_of(exact: pa.ChunkedArray, names: Sequence[str]) -> pa.Array | pa.ChunkedArray:
    found = {name: texts for name in names if (texts := exact_texts(exact, name)) is not None}
    return build_exact(found, len(exact))


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """The rows of the target that a lookup found (`rows`). For each change of the epoch, `met` has the index
    of the row with the same key, or -1 if there is none.
    """

    rows: StoredRows
    met: Rows

    @classmethod
    def find(cls, changes: pa.Table, rows: Rows, layout: Layout, lookup: Lookup) -> Stored:
        """Look up the keys of the changes `rows`. These keys must be distinct."""
        met = np.full(changes.num_rows, -1)
        if not len(rows):
            return cls(StoredRows.of(layout.schema.empty_table()), met)
        keys = key_table(changes, rows, layout.key)
        found = live_rows(lookup(keys), layout)
        looked_up, answered = key_codes([keys, found.known], layout.key)
        by_code = np.full(int(np.concatenate([looked_up, answered]).max()) + 1, -1)
        by_code[answered] = np.arange(len(answered))
        met[rows] = by_code[looked_up]
        return cls(found, met)


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """For each change in `rows`, the changes that carry the values which its row has right after it (for a
    delete: right before it). -1 stands for a value that only the target has.
    """

    layout: Layout
    chains: RowChains
    rows: Rows
    plain: Rows
    """For each of `rows`, the change that carries the values of all columns that are not in `partial`."""
    partial: Mapping[str, Rows]
    """The same for each column whose value is missing from some change of the epoch, by column name."""

    @classmethod
    def plan(cls, layout: Layout, chains: RowChains, rows: Rows) -> Values:
        names = [
            name
            for name in layout.columns.names
            if name in chains.incomplete_columns and name not in layout.key
        ]
        return cls(
            layout, chains, rows, chains.sources(rows), {name: chains.sources(rows, name) for name in names}
        )

    @property
    def incomplete(self) -> Bools:
        """A mask of `rows`: whether some value of the row is only in the target."""
        incomplete = self.plain < 0
        for sources in self.partial.values():
            incomplete |= sources < 0
        return incomplete

    @property
    def bases(self) -> Rows:
        """For each of `rows`, the first change of its chain. Its key is the key that the row has in the
        target, if the target has the row.
        """
        return self.chains.first(self.rows)

    @property
    def looked_up(self) -> Rows:
        """The changes whose keys have to be looked up in the target, one change for each key. A chain that
        begins with an insert is left out, because the target does not have its row.
        """
        bases = self.bases[self.incomplete]
        return distinct(bases[~self.chains.is_insert[bases]])

    def only(self, wanted: Bools | Rows) -> Values:
        partial = {name: sources[wanted] for name, sources in self.partial.items()}
        return Values(self.layout, self.chains, self.rows[wanted], self.plain[wanted], partial)

    def new_rows(
        self, stored: Stored, schema: pa.Schema, complete: Callable[[Values, pa.Table], pa.Table]
    ) -> NewRows:
        """The new rows, one for each of `rows`: `build` builds them, then `complete` adds the columns of the
        mode, if any. They are in the order in which the target has their old versions, so that the target's
        files are read sequentially.
        """
        met = np.where(self.incomplete, stored.met[self.bases], -1)
        ordered = self.only(np.argsort(met, kind="stable")) if len(stored.rows.numbers) else self

        def built(rows: Rows) -> pa.Table:
            some = ordered.only(rows)
            return complete(some, some.build(stored))

        return NewRows(schema, ((ordered.sizes(stored), built),) if len(self.rows) else ())

    def sizes(self, stored: Stored) -> Sizes:
        """The approximate size in bytes of each row that `build` returns for `rows`."""
        changes = self.chains.changes
        sizes = np.append(row_sizes(changes.drop_columns(list(self.partial))), 0.0)[self.plain]
        for name, sources in self.partial.items():
            sizes += np.append(value_sizes(changes.column(name)), 0.0)[sources]
        return sizes + np.where(
            self.incomplete, np.append(stored.rows.sizes, 0.0)[stored.met[self.bases]], 0.0
        )

    def build(self, stored: Stored) -> pa.Table:
        """Build one row for each of `rows`, with the columns `layout.columns` and `_exact`."""
        changes, layout = self.chains.changes, self.layout
        met = np.where(self.incomplete, stored.met[self.bases], -1)
        needed = distinct(met[met >= 0])
        kept = stored.rows.take(needed)
        old = changes.num_rows + np.searchsorted(needed, met)
        given = {name: np.where(sources < 0, old, sources) for name, sources in self.partial.items()}
        rest = np.where(self.plain < 0, old, self.plain)
        columns = [
            _joined_column(changes, kept, name, given.get(name, rest)) for name in layout.columns.names
        ]
        texts = {}
        exact = pa.chunked_array([*changes.column(EXACT).chunks, *kept.column(EXACT).chunks], EXACT_TYPE)
        for name in _columns_with_texts(exact):
            found = exact_texts(exact, name) if name in layout.columns.names else None
            if found is not None:
                texts[name] = gather(found, given.get(name, rest))
        schema = pa.schema([*layout.columns, pa.field(EXACT, EXACT_TYPE)])
        return pa.table([*columns, build_exact(texts, len(self.rows))], schema=schema)


def _joined_column(changes: pa.Table, stored: pa.Table, name: str, rows: Rows) -> pa.ChunkedArray:
    column = changes.column(name)
    if stored.num_rows:
        column = pa.chunked_array(
            [*column.chunks, *stored.column(name).cast(column.type).chunks], column.type
        )
    return gather(column, rows)


def _columns_with_texts(exact: pa.ChunkedArray) -> list[str]:
    """The names of the columns that have texts in `_exact`."""
    if exact.null_count == len(exact):
        return []
    names = pa.chunked_array([chunk.drop_null().keys for chunk in exact.chunks], pa.string())
    return list(pc.unique(names).to_pylist())


@dataclass(frozen=True, slots=True)
class View:
    """Maps changes of one schema version to the target's columns. Sent to the executors."""

    names: Mapping[str, str]
    """The column names in the target, by the source's column names in this schema version. Other columns of
    the source are left out.
    """
    fills: Mapping[str, pa.Scalar] = field(default_factory=dict)
    """The default values of columns that the target got after this schema version, by column name. Columns
    whose default value is NULL are not included.
    """
    leaves_out: bool = False
    """Whether the source had columns, in this schema version, that are not among `names`."""
    source: str | None = None
    """If several source tables share the target: the column, among `fills`, that names the source table of
    each row. A truncate then deletes only the rows of the source table that it truncates. Otherwise None.
    """

    @property
    def is_plain(self) -> bool:
        """Whether the changes need no mapping: all columns have the same name in the target, none is left
        out, and none is set to a default value.
        """
        return (
            not self.fills
            and not self.leaves_out
            and all(name == target for name, target in self.names.items())
        )

    def renamed(self, changes: pa.Table) -> pa.Table:
        """Return spooled changes with the target's column names, also inside the metadata columns. Columns
        that are not in `names` are dropped.
        """
        metadata = [name for name in changes.column_names if name in METADATA_NAMES]
        own = {
            self.names[name]: changes.column(name)
            for name in changes.column_names
            if name in self.names and name not in metadata
        }
        known = {name: changes.column(name) for name in metadata}
        if UNCHANGED in known:
            known[UNCHANGED] = renamed_lists(known[UNCHANGED], self.names)
        if EXACT in known:
            texts = {
                target: found
                for name, target in self.names.items()
                if (found := exact_texts(known[EXACT], name)) is not None
            }
            known[EXACT] = build_exact(texts, changes.num_rows)
        return pa.table({**own, **known})


def renamed_lists(column: pa.ChunkedArray, names: Mapping[str, str]) -> pa.Array | pa.ChunkedArray:
    """Rename the column names in a column of lists, such as `_unchanged`. Names that are not in `names` are
    dropped, and lists that become empty are null.
    """
    if column.null_count == len(column):
        return column
    lists = column.combine_chunks()
    flat, parents = pc.list_flatten(lists), np.asarray(pc.list_parent_indices(lists))
    found = pc.index_in(flat, pa.array(list(names), pa.string()))
    known = np.asarray(found.is_valid())
    counts = np.bincount(parents[known], minlength=len(lists))
    offsets = as_arrow(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), pa.int32())
    values = pa.array(list(names.values()), pa.string()).take(found.drop_null())
    return pa.ListArray.from_arrays(offsets, values, mask=pa.array(counts == 0))
