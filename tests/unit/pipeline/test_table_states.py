"""The transition table of a table's life cycle: complete, unambiguous, and the same in the code and in the
documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.pipeline.table_states import TRANSITIONS, TableEvent, TableState, is_allowed, next_state
from penstock.position import Position
from penstock.schema import TableName
from tests.support.pipeline.epochs import open_epochs
from tests.support.pipeline.position_sink import PositionSink
from tests.support.spool.builders import ORDERS, at

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "explanation" / "table-states.md"
STATES = (None, *TableState)


def rows(page: Path, header: str) -> list[list[str]]:
    """The cells of the table with this header."""
    lines = page.read_text().splitlines()
    first = lines.index(header) + 2
    found = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def test_documented_transitions_are_those_of_the_code() -> None:
    written = [
        [
            ", ".join("(new)" if state is None else f"`{state}`" for state in STATES if state in each.before),
            str(each.event),
            "(removed)" if each.after is None else f"`{each.after}`",
            each.set_by,
        ]
        for each in TRANSITIONS
    ]
    assert rows(PAGE, "| in state | event | next state | set by |") == written


def test_the_architecture_page_lists_every_state() -> None:
    lines = (ROOT / "ARCHITECTURE.md").read_text().splitlines()
    assert {state for state in TableState if any(line.startswith(f"| `{state}` |") for line in lines)} == set(
        TableState
    )


def test_every_event_has_one_transition_and_every_state_is_reached_and_left() -> None:
    assert [each.event for each in TRANSITIONS] == list(dict.fromkeys(each.event for each in TRANSITIONS))
    assert {each.event for each in TRANSITIONS} == set(TableEvent)
    assert {each.after for each in TRANSITIONS} == {None, *TableState}
    for state in TableState:
        assert any(is_allowed(state, event) and next_state(state, event) is not state for event in TableEvent)


@pytest.mark.parametrize("event", list(TableEvent), ids=lambda event: event.name.lower())
@pytest.mark.parametrize("state", STATES, ids=lambda state: "new" if state is None else state.value)
def test_the_life_cycle_applies_an_event_as_the_table_says_and_ignores_any_other(
    tmp_path: Path, state: TableState | None, event: TableEvent
) -> None:
    (tmp_path / "lake").mkdir()
    tables = open_epochs(PositionSink(), tmp_path).tables
    name = ORDERS.name
    if state is not None:
        reach(tables.transition, name, state)
    before = tables.statuses.get(name)
    assert tables.transition(name, event) is is_allowed(state, event)
    after = tables.statuses.get(name)
    if is_allowed(state, event):
        assert (None if after is None else after.state) == next_state(state, event)
    else:
        assert after == before


def reach(transition: Callable[[TableName, TableEvent], bool], name: TableName, state: TableState) -> None:
    """Bring a new table to a state by the shortest way of events."""
    ways: dict[TableState | None, list[TableEvent]] = {None: []}
    pending: list[TableState | None] = [None]
    while pending and state not in ways:
        current = pending.pop(0)
        for event in TableEvent:
            following = next_state(current, event) if is_allowed(current, event) else None
            if following is not None and following not in ways:
                ways[following] = [*ways[current], event]
                pending.append(following)
    for event in ways[state]:
        assert transition(name, event)


def test_a_failed_table_is_not_brought_back_by_a_late_snapshot(tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    sink = PositionSink()
    tables = open_epochs(sink, tmp_path).tables
    tables.add_pending(ORDERS.name)
    tables.transition(ORDERS.name, TableEvent.FAILED)
    tables.set_fence(ORDERS.name, at(100))
    tables.add_copied(sink.target(ORDERS, 100))
    tables.run_requests()
    assert tables.statuses[ORDERS.name].state is TableState.FAILED
    assert tables.targets == {}
    assert tables.recorded == Position.ZERO
