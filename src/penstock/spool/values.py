"""Changes that stop their table: texts that cannot be read, values beyond their type where the operator said so, and changes that do not
identify their row.

The capture writes them all the same, since other tables share its stream and other readers may take a null. Manifests count them, so a
file is opened only if it has some.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from penstock.change import REPLACED
from penstock.errors import PenstockError, RowUnidentifiedError, UnreadableTextError, UnrepresentableError
from penstock.schema import TableName
from penstock.spool.range import FileSlice
from penstock.spool.rows import ExactEntries, read_exact, read_unidentified


@dataclass(frozen=True, slots=True)
class RefusedValue:
    """A change that stops its table: the commit that it came with, and the error that names its table or column."""

    version: int
    error: PenstockError


def check_values(table: TableName, slices: Iterable[FileSlice], *, refuse_inexact: bool) -> None:
    """Raise the error of the first change that stops the table, if there is one."""
    refused = first_refused(table, slices, refuse_inexact=refuse_inexact)
    if refused is not None:
        raise refused.error


def check_identified(slices: Iterable[FileSlice]) -> None:
    """Raise if a change does not identify its row. No policy allows such a change to be applied, nor to be set aside."""
    for each in slices:
        for refused in _unidentified(each):
            raise refused.error


def first_refused(table: TableName, slices: Iterable[FileSlice], *, refuse_inexact: bool) -> RefusedValue | None:
    """The first change in the order of the log that stops the table."""
    for each in slices:
        found = [next(_unidentified(each), None), next(_refused(table, each, refuse_inexact=refuse_inexact), None)]
        stops = [refused for refused in found if refused is not None]
        if stops:
            return min(stops, key=attrgetter("version"))
    return None


def _unidentified(slice: FileSlice) -> Iterator[RefusedValue]:
    if slice.file.counts.unidentified:
        for version in read_unidentified(slice):
            yield RefusedValue(version, RowUnidentifiedError.of(slice.file.table))


def _refused(table: TableName, slice: FileSlice, *, refuse_inexact: bool) -> Iterator[RefusedValue]:
    counts = slice.file.counts
    if counts.unreadable or (refuse_inexact and counts.inexact):
        for version, entries in read_exact(slice):
            error = _refusal(table, entries, has_unreadable=counts.unreadable > 0, refuse_inexact=refuse_inexact)
            if error is not None:
                yield RefusedValue(version, error)


def _refusal(table: TableName, entries: ExactEntries, *, has_unreadable: bool, refuse_inexact: bool) -> PenstockError | None:
    for column, text in entries:
        if has_unreadable and REPLACED in text:
            return UnreadableTextError.of(table, column)
    for column, _ in entries:
        if refuse_inexact:
            return UnrepresentableError.of(table, column)
    return None
