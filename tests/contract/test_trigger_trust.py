"""A change table, function or schema that another role has planted is refused: it would run with the user's
rights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace

import pytest

from penstock.capture.polling.capture import PollingCapture
from penstock.capture.polling.settings import PollingSettings
from penstock.errors import PrivilegeError
from penstock.position import Position
from penstock.postgres.capture_triggers import Installation
from penstock.postgres.change_table import ChangeTable
from penstock.postgres.connection import connect
from penstock.postgres.polled_tables import ResumeTable
from penstock.testing.capture_conformance import upsert
from penstock.testing.streams import Background, check_same_set, take, wait_for
from tests.support.contract.trigger_harness import TriggerHarness

PLANTED = (
    "CREATE FUNCTION {s}.planted() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$",
    "CREATE TRIGGER planted BEFORE INSERT ON {s}.{t} FOR EACH ROW EXECUTE FUNCTION {s}.planted()",
)


@pytest.fixture
def stranger(trigger: TriggerHarness) -> Iterator[str]:
    name = f"{trigger.database.name}_planter"
    trigger.database.execute(
        f"CREATE ROLE {name} LOGIN; GRANT CREATE ON DATABASE {trigger.database.name} TO {name}"
    )
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
    with connect(trigger.settings.address) as connection, pytest.raises(PrivilegeError, match=words):
        ChangeTable(connection, trigger.settings.name).inspect()


def test_existing_foreign_tables_are_not_taken_over(trigger: TriggerHarness, stranger: str) -> None:
    name = trigger.settings.name
    table = f"CREATE TABLE {name}.changes (seq bigint, xid xid8, root oid, shape bigint)"
    as_role(
        trigger,
        stranger,
        f"CREATE SCHEMA {name}",
        table,
        *(each.format(s=name, t="changes") for each in PLANTED),
    )
    check_refused(trigger, "objects that others created")
    assert trigger.database.query(
        f"SELECT proname FROM pg_proc WHERE pronamespace = '{name}'::regnamespace"
    ) == [("planted",)]


def test_change_table_owned_by_another_role_is_not_used_by_a_superuser(
    trigger: TriggerHarness, stranger: str
) -> None:
    with connect(trigger.settings.address.with_parameters({"user": stranger})) as session:
        Installation(trigger.settings.name, stranger, needs_table=True, tables=()).run(session)
    check_refused(trigger, "objects that others created: schema")


def test_change_table_of_another_role_is_used_only_by_a_capture_that_trusts_it(
    trigger: TriggerHarness, stranger: str
) -> None:
    """Also for a reader that is not a superuser: the owner could run a trigger with the reader's rights."""
    reader = f"{trigger.database.name}_reader"
    trigger.database.execute(f"CREATE ROLE {reader} LOGIN")
    trigger.database.execute(
        f"ALTER TABLE {trigger.table} OWNER TO {stranger}; ALTER TABLE {trigger.other} OWNER TO {stranger}"
    )
    with connect(trigger.settings.address.with_parameters({"user": stranger})) as session:
        Installation(
            trigger.settings.name, reader, needs_table=True, tables=(trigger.table, trigger.other)
        ).run(session)
    trigger.database.execute(f"GRANT SELECT ON {trigger.table}, {trigger.other} TO {reader}")
    trigger.settings = replace(
        trigger.settings, address=trigger.settings.address.with_parameters({"user": reader})
    )
    check_refused(trigger, "objects that others created: schema")
    trigger.settings = replace(trigger.settings, address=trigger.settings.address.trusting([stranger]))
    with closing(trigger.capture().live()) as stream:
        trigger.commit(upsert(trigger.table, 1, "x"))
        check_same_set(
            take(stream, 1, trigger.deadline_seconds),
            [upsert(trigger.table, 1, "x")],
            "by a role that is trusted",
        )
    trigger.database.execute(f"DROP OWNED BY {reader} CASCADE; DROP ROLE {reader}")


def test_check_that_calls_a_function_of_another_role_does_not_make_it_superuser(
    trigger: TriggerHarness, stranger: str
) -> None:
    """The change table is complete, and would be used if a trusted role owned it."""
    name = trigger.settings.name
    with connect(trigger.settings.address.with_parameters({"user": stranger})) as session:
        Installation(name, stranger, needs_table=True, tables=()).run(session)
    escalate = (
        f"CREATE FUNCTION {name}.escalate(bigint) RETURNS boolean LANGUAGE plpgsql AS "
        f"$$ BEGIN EXECUTE 'ALTER ROLE {stranger} SUPERUSER'; RETURN true; "
        "EXCEPTION WHEN OTHERS THEN RETURN true; END $$"
    )
    planted = f"ALTER TABLE {name}.horizon ADD CHECK ({name}.escalate(position))"
    as_role(trigger, stranger, escalate, planted)
    with suppress(PrivilegeError):
        trigger.capture().live().close()
    with suppress(PrivilegeError):
        list(trigger.capture().snapshot([trigger.table]))
    assert trigger.database.query("SELECT rolsuper FROM pg_roles WHERE rolname = %s", stranger) == [(False,)]


def test_role_that_may_only_connect_does_not_hold_up_capture_by_triggers_or_polling(
    trigger: TriggerHarness, stranger: str
) -> None:
    """Earlier versions used advisory locks instead of leases."""
    name = trigger.settings.name
    taken = (
        "SELECT pg_advisory_lock(hashtextextended('penstock ' || what || %s, 0)) "
        "FROM unnest(%s::text[]) AS l (what)"
    )
    polling = PollingSettings(
        trigger.settings.address, "shop", trigger.settings.spool / "polled", (trigger.table,)
    )
    with connect(trigger.settings.address.with_parameters({"user": stranger})) as session:
        session.execute(taken, [name, ["reads ", "sequences ", "sets up "]])
        session.execute(
            "SELECT pg_advisory_lock(8099000947049456491), pg_advisory_lock(8099000, hashtext('shop'))"
        )

        def capture_both() -> None:
            with closing(trigger.capture().live()) as stream:
                trigger.commit(upsert(trigger.table, 1, "x"))
                check_same_set(take(stream, 1, 10), [upsert(trigger.table, 1, "x")], "by triggers")
            list(trigger.capture().snapshot([trigger.table]))
            with closing(PollingCapture(polling).live()) as stream:
                trigger.commit(upsert(trigger.table, 2, "y"))
                take(stream, 1, 10)
            list(PollingCapture(polling).snapshot([trigger.table]))

        Background(capture_both).result(40, "changes by both ways")


def test_change_table_of_an_earlier_version_gets_its_leases(trigger: TriggerHarness) -> None:
    trigger.capture().live().close()
    trigger.database.execute(f"DROP TABLE {trigger.settings.name}.leases")
    with closing(trigger.capture().live()) as stream:
        trigger.commit(upsert(trigger.table, 1, "x"))
        check_same_set(
            take(stream, 1, trigger.deadline_seconds), [upsert(trigger.table, 1, "x")], "with leases"
        )


def test_schema_of_another_role_is_not_used(trigger: TriggerHarness, stranger: str) -> None:
    as_role(trigger, stranger, f"CREATE SCHEMA {trigger.settings.name}")
    check_refused(trigger, "objects that others created")


@pytest.mark.parametrize(
    "planted",
    [
        PLANTED,
        ("CREATE RULE planted AS ON INSERT TO {s}.{t} DO ALSO NOTIFY planted",),
        ("ALTER TABLE {s}.{t} OWNER TO {r}",),
        ("ALTER TABLE {s}.{t} ADD CHECK (first > 0)",),
        ("CREATE INDEX planted ON {s}.{t} ((first + 1))",),
        ("ALTER TABLE {s}.{t} ENABLE ROW LEVEL SECURITY",),
        ("ALTER TABLE {s}.{t} ALTER at SET DEFAULT now()",),
        ("CREATE TABLE {s}.planted () INHERITS ({s}.{t})",),
        ("ALTER FUNCTION {s}.note() OWNER TO {r}",),
    ],
)
def test_object_added_to_a_change_table_later_is_refused(
    trigger: TriggerHarness, stranger: str, planted: tuple[str, ...]
) -> None:
    trigger.capture().live().close()
    for each in planted:
        trigger.database.execute(each.format(s=trigger.settings.name, t="commits", r=stranger))
    check_refused(trigger, "objects that others created")


def test_empty_schema_of_the_role_itself_is_built_in(trigger: TriggerHarness) -> None:
    trigger.database.execute(f"CREATE SCHEMA {trigger.settings.name}")
    with closing(trigger.capture().live()) as stream:
        trigger.commit(upsert(trigger.table, 1, "x"))
        check_same_set(
            take(stream, 1, trigger.deadline_seconds),
            [upsert(trigger.table, 1, "x")],
            "by the capture's triggers in it",
        )


def test_two_who_set_up_a_change_table_at_once_make_one(trigger: TriggerHarness) -> None:
    both = {trigger.table, trigger.other}
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    with trigger.database.connect() as first:
        first.execute(f"CREATE SCHEMA {trigger.settings.name}".encode())
        setting_up = [
            Background(lambda: trigger.capture().ensure_coverage(both, manage=True)) for _ in range(2)
        ]
        look = lambda: trigger.database.query(waiting)  # noqa: E731
        wait_for(lambda: look() == [(2,)], "two who wait", look, trigger.deadline_seconds)
        first.rollback()
    for each in setting_up:
        each.result(trigger.deadline_seconds, "the change table")
    assert trigger.capture().inspect_coverage(both).satisfied


def test_polling_position_is_not_stored_in_an_object_of_another_role(
    trigger: TriggerHarness, stranger: str
) -> None:
    """In a separate database: all captures share the schema."""
    table = (
        "CREATE TABLE penstock.polling (name text "
        "PRIMARY KEY, position pg_lsn, state text, confirmed_at timestamptz)"
    )
    trigger.database.execute("DROP SCHEMA IF EXISTS penstock CASCADE")
    as_role(
        trigger,
        stranger,
        "CREATE SCHEMA penstock",
        table,
        *(each.format(s="penstock", t="polling") for each in PLANTED),
    )
    with connect(trigger.settings.address) as connection:
        resume = ResumeTable(connection, "x")
        for attempt in (resume.load_mark, lambda: resume.begin_mark(Position.of(1), "")):
            with pytest.raises(PrivilegeError, match="objects that others created"):
                attempt()
        trigger.database.execute("DROP TABLE penstock.polling CASCADE")
        with pytest.raises(PrivilegeError, match="schema penstock of role"):
            resume.begin_mark(Position.of(1), "")
        trigger.database.execute("DROP SCHEMA penstock CASCADE")
        resume.begin_mark(Position.of(1), "")
        assert resume.load_mark() == (Position.of(1), "")
        trigger.database.execute("DROP SCHEMA penstock CASCADE")


def test_polling_positions_are_not_kept_in_tables_that_were_altered_unless_their_owner_is_trusted(
    trigger: TriggerHarness, stranger: str
) -> None:
    trigger.database.execute("DROP SCHEMA IF EXISTS penstock CASCADE")
    one, address = Position.of(1), trigger.settings.address
    with connect(address) as connection, connect(address.trusting([stranger])) as trusting:
        resume = ResumeTable(connection, "x")
        resume.begin_mark(one, "")
        attempts: Sequence[Callable[[], object]] = (
            resume.load_mark,
            resume.load_tables,
            lambda: resume.save_mark(one, ""),
            lambda: resume.save_tables({1: ""}),
            lambda: resume.held().__enter__(),
        )
        for table in ("polling", "polled_tables", "leases"):
            if table == "leases":
                with resume.held():
                    pass
                attempts = attempts[-1:]
            for added, removed in (
                (PLANTED, "DROP FUNCTION penstock.planted() CASCADE"),
                (("ALTER TABLE {s}.{t} OWNER TO {r}",), f"ALTER TABLE penstock.{table} OWNER TO postgres"),
            ):
                for each in added:
                    trigger.database.execute(each.format(s="penstock", t=table, r=stranger))
                for attempt in attempts:
                    with pytest.raises(PrivilegeError, match=f"objects that others created: .*table {table}"):
                        attempt()
                trigger.database.execute(removed)
        trigger.database.execute(
            f"ALTER SCHEMA penstock OWNER TO {stranger}; ALTER TABLE penstock.polling OWNER TO {stranger}"
        )
        with pytest.raises(PrivilegeError, match="schema penstock of role"):
            resume.load_mark()
        assert ResumeTable(trusting, "x").load_mark() == (one, "")
    trigger.database.execute("DROP SCHEMA penstock CASCADE")


def test_function_of_a_change_table_without_its_search_path_is_refused(trigger: TriggerHarness) -> None:
    """The role that changes a table could have it call functions of another schema."""
    trigger.capture().live().close()
    trigger.database.execute(f"ALTER FUNCTION {trigger.settings.name}.note() RESET search_path")
    check_refused(trigger, "function note without search_path")
