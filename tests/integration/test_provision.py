"""Publication, slot and snapshot, against a real server."""

from __future__ import annotations

import threading

import pytest

from penstock.capture.provision import ensure_capture
from penstock.errors import (
    AuthenticationError,
    ConnectionLostError,
    PrivilegeError,
    PublicationError,
    SlotBusyError,
    SlotForeignError,
)
from penstock.position import Position
from penstock.postgres.catalog import inspect_schema, inspect_tables
from penstock.postgres.chunks import plan_chunks, probe_chunks, read_chunk
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.slot import check_idle, check_slot, current_position, inspect_slot
from penstock.postgres.snapshot_export import export_snapshot
from penstock.schema import TableName
from penstock.secret import Secret
from tests.support.fix_postgres import Database

ORDERS = TableName("public", "orders")
ITEMS = TableName("public", "items")


@pytest.fixture
def address(database: Database) -> SourceAddress:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, v text); CREATE TABLE items (id int PRIMARY KEY)"
    )
    return SourceAddress.parse(database.dsn)


def _slot_name(database: Database) -> str:
    return f"slot_{database.name}"


def test_missing_objects_are_created_and_existing_ones_kept(
    database: Database, address: SourceAddress
) -> None:
    slot = _slot_name(database)
    first, added = ensure_capture(address, slot, "pub", [ORDERS])
    assert first.confirmed > Position.ZERO
    assert added == [ORDERS]
    again, added = ensure_capture(address, slot, "pub", [ORDERS])
    assert again.confirmed == first.confirmed
    assert added == []
    _, added = ensure_capture(address, slot, "pub", [ORDERS, ITEMS])
    assert added == [ITEMS]
    published = database.query(
        "SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname = 'pub' ORDER BY 2"
    )
    assert published == [("public", "items"), ("public", "orders")]


def test_the_publication_exists_before_the_slot(
    database: Database, address: SourceAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pgoutput uses the catalog as of the change: a slot created first would fail on older changes."""
    seen: list[int] = []

    def look(*_: object, **__: object) -> None:
        seen.append(database.query("SELECT count(*) FROM pg_publication WHERE pubname = 'pub'")[0][0])
        raise _StopError

    monkeypatch.setattr("penstock.capture.provision.ensure_slot", look)
    with pytest.raises(_StopError):
        ensure_capture(address, _slot_name(database), "pub", [ORDERS])
    assert seen == [1]


class _StopError(Exception):
    pass


def test_a_slot_of_another_plugin_is_refused(database: Database, address: SourceAddress) -> None:
    """L09."""
    slot = _slot_name(database)
    database.query(
        "SELECT pg_create_logical_replication_slot(%s, 'test_decoding')", slot
    ) if _has_test_decoding(database) else (
        database.query("SELECT pg_create_physical_replication_slot(%s, true)", slot)
    )
    try:
        with pytest.raises(SlotForeignError) as caught:
            ensure_capture(address, slot, "pub", [ORDERS])
        assert "source.slot" in (caught.value.hint or "")
    finally:
        database.query("SELECT pg_drop_replication_slot(%s)", slot)


def _has_test_decoding(database: Database) -> bool:
    import psycopg

    try:
        database.query("SELECT pg_create_logical_replication_slot('probe_decoding', 'test_decoding', true)")
    except psycopg.errors.UndefinedFile:
        return False
    return True


def test_a_slot_of_another_database_is_refused(database: Database, address: SourceAddress) -> None:
    slot, _ = ensure_capture(address, _slot_name(database), "pub", [ORDERS])
    with pytest.raises(SlotForeignError):
        check_slot(slot, "another")


def test_a_slot_that_is_being_read_names_the_process(database: Database, address: SourceAddress) -> None:
    """L08."""
    from penstock.postgres.replication import ReplicationStream, StreamRequest

    slot = _slot_name(database)
    ensure_capture(address, slot, "pub", [ORDERS])
    stream = ReplicationStream(address, StreamRequest(slot, "pub", Position.ZERO))
    stream.open()
    stream.start()
    try:
        with connect(address) as connection:
            found = inspect_slot(connection, slot)
        assert found is not None
        assert found.active_pid is not None
        with pytest.raises(SlotBusyError, match=str(found.active_pid)):
            check_idle(found)
    finally:
        stream.close()


def test_a_snapshot_is_exact_at_its_fence(database: Database, address: SourceAddress) -> None:
    database.execute("INSERT INTO orders SELECT g, 'before' FROM generate_series(1, 1000) g")
    with connect(address) as connection:
        before = current_position(connection)
    with export_snapshot(address) as exported:
        assert exported.fence >= before
        database.execute("UPDATE orders SET v = 'after'; INSERT INTO orders VALUES (0, 'after')")
        with connect(address) as connection:
            table = next(table for table in inspect_tables(connection) if table.name == ORDERS)
            schema = inspect_schema(connection, table)
            chunks = plan_chunks(connection, table, schema, 8192, None)
        assert len(chunks) > 3
        values = [
            value
            for chunk in chunks
            for batch in read_chunk(address, exported.name, chunk)
            for value in batch.column("v").to_pylist()
        ]
        assert values == ["before"] * 1000


def test_a_snapshot_waits_for_open_transactions_instead_of_missing_them(
    database: Database, address: SourceAddress
) -> None:
    """N02."""
    held = database.connect()
    held.execute("INSERT INTO orders VALUES (7, 'open')")
    timer = threading.Timer(1.0, held.commit)
    timer.start()
    with export_snapshot(address) as exported, connect(address) as connection:
        table = next(table for table in inspect_tables(connection) if table.name == ORDERS)
        chunks = plan_chunks(connection, table, inspect_schema(connection, table), 8192, None)
        rows = [
            row
            for chunk in chunks
            for batch in read_chunk(address, exported.name, chunk)
            for row in batch.column("id").to_pylist()
        ]
    timer.join()
    held.close()
    assert rows == [7]


@pytest.mark.parametrize("statement", ["VACUUM FULL orders", "TRUNCATE orders"])
def test_a_rewrite_while_chunks_are_read_is_noticed(
    database: Database, address: SourceAddress, statement: str
) -> None:
    from penstock.errors import SnapshotLostError

    database.execute("INSERT INTO orders SELECT g, repeat('x', 100) FROM generate_series(1, 1000) g")
    with export_snapshot(address) as exported, connect(address) as connection:
        table = next(table for table in inspect_tables(connection) if table.name == ORDERS)
        chunks = plan_chunks(connection, table, inspect_schema(connection, table), 8192, None)
        list(read_chunk(address, exported.name, chunks[0]))
        database.execute(statement)
        with pytest.raises(SnapshotLostError):
            list(read_chunk(address, exported.name, chunks[1]))


def test_a_rewrite_between_the_snapshot_and_the_plan_is_noticed(
    database: Database, address: SourceAddress
) -> None:
    """ALTER TABLE keeps no old row versions: under an older snapshot the rewritten table looks empty."""
    from penstock.errors import SnapshotLostError

    database.execute("INSERT INTO orders SELECT g, 'x' FROM generate_series(1, 100) g")
    with export_snapshot(address) as exported, connect(address) as connection:
        database.execute("ALTER TABLE orders ALTER id TYPE bigint")
        table = next(table for table in inspect_tables(connection) if table.name == ORDERS)
        chunks = plan_chunks(connection, table, inspect_schema(connection, table), 8192, None)
        with pytest.raises(SnapshotLostError):
            list(read_chunk(address, exported.name, chunks[0]))


def test_a_probe_continues_after_an_unreadable_table(database: Database, address: SourceAddress) -> None:
    with export_snapshot(address) as exported, connect(address) as connection:
        chunks = [
            chunk
            for table in inspect_tables(connection)
            for chunk in plan_chunks(connection, table, inspect_schema(connection, table), 8192, None)
        ]
        assert [chunk.heap for chunk in chunks] == [ITEMS, ORDERS]
        assert probe_chunks(address, exported.name, chunks) == {}
        database.execute("TRUNCATE items")
        assert probe_chunks(address, exported.name, chunks).keys() == {ITEMS}
    assert probe_chunks(address, exported.name, chunks).keys() == {ITEMS}, (
        "nothing can be read once the snapshot is released"
    )


def test_included_columns_are_no_part_of_the_key(database: Database, address: SourceAddress) -> None:
    database.execute("CREATE TABLE covered (v text, b int, a int, PRIMARY KEY (a, b) INCLUDE (v))")
    with connect(address) as connection:
        table = next(table for table in inspect_tables(connection) if table.name.name == "covered")
        assert inspect_schema(connection, table).key == ("b", "a")


def test_a_publication_that_leaves_changes_out_is_refused(database: Database, address: SourceAddress) -> None:
    """P03."""
    database.execute("CREATE PUBLICATION pub FOR TABLE orders WITH (publish = 'insert')")
    with pytest.raises(PublicationError) as caught:
        ensure_capture(address, _slot_name(database), "pub", [ORDERS])
    database.execute(caught.value.hint or "")
    ensure_capture(address, _slot_name(database), "pub", [ORDERS])


@pytest.mark.parametrize("change", ["no_such_role@", "/no_such_database"])
def test_errors_that_a_retry_cannot_fix_are_not_called_a_lost_connection(
    database: Database, address: SourceAddress, change: str
) -> None:
    """C02."""
    dsn = (
        database.dsn.replace("postgres@", change)
        if "@" in change
        else database.dsn.replace(f"/{database.name}", change)
    )
    with pytest.raises(AuthenticationError), connect(SourceAddress.parse(dsn)):
        pass


def test_error_for_a_role_without_the_replication_right_says_so(
    database: Database, address: SourceAddress
) -> None:
    """C04."""
    role = f"plain_{database.name}"
    database.execute(f"CREATE ROLE {role} LOGIN")
    try:
        plain = SourceAddress.parse(database.dsn.replace("postgres@", f"{role}@"))
        with pytest.raises((PrivilegeError, AuthenticationError)):
            ensure_capture(plain, _slot_name(database), "pub", [ORDERS])
    finally:
        database.execute(f"DROP ROLE {role}")


def test_an_unreachable_server_is_a_separate_error_without_the_password() -> None:
    nowhere = SourceAddress.parse("postgresql://cdc@127.0.0.1:1/db?connect_timeout=2", Secret("hunter2"))
    with pytest.raises(ConnectionLostError) as caught, connect(nowhere):
        pass
    assert "hunter2" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)
