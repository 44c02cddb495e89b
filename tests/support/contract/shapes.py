"""The tables of the matrix: one for each replica identity, with the column types that sinks treat specially.

The number of its key and a second number determine a row: they give every other value, typed and as Postgres
text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa

from penstock.schema import Column, TableName, TableSchema
from tests.support.sinks.source import NULL, Row, Value

Pair = tuple[object, str]
"""The value of a column, None if it cannot hold it; and its text."""

KEYS_A_GROUP = 50


@dataclass(frozen=True)
class Family:
    """A column of one type. Row `n` has the value `n` of `values`, cyclically; None is a null."""

    name: str
    oid: int
    arrow_type: pa.DataType
    values: tuple[Pair | None, ...]


_NAN, _UUID = float("nan"), "00000000-0000-0000-0000-000000000007"
_FAMILIES = (
    Family("a text", 25, pa.string(), (("one", "one"), ("two\t\\", "two\t\\"), None, ("", ""))),
    Family("bytes", 17, pa.binary(), ((b"\x00\xff", "\\x00ff"), None, (b"", "\\x"))),
    Family("json", 114, pa.string(), (('{"a": [1, null]}', '{"a": [1, null]}'), ("null", "null"), None)),
    Family("jsonb", 3802, pa.string(), (('{"a": 1}', '{"a": 1}'), ("[]", "[]"))),
    Family(
        "hstore",
        70_001,
        pa.map_(pa.string(), pa.string()),
        (([("a", "1")], '"a"=>"1"'), ([("b", None)], '"b"=>NULL')),
    ),
    Family("texts", 1009, pa.list_(pa.string()), ((["a", None, "b c"], '{a,NULL,"b c"}'), ([], "{}"), None)),
    Family("varchars", 1015, pa.list_(pa.string()), ((["x"], "{x}"), (["y", "z"], "{y,z}"))),
    Family("chars", 1014, pa.list_(pa.string()), ((["x  "], '{"x  "}'), (["y"], "{y}"))),
    Family("dates", 1182, pa.list_(pa.date32()), (([date(2024, 2, 29)], "{2024-02-29}"), ([None], "{NULL}"))),
    Family(
        "ints", 1007, pa.list_(pa.int32()), (([1, None, -3], "{1,NULL,-3}"), ([2**31 - 1], "{2147483647}"))
    ),
    Family("bigints", 1016, pa.list_(pa.int64()), (([2**63 - 1], "{9223372036854775807}"), ([0], "{0}"))),
    Family("uuids", 2951, pa.list_(pa.string()), (([_UUID], f"{{{_UUID}}}"), ([], "{}"))),
    Family("blobs", 1001, pa.list_(pa.binary()), (([b"\x01", b""], '{"\\\\x01","\\\\x"}'), None)),
    Family("jsons", 199, pa.list_(pa.string()), ((["{}"], '{"{}"}'), (["1"], "{1}"))),
    Family("unknown", 70_002, pa.string(), (("(1,2)", "(1,2)"), ("?", "?"))),
    Family(
        "numeric",
        1700,
        pa.decimal128(38, 18),
        ((Decimal("1.50"), "1.50"), (None, f"1{'0' * 40}"), (None, "NaN"), None),
    ),
)
"""Long text, which Postgres stores out of line and omits from updates that do not change it."""

_INLINE = (
    Family("real", 701, pa.float64(), ((0.1, "0.1"), (_NAN, "NaN"), (math.inf, "Infinity"), (-2.0, "-2"))),
    Family("flag", 16, pa.bool_(), ((True, "t"), (False, "f"), None)),
    Family(
        "at",
        1184,
        pa.timestamp("us", "UTC"),
        ((datetime(2024, 1, 1, tzinfo=UTC), "2024-01-01 00:00:00+00"), (None, "infinity")),
    ),
)


@dataclass(frozen=True, eq=False)
class Shape:
    """A table and its rows. `is_whole`: under replica identity FULL old rows and all values of new ones are
    sent.
    """

    name: TableName
    key: tuple[Family, ...]
    key_values: Callable[[int], tuple[Pair, ...]]
    columns: tuple[Family, ...]
    is_whole: bool = False
    oid: int = 16401

    def schema(self, *, texts: bool) -> TableSchema:
        """`texts`: the schema that the pipeline uses if the sink takes values in the source's text form."""
        columns = tuple(
            Column(each.name, pa.string() if texts else each.arrow_type, each.oid) for each in self.columns
        )
        return TableSchema(
            self.oid, self.name, columns, tuple(each.name for each in self.columns if each in self.key)
        )

    def row(self, number: int, n: int, *, texts: bool) -> Row:
        found = {
            each.name: each.values[n % len(each.values)] if each.values else None for each in self.columns
        }
        found |= zip((each.name for each in self.key), self.key_values(number), strict=True)
        return {name: _value(pair, texts=texts) for name, pair in found.items()}

    @property
    def kept(self) -> tuple[str, ...]:
        """The columns whose values an update may leave out."""
        return tuple(each.name for each in self.columns if each in _FAMILIES and each not in self.key)


def _value(pair: Pair | None, *, texts: bool) -> Value:
    if pair is None:
        return NULL
    typed, text = pair
    return Value(text) if texts else Value(typed, text if typed is None else None)


_ID = Family("id", 20, pa.int64(), ())
WIDE = Shape(
    TableName("public", "wide"),
    (_ID,),
    lambda number: ((number - 30, str(number - 30)),),
    (_ID, *_FAMILIES, *_INLINE),
)
"""R01: the default identity."""

_FIRST, _SECOND = Family("a.b", 23, pa.int32(), ()), Family("key, 2 %s", 25, pa.string(), ())
ODD = Shape(
    TableName("odd. schema", 'it\'s "a" {table} %s_\\'),
    (_FIRST, _SECOND),
    lambda number: ((number // 7, str(number // 7)), (f"k{number % 7}'`", f"k{number % 7}'`")),
    (
        Family("select", 25, pa.string(), _FAMILIES[0].values),
        _FIRST,
        Family('it\'s "q" \\ `x`', 1700, pa.decimal128(38, 18), _FAMILIES[-1].values),
        _SECOND,
        Family("é" * 31, 1007, pa.list_(pa.int32()), _FAMILIES[9].values),
        Family("Select me", 701, pa.float64(), _INLINE[0].values),
        *(
            Family(name, 25, pa.string(), _FAMILIES[0].values)
            for name in ("value_0", "match_0", "k_0", "v_0", "t", "_op", "_there", "_kept")
        ),
    ),
    is_whole=True,
)
"""R02, R15, R17: identity FULL, a key of two columns that are not the first, names that need quoting, and
names that sinks use for their own columns.
"""

_CODE, _UNTIL = Family("code", 2950, pa.string(), ()), Family("until", 1082, pa.date32(), ())
_UNTILS: tuple[Pair, ...] = ((None, "infinity"), (None, "-infinity"), (date(2024, 1, 1), "2024-01-01"))
INDEXED = Shape(
    TableName("public", "indexed"),
    (_UNTIL, _CODE),
    lambda number: (_UNTILS[number % 3], (f"{number // 3:08x}-0000-0000-0000-000000000000",) * 2),
    (_FAMILIES[0], _UNTIL, _FAMILIES[-1], _FAMILIES[9], _CODE),
)
"""R03: identity USING INDEX; a part of the key is distinguished by its text only."""

_HELPERS = tuple(Family(name, 20, pa.int64(), ((1, "1"), (2, "2"))) for name in ("_count", "count_0"))
_OPERATION = Family("operation", 25, pa.string(), ())
HEAP = Shape(
    TableName("public", "heap"),
    (),
    lambda _: (),
    (_OPERATION, _FAMILIES[0], _FAMILIES[2], _FAMILIES[-1], _FAMILIES[9], _INLINE[0], _INLINE[2], *_HELPERS),
    is_whole=True,
)
"""R05: no key, identity FULL. Equal rows are indistinguishable."""


def heap_row(operation: str, n: int, *, texts: bool) -> Row:
    return {**HEAP.row(0, n, texts=texts), _OPERATION.name: Value(operation)}


KEYED = (WIDE, ODD, INDEXED)
