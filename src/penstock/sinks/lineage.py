"""Column lineage: identify columns from one schema version to the next, with hints from the event trigger,
and map target columns to source columns.

A column is identified by its number in the catalog (`attnum`). A rename keeps the number, an added column
gets the next number, and the number of a dropped column is never reused. The WAL stream has only the column
names, in the order of the numbers. So the column numbers of a schema version have to be inferred from an
earlier schema with known numbers and from the current catalog. A version with n columns can have every set of
n numbers that fits both: a column that exists before and after also exists in between, and columns are added
in the order of their numbers. If exactly one set fits, it is the result, whatever the names are. Otherwise
the numbers are unknown, because equal names prove nothing.

All functions are pure. The event trigger writes a message in the transaction that alters a table. Between two
transactions, the last message gives the columns. Within a transaction, the order of messages and changes is
unknown, so a result counts only if it is the same for all possible orders.
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
from math import comb
from typing import Any, Self

from penstock.arrow import type_text
from penstock.change import LogicalMessage
from penstock.position import Position
from penstock.schema import Column, TableSchema
from penstock.spool.reader import FileSlice

Numbers = tuple[int, ...]
"""Column numbers (`attnum`) in the order of the table's columns, which is ascending."""


@dataclass(frozen=True, slots=True)
class Numbering:
    """The columns of a table at one time."""

    live: Numbers
    width: int
    """The greatest column number that the table has used so far."""


@dataclass(frozen=True, slots=True)
class DdlHint:
    """The column numbers that the event trigger reported for one schema version, and before it."""

    before: tuple[Numbers, ...] = ()
    """The column numbers that the table had at times between the previous version and this one."""
    numbers: Numbers | None = None
    """The column numbers of the version; None if the messages do not determine them."""


def trace(
    counts: Sequence[int], before: Numbering, now: Numbering, hints: Sequence[DdlHint] = ()
) -> list[Numbers | None]:
    """Infer the column numbers of successive schema versions between `before` and `now`. `counts` has the
    number of columns of each version. The result for a version is None if several sets of numbers fit, or if
    none fits because the publication changed as well.

    `hints` has one hint for each version. All hints are ignored if one of them has a number that the table
    has not used yet.
    """
    known = [numbers for each in hints for numbers in (*each.before, each.numbers) if numbers is not None]
    if not hints or any(max(numbers, default=0) > now.width for numbers in known):
        return _trace(counts, [None] * len(counts), before, now)
    lengths: list[int] = []
    found: list[Numbers | None] = []
    places: list[int] = []
    for count, each in zip(counts, hints, strict=True):
        lengths += [*map(len, each.before), count]
        found += [*each.before, each.numbers]
        places.append(len(lengths) - 1)
    traced = _trace(lengths, found, before, now)
    return [traced[place] for place in places]


def _trace(
    counts: Sequence[int], found: list[Numbers | None], before: Numbering, now: Numbering
) -> list[Numbers | None]:
    """Add the inferable column numbers to `found`, the numbers that are known. Repeats until it finds no
    more, because each known version restricts the versions next to it.
    """
    while True:
        known = list(found)
        for at, count in enumerate(counts):
            if found[at] is None:
                found[at] = _between(
                    count, _last_known(found[:at], before), _next_known(found[at + 1 :], now)
                )
        if found == known:
            return found


def _last_known(earlier: Sequence[Numbers | None], before: Numbering) -> Numbering:
    """The last known columns before a version. Their width is a lower bound, because a version does not show
    the numbers of columns that were already dropped.
    """
    known = [numbers for numbers in earlier if numbers is not None]
    width = max([before.width, *(numbers[-1] for numbers in known if numbers)])
    return Numbering(known[-1] if known else before.live, width)


def _next_known(later: Sequence[Numbers | None], now: Numbering) -> Numbering:
    """The next known columns after a version. Their width, that of the current catalog, is an upper bound."""
    return Numbering(next((numbers for numbers in later if numbers is not None), now.live), now.width)


def _between(count: int, before: Numbering, after: Numbering) -> Numbers | None:
    stayed = set(before.live) & set(after.live)
    if any(number <= before.width and number not in stayed for number in after.live):
        return None
    dropped = [number for number in before.live if number not in stayed]
    added: list[int] = []
    """New columns that exist in `after`, and therefore at all times since they were added."""
    passing: list[int] = []
    choices = [_choice(count, [*stayed], dropped)]
    for number in range(before.width + 1, after.width + 1):
        choices.append(_choice(count, [*stayed, *added, number], [*dropped, *passing]))
        (added if number in after.live else passing).append(number)
    sure = [choice for choice in choices if choice is not None]
    return sure[0] if len(sure) == 1 and sure[0] else None


def _choice(count: int, certain: Sequence[int], possible: Sequence[int]) -> Numbers | None:
    """Choose `count` columns, among them all `certain` ones. Returns their numbers; an empty tuple if there
    are several choices; None if there is no choice.
    """
    rest = count - len(certain)
    if not 0 <= rest <= len(possible):
        return None
    return tuple(sorted([*certain, *possible[:rest]])) if comb(len(possible), rest) == 1 else ()


@dataclass(frozen=True, slots=True)
class OriginColumn:
    """A source column as of the last schema change, and the name of its column in the target. `target` is
    None if the target does not have the column.
    """

    name: str
    type_oid: int
    type_modifier: int
    target: str | None

    @classmethod
    def of(cls, column: Column, target: str | None) -> Self:
        return cls(column.name, column.type_oid, column.type_modifier, target)

    def is_like(self, column: Column) -> bool:
        return (self.name, self.type_oid, self.type_modifier) == (
            column.name,
            column.type_oid,
            column.type_modifier,
        )


@dataclass(frozen=True, slots=True)
class Origin:
    columns: Mapping[int, OriginColumn]
    """The source's columns by column number, in the order of the table. Columns that the source has dropped
    are not included, even if the target still has them.
    """
    width: int
    heap: str
    """See `Attributes`."""
    made_by: str = ""
    """The transform that computed the target's columns; empty if none."""
    read_as: tuple[str, ...] = ()
    """With a transform: the Arrow type of each source column, as `type_text`. Empty if an earlier version of
    Penstock filled the target.
    """

    @classmethod
    def of(cls, schema: TableSchema) -> Self | None:
        """The origin of a new target with the columns of `schema`; None if the schema has no column numbers.
        Source columns from which a transform derives the target's columns have no name in the target.
        """
        attributes = schema.attributes
        if attributes is None or not attributes.width:
            return None
        columns = schema.columns if attributes.source is None else attributes.source
        if len(attributes.numbers) != len(columns):
            return None
        named = [
            OriginColumn.of(column, column.name if attributes.source is None else None) for column in columns
        ]
        return cls(
            dict(zip(attributes.numbers, named, strict=True)),
            attributes.width,
            attributes.heap,
            attributes.made_by,
            () if attributes.source is None else _types_of(columns),
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        found: dict[str, Any] = json.loads(text)
        columns = {int(number): OriginColumn(*column) for number, column in found["columns"].items()}
        made_by, read_as = str(found.get("made_by", "")), tuple(map(str, found.get("read_as", ())))
        return cls(columns, int(found["width"]), str(found["heap"]), made_by, read_as)

    def __str__(self) -> str:
        columns = {
            str(number): [each.name, each.type_oid, each.type_modifier, each.target]
            for number, each in self.columns.items()
        }
        document: dict[str, Any] = {"width": self.width, "heap": self.heap, "columns": columns}
        transformed = {"made_by": self.made_by, "read_as": self.read_as}
        document |= {name: value for name, value in transformed.items() if value}
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False)

    def is_read_as(self, schema: TableSchema) -> bool:
        """Whether the columns of `schema`, which has the shape of this origin, have the Arrow types that they
        had when the target was filled. True if these types are not recorded.
        """
        return not self.read_as or self.read_as == _types_of(schema.columns)

    @property
    def numbering(self) -> Numbering:
        return Numbering(tuple(self.columns), self.width)

    def is_shape_of(self, schema: TableSchema) -> bool:
        """Whether `schema` has the same column names and declared types. The column numbers may still differ,
        so these need not be the same columns.
        """
        return len(schema.columns) == len(self.columns) and all(
            known.is_like(column) for known, column in zip(self.columns.values(), schema.columns, strict=True)
        )

    def is_same(self, schema: TableSchema) -> bool:
        """Whether `schema` has the same columns: the same names, declared types and column numbers."""
        return (
            self.is_shape_of(schema)
            and schema.attributes is not None
            and schema.attributes.numbers == tuple(self.columns)
        )

    def has_all_of(self, schema: TableSchema) -> bool:
        """Whether the column numbers in `schema` show that no column was added or dropped. Names and types
        may have changed.
        """
        attributes = schema.attributes
        return attributes is not None and (attributes.numbers, attributes.width) == (
            tuple(self.columns),
            self.width,
        )

    def numbers_of(self, targets: tuple[str, ...]) -> frozenset[int]:
        """The numbers of the columns with these names in the target."""
        return frozenset(number for number, column in self.columns.items() if column.target in targets)


def _types_of(columns: Sequence[Column]) -> tuple[str, ...]:
    return tuple(type_text(column.arrow_type) for column in columns)


_log = logging.getLogger(__name__)

MAX_HINT_BYTES = 1 << 20
"""Maximum size of a message. A table has at most 1,600 columns, with names of at most 63 bytes."""
_MAC_BYTES = 64
_MAX_OID = (1 << 32) - 1
_MAX_COLUMNS = 1_600
_XID_BITS = (1 << 32) - 1
"""The WAL has only these bits of a transaction id."""


@dataclass(frozen=True, slots=True)
class Alteration:
    """The columns that a table has after the transaction at `position`: the names by column number."""

    oid: int | None
    """The OID of the table. None if the capture dropped a message, which may have been about any table."""
    position: Position
    columns: Mapping[int, str]

    def concerns(self, oid: int) -> bool:
        return self.oid is None or self.oid == oid

    def numbers_of(self, schema: TableSchema) -> Numbers | None:
        """The column numbers of a schema version. None if the version has a column that is not one of these
        columns, or has them in another order.
        """
        numbers = {name: number for number, name in self.columns.items()}
        if any(name not in numbers for name in schema.column_names):
            return None
        found = tuple(numbers[name] for name in schema.column_names)
        return found if found == tuple(sorted(found)) else None


class AlterationReader:
    """Reads the messages of the event trigger. Any role can emit messages with the same prefix, with any
    content and size.

    A message is accepted only if it is signed with the key of the event trigger, and only in the transaction
    that it names, because a role that can read the WAL could repeat a signed message. Other messages are
    ignored; a warning is logged for the first, the tenth, the hundredth and so on.
    """

    def __init__(self, prefix: str, key: bytes | None = None) -> None:
        """While `key` is None, all messages are ignored. It may be set later."""
        self._prefix = prefix
        self.key = key
        self.ignored = 0

    def read(self, messages: Iterable[LogicalMessage]) -> list[Alteration]:
        """Return the schema changes that accepted messages report. `messages` are in commit order."""
        found = []
        for message in messages:
            if message.prefix != self._prefix or message.position is None:
                continue
            if not message.content:  # dropped by the capture, because there were too many or it was too large
                found.append(Alteration(None, message.position, {}))
                continue
            alteration = self._parse(message.content, message.xid, message.position)
            if alteration is None:
                self._ignore()
            else:
                found.append(alteration)
        return found

    def _parse(self, content: bytes, xid: int | None, position: Position) -> Alteration | None:
        if self.key is None or len(content) > MAX_HINT_BYTES:
            return None
        mac, _, body = content.partition(b" ")
        if len(mac) != _MAC_BYTES or not hmac.compare_digest(mac, sign(self.key, body)):
            return None
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            return None
        match document:
            case {"oid": int(oid), "xid": int(named), "columns": None | list() as columns} if (
                0 < oid <= _MAX_OID
            ):
                if named & _XID_BITS != xid:
                    return None
                numbers = _parse_columns(columns or [])
                return None if numbers is None else Alteration(oid, position, numbers)
        return None

    def _ignore(self) -> None:
        self.ignored += 1
        if math.log10(self.ignored).is_integer():
            _log.warning(
                "messages of the event trigger ignored",
                extra={"ignored": self.ignored, "is_key_known": self.key is not None},
            )


def sign(key: bytes, body: bytes) -> bytes:
    """Sign a message as the event trigger does."""
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


def resolve_attnums(
    slices: Sequence[FileSlice], alterations: Sequence[Alteration], first: Mapping[int, str]
) -> list[DdlHint]:
    """Return the hint for each of `TableChanges.schemas`. `first` has the columns that are assumed before the
    first message: the names by column number.
    """
    hints: list[DdlHint] = []
    for version, group in groupby(slices, key=lambda slice: slice.file.schema):
        files = [slice.file for slice in group]
        start, end = min(file.min_position for file in files), max(file.max_position for file in files)
        before = [each for each in alterations if each.position < start]
        within = [each for each in alterations if start <= each.position <= end]
        # The columns before the first message are an assumption. It may disprove a result, but never proves
        # one.
        known = [each.numbers_of(version) for each in (*before[-1:], *within)]
        doubts = [] if before else [Alteration(version.oid, start, first).numbers_of(version)]
        sure = {numbers for numbers in known if numbers is not None}
        is_complete = not any(each.oid is None for each in (*before[-1:], *within))
        is_sure = (
            is_complete and len(sure) == 1 and {numbers for numbers in doubts if numbers is not None} <= sure
        )
        hints.append(
            DdlHint(
                tuple(tuple(each.columns) for each in before[-1:] if each.columns),
                sure.pop() if is_sure else None,
            )
        )
    return hints
