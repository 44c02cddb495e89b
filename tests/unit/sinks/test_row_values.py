"""Changes with an older schema, read with the schema of the target."""

from __future__ import annotations

import pickle

import pyarrow as pa

from penstock.change import CHANGE_TYPE, EXACT, EXACT_TYPE, UNCHANGED
from penstock.sinks.row_values import View

CHANGES = pa.table(
    {
        "id": pa.array([1, 2, 3, 4], pa.int32()),
        "a": pa.array(["a1", None, None, "a4"], pa.string()),
        "b": pa.array(["b1", "b2", None, None], pa.string()),
        CHANGE_TYPE: pa.array(["insert", "update_postimage", "update_postimage", "delete"], pa.string()),
        UNCHANGED: pa.chunked_array(
            [
                pa.array([None, ["a"]], pa.list_(pa.string())),
                pa.array([["a", "b"], None], pa.list_(pa.string())),
            ]
        ),
        EXACT: pa.array([[("a", "x"), ("b", "y")], None, [("b", "z")], None], EXACT_TYPE),
    }
)


def test_S03_names_that_were_swapped_are_swapped_wherever_a_change_speaks_of_them() -> None:
    found = View({"id": "key", "a": "b", "b": "a"}).renamed(CHANGES)
    assert found.column("b").to_pylist() == ["a1", None, None, "a4"]
    assert found.column("a").to_pylist() == ["b1", "b2", None, None]
    assert found.column("key").to_pylist() == [1, 2, 3, 4]
    assert found.column(UNCHANGED).to_pylist() == [None, ["b"], ["b", "a"], None]
    assert [dict(each or ()) for each in found.column(EXACT).to_pylist()] == [
        {"b": "x", "a": "y"},
        {},
        {"a": "z"},
        {},
    ]


def test_R09_values_of_a_column_that_the_target_lacks_are_left_out() -> None:
    found = View({"id": "id", "b": "b"}, leaves_out=True).renamed(CHANGES)
    assert found.column_names == ["id", "b", CHANGE_TYPE, UNCHANGED, EXACT]
    assert found.column(UNCHANGED).to_pylist() == [None, None, ["b"], None]
    assert [dict(each or ()) for each in found.column(EXACT).to_pylist()] == [{"b": "y"}, {}, {"b": "z"}, {}]


def test_a_view_is_plain_only_if_nothing_has_to_be_done() -> None:
    assert View({"a": "a"}).is_plain
    assert not View({"a": "b"}).is_plain
    assert not View({"a": "a"}, leaves_out=True).is_plain
    assert not View({"a": "a"}, {"c": pa.scalar(5)}).is_plain
    view = View({"a": "b"}, {"c": pa.scalar(5, pa.int32())})
    assert pickle.loads(pickle.dumps(view)) == view
