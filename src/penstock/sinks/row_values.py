"""Row values after a change, taken from its chain of changes or from the target. Also maps changes of older
schema versions to the target's columns.
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
"""Returns rows of the target with these keys, as a table with `Layout.schema`. The argument has the key
columns, and `_exact` with the exact texts of keys; None stands for all rows. It may return more rows. Of a
history it returns current versions only, of a soft_delete table also deleted rows. Called at most once per
epoch, and never for a mirror whose changes carry all values.
"""


def key_table(changes: pa.Table, rows: Rows, key: Sequence[str]) -> pa.Table:
    """The keys of these rows; `_exact` contains only texts of key columns."""
    found = take(changes.select([*key, EXACT]), rows)
    return found.set_column(len(key), EXACT, _only_texts_of(found.column(EXACT), key))


def live_rows(found: pa.Table | StoredRows, layout: Layout) -> StoredRows:
    """The rows of a lookup without deleted rows and older versions."""
    rows = StoredRows.of(found) if isinstance(found, pa.Table) else found
    flag = layout.mode.live_flag
    return rows if flag is None else rows.only(bools_of(rows.known.column(flag.column)) == flag.value)


def check_found(met: Bools) -> None:
    """Raise an error if the target lacks a row that it must have: values of that row would become NULL."""
    if not met.all():
        raise ValuesMissingError(
            "a row that was copied or applied before is no longer in the target",
            hint="remove the target table and restart the pipeline to copy it again",
        )


def build_exact(texts: Mapping[str, pa.ChunkedArray], count: int) -> pa.Array:
    """The column `_exact` of `count` rows, from the texts of each column."""
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
    """Rows of the target, and for each change of the epoch the row with its key; -1: none."""

    rows: StoredRows
    met: Rows

    @classmethod
    def find(cls, changes: pa.Table, rows: Rows, layout: Layout, lookup: Lookup) -> Stored:
        """Look up the keys of `rows`, which must be distinct."""
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
    """The sources of the values that rows have right after the changes `rows`, or had before a delete."""

    layout: Layout
    chains: RowChains
    rows: Rows
    plain: Rows
    """The changes that carry the values of most columns."""
    partial: Mapping[str, Rows]
    """The changes that carry the values of columns that are missing from some change."""

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
        """Which rows have a value that only the target has."""
        incomplete = self.plain < 0
        for sources in self.partial.values():
            incomplete |= sources < 0
        return incomplete

    @property
    def bases(self) -> Rows:
        """For each row, the change with the key under which the target has its old values."""
        return self.chains.first(self.rows)

    @property
    def looked_up(self) -> Rows:
        """The changes whose keys have to be looked up, each key once. A chain that began in the epoch has no
        row in the target.
        """
        bases = self.bases[self.incomplete]
        return distinct(bases[~self.chains.is_insert[bases]])

    def only(self, wanted: Bools | Rows) -> Values:
        partial = {name: sources[wanted] for name, sources in self.partial.items()}
        return Values(self.layout, self.chains, self.rows[wanted], self.plain[wanted], partial)

    def new_rows(
        self, stored: Stored, schema: pa.Schema, complete: Callable[[Values, pa.Table], pa.Table]
    ) -> NewRows:
        """Build a row for each of `rows`: `build`, then `complete`. Rows are built in the order in which the
        target has them, so that its files are read sequentially.
        """
        met = np.where(self.incomplete, stored.met[self.bases], -1)
        ordered = self.only(np.argsort(met, kind="stable")) if len(stored.rows.numbers) else self

        def built(rows: Rows) -> pa.Table:
            some = ordered.only(rows)
            return complete(some, some.build(stored))

        return NewRows(schema, ((ordered.sizes(stored), built),) if len(self.rows) else ())

    def sizes(self, stored: Stored) -> Sizes:
        """The approximate sizes of the rows."""
        changes = self.chains.changes
        sizes = np.append(row_sizes(changes.drop_columns(list(self.partial))), 0.0)[self.plain]
        for name, sources in self.partial.items():
            sizes += np.append(value_sizes(changes.column(name)), 0.0)[sources]
        return sizes + np.where(
            self.incomplete, np.append(stored.rows.sizes, 0.0)[stored.met[self.bases]], 0.0
        )

    def build(self, stored: Stored) -> pa.Table:
        """`layout.columns` and `_exact`, one row for each of `rows`."""
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
    """The columns that have texts in `_exact`."""
    if exact.null_count == len(exact):
        return []
    names = pa.chunked_array([chunk.drop_null().keys for chunk in exact.chunks], pa.string())
    return list(pc.unique(names).to_pylist())


@dataclass(frozen=True, slots=True)
class View:
    """Maps changes of one schema version to the target's columns. Sent to the executors."""

    names: Mapping[str, str]
    """Column names in the target by their name in the source at that time. Other columns are left out."""
    fills: Mapping[str, pa.Scalar] = field(default_factory=dict)
    """Columns that were added to the target later, with the default value of existing rows where it is not
    NULL.
    """
    leaves_out: bool = False
    """Whether the source had columns that are not among `names`."""
    source: str | None = None
    """If several tables share one target: the column, among `fills`, that names the source table. A truncate
    deletes only rows of its table.
    """

    @property
    def is_plain(self) -> bool:
        """Whether all columns have the same name in the target, and no column with a default value is
        missing.
        """
        return (
            not self.fills
            and not self.leaves_out
            and all(name == target for name, target in self.names.items())
        )

    def renamed(self, changes: pa.Table) -> pa.Table:
        """Spooled changes with the target's column names, also in the metadata columns. Other columns are
        dropped.
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
    """Lists of names, renamed. Lists that become empty are null."""
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
