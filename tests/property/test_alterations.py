"""Hints of the DDL event trigger against a table with a known history: a hint is right or absent."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from penstock.change import ChangeCounts
from penstock.position import Position
from penstock.sinks.lineage import Alteration, Numbering, Numbers, resolve_attnums, trace
from penstock.spool.manifest import SegmentFile
from penstock.spool.reader import FileSlice
from tests.support.property.evolving import Act, Source
from tests.support.rounds import rounds

KINDS = ["write", "write", "write", "add", "drop", "rename", "swap"]
acts = st.tuples(st.sampled_from(KINDS), st.integers(0, 5), st.sampled_from(["a", "b", "c"]))
transactions = st.lists(st.lists(acts, min_size=1, max_size=4), max_size=8)


def numbers_of(source: Source) -> Numbers:
    return tuple(column.number for column in source.columns)


@settings(deadline=None, max_examples=rounds(100))
@given(transactions)
@example([[("drop", 0, "a")], [("add", 0, "b")], [("write", 1, "a")]])
@example([[("write", 1, "a")], [("drop", 0, "a"), ("add", 0, "a"), ("write", 1, "a")]])
@example([[("write", 1, "a"), ("drop", 0, "a"), ("add", 0, "a")], [("write", 2, "a")]])
def test_S02_S05_a_trigger_hint_about_columns_is_right_or_absent(plan: list[list[Act]]) -> None:
    source = Source()
    before = Numbering(numbers_of(source), source.width)
    first = {column.number: column.name for column in source.columns}
    slices: list[FileSlice] = []
    truth: list[Numbers] = []
    alterations: list[Alteration] = []
    for number, transaction in enumerate(plan, 1):
        position = Position.of(number * 10)
        for act in transaction:
            if source.do(act) is None:
                alterations.append(
                    Alteration(77, position, {column.number: column.name for column in source.columns})
                )
            else:
                slices.append(
                    FileSlice(
                        Path(),
                        SegmentFile(source.schema(), "", 1, 1, ChangeCounts(), position, position),
                        None,
                        None,
                    )
                )
                truth.append(numbers_of(source))
    shapes = [
        [numbers for _, numbers in group]
        for _, group in groupby(zip(slices, truth, strict=True), key=lambda each: each[0].file.schema)
    ]
    now = Numbering(numbers_of(source), source.width)
    answers = trace(
        [len(each[0]) for each in shapes], before, now, resolve_attnums(slices, alterations, first)
    )
    for numbers, answer in zip(shapes, answers, strict=True):
        assert answer is None or set(numbers) == {answer}
    event(f"all known: {None not in answers}")
