"""How changes of one shape of the source are read as those of a target that has another by now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.change import EXACT, METADATA_NAMES, UNCHANGED
from penstock.postgres.types.arrays import as_arrow
from penstock.sinks.keys import exact_texts
from penstock.sinks.values import build_exact


@dataclass(frozen=True, slots=True)
class View:
    """Travels to the executors."""

    names: Mapping[str, str]
    """The source's columns, as they were called then, and their names in the target. Others are left out."""
    fills: Mapping[str, pa.Scalar] = field(default_factory=dict)
    """Columns of the target that were added later, with what the source gave to rows that were there; not where that is null."""
    leaves_out: bool = False
    """Whether the source had columns then that are not among `names`, be they called as they may."""
    source: str | None = None
    """Where several tables go into one: the column, among `fills`, that says from which of them a row is. A truncate takes those alone."""

    @property
    def is_plain(self) -> bool:
        """Whether every column is called in the target as it was then, and none is missing that is not null."""
        return not self.fills and not self.leaves_out and all(name == target for name, target in self.names.items())

    def renamed(self, changes: pa.Table) -> pa.Table:
        """Changes as they were spooled, under the target's names; what speaks of columns speaks of those. Others are gone."""
        metadata = [name for name in changes.column_names if name in METADATA_NAMES]
        own = {self.names[name]: changes.column(name) for name in changes.column_names if name in self.names and name not in metadata}
        known = {name: changes.column(name) for name in metadata}
        if UNCHANGED in known:
            known[UNCHANGED] = renamed_lists(known[UNCHANGED], self.names)
        if EXACT in known:
            texts = {target: found for name, target in self.names.items() if (found := exact_texts(known[EXACT], name)) is not None}
            known[EXACT] = build_exact(texts, changes.num_rows)
        return pa.table({**own, **known})


def renamed_lists(column: pa.ChunkedArray, names: Mapping[str, str]) -> pa.Array | pa.ChunkedArray:
    """Lists of names; what is left empty is null, as if it had never been."""
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
