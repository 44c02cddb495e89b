"""`PostgresConnector` stops at gaps: checkpoints, slots, tables and values it cannot continue from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.contracts.connector import Health, SourceCheckpoint
from penstock.errors import (
    CheckpointError,
    PositionGapError,
    PublicationError,
    SlotMissingError,
    TableGapError,
    UnrepresentableError,
)
from penstock.testing.connector_harness import next_batch, opened, take
from penstock.testing.streams import wait_for
from tests.support.contract.postgres_connector import (
    PostgresConnectorHarness,
    postgres_connector_harness,
    wait_until_copied,
)
from tests.support.fix_postgres import Database


@pytest.fixture
def harness(shared_database: Database, tmp_path: Path) -> Iterator[PostgresConnectorHarness]:
    with postgres_connector_harness(shared_database, tmp_path) as made:
        yield made


def stored_place(harness: PostgresConnectorHarness) -> SourceCheckpoint:
    harness.add((1, "x"))
    with opened(harness) as connector:
        take(harness, connector, 1)
        harness.add((2, "x"))
        take(harness, connector, 1)
        return connector.checkpoint()


def test_a_checkpoint_whose_slot_is_gone_is_refused(harness: PostgresConnectorHarness) -> None:
    stored = stored_place(harness)
    harness.wal.drop_slot()
    with pytest.raises(SlotMissingError), opened(harness, stored):
        pass
    assert not harness.wal.has_slot, "and no other one is created"


def test_a_slot_that_is_past_the_checkpoint_is_a_hole(
    harness: PostgresConnectorHarness, tmp_path: Path
) -> None:
    stored = stored_place(harness)
    harness.wal.drop_slot()
    harness.add((3, "lost"))
    harness.database.query(
        "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", harness.wal.settings.slot
    )
    elsewhere = harness.with_options({"spool": str(tmp_path / "another")})
    with pytest.raises(PositionGapError), opened(elsewhere, stored):
        pass


def test_a_lost_spool_loses_nothing(harness: PostgresConnectorHarness, tmp_path: Path) -> None:
    stored = stored_place(harness)
    harness.add((3, "x"))
    with opened(harness.with_options({"spool": str(tmp_path / "another")}), stored) as connector:
        assert take(harness, connector, 1) == [(3, "x")]


def test_a_table_that_left_the_publication_and_came_back_is_a_hole(harness: PostgresConnectorHarness) -> None:
    stored = stored_place(harness)
    publication = harness.wal.settings.publication
    harness.database.execute(f"ALTER PUBLICATION {publication} DROP TABLE {harness.table}")
    harness.add((3, "not in the WAL"))
    with pytest.raises(TableGapError, match="taken out"), opened(harness, stored):
        pass
    harness.database.execute(f"ALTER PUBLICATION {publication} ADD TABLE {harness.table}")
    with pytest.raises(TableGapError, match="put in again"), opened(harness, stored):
        pass


def test_another_table_of_the_same_name_is_a_hole(harness: PostgresConnectorHarness) -> None:
    stored = stored_place(harness)
    harness.database.execute(f"ALTER TABLE {harness.table} RENAME TO was_{harness.table.name}")
    harness.database.execute(f"CREATE TABLE {harness.table} (id bigint PRIMARY KEY, note text)")
    with pytest.raises(TableGapError, match="is called"), opened(harness, stored):
        pass


def test_a_table_that_is_renamed_while_it_is_followed_ends_the_stream(
    harness: PostgresConnectorHarness,
) -> None:
    with opened(harness.with_options({"watchSeconds": "0.05"})) as connector:
        harness.add((1, "x"))
        take(harness, connector, 1)
        harness.database.execute(f"ALTER TABLE {harness.table} RENAME TO was_{harness.table.name}")
        with pytest.raises(TableGapError, match="is called"):
            wait_for(
                lambda: connector.poll_batch(1) is not None,
                "the error",
                connector.checkpoint,
                harness.deadline_seconds,
            )


def test_a_publication_that_leaves_changes_out_is_refused_with_the_fix(
    harness: PostgresConnectorHarness,
) -> None:
    publication = harness.wal.settings.publication
    harness.database.execute(
        f"CREATE PUBLICATION {publication} FOR TABLE {harness.table} WITH (publish = 'insert')"
    )
    with opened(harness) as connector:
        with pytest.raises(PublicationError, match="leaves out") as raised:
            wait_for(
                lambda: connector.poll_batch(1) is not None,
                "the error",
                connector.checkpoint,
                harness.deadline_seconds,
            )
        assert "ALTER PUBLICATION" in (raised.value.hint or "")
    assert not harness.wal.has_slot, "nothing is kept for a stream that cannot be"


@pytest.mark.parametrize(
    "alter",
    [
        lambda stored: SourceCheckpoint(
            {**stored.offsets, "stream": "nowhere"}, stored.epoch, stored.metadata
        ),
        lambda stored: SourceCheckpoint(stored.offsets, stored.epoch, {**stored.metadata, "slot": "another"}),
        lambda stored: SourceCheckpoint(
            stored.offsets, stored.epoch, {**stored.metadata, "system": "no system"}
        ),
        lambda stored: SourceCheckpoint({"public.t": "0/0"}, stored.epoch, stored.metadata),
    ],
)
def test_a_checkpoint_that_cannot_be_ours_is_refused(
    harness: PostgresConnectorHarness, alter: Callable[[SourceCheckpoint], SourceCheckpoint]
) -> None:
    stored = SourceCheckpoint({"stream": "0/10"}, 1, {"slot": harness.wal.settings.slot})
    with pytest.raises(CheckpointError), opened(harness, alter(stored)):
        pass


def test_a_value_that_is_refused_ends_the_stream_after_everything_before_it(
    harness: PostgresConnectorHarness,
) -> None:
    table, other = harness.wal.table, harness.wal.other
    harness.database.execute(f"ALTER TABLE {other} ADD COLUMN at timestamptz")
    strict = harness.with_options({"tables": f"{table}, {other}", "onUnrepresentable": "error"})
    with opened(strict) as connector:
        wait_until_copied(harness, connector)
        stored = connector.checkpoint()
        with harness.database.connect() as connection:
            connection.execute(f"INSERT INTO {table} VALUES (1, 'before')".encode())
        with harness.database.connect() as connection:
            connection.execute(f"INSERT INTO {table} VALUES (2, 'with it')".encode())
            connection.execute(f"INSERT INTO {other} VALUES (2, 'bad', 'infinity')".encode())
        assert take(harness, connector, 1) == [(1, "before")]
        with pytest.raises(UnrepresentableError):
            wait_for(
                lambda: connector.poll_batch(10) is not None,
                "the error",
                connector.checkpoint,
                harness.deadline_seconds,
            )
        assert connector.health_check().health is Health.UNHEALTHY
        last = connector.checkpoint()
        connector.notify_epoch_committed(last.epoch)
    assert last.epoch > stored.epoch
    lenient = harness.with_options({"tables": f"{table}, {other}"})
    with opened(lenient, last) as connector:
        batches = [next_batch(lenient, connector), next_batch(lenient, connector)]
    assert sorted(row["id"] for batch in batches for row in batch.records.to_pylist()) == [2, 2], (
        "no change of that transaction was skipped"
    )
