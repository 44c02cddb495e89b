"""Random concurrent transactions under a `PollingCapture` that restarts repeatedly: the captured rows equal
the table.
"""

from __future__ import annotations

import random
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock.contracts.capture import ChangeStream, Delete, Truncate, Upsert
from penstock.testing.capture_conformance import upsert
from penstock.testing.streams import take_until
from tests.support.contract.polling_harness import CursorHarness, PollingHarness, idle
from tests.support.fix_postgres import Database

SESSIONS = 3
RUNS = 4
STEPS = 60
KEYS = 12


class Writer:
    """One session that runs random statements.

    Each has its own keys, so that no session waits for another.
    """

    def __init__(
        self, connection: psycopg.Connection[tuple[Any, ...]], table: str, number: int, choices: random.Random
    ) -> None:
        self._connection = connection
        self._table = table
        self._number = number
        self._choices = choices
        self._is_open = False
        self._name = f"{table} {number}"
        self._is_prepared = False

    def step(self) -> None:
        choice = self._choices.random()
        if self._is_prepared:
            if choice < 0.3:
                self._run(f"{'COMMIT' if choice < 0.2 else 'ROLLBACK'} PREPARED '{self._name}'")
                self._is_prepared = False
        elif not self._is_open:
            self._run("BEGIN")
            self._is_open = True
        elif choice < 0.2:
            self.end(commit=choice < 0.15)
        elif choice < 0.25:
            self._run(f"PREPARE TRANSACTION '{self._name}'")
            self._is_open, self._is_prepared = False, True
        else:
            self._write(choice)

    def end(self, *, commit: bool = True) -> None:
        if self._is_prepared:
            self._run(f"COMMIT PREPARED '{self._name}'")
        elif self._is_open:
            self._run("COMMIT" if commit else "ROLLBACK")
        self._is_open = self._is_prepared = False

    def _write(self, choice: float) -> None:
        key, other = (self._number * 100 + self._choices.randrange(KEYS) for _ in range(2))
        put = (
            f"INSERT INTO {self._table} (id, note) VALUES ({key}, '{choice}') ON CONFLICT (id) DO UPDATE "
            "SET note = excluded.note"
        )
        if choice < 0.35:
            self._run(f"DELETE FROM {self._table} WHERE id = {key}")
        elif choice < 0.45:
            self._run(
                f"UPDATE {self._table} SET id = {other} WHERE id = {key} AND NOT EXISTS (SELECT "
                f"FROM {self._table} WHERE id = {other})"
            )
        elif choice < 0.6:
            self._run("SAVEPOINT s")
            self._run(put)
            self._run("ROLLBACK TO s" if choice < 0.5 else "RELEASE s")
        else:
            self._run(put)

    def _run(self, statement: str) -> None:
        self._connection.execute(statement.encode())


def follow(
    stream: ChangeStream, polled: PollingHarness, rows: dict[object, object], choices: random.Random
) -> None:
    """Read the available changes and confirm some of them."""
    mark = upsert(polled.other, choices.randrange(1 << 30), "mark")
    polled.commit(mark)
    confirms = True
    for change in take_until(stream, mark, polled.deadline_seconds):
        confirms = confirms and choices.random() < 0.99
        if confirms:
            change.ack.confirm()
        if change.event.table == polled.table:
            match change.event:
                case Upsert():
                    rows[change.event.key["id"]] = change.event.row["note"]
                case Delete():
                    rows.pop(change.event.key["id"], None)
                case Truncate():
                    rows.clear()


@pytest.mark.parametrize("make", [PollingHarness, CursorHarness], ids=["xmin", "column"])
@pytest.mark.parametrize("seed", [1])
def test_reader_of_random_transactions_ends_with_the_table(
    shared_database: Database, tmp_path: Path, make: type[PollingHarness], seed: int
) -> None:
    choices = random.Random(seed)
    rows: dict[object, object] = {}
    with idle(make(shared_database, tmp_path)) as polled, ExitStack() as open_sessions:
        polled.capture().live().close()
        sessions = [
            open_sessions.enter_context(psycopg.connect(polled.database.dsn, autocommit=True))
            for _ in range(SESSIONS)
        ]
        writers = [
            Writer(session, str(polled.table), number, choices) for number, session in enumerate(sessions, 1)
        ]
        for run in range(RUNS):
            with closing(polled.capture().live()) as stream:
                for _ in range(STEPS):
                    choices.choice(writers).step()
                if run == RUNS - 1:
                    for writer in writers:
                        writer.end()
                follow(stream, polled, rows, choices)
        assert rows == dict(polled.database.query(f"SELECT id, note FROM {polled.table}"))
