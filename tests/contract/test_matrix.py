"""Every row operation in every table mode of every sink: after each epoch the target equals a model.

For each sink and mode all operations are played once, in one run; each test compares the rows of one of them.
A run (`OperationsRun`) applies the statements of `operations.py` to a source, writes its log to a spool, and
has the sink apply one epoch after the other. `SourceModel` computes the expected rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from penstock.change import COMMIT_VERSION, ORDINAL
from penstock.sinks.modes import CURRENT, VALID_FROM, VALID_FROM_TIME, VALID_TO, VALID_TO_TIME, Mode
from tests.support.contract.operations import HEAP_OPERATIONS, OPERATIONS
from tests.support.contract.operations_run import OperationsRun
from tests.support.contract.shapes import HEAP, INDEXED, KEYED, ODD, WIDE, Shape
from tests.support.contract.sink_setups import (
    MERGED,
    MORE_SINK_SETUPS,
    SINK_SETUPS,
    Cell,
    NewSinkSetup,
    cells,
    parameters,
)
from tests.support.property.source_model import Record, canonical
from tests.support.sinks.source import Key

_runs: dict[Cell, dict[Shape, OperationsRun]] = {}

# A table without key cannot have versions or deleted rows: they need a key.
_SHAPES = {
    Mode.MIRROR: (*KEYED, HEAP),
    Mode.SOFT_DELETE: KEYED,
    Mode.HISTORY: KEYED,
    Mode.APPEND: (*KEYED, HEAP),
}
# Variants of a sink have some of them.
_SOME_SHAPES = {
    Mode.MIRROR: (INDEXED, HEAP),
    Mode.SOFT_DELETE: (INDEXED,),
    Mode.HISTORY: (INDEXED,),
    Mode.APPEND: (INDEXED,),
}


def shapes_of(name: str, mode: Mode) -> tuple[Shape, ...]:
    if name == MERGED:
        return (WIDE,)  # every epoch is seconds of Delta's own
    return (_SHAPES if name in SINK_SETUPS else _SOME_SHAPES)[mode]


@pytest.fixture
def runs(request: pytest.FixtureRequest, new_setup: NewSinkSetup) -> dict[Shape, OperationsRun]:
    """Runs once for all tests, in any order."""
    name, mode = request.param
    if request.param not in _runs:
        place = new_setup(name)
        sink = place.open(mode)
        _runs[request.param] = {
            shape: OperationsRun(place, sink, mode, shape, place.root) for shape in shapes_of(name, mode)
        }
        sink.close()
    return _runs[request.param]


def having(*shapes: Shape, modes: Sequence[Mode] = tuple(Mode)) -> pytest.MarkDecorator:
    """Every sink in those of these modes in which it has one of these shapes."""
    every = cells(*Mode, of=(*SINK_SETUPS, *MORE_SINK_SETUPS))
    found = [(name, mode) for name, mode in every if mode in modes and {*shapes} & {*shapes_of(name, mode)}]
    return pytest.mark.parametrize("runs", parameters(found), indirect=True)


def assert_target_equals_model(
    runs: dict[Shape, OperationsRun], operations: Sequence[str], shapes: Sequence[Shape] = KEYED
) -> None:
    """The target equals the model for these operations, in every shape, after the snapshot and after every
    epoch.
    """
    for run in (runs[shape] for shape in shapes if shape in runs):
        layout = run.target_table.layout
        for number, (shown, expected) in enumerate(run.states[: run.emptied_from]):
            for name in operations:
                held, wanted = (
                    canonical(run.of(name, shown), layout),
                    canonical(run.of(name, expected), layout),
                )
                wrong, lacking = sorted(set(held) - set(wanted)), sorted(set(wanted) - set(held))
                assert held == wanted, (
                    f"{name}, in {run.shape.name}, after {number} epochs:\nwrong {wrong[:2]}\nlacking "
                    f"{lacking[:2]}"
                )


@having(WIDE, INDEXED)
def test_R01_inserts_updates_and_deletes(runs: dict[Shape, OperationsRun]) -> None:
    assert_target_equals_model(runs, ["R01 inserts, updates and deletes"], [WIDE, INDEXED])


@having(ODD)
def test_R02_R08_R17_rules_hold_under_full_identity_with_odd_names(runs: dict[Shape, OperationsRun]) -> None:
    assert_target_equals_model(runs, list(OPERATIONS), [ODD])


@having(INDEXED)
def test_R03_rules_hold_under_an_index_identity(runs: dict[Shape, OperationsRun]) -> None:
    assert_target_equals_model(runs, list(OPERATIONS), [INDEXED])


@having(HEAP)
def test_R04_R05_equal_rows_without_key_are_as_many_as_in_the_source(
    runs: dict[Shape, OperationsRun],
) -> None:
    assert_target_equals_model(runs, list(HEAP_OPERATIONS), [HEAP])


@having(*KEYED)
def test_R06_K05_a_row_keeps_its_unchanged_toast_values_under_a_new_key(
    runs: dict[Shape, OperationsRun],
) -> None:
    assert_target_equals_model(runs, ["R06 key changes"])


@having(*KEYED)
def test_R07_K04_a_value_of_any_type_that_did_not_travel_is_not_null(
    runs: dict[Shape, OperationsRun],
) -> None:
    assert_target_equals_model(runs, ["R07 unchanged TOAST in one column at a time"])


@having(*KEYED)
def test_R11_K04_a_value_of_an_earlier_update_is_kept_by_a_later_one(
    runs: dict[Shape, OperationsRun],
) -> None:
    assert_target_equals_model(runs, ["R11 an update sets a value, the next leaves it unchanged"])


@having(*KEYED)
def test_R12_a_truncate_removes_the_rows_before_it_in_the_log(runs: dict[Shape, OperationsRun]) -> None:
    for run in runs.values():
        assert len(run.states) - run.emptied_from == 2
        for shown, expected in run.states[run.emptied_from :]:
            assert canonical(shown, run.target_table.layout) == canonical(
                expected, run.target_table.layout
            ), run.shape.name


@having(*KEYED)
def test_R13_nulls_are_values(runs: dict[Shape, OperationsRun]) -> None:
    assert_target_equals_model(runs, ["R13 nulls are values, and a delete carries none"])


@having(*KEYED)
def test_R14_updates_that_change_nothing(runs: dict[Shape, OperationsRun]) -> None:
    assert_target_equals_model(runs, ["R14 updates without a difference"])


@having(*KEYED)
def test_R16_changes_at_one_place_of_the_log_have_an_order(runs: dict[Shape, OperationsRun]) -> None:
    assert_target_equals_model(runs, ["R16 many changes at one LSN"])


@having(*KEYED)
def test_K02_every_order_of_changes_of_one_key_in_one_epoch(runs: dict[Shape, OperationsRun]) -> None:
    assert_target_equals_model(runs, ["K02 every order of changes"])


@having(*KEYED)
def test_K03_rows_are_identified_by_all_columns_of_a_key(runs: dict[Shape, OperationsRun]) -> None:
    assert_target_equals_model(runs, ["K03 keys that share a column value"])


@having(*KEYED)
def test_K01_R01_no_rows_exist_that_belong_to_no_operation(runs: dict[Shape, OperationsRun]) -> None:
    for run in runs.values():
        for shown, expected in run.states[: run.emptied_from]:
            assert len(shown) == len(expected), run.shape.name


@having(*KEYED, modes=[Mode.APPEND])
def test_K15_a_log_has_every_change_once_and_no_two_in_one_place(runs: dict[Shape, OperationsRun]) -> None:
    for run in runs.values():
        shown, expected = run.states[-1]
        fence = run.target_table.source.fence
        places = [(row[COMMIT_VERSION], row[ORDINAL]) for row in shown if row[COMMIT_VERSION] > fence]
        assert (
            len(places) == len(set(places)) == sum(len(each.changes) for each in run.target_table.source.log)
        )
        assert canonical(shown, run.target_table.layout) == canonical(expected, run.target_table.layout)


@having(*KEYED, modes=[Mode.HISTORY])
def test_K16_versions_of_a_key_neither_overlap_nor_leave_two_current_though_times_are_equal(
    runs: dict[Shape, OperationsRun],
) -> None:
    for run in runs.values():
        for shown, _ in run.states:
            for rows in _versions(run, shown):
                assert [row for row in rows[:-1] if row[CURRENT]] == []
                assert all(row[VALID_FROM] < row[VALID_TO] for row in rows[:-1])
                assert all(before[VALID_TO] <= after[VALID_FROM] for before, after in pairwise(rows))
                assert all(
                    before[VALID_TO_TIME] <= after[VALID_FROM_TIME] for before, after in pairwise(rows)
                )
        last, _ = run.states[run.emptied_from - 1]
        begun = [
            [row[VALID_FROM_TIME] for row in rows if row[VALID_FROM] > run.target_table.source.fence]
            for rows in _versions(run, last)
        ]
        assert any(len(set(times)) < len(times) for times in begun), (
            "two versions of one key began at the same time"
        )


@having(*KEYED, modes=[Mode.HISTORY])
def test_K16_a_key_lacks_a_current_version_only_while_the_source_had_no_row_under_it(
    runs: dict[Shape, OperationsRun],
) -> None:
    for run in runs.values():
        source, (shown, _) = run.target_table.source, run.states[-1]
        held = {
            at: {tuple(row[name] for name in run.target_table.table.key) for row in rows}
            for at, rows in source.states.items()
        }
        versions = {run.key_of(rows[0]): rows for rows in _versions(run, shown)}
        for at, keys in held.items():
            valid = {
                key: [row for row in rows if row[VALID_FROM] <= at < (row[VALID_TO] or at + 1)]
                for key, rows in versions.items()
            }
            assert {key for key, rows in valid.items() if len(rows) == 1} == keys
            assert all(len(rows) <= 1 for rows in valid.values())


def _versions(run: OperationsRun, shown: Sequence[Record]) -> list[list[Record]]:
    """The versions of each key, oldest first."""
    found: dict[Key, list[Record]] = {}
    for row in shown:
        found.setdefault(run.key_of(row), []).append(row)
    return [sorted(rows, key=lambda row: row[VALID_FROM]) for rows in found.values()]
