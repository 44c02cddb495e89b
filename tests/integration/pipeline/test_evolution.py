"""Tables that are altered: their targets follow, live and after a stop, or are copied anew by themselves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.pipeline.observer import PipelineObserver
from tests.fix_pipeline import Mirror, MirrorFactory
from tests.fix_postgres import Database
from tests.integration.pipeline.test_online import running
from tests.integration.sinks.iceberg_lake import needs_iceberg

pytestmark = pytest.mark.spark

SINKS = ["delta", "postgres", pytest.param("iceberg", marks=needs_iceberg)]
CASES: dict[str, Sequence[str]] = {
    "s01_added": (
        "INSERT INTO {} VALUES (3, 'before', 3)",
        "ALTER TABLE {} ADD x int, ADD y int DEFAULT 5, ADD z text NOT NULL DEFAULT 'it''s'",
        "UPDATE {} SET a = 'changed', y = 6 WHERE id = 1",
        "INSERT INTO {} (id) VALUES (4)",
        "DELETE FROM {} WHERE id = 3",
    ),
    "s02_dropped": (
        "ALTER TABLE {} DROP a",
        "UPDATE {} SET b = 7 WHERE id = 1",
        "ALTER TABLE {} ADD a date; ALTER TABLE {} RENAME id TO key",
        "INSERT INTO {} VALUES (3, 3, now())",
    ),
    "s03_renamed": (
        "ALTER TABLE {} RENAME b TO last",
        "BEGIN; INSERT INTO {} VALUES (3, 'c', 3); ALTER TABLE {} ALTER last TYPE bigint; INSERT INTO {} VALUES (4, 'd', 5e9); COMMIT",
        "ALTER TABLE {} RENAME a TO swap; ALTER TABLE {} RENAME last TO a; ALTER TABLE {} RENAME swap TO last",
        "BEGIN; ALTER TABLE {} ADD c int; INSERT INTO {} VALUES (5, 'gone', 3, 3); ROLLBACK",
        "UPDATE {} SET last = 'text', a = 9 WHERE id = 2",
    ),
}
ANEW: dict[str, Sequence[str]] = {
    "s02_again": ("ALTER TABLE {} DROP a; ALTER TABLE {} ADD a text DEFAULT 'new'", "UPDATE {} SET b = 0 WHERE id = 1"),
    "s07_recreated": ("DROP TABLE {}; CREATE TABLE {} (id int PRIMARY KEY, a text, b int); INSERT INTO {} VALUES (9, 'z', 9)",),
}
LIVE = (
    "ALTER TABLE s01_added ADD live int DEFAULT 3",
    "UPDATE s01_added SET live = 4 WHERE id = 1",
    "ALTER TABLE s01_added DROP x",
    "ALTER TABLE s01_added RENAME live TO alive; INSERT INTO s01_added (id) VALUES (100)",
    "ALTER TABLE s02_dropped ADD more numeric(10, 2) DEFAULT 1.5; INSERT INTO s02_dropped (key) VALUES (100)",
    "ALTER TABLE s03_renamed ALTER a TYPE text USING 'was ' || a; INSERT INTO s03_renamed VALUES (100, 'y', 'x')",
)
ALL = {**CASES, **ANEW}


class Telling(PipelineObserver):
    def __init__(self) -> None:
        self.told: list[str] = []

    def interrupted(self, reason: str, pause_seconds: float) -> None:
        del pause_seconds
        self.told.append(reason)

    @property
    def copied(self) -> set[str]:
        return {words.split()[0].removeprefix("public.") for words in self.told if " is copied anew: " in words}


def create(database: Database, names: Sequence[str]) -> None:
    for name in names:
        database.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, a text, b int); INSERT INTO {name} VALUES (1, 'one', 1), (2, 'two', 2)")


def alter(database: Database, name: str) -> None:
    for statements in ALL[name]:
        database.execute(statements.replace("{}", name))


def assert_followed(lake: Mirror, names: Sequence[str], seen: Telling) -> None:
    result = lake.run_once(seen)
    assert not result.failed, result.failed
    lake.assert_equal(*(f"public.{name}" for name in names))


@pytest.mark.parametrize("kind", SINKS)
def test_S01_to_S09_what_was_done_to_tables_while_nobody_looked_is_followed_or_they_are_copied_anew(
    database: Database, mirror_into: MirrorFactory, kind: str
) -> None:
    """S06: all of it happened while the pipeline was stopped, so the catalog shows only the last of it. Then more of it, while it runs."""
    create(database, list(ALL))
    lake = mirror_into(kind)
    lake.run_once()
    for name in ALL:
        alter(database, name)
    seen = Telling()
    assert_followed(lake, list(ALL), seen)
    assert seen.copied == set(ANEW if lake.follows else ALL)
    if lake.follows:
        kept = {int(row["key"]): row["a__dropped_1"] for row in lake.rows("public.s02_dropped")}
        assert kept == {1: None, 2: "two", 3: None}
    with running(lake) as run:
        for statement in LIVE:
            database.execute(statement)
        run.wait_for_rows("public.s01_added", 4)
        run.wait_for_rows("public.s02_dropped", 4)
        run.wait_for_rows("public.s03_renamed", 5)
    lake.assert_equal(*(f"public.{name}" for name in ALL))
    assert run.result is not None
    assert not run.result.failed
