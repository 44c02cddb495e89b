"""`PollingCapture` misses no late commit and no delete, also when the spool is lost or replaced; invalid
settings are refused.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock.capture.polling.capture import PollingCapture
from penstock.capture.polling.feed import PollingFeed
from penstock.contracts.capture import Change, ChangeStream, Delete, Event, Truncate, Upsert
from penstock.errors import NoTablesError, PrivilegeError, TableWithoutKeyError, UnsupportedTableError
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.schema import TableName
from penstock.spool.status import load_status
from penstock.testing.capture_conformance import check_next, delete, deliver_three, upsert
from penstock.testing.streams import check_same_set, seen, seen_event, take, take_until, wait_for
from tests.support.contract.polling_harness import CursorHarness, PollingHarness, idle
from tests.support.fix_postgres import Database

_marks = itertools.count(1)


@pytest.fixture(params=[PollingHarness, CursorHarness], ids=["xmin", "column"])
def polled(request: pytest.FixtureRequest, shared_database: Database, tmp_path: Path) -> PollingHarness:
    make: type[PollingHarness] = request.param
    with idle(make(shared_database, tmp_path)) as harness:
        return harness


@contextmanager
def transaction(polled: PollingHarness) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """A transaction that stays open for the block; it commits inside it, or not at all."""
    with psycopg.connect(polled.database.dsn, autocommit=True) as connection:
        connection.execute("BEGIN")
        yield connection


def put(connection: psycopg.Connection[tuple[Any, ...]], table: TableName, key: int, note: str) -> None:
    connection.execute(f"INSERT INTO {table} (id, note) VALUES (%s, %s)".encode(), [key, note])


def until(polled: PollingHarness, stream: ChangeStream) -> list[Change]:
    """The changes before a mark row that is committed now."""
    mark = upsert(polled.other, 999, f"mark {next(_marks)}")
    polled.commit(mark)
    return take_until(stream, mark, polled.deadline_seconds)[:-1]


def position_of(change: Change) -> Position:
    assert change.commit is not None
    return change.commit.position


# --- late commits -------------------------------------------------------------------------------------------


def test_transaction_that_commits_after_later_ones_is_not_missed(polled: PollingHarness) -> None:
    with closing(polled.capture().live()) as stream, transaction(polled) as late:
        put(late, polled.table, 1, "late")
        for each in range(2, 6):
            polled.commit(upsert(polled.table, each, "early"))
        check_same_set(
            until(polled, stream),
            [upsert(polled.table, each, "early") for each in range(2, 6)],
            "each commit, once",
        )
        late.execute("COMMIT")
        polled.await_look()
        check_same_set(
            take(stream, 1, polled.deadline_seconds),
            [upsert(polled.table, 1, "late")],
            "and what commits late",
        )


def test_transaction_that_was_open_when_the_capture_began_is_not_missed(polled: PollingHarness) -> None:
    polled.commit(upsert(polled.table, 1, "there"))
    with transaction(polled) as late:
        put(late, polled.table, 2, "late")
        polled.commit(upsert(polled.table, 3, "there too"))
        with closing(polled.capture().live()) as stream:
            assert [seen(change) for change in until(polled, stream)] == []
            late.execute("COMMIT")
            polled.await_look()
            check_same_set(
                take(stream, 1, polled.deadline_seconds),
                [upsert(polled.table, 2, "late")],
                "it was not seen before",
            )


def test_transaction_that_was_open_when_the_capture_was_restarted_is_not_missed(
    polled: PollingHarness,
) -> None:
    with transaction(polled) as late:
        with closing(polled.capture().live()) as stream:
            put(late, polled.table, 1, "late")
            polled.commit(upsert(polled.table, 2, "early"))
            for change in (*take(stream, 1, polled.deadline_seconds), *until(polled, stream)):
                change.ack.confirm()
        late.execute("COMMIT")
    with closing(polled.capture().live()) as stream:
        found = {seen(change) for change in until(polled, stream)}
    assert seen_event(upsert(polled.table, 1, "late")) in found


def test_rows_of_a_savepoint_are_not_missed(polled: PollingHarness) -> None:
    """The rows carry the transaction ID of the savepoint, which no snapshot lists."""
    with closing(polled.capture().live()) as stream, transaction(polled) as late:
        put(late, polled.table, 1, "before")
        late.execute("SAVEPOINT s")
        put(late, polled.table, 2, "within")
        polled.commit(upsert(polled.table, 3, "early"))
        polled.commit(upsert(polled.table, 4, "early"))
        late.execute("COMMIT")
        polled.await_look()
        expected: list[Event] = [
            upsert(polled.table, key, note)
            for key, note in ((3, "early"), (4, "early"), (1, "before"), (2, "within"))
        ]
        check_same_set(take(stream, 4, polled.deadline_seconds), expected, "all four, each once")
        assert until(polled, stream) == []


def test_prepared_transaction_is_not_missed(polled: PollingHarness) -> None:
    name = f"prepared {polled.table}"
    with closing(polled.capture().live()) as stream, transaction(polled) as late:
        put(late, polled.table, 1, "late")
        polled.commit(upsert(polled.table, 2, "early"))
        late.execute(f"PREPARE TRANSACTION '{name}'".encode())
        for each in range(3, 6):
            polled.commit(upsert(polled.table, each, "early"))
        take(stream, 4, polled.deadline_seconds)
        late.execute(f"COMMIT PREPARED '{name}'".encode())
        polled.await_look()
        check_same_set(
            take(stream, 1, polled.deadline_seconds), [upsert(polled.table, 1, "late")], "also hours later"
        )


def test_time_of_the_transactions_begin_is_a_good_column(shared_database: Database, tmp_path: Path) -> None:
    with idle(PollingHarness(shared_database, tmp_path)) as polled:
        for table in (polled.table, polled.other):
            shared_database.execute(f"ALTER TABLE {table} ADD changed_at timestamptz NOT NULL DEFAULT now()")
        polled.ruled(cursor="changed_at", deletes=False)
        with closing(polled.capture().live()) as stream, transaction(polled) as late:
            late.execute("SELECT 1")  # it has begun, but has not written yet
            for each in range(2, 6):
                polled.commit(upsert(polled.table, each, "early"))
            take(stream, 4, polled.deadline_seconds)
            put(late, polled.table, 1, "late")
            late.execute("COMMIT")
            polled.await_look()
            check_same_set(
                take(stream, 1, polled.deadline_seconds),
                [upsert(polled.table, 1, "late")],
                "its time is before all others",
            )


# --- deletes and memory -------------------------------------------------------------------------------------


def test_key_that_changed_is_a_delete_and_an_upsert(polled: PollingHarness) -> None:
    with closing(polled.capture().live()) as stream:
        polled.commit(upsert(polled.table, 1, "x"))
        take(stream, 1, polled.deadline_seconds)
        polled.database.execute(f"UPDATE {polled.table} SET id = 2")
        polled.await_look()
        check_same_set(
            take(stream, 2, polled.deadline_seconds),
            [delete(polled.table, 1), upsert(polled.table, 2, "x")],
            "one row moved",
        )


def test_row_deleted_between_two_polls_is_deleted(polled: PollingHarness) -> None:
    events = deliver_three(polled, confirm=lambda changes: [change.ack.confirm() for change in changes])
    polled.commit(delete(polled.table, 1))
    check_next(polled, [delete(polled.table, 1)], "it was there at the last look")
    assert len(events) == 3


def test_row_that_only_a_snapshot_has_seen_is_deleted(polled: PollingHarness) -> None:
    """The row was inserted after one poll and deleted before the next, but a snapshot may have returned
    it.
    """
    table = polled.table
    polled.commit(upsert(table, 1, "stays"), upsert(table, 2, "seen by both"))
    polled.capture().live().close()
    polled.commit(upsert(table, 3, "seen by the snapshot alone"))
    with closing(polled.capture().snapshot([table])) as snapshot:
        assert len(list(snapshot)) == 3
    polled.commit(delete(table, 2), delete(table, 3))
    with closing(polled.capture().live()) as stream:
        found = take(stream, 2, polled.deadline_seconds)
        for change in found:
            change.ack.confirm()
    check_same_set(found, [delete(table, 2), delete(table, 3)], "both")
    assert [path for path in polled.settings.keys.iterdir() if path.suffix == ".copied"] == [], (
        "a confirmed poll includes it"
    )
    with closing(polled.capture().live()) as stream:
        assert until(polled, stream) == [], "each once"


@pytest.mark.parametrize("piece_bytes", [16 << 20, 0], ids=["whole", "in pieces"])
def test_row_that_changed_before_a_snapshot_does_not_come_after_it_too(
    polled: PollingHarness, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The poll after the snapshot finds the version that the snapshot has. The snapshot may belong to another
    reader, so the poll returns it too.
    """
    monkeypatch.setattr("penstock.capture.polling.feed._PIECE_BYTES", piece_bytes)
    table = polled.table
    polled.commit(upsert(table, 1, "at the last look"))
    polled.capture().live().close()
    polled.commit(upsert(table, 1, "before"))
    with transaction(polled) as late:
        put(late, table, 2, "late")
        late.execute("SAVEPOINT s")
        put(late, table, 3, "late too")
        polled.commit(upsert(table, 4, "before, by a later transaction than one that is open"))
        with closing(polled.capture().snapshot([table])) as snapshot:
            copied = list(snapshot)
        late.execute("COMMIT")
    polled.commit(upsert(table, 5, "after"))
    with closing(polled.capture().live()) as stream:
        found = take(stream, 5, polled.deadline_seconds)
        assert until(polled, stream) == []
    fence = position_of(copied[0])
    check_same_set(
        [each for each in found if position_of(each) <= fence],
        [each.event for each in copied],
        "the rows of the snapshot",
    )
    late_ones: list[Event] = [
        upsert(table, 2, "late"),
        upsert(table, 3, "late too"),
        upsert(table, 5, "after"),
    ]
    check_same_set(
        [each for each in found if position_of(each) > fence],
        late_ones,
        "and nothing else of what came later",
    )
    assert [position_of(each) for each in found] == sorted(position_of(each) for each in found)


def test_row_has_the_position_of_the_first_of_several_snapshots_that_have_it(polled: PollingHarness) -> None:
    """In this way a reader that combines several snapshots gets the changes between them."""
    polled.capture().live().close()
    fences = []
    for key in (1, 2):
        polled.commit(upsert(polled.table, key, "before"))
        with closing(polled.capture().snapshot([polled.table])) as snapshot:
            fences.append({position_of(each) for each in snapshot}.pop())
    polled.commit(upsert(polled.table, 3, "after"))
    with closing(polled.capture().live()) as stream:
        found = take(stream, 3, polled.deadline_seconds)
    assert [change.event.key["id"] for change in found if isinstance(change.event, Upsert)] == [1, 2, 3]
    assert [position_of(change) for change in found[:2]] == fences
    assert position_of(found[2]) > fences[1]


def test_row_of_a_snapshot_follows_the_truncate_if_the_table_is_read_again(polled: PollingHarness) -> None:
    polled.capture().live().close()
    polled.commit(upsert(polled.table, 1, "before"))
    with closing(polled.capture().snapshot([polled.table])) as snapshot:
        assert len(list(snapshot)) == 1
    for path in polled.settings.keys.glob("*.parquet"):
        path.unlink()
    with closing(polled.capture().live()) as stream:
        found = [change for change in until(polled, stream) if change.event.table == polled.table]
    assert [seen(change) for change in found] == [
        seen_event(Truncate(polled.table)),
        seen_event(upsert(polled.table, 1, "before")),
    ]


def test_rows_of_a_snapshot_are_forgotten_when_a_later_poll_is_durable(polled: PollingHarness) -> None:
    polled.ruled(deletes=False)
    polled.capture().live().close()
    with closing(polled.capture().snapshot([polled.table])) as snapshot:
        assert list(snapshot) == []

    def kept() -> list[Path]:
        return list(polled.settings.keys.glob("*.versions"))

    assert len(kept()) == 1
    with closing(polled.capture().live()) as stream:
        polled.commit(upsert(polled.table, 1, "after"))
        for change in take(stream, 1, polled.deadline_seconds):
            change.ack.confirm()
        wait_for(lambda: kept() == [], "no file", kept, polled.deadline_seconds)


def test_keys_are_written_only_when_one_has_come_or_gone(polled: PollingHarness) -> None:
    feed = PollingFeed(polled.settings)
    begin = feed.ensure()

    def kept() -> set[Path]:
        return set(polled.settings.keys.iterdir())

    with feed.open(begin) as session:
        polled.commit(upsert(polled.table, 1, "new"))
        assert list(session.poll()) != []
        assert list(session.poll()) == [], "and the former keys are deleted"
        first = kept()
        polled.commit(upsert(polled.table, 1, "changed"))
        assert list(session.poll()) != []
        assert kept() == first
        polled.commit(delete(polled.table, 1))
        assert list(session.poll()) != []
        assert kept() > first


def test_keys_named_by_a_stored_mark_remain_after_empty_polls(polled: PollingHarness) -> None:
    """A snapshot makes the next poll store the keys again. If the old ones were removed, a lost session would
    have to read the whole table again.
    """
    polled.commit(upsert(polled.table, 1, "there"))
    feed = PollingFeed(polled.settings)
    kept = feed.ensure()
    with closing(polled.capture().snapshot([polled.table])) as snapshot:
        assert len(list(snapshot)) == 1
    with feed.open(kept) as session:
        for _ in range(2):
            if list(session.poll()):
                kept = session.mark
    with feed.open(kept) as session:
        assert list(session.poll()) == []


def test_lost_spool_returns_the_rows_again(polled: PollingHarness) -> None:
    deliver_three(polled, confirm=lambda changes: changes[0].ack.confirm())
    polled.commit(delete(polled.table, 0))
    shutil.rmtree(polled.settings.spool)
    with closing(polled.capture().live()) as stream:
        found = [seen(change) for change in until(polled, stream)]
    table = polled.table
    told = [each for each in found if each[0] == table]
    assert told[0] == seen_event(Truncate(table))
    assert sorted(told[1:], key=repr) == sorted(
        (seen_event(upsert(table, key, f"note {key}")) for key in (1, 2)), key=repr
    )


def test_deletes_are_not_reported_unless_requested(polled: PollingHarness) -> None:
    polled.ruled(deletes=False)
    with closing(polled.capture().live()) as stream:
        polled.commit(upsert(polled.table, 1, "x"))
        polled.commit(delete(polled.table, 1))
        found = until(polled, stream)
    assert [type(change.event) for change in found if isinstance(change.event, Delete | Truncate)] == []


def test_resume_point_can_be_kept_in_the_source(polled: PollingHarness) -> None:
    polled.ruled(resume=None, deletes=False)
    assert polled.capture().lag() is None
    events = deliver_three(polled, confirm=lambda changes: changes[0].ack.confirm())
    shutil.rmtree(polled.settings.spool)
    check_next(polled, events[1:], "the source knows what was confirmed")


def test_table_that_is_added_later_begins_then(polled: PollingHarness) -> None:
    both, polled.settings = polled.settings, replace(polled.settings, tables=(polled.table,))
    deliver_three(polled, confirm=lambda changes: [change.ack.confirm() for change in changes])
    polled.commit(upsert(polled.other, 1, "before"))
    polled.settings = both
    with closing(polled.capture().live()) as stream:
        polled.commit(upsert(polled.other, 2, "after"))
        check_same_set(
            take(stream, 1, polled.deadline_seconds),
            [upsert(polled.other, 2, "after")],
            "existing rows are left to the snapshot",
        )


def test_key_of_other_columns_returns_the_rows_again(polled: PollingHarness) -> None:
    """All former keys would count as deleted, or be taken for those of other rows."""
    table = polled.table
    with closing(polled.capture().live()) as stream:
        for each in range(3):
            polled.commit(upsert(table, each, str(each + 1)))
        take(stream, 3, polled.deadline_seconds)
        polled.database.execute(
            f"ALTER TABLE {table} DROP CONSTRAINT {table.name}_pkey, ADD PRIMARY KEY (note)",
        )
        polled.await_look()
        polled.commit(upsert(polled.other, 999, "mark"))
        found = take(stream, 5, polled.deadline_seconds)
    assert [type(change.event) for change in found if change.event.table == table] == [
        Truncate,
        Upsert,
        Upsert,
        Upsert,
    ]
    assert {change.event.key["note"] for change in found[1:4] if isinstance(change.event, Upsert)} == {
        "1",
        "2",
        "3",
    }


# --- neighbours ---------------------------------------------------------------------------------------------


def test_look_that_has_to_wait_for_a_table_holds_no_other(polled: PollingHarness) -> None:
    """Otherwise a session that alters both tables in another order would be the victim of a deadlock."""
    # A poll rolls back for no other reason.
    trying = (
        "SELECT 1 FROM pg_stat_activity "
        "WHERE application_name = 'penstock polling' AND query = 'ROLLBACK' AND query_start > %s"
    )
    with closing(polled.capture().live()) as stream, transaction(polled) as altering:
        altering.execute(f"LOCK TABLE {polled.other} IN ACCESS EXCLUSIVE MODE".encode())
        ((now,),) = polled.database.query("SELECT clock_timestamp()")
        wait_for(
            lambda: polled.database.query(trying, now) != [],
            "a look that does not get the table",
            lambda: now,
            polled.deadline_seconds,
        )
        altering.execute("SET lock_timeout = '20s'")
        altering.execute(f"LOCK TABLE {polled.table} IN ACCESS EXCLUSIVE MODE".encode())
        altering.execute("COMMIT")
        polled.commit(upsert(polled.table, 1, "after"))
        check_same_set(
            take(stream, 1, polled.deadline_seconds),
            [upsert(polled.table, 1, "after")],
            "the look was only late",
        )


def test_two_do_not_poll_under_one_name(polled: PollingHarness, tmp_path: Path) -> None:
    with closing(polled.capture().live()) as stream:
        polled.commit(upsert(polled.table, 1, "x"))
        take(stream, 1, polled.deadline_seconds)
        other = replace(polled.settings, spool=tmp_path / "other")
        with closing(PollingCapture(other).live()):
            code = partial(failure_code, other.spool)
            wait_for(lambda: code() == "PEN-1202", "one that waits", code, polled.deadline_seconds)
    polled.settings = other
    with closing(polled.capture().live()) as stream:
        polled.commit(upsert(polled.table, 2, "y"))
        assert seen_event(upsert(polled.table, 2, "y")) in {seen(change) for change in until(polled, stream)}


def failure_code(spool: Path) -> str | None:
    status = load_status(spool)
    return status.failure.code if status is not None and status.failure is not None else None


def test_role_that_may_only_read_can_poll(shared_database: Database, tmp_path: Path) -> None:
    with idle(PollingHarness(shared_database, tmp_path)) as polled:
        role = f"reader_{polled.table.name}"
        shared_database.execute(
            f"CREATE ROLE {role} LOGIN; GRANT SELECT ON {polled.table}, {polled.other} TO {role}"
        )
        address = SourceAddress.parse(shared_database.dsn.replace("postgres@", f"{role}@"))
        polled.settings = replace(polled.settings, address=address)
        try:
            with closing(polled.capture().live()) as stream:
                polled.commit(upsert(polled.table, 1, "x"))
                check_same_set(
                    take(stream, 1, polled.deadline_seconds),
                    [upsert(polled.table, 1, "x")],
                    "with SELECT, and nothing else",
                )
            polled.ruled(resume=None)
            with pytest.raises(PrivilegeError, match="may not create or use the tables") as refused:
                polled.capture().live()
            assert "GRANT SELECT, INSERT, UPDATE, DELETE" in str(refused.value.hint)
        finally:
            shared_database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


# --- what is refused ----------------------------------------------------------------------------------------


def test_table_without_key_or_with_a_column_that_may_be_null_is_refused(
    shared_database: Database, tmp_path: Path
) -> None:
    with idle(PollingHarness(shared_database, tmp_path)) as polled:
        polled.ruled(cursor="note")
        with pytest.raises(UnsupportedTableError, match="may be NULL"):
            polled.capture().live()
        polled.ruled(cursor="nowhere")
        with pytest.raises(UnsupportedTableError, match="has no column 'nowhere'"):
            polled.capture().live()
        polled.ruled(cursor="xmin")
        shared_database.execute(f"ALTER TABLE {polled.table} DROP CONSTRAINT {polled.table.name}_pkey")
        with pytest.raises(TableWithoutKeyError):
            polled.capture().live()
        shared_database.execute(f"DROP TABLE {polled.table}")
        with pytest.raises(NoTablesError):
            polled.capture().live()
        assert [path.name for path in polled.settings.spool.iterdir()] == ["moments.lock"]
