"""Random histories through SQL transforms, evaluated row by row: after every epoch the target equals the
model.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from penstock.errors import TargetRewoundError
from penstock.sinks.fold import fold
from penstock.sinks.modes import Mode
from penstock.transforms.apply import transform_changes, transform_rows
from tests.support.plain_queries import Made, PlainQuery
from tests.support.plain_queries import Row as Plain
from tests.support.property.histories import HEAP, Sizes, epochs, heap_of, layout_of, sizes
from tests.support.property.source_model import PlainTarget, canonical, changes_table
from tests.support.property.transform_cases import (
    CASES,
    AllSentHistory,
    Case,
    TextsSentHistory,
    filtered,
    snapshot,
    source_of,
    wanted,
)
from tests.support.sinks.history import PLAIN, History
from tests.support.sinks.source import NULL, Row, Value


def mixed(row: Plain) -> str:
    return f"{row['note']} {None if row['blob'] is None else len(row['blob'])}"


def passes(row: Plain) -> bool:
    return bool(row["id"] > -48 and (row["note"] is None or row["note"] < "text 5"))


def made_of(row: Row) -> Row | None:
    if filtered(row) is None:
        return None
    plain = {name: value.typed for name, value in row.items()}
    note = plain["note"]
    return {
        "note": row["note"],
        "mix": Value(mixed(plain)),
        "who": row["id"],
        "length": NULL if note is None else Value(len(str(note))),
        "amount": row["amount"],
    }


QUERY = PlainQuery(
    {
        "note": "note",
        "mix": Made("string", ("note", "blob"), mixed),
        "who": "id",
        "length": Made("long", ("note",), lambda row: None if row["note"] is None else len(row["note"])),
        "amount": "amount",
    },
    Made("boolean", ("id", "note"), passes),
)


@pytest.mark.parametrize("kind", [History, TextsSentHistory, AllSentHistory])
@settings(max_examples=15, deadline=None)
@given(sizes=sizes)
def test_K12_after_every_epoch_a_mirror_is_the_query_result_of_the_source(
    kind: type[History], sizes: Sizes
) -> None:
    case = Case(PLAIN, QUERY.transform(), made_of)
    source = source_of(sizes, kind)
    fitted = case.transform.fit(PLAIN)
    layout = layout_of(fitted.schema, Mode.MIRROR)
    rows = snapshot(PLAIN, source.states[source.fence])
    first = transform_rows(fitted, rows, QUERY.ask(fitted, rows))
    assert first.refused.num_rows == 0
    target = PlainTarget(layout, first.kept.to_pylist())
    assert canonical(target.rows, layout) == canonical(wanted(case, source.states[source.fence]), layout)
    for epoch in epochs(source.log, sizes.seed):
        changes = changes_table(PLAIN, epoch)
        outcome = transform_changes(fitted, changes, QUERY.ask(fitted, changes))
        try:
            folded = fold(outcome.kept, layout, target.lookup)
        except TargetRewoundError:
            assert kind is not AllSentHistory, "a row entered the filter without all of its values"
            return
        if outcome.refused.num_rows:
            assert kind is not AllSentHistory, "a rejected row lacks a value"
            return
        target.apply(folded)
        assert canonical(target.rows, layout) == canonical(
            wanted(case, source.states[epoch[-1].position]), layout
        )


def sized(row: Plain) -> int | None:
    return None if row["blob"] is None else len(row["blob"])


@settings(max_examples=25, deadline=None)
@given(sizes=sizes)
def test_K12_a_result_of_one_column_is_never_refused_for_unchanged_toast_values(sizes: Sizes) -> None:
    query = PlainQuery(
        {
            "id": "id",
            "size": Made("long", ("blob",), sized),
            "blob": "blob",
            "again": Made("long", ("blob",), sized),
        }
    )

    def model(row: Row) -> Row:
        size = sized({"blob": row["blob"].typed})
        held = NULL if size is None else Value(size)
        return {"id": row["id"], "size": held, "blob": row["blob"], "again": held}

    case = Case(PLAIN, query.transform(), model)
    source = source_of(sizes, History)
    fitted = case.transform.fit(PLAIN)
    layout = layout_of(fitted.schema, Mode.MIRROR)
    target = PlainTarget(layout, wanted(case, source.states[source.fence]))
    for epoch in epochs(source.log, sizes.seed):
        changes = changes_table(PLAIN, epoch)
        outcome = transform_changes(fitted, changes, query.ask(fitted, changes))
        assert outcome.refused.num_rows == 0
        target.apply(fold(outcome.kept, layout, target.lookup))
        assert canonical(target.rows, layout) == canonical(
            wanted(case, source.states[epoch[-1].position]), layout
        )


@settings(max_examples=15, deadline=None)
@given(sizes=sizes)
def test_a_condition_has_the_same_result_in_every_evaluator(sizes: Sizes) -> None:
    plain, query = CASES["where"].transform.fit(PLAIN), PlainQuery(where=QUERY.where)
    asked = query.condition().fit(PLAIN)
    source = source_of(sizes, TextsSentHistory)
    for epoch in epochs(source.log, sizes.seed):
        changes = changes_table(PLAIN, epoch)
        one, other = (
            transform_changes(plain, changes),
            transform_changes(asked, changes, query.ask(asked, changes)),
        )
        assert one.kept.equals(other.kept)
        assert one.refused.equals(other.refused)


@settings(max_examples=15, deadline=None)
@given(sizes=sizes)
def test_K12_without_a_key_old_and_new_rows_are_each_worked_out(sizes: Sizes) -> None:
    heap = heap_of(sizes.seed, sizes.transactions, sizes.statements, sizes.truncates)
    names = [column.name for column in HEAP.columns if column.name != "d"]
    columns: dict[str, str | Made] = {name: name for name in names}
    query = PlainQuery(
        {**columns, "dd": Made("string", ("d",), lambda row: f"<{row['d']}>")},
        Made("boolean", ("d",), lambda row: row["d"] in (None, "x")),
    )

    def model(row: Row) -> Row | None:
        kept = row["d"].typed in (None, "x")
        return {**{name: row[name] for name in names}, "dd": Value(f"<{row['d'].typed}>")} if kept else None

    case = Case(HEAP, query.transform(), model)
    fitted = case.transform.fit(HEAP)
    layout = layout_of(fitted.schema, Mode.MIRROR)
    target = PlainTarget(layout, wanted(case, heap.states[heap.fence]))
    for epoch in epochs(heap.log, sizes.seed):
        changes = changes_table(HEAP, epoch)
        outcome = transform_changes(fitted, changes, query.ask(fitted, changes))
        assert outcome.refused.num_rows == 0
        target.apply(fold(outcome.kept, layout, target.lookup))
        assert canonical(target.rows, layout) == canonical(
            wanted(case, heap.states[epoch[-1].position]), layout
        )
