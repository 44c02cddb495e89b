"""Numbers for keys."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest

from penstock.change import EXACT, EXACT_TYPE
from penstock.sinks.keys import key_codes
from tests.support.sinks.key_groups import GROUPS


@pytest.mark.parametrize(("arrow_type", "groups"), GROUPS, ids=[str(each[0])[:30] for each in GROUPS])
def test_K03_equal_keys_have_equal_numbers_and_others_do_not(
    arrow_type: pa.DataType, groups: list[list[object]]
) -> None:
    values = [value for group in groups for value in group]
    expected = [number for number, group in enumerate(groups) for _ in group]
    forward = pa.table({"k": pa.array(values, arrow_type)})
    # Several chunks, some of which start at an offset in their buffers.
    backward = pa.concat_tables([forward.slice(at, 1) for at in range(len(values) - 1, -1, -1)])
    codes, others = (each.tolist() for each in key_codes([forward, backward], ["k"]))
    assert others == codes[::-1]
    assert [expected.index(number) for number in expected] == [codes.index(code) for code in codes]
    assert min(codes) >= 0


def test_a_key_of_several_columns_is_all_of_them() -> None:
    left = pa.table({"a": ["x", "x", "y", None], "b": [1, 2, 1, 1], "c": [[1], [1], [1], None]})
    right = pa.table({"b": [2, 1, 1, 9], "a": [None, None, "x", "x"], "c": [[1], None, [1], [1]]})
    codes, others = (each.tolist() for each in key_codes([left, right], ["a", "b", "c"]))
    assert len({*codes}) == 4
    assert others[1:3] == [codes[3], codes[0]]
    assert not {others[0], others[3]} & {*codes}


def test_values_beyond_their_type_are_known_by_their_texts() -> None:
    texts = [[("k", "NaN")], [("k", "1e40")], [("other", "NaN")], None, [("k", "NaN"), ("other", "1")]]
    left = pa.table(
        {
            "k": pa.array([None, None, None, Decimal(1), None], pa.decimal128(10, 2)),
            EXACT: pa.array(texts, EXACT_TYPE),
        }
    )
    right = pa.table({"k": pa.array([None, Decimal(1)], pa.decimal128(10, 2))})
    codes, others = (each.tolist() for each in key_codes([left, right], ["k"]))
    assert codes[0] == codes[4]
    assert len({*codes}) == 4
    assert others == [codes[2], codes[3]]


def test_types_that_differ_are_read_as_the_first() -> None:
    codes, others = key_codes(
        [pa.table({"k": pa.array([5, 6], pa.int64())}), pa.table({"k": pa.array([6, 5], pa.int16())})], ["k"]
    )
    assert codes.tolist() == others.tolist()[::-1]


def test_nothing_has_no_numbers_and_without_columns_all_rows_are_equal() -> None:
    assert [len(each) for each in key_codes([pa.table({"k": pa.array([], pa.string())})] * 2, ["k"])] == [
        0,
        0,
    ]
    assert [each.tolist() for each in key_codes([pa.table({"k": [1, 2]})], [])] == [[0, 0]]
    assert [
        each.tolist()
        for each in key_codes([pa.table({"k": pa.array([], pa.int64())}), pa.table({"k": [7]})], ["k"])
    ] == [[], [0]]
