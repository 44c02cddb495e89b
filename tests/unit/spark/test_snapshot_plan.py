"""Plan of a stream's snapshot, without a server: which chunks are read again after a loss, and that none is
forgotten.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SpoolCorruptError
from penstock.position import Position
from penstock.schema import TableName
from penstock.spark.snapshot_plan import Heap, SnapshotPlan, Step, load_plan, store_plan

A = Heap(TableName("public", "a"), 1, 100)
B = Heap(TableName("public", 'odd "b".c'), 2, 200)


def steps(heap: Heap, count: int) -> tuple[Step, ...]:
    return tuple(Step(heap, first, None if first == count - 1 else first + 1, 8192) for first in range(count))


def plan(*parts: tuple[Step, ...]) -> SnapshotPlan:
    return SnapshotPlan(Position.of(77), 4_000_000_000, tuple(step for part in parts for step in part))


B_STEPS = steps(B, 3)


def test_batch_takes_as_much_as_its_limits_allow_and_one_step_at_least() -> None:
    made = plan(steps(A, 5))
    assert made.admit(0, None, None) == 5
    assert made.admit(0, None, 3 * 8192) == 3
    assert made.admit(1, None, 1) == 2
    assert made.admit(0, 256, None) == 2  # of 64 bytes each
    assert made.admit(5, None, 1) == 5


def test_heaps_without_a_key_are_in_separate_batches() -> None:
    made = replace(plan(steps(A, 3), steps(B, 2)), keyless=3)
    assert [made.admit(done, None, None) for done in (0, 3)] == [3, 5]
    assert [made.admit(done, None, 2 * 8192) for done in (0, 2, 3)] == [2, 3, 5]
    assert made.keyless_bytes == 3 * 8192


def test_after_a_loss_the_rest_is_read_and_then_the_chunks_read_before_are_read_again() -> None:
    made = plan(steps(A, 3), steps(B, 1))
    replanned = made.replan(2, {1: steps(A, 3), 2: steps(B, 1)})
    assert replanned.steps[:4] == made.steps
    assert [(step.heap, step.first, step.is_second) for step in replanned.steps[4:] if step] == [
        (A, 0, True),
        (A, 1, True),
    ]
    assert (replanned.fence, replanned.horizon, replanned.replans) == (made.fence, made.horizon, 1)


def test_loss_during_the_second_look_begins_it_again() -> None:
    now = {1: steps(A, 2)}
    made = plan(steps(A, 2)).replan(1, now)
    again = made.replan(3, now)
    assert [(step.first, step.is_second) for step in again.steps if step] == [
        (0, False),
        (1, False),
        (0, True),
        (0, True),
        (1, True),
    ]


def test_heap_that_was_rewritten_is_read_again_as_a_whole() -> None:
    moved = Heap(A.table, A.oid, 101)
    made = plan(steps(A, 3), steps(B, 2))
    replanned = made.replan(2, {1: steps(moved, 2), 2: steps(B, 2)})
    assert [(step.heap, step.first) for step in replanned.steps[2:] if step] == [
        (B, 0),
        (B, 1),
        (moved, 0),
        (moved, 1),
    ]


def test_heap_without_a_key_is_not_read_again() -> None:
    made = plan(steps(A, 2), steps(B, 2))
    replanned = made.replan(3, {1: steps(A, 2), 2: steps(B, 2)}, keyless={1})
    assert [(step.heap, step.first, step.is_second) for step in replanned.steps[3:] if step] == [
        (B, 1, False),
        (B, 0, True),
    ]


def test_heap_that_is_gone_leaves_void_steps_so_that_numbers_keep_their_meaning() -> None:
    made = plan(steps(A, 3), steps(B, 2))
    replanned = made.replan(1, {2: steps(B, 2)})
    assert [step and step.heap for step in replanned.steps[1:]] == [B, B, None, None]


def test_returned_batch_keeps_its_chunks_and_the_rest_follows() -> None:
    moved = Heap(A.table, A.oid, 101)
    made = plan(steps(A, 3), steps(B, 3))
    replanned = made.replan(2, {1: steps(moved, 2), 2: steps(B, 3)}, upto=4)
    assert replanned.steps[:4] == (*made.steps[:2], None, B_STEPS[0])
    assert [(step.heap, step.first, step.is_second) for step in replanned.steps[4:] if step] == [
        (B, 1, False),
        (B, 2, False),
        (moved, 0, False),
        (moved, 1, False),
        (B, 0, True),
    ]


def test_second_look_takes_in_the_batch_that_was_handed_out_before() -> None:
    replanned = plan(steps(A, 4)).replan(1, {1: steps(A, 4)}, upto=3)
    assert replanned.steps[:4] == steps(A, 4)
    assert [(step.first, step.is_second) for step in replanned.steps[4:] if step] == [
        (0, True),
        (1, True),
        (2, True),
    ]


def test_heap_that_was_rewritten_once_is_not_begun_again_at_every_loss() -> None:
    moved = Heap(A.table, A.oid, 101)
    made = plan(steps(A, 2)).replan(1, {1: steps(moved, 3)})
    again = made.replan(2, {1: steps(moved, 3)})
    assert [(step.heap, step.first, step.is_second) for step in again.steps[2:] if step] == [
        (moved, 1, False),
        (moved, 2, False),
        (moved, 0, True),
    ]


@given(
    st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.booleans()), max_size=6),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_after_any_loss_every_heap_is_covered_by_reads_under_the_last_snapshot(
    losses: list[tuple[int, bool, bool]], a_blocks: int, b_blocks: int
) -> None:
    """Every block is read under the last snapshot, whole or for its rows since the first one; and no step is
    undone.
    """
    heaps = [A, B]
    made = plan(steps(A, a_blocks), steps(B, b_blocks))
    last = done = 0
    for ahead, rewrites_a, rewrites_b in losses:
        done = min(len(made.steps), done + ahead)
        for place, rewrites in enumerate((rewrites_a, rewrites_b)):
            if rewrites:
                heaps[place] = Heap(heaps[place].table, heaps[place].oid, heaps[place].filenode + 1)
        before = made
        made = made.replan(done, {1: steps(heaps[0], a_blocks), 2: steps(heaps[1], b_blocks)})
        assert made.steps[:done] == before.steps[:done]
        assert len(made.steps) >= len(before.steps)
        last = done
    for heap, blocks in zip(heaps, (a_blocks, b_blocks), strict=True):
        whole = {step.first for step in made.steps if step and step.heap == heap and not step.is_second}
        recent = {step.first for step in made.steps[last:] if step and step.heap == heap}
        assert whole == set(range(blocks))
        assert recent == set(range(blocks))


def test_plan_is_read_back_from_disk_unchanged(tmp_path: Path) -> None:
    made = replace(plan(steps(A, 2), steps(B, 1)), keyless=1).replan(1, {1: steps(A, 2)}, now=Position.of(99))
    assert (made.replans, made.last, made.keyless) == (1, Position.of(99), 1)
    store_plan(tmp_path, "spark-public.a/b", made)
    assert load_plan(tmp_path, "spark-public.a/b") == made
    assert load_plan(tmp_path, "another") is None


def test_plan_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    store_plan(tmp_path, "c", plan(steps(A, 1)))
    (path,) = (tmp_path / "snapshots").iterdir()
    path.write_text(
        '{"format":1,"heaps":[["public.a",1,100]],"steps":[[0,0,null,8192,0]],"fence":"0/4D","horizon":4000000000,"renewals":0}'
    )
    assert load_plan(tmp_path, "c") == plan(steps(A, 1))


def test_damaged_plan_is_refused(tmp_path: Path) -> None:
    store_plan(tmp_path, "c", plan(steps(A, 1)))
    (path,) = (tmp_path / "snapshots").iterdir()
    path.write_text(
        '{"format": 1, "heaps": [], "steps": [[0, 0, null, 1, 0]], "fence": "0/1", "horizon": 1, '
        '"renewals": 0}'
    )
    with pytest.raises(SpoolCorruptError):
        load_plan(tmp_path, "c")
