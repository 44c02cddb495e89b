"""Every table mode, from Postgres to Delta or Iceberg: an epoch with every change of a key, and a crash."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.pipeline.epoch_log import Epoch, EpochLog
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.pipeline.verify.compare import Comparison
from penstock.position import Position
from tests.support.fix_pipeline import LakeFactory, Mirror
from tests.support.fix_postgres import Database
from tests.support.pipeline.altering import Telling

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

BY_MODE = {"kept": "soft_delete", "versions": "history", "changes": "append"}
TABLES = [
    "public.*",
    *(
        {"match": f"public.{each}", "mode": mode}
        for name, mode in BY_MODE.items()
        for each in (name, f"k??_{name}", f"s??_{name}")
    ),
    {"table": "public.images", "mode": "append"},
    {"table": "public.few", "mode": "append", "where": "size < 5"},
]
PUBLISHED = {"delta": "FOR ALL TABLES", "iceberg": "FOR TABLES IN SCHEMA public"}

PLACES = ("", "_kept", "_versions")
"""Cases whose rows are the same in every mode except the log."""
K02 = "CREATE TABLE {0} (id int PRIMARY KEY, v text)"
K03 = """
    CREATE TABLE {0} (v text, b int, n int, a text, PRIMARY KEY (a, b));
    INSERT INTO {0} VALUES ('p1', 1, 0, 'p'), ('p2', 2, 0, 'p'), ('q1', 1, 0, 'q'), ('q2', 2, 0, 'q'), (NULL,
      3, NULL, 'q')
"""
K03_CHANGES = (
    "DELETE FROM {0} WHERE (a, b) IN (('p', 1), ('q', 2)); UPDATE {0} SET v = NULL WHERE (a, b) = ('p', 2)",
    "INSERT INTO {0} VALUES ('again', 1, 1, 'p'); UPDATE {0} SET b = 4, n = NULL WHERE (a, b) = ('q', 1)",
    "INSERT INTO {0} VALUES (NULL, 2, NULL, 'r'), ('r1', 1, 1, 'r'); DELETE FROM {0} WHERE (a, b) = ('r', 2)",
)
K04 = """
    CREATE TABLE {0} (n int, id int PRIMARY KEY, long text);
    ALTER TABLE {0} ALTER long SET STORAGE EXTERNAL;
    INSERT INTO {0} SELECT 0, g, repeat(md5(g::text), 100) FROM generate_series(1, 6) g
"""
K04_CHANGES = (
    "UPDATE {0} SET n = 1 WHERE id = 1",
    "UPDATE {0} SET long = repeat('new', 2000) WHERE id = 2; UPDATE {0} SET n = 2 WHERE id = 2",
    "INSERT INTO {0} VALUES (0, 7, repeat('seven', 1000))",
    "UPDATE {0} SET n = 7 WHERE id = 7",
    "UPDATE {0} SET id = 30 WHERE id = 3",
    "UPDATE {0} SET n = 3 WHERE id = 30",
    "UPDATE {0} SET long = repeat('four', 1000) WHERE id = 4; UPDATE {0} SET id = 40 WHERE id = 4",
    (
        "UPDATE {0} SET id = 50 WHERE id = 5; INSERT INTO {0} VALUES (0, 5, repeat('five', 1000)); "
        "UPDATE {0} SET n = 5 WHERE id = 5"
    ),
)
K16 = "CREATE TABLE {0} (id int PRIMARY KEY, v text); INSERT INTO {0} VALUES (1, 'a'), (2, 'a'), (3, 'a')"
K16_CHANGES = ("UPDATE {0} SET v = 'b' WHERE id = 1", "TRUNCATE {0}", "INSERT INTO {0} VALUES (1, 'again')")
S02 = (
    "CREATE TABLE {0} (id int PRIMARY KEY, a text, b int); "
    "INSERT INTO {0} VALUES (1, 'one', 1), (2, 'two', 2)"
)
S02_CHANGES = (
    "ALTER TABLE {0} DROP a",
    "ALTER TABLE {0} ADD c text DEFAULT 'new'",
    "UPDATE {0} SET b = 2 WHERE id = 1",
    "ALTER TABLE {0} RENAME b TO a",
    "ALTER TABLE {0} DROP c, ADD d int",
    "UPDATE {0} SET d = 3 WHERE id = 1",
)
MODES = """
    CREATE TABLE {0} (id int PRIMARY KEY, size int, long text);
    ALTER TABLE {0} ALTER long SET STORAGE EXTERNAL;
    INSERT INTO {0} SELECT n, 0, repeat(n::text, 4000) FROM generate_series(1, 5) n
"""
MODES_CHANGES = (
    "UPDATE {0} SET size = 1 WHERE id = 1",
    "DELETE FROM {0} WHERE id = 2",
    "UPDATE {0} SET id = 30 WHERE id = 3",
    "INSERT INTO {0} VALUES (2, 7, 'again')",
    "DELETE FROM {0} WHERE id = 4",
)
HEAP = """
    CREATE TABLE heap (a int, b numeric);
    ALTER TABLE heap REPLICA IDENTITY FULL;
    INSERT INTO heap SELECT 1, 'NaN' FROM generate_series(1, 4)
"""
HEAP_CHANGES = (
    "DELETE FROM heap WHERE ctid IN (SELECT min(ctid) FROM heap)",
    "UPDATE heap SET a = 2 WHERE ctid IN (SELECT min(ctid) FROM heap)",
    "INSERT INTO heap VALUES (2, 'NaN'), (NULL, NULL)",
)
WHOLE = """
    CREATE TABLE {0} (id int PRIMARY KEY, size int);
    ALTER TABLE {0} REPLICA IDENTITY FULL;
    INSERT INTO {0} SELECT n, 0 FROM generate_series(1, 3) n
"""
WHOLE_CHANGES = (
    "UPDATE {0} SET size = 7 WHERE id = 1",
    "UPDATE {0} SET size = 1 WHERE id = 1",
    "DELETE FROM {0} WHERE id = 2",
    "UPDATE {0} SET id = 30 WHERE id = 3",
)
CASES = {
    **{f"k03{place}": (K03, K03_CHANGES) for place in PLACES},
    **{f"k04{place}": (K04, K04_CHANGES) for place in PLACES},
    **{f"k16_{name}": (K16, K16_CHANGES) for name in BY_MODE},
    **{f"s02{place}": (S02, S02_CHANGES) for place in ("", "_versions")},
    **dict.fromkeys(BY_MODE, (MODES, MODES_CHANGES)),
    "heap": (HEAP, HEAP_CHANGES),
    **dict.fromkeys(("images", "few", "whole"), (WHOLE, WHOLE_CHANGES)),
}
NOTED = {
    "kept": "id, size, length(long), _deleted, _deleted_at IS NOT NULL",
    "versions": "id, size, length(long), _current, _valid_to IS NULL, _valid_to IS NULL OR _valid_from < "
    "_valid_to",
    "changes": "_commit_version, _ordinal, _change_type, id, _unchanged",
    "images": "_commit_version, _ordinal, _change_type, id, size",
    "few": "_commit_version, _ordinal, _change_type, id, size",
    "k02_kept": "id, _deleted",
    "k16_kept": "id, v, _deleted",
    "k16_versions": "id, v, _current",
    "k16_changes": "_commit_version, _ordinal, _change_type, id, v",
    "s02": "id, a__dropped_1, a, d",
    "s02_versions": "id, a__dropped_1, a, d, _current",
}
HISTORIES = ("versions", "k02_versions", "k03_versions", "k04_versions", "k16_versions")


def orders(steps: int, *, is_there: bool) -> Iterator[str]:
    """Every order of inserts, updates and deletes of one key."""
    for step, is_there_then in (("u", True), ("d", False)) if is_there else (("i", True),):
        yield step
        if steps > 1:
            yield from (step + rest for rest in orders(steps - 1, is_there=is_there_then))


ORDERS = dict(enumerate((*orders(4, is_there=True), *orders(4, is_there=False)), 1))
THERE = len(list(orders(4, is_there=True)))
"""Keys up to this one exist at the start."""
STEPS = {
    "i": "INSERT INTO {0} VALUES ({1}, '{2}')",
    "u": "UPDATE {0} SET v = '{2}' WHERE id = {1}",
    "d": "DELETE FROM {0} WHERE id = {1}",
}


def _in_every_order(table: str) -> list[str]:
    """Each order twice: in separate transactions, and, under another key, in one."""
    alone = [
        STEPS[step].format(table, key, order[: at + 1])
        for key, order in ORDERS.items()
        for at, step in enumerate(order)
    ]
    at_once = [
        "; ".join(STEPS[step].format(table, 100 + key, order[: at + 1]) for at, step in enumerate(order))
        for key, order in ORDERS.items()
    ]
    return [*alone, *at_once]


@dataclass
class Results:
    statuses: dict[str, TableStatus] = field(default_factory=dict)
    compared: dict[str, Comparison] = field(default_factory=dict)
    rows: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    versions: dict[str, dict[Any, list[tuple[Any, ...]]]] = field(default_factory=dict)
    """The versions of each key in order: from, to, and whether it is the current one."""
    copied: set[str] = field(default_factory=set)

    def assert_equal(self, *names: str) -> None:
        for name in names:
            assert self.statuses[f"public.{name}"].state is TableState.STREAMING, self.statuses[
                f"public.{name}"
            ]
            assert self.compared[name].equal, self.compared[name]


def _begin(database: Database, kind: str) -> None:
    database.execute(
        f"CREATE PUBLICATION everything {PUBLISHED[kind]} WITH (publish_via_partition_root = true)"
    )
    for name, (create, _) in CASES.items():
        database.execute(create.format(name))
    for place in PLACES:
        database.execute(K02.format(f"k02{place}"))
        database.execute(
            f"INSERT INTO k02{place} SELECT g + h, 'there' "
            f"FROM generate_series(1, {THERE}) g, (VALUES (0), (100)) x (h)"
        )


def _change(database: Database) -> None:
    """K02: changes made while no pipeline runs arrive in one epoch."""
    for name, (_, changes) in CASES.items():
        for statement in changes:
            database.execute(statement.format(name))
    for place in PLACES:
        for statement in _in_every_order(f"k02{place}"):
            database.execute(statement)
    database.execute(
        "CREATE TABLE s08 (id int PRIMARY KEY, v text); INSERT INTO s08 VALUES (1, 'a'), (2, 'a')"
    )


class _CrashError(Exception):
    pass


def _crash(database: Database, lake: Mirror) -> None:
    """K01: the targets hold the epoch, but it is not recorded."""
    goal = Position.parse(database.query("SELECT pg_current_wal_insert_lsn()::text")[0][0])
    record = EpochLog.record

    def crash(log: EpochLog, epoch: Epoch) -> None:
        """But not if the epoch has only a part of the transaction."""
        if epoch.position >= goal:
            raise _CrashError
        record(log, epoch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.pipeline.epoch_log.EpochLog.record", crash)
        with pytest.raises(Exception, match="_CrashError"):
            lake.run_once()
    assert len(lake.rows("public.k16_changes")) == 6


def _change_after(database: Database) -> None:
    for name in ("k02", "k02_kept", "k02_versions", "s08"):
        database.execute(f"UPDATE {name} SET v = v || ' after'; INSERT INTO {name} VALUES (1000, 'after')")
    for place in PLACES:
        database.execute(
            f"UPDATE k03{place} SET n = 9 WHERE a = 'q'; UPDATE k04{place} SET n = 9 WHERE id > 4"
        )


@pytest.fixture(scope="module", params=["delta", "iceberg"])
def results(lake_of: LakeFactory, request: pytest.FixtureRequest) -> Results:
    """One pipeline for all cases; the publication belongs to another owner, and the event trigger exists."""
    database, lake = lake_of(
        request.param,
        tables=TABLES,
        source={"event_trigger": True, "publication": "everything", "old_rows": True},
    )
    _begin(database, request.param)
    assert not lake.run_once().failed
    _change(database)
    _crash(database, lake)
    _change_after(database)
    seen, found = Telling(), Results()
    found.statuses = lake.run_once(seen).tables
    found.copied = seen.copied
    found.compared = {each.table.name: each for each in lake.compare()}
    found.rows = {name: _rows(lake, name, columns) for name, columns in NOTED.items()}
    found.versions = {name: _versions(lake, name) for name in HISTORIES}
    return found


def _rows(lake: Mirror, name: str, columns: str) -> list[tuple[Any, ...]]:
    return sorted(
        (tuple(row) for row in lake.rows(f"public.{name}", columns)),
        key=lambda row: [(each is None, each) for each in row],
    )


def _versions(lake: Mirror, name: str) -> dict[Any, list[tuple[Any, ...]]]:
    found: dict[Any, list[tuple[Any, ...]]] = defaultdict(list)
    for *key, begin, end, is_current in lake.rows(
        f"public.{name}", f"{KEYS.get(name, 'id')}, _valid_from, _valid_to, _current"
    ):
        found[tuple(key)].append((begin, end, is_current))
    return {key: sorted(each, key=lambda version: version[0]) for key, each in found.items()}


KEYS: Mapping[str, str] = {"k03_versions": "a, b"}


def test_K01_an_epoch_that_was_applied_and_not_recorded_is_not_applied_again(results: Results) -> None:
    """A log would have its changes twice."""
    for name, changes in (("changes", 11), ("k16_changes", 6)):
        assert len(results.rows[name]) == len({row[:4] for row in results.rows[name]}) == changes
    results.assert_equal("k02", "k03", "k04", "heap")


@pytest.mark.parametrize("place", PLACES)
def test_K02_every_order_of_changes_of_one_key_in_one_epoch_gives_the_last_of_them(
    results: Results, place: str
) -> None:
    results.assert_equal(f"k02{place}")


def test_K02_keys_that_ended_deleted_are_kept_as_that(results: Results) -> None:
    deleted = {key for key, is_deleted in results.rows["k02_kept"] if is_deleted}
    ended = {
        key + more for key, order in ORDERS.items() for more in (0, 100) if order[-1] == "d" and key <= THERE
    }
    assert ended <= deleted
    assert not deleted & {
        key + more for key, order in ORDERS.items() for more in (0, 100) if order[-1] != "d"
    }


@pytest.mark.parametrize("place", PLACES)
def test_K03_rows_are_identified_by_all_columns_of_a_key_in_any_order(results: Results, place: str) -> None:
    results.assert_equal(f"k03{place}")


@pytest.mark.parametrize("place", PLACES)
def test_K04_K05_a_value_that_did_not_travel_is_the_last_that_did_or_the_old_keys(
    results: Results, place: str
) -> None:
    results.assert_equal(f"k04{place}")


def test_K05_K16_every_mode_holds_the_current_and_former_rows_of_the_source(results: Results) -> None:
    results.assert_equal("heap", "kept", "versions")
    assert results.rows["kept"] == [
        (1, 1, 4000, False, False),
        (2, 7, 5, False, False),
        (3, 0, 4000, True, True),
        (4, 0, 4000, True, True),
        (5, 0, 4000, False, False),
        (30, 0, 4000, False, False),
    ]
    assert results.rows["versions"] == [
        (1, 0, 4000, False, False, True),
        (1, 1, 4000, True, True, True),
        (2, 0, 4000, False, False, True),
        (2, 7, 5, True, True, True),
        (3, 0, 4000, False, False, True),
        (4, 0, 4000, False, False, True),
        (5, 0, 4000, True, True, True),
        (30, 0, 4000, True, True, True),
    ]
    assert [row[2:] for row in results.rows["changes"]] == [
        *(("snapshot", at, None) for at in range(1, 6)),
        ("update_postimage", 1, ["long"]),
        ("delete", 2, None),
        ("delete", 3, None),
        ("insert", 30, ["long"]),
        ("insert", 2, None),
        ("delete", 4, None),
    ]


def test_K16_a_truncate_closes_every_version_and_a_log_has_it_in_its_place(results: Results) -> None:
    results.assert_equal("k16_kept", "k16_versions")
    assert results.rows["k16_kept"] == [(1, "again", False), (2, "a", True), (3, "a", True)]
    assert results.rows["k16_versions"] == [
        (1, "a", False),
        (1, "again", True),
        (1, "b", False),
        (2, "a", False),
        (3, "a", False),
    ]
    assert [row[2:] for row in results.rows["k16_changes"]] == [
        *(("snapshot", at, "a") for at in (1, 2, 3)),
        ("update_postimage", 1, "b"),
        ("truncate", None, None),
        ("insert", 1, "again"),
    ]


@pytest.mark.parametrize("name", HISTORIES)
def test_K16_versions_neither_overlap_nor_leave_two_current_after_a_crash(
    results: Results, name: str
) -> None:
    results.assert_equal(name)
    assert results.versions[name]
    for key, versions in results.versions[name].items():
        for (begin, end, is_current), (following, _, _) in itertools.pairwise(versions):
            assert not is_current, key
            assert begin < end <= following, key
        begin, end, is_current = versions[-1]
        assert is_current is (end is None), key
        assert end is None or begin < end, key


@pytest.mark.parametrize("name", ["s02", "s02_versions"])
def test_S02_S03_a_drop_and_an_add_without_a_write_in_between_are_followed_with_an_event_trigger(
    results: Results, name: str
) -> None:
    """Without it a mirror is resynced and a history fails: neither can map the columns."""
    assert not results.copied
    results.assert_equal(name)
    if name == "s02":
        assert results.rows[name] == [(1, None, 2, 3), (2, "two", 2, None)]
    else:
        assert results.rows[name] == [
            (1, "one", 1, None, False),
            (1, None, 2, 3, True),
            (1, None, 2, None, False),
            (2, "two", 2, None, True),
        ]


def test_S08_a_table_created_while_no_pipeline_runs_is_copied_also_where_the_publication_already_has_it(
    results: Results,
) -> None:
    results.assert_equal("s08")


def test_K15_a_log_has_old_and_new_rows_if_requested(results: Results) -> None:
    assert [row[2:] for row in results.rows["images"]] == [
        *(("snapshot", at, 0) for at in range(1, 4)),
        *(("update_preimage", 1, 0), ("update_postimage", 1, 7)),
        *(("update_preimage", 1, 7), ("update_postimage", 1, 1)),
        ("delete", 2, 0),
        *(("delete", 3, 0), ("insert", 30, 0)),
    ]
    results.assert_equal("whole")


def test_K15_behind_a_filter_an_old_row_is_kept_if_it_passed_the_filter(results: Results) -> None:
    assert [row[2:] for row in results.rows["few"]] == [
        *(("snapshot", at, 0) for at in range(1, 4)),
        *(("update_preimage", 1, 0), ("delete", 1, None)),
        ("update_postimage", 1, 1),
        ("delete", 2, 0),
        *(("delete", 3, 0), ("insert", 30, 0)),
    ]
