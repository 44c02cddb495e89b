"""A consumer that stores rows and checkpoint in one transaction and is killed repeatedly receives each row
once.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest

from penstock.change import CHANGE_TYPE
from penstock.contracts.connector import SourceBatch, SourceCheckpoint, SourceConnector
from penstock.testing.connector_harness import opened
from penstock.testing.streams import wait_for
from tests.support.contract.postgres_connector import PostgresConnectorHarness, postgres_connector_harness
from tests.support.fix_postgres import Database

Tables = dict[str, dict[int, str | None]]

LIVES = 8


def apply_strictly(target: Tables, batch: SourceBatch) -> None:
    """Every change must match the stored state, so that a missing or repeated row is noticed at once."""
    rows = target.setdefault(batch.partition, {})
    for change in batch.records.to_pylist():
        key = change["id"]
        match change[CHANGE_TYPE]:
            case "truncate":
                rows.clear()
            case "delete":
                del rows[key]
            case "update_postimage":
                assert key in rows
                rows[key] = change["note"]
            case _:
                assert key not in rows
                rows[key] = change["note"]


class Writer:
    """Random transactions over two tables."""

    def __init__(self, harness: PostgresConnectorHarness, chance: random.Random) -> None:
        self._database = harness.database
        self._tables = (harness.wal.table, harness.wal.other)
        self._chance = chance
        self._next = 1

    def write(self) -> None:
        with self._database.connect() as connection:
            for _ in range(self._chance.randint(1, 4)):
                connection.execute(self._statement().encode())

    def _statement(self) -> str:
        table = self._chance.choice(self._tables)
        some = f"id % 7 = {self._chance.randrange(7)}"
        kind = self._chance.choices(("insert", "update", "move", "delete", "truncate"), (8, 4, 2, 2, 0.4))[0]
        if kind == "insert":
            first, self._next = self._next, self._next + 6
            return f"INSERT INTO {table} SELECT i, 'n' || i FROM generate_series({first}, {first + 5}) i"
        if kind == "move":
            first, self._next = self._next, self._next + 1000
            return f"UPDATE {table} SET id = {first} + id % 1000 WHERE id = (SELECT min(id) FROM {table})"
        return {
            "update": f"UPDATE {table} SET note = note || '+' WHERE {some}",
            "delete": f"DELETE FROM {table} WHERE {some}",
            "truncate": f"TRUNCATE {table}",
        }[kind]


def source(harness: PostgresConnectorHarness) -> Tables:
    return {
        str(table): dict(harness.database.query(f"SELECT id, note FROM {table}"))
        for table in (harness.wal.table, harness.wal.other)
    }


def poll(connector: SourceConnector, target: Tables, max_records: int) -> None:
    """Take a batch, or wait a little for one."""
    batch = connector.poll_batch(max_records)
    ready = connector.data_ready()
    assert ready is not None
    if batch is not None:
        apply_strictly(target, batch)
    else:
        ready.wait(0.5)


@pytest.mark.parametrize("seed", [1])
def test_a_repeatedly_killed_consumer_ends_equal_to_the_source(
    shared_database: Database, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    with postgres_connector_harness(shared_database, tmp_path) as harness:
        both = PostgresConnectorHarness(harness.wal, {"tables": f"{harness.wal.table}, {harness.wal.other}"})
        writer = Writer(harness, chance)
        writer.write()
        kept: Tables = {}
        stored: SourceCheckpoint | None = None
        for _ in range(LIVES):
            target = copy.deepcopy(kept)
            with opened(both, stored) as connector:
                if stored is not None and chance.random() < 0.5:
                    connector.notify_epoch_committed(stored.epoch)
                for _ in range(chance.randint(1, 12)):
                    poll(connector, target, chance.choice((1, 3, 1000)))
                    if chance.random() < 0.5:
                        writer.write()
                    if chance.random() < 0.3:
                        kept, stored = (
                            copy.deepcopy(target),
                            SourceCheckpoint.from_json(connector.checkpoint().to_json()),
                        )
                        if chance.random() < 0.7:
                            connector.notify_epoch_committed(stored.epoch)
        writer.write()
        harness.database.execute(f"INSERT INTO {harness.wal.table} VALUES (-1, 'mark')")
        target = kept
        with opened(both, stored) as connector:

            def is_level() -> bool:
                poll(connector, target, 7)
                return -1 in target.get(str(harness.wal.table), {}) and set(
                    connector.checkpoint().offsets
                ) == {"stream"}

            wait_for(is_level, "everything up to the mark", connector.checkpoint, both.deadline_seconds)
    assert {table: target.get(table, {}) for table in source(harness)} == source(harness)
