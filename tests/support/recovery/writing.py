"""A thread that writes to the source for the length of a block."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Self

import psycopg

from tests.support.fix_postgres import Database


class Writing(ABC):
    """One transaction after the other, with a pause after each."""

    pause_seconds = 0.05

    def __init__(self, database: Database) -> None:
        self._database = database
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="writing", daemon=True)
        self.transactions = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with self._database.connect(autocommit=True) as connection:
            while not self._stopping.wait(self.pause_seconds):
                self.transact(connection)
                self.transactions += 1

    @abstractmethod
    def transact(self, connection: psycopg.Connection) -> None:
        """The next transaction."""
