"""What the event trigger put into the log about a table's columns, and which shapes of the log that tells the numbers of.

Pure. A message stands in the transaction that altered the table. Between two transactions the last message says what the columns are;
inside of one it is not known here which change came before which message: what is said must be the same by all that may hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.change import LogicalMessage
from penstock.position import Position
from penstock.schema import TableSchema
from penstock.sinks.lineage import Numbers, Told
from penstock.spool.range import FileSlice


@dataclass(frozen=True, slots=True)
class Alteration:
    """A table's columns by their numbers, from a transaction on."""

    oid: int
    position: Position
    columns: Mapping[int, str]

    def numbers_of(self, schema: TableSchema) -> Numbers | None:
        """Of the columns of a shape that is one of these columns, all or some of them; None if it cannot be."""
        numbers = {name: number for number, name in self.columns.items()}
        if any(name not in numbers for name in schema.column_names):
            return None
        found = tuple(numbers[name] for name in schema.column_names)
        return found if found == tuple(sorted(found)) else None


def parse_alterations(messages: Iterable[LogicalMessage], prefix: str) -> list[Alteration]:
    """In the order of the log. What cannot be understood is somebody else's."""
    found = []
    for message in messages:
        if message.prefix != prefix or message.position is None:
            continue
        try:
            told = json.loads(message.content)
            columns = {int(number): str(name) for number, name in told["columns"] or ()}
            found.append(Alteration(int(told["oid"]), message.position, dict(sorted(columns.items()))))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def tell_numbers(slices: Sequence[FileSlice], alterations: Sequence[Alteration], first: Mapping[int, str]) -> list[Told]:
    """What the messages tell of each shape in turn, as `TableChanges.schemas` has them; `first` are the columns before all of it."""
    told: list[Told] = []
    for version, group in groupby(slices, key=lambda slice: slice.file.schema):
        files = [slice.file for slice in group]
        start, end = min(file.min_position for file in files), max(file.max_position for file in files)
        before = [each for each in alterations if each.position < start]
        within = [each for each in alterations if start <= each.position <= end]
        # What held before the first message is an assumption, which may cast doubt and never proves anything.
        known = [each.numbers_of(version) for each in (*before[-1:], *within)]
        doubts = [] if before else [Alteration(version.oid, start, first).numbers_of(version)]
        sure = {numbers for numbers in known if numbers is not None}
        is_sure = len(sure) == 1 and {numbers for numbers in doubts if numbers is not None} <= sure
        told.append(Told(tuple(tuple(each.columns) for each in before[-1:] if each.columns), sure.pop() if is_sure else None))
    return told
