"""Takes the rows of rolled back subtransactions out of a file, before it becomes part of a segment.

Row group by row group, so that memory stays bounded. A file without such rows is left as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.change import CHANGE_TYPE, EXACT, UNCHANGED, XID, ChangeBatch, ChangeCounts, ChangeType, change_schema, metadata_place
from penstock.schema import TableSchema
from penstock.spool import storage
from penstock.spool.changefile import ChangeFile

_COUNTED = (ChangeType.INSERT, ChangeType.UPDATE_POSTIMAGE, ChangeType.DELETE, ChangeType.TRUNCATE, ChangeType.UPDATE_PREIMAGE)


@dataclass(frozen=True, slots=True)
class PrunedFile:
    """What is left; without rows, there is no file."""

    path: Path
    rows: int
    bytes: int
    counts: ChangeCounts


def prune(path: Path, table: TableSchema, counts: ChangeCounts, aborted: npt.NDArray[np.int64]) -> PrunedFile | None:
    """Write the file anew, under another name, without the rows of `aborted`, and remove it. None if it has no such row.

    `aborted` is sorted. `counts` are of the whole file. Of the rows that are left, those that moved cannot be told from other deletes and
    inserts, nor unreadable texts from other nulls: what is counted of them then is an upper bound.
    """
    with pq.ParquetFile(path) as file:
        groups = range(file.num_row_groups)
        # The table may have a column of the same name; ours stands after it.
        kept = [~_are_in(file.read_row_group(group, columns=[XID]).columns[-1], aborted) for group in groups]
        if all(mask.all() for mask in kept):
            return None
        pruned = _copy(file, kept, path.with_suffix(".pruned.parquet"), table, counts)
    storage.remove_file(path)
    return pruned


def _are_in(xids: pa.ChunkedArray, aborted: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    values = xids.to_numpy()
    at = np.minimum(np.searchsorted(aborted, values), len(aborted) - 1)
    found: npt.NDArray[np.bool_] = aborted[at] == values
    return found


def _copy(file: pq.ParquetFile, kept: list[npt.NDArray[np.bool_]], target: Path, table: TableSchema, whole: ChangeCounts) -> PrunedFile:
    copy: ChangeFile | None = None
    for group, mask in enumerate(kept):
        if mask.any():
            copy = copy or ChangeFile(target, table)
            rows = file.read_row_group(group).filter(pa.array(mask))
            copy.write([_batch(table, batch) for batch in rows.to_batches()])
    if copy is None:
        return PrunedFile(target, 0, 0, ChangeCounts())
    size_bytes = copy.finish()
    moves = min(whole.moves, copy.counts.inserts, copy.counts.deletes)
    return PrunedFile(
        target, copy.rows, size_bytes, replace(copy.counts, moves=moves, unreadable=whole.unreadable, unidentified=whole.unidentified)
    )


def _batch(table: TableSchema, rows: pa.RecordBatch) -> ChangeBatch:
    return ChangeBatch(table, pa.RecordBatch.from_arrays(rows.columns, schema=change_schema(table)), _count(table, rows))


def _count(table: TableSchema, rows: pa.RecordBatch) -> ChangeCounts:
    kinds = rows.column(metadata_place(table, CHANGE_TYPE))
    inserts, updates, deletes, truncates, old = (pc.sum(pc.equal(kinds, str(kind))).as_py() for kind in _COUNTED)
    unchanged, inexact = (rows.num_rows - rows.column(metadata_place(table, name)).null_count for name in (UNCHANGED, EXACT))
    return ChangeCounts(inserts, updates, deletes, truncates, unchanged=unchanged, inexact=inexact, preimages=old)
