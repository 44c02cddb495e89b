"""`PostgresReferenceTable` passes the reference table suite on a real server; tests of what it adds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby, islice
from typing import Any

import pyarrow as pa
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from typing_extensions import override

from penstock.capture.settings import CaptureSettings, PollingRules
from penstock.change import ChangeType
from penstock.contracts.capture import Event, Upsert
from penstock.errors import (
    ConfigError,
    ConnectionLostError,
    ConsumerBusyError,
    SchemaChangedError,
    TableGapError,
    TableWithoutKeyError,
)
from penstock.position import Position
from penstock.reference.postgres import PostgresReferenceTable
from penstock.spool.retention import released_positions, remove_consumer, set_released
from penstock.spool.rows import read_rows
from penstock.testing.capture_conformance import upsert
from penstock.testing.reference_conformance import (
    Follower,
    ReferenceHarness,
    ReferenceTableConformance,
    following,
)
from penstock.testing.streams import wait_for
from tests.support.contract.tables_harness import shut
from tests.support.contract.wal_harness import WalHarness
from tests.support.fix_proxy import ProxyFactory, TcpProxy


class PostgresReferenceHarness(ReferenceHarness):
    deadline_seconds = 60.0
    many_rows = 12_000
    breaks = True

    def __init__(self, wal: WalHarness) -> None:
        self.wal = wal
        self.table = wal.table

    @override
    def source(self) -> PostgresReferenceTable:
        return PostgresReferenceTable(self.wal.settings, self.table)

    @override
    def commit(self, *events: Event) -> None:
        with self.wal.database.transaction():
            for are_upserts, group in groupby(events, key=lambda event: isinstance(event, Upsert)):
                if are_upserts:
                    self._upsert([event for event in group if isinstance(event, Upsert)])
                else:
                    for event in group:
                        self._take_away(event)

    def _upsert(self, events: list[Upsert]) -> None:
        statement = (
            "INSERT INTO {} SELECT * FROM unnest(%s::bigint[], %s::text[]) ON CONFLICT (id) "
            "DO UPDATE SET note = excluded.note"
        )
        self._execute(
            statement, [event.key["id"] for event in events], [event.row["note"] for event in events]
        )

    def _take_away(self, event: Event) -> None:
        key = getattr(event, "key", None)
        if key is None:
            self._execute("TRUNCATE {}")
        else:
            self._execute("DELETE FROM {} WHERE id = %s", key["id"])

    def _execute(self, statement: str, *arguments: object) -> None:
        named = sql.SQL(statement).format(sql.Identifier(self.table.schema, self.table.name)).as_string()
        self.wal.database.execute(named, *arguments)

    @override
    @contextmanager
    def broken(self) -> Iterator[None]:
        """Open sessions stay: lost connections have separate tests, below."""
        with shut(self.wal.database):
            yield

    @override
    def acknowledged(self) -> object:
        return released_positions(self.wal.settings.spool).get(self.consumer)

    @override
    def open_resources(self) -> object:
        return self.wal.open_resources()

    @property
    def consumer(self) -> str:
        return f"reference-{self.table}"


@pytest.fixture
def harness(wal: WalHarness) -> Iterator[PostgresReferenceHarness]:
    made = PostgresReferenceHarness(wal)
    yield made
    made.source().forget()


class TestPostgresReference(ReferenceTableConformance):
    @pytest.fixture
    def harness(self, wal: WalHarness, monkeypatch: pytest.MonkeyPatch) -> ReferenceHarness:
        # One check is enough: a later check during a test could fail while the server refuses connections.
        monkeypatch.setattr("penstock.reference.postgres._LOOK_SECONDS", 3600.0)
        return PostgresReferenceHarness(wal)


def test_nothing_is_acknowledged_before_it_is_confirmed(harness: PostgresReferenceHarness) -> None:
    with following(harness) as follower:
        follower.finish_snapshot()
        fence = released_positions(harness.wal.settings.spool)[harness.consumer]
        harness.commit(upsert(harness.table, 1, "x"))
        follower.follow({1: "x"})
        checkpoint = follower.source.checkpoint()
        assert released_positions(harness.wal.settings.spool)[harness.consumer] == fence, (
            "polling and checkpoints acknowledge nothing"
        )
        follower.source.confirm(checkpoint)
        assert released_positions(harness.wal.settings.spool)[harness.consumer] > fence
        wait_for(
            lambda: harness.wal.confirmed > fence,
            "a confirmed slot",
            lambda: harness.wal.confirmed,
            harness.deadline_seconds,
        )


@pytest.mark.parametrize("is_known", [True, False], ids=["consumer known", "consumer removed"])
def test_slot_does_not_move_when_a_checkpoint_is_restored(
    harness: PostgresReferenceHarness, is_known: bool
) -> None:
    spool = harness.wal.settings.spool
    with following(harness) as follower:
        follower.finish_snapshot()
        harness.commit(upsert(harness.table, 1, "x"))
        follower.follow({1: "x"})
        checkpoint = follower.source.checkpoint()
    before = harness.wal.confirmed
    if not is_known:
        remove_consumer(spool, harness.consumer)
    with following(harness, checkpoint, {1: "x"}) as follower:
        harness.commit(upsert(harness.table, 1, "y"))
        follower.follow({1: "y"})
    # The capture sends its last confirmation when the table is closed.
    assert harness.wal.confirmed == before
    position = Position.parse(checkpoint.offsets["position"])
    assert released_positions(spool)[harness.consumer] < position
    with following(harness, checkpoint, {1: "x"}) as follower:
        follower.source.confirm(checkpoint)
        follower.follow({1: "y"})
    assert harness.wal.confirmed == position


def test_position_follows_a_source_in_which_nothing_concerns_the_table(
    harness: PostgresReferenceHarness,
) -> None:
    with following(harness) as follower:
        follower.finish_snapshot()
        source = follower.source
        assert isinstance(source, PostgresReferenceTable)
        before = source.reached()
        harness.wal.commit_elsewhere()
        follower.poll_until(lambda: source.reached() > before, "a later position")
        assert source.checkpoint().offsets["position"] == str(source.reached())


def test_settled_position_is_released_by_every_other_reader(harness: PostgresReferenceHarness) -> None:
    spool = harness.wal.settings.spool
    with following(harness) as follower:
        follower.finish_snapshot()
        source = follower.source
        assert isinstance(source, PostgresReferenceTable)
        assert source.settled() == Position.ZERO, "an older transaction may still commit"
        set_released(spool, "one", Position.of(300))
        set_released(spool, "two", Position.of(200))
        assert source.settled() == Position.of(200)


def test_unchanged_values_are_named(harness: PostgresReferenceHarness) -> None:
    harness.wal.database.execute(
        f"ALTER TABLE {harness.table} ALTER note SET STORAGE EXTERNAL, ADD other int"
    )
    harness.wal.database.execute(f"INSERT INTO {harness.table} VALUES (1, %s, 1)", "x" * 10_000)
    with following(harness) as follower:
        while follower.source.poll_snapshot() is not None:
            pass
        harness.wal.database.execute(f"UPDATE {harness.table} SET other = 2")
        batches = []

        def seen() -> bool:
            batches.append(follower.source.poll_changes())
            return batches[-1] is not None

        wait_for(seen, "the update", lambda: batches, harness.deadline_seconds)
        assert batches[-1] is not None
        assert batches[-1].column("_unchanged").to_pylist() == [["note"]]


def test_another_shape_ends_it_after_all_changes_before(harness: PostgresReferenceHarness) -> None:
    with following(harness) as follower:
        follower.finish_snapshot()
        harness.commit(upsert(harness.table, 1, "before"))
        harness.wal.database.execute(f"ALTER TABLE {harness.table} ADD other int")
        harness.wal.database.execute(f"INSERT INTO {harness.table} VALUES (2, 'after', 2)")
        with pytest.raises(SchemaChangedError):
            follower.poll_until(lambda: False, "the end")
        assert follower.table == {1: "before"}
        with pytest.raises(SchemaChangedError):
            follower.source.poll_changes()


def test_table_that_left_the_publication_for_a_while_is_not_trusted(
    harness: PostgresReferenceHarness,
) -> None:
    with following(harness) as follower:
        follower.finish_snapshot()
        checkpoint = follower.source.checkpoint()
    publication = harness.wal.settings.publication
    harness.wal.database.execute(f"ALTER PUBLICATION {publication} SET TABLE {harness.wal.other}")
    harness.commit(upsert(harness.table, 1, "unseen"))
    harness.wal.database.execute(f"ALTER PUBLICATION {publication} ADD TABLE {harness.table}")
    with harness.source() as source, pytest.raises(TableGapError):
        source.restore(checkpoint)


def test_table_without_a_key_is_refused(harness: PostgresReferenceHarness) -> None:
    harness.wal.database.execute(f"ALTER TABLE {harness.table} DROP CONSTRAINT {harness.table.name}_pkey")
    with harness.source() as source, pytest.raises(TableWithoutKeyError):
        source.key()


def test_settings_without_a_log_are_refused(harness: PostgresReferenceHarness) -> None:
    settings = harness.wal.settings
    for other in (replace(settings, polling=PollingRules()), replace(settings, by_triggers=True)):
        with pytest.raises(ConfigError, match="another capture"):
            PostgresReferenceTable(other, harness.table)


def test_two_of_one_name_are_refused(
    harness: PostgresReferenceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.reference.postgres._ENDING_SECONDS", 0.1)
    with following(harness) as follower, harness.source() as second:
        follower.finish_snapshot()
        with pytest.raises(ConsumerBusyError) as raised:
            second.poll_snapshot()
    assert raised.value.hint == 'close the other reference table, or give each another name: consumer="…"'


def test_lost_snapshot_begins_again_with_a_truncate(harness: PostgresReferenceHarness) -> None:
    harness.commit(*(upsert(harness.table, each, "x" * 500) for each in range(25_000)))
    with following(harness) as follower:
        assert follower.poll_snapshot() is not None
        harness.wal.database.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
            "WHERE application_name ~ '^penstock snapshot' AND datname = %s",
            harness.wal.database.name,
        )
        harness.commit(*(upsert(harness.table, each, "y") for each in range(5)))
        with pytest.raises(Exception, match="PEN-"):
            follower.finish_snapshot()
        assert not follower.source.is_snapshot_complete(), "an error is not the end of a snapshot"
        follower.finish_snapshot()
        assert follower.kinds.count(ChangeType.TRUNCATE) == 1
        assert len(follower.table) == 25_000
        assert follower.table[0] == "y"


def test_spooled_changes_are_delivered_while_the_server_is_down(
    harness: PostgresReferenceHarness, proxy: ProxyFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.reference.postgres._LOOK_SECONDS", 0.0)
    network, harness.wal.settings = through(harness.wal.settings, proxy)
    with following(harness) as follower:
        follower.finish_snapshot()
        harness.commit(*(upsert(harness.table, each, "x") for each in range(12_000)))
        follower.poll_until(lambda: bool(follower.places), "the first rows")
        assert len(follower.places) < 12_000
        network.refuse()
        network.cut()
        follower.follow(dict.fromkeys(range(12_000), "x"))
        network.accept()


def test_range_that_was_read_in_part_is_read_again(
    harness: PostgresReferenceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_off(*arguments: Any) -> Iterator[pa.RecordBatch]:
        yield from islice(read_rows(*arguments), 1)
        raise ConnectionLostError("the disk is away")

    with following(harness) as follower:
        follower.finish_snapshot()
        harness.commit(*(upsert(harness.table, each, "x") for each in range(12_000)))
        monkeypatch.setattr("penstock.reference.postgres.read_rows", broken_off)
        with pytest.raises(ConnectionLostError):
            follower.poll_until(lambda: False, "the end")
        monkeypatch.undo()
        follower.table.clear()
        follower.places.clear()
        follower.follow(dict.fromkeys(range(12_000), "x"))
        assert len(follower.places) == 12_000


def through(settings: CaptureSettings, proxy: ProxyFactory) -> tuple[TcpProxy, CaptureSettings]:
    target = conninfo_to_dict(settings.address.dsn)
    made = proxy(str(target["host"]), int(str(target["port"])))
    return made, replace(
        settings, address=settings.address.with_parameters({"host": made.host, "port": str(made.port)})
    )


def test_forgotten_table_holds_nothing_back(harness: PostgresReferenceHarness) -> None:
    source = harness.source()
    Follower(harness, source).finish_snapshot()
    assert harness.consumer in released_positions(harness.wal.settings.spool)
    source.forget()
    assert harness.consumer not in released_positions(harness.wal.settings.spool)
