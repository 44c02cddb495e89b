"""One run of a pipeline at a time: a lease in the target, which lasts as long as a session of the run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psycopg

from penstock.errors import PipelineBusyError
from penstock.postgres.applied import OWN_SCHEMA, ensure_prepared, target_connection
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.lease import Lease, lock_timeout
from penstock.postgres.target_errors import target_errors

_PATIENCE_SECONDS = 60.0


class TargetLock:
    """Taken when it is first needed, and again if its session was lost. May be asked for by several threads."""

    def __init__(self, address: SourceAddress, pipeline: str) -> None:
        self._address = address
        self._pipeline = pipeline
        self._door = threading.Lock()
        self._held = ExitStack()
        self._connection: Connection | None = None

    def ensure(self) -> None:
        """Raise `PipelineBusyError` if another run has it."""
        with self._door:
            if not self._is_held():
                self._close()
                self._take()

    @contextmanager
    def looking(self, doing: str) -> Iterator[Connection]:
        """A connection for single statements that only read: that of the lock, where it is held."""
        held = self._connection
        if held is None or not self._is_held():
            with target_connection(self._address, doing) as connection:
                yield connection
        else:
            with target_errors(doing):
                yield held

    def close(self) -> None:
        with self._door:
            self._close()

    def _is_held(self) -> bool:
        try:
            return self._connection is not None and self._connection.execute("SELECT").rowcount == 1
        except psycopg.Error:
            return False

    def _take(self) -> None:
        doing = f"locking the tables of pipeline {self._pipeline!r} in {self._address.describe()}"
        connection = self._held.enter_context(target_connection(self._address, doing))
        with connection.transaction():
            connection.execute(lock_timeout(_PATIENCE_SECONDS))
            ensure_prepared(connection)
        holder = self._lease(connection).take()
        if holder is not None:
            self._close()
            raise PipelineBusyError(f"another run of pipeline {self._pipeline!r} writes to {self._address.describe()}: {holder}")
        self._connection = connection

    def _lease(self, connection: Connection) -> Lease:
        return Lease(connection, OWN_SCHEMA, f"pipeline/{self._pipeline}")

    def _close(self) -> None:
        if self._connection is not None:
            self._lease(self._connection).release()
        self._connection = None
        self._held.close()
