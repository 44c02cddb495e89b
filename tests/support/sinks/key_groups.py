"""Keys that are equal, grouped by type."""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from decimal import Decimal

import pyarrow as pa

from penstock.change import EXACT_TYPE
from penstock.schema import GEOMETRY_TYPE

NAN = float("nan")


PAIR = pa.struct([("x", pa.int32()), ("y", pa.float64())])


# Equal values are in the same group.
GROUPS: list[tuple[pa.DataType, list[list[object]]]] = [
    (pa.int16(), [[-3], [7, 7], [None, None]]),
    (pa.int32(), [[2**31 - 1], [-(2**31)], [0, 0]]),
    (pa.int64(), [[2**63 - 1], [-(2**63)], [5], [None]]),
    (pa.bool_(), [[True, True], [False], [None]]),
    (pa.float64(), [[0.0, -0.0], [NAN, -NAN], [None, None], [0.1], [float("inf")], [-float("inf")]]),
    (pa.float32(), [[0.0, -0.0], [NAN], [None], [0.5, 0.5]]),
    (pa.string(), [["a", "a"], ["A"], [""], [None], ["a "], ["é"]]),
    (pa.binary(), [[b"\x00", b"\x00"], [b""], [None]]),
    (pa.decimal128(38, 18), [[Decimal("1.0"), Decimal("1.00")], [Decimal(0), Decimal("-0")], [None]]),
    (pa.date32(), [[date(2024, 1, 1), date(2024, 1, 1)], [date(1, 1, 1)], [None]]),
    (pa.time64("us"), [[time(1)], [time(2), time(2)]]),
    (pa.timestamp("us", "UTC"), [[datetime(2024, 1, 1, tzinfo=UTC)] * 2, [None]]),
    (pa.list_(pa.int32()), [[[1, 2], [1, 2]], [[2, 1]], [[]], [None], [[None]], [[1, None], [1, None]]]),
    (pa.list_(pa.list_(pa.float64())), [[[[0.0], [NAN]], [[-0.0], [NAN]]], [[[]]], [[None]], [[]], [None]]),
    (pa.list_(pa.string()), [[["ab", "c"]], [["a", "bc"]], [["abc"]]]),
    (EXACT_TYPE, [[[("a", "b")], [("a", "b")]], [[("a", None)]], [[]], [None]]),
    (PAIR, [[{"x": 1, "y": NAN}] * 2, [None, None], [{"x": None, "y": None}], [{"x": 1, "y": None}]]),
    (GEOMETRY_TYPE, [[{"srid": 4326, "wkb": b"1"}] * 2, [{"srid": 4326, "wkb": b"2"}]]),
    (pa.dictionary(pa.int8(), pa.string()), [["a", "a"], ["b"], [None]]),
    (pa.null(), [[None, None]]),
]
