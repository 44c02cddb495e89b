"""Row values of a `WalCapture`: complete, and the same in snapshot and stream."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from itertools import pairwise

import pytest

from penstock.capture import slot_capture as spooling
from penstock.capture.settings import CaptureLimits
from penstock.capture.wal import WalCapture
from penstock.contracts.capture import Change, ChangeStream, Delete, Event, Truncate, Upsert
from penstock.errors import (
    NoTablesError,
    PartitionIdentityError,
    RowUnidentifiedError,
    SnapshotLostError,
    UnrepresentableError,
)
from penstock.position import Position
from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from penstock.postgres.types.column import TypePolicy
from penstock.schema import TableName
from penstock.spool.reader import SpoolReader
from penstock.testing.streams import take
from tests.support.contract.wal_harness import WalHarness

LONG = "x" * 100_000


class Values:
    """A table with the columns of the test, in a schema whose name must be quoted, and a stream that captures
    it.
    """

    def __init__(self, wal: WalHarness, columns: str) -> None:
        self._wal = wal
        self.table = TableName('Odd "schema"', wal.table.name)
        self.sql = f'"Odd ""schema"""."{wal.table.name}"'
        wal.database.execute('CREATE SCHEMA IF NOT EXISTS "Odd ""schema"""')
        wal.database.execute(f"CREATE TABLE {self.sql} ({columns})")
        self.capture: WalCapture = wal.capture().with_publication_management({self.table}, manage=True)

    def changes(self, *statements: str, count: int) -> list[Change]:
        """The changes that the stream returns for these statements, each in its own transaction."""
        with closing(self.capture.live()) as stream:
            for statement in statements:
                self._wal.database.execute(statement.replace("{t}", self.sql))
            return take(stream, count, self._wal.deadline_seconds)

    def events(self, *statements: str, count: int) -> list[Event]:
        return [change.event for change in self.changes(*statements, count=count)]

    def snapshot(self) -> list[Upsert]:
        return [
            change.event for change in self.capture.snapshot([self.table]) if isinstance(change.event, Upsert)
        ]


def test_unchanged_toast_is_named_and_not_in_the_row(wal: WalHarness) -> None:
    values = Values(wal, "id int PRIMARY KEY, note text, long text")
    wal.database.execute(f"ALTER TABLE {values.sql} ALTER long SET STORAGE EXTERNAL")
    events = values.events(
        f"INSERT INTO {{t}} VALUES (1, 'a', '{LONG}')",
        "UPDATE {t} SET note = 'b'",
        "UPDATE {t} SET long = NULL",
        count=3,
    )
    table, key = values.table, {"id": 1}
    assert events == [
        Upsert(table, key, {"id": 1, "note": "a", "long": LONG}),
        Upsert(table, key, {"id": 1, "note": "b"}, unchanged=frozenset({"long"})),
        Upsert(table, key, {"id": 1, "note": "b", "long": None}),
    ]


def test_a_type_that_was_made_and_dropped_in_one_transaction_does_not_end_the_capture(
    wal: WalHarness,
) -> None:
    values = Values(wal, "id int PRIMARY KEY")
    events = values.events(
        "BEGIN; CREATE TYPE public._vector AS ENUM ('not an array'); "
        "ALTER TABLE {t} ADD poison public._vector;"
        "INSERT INTO {t} VALUES (1, 'not an array'); ALTER TABLE {t} DROP poison; "
        "DROP TYPE public._vector; COMMIT",
        "INSERT INTO {t} VALUES (2)",
        count=2,
    )
    assert events == [
        Upsert(values.table, {"id": 1}, {"id": 1, "poison": None}, exact={"poison": "not an array"}),
        Upsert(values.table, {"id": 2}, {"id": 2}),
    ]


def test_key_change_with_unchanged_toast_precedes_the_delete_of_the_old_key(wal: WalHarness) -> None:
    values = Values(wal, "id int PRIMARY KEY, long text")
    wal.database.execute(f"ALTER TABLE {values.sql} ALTER long SET STORAGE EXTERNAL")
    changes = values.changes(
        f"INSERT INTO {{t}} VALUES (1, '{LONG}'), (5, '{LONG}')",
        "UPDATE {t} SET id = id + 1",
        # A delete, then an update that leaves a value alone, is no key change.
        "DO $$ BEGIN DELETE FROM {t} WHERE id = 2; UPDATE {t} SET id = 6 WHERE id = 6; END $$",
        count=8,
    )
    table, kept = values.table, frozenset({"long"})
    assert [change.event for change in changes[2:]] == [
        Upsert(table, {"id": 2}, {"id": 2}, kept, moved_from={"id": 1}),
        Delete(table, {"id": 1}),
        Upsert(table, {"id": 6}, {"id": 6}, kept, moved_from={"id": 5}),
        Delete(table, {"id": 5}),
        Delete(table, {"id": 2}),
        Upsert(table, {"id": 6}, {"id": 6}, kept),
    ]
    places = [
        (change.commit.position, change.commit.ordinal)
        for change in changes
        if change.commit and change.commit.ordinal is not None
    ]
    assert len(places) == 8
    assert all(one < other for one, other in pairwise(places))


def test_key_change_is_a_delete_and_an_upsert(wal: WalHarness) -> None:
    values = Values(wal, "region text, number int, note text, PRIMARY KEY (region, number)")
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


def test_row_without_key_is_deleted_by_all_its_values(wal: WalHarness) -> None:
    values = Values(wal, "a int, b text")
    wal.database.execute(f"ALTER TABLE {values.sql} REPLICA IDENTITY FULL")
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


def test_value_beyond_its_type_is_text_in_exact_and_in_the_key(wal: WalHarness) -> None:
    values = Values(wal, "at timestamptz PRIMARY KEY, day date, note text")
    events = values.events(
        "INSERT INTO {t} VALUES ('infinity', '20000-01-01', 'x'), ('-infinity', NULL, 'y')",
        "INSERT INTO {t} VALUES ('2024-02-29 12:00:00.5+01', '2024-02-29', 'z')",
        "DELETE FROM {t} WHERE note = 'x'",
        count=4,
    )
    table, at = values.table, datetime(2024, 2, 29, 11, 0, 0, 500_000, UTC)
    assert events == [
        Upsert(
            table,
            {"at": "infinity"},
            {"at": None, "day": None, "note": "x"},
            exact={"at": "infinity", "day": "20000-01-01"},
        ),
        Upsert(table, {"at": "-infinity"}, {"at": None, "day": None, "note": "y"}, exact={"at": "-infinity"}),
        Upsert(table, {"at": at}, {"at": at, "day": date(2024, 2, 29), "note": "z"}),
        Delete(table, {"at": "infinity"}),
    ]


def test_value_is_the_same_by_both_roads(wal: WalHarness) -> None:
    values = Values(
        wal,
        "id int PRIMARY KEY, n numeric(10, 2), f float8, b bytea, t timestamptz, d date, j jsonb, u uuid, "
        "q numeric, c char(5)",
    )
    numbers, times = "1.5, 'NaN', '\\xDEADBEEF'", "'2024-02-29 12:00:00+00', '0001-01-01'"
    others = "'{\"a\": [1]}', '00000000-0000-0000-0000-000000000001', 1e300, 'x'"
    live = values.events(
        f"INSERT INTO {{t}} VALUES (0, {numbers}, {times}, {others}), (1{', NULL' * 9})", count=2
    )
    snapshot = sorted(values.snapshot(), key=lambda event: str(event.key))
    assert repr(live) == repr(snapshot)  # NaN is not equal to itself
    assert live[0].row["n"] == Decimal("1.50")  # type: ignore[union-attr]
    assert live[0].row["b"] == b"\xde\xad\xbe\xef"  # type: ignore[union-attr]


def test_changes_of_a_long_transaction_come_in_order_among_its_tables(
    wal: WalHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is spooled in pieces before it commits: the commit is known from the manifest alone."""
    monkeypatch.setattr(spooling, "PgOutputDecoder", partial(PgOutputDecoder, max_open_messages=1000))
    rows = 12_000
    with closing(wal.capture().live()) as stream:
        block = (
            f"FOR i IN 1..{rows} LOOP INSERT INTO {wal.table} VALUES (i); "
            f"INSERT INTO {wal.other} VALUES (i); END LOOP"
        )
        wal.database.execute(f"DO $$ BEGIN {block}; END $$; ")
        changes = take(stream, 2 * rows, wal.deadline_seconds)
    assert [
        (change.event.table, change.event.key["id"]) for change in changes if isinstance(change.event, Upsert)
    ] == [(table, each) for each in range(1, rows + 1) for table in (wal.table, wal.other)]
    pieces = [
        file
        for segment in SpoolReader(wal.settings.spool).segments()
        for file in segment.files
        if file.commit_version is not None
    ]
    assert pieces
    assert len({change.commit.position for change in changes if change.commit is not None}) == 1
    assert all(change.commit is not None and change.commit.time is not None for change in changes)


def test_truncate_of_several_tables_is_one_event_for_each(wal: WalHarness) -> None:
    with closing(wal.capture().live()) as stream:
        wal.database.execute(f"TRUNCATE {wal.table}, {wal.other}")
        events = [change.event for change in take(stream, 2, wal.deadline_seconds)]
    assert {event.table for event in events if isinstance(event, Truncate)} == {wal.table, wal.other}


# --- snapshots ----------------------------------------------------------------------------------------------


def test_snapshot_is_of_one_moment_for_all_its_tables(wal: WalHarness) -> None:
    wal.database.execute(f"INSERT INTO {wal.table} SELECT i, 'before' FROM generate_series(1, 3000) i")
    wal.database.execute(f"INSERT INTO {wal.other} VALUES (1, 'before')")
    with closing(wal.capture().snapshot([wal.table, wal.other])) as changes:
        first = next(changes)
        wal.database.execute(
            f"UPDATE {wal.other} SET note = 'after'; INSERT INTO {wal.table} VALUES (0, 'after')"
        )
        rows = [first, *changes]
    assert len(rows) == 3001
    assert {change.event.row["note"] for change in rows if isinstance(change.event, Upsert)} == {"before"}
    assert len({change.commit for change in rows}) == 1, "the fence of the snapshot"


def test_snapshot_of_a_table_truncated_during_it_is_lost(wal: WalHarness) -> None:
    wal.database.execute(f"INSERT INTO {wal.table} VALUES (1), (2); INSERT INTO {wal.other} VALUES (1)")
    with closing(wal.capture().snapshot([wal.table, wal.other])) as changes:
        next(changes)
        next(changes)
        wal.database.execute(f"TRUNCATE {wal.other}")
        with pytest.raises(SnapshotLostError):
            next(changes)


def test_snapshot_of_a_missing_table_names_it(wal: WalHarness) -> None:
    with pytest.raises(NoTablesError, match=r"public\.nowhere"):
        next(wal.capture().snapshot([wal.table, TableName("public", "nowhere")]))


# --- what cannot be said ------------------------------------------------------------------------------------


def test_value_beyond_its_type_ends_the_stream_and_the_snapshot_where_the_policy_refuses_it(
    wal: WalHarness,
) -> None:
    strict = replace(wal.settings, types=TypePolicy(on_unrepresentable="error"))
    wal.database.execute(f"ALTER TABLE {wal.table} ADD at timestamptz")
    capture = WalCapture(strict).with_publication_management({wal.table}, manage=True)
    with closing(capture.live()) as stream:
        wal.database.execute(f"INSERT INTO {wal.table} VALUES (1, 'x', 'infinity')")
        with pytest.raises(UnrepresentableError):
            take(stream, 1, wal.deadline_seconds)
    with pytest.raises(UnrepresentableError):
        next(capture.snapshot([wal.table]))


def test_value_that_is_refused_ends_the_stream_at_its_transaction_after_all_before_it(
    wal: WalHarness,
) -> None:
    strict = replace(wal.settings, types=TypePolicy(on_unrepresentable="error"))
    wal.database.execute(f"ALTER TABLE {wal.other} ADD at timestamptz")
    capture = WalCapture(strict).with_publication_management({wal.table, wal.other}, manage=True)
    capture.live().close()
    # All changes exist before the first read, so that one refresh of the spool may return them all.
    wal.database.execute(f"INSERT INTO {wal.table} VALUES (1, 'x'), (2, 'x')")
    wal.database.execute(f"INSERT INTO {wal.other} VALUES (3, 'x', now())")
    before = wal.database.query("SELECT pg_current_wal_insert_lsn()::text")[0][0]
    wal.database.execute(
        f"BEGIN; INSERT INTO {wal.table} VALUES (4, 'x'); "
        f"INSERT INTO {wal.other} VALUES (5, 'x', 'infinity'); COMMIT"
    )
    wal.database.execute(f"INSERT INTO {wal.table} VALUES (6, 'x')")

    def read(*, confirm: bool) -> list[object]:
        seen: list[object] = []

        def follow(stream: ChangeStream) -> None:
            while True:
                (change,) = take(stream, 1, wal.deadline_seconds)
                assert isinstance(change.event, Upsert)
                seen.append(change.event.key["id"])
                if confirm:
                    change.ack.confirm()

        with (
            closing(capture.live()) as stream,
            pytest.raises(UnrepresentableError, match=f"column 'at' of {wal.other}"),
        ):
            follow(stream)
        return seen

    assert read(confirm=False) == [1, 2, 3], "whole transactions before the bad one, in every table"
    assert read(confirm=True) == [1, 2, 3], "nothing was confirmed"
    assert read(confirm=True) == [], "and now everything that can be"
    assert wal.confirmed <= Position.parse(before), "the bad transaction is still held"
    with closing(wal.capture().live()) as stream:
        changes = take(stream, 3, wal.deadline_seconds)
    assert [change.event.key["id"] for change in changes if isinstance(change.event, Upsert)] == [4, 5, 6], (
        "once the policy takes it"
    )


def test_a_delete_that_does_not_carry_the_key_ends_the_stream_after_everything_before_it(
    wal: WalHarness,
) -> None:
    values = Values(
        wal, "id int, code text NOT NULL, ts int NOT NULL, PRIMARY KEY (id, ts)) PARTITION BY RANGE (ts"
    )
    part = f'{values.sql[:-1]}_part"'
    wal.database.execute(f"CREATE UNIQUE INDEX by_code ON {values.sql} (code, ts)")
    wal.database.execute(f"ALTER TABLE {values.sql} REPLICA IDENTITY USING INDEX by_code")
    wal.database.execute(f"CREATE TABLE {part} PARTITION OF {values.sql} DEFAULT")
    wal.database.execute(
        f"CREATE PUBLICATION {wal.capture().settings.publication} FOR TABLE {values.sql} WITH "
        "(publish_via_partition_root)"
    )
    with pytest.raises(PartitionIdentityError, match="logs") as caught:
        values.capture.live()
    assert caught.value.hint
    index = wal.database.query(
        "SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = %s::regclass AND NOT indisprimary",
        part,
    )[0][0]
    wal.database.execute(f"ALTER TABLE {part} REPLICA IDENTITY USING INDEX {index.split('.', 1)[1]}")
    with closing(values.capture.live()) as stream:
        wal.database.execute(
            f"INSERT INTO {values.sql} VALUES (1, 'a', 1), (2, 'b', 2); DELETE FROM {values.sql} WHERE id = 1"
        )
        # In one transaction, so that no catalog query can observe it.
        wal.database.execute(
            f"ALTER TABLE {part} REPLICA IDENTITY DEFAULT; DELETE FROM {values.sql} WHERE id = 2; "
            f"{caught.value.hint}"
        )
        events = [change.event for change in take(stream, 3, wal.deadline_seconds)]
        assert events[-1] == Delete(values.table, {"code": "a", "ts": 1})
        with pytest.raises(RowUnidentifiedError, match="does not contain the key"):
            take(stream, 1, wal.deadline_seconds)


def test_a_publication_of_inserts_streams_partitions_with_different_keys(wal: WalHarness) -> None:
    values = Values(wal, "id int, ts int NOT NULL, PRIMARY KEY (id, ts)) PARTITION BY RANGE (ts")
    part = f'{values.sql[:-1]}_part"'
    wal.database.execute(
        f"CREATE TABLE {part} PARTITION OF {values.sql} DEFAULT; CREATE UNIQUE INDEX own ON {part} (ts)"
    )
    wal.database.execute(f"ALTER TABLE {part} REPLICA IDENTITY USING INDEX own")
    options = "publish_via_partition_root, publish = 'insert'"
    wal.database.execute(
        f"CREATE PUBLICATION {wal.capture().settings.publication} FOR TABLE {values.sql} WITH ({options})"
    )
    with closing(
        WalCapture(wal.settings).with_publication_management({values.table}, manage=False).live()
    ) as stream:
        wal.database.execute(f"INSERT INTO {values.sql} VALUES (1, 1)")
        (change,) = take(stream, 1, wal.deadline_seconds)
    assert isinstance(change.event, Upsert)
    assert change.event.key == {"id": 1, "ts": 1}


def test_partitions_without_their_roots_key_stop_a_stream_of_several_tables_which_continues_after_the_fix(
    wal: WalHarness,
) -> None:
    settings = replace(wal.settings, limits=CaptureLimits(quiet_seconds=0.1, watch_seconds=0.05))
    values = Values(
        wal, "id int, code text NOT NULL, ts int NOT NULL, PRIMARY KEY (id, ts)) PARTITION BY RANGE (ts"
    )
    more = wal.table
    wal.database.execute(f"DROP TABLE {more}; CREATE TABLE {more} (id int, ts int) PARTITION BY RANGE (ts)")
    wal.database.execute(
        f"ALTER TABLE {more} REPLICA IDENTITY FULL; CREATE TABLE {more}_part PARTITION OF {more} DEFAULT"
    )
    wal.database.execute(
        f"ALTER TABLE {more}_part REPLICA IDENTITY FULL; "
        f"CREATE UNIQUE INDEX by_code_and_ts ON {values.sql} (code, ts)"
    )
    wal.database.execute(f"ALTER TABLE {values.sql} REPLICA IDENTITY USING INDEX by_code_and_ts")
    capture = WalCapture(settings).with_publication_management({values.table, more, wal.other}, manage=True)
    with closing(capture.live()) as stream:
        wal.database.execute(f"INSERT INTO {wal.other} VALUES (1, 'x')")
        (first,) = take(stream, 1, wal.deadline_seconds)
        first.ack.confirm()
        wal.database.execute(f'CREATE TABLE {values.sql[:-1]}_part" PARTITION OF {values.sql} DEFAULT')
        wal.database.execute(
            f"ALTER TABLE {more}_part ADD PRIMARY KEY (id); ALTER TABLE {more}_part REPLICA IDENTITY DEFAULT"
        )
        wal.database.execute(
            f"INSERT INTO {wal.other} VALUES (2, 'x'); INSERT INTO {values.sql} VALUES (3, 'c', 3)"
        )
        with pytest.raises(PartitionIdentityError) as caught:
            take(stream, 3, wal.deadline_seconds)
    wal.database.execute(f"INSERT INTO {wal.other} VALUES (4, 'x')")
    with pytest.raises(PartitionIdentityError) as again:
        capture.live()
    for error in (caught.value, again.value):
        assert f"table {values.table} " in error.message
        assert f"table {more} " in error.message
        assert (error.hint or "").count("REPLICA IDENTITY") == 2
    wal.database.execute(again.value.hint or "")
    wal.database.execute(f"DELETE FROM {values.sql}")
    with closing(capture.live()) as stream:
        events = [change.event for change in take(stream, 4, wal.deadline_seconds)]
    keys = [event.key for event in events if isinstance(event, Upsert | Delete)]
    assert keys == [{"id": 2}, {"code": "c", "ts": 3}, {"id": 4}, {"code": "c", "ts": 3}], (
        "all that was not confirmed, of every table"
    )
