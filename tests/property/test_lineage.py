"""Column lineage against a model that executes the DDL and knows the identity of each column."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.sinks.lineage import DdlHint, Numbering, Numbers, trace
from tests.support.rounds import rounds


@dataclass
class Model:
    """A table whose columns are numbers; names are ignored, since a rename may assign any name."""

    live: list[int]
    width: int
    seen: list[Numbers] = field(default_factory=list)

    def numbering(self) -> Numbering:
        return Numbering(tuple(self.live), self.width)

    def do(self, act: tuple[str, int]) -> None:
        kind, which = act
        if kind == "add":
            self.width += 1
            self.live.append(self.width)
        elif kind == "drop" and len(self.live) > 1:
            del self.live[which % len(self.live)]
        elif kind == "write" and (not self.seen or self.seen[-1] != tuple(self.live)):
            self.seen.append(tuple(self.live))


acts = st.lists(st.tuples(st.sampled_from(["add", "drop", "write"]), st.integers(0, 5)), max_size=14)
begun = st.integers(1, 4).flatmap(
    lambda width: st.tuples(st.sets(st.integers(1, width), min_size=1), st.just(width))
)


def run(start: tuple[set[int], int], plan: list[tuple[str, int]]) -> tuple[Model, Numbering]:
    model = Model(sorted(start[0]), start[1])
    before = model.numbering()
    for act in plan:
        model.do(act)
    return model, before


@settings(deadline=None, max_examples=rounds(100))
@given(begun, acts)
@example(({1, 2}, 2), [("drop", 1), ("add", 0), ("write", 0)])
def test_S05_a_column_hint_is_right_or_absent(
    start: tuple[set[int], int], plan: list[tuple[str, int]]
) -> None:
    model, before = run(start, plan)
    answers = trace([len(shape) for shape in model.seen], before, model.numbering())
    for shape, answer in zip(model.seen, answers, strict=True):
        assert answer is None or answer == shape


@settings(deadline=None)
@given(begun, st.lists(st.sampled_from(["add", "write"]), max_size=8))
def test_S01_added_columns_are_always_known(start: tuple[set[int], int], kinds: list[str]) -> None:
    model, before = run(start, [(kind, 0) for kind in kinds])
    assert trace([len(shape) for shape in model.seen], before, model.numbering()) == model.seen


@settings(deadline=None)
@given(begun, acts)
def test_S05_one_change_at_a_time_is_always_known(
    start: tuple[set[int], int], plan: list[tuple[str, int]]
) -> None:
    model = Model(sorted(start[0]), start[1])
    for act in plan:
        before = model.numbering()
        model.do(act)
        assert trace([len(model.live)], before, model.numbering()) == [tuple(model.live)]


def test_S02_an_unseen_drop_and_add_looks_like_a_rename_before_both() -> None:
    assert trace([2], Numbering((1, 2), 2), Numbering((1, 3), 3)) == [None]
    assert trace([1, 2], Numbering((1, 2), 2), Numbering((1, 3), 3)) == [(1,), (1, 3)]


def test_S03_columns_that_swap_their_names_are_known_by_their_places() -> None:
    assert trace([2], Numbering((1, 2), 2), Numbering((1, 2), 2)) == [(1, 2)]


def test_a_hint_of_a_table_without_columns_is_used() -> None:
    hints = [DdlHint(before=((),), numbers=(3,))]
    assert trace([1], Numbering((1, 2), 2), Numbering((3,), 3), hints) == [(3,)]


def test_a_later_shape_tells_about_an_earlier_one() -> None:
    assert trace([2], Numbering((1,), 1), Numbering((1, 3), 3)) == [None]
    assert trace([2, 3], Numbering((1,), 1), Numbering((1, 3), 3)) == [(1, 2), (1, 2, 3)]


def test_columns_that_were_there_and_not_published_are_no_answer() -> None:
    assert trace([3], Numbering((1, 2), 3), Numbering((1, 2, 3), 3)) == [None]
    assert trace([2], Numbering((1, 2, 3), 3), Numbering((1, 2, 3), 3)) == [None]
