"""Every capture method, killed with SIGKILL repeatedly under load: its consumer ends equal to the source.

`test_captures.py` does the same with whole pipelines. A capture method is one line in `CAPTURES`.
"""

from __future__ import annotations

import pickle
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from typing_extensions import override

from penstock.testing.capture_conformance import CaptureHarness
from tests.support.contract.polling_harness import CursorHarness, PollingHarness
from tests.support.contract.trigger_harness import TriggerHarness
from tests.support.contract.wal_harness import WalHarness
from tests.support.fix_postgres import Database
from tests.support.recovery.follower import open_store, place
from tests.support.recovery.writing import Writing
from tests.support.waiting import wait_for

CAPTURES: dict[str, type[WalHarness] | type[PollingHarness] | type[TriggerHarness]] = {
    "wal": WalHarness,
    "polling by xmin": PollingHarness,
    "polling by a column": CursorHarness,
    "trigger": TriggerHarness,
}
KILLS = 2
KEYS = 300


class Mixing(Writing):
    """Inserts, updates, key changes and deletes, in small transactions."""

    pause_seconds = 0.005

    def __init__(self, database: Database, table: str) -> None:
        super().__init__(database)
        self._table = table
        self._choices = random.Random(11)

    @override
    def transact(self, connection: psycopg.Connection) -> None:
        with connection.transaction(force_rollback=self._choices.random() < 0.1):
            for _ in range(self._choices.randint(1, 4)):
                connection.execute(self._statement().encode())

    def _statement(self) -> str:
        key, other = (self._choices.randrange(KEYS) for _ in range(2))
        return self._choices.choice(
            (
                (
                    f"INSERT INTO {self._table} VALUES ({key}, 'new {other}') ON CONFLICT (id) DO UPDATE "
                    "SET note = excluded.note"
                ),
                (
                    f"INSERT INTO {self._table} VALUES ({key}, 'new {other}') ON CONFLICT (id) DO UPDATE "
                    "SET note = excluded.note"
                ),
                f"DELETE FROM {self._table} WHERE id = {key}",
                (
                    f"UPDATE {self._table} SET id = {other} WHERE id = {key} AND NOT EXISTS (SELECT "
                    f"FROM {self._table} WHERE id = {other})"
                ),
            )
        )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("capture", CAPTURES)
def test_follower_equals_the_source_after_kills_under_load(
    database: Database, tmp_path: Path, capture: str
) -> None:
    harness: CaptureHarness = CAPTURES[capture](database, tmp_path)
    table = str(harness.table)
    database.execute(f"INSERT INTO {table} SELECT n, 'old' FROM generate_series(1, {KEYS}, 2) n")
    (tmp_path / "capture.pickle").write_bytes(pickle.dumps((harness.capture(), [harness.table])))
    with Mixing(database, table) as writing, database.connect() as late:
        for life in range(KILLS):
            with living(tmp_path):
                wait_for(lambda: is_copied(tmp_path), "a copy")
                if life == 0:
                    late.execute(f"INSERT INTO {table} VALUES (-1, 'late')".encode())
                at = writing.transactions
                wait_for(
                    lambda at=at: writing.transactions > at + 50,  # type: ignore[misc]
                    "some transactions",
                    lambda: writing.transactions,
                )
            if life == 0:
                late.commit()
    source = sorted((str(key), note) for key, note in database.query(f"SELECT id, note FROM {table}"))
    assert ("-1", "late") in source
    with living(tmp_path):
        wait_for(
            lambda: followed(tmp_path) == source,
            "the rows of the source",
            lambda: set(followed(tmp_path)) ^ set(source),
        )


@contextmanager
def living(directory: Path) -> Iterator[None]:
    log = directory / "follower.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.recovery.follower", str(directory)],
            stdout=output,
            stderr=output,
        )
    try:
        yield
        assert process.poll() is None, log.read_text()[-3000:]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)


def is_copied(directory: Path) -> bool:
    with closing(open_store(directory)) as store:
        try:
            return place(store) is not None
        except sqlite3.OperationalError:  # not made yet, or just being written
            return False


def followed(directory: Path) -> list[tuple[str, str]]:
    with closing(open_store(directory)) as store:
        return sorted(store.execute("SELECT key, note FROM rows").fetchall())
