"""Changes whose values stop their table: texts that cannot be read, and, where the operator said so, values beyond their type.

The capture writes them all the same, since other tables share its stream and other readers may take a null. Manifests count them, so a
file is opened only if it has some.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.change import REPLACED
from penstock.errors import PenstockError, UnreadableTextError, UnrepresentableError
from penstock.schema import TableName
from penstock.spool.range import FileSlice
from penstock.spool.rows import ExactEntries, read_exact


@dataclass(frozen=True, slots=True)
class RefusedValue:
    """A value that stops its table: the commit that it came with, and the error that names its column."""

    version: int
    error: PenstockError


def check_values(table: TableName, slices: Iterable[FileSlice], *, refuse_inexact: bool) -> None:
    """Raise the error that names the first column whose value stops the table, if there is one."""
    refused = first_refused(table, slices, refuse_inexact=refuse_inexact)
    if refused is not None:
        raise refused.error


def first_refused(table: TableName, slices: Iterable[FileSlice], *, refuse_inexact: bool) -> RefusedValue | None:
    """The first value in the order of the log that stops the table."""
    for each in slices:
        counts = each.file.counts
        if not (counts.unreadable or (refuse_inexact and counts.inexact)):
            continue
        for version, entries in read_exact(each):
            error = _refusal(table, entries, has_unreadable=counts.unreadable > 0, refuse_inexact=refuse_inexact)
            if error is not None:
                return RefusedValue(version, error)
    return None


def _refusal(table: TableName, entries: ExactEntries, *, has_unreadable: bool, refuse_inexact: bool) -> PenstockError | None:
    for column, text in entries:
        if has_unreadable and REPLACED in text:
            return UnreadableTextError.of(table, column)
    for column, _ in entries:
        if refuse_inexact:
            return UnrepresentableError.of(table, column)
    return None
