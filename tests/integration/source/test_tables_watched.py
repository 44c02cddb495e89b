"""Changes that the server left out of the log are a gap, however the tables look now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from penstock.capture.membership import load_members
from penstock.errors import LockWaitError, TableGapError
from penstock.spark.membership import TableWatch
from penstock.spark.request import SourceRequest
from tests.integration.source.engine import Checkpoint, LocalSource

CONSUMER = "spark-public.orders"


def begin(local: LocalSource, **options: str) -> TableWatch:
    """A query over the tables as they are now, which looks whenever it is asked."""
    local.provision()
    watch = TableWatch(SourceRequest.parse({**local.options, **options}), look_seconds=0.0)
    watch.begin(anew=True)
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
    anew = Checkpoint()
    with local.run(anew) as run:
        run.until(lambda rows: len(rows) == 4, "rows of a new snapshot")


def test_table_that_leaves_the_publication_ends_a_query_that_runs(local: LocalSource) -> None:
    local.insert(1, 3)
    with local.run() as run:
        run.until(lambda rows: len(rows) == 3, "rows")
        alter(local, LEAVE, JOIN)
        run.reader._tables._due = 1.0  # it is time to look again
        with pytest.raises(TableGapError, match="put in again"):
            run.step()


def test_consumer_that_goes_on_with_the_slot_is_told_of_the_gap_too(local: LocalSource) -> None:
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
        ([ANOTHER, *SWAP], "is called public.former by now"),
        ([ANOTHER, "DROP TABLE orders", SWAP[1]], "another one has its name"),
        (["ALTER TABLE orders RENAME TO former"], "is called public.former by now"),
    ],
)
def test_what_leaves_changes_out_of_the_log_is_found_while_the_query_runs(local: LocalSource, statements: list[str], words: str) -> None:
    watch = begin(local)
    alter(local, *statements)
    with pytest.raises(TableGapError, match=words):
        watch.check()


def test_table_that_is_dropped_or_leaves_a_choice_by_publication_is_no_gap_but_one_that_comes_back_is(local: LocalSource) -> None:
    alter(local, ANOTHER)
    watch = begin(local, table="")
    assert {str(name) for name in load_members(local.spool, "spark-all")} == {"public.orders"}
    alter(local, "ALTER PUBLICATION {slot} ADD TABLE another")
    watch.check()
    assert {str(name) for name in load_members(local.spool, "spark-all")} == {"public.another", "public.orders"}
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


def test_table_that_somebody_has_to_himself_does_not_hold_a_running_query_up(local: LocalSource) -> None:
    watch = begin(local)
    with locked(local):
        watch.check()
        with pytest.raises(LockWaitError):
            TableWatch(SourceRequest.parse(local.options)).check()
    watch.check()
