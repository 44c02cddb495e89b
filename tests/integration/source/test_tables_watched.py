"""Changes that the server left out of the log are reported as a hole, however the tables look now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from penstock.capture.source_checks import load_memberships
from penstock.errors import PartitionIdentityError, TableGapError
from penstock.spark.request import SourceRequest
from penstock.spark.start import TableWatch
from tests.support.source.engine import Checkpoint, LocalSource

CONSUMER = "spark-public.orders"


def begin(local: LocalSource, **options: str) -> TableWatch:
    """A query over the current tables, which inspects them at every call."""
    local.provision()
    watch = TableWatch(SourceRequest.parse({**local.options, **options}), check_seconds=0.0)
    watch.begin(replace=True)
    watch.check()
    return watch


LEAVE = "ALTER PUBLICATION {slot} DROP TABLE orders"
JOIN = "ALTER PUBLICATION {slot} ADD TABLE orders"
ANOTHER = "CREATE TABLE another (id int PRIMARY KEY, note text)"
SWAP = ["ALTER TABLE orders RENAME TO former", "ALTER TABLE another RENAME TO orders"]


def alter(local: LocalSource, *statements: str) -> None:
    for statement in statements:
        local.database.execute(statement.format(slot=local.slot))


def test_table_that_left_the_publication_and_came_back_is_a_gap_across_a_restart(local: LocalSource) -> None:
    local.insert(1, 3)
    checkpoint = Checkpoint()
    with local.run(checkpoint) as run:
        run.until(lambda rows: len(rows) == 3, "rows")
    local.wait_until_free()
    alter(local, LEAVE)
    local.insert(4, 4)
    alter(local, JOIN)
    with local.run(checkpoint) as run, pytest.raises(TableGapError, match="put in again") as raised:
        run.step()
    assert "startingPosition snapshot" in str(raised.value.hint)
    # As the hint says.
    replaces = Checkpoint()
    with local.run(replaces) as run:
        run.until(lambda rows: len(rows) == 4, "rows of a new snapshot")


def test_table_that_leaves_the_publication_ends_a_query_that_runs(local: LocalSource) -> None:
    local.insert(1, 3)
    with local.run() as run:
        run.until(lambda rows: len(rows) == 3, "rows")
        alter(local, LEAVE, JOIN)
        run.reader._tables._due = 1.0  # it is time to look again
        with pytest.raises(TableGapError, match="put in again"):
            run.step()


def test_consumer_that_takes_over_the_slot_also_gets_the_gap_error(local: LocalSource) -> None:
    begin(local)
    alter(local, LEAVE, JOIN)
    with local.run(startingPosition="slot") as run, pytest.raises(TableGapError):
        run.step()
    with local.run(startingPosition="now") as run:
        assert run.step()


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        ([LEAVE], "was taken out of the publication"),
        ([LEAVE, JOIN], "put in again"),
        ([ANOTHER, *SWAP], "is called public.former now"),
        ([ANOTHER, "DROP TABLE orders", SWAP[1]], "another table has its name"),
        (["ALTER TABLE orders RENAME TO former"], "is called public.former now"),
    ],
)
def test_unlogged_changes_are_detected_while_the_query_runs(
    local: LocalSource, statements: list[str], words: str
) -> None:
    watch = begin(local)
    alter(local, *statements)
    with pytest.raises(TableGapError, match=words):
        watch.check()


def test_table_that_is_dropped_or_deliberately_unpublished_is_no_gap_but_one_that_returns_is(
    local: LocalSource,
) -> None:
    alter(local, ANOTHER)
    watch = begin(local, table="")
    assert {str(name) for name in load_memberships(local.spool, "spark-all")} == {"public.orders"}
    alter(local, "ALTER PUBLICATION {slot} ADD TABLE another")
    watch.check()
    assert {str(name) for name in load_memberships(local.spool, "spark-all")} == {
        "public.another",
        "public.orders",
    }
    alter(local, "DROP TABLE another", LEAVE)
    watch.check()
    alter(local, JOIN)
    with pytest.raises(TableGapError):
        watch.check()


@contextmanager
def locked(local: LocalSource) -> Iterator[None]:
    with closing(local.database.connect()) as connection:
        connection.execute("LOCK TABLE orders")
        yield


def test_a_locked_table_holds_up_neither_a_running_query_nor_one_that_starts(local: LocalSource) -> None:
    watch = begin(local)
    with locked(local):
        watch.check()
        TableWatch(SourceRequest.parse(local.options)).check()


def test_partition_without_its_roots_key_ends_a_query_of_several_tables_which_continues_after_the_fix(
    local: LocalSource,
) -> None:
    alter(
        local,
        "CREATE TABLE parted (id int, code int NOT NULL, ts int, PRIMARY KEY (id, ts)) "
        "PARTITION BY RANGE (ts)",
    )
    alter(
        local,
        "CREATE UNIQUE INDEX by_code ON parted (code, ts)",
        "ALTER TABLE parted REPLICA IDENTITY USING INDEX by_code",
    )
    local.insert(1, 3)
    checkpoint = Checkpoint()
    options = {"table": "", "tables": "public.*"}
    with local.run(checkpoint, options) as run:
        run.until(lambda rows: len(rows) == 3, "rows")
        alter(
            local, "CREATE TABLE parted_a PARTITION OF parted DEFAULT", "INSERT INTO parted VALUES (4, 4, 4)"
        )
        local.insert(5, 6)
        run.reader._tables._due = 1.0  # it is time to look again
        with pytest.raises(PartitionIdentityError, match=r"partition public\.parted_a logs") as raised:
            run.step()
    local.wait_until_free()
    with local.run(checkpoint, options) as run, pytest.raises(PartitionIdentityError):
        run.step()
    local.wait_until_free()
    alter(local, raised.value.hint or "")
    with local.run(checkpoint, options) as run:
        run.until(lambda rows: len(rows) == 6, "the rows of both tables that had not come")
