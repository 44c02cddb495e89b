"""Values that did not travel with a change, but with an earlier one of the same row and epoch.

A filter decides on each change by itself, and may leave out the one that a later change refers to. So what can be had from the epoch is
put in before; what is still missing then was not touched in the whole epoch, and the target has it, if it has the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from penstock.change import EXACT, UNCHANGED, ChangeType
from penstock.postgres.types.arrays import Bools, Ragged, as_arrow
from penstock.sinks.keys import exact_texts, key_codes
from penstock.sinks.lives import Lives, Rows, is_kind, unchanged_rows
from penstock.sinks.values import build_exact


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """`changes` in the order of the log, with all values that the epoch has of them."""

    changes: pa.Table
    lives: Lives

    def orphans(self, left_out: Bools) -> Bools:
        """Rows that lack a value, and whose life came through an insert that is `left_out`: the target has that value nowhere."""
        count = self.changes.num_rows
        lacking = np.flatnonzero(np.asarray(self.changes.column(UNCHANGED).is_valid()))
        births = np.flatnonzero(left_out & self.lives.is_insert)
        since = np.full(count, count)
        np.minimum.at(since, self.lives.first(births), births)
        found: Bools = np.zeros(count, np.bool_)
        found[lacking] = since[self.lives.first(lacking)] < lacking
        return found


def fill(changes: pa.Table, key: tuple[str, ...]) -> Filled:
    lives = Lives(changes, _codes(changes, key))
    unchanged = unchanged_rows(changes.column(UNCHANGED))
    rest: dict[str, Rows] = {}
    sources: dict[str, Rows] = {}
    for name, rows in unchanged.items():
        found = lives.sources(rows, name)
        sources[name] = np.arange(changes.num_rows)
        sources[name][rows[found >= 0]] = found[found >= 0]
        rest[name] = rows[found < 0]
    exact = changes.column(EXACT)
    texts = {name: values for name in changes.column_names if (values := exact_texts(exact, name)) is not None}
    for name, each in sources.items():
        at = changes.column_names.index(name)
        changes = changes.set_column(at, changes.field(at), changes.column(at).take(as_arrow(each, pa.int64())))
        if name in texts:
            texts[name] = texts[name].take(as_arrow(each, pa.int64()))
    changes = _with(changes, EXACT, build_exact(texts, changes.num_rows))
    return Filled(_with(changes, UNCHANGED, _lists(rest, changes.num_rows)), lives)


def _codes(changes: pa.Table, key: tuple[str, ...]) -> Rows:
    """Numbers for keys, which mean another row after the table was emptied; a truncate is by itself."""
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
