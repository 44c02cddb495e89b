"""What the event trigger put into the log about a table's columns, and which shapes of the log that tells the numbers of.

Pure. A message stands in the transaction that altered the table. Between two transactions the last message says what the columns are;
inside of one it is not known here which change came before which message: what is said must be the same by all that may hold.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.change import LogicalMessage
from penstock.position import Position
from penstock.schema import TableSchema
from penstock.sinks.lineage import Numbers, Told
from penstock.spool.range import FileSlice

_log = logging.getLogger(__name__)

MAX_HINT_BYTES = 1 << 20
"""A table has 1,600 columns at most, whose names have 63 bytes."""
_MAC_BYTES = 64
_MAX_OID = (1 << 32) - 1
_MAX_COLUMNS = 1_600


@dataclass(frozen=True, slots=True)
class Alteration:
    """A table's columns by their numbers, from a transaction on."""

    oid: int | None
    """None: a message was dropped, which may have been about any table."""
    position: Position
    columns: Mapping[int, str]

    def concerns(self, oid: int) -> bool:
        return self.oid is None or self.oid == oid

    def numbers_of(self, schema: TableSchema) -> Numbers | None:
        """Of the columns of a shape that is one of these columns, all or some of them; None if it cannot be."""
        numbers = {name: number for number, name in self.columns.items()}
        if any(name not in numbers for name in schema.column_names):
            return None
        found = tuple(numbers[name] for name in schema.column_names)
        return found if found == tuple(sorted(found)) else None


class AlterationReader:
    """Reads the messages of the event trigger. Every role can emit messages under the same prefix, with any content and size.

    Only those that are signed with the key of the event trigger count. The others are ignored, with one warning for every power of ten.
    """

    def __init__(self, prefix: str, key: bytes | None = None) -> None:
        """Without `key`, which may come later, nothing counts."""
        self._prefix = prefix
        self.key = key
        self.ignored = 0

    def read(self, messages: Iterable[LogicalMessage]) -> list[Alteration]:
        """In the order of the log."""
        found = []
        for message in messages:
            if message.prefix != self._prefix or message.position is None:
                continue
            if not message.content:  # dropped on the way, since there were too many, or it was too large
                found.append(Alteration(None, message.position, {}))
                continue
            alteration = self._parse(message.content, message.position)
            if alteration is None:
                self._ignore()
            else:
                found.append(alteration)
        return found

    def _parse(self, content: bytes, position: Position) -> Alteration | None:
        if self.key is None or len(content) > MAX_HINT_BYTES:
            return None
        mac, _, body = content.partition(b" ")
        if len(mac) != _MAC_BYTES or not hmac.compare_digest(mac, sign(self.key, body)):
            return None
        try:
            told = json.loads(body)
        except (ValueError, RecursionError):
            return None
        match told:
            case {"oid": int(oid), "columns": None | list() as columns} if 0 < oid <= _MAX_OID:
                numbers = _parse_columns(columns or [])
                return None if numbers is None else Alteration(oid, position, numbers)
        return None

    def _ignore(self) -> None:
        self.ignored += 1
        if math.log10(self.ignored).is_integer():
            _log.warning("messages of the event trigger ignored", extra={"ignored": self.ignored, "is_key_known": self.key is not None})


def sign(key: bytes, body: bytes) -> bytes:
    """As the event trigger does."""
    return hashlib.sha256(key + body + key).hexdigest().encode()


def _parse_columns(columns: list[object]) -> dict[int, str] | None:
    found: dict[int, str] = {}
    for column in columns:
        match column:
            case [int(number), str(name)] if 0 < number <= _MAX_COLUMNS:
                found[number] = name
            case _:
                return None
    return dict(sorted(found.items()))


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
        is_complete = not any(each.oid is None for each in (*before[-1:], *within))
        is_sure = is_complete and len(sure) == 1 and {numbers for numbers in doubts if numbers is not None} <= sure
        told.append(Told(tuple(tuple(each.columns) for each in before[-1:] if each.columns), sure.pop() if is_sure else None))
    return told
