"""Row values of a `TriggerCapture`: the same as in a snapshot, from every kind of session and after schema
changes.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from penstock.capture.trigger.capture import TriggerCapture
from penstock.contracts.capture import Change, ChangeStream, Delete, Event, Truncate, Upsert
from penstock.errors import UnreadableTextError, UnrepresentableError
from penstock.postgres.types.column import TypePolicy
from penstock.schema import TableName
from penstock.testing.streams import take
from tests.support.contract.trigger_harness import TriggerHarness

LONG = "x" * 100_000

UNHELPFUL = (
    "SET bytea_output = 'escape'",
    "SET DateStyle = 'German'",
    "SET IntervalStyle = 'postgres_verbose'",
    "SET TimeZone = 'Asia/Kolkata'",
    "SET extra_float_digits = -15",
    "SET search_path = public",
)

TYPED = {
    "flag": ("boolean", "true"),
    "number": ("numeric", "12345678901234567890.123456789"),
    "price": ("numeric(10,2)", "-0.05"),
    "ratio": ("double precision", "0.1::float8 + 0.2"),
    "small": ("real", "1e-45"),
    "octets": ("bytea", r"'\x00ff5c22'"),
    "day": ("date", "'2024-02-29'"),
    "at": ("timestamptz", "'2024-02-29 12:00:00.5+05:30'"),
    "local": ("timestamp", "'infinity'"),
    "span": ("interval", "'1 year -2 days 03:04:05.6'"),
    "odd": ("text", "E'a\\tb\\n\"c\" \\\\ (d), {e}'"),
    "empty": ("text", "''"),
    "nothing": ("text", "NULL"),
    "json": ("jsonb", """'{"a": [1, "b \\"c\\""]}'"""),
    "numbers": ("int[]", "'[0:1]={1,NULL}'"),
    "texts": ("text[]", """ARRAY['a,b', NULL, '', 'c"d', 'NULL']"""),
    "bits": ("bit varying", "'0101'"),
    "range": ("int4range", "'[1,5)'"),
    "money": ("money", "'1234.56'"),
    "pair": ("pair", """ROW(1, 'a "b", (c)')"""),
    "kind": ("regclass", "'pg_class'"),
    "mood": ("mood", "'not so bad'"),
}


class Values:
    """A table with the columns of the test, in a schema whose name must be quoted, and a stream that captures
    it.
    """

    def __init__(self, trigger: TriggerHarness, columns: str, capture: TriggerCapture | None = None) -> None:
        self._trigger = trigger
        self.table = TableName('Odd "schema"', trigger.table.name)
        self.sql = f'"Odd ""schema"""."{trigger.table.name}"'
        trigger.database.execute('CREATE SCHEMA IF NOT EXISTS "Odd ""schema"""')
        trigger.database.execute(
            f"CREATE TABLE {self.sql} {columns if columns.startswith('(') else f'({columns})'}"
        )
        self.capture = (capture or trigger.capture()).with_trigger_management({self.table}, manage=True)

    def changes(self, *statements: str, count: int) -> list[Change]:
        """The changes that the stream returns for these statements, each in its own transaction."""
        with closing(self.capture.live()) as stream:
            self.run(*statements)
            return take(stream, count, self._trigger.deadline_seconds)

    def events(self, *statements: str, count: int) -> list[Event]:
        return [change.event for change in self.changes(*statements, count=count)]

    def run(self, *statements: str) -> None:
        for statement in statements:
            self._trigger.database.execute(statement.replace("{t}", self.sql))

    def snapshot(self) -> list[Upsert]:
        return [
            change.event for change in self.capture.snapshot([self.table]) if isinstance(change.event, Upsert)
        ]


def test_a_value_is_the_same_by_trigger_and_by_snapshot_under_any_session_settings(
    trigger: TriggerHarness,
) -> None:
    trigger.database.execute("DROP TYPE IF EXISTS pair, mood CASCADE")
    trigger.database.execute("CREATE TYPE pair AS (a int, b text)")
    trigger.database.execute("CREATE TYPE mood AS ENUM ('not so bad')")
    columns = ", ".join(f'"{name}" {kind}' for name, (kind, _) in TYPED.items())
    values = Values(trigger, f"id int PRIMARY KEY, {columns}")
    with closing(values.capture.live()) as stream, trigger.database.connect(autocommit=True) as session:
        for setting in UNHELPFUL:
            session.execute(setting.encode())
        literals = ", ".join(literal for _, literal in TYPED.values())
        session.execute(
            (
                f"INSERT INTO {values.sql} VALUES (1, {literals}), (2, {', '.join('NULL' for _ in TYPED)})"
            ).encode()
        )
        session.execute(f"UPDATE {values.sql} SET id = id".encode())
        events = [change.event for change in take(stream, 4, trigger.deadline_seconds)]
        settings = session.execute(
            "SELECT current_setting('DateStyle'), current_setting('TimeZone')"
        ).fetchone()
    expected = sorted(values.snapshot(), key=lambda event: str(event.key))
    assert events == [*expected, *expected]
    assert expected[0].row["span"] is not None
    assert settings == ("German, DMY", "Asia/Kolkata"), "the session's own settings are as they were"


def test_no_value_of_an_update_is_ever_missing(trigger: TriggerHarness) -> None:
    values = Values(trigger, "id int PRIMARY KEY, note text, long text")
    trigger.database.execute(f"ALTER TABLE {values.sql} ALTER long SET STORAGE EXTERNAL")
    events = values.events(
        f"INSERT INTO {{t}} VALUES (1, 'a', '{LONG}')",
        "UPDATE {t} SET note = 'b'",
        "UPDATE {t} SET id = 2",
        count=4,
    )
    table = values.table
    assert events == [
        Upsert(table, {"id": 1}, {"id": 1, "note": "a", "long": LONG}),
        Upsert(table, {"id": 1}, {"id": 1, "note": "b", "long": LONG}),
        Delete(table, {"id": 1}),
        Upsert(table, {"id": 2}, {"id": 2, "note": "b", "long": LONG}),
    ]


def test_key_change_is_a_delete_and_an_upsert(trigger: TriggerHarness) -> None:
    values = Values(trigger, "region text, number int, note text, PRIMARY KEY (region, number)")
    events = values.events(
        "INSERT INTO {t} VALUES ('', -1, 'x')", "UPDATE {t} SET region = 'n.o'", "DELETE FROM {t}", count=4
    )
    moved = Upsert(
        values.table, {"region": "n.o", "number": -1}, {"region": "n.o", "number": -1, "note": "x"}
    )
    assert events[1:] == [
        Delete(values.table, {"region": "", "number": -1}),
        moved,
        Delete(values.table, {"region": "n.o", "number": -1}),
    ]


def test_row_without_key_is_deleted_by_all_its_values(trigger: TriggerHarness) -> None:
    values = Values(trigger, "a int, b text")
    events = values.events(
        "INSERT INTO {t} VALUES (1, NULL)", "UPDATE {t} SET b = 'x'", "DELETE FROM {t}", count=4
    )
    table = values.table
    assert events == [
        Upsert(table, {}, {"a": 1, "b": None}),
        Delete(table, {"a": 1, "b": None}),
        Upsert(table, {}, {"a": 1, "b": "x"}),
        Delete(table, {"a": 1, "b": "x"}),
    ]


def test_changes_have_the_columns_of_their_time(trigger: TriggerHarness) -> None:
    values = Values(trigger, "id int PRIMARY KEY, a text, b int")
    events = values.events(
        "INSERT INTO {t} VALUES (1, 'x', 1)",
        "ALTER TABLE {t} DROP COLUMN a",
        "INSERT INTO {t} VALUES (2, 2)",
        "ALTER TABLE {t} ADD COLUMN c text DEFAULT 'new'",
        "UPDATE {t} SET b = 3 WHERE id = 1",
        "ALTER TABLE {t} RENAME COLUMN b TO d",
        "ALTER TABLE {t} ALTER COLUMN d TYPE text",
        "BEGIN; DELETE FROM {t} WHERE id = 1; ALTER TABLE {t} DROP COLUMN c; "
        "INSERT INTO {t} VALUES (3, 'x'); COMMIT",
        count=5,
    )
    table = values.table
    assert events == [
        Upsert(table, {"id": 1}, {"id": 1, "a": "x", "b": 1}),
        Upsert(table, {"id": 2}, {"id": 2, "b": 2}),
        Upsert(table, {"id": 1}, {"id": 1, "b": 3, "c": "new"}),
        Delete(table, {"id": 1}),
        Upsert(table, {"id": 3}, {"id": 3, "d": "x"}),
    ]


@pytest.mark.parametrize("altered_again", [False, True])
def test_who_began_before_a_table_was_altered_writes_rows_as_it_is_now(
    trigger: TriggerHarness, altered_again: bool
) -> None:
    """Such a transaction sees an outdated catalog."""
    values = Values(trigger, "id int PRIMARY KEY, a text")
    with closing(values.capture.live()) as stream:
        with trigger.database.connect() as session:
            session.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            session.execute(f"SELECT * FROM {trigger.other}".encode())
            values.run("ALTER TABLE {t} DROP COLUMN a, ADD COLUMN b text, ADD COLUMN c int")
            session.execute(f"INSERT INTO {values.sql} VALUES (1, 'x', 5)".encode())
        if altered_again:
            values.run("INSERT INTO {t} VALUES (2, 'y', 6)", "ALTER TABLE {t} DROP COLUMN c")
        (change, *_) = take(stream, 2 if altered_again else 1, trigger.deadline_seconds)
    assert change.event == Upsert(values.table, {"id": 1}, {"id": 1, "b": "x", "c": 5})


def test_row_of_a_table_with_unknown_columns_stops_no_other(trigger: TriggerHarness) -> None:
    values = Values(trigger, "id int PRIMARY KEY, a text")
    values.capture.live().close()
    with trigger.database.connect() as session:
        session.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        session.execute(f"SELECT * FROM {trigger.other}".encode())
        values.run("ALTER TABLE {t} DROP COLUMN a, ADD COLUMN b text")
        session.execute(f"INSERT INTO {values.sql} VALUES (1, 'x')".encode())
    values.run("ALTER TABLE {t} DROP COLUMN b")
    with closing(values.capture.live()) as stream, pytest.raises(UnreadableTextError):
        take(stream, 1, trigger.deadline_seconds)


def test_changes_have_the_key_and_the_table_name_of_their_time(trigger: TriggerHarness) -> None:
    values = Values(trigger, "id int PRIMARY KEY, other int NOT NULL")
    values.capture.live().close()
    table, renamed = values.table, replace(values.table, name=f"{values.table.name}_renamed")
    values.run(
        "INSERT INTO {t} VALUES (1, 10)",
        "UPDATE {t} SET other = 11",
        f'ALTER TABLE {{t}} DROP CONSTRAINT "{table.name}_pkey", ADD PRIMARY KEY (other)',
        "UPDATE {t} SET id = 2",
        "ALTER TABLE {t} REPLICA IDENTITY FULL",
        f'ALTER TABLE {{t}} RENAME TO "{renamed.name}"',
        f'DELETE FROM "Odd ""schema"""."{renamed.name}"',
    )
    with closing(trigger.capture().with_trigger_management(set(), manage=False).live()) as stream:
        events = [change.event for change in take(stream, 4, trigger.deadline_seconds)]
    assert events == [
        Upsert(table, {"id": 1}, {"id": 1, "other": 10}),
        Upsert(table, {"id": 1}, {"id": 1, "other": 11}),
        Upsert(table, {"other": 11}, {"id": 2, "other": 11}),
        Delete(renamed, {"other": 11}),
    ]


def test_generated_columns_are_left_out_as_in_a_snapshot(trigger: TriggerHarness) -> None:
    values = Values(trigger, "id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED, note text")
    events = values.events("INSERT INTO {t} (id, note) VALUES (1, 'x')", "DELETE FROM {t}", count=2)
    assert events == [
        Upsert(values.table, {"id": 1}, {"id": 1, "note": "x"}),
        Delete(values.table, {"id": 1}),
    ]


def test_partitions_speak_under_the_name_of_their_root(trigger: TriggerHarness) -> None:
    values = Values(trigger, "(id int, part int, note text, PRIMARY KEY (id, part)) PARTITION BY LIST (part)")
    first, second = (f'"Odd ""schema"""."{trigger.table.name}_{each}"' for each in (1, 2))
    values.run(
        f"CREATE TABLE {first} PARTITION OF {{t}} FOR VALUES IN (1)",
        f"CREATE TABLE {second} (note text, x int, id int NOT NULL, part int NOT NULL)",
    )
    # Its columns are in another order, and one is dropped.
    values.run(
        f"ALTER TABLE {second} DROP COLUMN x",
        f"ALTER TABLE {{t}} ATTACH PARTITION {second} FOR VALUES IN (2)",
    )
    events = values.events(
        "INSERT INTO {t} VALUES (1, 1, 'a'), (2, 2, 'b'), (3, 1, 'c')",
        f"INSERT INTO {second} (id, part, note) VALUES (4, 2, 'd')",
        "UPDATE {t} SET part = 2 WHERE id = 1",
        "TRUNCATE {t}",
        count=7,
    )
    table = values.table
    assert events[:4] == [
        Upsert(table, {"id": at, "part": part}, {"id": at, "part": part, "note": note})
        for at, part, note in ((1, 1, "a"), (2, 2, "b"), (3, 1, "c"), (4, 2, "d"))
    ]
    assert events[4:] == [
        Delete(table, {"id": 1, "part": 1}),
        Upsert(table, {"id": 1, "part": 2}, {"id": 1, "part": 2, "note": "a"}),
        Truncate(table),
    ]


def test_dropped_table_is_still_identified_by_its_key(trigger: TriggerHarness) -> None:
    values = Values(trigger, "id int PRIMARY KEY, note text")
    values.capture.live().close()
    values.run("INSERT INTO {t} VALUES (1, 'x')", "DROP TABLE {t}")
    with closing(trigger.capture().with_trigger_management(set(), manage=False).live()) as stream:
        (change,) = take(stream, 1, trigger.deadline_seconds)
    assert change.event == Upsert(values.table, {"id": 1}, {"id": 1, "note": "x"})


def test_name_of_a_dropped_table_is_exact(trigger: TriggerHarness) -> None:
    table = TableName("public", f'{trigger.table.name}.a "b"')
    quoted = '"' + table.name.replace('"', '""') + '"'
    trigger.database.execute(f"CREATE TABLE {quoted} (id int PRIMARY KEY)")
    capture = trigger.capture().with_trigger_management({table}, manage=True)
    capture.live().close()
    trigger.database.execute(f"INSERT INTO {quoted} VALUES (1)")
    trigger.database.execute(f"DROP TABLE {quoted}")
    with closing(trigger.capture().with_trigger_management(set(), manage=False).live()) as stream:
        (change,) = take(stream, 1, trigger.deadline_seconds)
    assert change.event == Upsert(table, {"id": 1}, {"id": 1})


def test_temporary_table_with_triggers_is_not_captured(trigger: TriggerHarness) -> None:
    with closing(trigger.capture().live()) as stream:
        with trigger.database.connect() as session:
            note = f"EXECUTE FUNCTION {trigger.settings.name}.note()"
            session.execute(
                f"CREATE TEMP TABLE {trigger.table.name} (id int PRIMARY KEY, note text)".encode()
            )
            session.execute(
                f"CREATE TRIGGER x AFTER INSERT ON pg_temp.{trigger.table.name} FOR EACH ROW {note}".encode()
            )
            session.execute(f"INSERT INTO pg_temp.{trigger.table.name} VALUES (1, 'mine')".encode())
            session.execute(f"INSERT INTO {trigger.table} VALUES (2, 'ours')".encode())
        (change,) = take(stream, 1, trigger.deadline_seconds)
    assert change.event == Upsert(trigger.table, {"id": 2}, {"id": 2, "note": "ours"})


def test_value_beyond_its_type_ends_the_stream_with_policy_error(trigger: TriggerHarness) -> None:
    strict = TriggerCapture(replace(trigger.settings, types=TypePolicy(on_unrepresentable="error")))
    values = Values(trigger, "id int PRIMARY KEY, at timestamptz", strict)
    with closing(values.capture.live()) as stream:
        values.run("INSERT INTO {t} VALUES (1, NULL)", "INSERT INTO {t} VALUES (2, 'infinity')")
        check_ends(stream, trigger)


def check_ends(stream: ChangeStream, trigger: TriggerHarness) -> None:
    (first,) = take(stream, 1, trigger.deadline_seconds)
    assert first.event.table.schema == 'Odd "schema"'
    with pytest.raises(UnrepresentableError):
        take(stream, 1, trigger.deadline_seconds)
