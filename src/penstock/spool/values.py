"""Changes whose values stop their table: texts that cannot be read, and, where the operator said so, values beyond their type.

The capture writes them all the same, since other tables share its stream and other readers may take a null. Manifests count them, so a
file is opened only if it has some.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.change import COMMIT_VERSION, EXACT
from penstock.errors import UnreadableTextError, UnrepresentableError
from penstock.schema import TableName
from penstock.spool.range import FileSlice

_REPLACED = "\ufffd"


def check_values(table: TableName, slices: Iterable[FileSlice], *, refuse_inexact: bool) -> None:
    """Raise the error that names the first column whose value stops the table, if there is one."""
    for each in slices:
        counts = each.file.counts
        if counts.unreadable:
            for column, text in _exact_entries(each):
                if _REPLACED in text:
                    raise UnreadableTextError.of(table, column)
        if refuse_inexact and counts.inexact:
            for column, _ in _exact_entries(each):
                raise UnrepresentableError.of(table, column)


def _exact_entries(slice: FileSlice) -> Iterator[tuple[str, str]]:
    rows = pq.read_table(slice.path, columns=[COMMIT_VERSION, EXACT])
    if slice.after is not None:
        rows = rows.filter(pc.field(COMMIT_VERSION) > slice.after.value)
    if slice.upto is not None:
        rows = rows.filter(pc.field(COMMIT_VERSION) <= slice.upto.value)
    for entries in rows.column(EXACT).drop_null().to_pylist():
        yield from entries
