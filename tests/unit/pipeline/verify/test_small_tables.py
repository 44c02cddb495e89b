"""Small tables compared in this process: rows are equal exactly if the columns' own values are."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

import pyarrow as pa
import pytest

from penstock.pipeline.verify.compare import count_rows

MAP = pa.map_(pa.string(), pa.string())


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        (pa.float64(), 0.0, -0.0),
        (pa.float64(), 1.0, None),
        (pa.string(), "", None),
        (pa.binary(), b"a", b"b"),
        (pa.decimal128(10, 2), Decimal("1.00"), Decimal("1.01")),
        (pa.date32(), date(2020, 1, 1), date(2020, 1, 2)),
        (pa.list_(pa.string()), ["a", None], [None, "a"]),
        (pa.list_(pa.string()), [], None),
        (pa.list_(pa.list_(pa.int32())), [[1], [2, 3]], [[1, 2], [3]]),
        (MAP, [("a", "b")], [("a", None)]),
        (MAP, [], None),
        (pa.struct([("a", pa.int32())]), {"a": None}, None),
    ],
)
def test_differing_rows_are_distinguished(kind: pa.DataType, one: object, other: object) -> None:
    rows, others = (
        pa.table({"id": pa.array([1, 2]), "v": pa.array([value, one], kind)}) for value in (one, other)
    )
    assert count_rows(rows) != count_rows(others)
    assert count_rows(rows) == count_rows(rows.take([1, 0]))
    assert count_rows(rows.slice(1)) == count_rows(others.slice(1))


def test_a_doubled_row_differs_from_a_single_one() -> None:
    rows = pa.table({"id": [1, 2]})
    assert count_rows(pa.concat_tables([rows, rows])) != count_rows(rows)
    assert sum(count_rows(pa.concat_tables([rows, rows])).values()) == 4


def test_values_without_an_equal_in_python_are_compared() -> None:
    """NaN equals NaN, the entries of a map have no order, and times before the year 1 and after 9999 are
    times.
    """
    nan = pa.table({"v": [float("nan")]})
    assert count_rows(nan) == count_rows(pa.table({"v": [float("nan")]}))
    one, other = (
        pa.table({"v": pa.array([entries], MAP)})
        for entries in ([("a", "1"), ("b", "2")], [("b", "2"), ("a", "1")])
    )
    assert count_rows(one) == count_rows(other)
    for kind in (pa.timestamp("us", "UTC"), pa.timestamp("us")):
        late = pa.array([2**62, -(2**62)], pa.int64()).view(kind)
        assert count_rows(pa.table({"v": late})) == count_rows(pa.table({"v": late.take(pa.array([1, 0]))}))
        assert count_rows(pa.table({"v": late})) != count_rows(pa.table({"v": late.take(pa.array([1, 1]))}))
