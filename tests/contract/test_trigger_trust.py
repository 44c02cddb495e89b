"""Nothing that somebody else has put in the place of a change table is used: it would run with the rights of whoever uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from penstock.errors import PrivilegeError
from penstock.position import Position
from penstock.postgres.capture_triggers import Installation
from penstock.postgres.connection import connect
from penstock.postgres.resume_table import ResumeTable
from penstock.testing.capture_conformance import upsert
from penstock.testing.streams import Background, check_same_set, take, wait_for
from tests.contract.trigger_harness import TriggerHarness

PLANTED = (
    "CREATE FUNCTION {s}.planted() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$",
    "CREATE TRIGGER planted BEFORE INSERT ON {s}.{t} FOR EACH ROW EXECUTE FUNCTION {s}.planted()",
)


@pytest.fixture
def stranger(trigger: TriggerHarness) -> Iterator[str]:
    name = f"{trigger.database.name}_planter"
    trigger.database.execute(f"CREATE ROLE {name} LOGIN; GRANT CREATE ON DATABASE {trigger.database.name} TO {name}")
    yield name
    trigger.database.execute(f"DROP OWNED BY {name} CASCADE; DROP ROLE {name}")


def as_role(trigger: TriggerHarness, role: str, *statements: str) -> None:
    with connect(trigger.settings.address.with_parameters({"user": role})) as session:
        for statement in statements:
            session.execute(statement.encode())


def check_refused(trigger: TriggerHarness, words: str) -> None:
    report = trigger.capture().inspect_coverage({trigger.table})
    assert not report.satisfied
    assert not report.manageable
    assert any(words in blocker.what for blocker in report.blockers)
    with pytest.raises(PrivilegeError, match=words) as refused:
        trigger.capture().live()
    assert f'DROP SCHEMA "{trigger.settings.name}" CASCADE' in (refused.value.hint or "")
    for attempt in (trigger.capture().lag, lambda: list(trigger.capture().snapshot([trigger.table]))):
        with pytest.raises(PrivilegeError, match=words):
            attempt()


def test_tables_that_somebody_made_before_are_not_taken_over(trigger: TriggerHarness, stranger: str) -> None:
    name = trigger.settings.name
    table = f"CREATE TABLE {name}.changes (seq bigint, xid xid8, root oid, shape bigint)"
    as_role(trigger, stranger, f"CREATE SCHEMA {name}", table, *(each.format(s=name, t="changes") for each in PLANTED))
    check_refused(trigger, "somebody else has put there")
    assert trigger.database.query(f"SELECT proname FROM pg_proc WHERE pronamespace = '{name}'::regnamespace") == [("planted",)]


def test_change_table_that_is_wholly_somebody_elses_is_not_used_by_a_superuser(trigger: TriggerHarness, stranger: str) -> None:
    with connect(trigger.settings.address.with_parameters({"user": stranger})) as session:
        Installation(trigger.settings.name, stranger, needs_table=True, tables=()).run(session)
    check_refused(trigger, "everything, which belongs to")


def test_schema_that_somebody_else_has_made_is_not_built_in(trigger: TriggerHarness, stranger: str) -> None:
    as_role(trigger, stranger, f"CREATE SCHEMA {trigger.settings.name}")
    check_refused(trigger, "somebody else has put there")


@pytest.mark.parametrize(
    "planted",
    [
        PLANTED,
        ("CREATE RULE planted AS ON INSERT TO {s}.{t} DO ALSO NOTIFY planted",),
        ("ALTER TABLE {s}.{t} OWNER TO {r}",),
        ("ALTER FUNCTION {s}.note() OWNER TO {r}",),
    ],
)
def test_what_was_put_into_a_change_table_later_is_refused(trigger: TriggerHarness, stranger: str, planted: tuple[str, ...]) -> None:
    trigger.capture().live().close()
    for each in planted:
        trigger.database.execute(each.format(s=trigger.settings.name, t="commits", r=stranger))
    check_refused(trigger, "somebody else has put there")


def test_empty_schema_of_the_role_itself_is_built_in(trigger: TriggerHarness) -> None:
    trigger.database.execute(f"CREATE SCHEMA {trigger.settings.name}")
    with closing(trigger.capture().live()) as stream:
        trigger.commit(upsert(trigger.table, 1, "x"))
        check_same_set(take(stream, 1, trigger.deadline_seconds), [upsert(trigger.table, 1, "x")], "by triggers of ours in it")


def test_two_who_set_up_a_change_table_at_once_make_one(trigger: TriggerHarness) -> None:
    both = {trigger.table, trigger.other}
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    lock = "SELECT pg_advisory_xact_lock(hashtextextended('penstock sets up ' || %s, 0))"
    with trigger.database.connect() as first:
        first.execute(lock, [trigger.settings.name])
        setting_up = [Background(lambda: trigger.capture().ensure_coverage(both, manage=True)) for _ in range(2)]
        look = lambda: trigger.database.query(waiting)  # noqa: E731
        wait_for(lambda: look() == [(2,)], "two who wait", look, trigger.deadline_seconds)
        first.commit()
    for each in setting_up:
        each.result(trigger.deadline_seconds, "the change table")
    assert trigger.capture().inspect_coverage(both).satisfied


def test_where_polling_goes_on_is_not_kept_in_what_somebody_else_has_made(trigger: TriggerHarness, stranger: str) -> None:
    """In a database of its own: the schema is the same for all captures."""
    table = "CREATE TABLE penstock.polling (name text PRIMARY KEY, position pg_lsn, state text, confirmed_at timestamptz)"
    trigger.database.execute("DROP SCHEMA IF EXISTS penstock CASCADE")
    as_role(trigger, stranger, "CREATE SCHEMA penstock", table, *(each.format(s="penstock", t="polling") for each in PLANTED))
    with connect(trigger.settings.address) as connection:
        resume = ResumeTable(connection, "x")
        for attempt in (resume.load_mark, lambda: resume.begin_mark(Position.of(1), "")):
            with pytest.raises(PrivilegeError, match="somebody else has put there"):
                attempt()
        trigger.database.execute("DROP TABLE penstock.polling CASCADE")
        with pytest.raises(PrivilegeError, match="belongs to"):
            resume.begin_mark(Position.of(1), "")
        trigger.database.execute("DROP SCHEMA penstock CASCADE")
        resume.begin_mark(Position.of(1), "")
        assert resume.load_mark() == (Position.of(1), "")
        trigger.database.execute("DROP SCHEMA penstock CASCADE")
