from __future__ import annotations

import pytest

from penstock.contracts.provisioning import Blocker, CoverageReport
from penstock.errors import PrivilegeError
from penstock.pipeline.states import TableState, TableStatus
from penstock.pipeline.tables import Tables, fail_blocked
from penstock.schema import TableName

GOOD, BAD = TableName("public", "good"), TableName("public", "bad")


def _blocked(*tables: TableName) -> CoverageReport:
    return CoverageReport(False, blockers=(Blocker("PEN-1104", "only app may publish it", "as app: CREATE PUBLICATION p;", tables),))


def _pending() -> Tables:
    return Tables(statuses={name: TableStatus(TableState.PENDING) for name in (GOOD, BAD)})


def test_a_table_that_cannot_be_published_fails_alone_with_its_remedy() -> None:
    tables = _pending()
    fail_blocked(tables, _blocked(BAD))
    assert tables.capturable == [GOOD]
    assert tables.statuses[BAD].reason == "PEN-1104: only app may publish it"
    assert tables.statuses[BAD].remedy == "as app: CREATE PUBLICATION p;"


def test_when_no_table_can_be_published_nothing_starts() -> None:
    with pytest.raises(PrivilegeError, match="only app"):
        fail_blocked(_pending(), _blocked(GOOD, BAD))


def test_what_concerns_the_whole_publication_is_left_to_whoever_ensures_it() -> None:
    tables = _pending()
    fail_blocked(tables, _blocked())
    assert tables.capturable == [GOOD, BAD]
