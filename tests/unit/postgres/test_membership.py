"""Whether changes of a table may be missing since it was last seen, from its OID and its publication
history.
"""

from __future__ import annotations

import pytest

from penstock.postgres.membership import CapturedTables, Membership, is_same_act
from penstock.schema import TableName

ORDERS, OTHER = TableName("public", "orders"), TableName("public", "other")
BEFORE = Membership(1, "7/10")

RENAMED = "is called public.other now"
REPLACED = "was dropped, and another table has its name"
REJOINED = "was taken out of the publication and put in again"
LEFT = "was taken out of the publication"


@pytest.mark.parametrize(
    ("found", "by_name", "by_oid"),
    [
        (CapturedTables({ORDERS: BEFORE}, {1: ORDERS}), None, None),
        (CapturedTables({ORDERS: Membership(1, "7/11")}, {1: ORDERS}), REJOINED, REJOINED),
        (CapturedTables({}, {1: ORDERS}), LEFT, LEFT),
        (CapturedTables({OTHER: BEFORE}, {1: OTHER}), RENAMED, None),
        (
            CapturedTables({ORDERS: Membership(2, "7/10"), OTHER: BEFORE}, {1: OTHER, 2: ORDERS}),
            RENAMED,
            None,
        ),
        (CapturedTables({ORDERS: Membership(2, "7/11")}, {2: ORDERS}), REPLACED, REPLACED),
        (CapturedTables({ORDERS: Membership(2, "7/10")}, {2: ORDERS}), REPLACED, None),
        (CapturedTables({}, {2: ORDERS}), REPLACED, REPLACED),
        (CapturedTables({}, {}), None, None),
    ],
)
def test_the_reason_names_the_interruption_of_a_membership(
    found: CapturedTables, by_name: str | None, by_oid: str | None
) -> None:
    assert found.interruption(ORDERS, BEFORE) == by_name
    assert found.interruption(ORDERS, BEFORE, by_oid=True) == by_oid


@pytest.mark.parametrize("by_oid", [False, True])
def test_a_table_that_need_not_be_published_may_leave_but_not_come_back(by_oid: bool) -> None:
    left, rejoined = (
        CapturedTables({}, {1: ORDERS}),
        CapturedTables({ORDERS: Membership(1, "7/11")}, {1: ORDERS}),
    )
    assert left.interruption(ORDERS, BEFORE, by_oid=by_oid, must_be_captured=False) is None
    assert rejoined.interruption(ORDERS, BEFORE, by_oid=by_oid, must_be_captured=False) == REJOINED


def test_an_unpublished_table_with_the_name_of_a_dropped_one_matters_only_where_the_name_is_required() -> (
    None
):
    replaced = CapturedTables({}, {2: ORDERS})
    assert replaced.interruption(ORDERS, BEFORE, by_oid=True, must_be_captured=False) is None
    assert replaced.interruption(ORDERS, BEFORE, must_be_captured=False) == REPLACED


def test_a_dropped_table_is_an_interruption_only_where_it_must_exist() -> None:
    assert CapturedTables({}, {}).interruption(ORDERS, BEFORE, must_exist=True) == "was dropped"


def test_a_record_without_an_oid_is_compared_by_its_name() -> None:
    before = Membership(None, "7/10")
    assert CapturedTables({ORDERS: Membership(1, "7/10")}).interruption(ORDERS, before) is None
    assert CapturedTables({ORDERS: Membership(1, "7/11")}).interruption(ORDERS, before) == REJOINED
    assert CapturedTables({}).interruption(ORDERS, before) == LEFT


def test_interruptions_are_those_of_the_recorded_tables_alone() -> None:
    found = CapturedTables({ORDERS: BEFORE, OTHER: Membership(2, "7/12")}, {1: ORDERS, 2: OTHER})
    assert found.interruptions({ORDERS: BEFORE}) == {}
    assert found.interruptions({ORDERS: BEFORE, OTHER: Membership(2, "7/11")}) == {OTHER: REJOINED}


@pytest.mark.parametrize(
    ("before", "now", "is_same"),
    [
        ("7/10", "7/10", True),
        ("7/10", "7/11", False),
        ("7/all", "7/schema-3", True),
        ("7/all", "8/schema-3", False),
        ("7/schema-3", "7/all", False),
        ("1/5|2/6,3/7", "1/5|2/6", True),
        ("1/5", "1/5|2/6", True),
        ("1/5|2/6", "1/5|2/7", False),
        ("1/5|2/6", "1/6|2/6", False),
    ],
)
def test_acts_are_the_same_in_all_partitions_that_were_there_all_along(
    before: str, now: str, is_same: bool
) -> None:
    assert is_same_act(before, now) is is_same
