"""Which columns of the target did not change, told by those of the source that did not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.postgres.types.arrays import as_arrow


def target_lists(column: pa.ChunkedArray, names: Mapping[str, Sequence[str]]) -> pa.Array | pa.ChunkedArray:
    """`_unchanged` with the target's names, any number for each of the source's; what is left empty is null, as if it had never been."""
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
