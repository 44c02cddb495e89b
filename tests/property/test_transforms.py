"""Random histories through transforms: after every epoch the target holds the transformed source rows."""

from __future__ import annotations

import pyarrow.compute as pc
import pytest
from hypothesis import given, settings

from penstock.change import EXACT, UNCHANGED
from penstock.errors import TargetRewoundError
from penstock.sinks.fold import fold
from penstock.sinks.modes import CURRENT, DELETED, VALID_FROM, VALID_TO, Mode
from penstock.transforms.apply import transform_changes, transform_keys, transform_rows
from penstock.transforms.transform import Transform
from tests.support.property.histories import HEAP, Sizes, epochs, heap_of, layout_of, sizes, source_model
from tests.support.property.source_model import PlainTarget, Record, canonical, changes_table, record_of
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
from tests.support.sinks.history import BEYOND, PLAIN, History
from tests.support.sinks.source import Value


@pytest.mark.parametrize("kind", [History, TextsSentHistory, AllSentHistory])
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=20, deadline=None)
@given(sizes=sizes)
def test_K12_after_every_epoch_a_mirror_equals_the_transformed_source(
    name: str, kind: type[History], sizes: Sizes
) -> None:
    case = CASES[name]
    source = source_of(sizes, kind) if case.table is PLAIN else source_model(case.table, sizes)
    fitted = case.transform.fit(case.table)
    layout = layout_of(fitted.schema, Mode.MIRROR)
    first = transform_rows(fitted, snapshot(case.table, source.states[source.fence]))
    assert first.refused.num_rows == 0
    target = PlainTarget(layout, first.kept.to_pylist())
    assert canonical(target.rows, layout) == canonical(wanted(case, source.states[source.fence]), layout)
    for epoch in epochs(source.log, sizes.seed):
        outcome = transform_changes(fitted, changes_table(case.table, epoch))
        try:
            folded = fold(outcome.kept, layout, target.lookup)
        except TargetRewoundError:
            assert name == "where", "a row entered the filter without all of its values"
            assert kind is not AllSentHistory
            return
        if outcome.refused.num_rows:
            assert name == "where"
            assert kind is not AllSentHistory
            return
        target.apply(folded)
        assert canonical(target.rows, layout) == canonical(
            wanted(case, source.states[epoch[-1].position]), layout
        )


@pytest.mark.parametrize("kind", [TextsSentHistory, AllSentHistory])
@pytest.mark.parametrize("mode", [Mode.SOFT_DELETE, Mode.HISTORY])
@settings(max_examples=20, deadline=None)
@given(sizes=sizes)
def test_K12_rows_of_every_mode_that_are_live_are_those_that_pass(
    mode: Mode, kind: type[History], sizes: Sizes
) -> None:
    case = CASES["where"]
    source = source_of(sizes, kind)
    fitted = case.transform.fit(PLAIN)
    layout, mirror = layout_of(fitted.schema, mode), layout_of(fitted.schema, Mode.MIRROR)
    kept = [
        row
        for row in source.expected(mode, source.fence)
        if filtered({n: Value(row[n]) for n in ("id", "note")}) is not None
    ]
    target = PlainTarget(layout, kept)
    passed = {source.fence}
    for epoch in epochs(source.log, sizes.seed):
        outcome = transform_changes(fitted, changes_table(PLAIN, epoch))
        try:
            folded = fold(outcome.kept, layout, target.lookup)
        except TargetRewoundError:
            assert kind is not AllSentHistory
            break
        if outcome.refused.num_rows:
            assert kind is not AllSentHistory
            break
        target.apply(folded)
        passed |= {each.position for each in epoch}
        live = [
            row for row in target.rows if (not row[DELETED] if mode is Mode.SOFT_DELETE else row[CURRENT])
        ]
        own = [{name: row[name] for name in mirror.schema.names} for row in live]
        assert canonical(own, mirror) == canonical(wanted(case, source.states[epoch[-1].position]), mirror)
    if mode is Mode.HISTORY:
        for position in passed:
            valid = [
                row
                for row in target.rows
                if row[VALID_FROM] <= position and (row[CURRENT] or position < row[VALID_TO])
            ]
            own = [{name: row[name] for name in mirror.schema.names} for row in valid]
            assert canonical(own, mirror) == canonical(wanted(case, source.states[position]), mirror)


@settings(max_examples=25, deadline=None)
@given(sizes=sizes)
def test_K12_a_rejected_or_inapplicable_row_lacks_a_value_and_entered_the_filter(sizes: Sizes) -> None:
    """With a filter that no row can enter, nothing is rejected: missing values alone are no reason."""
    case = Case(PLAIN, Transform(where="id > -48"), lambda row: row if row["id"].typed > -48 else None)  # type: ignore[operator]
    source = source_model(PLAIN, sizes, moves_leave_values=False)
    fitted = case.transform.fit(PLAIN)
    layout = layout_of(fitted.schema, Mode.MIRROR)
    target = PlainTarget(layout, wanted(case, source.states[source.fence]))
    for epoch in epochs(source.log, sizes.seed):
        outcome = transform_changes(fitted, changes_table(PLAIN, epoch))
        assert outcome.refused.num_rows == 0
        target.apply(fold(outcome.kept, layout, target.lookup))
        assert canonical(target.rows, layout) == canonical(
            wanted(case, source.states[epoch[-1].position]), layout
        )


@settings(max_examples=10, deadline=None)
@given(sizes=sizes)
def test_K13_hashed_keys_are_the_same_by_rows_changes_and_keys(sizes: Sizes) -> None:
    case = CASES["beyond"]
    source = source_model(BEYOND, sizes)
    fitted = case.transform.fit(BEYOND)
    rows = snapshot(BEYOND, source.states[source.fence])
    keys = transform_keys(fitted, rows.select(["valid_to", "number", EXACT]))
    kept = transform_rows(fitted, rows).kept
    assert keys.select(["valid_to", "number"]).equals(kept.select(["valid_to", "number"]))
    assert keys.column(EXACT).null_count == keys.num_rows, "a hashed column is not also stored in clear"
    changes = changes_table(BEYOND, source.log)
    made = transform_changes(fitted, changes).kept
    assert made.num_rows == changes.num_rows
    assert pc.all(
        pc.equal(made.column(UNCHANGED).is_null(), changes.column(UNCHANGED).is_null())
    ).as_py() in (True, None)


@settings(max_examples=40, deadline=None)
@given(sizes=sizes)
def test_K12_without_a_key_old_and_new_rows_are_transformed_separately(sizes: Sizes) -> None:
    heap = heap_of(sizes.seed, sizes.transactions, sizes.statements, sizes.truncates)
    fitted = Transform(where="d = 'x' OR d IS NULL").fit(HEAP)
    layout = layout_of(HEAP, Mode.MIRROR)

    def passing(position: int) -> list[Record]:
        return [record_of(row) for row in heap.states[position] if row["d"].typed in (None, "x")]

    target = PlainTarget(layout, passing(heap.fence))
    for epoch in epochs(heap.log, sizes.seed):
        outcome = transform_changes(fitted, changes_table(HEAP, epoch))
        assert outcome.refused.num_rows == 0
        target.apply(fold(outcome.kept, layout, target.lookup))
        assert canonical(target.rows, layout) == canonical(passing(epoch[-1].position), layout)
