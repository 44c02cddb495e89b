"""What a keeper does to the files of a reference table now and then: changes become rows, and many small files one.

Both write new files beside those that count, and give the state that names them; nothing counts before that state is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from penstock.contracts.reference import reference_schema
from penstock.reference.files import RowFile, load_history, read_changes
from penstock.reference.store import ChangesFile, StoreState


def folded(directory: Path, state: StoreState, floor: int, columns: pa.Schema) -> StoreState:
    """One base of the table as of `floor`, and one file of all changes after it."""
    rows = load_history(directory, state, upto=floor).rows_at(floor)
    base = RowFile(directory, "base", rows.schema)
    base.write(rows)
    left = _one_of(directory, state.changes, floor, state.reached, columns)
    return replace(state, base=base.finish(), base_rows=base.rows, floor=floor, changes=left)


def joined(directory: Path, state: StoreState, columns: pa.Schema) -> StoreState:
    """The newest files of changes as one, so many that each file is left more than twice as long as all after it: few are then left, and no
    change is written again more often than a few times, however long nothing can be folded.
    """
    first, rows = len(state.changes) - 1, state.changes[-1].rows
    while first > 0 and state.changes[first - 1].rows <= 2 * rows:
        first -= 1
        rows += state.changes[first].rows
    kept, newest = state.changes[:first], state.changes[first:]
    return replace(state, changes=(*kept, *_one_of(directory, newest, newest[0].after, newest[-1].upto, columns)))


def _one_of(directory: Path, files: Sequence[ChangesFile], after: int, upto: int, columns: pa.Schema) -> tuple[ChangesFile, ...]:
    """A file of all changes after a version, or none if there are none."""
    file = RowFile(directory, "changes", reference_schema(columns))
    for batch in read_changes(directory, files, after=after):
        file.write(batch)
    if file.rows:
        return (ChangesFile(file.finish(), after, upto, file.rows),)
    file.discard()
    return ()
