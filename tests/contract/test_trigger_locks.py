"""Creating and dropping triggers while an application is working: other sessions do not queue behind the lock
request.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest

from penstock.capture.trigger.capture import TriggerCapture
from penstock.errors import LockWaitError
from penstock.postgres import capture_triggers
from penstock.postgres.capture_triggers import detach, remove
from penstock.postgres.change_table import ChangeTable
from penstock.postgres.connection import connect
from penstock.testing.capture_conformance import upsert
from penstock.testing.streams import Background, check_same, take
from tests.support.contract.trigger_harness import TriggerHarness


def write_beside(trigger: TriggerHarness, act: Callable[[], object]) -> Background[object]:
    """One session has an open write to `other`; while `act` waits for it, other sessions read and write."""
    with trigger.database.connect() as busy:
        busy.execute(f"INSERT INTO {trigger.other} VALUES (100, 'x')".encode())
        acting = Background(act)
        for each in range(101, 131):
            with trigger.database.connect() as session:
                session.execute("SET lock_timeout = '2s'")
                session.execute(f"INSERT INTO {trigger.other} VALUES ({each}, 'x')".encode())
            with pytest.raises(AssertionError):
                acting.result(0.02, "the end")
        busy.commit()
    return acting


def test_adding_triggers_to_a_busy_table_blocks_no_session(
    trigger: TriggerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_triggers, "LOCK_SECONDS", 120.0)
    first = TriggerCapture(trigger.settings).with_trigger_management({trigger.table}, manage=True)
    both = {trigger.table, trigger.other}
    with closing(first.live()) as stream:
        acting = write_beside(trigger, lambda: trigger.capture().ensure_coverage(both, manage=True))
        trigger.commit(upsert(trigger.table, 1, "x"))
        check_same(
            take(stream, 1, trigger.deadline_seconds),
            [upsert(trigger.table, 1, "x")],
            "while a session waits for another table",
        )
        acting.result(trigger.deadline_seconds, "the end of the wait")
    assert trigger.capture().inspect_coverage(both).satisfied


def test_table_gets_its_triggers_while_it_is_read(
    trigger: TriggerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_triggers, "LOCK_SECONDS", 2.0)
    with trigger.database.connect() as reading:
        reading.execute(f"SELECT * FROM {trigger.table}".encode())
        trigger.capture().live().close()
    assert trigger.capture().inspect_coverage({trigger.table}).satisfied


def test_removing_everything_from_a_busy_table_blocks_no_session(
    trigger: TriggerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_triggers, "LOCK_SECONDS", 120.0)
    trigger.capture().live().close()

    def act() -> None:
        with connect(trigger.settings.address) as connection:
            remove(connection, trigger.settings.name)

    write_beside(trigger, act).result(trigger.deadline_seconds, "the end of the wait")
    assert (
        trigger.database.query("SELECT 1 FROM pg_namespace WHERE nspname = %s", trigger.settings.name) == []
    )


def test_tables_are_waited_for_together_and_those_that_keep_their_triggers_are_named(
    trigger: TriggerHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(capture_triggers, "LOCK_SECONDS", 0.5)
    trigger.capture().live().close()
    gone = type(trigger.table)("public", "never_was")
    with trigger.database.connect() as busy, connect(trigger.settings.address) as connection:
        busy.execute(f"SELECT * FROM {trigger.other}".encode())
        with caplog.at_level("WARNING"):
            detach(connection, trigger.settings.name, [trigger.other, trigger.table, gone])
        (record,) = [each for each in caplog.records if each.message == "tables keep their triggers"]
        assert record.__dict__["kept"] == {str(trigger.other): LockWaitError.code}
        assert trigger.capture().inspect_coverage({trigger.table, trigger.other}).present == {trigger.other}
        with pytest.raises(LockWaitError, match=trigger.other.name):
            remove(connection, trigger.settings.name)
        busy.rollback()
        remove(connection, trigger.settings.name)


def test_vacuum_never_takes_the_change_table_from_those_who_write(trigger: TriggerHarness) -> None:
    trigger.capture().live().close()
    options = trigger.database.query(
        "SELECT reloptions FROM pg_class WHERE oid = %s::regclass", f"{trigger.settings.name}.changes"
    )
    assert "vacuum_truncate=false" in options[0][0]


def test_server_notices_in_a_minute_that_the_holder_of_the_lease_is_gone(trigger: TriggerHarness) -> None:
    trigger.capture().live().close()
    with connect(trigger.settings.address) as connection:
        assert ChangeTable(connection, trigger.settings.name).take_lease() is None
        rows = connection.execute("SELECT source FROM pg_settings WHERE name ~ '^tcp_keepalives_'").fetchall()
    assert rows == [("session",)] * 3
