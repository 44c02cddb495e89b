"""A target that follows any schema change equals its source, or reports that it needs a resync."""

from __future__ import annotations

from collections import Counter

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from penstock.sinks.evolution import ResyncRequired
from tests.support.property.evolving import Act, Change, FollowingTarget, Source
from tests.support.rounds import rounds

KINDS = ["write", "write", "write", "delete", "add", "drop", "rename", "swap", "widen", "retype", "rewrite"]
NAMES = ["a", "b", "c", "d"]

acts = st.tuples(st.sampled_from(KINDS), st.integers(0, 5), st.sampled_from(NAMES))
# Schema changes before the end of an epoch, and the number of further ones before it is applied.
epochs = st.lists(st.tuples(st.lists(acts, max_size=6), st.integers(0, 4)), min_size=1, max_size=5)


@settings(deadline=None, max_examples=rounds(100))
@given(epochs)
@example([([("drop", 0, "a"), ("add", 0, "a"), ("write", 1, "a")], 0)])
@example([([("write", 1, "a")], 3), ([("drop", 0, "a"), ("add", 1, "a"), ("add", 0, "b")], 0)])
@example([([("write", 0, "a"), ("swap", 0, "a"), ("write", 0, "a"), ("swap", 0, "a"), ("write", 0, "a")], 0)])
@example([([("write", 1, "a"), ("drop", 0, "a"), ("write", 2, "a"), ("add", 0, "a"), ("write", 3, "a")], 0)])
def test_S05_S06_a_following_target_equals_the_source_after_any_change_applied_at_any_time(
    plan: list[tuple[list[Act], int]],
) -> None:
    source = Source()
    target = FollowingTarget.copy(source)
    done: list[tuple[Change | None, Source]] = []
    for act in [act for acts, _ in plan for act in acts]:
        done.append((source.do(act), source.copy()))
    followed = Counter[str]()
    begin = 0
    for some, lag in plan:
        end = begin + len(some)
        epoch, begin = done[begin:end], end
        changes = [change for change, _ in epoch if change is not None]
        if not changes:
            continue
        now = done[min(end + lag, len(done)) - 1][1].shape()
        # The WAL does not show schema changes after the last row change.
        truth = next(state for change, state in reversed(epoch) if change is not None)
        try:
            target.apply(changes, now)
        except ResyncRequired:
            followed["copied"] += 1
            target = FollowingTarget.copy(truth)
        else:
            followed["applied"] += 1
        names = [column.name for column in truth.columns]
        assert {key: {name: row[name] for name in names} for key, row in target.rows.items()} == truth.table()
        assert {name: target.columns.field(name).type for name in names} == {
            each.name: each.column().arrow_type for each in truth.columns
        }
    event(f"copied {followed['copied'] > 0}, applied {followed['applied'] > 0}")


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["write", "delete", "add", "drop", "rename", "swap", "widen"]),
            st.integers(0, 5),
            st.sampled_from(NAMES),
        ),
        max_size=8,
    )
)
def test_S01_S02_S03_S04_single_changes_with_writes_in_between_need_no_copy(plan: list[Act]) -> None:
    """All except columns with a different value in every row, which only the source knows."""
    source = Source()
    target = FollowingTarget.copy(source)
    for number, (kind, which, name) in enumerate(plan):
        first = source.do((kind, which % 2 if kind == "add" else which, name))
        last = source.do(("write", 100 + number, name))
        target.apply([change for change in (first, last) if change is not None], source.shape())
        names = [column.name for column in source.columns]
        assert {
            key: {each: row[each] for each in names} for key, row in target.rows.items()
        } == source.table()
