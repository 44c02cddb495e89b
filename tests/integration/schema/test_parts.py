"""Partitions in catalog and rows: which were attached with rows, and which were emptied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.pipeline.schema_changes.partitions import (
    ATTACHED,
    DETACHED,
    EMPTIED,
    PartitionWatch,
    load_partitions,
)
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.chunks import has_older_row, inspect_parts
from penstock.postgres.connection import SourceAddress, connect
from penstock.schema import TableName
from tests.support.fix_postgres import Database
from tests.support.fix_roles import Roles

NAME = TableName("public", "t")
LOOKED, LATER = Position.parse("0/100"), Position.parse("0/200")


def _oid(database: Database, table: str) -> int:
    return int(database.query("SELECT %s::regclass::oid::int8", table)[0][0])


@pytest.mark.versions(14, 18)
def test_S12_a_partition_that_was_a_table_is_distinguished_from_one_created_as_a_partition(
    database: Database,
) -> None:
    database.execute(
        "CREATE TABLE t (id int) PARTITION BY RANGE (id); "
        "CREATE TABLE made PARTITION OF t FOR VALUES FROM (0) TO (10);"
        "CREATE TABLE sub PARTITION OF t FOR VALUES FROM (10) TO (20) PARTITION BY RANGE (id); "
        "CREATE TABLE leaf PARTITION OF sub DEFAULT;"
        "INSERT INTO t VALUES (1), (11)"
    )
    database.execute(
        "ALTER TABLE made SET (fillfactor = 50); ALTER TABLE t ADD a int DEFAULT 5; "
        "ALTER TABLE t RENAME a TO b"
    )
    database.execute(
        "CREATE TABLE filled (id int, b int); INSERT INTO filled VALUES (21); "
        "CREATE TABLE bare (id int, b int)"
    )
    database.execute("ALTER TABLE t ATTACH PARTITION filled FOR VALUES FROM (20) TO (30)")
    database.execute(
        "ALTER TABLE t ATTACH PARTITION bare FOR VALUES FROM (30) TO (40); INSERT INTO t VALUES (35)"
    )
    database.execute(
        "ALTER TABLE t DETACH PARTITION sub; ALTER TABLE t ATTACH PARTITION sub FOR VALUES FROM (10) TO (20)"
    )
    database.execute(
        "CREATE TABLE loaded (LIKE t); INSERT INTO loaded VALUES (41); "
        "ALTER TABLE t ATTACH PARTITION loaded FOR VALUES FROM (40) TO (50)"
    )
    database.execute(
        "CREATE TABLE cut (id int, x int, b int); INSERT INTO cut VALUES (51); ALTER TABLE cut DROP x;"
        "ALTER TABLE t ATTACH PARTITION cut FOR VALUES FROM (50) TO (60)"
    )
    database.execute(
        "CREATE TABLE next PARTITION OF t FOR VALUES FROM (60) TO (70); INSERT INTO t VALUES (61); "
        "ALTER TABLE t ALTER b SET DEFAULT 7"
    )
    bare, many = TableName("public", "bare"), TableName("public", "many")
    with connect(SourceAddress.parse(database.dsn)) as connection:
        names = {
            oid: str(each)
            for oid, each in connection.execute(
                "SELECT oid, relname FROM pg_class WHERE relkind = 'r'"
            ).fetchall()
        }
        found = inspect_parts(
            connection, {NAME: [_oid(database, "t")], bare: [_oid(database, "bare")], many: [1 << 62]}
        )
        routed = inspect_parts(
            connection, {many: [_oid(database, "bare"), _oid(database, "sub"), _oid(database, "t")]}
        )
    # One that was empty when it was attached counts as unattached: its history is unknown.
    assert {names[oid]: part.is_attached for oid, part in found[NAME].leaves.items()} == {
        "made": False,
        "filled": True,
        "bare": True,
        "leaf": True,
        "loaded": True,
        "cut": True,
        "next": False,
    }
    assert found.keys() == {NAME}
    assert {names[oid] for oid in routed[many].leaves} == {
        "made",
        "filled",
        "bare",
        "leaf",
        "loaded",
        "cut",
        "next",
    }


@pytest.mark.versions(14, 18)
def test_S12_a_part_that_is_made_with_all_that_a_table_may_have_was_no_table_before(
    database: Database,
) -> None:
    database.execute(
        "CREATE TABLE t (id bigserial PRIMARY KEY, a text NOT NULL DEFAULT 'x' CHECK (a <> ''),"
        "b int GENERATED ALWAYS AS (length(a)) STORED, CHECK (b < 100)) PARTITION BY RANGE (id); "
        "CREATE INDEX ON t (a)"
    )
    database.execute("CREATE TABLE plain PARTITION OF t FOR VALUES FROM (0) TO (10)")
    database.execute(
        "CREATE TABLE more PARTITION OF t (a DEFAULT 'y', CONSTRAINT k CHECK (b < 50), UNIQUE (a)) FOR "
        "VALUES FROM (10) TO (20)"
    )
    database.execute(
        "CREATE TABLE one (id int PRIMARY KEY) PARTITION BY LIST (id); "
        "CREATE TABLE single PARTITION OF one FOR VALUES IN (1)"
    )
    database.execute("INSERT INTO t VALUES (1), (11); INSERT INTO one VALUES (1)")
    tables = {TableName("public", name): [_oid(database, name)] for name in ("t", "one")}
    with connect(SourceAddress.parse(database.dsn)) as connection:
        found = inspect_parts(connection, tables)
    assert [sorted(part.is_attached for part in found[name].leaves.values()) for name in tables] == [
        [False, False],
        [False],
    ]


class Watched:
    """A table with rows in two partitions, one of them nested, that was inspected once."""

    def __init__(self, database: Database, state: Path) -> None:
        self.database, self.state = database, state
        self.address = SourceAddress.parse(database.dsn)
        self.truncates: set[int] = set()
        self.is_polled = False
        self.auto_resync = True
        database.execute(
            "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);"
            "CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (10);"
            "CREATE TABLE sub PARTITION OF t FOR VALUES FROM (10) TO (20) PARTITION BY RANGE (id);"
            "CREATE TABLE leaf PARTITION OF sub DEFAULT;"
            "INSERT INTO t VALUES (1, 'a'), (2, 'b'), (11, 'c'), (12, 'd')"
        )
        self.restart()
        assert self.find_moved() == {}

    def restart(self) -> None:
        self.watch = PartitionWatch(self.state, lambda _: self.truncates, lambda _: self.auto_resync)

    def find_moved(
        self, applied: Position = LATER, *, is_paused: bool = False, is_copied: bool = False
    ) -> dict[TableName, str]:
        """`is_copied`: it is being copied."""
        table = CatalogTable(_oid(self.database, "t"), NAME)
        with connect(self.address) as connection:
            return self.watch.find_moved(
                connection,
                {NAME: table},
                {} if is_paused or is_copied else {NAME: applied},
                [NAME] if is_paused else [],
                lambda: LATER,
                finds_deletes=self.is_polled,
            )

    def is_known(self) -> bool:
        """Whether the last observation is still current."""
        with connect(self.address) as connection:
            now = inspect_parts(connection, {NAME: [_oid(self.database, "t")]})[NAME]
        return load_partitions(self.state)[NAME].filenodes == {
            oid: part.filenode for oid, part in now.leaves.items()
        }


@pytest.fixture
def watched(database: Database, tmp_path: Path) -> Watched:
    return Watched(database, tmp_path)


EMPTYING = {
    "truncate": ("TRUNCATE low",),
    "of a part of a part": ("TRUNCATE leaf",),
    "of all parts of a part": ("TRUNCATE sub",),
    "filled again": ("TRUNCATE low", "INSERT INTO t VALUES (1, 'a'), (2, 'b')"),
    "filled again at once": ("BEGIN; TRUNCATE low; INSERT INTO low VALUES (1, 'a'), (2, 'b'); COMMIT",),
    "filled again and frozen": (
        "TRUNCATE low; INSERT INTO t VALUES (1, 'a')",
        "VACUUM FREEZE low",
        "VACUUM FULL low",
    ),
    "a new part": (
        "CREATE TABLE new PARTITION OF t FOR VALUES FROM (30) TO (40); INSERT INTO t VALUES (30, 'x')",
        "TRUNCATE new",
    ),
    "rewritten with new rows": ("ALTER TABLE t ADD u uuid DEFAULT gen_random_uuid()",),
    "in a savepoint": (
        "BEGIN; SAVEPOINT s; TRUNCATE low; RELEASE s; INSERT INTO low VALUES (3, 'z'); COMMIT",
    ),
}


@pytest.mark.versions(14, 18)
@pytest.mark.parametrize("statements", EMPTYING.values(), ids=EMPTYING.keys())
def test_R12_a_part_that_was_emptied_is_found_until_its_table_is_copied(
    watched: Watched, statements: tuple[str, ...]
) -> None:
    for statement in statements:
        watched.database.execute(statement)
    assert watched.find_moved() == {NAME: EMPTIED}
    watched.restart()
    assert watched.find_moved() == {NAME: EMPTIED}
    assert watched.watch.open == {NAME}


KEEPING = {
    "nothing": (),
    "vacuum full": ("VACUUM FULL low", "VACUUM FULL leaf"),
    "frozen": ("VACUUM FREEZE t", "VACUUM FULL low"),
    "cluster": ("CLUSTER low USING low_pkey",),
    "most rows written": (
        "DELETE FROM t WHERE id = 1; INSERT INTO t VALUES (3, 'z')",
        "VACUUM FULL low",
    ),
    "rolled back": ("BEGIN; TRUNCATE low; ROLLBACK",),
    "new part": (
        "CREATE TABLE new PARTITION OF t FOR VALUES FROM (30) TO (40); INSERT INTO t VALUES (30, 'x')",
    ),
    "new part by copying": (
        (
            "BEGIN; CREATE TABLE new PARTITION OF t FOR VALUES FROM (30) TO (40); "
            "INSERT INTO new VALUES (30); CREATE INDEX ON new (v); END"
        ),
    ),
}


@pytest.mark.versions(14, 18)
@pytest.mark.parametrize("statements", KEEPING.values(), ids=KEEPING.keys())
def test_R12_a_part_that_was_only_rewritten_is_left_alone(
    watched: Watched, statements: tuple[str, ...]
) -> None:
    for statement in statements:
        watched.database.execute(statement)
    assert watched.find_moved() == {}
    assert watched.is_known()


def test_R12_a_truncate_of_the_whole_table_is_for_the_log_to_show(watched: Watched) -> None:
    watched.database.execute("TRUNCATE t; INSERT INTO t VALUES (1, 'new')")
    assert watched.find_moved(applied=LOOKED) == {}
    assert watched.watch.open == {NAME}, "the log may still show it"
    xid = watched.database.query("SELECT xmin::text::int8 FROM pg_class WHERE relname = 'low'")[0][0]
    watched.truncates.add(xid)
    assert watched.find_moved(applied=LOOKED) == {}
    assert watched.is_known()
    assert not watched.watch.open
    watched.database.execute("TRUNCATE leaf")
    assert watched.find_moved(applied=LOOKED) == {}
    assert watched.find_moved() == {NAME: EMPTIED}


def test_R12_a_locked_partition_is_read_at_a_later_check(watched: Watched) -> None:
    watched.database.execute("TRUNCATE low")
    with watched.database.connect() as holder:
        holder.execute("LOCK TABLE low IN ACCESS EXCLUSIVE MODE")
        assert watched.find_moved() == {}
        assert not watched.watch.open, "no check is pending"
        holder.rollback()
    assert watched.find_moved() == {NAME: EMPTIED}


def test_R12_a_paused_table_is_checked_when_it_resumes(watched: Watched) -> None:
    watched.database.execute("TRUNCATE low")
    assert watched.find_moved(is_paused=True) == {}
    assert watched.find_moved() == {NAME: EMPTIED}


def test_R12_S12_a_table_that_is_not_resynced_is_reported_once(watched: Watched) -> None:
    watched.auto_resync = False
    watched.database.execute("TRUNCATE low")
    assert watched.find_moved() == {NAME: EMPTIED}
    assert not watched.watch.open
    assert watched.find_moved() == {}
    watched.database.execute("DROP TABLE low")
    assert watched.find_moved() == {NAME: DETACHED}
    assert watched.find_moved() == {}


def test_R12_a_capture_that_detects_deletes_needs_no_copy(watched: Watched) -> None:
    watched.is_polled = True
    watched.database.execute("TRUNCATE low")
    assert watched.find_moved() == {}
    assert watched.is_known()


@pytest.mark.parametrize(("statement", "found"), [("VACUUM FULL low", {}), ("TRUNCATE low", {NAME: EMPTIED})])
@pytest.mark.parametrize("grant", ["t", "t, low, leaf", "nothing"])
def test_R12_rights_on_the_root_alone_suffice(
    watched: Watched, roles: Roles, grant: str, statement: str, found: dict[TableName, str]
) -> None:
    role = roles.create("reader")
    if grant != "nothing":
        watched.database.execute(f"GRANT SELECT ON {grant} TO {role}")
    watched.database.execute(statement)
    watched.address = roles.address(role)
    assert watched.find_moved() == (found if grant != "nothing" else {NAME: EMPTIED}), (
        "an unknown state counts as emptied"
    )


def test_R12_rows_that_a_policy_hides_count_as_gone(watched: Watched, roles: Roles) -> None:
    role = roles.create("reader")
    watched.database.execute(f"ALTER TABLE t ENABLE ROW LEVEL SECURITY; GRANT SELECT ON t TO {role}")
    watched.database.execute("VACUUM FULL low")
    watched.address = roles.address(role)
    assert watched.find_moved() == {NAME: EMPTIED}


@pytest.mark.parametrize(
    ("mark", "is_found"),
    [
        (lambda next_xid: next_xid, True),
        (lambda next_xid: 3, False),
        (lambda next_xid: next_xid + 1, False),
        (lambda next_xid: next_xid - (1 << 32), False),
    ],
    ids=["now", "long ago", "to come", "so long ago that numbers have come round"],
)
def test_R12_a_row_of_unknown_age_is_not_taken_for_an_older_row(
    watched: Watched, mark: Callable[[int], int], is_found: bool
) -> None:
    with connect(watched.address) as connection:
        ((next_xid,),) = watched.database.query("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::int8")
        assert (
            has_older_row(
                connection, _oid(watched.database, "low"), _oid(watched.database, "t"), mark(next_xid)
            )
            is is_found
        )


def test_R12_a_part_that_was_emptied_while_its_table_was_copied_is_found_when_that_has_caught_up(
    watched: Watched,
) -> None:
    """The partition's state at the start of the copy counts."""
    watched.database.execute("VACUUM FULL low")
    assert watched.find_moved(is_copied=True) == {}
    assert watched.find_moved() == {}
    assert watched.find_moved(is_copied=True) == {}
    watched.database.execute("TRUNCATE low")
    assert watched.find_moved(is_copied=True) == {}
    assert watched.find_moved() == {NAME: EMPTIED}


def test_S12_a_locked_partition_is_not_waited_for_once_it_is_known(watched: Watched) -> None:
    watched.database.execute("CREATE TABLE a (id int PRIMARY KEY, v text); INSERT INTO a VALUES (21, 'x')")
    watched.database.execute("ALTER TABLE t ATTACH PARTITION a FOR VALUES FROM (20) TO (30)")
    watched.auto_resync = False
    assert watched.find_moved() == {NAME: ATTACHED}
    with watched.database.connect() as other, other.transaction():
        other.execute("LOCK TABLE a IN ACCESS EXCLUSIVE MODE")
        assert watched.find_moved() == {}


def test_S12_a_foreign_partition_cannot_be_emptied(watched: Watched) -> None:
    watched.database.execute(
        "CREATE FOREIGN DATA WRAPPER nothing; CREATE SERVER nowhere FOREIGN DATA WRAPPER nothing"
    )
    watched.database.execute("CREATE TABLE plain (id int, v text) PARTITION BY RANGE (id)")
    watched.database.execute(
        "CREATE FOREIGN TABLE far PARTITION OF plain FOR VALUES FROM (0) TO (10) SERVER nowhere"
    )
    with connect(watched.address) as connection:
        assert inspect_parts(connection, {NAME: [_oid(watched.database, "plain")]}) == {}
