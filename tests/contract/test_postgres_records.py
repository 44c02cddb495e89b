"""`PostgresRecordSource` and its parts pass the record suites on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo
from typing_extensions import override

from penstock.contracts.capture import Delete, Event, Upsert
from penstock.contracts.records import CdcIterator, Operation, RecordPosition, RecordSource, Snapshotter
from penstock.errors import (
    ConfigError,
    ConnectionLostError,
    InvalidUrlError,
    PublicationError,
    RecordGoneError,
    RecordNotFoundError,
    SnapshotInterruptedError,
    TableError,
)
from penstock.position import Position
from penstock.postgres import chunks
from penstock.postgres.connection import Connection
from penstock.postgres.copy_text import read_texts
from penstock.records.builder import ChangePlace, RecordBuilder
from penstock.records.reader import CaptureSnapshotter
from penstock.records.source import PostgresRecordSource
from penstock.records.stream import AckLedger, RecordBuffer, RecordStream
from penstock.testing.record_source_conformance import RecordSourceConformance
from penstock.testing.records_conformance import (
    CdcIteratorConformance,
    Config,
    IteratorHarness,
    RecordHarness,
    SnapshotterConformance,
    SnapshotterHarness,
    opened,
    raises,
    read,
    read_on,
    read_through,
    start,
    upsert,
)
from penstock.testing.streams import wait_for
from tests.support.contract.wal_harness import WalHarness


class PostgresSnapshotterHarness(SnapshotterHarness):
    def __init__(self, wal: WalHarness) -> None:
        self.wal = wal
        self.table = wal.table
        # A publication says which columns there are.
        wal.capture().ensure_coverage({wal.table}, manage=True)
        wait_for(
            lambda: wal.open_resources() == ([], []),
            "nothing open",
            wal.open_resources,
            self.deadline_seconds,
        )

    @override
    def commit(self, *events: Event) -> None:
        self.wal.commit(*events)

    @override
    def open_resources(self) -> object:
        return self.wal.open_resources()

    @override
    def snapshotter(self) -> Snapshotter:
        return CaptureSnapshotter(self.wal.capture(), RecordBuilder(self.table))


class BufferHarness(IteratorHarness):
    capacity = 8

    @override
    def iterator(self) -> CdcIterator:
        return RecordBuffer(self.capacity)


class PostgresRecordHarness(RecordHarness):
    def __init__(self, wal: WalHarness) -> None:
        self.wal = wal
        self.table = wal.table

    @override
    def commit(self, *events: Event) -> None:
        self.wal.commit(*events)

    @override
    def open_resources(self) -> object:
        return self.wal.open_resources()

    @override
    def source(self) -> RecordSource:
        return PostgresRecordSource()

    @override
    def config(self) -> Config:
        settings = self.wal.settings
        return {
            "url": self.wal.database.dsn,
            "table": str(self.table),
            "slot": settings.slot,
            "publication": settings.publication,
            "spool": str(settings.spool),
            "quietSeconds": "0.1",
            "waitSeconds": "0.3",
        }

    @override
    def config_without_table(self) -> Config:
        return {**self.config(), "table": ""}

    @override
    def config_without_address(self) -> Config:
        return {**self.config(), "url": "not an address"}

    @override
    def config_of_nobody(self) -> Config:
        return {**self.config(), "url": "postgresql://no_such_role@127.0.0.1:1/nowhere"}


class TestPostgresSnapshotter(SnapshotterConformance):
    @pytest.fixture
    def harness(self, wal: WalHarness) -> PostgresSnapshotterHarness:
        return PostgresSnapshotterHarness(wal)


class TestRecordBuffer(CdcIteratorConformance):
    @pytest.fixture
    def harness(self) -> BufferHarness:
        return BufferHarness()


class TestPostgresRecordSource(RecordSourceConformance):
    @pytest.fixture
    def harness(self, wal: WalHarness) -> PostgresRecordHarness:
        return PostgresRecordHarness(wal)


@pytest.fixture
def records(wal: WalHarness) -> PostgresRecordHarness:
    return PostgresRecordHarness(wal)


# --- the snapshot -------------------------------------------------------------------------------------------


def test_snapshotter_uses_a_read_only_transaction_and_blocks_no_writer(
    wal: WalHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = PostgresSnapshotterHarness(wal)
    harness.insert(*range(5))
    refused = []

    def write_and_read(
        connection: Connection, statement: str, columns: int
    ) -> Iterator[list[pa.StringArray]]:
        """The privileges of another session's transaction cannot be queried."""
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction) as raised, connection.transaction():
            connection.execute(f"DELETE FROM {wal.table}".encode())
        refused.append(raised.value)
        return read_texts(connection, statement, columns)

    monkeypatch.setattr(chunks, "read_texts", write_and_read)
    snapshotter = harness.snapshotter()
    assert len(refused) == 1
    modes = """
        SELECT DISTINCT l.mode FROM pg_locks l JOIN pg_stat_activity a USING (pid)
        WHERE a.application_name LIKE 'penstock snapshot %%' AND l.relation = %s::regclass
    """
    assert wal.database.query(modes, str(wal.table)) == [("AccessShareLock",)]
    wal.database.execute(f"UPDATE {wal.table} SET note = 'written later'")
    assert {(record.payload or {})["note"] for record in read_through(snapshotter)} == {
        f"note {key}" for key in range(5)
    }
    snapshotter.teardown()


def test_snapshot_that_was_lost_never_seems_complete(wal: WalHarness) -> None:
    harness = PostgresSnapshotterHarness(wal)
    harness.insert(*range(3))
    snapshotter = harness.snapshotter()
    end_snapshot_readers(wal)
    for _ in range(2):
        raises(ConnectionLostError, lambda: read_through(snapshotter))
    raises(SnapshotInterruptedError, snapshotter.teardown)


def test_source_starts_again_after_a_lost_snapshot(records: PostgresRecordHarness) -> None:
    records.insert(1, 2)
    with opened(records) as source:
        first = read(records, source, None)
        end_snapshot_readers(records.wal)
        raises(ConnectionLostError, lambda: source.read(first.position))
        raises(SnapshotInterruptedError, lambda: source.read(first.position))
        records.insert(3)
        assert {record.key["id"] for record in read_on(records, source, None, 3)} == {1, 2, 3}


def end_snapshot_readers(wal: WalHarness) -> None:
    readers = (
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
        "WHERE datname = %s AND application_name LIKE 'penstock snapshot %%'"
    )
    assert wal.database.query(readers, wal.database.name) == [(True,)]


# --- changes ------------------------------------------------------------------------------------------------


def test_changes_are_pushed_into_the_buffer_without_a_request(wal: WalHarness, tmp_path: Path) -> None:
    live = wal.capture().live()
    wal.commit(Upsert(wal.table, {"id": 1}, {"id": 1, "note": "x"}))
    stream = RecordStream(live, RecordBuilder(wal.table), AckLedger(tmp_path), ChangePlace(Position.ZERO))
    try:
        wait_for(stream.buffer.has_next, "a record in the buffer", lambda: "none yet", wal.deadline_seconds)
        assert stream.buffer.next().key["id"] == 1
    finally:
        stream.close()


def test_slot_moves_with_acknowledgements_only(records: PostgresRecordHarness) -> None:
    wal = records.wal
    with opened(records) as source:
        position = start(records, source)
        records.insert(1, 2)
        records.insert(3)
        first, second, third = read_on(records, source, position, 3)
        before = wal.confirmed
        source.ack(first.position)
        commits = [Position.parse(record.position.text.partition(":")[0]) for record in (second, third)]
        source.ack(second.position)
        read_until_confirmed(records, source, third.position, commits[0])
        assert before < commits[0] <= wal.confirmed < commits[1]
        source.ack(third.position)
        read_until_confirmed(records, source, third.position, commits[1])


def read_until_confirmed(
    records: PostgresRecordHarness, source: RecordSource, position: RecordPosition, goal: Position
) -> None:
    """An idle program polls repeatedly and receives nothing."""

    def is_confirmed() -> bool:
        raises(RecordNotFoundError, lambda: source.read(position))
        return records.wal.confirmed >= goal

    wait_for(is_confirmed, f"the slot at {goal}", lambda: records.wal.confirmed, records.deadline_seconds)


def test_transaction_that_is_acknowledged_in_part_is_gone_on_with_in_its_middle(
    records: PostgresRecordHarness,
) -> None:
    with opened(records) as source:
        position = start(records, source)
        records.insert(*range(5))
        changes = read_on(records, source, position, 3)
        source.ack(changes[1].position)
    with opened(records) as source:
        raises(RecordGoneError, lambda: source.read(changes[0].position))
        again = read_on(records, source, changes[1].position, 3)
    assert again[0] == changes[2]
    assert [record.key["id"] for record in again] == [2, 3, 4]


def test_other_tables_of_the_publication_are_passed_over_and_hold_nothing(
    records: PostgresRecordHarness,
) -> None:
    wal = records.wal
    wal.capture().ensure_coverage({wal.table, wal.other}, manage=True)
    with opened(records) as source:
        position = start(records, source)
        source.ack(position)
        wal.commit(*(Upsert(wal.other, {"id": key}, {"id": key, "note": "x"}) for key in range(5)))
        here = Position.parse(wal.database.query("SELECT pg_current_wal_lsn()::text")[0][0])
        read_until_confirmed(records, source, position, here)
        records.insert(1)
        assert read(records, source, position).key["id"] == 1


def test_position_of_a_server_that_was_set_back_is_refused(records: PostgresRecordHarness) -> None:
    with opened(records) as source:
        start(records, source)
        for text in ("FFFF/0:1", "FFFF/0"):
            beyond = RecordPosition(text)
            raises(RecordGoneError, partial(source.read, beyond))
            raises(RecordGoneError, partial(source.ack, beyond))


def test_unchanged_values_and_moved_keys_are_in_the_metadata(records: PostgresRecordHarness) -> None:
    database = records.wal.database
    database.execute(f"ALTER TABLE {records.table} ALTER note SET STORAGE EXTERNAL")
    with opened(records) as source:
        position = start(records, source)
        records.commit(upsert(records, 1, "x" * 5000))
        database.execute(f"UPDATE {records.table} SET id = 2 WHERE id = 1")
        _, moved, deleted = read_on(records, source, position, 3)
    assert (dict(moved.key), dict(moved.payload or {})) == ({"id": 2}, {"id": 2})
    assert (moved.metadata["unchanged"], moved.metadata["moved_from"]) == (["note"], {"id": 1})
    assert (deleted.operation, dict(deleted.key)) == (Operation.DELETE, {"id": 1})


@pytest.mark.parametrize("key", [", PRIMARY KEY (word, number)", ""], ids=["composite", "none"])
def test_keys_of_any_kind_and_tables_of_any_schema_are_read(records: PostgresRecordHarness, key: str) -> None:
    database = records.wal.database
    table = '"odd. schema"."The Table"'
    database.execute('DROP SCHEMA IF EXISTS "odd. schema" CASCADE; CREATE SCHEMA "odd. schema"')
    database.execute(f"CREATE TABLE {table} (word text, number int, note text {key})")
    database.execute(f"ALTER TABLE {table} REPLICA IDENTITY {'DEFAULT' if key else 'FULL'}")
    database.execute(f"INSERT INTO {table} VALUES ('', -1, 'x')")
    with opened_with(records, table=table) as source:
        row = read(records, source, None)
        database.execute(f"UPDATE {table} SET note = 'y'; DELETE FROM {table}")
        changes = read_on(records, source, row.position, 2 if key else 3)
    expected = {"word": "", "number": -1} if key else {"word": "", "number": -1, "note": "y"}
    assert str(row.table) == table
    assert (row.payload, dict(changes[-1].key)) == ({"word": "", "number": -1, "note": "x"}, expected)


# --- settings ---


def test_columns_are_the_requested_ones(records: PostgresRecordHarness) -> None:
    records.insert(1)
    with records.source() as source:
        source.open({**records.config(), "columns": "note"})
        row = read(records, source, None)
        records.commit(Delete(records.table, {"id": 1}))
        assert (dict(row.key), row.payload) == ({"id": 1}, {"note": "note 1"})
        assert dict(read(records, source, row.position).key) == {"id": 1}
    records.insert(2)
    with opened_with(records, columns="note, nothing") as source:
        raises(ConfigError, lambda: source.read(None))


def test_without_a_snapshot_changes_alone_are_read(records: PostgresRecordHarness) -> None:
    records.insert(1)
    with opened_with(records, snapshot="never") as source:
        records.insert(2)
        records.insert(3)
        changes = read_on(records, source, None, 2)
        assert [(record.operation, record.key["id"]) for record in changes] == [
            (Operation.UPSERT, 2),
            (Operation.UPSERT, 3),
        ]
        source.ack(changes[0].position)
    with opened_with(records, snapshot="never") as source:
        assert read(records, source, None) == changes[1]


def test_missing_or_unpublishable_table_is_named_by_open(records: PostgresRecordHarness) -> None:
    with pytest.raises((TableError, PublicationError), match="nothing_here"):
        records.source().open({**records.config(), "table": "public.nothing_here"})
    assert not records.wal.has_slot


def test_acknowledged_position_is_known_although_the_slot_is_ahead(records: PostgresRecordHarness) -> None:
    with opened(records) as source:
        position = start(records, source)
        records.insert(1)
        change = read(records, source, position)
        source.ack(change.position)
        records.wal.commit_elsewhere()
        here = Position.parse(records.wal.database.query("SELECT pg_current_wal_lsn()::text")[0][0])
        read_until_confirmed(records, source, change.position, here)
    with opened(records) as source:
        raises(RecordGoneError, lambda: source.read(position))
        records.insert(2)
        assert read(records, source, change.position).key["id"] == 2, (
            "a position before the slot's is good if nothing was in between"
        )


def test_waiting_second_process_knows_what_the_first_acknowledged(records: PostgresRecordHarness) -> None:
    with opened(records) as early:
        position = start(records, early)
        records.insert(1)
        records.insert(2)
        first, second = read_on(records, early, position, 2)
        with opened(records) as late:
            early.ack(second.position)
            early.teardown()
            records.insert(3)
            raises(RecordGoneError, lambda: read(records, late, first.position))
            assert read(records, late, second.position).key["id"] == 3


def test_missing_database_is_an_address_error(records: PostgresRecordHarness) -> None:
    elsewhere = make_conninfo(records.config()["url"], dbname="no_such_database")
    error = raises(InvalidUrlError, lambda: records.source().open({**records.config(), "url": elsewhere}))
    assert "no_such_database" in error.message
    assert error.hint


def opened_with(records: PostgresRecordHarness, **options: str) -> RecordSource:
    source = records.source()
    source.open({**records.config(), **options})
    return source
