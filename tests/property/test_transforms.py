"""Random histories through transforms: after every epoch the target holds what a plain model makes of the source's rows."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from typing_extensions import override

from penstock.change import EXACT, UNCHANGED
from penstock.errors import TargetRewoundError
from penstock.schema import Column, TableSchema
from penstock.secret import Secret
from penstock.sinks.fold import fold
from penstock.sinks.layout import CURRENT, DELETED, VALID_FROM, VALID_TO, Mode
from penstock.transforms.applying import transform_changes, transform_keys, transform_rows
from penstock.transforms.masking import Mask
from penstock.transforms.transform import Transform
from tests.integration.sinks.history import BEYOND, PLAIN, History
from tests.integration.sinks.source import NULL, Row, Value, exact_of, own_arrays
from tests.property.chronicle import Chronicle, PlainTarget, Record, canonical, changes_table, record_of
from tests.property.test_fold import HEAP, Sizes, chronicle, epochs, heap_of, layout_of, sizes

KEY = Secret("a key for tests")


def hashed(text: str) -> str:
    return hmac.new(KEY.reveal().encode(), text.encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class Case:
    """A transform, and what it comes to, said in plain Python: the target's row, or None for one that is left out."""

    table: TableSchema
    transform: Transform
    model: Callable[[Row], Row | None]


def shaped(row: Row) -> Row:
    number = row["id"].typed
    note = row["note"].typed
    assert number is not None
    return {
        "id": Value(hashed(str(number))),
        "remark": NULL if note is None else Value(f"{str(note)[:1]}***" if len(str(note)) > 1 else "***"),
        "amount": row["amount"],
        "seen": row["seen"],
    }


def filtered(row: Row) -> Row | None:
    """Rows whose number is in a range, or whose note is not too late in the alphabet."""
    note = row["note"].typed
    number = row["id"].typed
    assert isinstance(number, int)
    return dict(row) if number > -48 and (note is None or str(note) < "text 5") else None


def hashed_beyond(row: Row) -> Row:
    """Keys of which only the texts tell them apart."""
    day, number = row["valid_to"], row["number"]
    text = number.text if number.text is not None else str(int(number.typed)) if isinstance(number.typed, Decimal) else None
    return {**row, "number": NULL if text is None else Value(hashed(text)), "valid_to": Value(hashed(day.text or str(day.typed)))}


CASES = {
    "columns": Case(PLAIN, Transform(("blob",), {"note": "remark"}, ("id",), {"note": Mask(1)}, key=KEY), shaped),
    "where": Case(PLAIN, Transform(where="id > -48 AND (note IS NULL OR note < 'text 5')"), filtered),
    "beyond": Case(BEYOND, Transform(hash=("valid_to", "number"), key=KEY), hashed_beyond),
}


class Talkative(History):
    """A history in which texts always travel, so that the filter can be worked out."""

    @staticmethod
    @override
    def may_stay(column: Column) -> bool:
        return not pa.types.is_string(column.arrow_type) and not pa.types.is_timestamp(column.arrow_type)


class Complete(Talkative):
    @staticmethod
    @override
    def may_stay(column: Column) -> bool:
        return False


def talkative(sizes: Sizes, kind: type[History]) -> Chronicle:
    history = kind(PLAIN, sizes.seed, groups=2, source=Chronicle)
    history.statements = sizes.statements
    history.run(sizes.transactions, truncates=sizes.truncates)
    assert isinstance(history.source, Chronicle)
    return history.source


def wanted(case: Case, rows: list[Row]) -> list[Record]:
    return [record_of(made) for row in rows if (made := case.model(row)) is not None]


def snapshot(table: TableSchema, rows: list[Row]) -> pa.Table:
    columns = [pa.field(column.name, column.arrow_type) for column in table.columns]
    exact = pa.array([exact_of(row) for row in rows], pa.map_(pa.string(), pa.string()))
    return pa.table([*own_arrays(table, rows), exact], schema=pa.schema([*columns, pa.field(EXACT, exact.type)]))


@pytest.mark.parametrize("kind", [History, Talkative, Complete])
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=20, deadline=None)
@given(sizes=sizes)
def test_K12_after_every_epoch_a_mirror_is_what_the_model_makes_of_the_source(name: str, kind: type[History], sizes: Sizes) -> None:
    case = CASES[name]
    source = talkative(sizes, kind) if case.table is PLAIN else chronicle(case.table, sizes)
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
            assert name == "where", "a row came into the filter without all of its values"
            assert kind is not Complete
            return
        if outcome.refused.num_rows:
            assert name == "where"
            assert kind is not Complete
            return
        target.apply(folded)
        assert canonical(target.rows, layout) == canonical(wanted(case, source.states[epoch[-1].position]), layout)


@pytest.mark.parametrize("kind", [Talkative, Complete])
@pytest.mark.parametrize("mode", [Mode.SOFT_DELETE, Mode.HISTORY])
@settings(max_examples=20, deadline=None)
@given(sizes=sizes)
def test_K12_rows_of_every_mode_that_are_live_are_those_that_pass(mode: Mode, kind: type[History], sizes: Sizes) -> None:
    case = CASES["where"]
    source = talkative(sizes, kind)
    fitted = case.transform.fit(PLAIN)
    layout, mirror = layout_of(fitted.schema, mode), layout_of(fitted.schema, Mode.MIRROR)
    kept = [row for row in source.expected(mode, source.fence) if filtered({n: Value(row[n]) for n in ("id", "note")}) is not None]
    target = PlainTarget(layout, kept)
    passed = {source.fence}
    for epoch in epochs(source.log, sizes.seed):
        outcome = transform_changes(fitted, changes_table(PLAIN, epoch))
        try:
            folded = fold(outcome.kept, layout, target.lookup)
        except TargetRewoundError:
            assert kind is not Complete
            break
        if outcome.refused.num_rows:
            assert kind is not Complete
            break
        target.apply(folded)
        passed |= {each.position for each in epoch}
        live = [row for row in target.rows if (not row[DELETED] if mode is Mode.SOFT_DELETE else row[CURRENT])]
        own = [{name: row[name] for name in mirror.schema.names} for row in live]
        assert canonical(own, mirror) == canonical(wanted(case, source.states[epoch[-1].position]), mirror)
    if mode is Mode.HISTORY:
        for position in passed:
            valid = [row for row in target.rows if row[VALID_FROM] <= position and (row[CURRENT] or position < row[VALID_TO])]
            own = [{name: row[name] for name in mirror.schema.names} for row in valid]
            assert canonical(own, mirror) == canonical(wanted(case, source.states[position]), mirror)


@settings(max_examples=25, deadline=None)
@given(sizes=sizes)
def test_K12_what_is_refused_or_cannot_be_applied_lacks_a_value_and_came_into_the_filter(sizes: Sizes) -> None:
    """With a filter that no row can come into, nothing is ever refused: missing values alone are no reason."""
    case = Case(PLAIN, Transform(where="id > -48"), lambda row: row if row["id"].typed > -48 else None)  # type: ignore[operator]
    source = chronicle(PLAIN, sizes, moves_leave_values=False)
    fitted = case.transform.fit(PLAIN)
    layout = layout_of(fitted.schema, Mode.MIRROR)
    target = PlainTarget(layout, wanted(case, source.states[source.fence]))
    for epoch in epochs(source.log, sizes.seed):
        outcome = transform_changes(fitted, changes_table(PLAIN, epoch))
        assert outcome.refused.num_rows == 0
        target.apply(fold(outcome.kept, layout, target.lookup))
        assert canonical(target.rows, layout) == canonical(wanted(case, source.states[epoch[-1].position]), layout)


@settings(max_examples=10, deadline=None)
@given(sizes=sizes)
def test_K13_hashed_keys_are_the_same_by_rows_changes_and_keys(sizes: Sizes) -> None:
    case = CASES["beyond"]
    source = chronicle(BEYOND, sizes)
    fitted = case.transform.fit(BEYOND)
    rows = snapshot(BEYOND, source.states[source.fence])
    keys = transform_keys(fitted, rows.select(["valid_to", "number", EXACT]))
    kept = transform_rows(fitted, rows).kept
    assert keys.select(["valid_to", "number"]).equals(kept.select(["valid_to", "number"]))
    assert keys.column(EXACT).null_count == keys.num_rows, "what is hashed does not stand beside its hash"
    changes = changes_table(BEYOND, source.log)
    made = transform_changes(fitted, changes).kept
    assert made.num_rows == changes.num_rows
    assert pc.all(pc.equal(made.column(UNCHANGED).is_null(), changes.column(UNCHANGED).is_null())).as_py() in (True, None)


@settings(max_examples=40, deadline=None)
@given(sizes=sizes)
def test_K12_without_a_key_old_and_new_rows_are_each_looked_at_by_themselves(sizes: Sizes) -> None:
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
