"""Tables that are altered: their targets follow, live and after a stop, or are copied anew by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from typing_extensions import override

from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.states import TableState
from penstock.schema import TableName
from penstock.testing.streams import wait_for
from tests.fix_pipeline import Mirror, MirrorFactory
from tests.fix_postgres import Database
from tests.integration.pipeline.altered import COPIED, DURING, FOLLOWED, GONE, LATER, LIVE, POLICIES, Case, statements
from tests.integration.pipeline.test_online import DEADLINE_SECONDS, running

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

KEYLESS = frozenset({"s11_heap"})
"""Followed by Delta alone: Iceberg looks for such rows by all that they have, and a column that is added with a value is not there yet."""
RULES = [{"table": f"public.{name}", "schema_changes": policy} for name, (policy, _) in POLICIES.items()]
POLICED = {name: case for name, (_, case) in POLICIES.items()}
SOME = {name: FOLLOWED[name] for name in ("s01_s10_added", "s02_dropped", "s03_s04_renamed", "s06_idle")}
ANEW = {"s07_recreated": COPIED["s07_recreated"]}


class Telling(PipelineObserver):
    def __init__(self) -> None:
        self.told: list[str] = []

    @override
    def interrupted(self, reason: str, pause_seconds: float) -> None:
        self.told.append(reason)

    @property
    def copied(self) -> set[str]:
        return {words.split()[0].removeprefix("public.") for words in self.told if " is copied anew: " in words}


class Altering(Telling):
    """Alters tables when their copies are planned, which are read just after."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self._database = database
        self.left = dict(DURING)

    @override
    def snapshot_planned(self, table: TableName, chunks: int, heap_bytes: int) -> None:
        case = self.left.pop(table.name, None)
        for statement in statements(table.name, case) if case is not None else ():
            self._database.execute(statement)


def do(database: Database, cases: Mapping[str, Case]) -> None:
    for name, case in cases.items():
        for statement in statements(name, case):
            database.execute(statement)


def assert_equal(lake: Mirror, *groups: Iterable[str]) -> None:
    wanted = {f"public.{name}" for group in groups for name in group}
    found = {str(each.table): each for each in lake.compare(wanted)}
    assert found.keys() == wanted
    different = [each for each in found.values() if not each.equal]
    assert not different, different


def test_S01_to_S07_tables_in_postgres_are_followed_or_copied_anew_while_it_runs_and_after_a_stop(
    database: Database, mirror_into: MirrorFactory
) -> None:
    for name, case in {**SOME, **ANEW}.items():
        database.execute(case.create.replace("{}", name))
    lake = mirror_into("postgres")
    lake.run_once()
    do(database, {**SOME, **ANEW})
    seen = Telling()
    result = lake.run_once(seen)
    assert not result.failed, result.failed
    assert_equal(lake, SOME, ANEW)
    assert seen.copied == set(ANEW)
    with running(lake) as run:
        for statement in LIVE[:2]:
            database.execute(statement)
        run.wait_for_rows("public.s01_s10_added", 4)
    assert_equal(lake, ["s01_s10_added"])


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_S01_to_S14_tables_are_followed_or_copied_anew_whatever_is_done_to_them_and_when(
    database: Database, mirror_into: MirrorFactory, kind: str
) -> None:
    """S06: all of it while the pipeline is stopped, so that the catalog shows only the last of it. Then more of it, while it runs."""
    for name, case in {**FOLLOWED, **COPIED, **GONE, **DURING, **POLICED}.items():
        database.execute(case.create.replace("{}", name))
    lake = mirror_into(kind, tables=["public.*", *RULES])
    altering = Altering(database)
    first = lake.run_once(altering)
    assert not first.failed, first.failed
    assert not altering.left

    do(database, {**FOLLOWED, **COPIED, **GONE, **LATER, **POLICED})
    seen = Telling()
    result = lake.run_once(seen)
    _assert_stopped(lake, {name: status.state for name, status in result.tables.items()})
    assert_equal(lake, DURING, FOLLOWED, COPIED, LATER, ["s07_renamed_on", "s13_additive"])
    assert seen.copied == {*COPIED, *(KEYLESS if kind == "iceberg" else ())}
    kept = {row["key"]: row["a__dropped_1"] for row in lake.rows("public.s02_dropped")}
    assert kept == {1: None, 2: "two", 3: None}

    with running(lake) as run:
        for statement in LIVE:
            database.execute(statement)
        run.wait_for_rows("public.s01_s10_added", 4)
        run.wait_for_rows("public.s12_parts", 6)
        run.wait_for_state("public.s05_mixed", TableState.GONE)
        run.wait_for_rows("public.r12_rewritten", 2)
        run.wait_for_state("public.s08_live", TableState.STREAMING)
        wait_for(lambda: "z" in lake.rows("public.s06_idle")[0].asDict(), "what was done to an idle table", str, DEADLINE_SECONDS)
    assert_equal(lake, ["r12_rewritten", "s01_s10_added", "s06_idle", "s08_live", "s12_parts"])
    assert {row["id"] for row in lake.rows("public.s05_mixed")} == {1, 2, 3, 100}, "all that there was under this name"


def _assert_stopped(lake: Mirror, states: Mapping[str, TableState]) -> None:
    """Tables that are not followed, and why, and what their targets have."""
    assert {name for name, state in states.items() if state is TableState.GONE} == {f"public.{name}" for name in GONE}
    assert {row["id"] for row in lake.rows("public.s07_dropped")} == {1, 2, 3}
    assert {row["id"] for row in lake.rows("public.s07_renamed")} == {2}
    assert {name for name, state in states.items() if state is TableState.FAILED} == {"public.s13_stop"}
    assert sorted((row["id"], row["a"]) for row in lake.rows("public.s13_ignore")) == [(1, "one"), (2, "two"), (3, "c")]
