"""`PostgresConnector` passes the connector suite on a real server; tests of what it adds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from penstock.change import CHANGE_TYPE, COMMIT_VERSION, METADATA_FIELDS, ORDINAL
from penstock.connectors.postgres import PostgresConnector
from penstock.contracts.connector import Health, SourceBatch, SourceCheckpoint, SourceConnector
from penstock.errors import (
    ConfigError,
    ConnectorError,
    SchemaIncompatibleError,
    SlotMissingError,
    SpoolError,
)
from penstock.position import Position
from penstock.testing.connector_conformance import SourceConnectorConformance
from penstock.testing.connector_harness import next_batch, opened, take, until_none
from penstock.testing.streams import wait_for
from tests.support.contract.postgres_connector import (
    PostgresConnectorHarness,
    postgres_connector_harness,
    unwritable,
    wait_until_copied,
)
from tests.support.contract.tables_harness import end_connections, shut
from tests.support.fix_postgres import Database
from tests.support.registry import EmbeddedRegistry


@pytest.fixture
def harness(shared_database: Database, tmp_path: Path) -> Iterator[PostgresConnectorHarness]:
    with postgres_connector_harness(shared_database, tmp_path) as made:
        yield made


class TestPostgresConnector(SourceConnectorConformance):
    @pytest.fixture
    def harness(self, harness: PostgresConnectorHarness) -> PostgresConnectorHarness:
        return harness


# --- batches ------------------------------------------------------------------------------------------------


def apply_changes(target: dict[str, dict[int, str | None]], batch: SourceBatch) -> None:
    """Apply changes one after the other, as a mirror does."""
    rows = target.setdefault(batch.partition, {})
    for change in batch.records.to_pylist():
        match change[CHANGE_TYPE]:
            case "truncate":
                rows.clear()
            case "delete":
                rows.pop(change["id"], None)
            case _:
                rows[change["id"]] = change["note"]


def mirror_until(
    harness: PostgresConnectorHarness,
    connector: SourceConnector,
    target: dict[str, dict[int, str | None]],
    mark: int,
    max_records: int = 1000,
) -> None:
    """Apply batches until a row with this key arrives, with all tables' changes of its commit and earlier
    ones.
    """
    ready = connector.data_ready()
    assert ready is not None

    def is_level() -> bool:
        return mark in target.get(str(harness.table), {}) and set(connector.checkpoint().offsets) == {
            "stream"
        }

    while not is_level():
        if (batch := connector.poll_batch(max_records)) is not None:
            apply_changes(target, batch)
        elif not is_level():
            assert ready.wait(harness.deadline_seconds), f"the mark {mark} did not come; so far {target}"


def source_rows(harness: PostgresConnectorHarness, table: object) -> dict[int, str | None]:
    return dict(harness.database.query(f"SELECT id, note FROM {table}"))


def test_a_batch_has_the_columns_of_its_table_and_the_metadata_of_changes(
    harness: PostgresConnectorHarness,
) -> None:
    harness.add((1, "x"))
    with opened(harness) as connector:
        copied = next_batch(harness, connector)
        harness.database.execute(f"UPDATE {harness.table} SET note = 'y'")
        changed = next_batch(harness, connector)
    names = ["id", "note", *(field.name for field in METADATA_FIELDS)]
    assert copied.records.schema == changed.records.schema
    assert copied.records.schema.names == changed.records.schema.names == names
    assert (copied.partition, changed.partition) == (str(harness.table), str(harness.table))
    (row,), (change,) = copied.records.to_pylist(), changed.records.to_pylist()
    assert (row["id"], row["note"], row[CHANGE_TYPE]) == (1, "x", "snapshot")
    assert (change["id"], change["note"], change[CHANGE_TYPE]) == (1, "y", "update_postimage")
    assert change[COMMIT_VERSION] > row[COMMIT_VERSION]


def test_a_batch_has_at_most_the_requested_rows(harness: PostgresConnectorHarness) -> None:
    harness.add(*((each, "x") for each in range(10)))
    with opened(harness) as connector:
        sizes = [next_batch(harness, connector, 4).records.num_rows for _ in range(3)]
    assert sizes == [4, 4, 2]
    with opened(harness) as connector, pytest.raises(ConnectorError):
        connector.poll_batch(0)


def test_updates_deletes_key_changes_and_truncates_end_equal_to_the_source(
    harness: PostgresConnectorHarness,
) -> None:
    table, other = harness.wal.table, harness.wal.other
    both = harness.with_options({"tables": f"{table}, {other}"})
    harness.add(*((each, "x") for each in range(20)))
    target: dict[str, dict[int, str | None]] = {}
    with opened(both) as connector:
        for statement in (
            f"UPDATE {table} SET note = 'y' WHERE id % 2 = 0",
            f"INSERT INTO {other} SELECT id, note FROM {table}",
            f"UPDATE {table} SET id = id + 100 WHERE id % 5 = 0",
            f"DELETE FROM {table} WHERE id % 3 = 0",
            f"TRUNCATE {other}",
            f"INSERT INTO {other} VALUES (0, NULL), (-7, '')",
            f"INSERT INTO {table} VALUES (999, 'mark')",
        ):
            batch = connector.poll_batch(3)
            if batch is not None:
                apply_changes(target, batch)
            harness.database.execute(statement)
        mirror_until(both, connector, target, 999, 3)
    assert target == {str(each): source_rows(harness, each) for each in (table, other)}


def test_any_checkpoint_between_the_tables_of_one_transaction_is_enough(
    harness: PostgresConnectorHarness,
) -> None:
    table, other = harness.wal.table, harness.wal.other
    both = harness.with_options({"tables": f"{table}, {other}"})
    with opened(both) as connector:
        wait_for(
            lambda: not connector.poll_batch(1) and harness.wal.has_slot,
            "a slot",
            lambda: None,
            harness.deadline_seconds,
        )
        wait_until_copied(harness, connector)
        stored = connector.checkpoint()
    with harness.database.connect() as connection:
        for each in range(6):
            for name in (table, other):
                connection.execute(f"INSERT INTO {name} VALUES ({each}, 'x')".encode())
    harness.add((999, "mark"))
    seen: list[tuple[str, int, int]] = []
    while len(seen) < 13:
        with opened(both, stored) as connector:
            batch = next_batch(both, connector, 4)
            stored = SourceCheckpoint.from_json(connector.checkpoint().to_json())
        seen += [(batch.partition, row["id"], row[ORDINAL]) for row in batch.records.to_pylist()]
    assert sorted(seen) == sorted({*seen}), "no row is repeated"
    assert {(name, each) for name, each, _ in seen} == {
        (str(name), each) for name in (table, other) for each in range(6)
    } | {(str(table), 999)}


# --- snapshots ----------------------------------------------------------------------------------------------


def test_a_snapshot_that_begins_again_leaves_no_row_that_is_gone(harness: PostgresConnectorHarness) -> None:
    harness.add(*((each, "x") for each in range(6)))
    target: dict[str, dict[int, str | None]] = {}
    with opened(harness) as connector:
        apply_changes(target, next_batch(harness, connector, 4))
        stored = connector.checkpoint()
    assert len(target[str(harness.table)]) == 4
    with opened(harness, stored) as connector:
        emptied, copied = next_batch(harness, connector), next_batch(harness, connector)
    places = [
        (row[COMMIT_VERSION], row[ORDINAL])
        for batch in (emptied, copied)
        for row in batch.records.to_pylist()
    ]
    assert places == sorted({*places}), "the truncate has its own ordinal, before the rows"
    harness.database.execute(f"DELETE FROM {harness.table} WHERE id < 3")
    harness.add((999, "mark"))
    with opened(harness, stored) as connector:
        mirror_until(harness, connector, target, 999)
    assert target[str(harness.table)] == source_rows(harness, harness.table)


def test_a_checkpoint_sends_no_query_and_changes_nothing(harness: PostgresConnectorHarness) -> None:
    def written() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in harness.wal.settings.spool.glob("consumers/*")}

    harness.add((1, "x"))
    with opened(harness) as connector:
        take(harness, connector, 1)
        until_none(harness, connector)
        before, confirmed = written(), harness.wal.confirmed
        with shut(harness.database):
            end_connections(harness.database)
            begin = time.thread_time()
            taken = [connector.checkpoint() for _ in range(100)]
            assert time.thread_time() - begin < 1.0, "it is cheap"
        assert taken == taken[:1] * 100
        assert (written(), harness.wal.confirmed) == (before, confirmed)
    harness.add((2, "x"))
    with opened(harness, taken[0]) as connector:
        assert take(harness, connector, 1) == [(2, "x")]


def test_a_checkpoint_is_taken_at_the_end_of_the_snapshot(harness: PostgresConnectorHarness) -> None:
    harness.add((1, "x"), (2, "x"))
    with opened(harness) as connector:
        flag = connector.checkpoint_requested()
        assert flag is not None
        next_batch(harness, connector, 1)
        assert not flag.is_set()
        next_batch(harness, connector, 1)
        assert flag.is_set()
        stored = connector.checkpoint()
    harness.add((3, "x"))
    with opened(harness, stored) as connector:
        assert take(harness, connector, 1) == [(3, "x")], "that checkpoint has the whole snapshot"


def test_before_rows_of_another_shape_a_checkpoint_can_be_taken(harness: PostgresConnectorHarness) -> None:
    harness.add((1, "x"))
    with opened(harness) as connector:
        flag = connector.checkpoint_requested()
        assert flag is not None
        take(harness, connector, 1)
        flag.clear()
        harness.change_shape()
        harness.add((2, "x"))
        wait_for(
            lambda: connector.poll_batch(10) is None and flag.is_set(),
            "a request",
            flag.is_set,
            harness.deadline_seconds,
        )
        stored = connector.checkpoint()
        assert take(harness, connector, 1) == [(2, "x")]
    with opened(harness, stored) as connector:
        assert take(harness, connector, 1) == [(2, "x")]


def test_a_table_that_joins_later_is_copied_although_there_is_a_checkpoint(
    harness: PostgresConnectorHarness,
) -> None:
    table, other = harness.wal.table, harness.wal.other
    harness.add((1, "x"))
    harness.database.execute(f"INSERT INTO {other} VALUES (1, 'old'), (2, 'old')")
    with opened(harness) as connector:
        take(harness, connector, 1)
        stored = connector.checkpoint()
    both = harness.with_options({"tables": f"{table}, {other}"})
    harness.add((999, "mark"))
    target: dict[str, dict[int, str | None]] = {str(table): {1: "x"}}
    with opened(both, stored) as connector:
        mirror_until(both, connector, target, 999)
    assert target == {str(each): source_rows(harness, each) for each in (table, other)}


def test_without_names_it_has_the_tables_of_the_publication_and_those_that_join_come_whole(
    harness: PostgresConnectorHarness,
) -> None:
    table, other, publication = harness.wal.table, harness.wal.other, harness.wal.settings.publication
    harness.database.execute(f"CREATE PUBLICATION {publication} FOR TABLE {table}")
    harness.database.execute(f"INSERT INTO {other} VALUES (1, 'old')")
    all_of_them = harness.with_options({"tables": ""})
    target: dict[str, dict[int, str | None]] = {}
    with opened(all_of_them) as connector:
        harness.add((1, "x"))
        mirror_until(all_of_them, connector, target, 1)
        harness.database.execute(f"ALTER PUBLICATION {publication} ADD TABLE {other}")
        harness.database.execute(f"INSERT INTO {other} VALUES (2, 'new')")
        harness.add((2, "x"))
        mirror_until(all_of_them, connector, target, 2)
        assert set(target) == {str(table)}, (
            "of a table that was not copied, changes alone would be half of it"
        )
        stored = connector.checkpoint()
    harness.add((3, "x"))
    with opened(all_of_them, stored) as connector:
        mirror_until(all_of_them, connector, target, 3)
    assert target == {str(each): source_rows(harness, each) for each in (table, other)}


def test_without_snapshot_only_changes_from_now_on_are_returned(harness: PostgresConnectorHarness) -> None:
    harness.add((1, "before"))
    with opened(harness.with_options({"snapshot": "never"})) as connector:
        wait_for(
            lambda: connector.poll_batch(1) is None and harness.wal.has_slot,
            "a slot",
            lambda: None,
            harness.deadline_seconds,
        )
        harness.add((2, "after"))
        assert take(harness, connector, 1) == [(2, "after")]


# --- acknowledging ------------------------------------------------------------------------------------------


def test_the_slot_is_confirmed_no_further_than_the_committed_epoch(harness: PostgresConnectorHarness) -> None:
    with opened(harness) as connector:
        harness.add((1, "x"))
        take(harness, connector, 1)
        until_none(harness, connector)
        stored = connector.checkpoint()
        harness.add((2, "x"))
        take(harness, connector, 1)
        connector.notify_epoch_committed(stored.epoch)
        floor = Position.parse(stored.offsets["stream"])
        wait_for(
            lambda: harness.wal.confirmed >= floor,
            f"confirmed up to {floor}",
            lambda: harness.wal.confirmed,
            harness.deadline_seconds,
        )
        harness.add((3, "x"))
        take(harness, connector, 1)
        assert harness.wal.confirmed == floor


def test_an_epoch_that_cannot_be_acknowledged_is_an_error_and_a_later_one_covers_it(
    harness: PostgresConnectorHarness,
) -> None:
    with opened(harness) as connector:
        harness.add((1, "x"))
        take(harness, connector, 1)
        before = harness.wal.confirmed
        with unwritable(harness.wal.settings.spool):
            with pytest.raises(SpoolError):
                connector.notify_epoch_committed(connector.checkpoint().epoch)
            harness.add((2, "x"))
            assert take(harness, connector, 1) == [(2, "x")], "the connector continues"
            assert harness.wal.confirmed == before
        until_none(harness, connector)
        later = connector.checkpoint()
        connector.notify_epoch_committed(later.epoch)
        floor = Position.parse(later.offsets["stream"])
        wait_for(
            lambda: harness.wal.confirmed >= floor,
            f"confirmed up to {floor}",
            lambda: harness.wal.confirmed,
            harness.deadline_seconds,
        )


def test_an_idle_slot_advances_by_checkpoints_that_the_connector_requests(
    harness: PostgresConnectorHarness,
) -> None:
    harness.add((1, "x"))
    with opened(harness.with_options({"idleCheckpointBytes": "100000"})) as connector:
        flag = connector.checkpoint_requested()
        assert flag is not None
        take(harness, connector, 1)
        flag.clear()
        before = harness.wal.confirmed
        harness.wal.commit_elsewhere()
        wait_for(
            lambda: connector.poll_batch(1) is None and flag.is_set(),
            "a request",
            connector.checkpoint,
            harness.deadline_seconds,
        )
        connector.notify_epoch_committed(connector.checkpoint().epoch)
        wait_for(
            lambda: harness.wal.confirmed.value > before.value + 100_000,
            f"far beyond {before}",
            lambda: harness.wal.confirmed,
            harness.deadline_seconds,
        )


# --- how it is ----------------------------------------------------------------------------------------------


def test_health_depends_on_the_thresholds(harness: PostgresConnectorHarness) -> None:
    assert harness.connector().health_check().health is Health.UNKNOWN
    with opened(
        harness.with_options(
            {"degradedLagBytes": "1000", "unhealthyLagBytes": "500000000", "watchSeconds": "0.1"}
        )
    ) as connector:
        harness.add((1, "x"))
        take(harness, connector, 1)
        # No reader polls any more, so the returned changes are not acknowledged.
        harness.wal.commit_elsewhere()
        harness.add(*((each, "x" * 100) for each in range(2, 200)))
        wait_for(
            lambda: "behind the source" in (connector.health_check().why or ""),
            "behind the source",
            connector.health_check,
            harness.deadline_seconds,
        )
        assert connector.health_check().health is Health.DEGRADED
        lag = connector.metrics().lag
        assert lag is not None
        assert lag > 1000


def test_health_and_metrics_count_unacknowledged_changes_from_the_start(
    harness: PostgresConnectorHarness,
) -> None:
    with opened(harness.with_options({"degradedLagBytes": "400000", "watchSeconds": "0.1"})) as connector:
        harness.add((1, "x"))
        take(harness, connector, 1)
        until_none(harness, connector)
        assert connector.metrics().custom["unacknowledged_bytes"] < 400_000
        harness.wal.commit_elsewhere()
        harness.add((2, "x"))
        take(harness, connector, 1)
        until_none(harness, connector)
        wait_for(
            lambda: "not acknowledged" in (connector.health_check().why or ""),
            "unacknowledged bytes as the reason",
            connector.health_check,
            harness.deadline_seconds,
        )
        assert connector.health_check().health is Health.DEGRADED
        unacknowledged_bytes = connector.metrics().custom["unacknowledged_bytes"]
        assert unacknowledged_bytes > 400_000
        stored = connector.checkpoint()
    with opened(harness, stored) as connector:
        harness.add((3, "x"))
        take(harness, connector, 1)
        assert connector.metrics().custom["unacknowledged_bytes"] >= unacknowledged_bytes, (
            "a restart acknowledges nothing"
        )
        until_none(harness, connector)
        connector.notify_epoch_committed(connector.checkpoint().epoch)
        assert connector.metrics().custom["unacknowledged_bytes"] == 0
        assert connector.health_check().health is Health.HEALTHY


def drop_from_reader(harness: PostgresConnectorHarness) -> bool:
    """A source whose reader restarts repeatedly."""
    slot = harness.wal.settings.slot
    harness.database.query(
        "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots WHERE slot_name = %s", slot
    )
    with suppress(psycopg.errors.ObjectInUse):
        harness.database.query(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", slot
        )
    return not harness.wal.has_slot


def test_a_slot_that_vanishes_makes_it_unhealthy(harness: PostgresConnectorHarness) -> None:
    with opened(harness) as connector:
        harness.add((1, "x"))
        take(harness, connector, 1)
        assert connector.health_check().health is Health.HEALTHY
        wait_for(
            lambda: drop_from_reader(harness),
            "a slot that is gone",
            harness.open_resources,
            harness.deadline_seconds,
        )
        wait_for(
            lambda: connector.health_check().health is Health.UNHEALTHY,
            "unhealthy",
            connector.health_check,
            harness.deadline_seconds,
        )
        assert "PEN-1201" in (connector.health_check().why or "")
        with pytest.raises(SlotMissingError):
            wait_for(
                lambda: connector.poll_batch(1) is not None,
                "the error",
                connector.checkpoint,
                harness.deadline_seconds,
            )
        assert connector.metrics().errors_total >= 1


# --- schemas and options ------------------------------------------------------------------------------------


# The first test that needs a registry downloads it, once for each user, and starts it.
with_registry = pytest.mark.timeout(1200)


@with_registry
def test_schemas_of_tables_are_kept_in_a_real_registry(
    harness: PostgresConnectorHarness, registry: EmbeddedRegistry
) -> None:
    kept = harness.with_options({"registryUrl": registry.url, "registryPrefix": "conformance."})
    assert kept.registers_schemas, "or nothing would be asked of the registry"
    SourceConnectorConformance().test_schemas_are_registered_if_the_connector_supports_it(kept)


@with_registry
def test_the_registry_says_which_shapes_may_follow(
    harness: PostgresConnectorHarness, registry: EmbeddedRegistry
) -> None:
    kept = harness.with_options({"registryUrl": registry.url, "registryPrefix": "following."})
    table = str(harness.table)
    with opened(kept) as connector:
        aware = connector.as_schema_registry_aware()
        assert aware is not None
        first = aware.register_schema(table)
        registry.set_compatibility(first.subject, "BACKWARD")
    harness.change_shape()
    with opened(kept) as connector:
        aware = connector.as_schema_registry_aware()
        assert aware is not None
        assert aware.check_compatibility(table).is_compatible, "a column that may be null has a default"
        assert aware.register_schema(table).version == first.version + 1
    harness.database.execute(f"ALTER TABLE {table} ALTER COLUMN note TYPE boolean USING true")
    with opened(kept) as connector:
        aware = connector.as_schema_registry_aware()
        assert aware is not None
        verdict = aware.check_compatibility(table)
        assert not verdict.is_compatible
        assert verdict.reasons
        with pytest.raises(SchemaIncompatibleError):
            aware.register_schema(table)


def test_an_option_that_is_unknown_or_makes_no_sense_is_named() -> None:
    connector = PostgresConnector()
    for options, message in (
        ({"dns": "x"}, "no option 'dns'"),
        ({"dsn": "host=h", "slot": "s"}, "'spool' is missing"),
        ({"dsn": "host=h", "slot": "s", "spool": "x", "tables": "nodot"}, "'tables' is invalid"),
        (
            {"dsn": "host=h", "slot": "s", "spool": "x", "process": "separate"},
            "does not support 'separate' as the option 'process'",
        ),
        ({"dsn": "host=h", "slot": "s", "spool": "x", "byTriggers": "true"}, "'polling' and 'byTriggers'"),
    ):
        with pytest.raises(ConfigError, match=message):
            connector.open(options)
