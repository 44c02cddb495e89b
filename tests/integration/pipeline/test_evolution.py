"""Schema changes: targets follow, while the pipeline runs and after a stop, or are resynced automatically."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from penstock.pipeline.table_states import TableState
from tests.support.fix_pipeline import LakeFactory, Mirror, MirrorFactory
from tests.support.fix_postgres import Database
from tests.support.pipeline.altered import (
    COPIED,
    DURING,
    FOLLOWED,
    GONE,
    HALVED,
    IGNORED,
    LATER,
    REFUSED,
    ROUTED,
    case_id,
    live,
)
from tests.support.pipeline.altering import SHARDED, Results, Telling, create, do, run_scenario
from tests.support.pipeline.running import running

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

KEYLESS = frozenset({"s11_heap"})
"""Only Delta follows these: Iceberg finds keyless rows by all their columns, and an added column with a
default is not in old files.
"""
SOME = {name: FOLLOWED[name] for name in ("s01_s10_added", "s02_dropped", "s03_s04_renamed", "s06_idle")}
ANEW = {"s07_recreated": COPIED["s07_recreated"]}


def assert_equal(lake: Mirror, *groups: Iterable[str]) -> None:
    wanted = {f"public.{name}" for group in groups for name in group}
    found = {str(each.table): each for each in lake.compare(wanted)}
    assert found.keys() == wanted
    different = [each for each in found.values() if not each.equal]
    assert not different, different


def test_S01_to_S07_tables_in_postgres_are_evolved_or_resynced_while_running_and_after_a_stop(
    database: Database, mirror_into: MirrorFactory
) -> None:
    create(database, {**SOME, **ANEW})
    lake = mirror_into("postgres")
    lake.run_once()
    do(database, {**SOME, **ANEW})
    seen = Telling()
    result = lake.run_once(seen)
    assert not result.failed, result.failed
    assert_equal(lake, SOME, ANEW)
    assert seen.copied == set(ANEW)
    with running(lake) as run:
        database.execute(
            "ALTER TABLE s01_s10_added ADD live int DEFAULT 3; UPDATE s01_s10_added SET live = 4 WHERE id = 1"
        )
        database.execute("ALTER TABLE s01_s10_added DROP x; ALTER TABLE s01_s10_added RENAME live TO alive")
        database.execute("INSERT INTO s01_s10_added (id) VALUES (100)")
        run.wait_for_rows("public.s01_s10_added", 5)
    assert_equal(lake, ["s01_s10_added"])


@pytest.fixture(scope="module", params=["delta", "iceberg"])
def results(lake_of: LakeFactory, request: pytest.FixtureRequest) -> Results:
    """The results of one pipeline with all of these tables."""
    return run_scenario(lake_of, request.param)


def both(*groups: Iterable[str]) -> pytest.MarkDecorator:
    """All of these tables, altered while no pipeline ran and while it ran."""
    names = [name for group in groups for name in group]
    parameters = [(name, name) for name in names] + [(live(name), name) for name in names]
    return pytest.mark.parametrize(
        ("table", "name"), parameters, ids=[case_id(table) for table, _ in parameters]
    )


@both(FOLLOWED)
def test_a_target_follows_schema_changes_of_its_table(results: Results, table: str, name: str) -> None:
    results.assert_equal(table)
    assert (table in results.copied) is (results.kind == "iceberg" and name in KEYLESS)


@both(COPIED, ROUTED)
def test_a_table_that_cannot_be_followed_is_resynced_automatically(
    results: Results, table: str, name: str
) -> None:
    results.assert_equal(table)
    assert table in results.copied


@both(GONE)
def test_a_dropped_table_keeps_its_target_with_all_rows(results: Results, table: str, name: str) -> None:
    assert results.statuses[table].state is TableState.GONE
    assert results.rows[table] == ([(2,)] if name == "s07_renamed" else [(1,), (2,), (3,)])


@pytest.mark.parametrize("when", ["stopped", "live"])
def test_S07_a_table_is_copied_under_its_new_name(results: Results, when: str) -> None:
    results.assert_equal("s07_renamed_on" if when == "stopped" else live("s07_renamed_on"))


@both(LATER)
def test_a_table_that_is_made_later_is_copied_and_followed(results: Results, table: str, name: str) -> None:
    results.assert_equal(table)
    assert table not in results.copied


@both(["s02_dropped"])
def test_a_column_that_is_dropped_keeps_its_values_and_makes_room(
    results: Results, table: str, name: str
) -> None:
    assert results.rows[table] == [(1, None), (2, "two"), (3, None)]


@both(REFUSED)
def test_a_table_that_must_not_be_followed_fails_and_its_target_stays_as_it_was(
    results: Results, table: str, name: str
) -> None:
    status = results.statuses[table]
    assert status.state is TableState.FAILED
    assert status.remedy
    words = ("o***", "t***") if name == "s13_unmasked" else ("one", "two")
    more = (True,) if name == "s04_history" else ()
    assert results.rows[table] == [(at, word, *more) for at, word in enumerate(words, 1)]
    assert table not in results.copied


@both(IGNORED)
def test_a_target_keeps_its_columns_where_changes_are_ignored(
    results: Results, table: str, name: str
) -> None:
    assert results.statuses[table].state is TableState.STREAMING
    assert results.rows[table] == [(1, "one"), (2, "two"), (3, "c")]


@pytest.mark.parametrize("when", ["stopped", "live"])
def test_S01_S02_S03_a_history_follows_with_all_its_versions(results: Results, when: str) -> None:
    name = "s01_s02_s03_history" if when == "stopped" else live("s01_s02_s03_history")
    results.assert_equal(name)
    assert results.rows[name] == sorted(
        [
            (1, "one", 1, 5, False),
            (1, "uno", 1, 5, False),
            (1, "uno", 7, 5, True),
            (2, "two", 2, 5, False),
            (2, None, 8, 5, True),
            (3, "c", 3, 5, False),
            (4, None, 4, 4, True),
        ],
        key=str,
    )


@pytest.mark.parametrize("when", ["stopped", "live"])
def test_S01_S02_S03_rows_that_are_deleted_softly_follow_too(results: Results, when: str) -> None:
    name = "s01_s02_s03_soft_delete" if when == "stopped" else live("s01_s02_s03_soft_delete")
    results.assert_equal(name)
    rows = [(1, "uno", 7, 5, False), (2, None, 8, 5, False), (3, "c", 3, 5, True), (4, None, 4, 4, False)]
    assert results.rows[name] == sorted(rows, key=str)


@pytest.mark.parametrize("when", ["stopped", "live"])
def test_S01_S02_S03_a_log_has_every_change_as_it_was(results: Results, when: str) -> None:
    name = "s01_s02_s03_append" if when == "stopped" else live("s01_s02_s03_append")
    assert results.statuses[name].state is TableState.STREAMING
    assert [row[2:] for row in sorted(results.rows[name], key=lambda row: row[:2])] == [
        ("snapshot", 1, "one", 1, None),
        ("snapshot", 2, "two", 2, None),
        ("insert", 3, "c", 3, None),
        ("update_postimage", 1, "uno", 1, None),
        ("update_postimage", 1, "uno", 7, 5),
        ("update_postimage", 2, None, 8, 5),
        ("insert", 4, None, 4, 4),
        ("delete", 3, None, None, None),
    ]


@pytest.mark.parametrize("table", [*DURING, *HALVED], ids=case_id)
def test_a_table_is_exact_that_was_altered_while_it_was_copied(results: Results, table: str) -> None:
    results.assert_equal(table)


def test_S14_a_copy_of_a_table_altered_in_between_is_not_resumed(results: Results) -> None:
    assert results.restarted


def test_K11_shards_that_are_altered_one_by_one_wait_for_each_other(results: Results) -> None:
    assert f"{SHARDED}_1 has a column 'more', and public.{SHARDED}_2 has not" in (results.differing or "")
