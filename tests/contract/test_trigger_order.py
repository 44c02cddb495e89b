"""The order of transactions in a `TriggerCapture`, and which rows of the change table it keeps and
deletes.
"""

from __future__ import annotations

import random
import shutil
import threading
from contextlib import closing, suppress
from dataclasses import replace

import psycopg
import pytest

from penstock.capture.trigger.capture import TriggerCapture
from penstock.contracts.capture import Change, Delete, Event, Truncate, Upsert
from penstock.errors import ChangeTableMissingError, PrivilegeError, SystemChangedError
from penstock.position import Position
from penstock.postgres import change_table
from penstock.postgres.capture_triggers import inspect_trigger_memberships, trigger_names
from penstock.postgres.connection import Connection, connect
from penstock.postgres.membership import is_same_act
from penstock.postgres.slot import current_position
from penstock.testing.capture_conformance import check_next, deliver_three, upsert
from penstock.testing.streams import Background, check_same, seen, take, take_until, wait_for
from tests.support.contract.trigger_harness import TriggerHarness


def run(connection: psycopg.Connection, *statements: str) -> None:
    for statement in statements:
        connection.execute(statement.encode())


# --- the order ----------------------------------------------------------------------------------------------


def test_open_transaction_delays_no_other(trigger: TriggerHarness) -> None:
    with closing(trigger.capture().live()) as stream, trigger.database.connect() as long:
        run(long, f"INSERT INTO {trigger.table} VALUES (1, 'early, and late')")
        expected: list[Event] = [upsert(trigger.table, each, "x") for each in (2, 3)]
        for event in expected:
            trigger.commit(event)
        check_same(
            take(stream, 2, trigger.deadline_seconds),
            expected,
            "committed changes are returned while other transactions are open",
        )
        long.commit()
        check_same(
            take(stream, 1, trigger.deadline_seconds),
            [upsert(trigger.table, 1, "early, and late")],
            "and then the other",
        )


def test_overwriting_transaction_follows_the_overwritten_although_it_began_earlier(
    trigger: TriggerHarness,
) -> None:
    with closing(trigger.capture().live()) as stream, trigger.database.connect() as long:
        run(long, f"INSERT INTO {trigger.other} VALUES (1, 'long')")
        trigger.commit(upsert(trigger.table, 1, "short"))
        run(long, f"UPDATE {trigger.table} SET note = 'long' WHERE id = 1")
        long.commit()
        expected = [
            upsert(trigger.table, 1, "short"),
            upsert(trigger.other, 1, "long"),
            upsert(trigger.table, 1, "long"),
        ]
        check_same(
            take(stream, 3, trigger.deadline_seconds), expected, "in the order in which they committed"
        )


def test_order_within_one_look_is_that_of_the_last_changes(trigger: TriggerHarness) -> None:
    trigger.capture().live().close()
    with trigger.database.connect() as long:
        run(long, f"INSERT INTO {trigger.other} VALUES (1, 'long')")
        trigger.commit(upsert(trigger.table, 1, "short"))
        run(long, f"UPDATE {trigger.table} SET note = 'long' WHERE id = 1")
        long.commit()
    with closing(trigger.capture().live()) as stream:
        expected = [
            upsert(trigger.table, 1, "short"),
            upsert(trigger.other, 1, "long"),
            upsert(trigger.table, 1, "long"),
        ]
        changes = take(stream, 3, trigger.deadline_seconds)
        check_same(changes, expected, "although both were found by one look")
        assert len({change.commit.position for change in changes if change.commit}) == 2


def test_rolled_back_changes_are_not_captured(trigger: TriggerHarness) -> None:
    with closing(trigger.capture().live()) as stream, trigger.database.connect() as session:
        run(session, f"INSERT INTO {trigger.table} VALUES (1, 'x')")
        session.rollback()
        run(
            session,
            f"INSERT INTO {trigger.table} VALUES (2, 'kept')",
            "SAVEPOINT s",
            f"INSERT INTO {trigger.table} VALUES (3, 'x')",
        )
        run(session, "ROLLBACK TO s", f"INSERT INTO {trigger.table} VALUES (4, 'kept')")
        session.commit()
        expected = [upsert(trigger.table, each, "kept") for each in (2, 4)]
        check_same(
            take(stream, 2, trigger.deadline_seconds),
            expected,
            "savepoints that were rolled back are not in it",
        )


def test_prepared_transaction_is_captured_when_it_commits(trigger: TriggerHarness) -> None:
    with closing(trigger.capture().live()) as stream, trigger.database.connect() as session:
        run(
            session,
            f"INSERT INTO {trigger.table} VALUES (1, 'prepared')",
            f"PREPARE TRANSACTION '{trigger.settings.name}'",
        )
        trigger.commit(upsert(trigger.table, 2, "x"))
        check_same(
            take(stream, 1, trigger.deadline_seconds),
            [upsert(trigger.table, 2, "x")],
            "the other one has not committed",
        )
        trigger.database.execute(f"COMMIT PREPARED '{trigger.settings.name}'")
        check_same(
            take(stream, 1, trigger.deadline_seconds), [upsert(trigger.table, 1, "prepared")], "now it has"
        )


def test_row_that_a_trigger_of_the_application_changes_again_ends_as_it_is(trigger: TriggerHarness) -> None:
    trigger.database.execute(
        f"CREATE FUNCTION again_{trigger.settings.name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"UPDATE {trigger.table} SET note = 'again' WHERE id = NEW.id; RETURN NULL; END $$"
    )
    trigger.database.execute(
        "CREATE TRIGGER again AFTER INSERT "
        f"ON {trigger.table} FOR EACH ROW EXECUTE FUNCTION again_{trigger.settings.name}()"
    )
    with closing(trigger.capture().live()) as stream:
        trigger.database.execute(f"INSERT INTO {trigger.table} VALUES (1, 'once')")
        expected = [upsert(trigger.table, 1, "once"), upsert(trigger.table, 1, "again")]
        check_same(
            take(stream, 2, trigger.deadline_seconds), expected, "what follows from a change comes after it"
        )


def test_rows_that_a_trigger_of_the_application_changes_before_their_own_turn_end_as_they_are(
    trigger: TriggerHarness,
) -> None:
    """The trigger on the first row changes all others before the statement's own changes are recorded."""
    function = f"others_{trigger.settings.name}"
    trigger.database.execute(
        f"CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"UPDATE {trigger.table} SET note = note || '+' || NEW.id WHERE id > NEW.id; RETURN NULL; END $$"
    )
    trigger.database.execute(
        "CREATE TRIGGER others AFTER UPDATE "
        f"ON {trigger.table} FOR EACH ROW WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION {function}()"
    )
    trigger.commit(*(upsert(trigger.table, each, "a") for each in range(1, 5)))
    with closing(trigger.capture().live()) as stream:
        trigger.database.execute(f"UPDATE {trigger.table} SET note = 'b'")
        changes = take(stream, 10, trigger.deadline_seconds)
    state: dict[object, object] = {}
    for change in changes:
        apply(state, change)
    assert state == dict(trigger.database.query(f"SELECT id, note FROM {trigger.table}"))
    assert state[4] == "b+1+2+3"


def test_row_that_is_locked_by_a_foreign_key_and_set_back_ends_as_it_is(trigger: TriggerHarness) -> None:
    """A locked row looks like one that was changed again; and the last change restores what the first one
    found.
    """
    child, key = f"{trigger.table}_child", f"REFERENCES {trigger.table}"
    trigger.commit(upsert(trigger.table, 1, "a"))
    trigger.database.execute(f"CREATE TABLE {child} (id bigint {key})")
    put = f"UPDATE {trigger.table} SET note = "
    with closing(trigger.capture().live()) as stream, trigger.database.connect() as session:
        run(session, f"{put} 'b'", f"INSERT INTO {child} VALUES (1)", f"{put} 'a'")
        session.commit()
        expected = [upsert(trigger.table, 1, "b"), upsert(trigger.table, 1, "a")]
        check_same(
            take(stream, 2, trigger.deadline_seconds), expected, "in the order in which they were made"
        )


def test_row_at_the_tid_of_one_from_before_a_truncate_stays(trigger: TriggerHarness) -> None:
    """A row locked by a foreign key looks like one that was changed again by the transaction that found it at
    the same tid.
    """
    table = f"{trigger.table}_self"
    name = replace(trigger.table, name=f"{trigger.table.name}_self")
    trigger.database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, p int REFERENCES {table})")
    trigger.database.execute(f"INSERT INTO {table} VALUES (10, NULL), (11, 10)")
    capture = TriggerCapture(trigger.settings).with_trigger_management({name}, manage=True)
    again = [f"TRUNCATE {table}", f"INSERT INTO {table} VALUES (1, 2), (2, NULL)"]
    with closing(capture.live()) as stream, trigger.database.connect() as session:
        run(session, f"UPDATE {table} SET p = NULL WHERE id = 11", *again)
        session.commit()
        expected = [Upsert(name, {"id": 1}, {"id": 1, "p": 2}), Upsert(name, {"id": 2}, {"id": 2, "p": None})]
        changes = take(stream, 4, trigger.deadline_seconds)
        assert isinstance(changes[1].event, Truncate)
        assert [change.event for change in changes[2:]] == expected
        # TRUNCATE empties a file that the same transaction created instead of replacing it.
        run(
            session,
            f"TRUNCATE {table}",
            f"INSERT INTO {table} VALUES (3, NULL), (4, 3)",
            f"UPDATE {table} SET p = NULL WHERE id = 4",
            *again,
        )
        session.commit()
        changes = take(stream, 7, trigger.deadline_seconds)
        assert isinstance(changes[4].event, Truncate)
        assert [change.event for change in changes[5:]] == expected


def test_cast_that_the_owner_of_a_table_made_does_not_run_with_the_rights_of_the_capture(
    trigger: TriggerHarness,
) -> None:
    table, function = trigger.table, f"stolen_{trigger.settings.name}"
    trigger.database.execute(
        f"CREATE FUNCTION {function}({table}) RETURNS text LANGUAGE sql AS $$ SELECT 'stolen' $$"
    )
    trigger.database.execute(f"CREATE CAST ({table} AS text) WITH FUNCTION {function}({table})")
    with closing(trigger.capture().live()) as stream:
        trigger.commit(upsert(table, 1, "x"))
        check_same(
            take(stream, 1, trigger.deadline_seconds),
            [upsert(table, 1, "x")],
            "the row as Postgres itself writes it",
        )


def test_ordered_changes_are_durable_also_for_a_role_with_asynchronous_commits(
    trigger: TriggerHarness,
) -> None:
    trigger.capture().live().close()
    address = trigger.settings.address.with_parameters({"options": "-c synchronous_commit=off"})
    with connect(address) as connection:
        # Only the commit of this session flushes the WAL that far.
        for _ in range(20):
            reached = change_table.ChangeTable(connection, trigger.settings.name).sequence()
            assert current_position(connection) > reached


def test_order_covers_all_committed_transactions_also_for_a_role_with_an_older_snapshot(
    trigger: TriggerHarness,
) -> None:
    address = trigger.settings.address.with_parameters(
        {"options": "-c default_transaction_isolation=serializable"}
    )
    with connect(address) as connection:
        assert connection.execute("SHOW transaction_isolation").fetchone() == ("read committed",)


def test_state_after_every_transaction_of_random_writers_is_the_source(trigger: TriggerHarness) -> None:
    """Writers that overwrite each other's rows in transactions of all lengths; a snapshot in between; one
    reader.
    """
    with closing(trigger.capture().live()) as stream:
        threads = [threading.Thread(target=write_at_random, args=(trigger, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        rows, fence = snapshot(trigger)
        for thread in threads:
            thread.join()
        mark = upsert(trigger.other, 99, "mark")
        trigger.commit(mark)
        changes = take_until(stream, mark, 60.0)
    state = dict(rows)
    for change in changes[:-1]:
        assert change.commit is not None
        if change.commit.position > fence:
            apply(state, change)
    assert state == dict(trigger.database.query(f"SELECT id, note FROM {trigger.table}"))


def test_commits_between_a_snapshot_and_its_position_follow_it(
    trigger: TriggerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = change_table._export

    def commit_after(holder: Connection) -> str:
        snapshot = export(holder)
        trigger.commit(upsert(trigger.table, 2, "after"))
        return snapshot

    with closing(trigger.capture().live()) as stream:
        trigger.commit(upsert(trigger.table, 1, "before"))
        monkeypatch.setattr(change_table, "_export", commit_after)
        rows, fence = snapshot(trigger)
        positions = {
            str(seen(change)[2]): change.commit.position
            for change in take(stream, 3, trigger.deadline_seconds)
            if change.commit
        }
    assert rows == {1: "before"}
    assert positions["1"] <= fence < positions["2"]


def write_at_random(trigger: TriggerHarness, seed: int) -> None:
    choose, table = random.Random(seed), trigger.table
    with trigger.database.connect() as session:
        for at in range(30):
            with suppress(psycopg.errors.DeadlockDetected), session.transaction():
                for _ in range(choose.randint(1, 4)):
                    key, other = choose.randint(1, 12), choose.randint(1, 12)
                    put = (
                        f"INSERT INTO {table} VALUES ({key}, '{seed}/{at}') ON CONFLICT (id) DO UPDATE "
                        "SET note = excluded.note"
                    )
                    statement = choose.choice(
                        [
                            put,
                            f"DELETE FROM {table} WHERE id = {key}",
                            f"UPDATE {table} SET id = {other} WHERE id = {key}",
                        ]
                    )
                    with suppress(psycopg.errors.UniqueViolation), session.transaction():
                        run(session, statement)


def snapshot(trigger: TriggerHarness) -> tuple[dict[object, object], Position]:
    """Rows and position of a snapshot. An empty table has no position, so a second table is read too."""
    trigger.commit(upsert(trigger.other, 1, "x"))
    changes = list(trigger.capture().snapshot([trigger.table, trigger.other]))
    (fence,) = {change.commit.position for change in changes if change.commit is not None}
    events = [change.event for change in changes]
    return {
        event.key["id"]: event.row["note"]
        for event in events
        if isinstance(event, Upsert) and event.table == trigger.table
    }, fence


def apply(state: dict[object, object], change: Change) -> None:
    event = change.event
    if isinstance(event, Upsert) and event.table.name.startswith("noted") and "other" not in event.table.name:
        state[event.key["id"]] = event.row["note"]
    elif isinstance(event, Delete) and "other" not in event.table.name:
        state.pop(event.key["id"], None)


# --- retention of the change table ---


def test_confirmed_changes_are_removed_from_the_source_and_no_others(trigger: TriggerHarness) -> None:
    with closing(trigger.capture().live()) as stream:
        for each in range(5):
            trigger.commit(upsert(trigger.table, each, "x"))
        changes = take(stream, 5, trigger.deadline_seconds)
        assert trigger.noted == 5
        for change in changes[:4]:
            change.ack.confirm()
    assert trigger.noted >= 1, "one was not confirmed"
    with closing(trigger.capture().live()) as stream:
        (last,) = take(stream, 1, trigger.deadline_seconds)
        last.ack.confirm()
        waiting = Background(lambda: next(stream, None))
        wait_for(
            lambda: trigger.noted == 0,
            "an empty change table",
            lambda: trigger.noted,
            trigger.deadline_seconds,
        )
        trigger.commit(upsert(trigger.table, 9, "mark"))
        waiting.result(trigger.deadline_seconds, "the mark")


def test_capture_resumes_from_the_change_table_when_the_spool_is_lost(trigger: TriggerHarness) -> None:
    events = deliver_three(trigger, confirm=lambda _: None)
    shutil.rmtree(trigger.settings.spool)
    check_next(trigger, events, "the change table has what was not confirmed")


def test_long_transaction_is_captured_whole_in_pieces(trigger: TriggerHarness) -> None:
    paged = replace(trigger.settings, page_changes=100, page_bytes=20_000)
    capture = TriggerCapture(paged).with_trigger_management({trigger.table, trigger.other}, manage=True)
    with closing(capture.live()) as stream:
        trigger.commit(upsert(trigger.other, 1, "before"))
        trigger.database.execute(
            f"INSERT INTO {trigger.table} SELECT n, repeat('x', 100 + n) FROM generate_series(1, 1000) n"
        )
        trigger.database.execute(f"INSERT INTO {trigger.other} VALUES (2, repeat('y', 50000))")
        changes = take(stream, 1002, trigger.deadline_seconds)
    keys = [change.event.key["id"] for change in changes[1:1001] if isinstance(change.event, Upsert)]
    assert keys == list(range(1, 1001))
    assert len({change.commit.position for change in changes[1:1001] if change.commit}) == 1
    assert isinstance(changes[-1].event, Upsert)
    assert len(str(changes[-1].event.row["note"])) == 50_000


def test_rows_applied_by_logical_replication_are_captured(trigger: TriggerHarness) -> None:
    with closing(trigger.capture().live()) as stream:
        with trigger.database.connect() as session:
            run(
                session,
                "SET session_replication_role = replica",
                f"INSERT INTO {trigger.table} VALUES (1, 'applied')",
            )
        check_same(
            take(stream, 1, trigger.deadline_seconds),
            [upsert(trigger.table, 1, "applied")],
            "triggers fire for every role",
        )


def test_writers_need_no_rights_on_the_change_table(trigger: TriggerHarness) -> None:
    role = f"{trigger.database.name}_writer"
    trigger.database.execute(f"CREATE ROLE {role}")
    try:
        trigger.database.execute(f"GRANT INSERT ON {trigger.table} TO {role}")
        with closing(trigger.capture().live()) as stream:
            with trigger.database.connect() as session:
                run(session, f"SET ROLE {role}", f"INSERT INTO {trigger.table} VALUES (1, 'x')")
            check_same(
                take(stream, 1, trigger.deadline_seconds),
                [upsert(trigger.table, 1, "x")],
                "the function has the rights",
            )
            with trigger.database.connect() as session, pytest.raises(psycopg.errors.InsufficientPrivilege):
                run(session, f"SET ROLE {role}", f"SELECT * FROM {trigger.settings.name}.changes")
    finally:
        trigger.database.execute(f"DROP OWNED BY {role}")
        trigger.database.execute(f"DROP ROLE {role}")


def test_second_reader_waits_for_the_first(trigger: TriggerHarness) -> None:
    with closing(trigger.capture().live()) as first:
        trigger.commit(upsert(trigger.table, 1, "x"))
        take(first, 1, trigger.deadline_seconds)
        elsewhere = replace(trigger.settings, spool=trigger.settings.spool.with_name("elsewhere"))
        with closing(TriggerCapture(elsewhere).live()) as second:
            waiting = Background(lambda: next(second))
            with pytest.raises(AssertionError):
                waiting.result(0.5, "a change")
            first.close()
            assert waiting.result(trigger.deadline_seconds, "a change").event == upsert(trigger.table, 1, "x")
    # A transaction that had to wait ends normally.
    wait_for(lambda: trigger.open_resources() == ([], []), "nothing open", trigger.open_resources, 5.0)


# --- obstacles ---


def test_missing_change_table_is_an_error(trigger: TriggerHarness) -> None:
    with pytest.raises(ChangeTableMissingError):
        TriggerCapture(trigger.settings).live()


def test_error_for_a_role_without_rights_names_the_grants(trigger: TriggerHarness) -> None:
    trigger.capture().live().close()
    role = f"{trigger.database.name}_stranger"
    trigger.database.execute(f"CREATE ROLE {role} LOGIN")
    try:
        stranger = replace(trigger.settings, address=trigger.settings.address.with_parameters({"user": role}))
        with pytest.raises(PrivilegeError) as raised:
            TriggerCapture(stranger).live()
        assert raised.value.hint is not None
        trigger.database.execute(raised.value.hint)
        TriggerCapture(stranger).live().close()
    finally:
        trigger.database.execute(f"DROP OWNED BY {role}")
        trigger.database.execute(f"DROP ROLE {role}")


def test_change_table_of_another_server_is_not_trusted(trigger: TriggerHarness) -> None:
    trigger.capture().live().close()
    trigger.database.execute(f"UPDATE {trigger.settings.name}.horizon SET system_identifier = '1'")
    with pytest.raises(SystemChangedError):
        trigger.capture().live()


def test_disabled_trigger_counts_as_missing_and_is_enabled_again(trigger: TriggerHarness) -> None:
    capture, both = trigger.capture(), {trigger.table, trigger.other}
    capture.live().close()
    assert capture.inspect_coverage(both).satisfied
    trigger.database.execute(f'ALTER TABLE {trigger.table} DISABLE TRIGGER "!{trigger.settings.name}"')
    assert capture.inspect_coverage(both).missing == {trigger.table}
    capture.live().close()
    assert capture.inspect_coverage(both).satisfied


def test_triggers_that_were_off_for_a_while_are_others_although_they_are_back(
    trigger: TriggerHarness,
) -> None:
    trigger.capture().live().close()
    with connect(trigger.settings.address) as connection:
        before = inspect_trigger_memberships(
            connection, trigger.settings.name, [trigger.table, trigger.other]
        )
        trigger.capture().live().close()
        assert (
            inspect_trigger_memberships(connection, trigger.settings.name, [trigger.table, trigger.other])
            == before
        )
        trigger.database.execute(f"ALTER TABLE {trigger.table} DISABLE TRIGGER ALL")
        for name in trigger_names(trigger.settings.name):
            trigger.database.execute(f'ALTER TABLE {trigger.table} ENABLE ALWAYS TRIGGER "{name}"')
        assert trigger.capture().inspect_coverage({trigger.table}).satisfied
        after = inspect_trigger_memberships(connection, trigger.settings.name, [trigger.table, trigger.other])
    assert (after[trigger.table] == before[trigger.table], after[trigger.other] == before[trigger.other]) == (
        False,
        True,
    )


def test_triggers_of_a_partition_that_were_off_for_a_while_are_others_and_partitions_come_and_go(
    trigger: TriggerHarness,
) -> None:
    table, name = f"{trigger.table}_parted", replace(trigger.table, name=f"{trigger.table.name}_parted")
    part = f"CREATE TABLE {table}_{{0}} PARTITION OF {table} FOR VALUES IN ({{0}})"
    trigger.database.execute(
        f"CREATE TABLE {table} (id int PRIMARY KEY) PARTITION BY LIST (id); {part.format(1)}; "
        f"{part.format(2)}"
    )
    TriggerCapture(trigger.settings).with_trigger_management({name}, manage=True).live().close()
    with connect(trigger.settings.address) as connection:
        acts = [inspect_trigger_memberships(connection, trigger.settings.name, [name])[name]]
        for statement in (
            part.format(3),
            f"DROP TABLE {table}_1",
            f"ALTER TABLE {table}_2 DISABLE TRIGGER ALL",
        ):
            trigger.database.execute(statement)
            acts.append(inspect_trigger_memberships(connection, trigger.settings.name, [name])[name])
        trigger.database.execute(
            f'ALTER TABLE {table}_2 ENABLE ALWAYS TRIGGER "{trigger_names(trigger.settings.name)[0]}"'
        )
        assert trigger.capture().inspect_coverage({name}).satisfied
        acts.append(inspect_trigger_memberships(connection, trigger.settings.name, [name])[name])
    assert [is_same_act(acts[0].act, each.act) for each in acts] == [True, True, True, True, False]


@pytest.mark.parametrize("kind", ["unlogged", "view", "own"])
def test_table_that_cannot_be_captured_is_named(trigger: TriggerHarness, kind: str) -> None:
    name = replace(trigger.table, name=f"{trigger.table.name}_{kind}")
    statements = {
        "unlogged": f"CREATE UNLOGGED TABLE {name} (id int PRIMARY KEY)",
        "view": f"CREATE VIEW {name} AS SELECT * FROM {trigger.table}",
    }
    if kind in statements:
        trigger.database.execute(statements[kind])
    else:
        trigger.capture().live().close()
        name = replace(name, schema=trigger.settings.name, name="changes")
    report = trigger.capture().inspect_coverage({name})
    assert [blocker.tables for blocker in report.blockers] == [(name,)]
    assert not report.manageable
