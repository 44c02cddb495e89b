"""Every sink in every mode, and everything that can happen to rows: after each epoch the target is what a model says.

For each of them the operations are played once, all at the same time; each test looks at what became of one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from penstock.change import COMMIT_VERSION, ORDINAL
from penstock.sinks.layout import CURRENT, VALID_FROM, VALID_FROM_TIME, VALID_TO, VALID_TO_TIME, Mode
from tests.contract.operations import HEAP_OPERATIONS, OPERATIONS
from tests.contract.places import MERGED, MORE_PLACES, PLACES, Cell, NewPlace, cells, parameters
from tests.contract.playing import Play
from tests.contract.shapes import HEAP, INDEXED, KEYED, ODD, WIDE, Shape
from tests.integration.sinks.source import Key
from tests.property.chronicle import Record, canonical

_played: dict[Cell, dict[Shape, Play]] = {}

# A table without key has no versions that could be told apart, nor rows that could be marked.
_SHAPES = {Mode.MIRROR: (*KEYED, HEAP), Mode.SOFT_DELETE: KEYED, Mode.HISTORY: KEYED, Mode.APPEND: (*KEYED, HEAP)}
# The same sink in another way has some of them.
_SOME_SHAPES = {Mode.MIRROR: (INDEXED, HEAP), Mode.SOFT_DELETE: (INDEXED,), Mode.HISTORY: (INDEXED,), Mode.APPEND: (INDEXED,)}


def shapes_of(name: str, mode: Mode) -> tuple[Shape, ...]:
    if name == MERGED:
        return (WIDE,)  # every epoch is seconds of Delta's own
    return (_SHAPES if name in PLACES else _SOME_SHAPES)[mode]


@pytest.fixture
def plays(request: pytest.FixtureRequest, new_place: NewPlace) -> dict[Shape, Play]:
    """Played once for all tests, whatever their order."""
    name, mode = request.param
    if request.param not in _played:
        place = new_place(name)
        sink = place.open(mode)
        _played[request.param] = {shape: Play(place, sink, mode, shape, place.root) for shape in shapes_of(name, mode)}
        sink.close()
    return _played[request.param]


def having(*shapes: Shape, modes: Sequence[Mode] = tuple(Mode)) -> pytest.MarkDecorator:
    """Every sink in every one of these modes in which it has one of these shapes."""
    every = cells(*Mode, of=(*PLACES, *MORE_PLACES))
    found = [(name, mode) for name, mode in every if mode in modes and {*shapes} & {*shapes_of(name, mode)}]
    return pytest.mark.parametrize("plays", parameters(found), indirect=True)


def assert_held(plays: dict[Shape, Play], operations: Sequence[str], shapes: Sequence[Shape] = KEYED) -> None:
    """What the operations came to, in each of the shapes, after the snapshot and after every epoch."""
    for play in (plays[shape] for shape in shapes if shape in plays):
        layout = play.kept.layout
        for number, (shown, expected) in enumerate(play.moments[: play.emptied_from]):
            for name in operations:
                held, wanted = canonical(play.of(name, shown), layout), canonical(play.of(name, expected), layout)
                wrong, lacking = sorted(set(held) - set(wanted)), sorted(set(wanted) - set(held))
                assert held == wanted, f"{name}, in {play.shape.name}, after {number} epochs:\nwrong {wrong[:2]}\nlacking {lacking[:2]}"


@having(WIDE, INDEXED)
def test_R01_rows_that_come_change_and_go(plays: dict[Shape, Play]) -> None:
    assert_held(plays, ["R01 rows come, change and go"], [WIDE, INDEXED])


@having(ODD)
def test_R02_R08_R17_under_full_identity_with_odd_names_all_the_same_holds(plays: dict[Shape, Play]) -> None:
    assert_held(plays, list(OPERATIONS), [ODD])


@having(INDEXED)
def test_R03_under_an_index_identity_all_the_same_holds(plays: dict[Shape, Play]) -> None:
    assert_held(plays, list(OPERATIONS), [INDEXED])


@having(HEAP)
def test_R04_R05_of_equal_rows_without_key_as_many_are_there_as_in_the_source(plays: dict[Shape, Play]) -> None:
    assert_held(plays, list(HEAP_OPERATIONS), [HEAP])


@having(*KEYED)
def test_R06_K05_a_row_keeps_under_a_new_key_what_did_not_travel(plays: dict[Shape, Play]) -> None:
    assert_held(plays, ["R06 keys change"])


@having(*KEYED)
def test_R07_K04_a_value_of_any_type_that_did_not_travel_is_not_null(plays: dict[Shape, Play]) -> None:
    assert_held(plays, ["R07 values that do not travel, one by one"])


@having(*KEYED)
def test_R11_K04_a_value_of_an_earlier_update_is_kept_by_a_later_one(plays: dict[Shape, Play]) -> None:
    assert_held(plays, ["R11 one update brings a value, the next leaves it out"])


@having(*KEYED)
def test_R12_a_truncate_empties_what_is_there_at_its_place_in_the_log(plays: dict[Shape, Play]) -> None:
    for play in plays.values():
        assert len(play.moments) - play.emptied_from == 2
        for shown, expected in play.moments[play.emptied_from :]:
            assert canonical(shown, play.kept.layout) == canonical(expected, play.kept.layout), play.shape.name


@having(*KEYED)
def test_R13_nulls_are_values(plays: dict[Shape, Play]) -> None:
    assert_held(plays, ["R13 nulls are values, and a delete shows none"])


@having(*KEYED)
def test_R14_updates_that_change_nothing(plays: dict[Shape, Play]) -> None:
    assert_held(plays, ["R14 updates that change nothing"])


@having(*KEYED)
def test_R16_changes_at_one_place_of_the_log_have_an_order(plays: dict[Shape, Play]) -> None:
    assert_held(plays, ["R16 many changes in one place of the log"])


@having(*KEYED)
def test_K02_every_order_of_changes_of_one_key_in_one_epoch(plays: dict[Shape, Play]) -> None:
    assert_held(plays, ["K02 every order of changes"])


@having(*KEYED)
def test_K03_keys_of_several_columns_are_told_apart_by_all_of_them(plays: dict[Shape, Play]) -> None:
    assert_held(plays, ["K03 keys that share a part"])


@having(*KEYED)
def test_K01_R01_nothing_is_there_that_belongs_to_no_operation(plays: dict[Shape, Play]) -> None:
    for play in plays.values():
        for shown, expected in play.moments[: play.emptied_from]:
            assert len(shown) == len(expected), play.shape.name


@having(*KEYED, modes=[Mode.APPEND])
def test_K15_a_log_has_every_change_once_and_no_two_in_one_place(plays: dict[Shape, Play]) -> None:
    for play in plays.values():
        shown, expected = play.moments[-1]
        fence = play.kept.source.fence
        places = [(row[COMMIT_VERSION], row[ORDINAL]) for row in shown if row[COMMIT_VERSION] > fence]
        assert len(places) == len(set(places)) == sum(len(each.changes) for each in play.kept.source.log)
        assert canonical(shown, play.kept.layout) == canonical(expected, play.kept.layout)


@having(*KEYED, modes=[Mode.HISTORY])
def test_K16_versions_of_a_key_neither_overlap_nor_leave_two_current_though_times_are_equal(plays: dict[Shape, Play]) -> None:
    for play in plays.values():
        for shown, _ in play.moments:
            for rows in _versions(play, shown):
                assert [row for row in rows[:-1] if row[CURRENT]] == []
                assert all(row[VALID_FROM] < row[VALID_TO] for row in rows[:-1])
                assert all(before[VALID_TO] <= after[VALID_FROM] for before, after in pairwise(rows))
                assert all(before[VALID_TO_TIME] <= after[VALID_FROM_TIME] for before, after in pairwise(rows))
        last, _ = play.moments[play.emptied_from - 1]
        begun = [[row[VALID_FROM_TIME] for row in rows if row[VALID_FROM] > play.kept.source.fence] for rows in _versions(play, last)]
        assert any(len(set(times)) < len(times) for times in begun), "two versions of one key began at the same time"


@having(*KEYED, modes=[Mode.HISTORY])
def test_K16_a_key_has_no_version_only_while_the_source_had_no_row_under_it(plays: dict[Shape, Play]) -> None:
    for play in plays.values():
        source, (shown, _) = play.kept.source, play.moments[-1]
        held = {at: {tuple(row[name] for name in play.kept.table.key) for row in rows} for at, rows in source.states.items()}
        versions = {play.key_of(rows[0]): rows for rows in _versions(play, shown)}
        for at, keys in held.items():
            valid = {key: [row for row in rows if row[VALID_FROM] <= at < (row[VALID_TO] or at + 1)] for key, rows in versions.items()}
            assert {key for key, rows in valid.items() if len(rows) == 1} == keys
            assert all(len(rows) <= 1 for rows in valid.values())


def _versions(play: Play, shown: Sequence[Record]) -> list[list[Record]]:
    """Of each key, oldest first."""
    found: dict[Key, list[Record]] = {}
    for row in shown:
        found.setdefault(play.key_of(row), []).append(row)
    return [sorted(rows, key=lambda row: row[VALID_FROM]) for rows in found.values()]
