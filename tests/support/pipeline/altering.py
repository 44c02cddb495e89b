"""One pipeline and all schema changes (edge cases S): during the snapshot, while it is stopped, and while it
runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from typing_extensions import override

from penstock.pipeline import table_reconciler as roster
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.snapshots.background import BackgroundSnapshots
from penstock.pipeline.table_overrides import change_overrides
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.position import Position
from penstock.schema import TableName
from tests.support.fix_pipeline import LakeFactory, Mirror
from tests.support.fix_postgres import Database
from tests.support.pipeline.altered import (
    COPIED,
    DURING,
    FOLLOWED,
    GONE,
    HALVED,
    IGNORED,
    LATER,
    MODES,
    REFUSED,
    ROUTED,
    Case,
    live,
    rules,
    statements,
)
from tests.support.pipeline.running import DEADLINE_SECONDS, Running, running
from tests.support.pipeline.sides import Sides, noted, sides
from tests.support.waiting import wait_for

MADE = {**FOLLOWED, **COPIED, **GONE, **REFUSED, **IGNORED, **MODES}
"""All tables that are altered after their creation, once while the pipeline is stopped and once while it
runs.
"""
LAGGING, SHARDED, JOINED = live("s06_lagging"), live("s13_k11_shards"), "s14_joined"
ROWS = {
    "s01_s02_s03_history": "id, a, d, c, _current",
    "s01_s02_s03_soft_delete": "id, a, d, c, _deleted",
    "s01_s02_s03_append": "_commit_version, _ordinal, _change_type, id, a, d, c",
    "s02_dropped": "key, a__dropped_1",
    "s04_history": "id, a, _current",
    "s07_dropped": "id",
    "s07_renamed": "id",
    "s07_moved": "id",
    "s13_ignore": "id, a",
    "s13_stop": "id, a",
    "s13_subtractive": "id, a",
    "s13_unmasked": "id, a",
    "s15_soft_delete": "id, a",
}


class Telling(PipelineObserver):
    def __init__(self) -> None:
        self.results: list[str] = []

    @override
    def announced(self, message: str) -> None:
        self.results.append(message)

    @override
    def interrupted(self, reason: str, pause_seconds: float) -> None:
        self.results.append(reason)

    @property
    def copied(self) -> set[str]:
        return {words.split()[0].partition(".")[2] for words in self.results if " is resynced: " in words}


class Altering(Telling):
    """Alters tables after their copies are planned and before they are read."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self._database = database
        self.left: dict[str, Case] = {}
        self.halve: Callable[[], None] = lambda: None
        """Called when a part of the table has been copied."""

    @override
    def snapshot_planned(self, table: TableName, chunks: int, heap_bytes: int) -> None:
        case = self.left.pop(table.name, None)
        for statement in statements(table.name, case) if case is not None else ():
            self._database.execute(statement)

    @override
    def snapshot_advanced(self, table: TableName, chunks: int, rows: int, heap_bytes: int) -> None:
        if table.name in HALVED:
            self.halve()


def create(database: Database, cases: Mapping[str, Case]) -> None:
    for name, case in cases.items():
        database.execute(case.create.replace("{}", name))


def do(database: Database, cases: Mapping[str, Case]) -> None:
    for name, case in cases.items():
        for statement in statements(name, case):
            database.execute(statement)


@dataclass
class Results:
    """The outcome for each table, by name: those altered while no pipeline ran, and their doubles."""

    kind: str
    statuses: dict[str, TableStatus] = field(default_factory=dict)
    copied: set[str] = field(default_factory=set)
    compared: dict[str, Sides] = field(default_factory=dict)
    rows: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    restarted: bool = False
    differing: str | None = None
    """The error for shards with different schemas."""

    def assert_equal(self, name: str) -> None:
        assert self.statuses[name].state is TableState.STREAMING, self.statuses[name]
        assert self.compared[name].are_equal, self.compared[name]

    def take(self, statuses: Mapping[str, TableStatus]) -> None:
        self.statuses |= {name.partition(".")[2]: status for name, status in statuses.items()}


def _begin(results: Results, lake: Mirror, database: Database, altering: Altering) -> None:
    """S14: a run that ends in the middle of a copy, and one that copies a table while it is altered."""
    create(
        database,
        {
            **MADE,
            **ROUTED,
            **HALVED,
            "s14_copied": DURING["s14_copied"],
            "s14_resynced": DURING["s14_resynced"],
        },
    )
    create(database, {live(name): case for name, case in {**MADE, **ROUTED}.items()})
    database.execute("CREATE TABLE marker (id serial PRIMARY KEY)")
    altering.left = {"s14_copied": DURING["s14_copied"]}
    _halve(lake, altering)
    do(database, HALVED)
    first = lake.run_once(altering)
    assert not first.failed, first.failed
    assert not altering.left
    results.restarted = any("s14_halved starts again" in words for words in altering.results)


def _halve(lake: Mirror, altering: Altering) -> None:
    """A run that its first chunk stops. The chunk returns only after the copying threads were asked
    to end.
    """
    pipeline, asked, stop = lake.pipeline(altering), threading.Event(), BackgroundSnapshots.stop

    def halve() -> None:
        pipeline.stop()
        assert asked.wait(DEADLINE_SECONDS)

    def stopped(self: BackgroundSnapshots) -> None:
        asked.set()
        stop(self)

    altering.halve = halve
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BackgroundSnapshots, "stop", stopped)
        pipeline.run()
    altering.halve = lambda: None
    begun = lake.open_sink().load_target(TableName("public", "s14_halved"))
    assert begun is None or begun.applied is None, "it was copied to its end"


def _alter_stopped(results: Results, lake: Mirror, database: Database, altering: Altering) -> None:
    """S06: all steps while the pipeline is stopped, so that the catalog shows only the result of the last
    one.
    """
    change_overrides(
        lake.config.state, lambda orders: orders.request_resync([TableName("public", "s14_resynced")])
    )
    do(database, {**MADE, **ROUTED, **LATER})
    altering.left = {"s14_resynced": DURING["s14_resynced"]}
    altering.results.clear()
    results.take(lake.run_once(altering).tables)
    results.copied = set(altering.copied)
    assert not altering.left
    names = [
        *FOLLOWED,
        *COPIED,
        *LATER,
        *HALVED,
        "s07_renamed_on",
        "s14_copied",
        "s14_resynced",
        *list(MODES)[:2],
    ]
    wanted = [*(f"public.{name}" for name in names), *(f"lake.{name}" for name in ROUTED)]
    _compare(results, lake, database, set(wanted))
    results.rows |= noted(lake, ROWS)


def _alter_running(results: Results, lake: Mirror, database: Database, altering: Altering) -> None:
    cases = {live(name): case for name, case in {**MADE, **ROUTED, **LATER}.items()}
    altering.left = {JOINED: DURING[JOINED]}
    altering.results.clear()
    with running(lake, altering) as run:
        run.order("pause", f"public.{LAGGING}")
        run.wait_for_state(f"public.{LAGGING}", TableState.PAUSED)
        create(database, {JOINED: DURING[JOINED]})
        for at in range(max(len(case.statements) for case in cases.values())):
            for name, case in cases.items():
                for statement in statements(name, case)[at : at + 1]:
                    database.execute(statement)
            _catch_up(run, database)
        run.order("resume", f"public.{LAGGING}")
        for name in REFUSED:
            run.wait_for_state(f"public.{live(name)}", TableState.FAILED)
        for name in GONE:
            run.wait_for_state(f"public.{live(name)}", TableState.GONE)
        _await_equal(results, lake, database, run)
        results.copied |= altering.copied
        _differ(results, database, run)
        _await_equal(results, lake, database, run, [f"lake.{SHARDED}"])
        results.take({str(name): status for name, status in run.pipeline.statuses.items()})
        assert not altering.left
    results.rows |= noted(lake, {live(name): columns for name, columns in ROWS.items()})


def _catch_up(run: Running, database: Database) -> None:
    ((written,),) = database.query("SELECT pg_current_wal_lsn()::text")
    database.execute("INSERT INTO marker DEFAULT VALUES")
    run.wait_for_position(Position.parse(written))


def _await_equal(
    results: Results, lake: Mirror, database: Database, run: Running, wanted: Iterable[str] | None = None
) -> None:
    names = [*FOLLOWED, *COPIED, *LATER, "s07_renamed_on", *list(MODES)[:2]]
    left = set(wanted or [*(f"public.{live(name)}" for name in names), f"lake.{SHARDED}", f"public.{JOINED}"])

    def are_equal() -> bool:
        if run.failure is not None:
            raise run.failure
        # Comparing all tables takes long and slows down the pipeline.
        states = {str(name): status.state for name, status in run.pipeline.statuses.items()}
        if not lake.orders().resync and all(states.get(name) is TableState.STREAMING for name in left):
            _compare(results, lake, database, left)
        return not left

    wait_for(are_equal, "the tables to be equal", lambda: (left, run.pipeline.statuses), DEADLINE_SECONDS)


def _compare(results: Results, lake: Mirror, database: Database, left: set[str]) -> None:
    """Remove the tables that are equal."""
    found = sides(lake, database, left)
    results.compared |= {name.partition(".")[2]: each for name, each in found.items()}
    left -= {name for name, each in found.items() if each.are_equal}


def _differ(results: Results, database: Database, run: Running) -> None:
    """K11: while the schemas of the shards differ, the table fails; once they are equal it is resynced.

    After that a truncate removes the rows of one shard, and a row with a changed key and unchanged values
    stays in its shard.
    """
    database.execute(
        f"ALTER TABLE {SHARDED}_1 ADD more int DEFAULT 7; INSERT INTO {SHARDED}_1 VALUES (9, 'new')"
    )
    run.wait_for_state(f"lake.{SHARDED}", TableState.FAILED)
    results.differing = run.pipeline.statuses[TableName("lake", SHARDED)].reason
    for number in (2, 3):
        database.execute(f"ALTER TABLE {SHARDED}_{number} ADD more int DEFAULT 7")
    run.wait_for_state(f"lake.{SHARDED}", TableState.STREAMING)
    database.execute(f"DELETE FROM {SHARDED}_3 WHERE id = 1; INSERT INTO {SHARDED}_2 VALUES (9, 'again')")
    database.execute(
        f"UPDATE {SHARDED}_2 SET id = 40 WHERE id = 30; TRUNCATE {SHARDED}_1; "
        f"INSERT INTO {SHARDED}_1 VALUES (40, 'after')"
    )


def run_scenario(lake_of: LakeFactory, kind: str) -> Results:
    """Run all cases in one lake."""
    database, lake = lake_of(kind, tables=["public.*", *rules(MADE, ROUTED)], snapshot_chunk_bytes=65536)
    found, altering = Results(kind), Altering(database)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roster, "_QUERY_SECONDS", 2.0)
        for chapter in (_begin, _alter_stopped, _alter_running):
            chapter(found, lake, database, altering)
    return found
