"""The values that rows have after a change, gathered from the changes of their life and, where those have none, from the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.change import EXACT, EXACT_TYPE
from penstock.errors import ValuesMissingError
from penstock.postgres.types.arrays import Bools, Ragged, as_arrow, distinct
from penstock.sinks.gathering import NewRows, Sizes, StoredRows, gather, row_sizes, take, value_sizes
from penstock.sinks.keys import exact_texts, key_codes
from penstock.sinks.layout import CURRENT, DELETED, Layout, Mode
from penstock.sinks.lives import Lives, Rows, bools_of

Lookup = Callable[[pa.Table | None], pa.Table | StoredRows]
"""Gives the rows that the target has, with the whole `Layout.schema`, under these keys: the key's columns, and `_exact` with the texts of
those that their type cannot hold. More rows do no harm. Of a history only rows that are current; in a soft_delete table also those that are
deleted. None asks for all of them. Called at most once for an epoch, and never for a mirror all of whose values travelled."""


def key_table(changes: pa.Table, rows: Rows, key: Sequence[str]) -> pa.Table:
    """The keys of these rows, `_exact` with no texts but theirs."""
    found = take(changes.select([*key, EXACT]), rows)
    return found.set_column(len(key), EXACT, _narrowed(found.column(EXACT), key))


def live_rows(found: pa.Table | StoredRows, layout: Layout) -> StoredRows:
    """What a lookup gave, without rows that are deleted or older versions."""
    rows = StoredRows.of(found) if isinstance(found, pa.Table) else found
    if layout.mode is Mode.SOFT_DELETE:
        return rows.only(~bools_of(rows.known.column(DELETED)))
    return rows.only(bools_of(rows.known.column(CURRENT))) if layout.mode is Mode.HISTORY else rows


def required(met: Bools) -> None:
    """Old values that only the target could have must not become nulls in silence."""
    if not met.all():
        raise ValuesMissingError(
            "a row that was copied or applied before is no longer in the target",
            hint="remove the target table and run again to copy it anew",
        )


def build_exact(texts: Mapping[str, pa.ChunkedArray], count: int) -> pa.Array:
    """The column `_exact` of `count` rows, from the texts of each column."""
    names = list(texts)
    rows = {at: np.flatnonzero(bools_of(texts[name].is_valid())) for at, name in enumerate(names)}
    if not any(len(each) for each in rows.values()):
        return pa.nulls(count, EXACT_TYPE)
    ragged = Ragged.plan(count, rows)
    values = pa.chunked_array([chunk for name in names for chunk in texts[name].drop_null().chunks], pa.string())
    entries = pa.StructArray.from_arrays(
        [
            pa.array(names, pa.string()).take(as_arrow(ragged.columns, pa.int64())),
            values.take(as_arrow(ragged.order, pa.int64())).combine_chunks(),
        ],
        fields=[EXACT_TYPE.key_field, EXACT_TYPE.item_field],
    )
    return ragged.build(EXACT_TYPE, entries)


def _narrowed(exact: pa.ChunkedArray, names: Sequence[str]) -> pa.Array | pa.ChunkedArray:
    found = {name: texts for name in names if (texts := exact_texts(exact, name)) is not None}
    return build_exact(found, len(exact))


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Rows of the target, and which of them each change of the epoch would meet by its key; -1: none."""

    rows: StoredRows
    met: Rows

    @classmethod
    def find(cls, changes: pa.Table, rows: Rows, layout: Layout, lookup: Lookup) -> Stored:
        """Look up the keys of `rows`, which are all different."""
        met = np.full(changes.num_rows, -1)
        if not len(rows):
            return cls(StoredRows.of(layout.schema.empty_table()), met)
        keys = key_table(changes, rows, layout.key)
        found = live_rows(lookup(keys), layout)
        asked, answered = key_codes([keys, found.known], layout.key)
        by_code = np.full(int(np.concatenate([asked, answered]).max()) + 1, -1)
        by_code[answered] = np.arange(len(answered))
        met[rows] = by_code[asked]
        return cls(found, met)


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """Where to find the values that rows have right after the changes `rows`, or had before a delete."""

    layout: Layout
    lives: Lives
    rows: Rows
    plain: Rows
    """The changes that gave the values of most columns."""
    partial: Mapping[str, Rows]
    """Those that gave the values of columns that some change left out."""

    @classmethod
    def plan(cls, layout: Layout, lives: Lives, rows: Rows) -> Values:
        names = [name for name in layout.columns.names if name in lives.partial and name not in layout.key]
        return cls(layout, lives, rows, lives.sources(rows), {name: lives.sources(rows, name) for name in names})

    @property
    def lacking(self) -> Bools:
        """Which rows have a value that only the target has."""
        lacking = self.plain < 0
        for sources in self.partial.values():
            lacking |= sources < 0
        return lacking

    @property
    def bases(self) -> Rows:
        """For each row the change that has the key under which the target has its old values."""
        return self.lives.first(self.rows)

    @property
    def asked(self) -> Rows:
        """The changes whose keys are to be looked up, each key once: a life that began in the epoch has nothing in the target."""
        bases = self.bases[self.lacking]
        return distinct(bases[~self.lives.is_insert[bases]])

    def only(self, wanted: Bools | Rows) -> Values:
        partial = {name: sources[wanted] for name, sources in self.partial.items()}
        return Values(self.layout, self.lives, self.rows[wanted], self.plain[wanted], partial)

    def new_rows(self, stored: Stored, schema: pa.Schema, complete: Callable[[Values, pa.Table], pa.Table]) -> NewRows:
        """A row for each of `rows`, as `complete` makes it of what `build` gives. Rows of the target are read in their own order."""
        met = np.where(self.lacking, stored.met[self.bases], -1)
        ordered = self.only(np.argsort(met, kind="stable")) if len(stored.rows.numbers) else self

        def built(rows: Rows) -> pa.Table:
            some = ordered.only(rows)
            return complete(some, some.build(stored))

        return NewRows(schema, ((ordered.sizes(stored), built),) if len(self.rows) else ())

    def sizes(self, stored: Stored) -> Sizes:
        """About how large the rows are."""
        changes = self.lives.changes
        sizes = np.append(row_sizes(changes.drop_columns(list(self.partial))), 0.0)[self.plain]
        for name, sources in self.partial.items():
            sizes += np.append(value_sizes(changes.column(name)), 0.0)[sources]
        return sizes + np.where(self.lacking, np.append(stored.rows.sizes, 0.0)[stored.met[self.bases]], 0.0)

    def build(self, stored: Stored) -> pa.Table:
        """`layout.columns` and `_exact`, a row for each of `rows`."""
        changes, layout = self.lives.changes, self.layout
        met = np.where(self.lacking, stored.met[self.bases], -1)
        needed = distinct(met[met >= 0])
        kept = stored.rows.take(needed)
        old = changes.num_rows + np.searchsorted(needed, met)
        given = {name: np.where(sources < 0, old, sources) for name, sources in self.partial.items()}
        rest = np.where(self.plain < 0, old, self.plain)
        columns = [_both(changes, kept, name, given.get(name, rest)) for name in layout.columns.names]
        texts = {}
        exact = pa.chunked_array([*changes.column(EXACT).chunks, *kept.column(EXACT).chunks], EXACT_TYPE)
        for name in _named(exact):
            found = exact_texts(exact, name) if name in layout.columns.names else None
            if found is not None:
                texts[name] = gather(found, given.get(name, rest))
        schema = pa.schema([*layout.columns, pa.field(EXACT, EXACT_TYPE)])
        return pa.table([*columns, build_exact(texts, len(self.rows))], schema=schema)


def _both(changes: pa.Table, stored: pa.Table, name: str, rows: Rows) -> pa.ChunkedArray:
    column = changes.column(name)
    if stored.num_rows:
        column = pa.chunked_array([*column.chunks, *stored.column(name).cast(column.type).chunks], column.type)
    return gather(column, rows)


def _named(exact: pa.ChunkedArray) -> list[str]:
    """The columns of which `_exact` has texts anywhere."""
    if exact.null_count == len(exact):
        return []
    names = pa.chunked_array([chunk.drop_null().keys for chunk in exact.chunks], pa.string())
    return list(pc.unique(names).to_pylist())
