"""Hashes of keys."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from penstock.change import EXACT, EXACT_TYPE
from penstock.sinks import keys as module
from penstock.sinks.keys import key_hashes
from tests.support.sinks.key_groups import GROUPS


@pytest.mark.parametrize(("arrow_type", "groups"), GROUPS, ids=[str(each[0])[:30] for each in GROUPS])
def test_K03_equal_keys_have_equal_hashes_wherever_they_stand(
    arrow_type: pa.DataType, groups: list[list[object]]
) -> None:
    values = [value for group in groups for value in group]
    whole = pa.table({"k": pa.array(values, arrow_type)})
    hashes = key_hashes(whole, ["k"]).tolist()
    alone = [key_hashes(whole.slice(at, 1), ["k"]).tolist()[0] for at in range(len(values))]
    backward = pa.concat_tables([whole.slice(at, 1) for at in range(len(values) - 1, -1, -1)])
    assert hashes == alone == key_hashes(backward, ["k"]).tolist()[::-1]
    expected = [number for number, group in enumerate(groups) for _ in group]
    assert [expected.index(number) for number in expected] == [hashes.index(each) for each in hashes], (
        "other keys differ"
    )


def test_a_key_is_all_its_columns_and_the_texts_of_those_beyond_their_type() -> None:
    texts = [[("k", "NaN")], [("k", "1e40")], [("other", "NaN")], None, [("k", "NaN"), ("other", "1")], None]
    numbers = pa.array([None, None, None, Decimal(1), None, Decimal(1)], pa.decimal128(10, 2))
    rows = pa.table({"k": numbers, "b": ["x"] * 5 + ["y"], EXACT: pa.array(texts, EXACT_TYPE)})
    hashes = key_hashes(rows, ["k", "b"]).tolist()
    assert hashes[0] == hashes[4]
    assert len({*hashes}) == 5
    assert hashes[2:4] == key_hashes(rows.slice(2, 2).drop_columns([EXACT]), ["k", "b"]).tolist()
    assert key_hashes(rows.slice(0, 0), ["k", "b"]).tolist() == []


def test_hashes_of_long_and_of_many_texts_do_not_depend_on_how_they_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = pa.table(
        {
            "k": [f"{number % 500:x}" * (number % 40) for number in range(3_000)]
            + ["é" * 5_000, "é" * 5_000, "e" * 5_000]
        }
    )
    lists = pa.table({"k": pa.array([[number % 7] * (number % 11) for number in range(1_000)])})
    before = [key_hashes(each, ["k"]) for each in (texts, lists)]
    monkeypatch.setattr(module, "_BLOCK", 100)
    assert all(
        np.array_equal(old, key_hashes(each, ["k"])) for old, each in zip(before, (texts, lists), strict=True)
    )
    assert len({*before[0].tolist()}) == len({*texts.column("k").to_pylist()})
    assert len({*before[1].tolist()}) == len({*map(tuple, lists.column("k").to_pylist())})


def test_hashes_are_stable_and_distribute_keys_evenly() -> None:
    """Tasks of one epoch may run in different processes, so a hash must not depend on the process."""
    rows = pa.table({"k": list(range(30_000)), "t": [f"user-{number:06d}" for number in range(30_000)]})
    assert key_hashes(rows.slice(7, 1), ["k", "t"]).tolist() == [6627080932606988882]
    for names in (["k"], ["t"], ["k", "t"]):
        shares = np.bincount((key_hashes(rows, names) % np.uint64(6)).astype(np.int64))
        assert 4_700 < shares.min() <= shares.max() < 5_300, names
