"""The server that the contenders read from, with one range of WAL that each of them reads through a separate
slot.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, LiteralString, Self

import psycopg
from psycopg import sql

from benchmarks.cases import PUBLICATION, SCHEMA, TRANSACTION_ROWS, Case
from penstock.testing.embedded import EmbeddedPostgres

_SETTINGS = {
    "autovacuum": "off",
    "max_wal_size": "16GB",
    "checkpoint_timeout": "1h",
    "shared_buffers": "512MB",
}
_SAMPLE_SECONDS = 0.05
_PATIENCE_SECONDS = 60.0
_BASE_SLOT = "bench_base"


class BenchSource:
    """An embedded server during a `with` block."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._copies = 0

    def __enter__(self) -> Self:
        # The directory must be accessible to others: the server may run as another user.
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-"))
        self.server = self._stack.enter_context(
            EmbeddedPostgres(Path(directory) / "data", 18, _SETTINGS, fsync=False)
        )
        self._admin = self._stack.enter_context(psycopg.connect(self.dsn, autocommit=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def dsn(self) -> str:
        return self.server.dsn()

    @property
    def version(self) -> str:
        return str(self._one("SHOW server_version"))

    def prepare(self, case: Case, rows: int) -> None:
        """The tables and the publication, then the slot from which all others are copied."""
        self._admin.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        self._admin.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(PUBLICATION)))
        self._admin.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(SCHEMA)))
        self._admin.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(SCHEMA)))
        self._admin.execute(case.load_script())
        if case.seed is not None:
            self._call(case.seed, rows)
        publication, schema = sql.Identifier(PUBLICATION), sql.Identifier(SCHEMA)
        self._admin.execute(
            sql.SQL("CREATE PUBLICATION {} FOR TABLES IN SCHEMA {}").format(publication, schema)
        )
        self._admin.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [_BASE_SLOT])

    def load(self, case: Case, rows: int) -> None:
        self._call(case.change, rows)
        self._admin.execute("CHECKPOINT")

    def fill(self, case: Case, rows: int) -> None:
        """Tables with this number of rows, after VACUUM, so that the first reader has no extra work, and
        without slots.
        """
        self.prepare(case, 0)
        self._call(case.change, rows)
        self._admin.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        self._admin.execute("VACUUM (ANALYZE, FREEZE)")
        self._admin.execute("CHECKPOINT")

    def blocks(self, table: str) -> int:
        return int(
            self._one(
                "SELECT pg_relation_size(%s::regclass) / current_setting('block_size')::bigint", [table]
            )
        )

    def _call(self, function: str, rows: int) -> None:
        statement = change_call(function)
        for low in range(1, rows + 1, TRANSACTION_ROWS):
            self._admin.execute(statement, [low, min(rows, low + TRANSACTION_ROWS - 1)])

    def wait_until_read(self, slot: str) -> None:
        """Wait until a client streams from the slot."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self._one("SELECT active FROM pg_replication_slots WHERE slot_name = %s", [slot]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody reads slot {slot}")
            time.sleep(_SAMPLE_SECONDS)

    def wal_position(self) -> str:
        return str(self._one("SELECT pg_current_wal_insert_lsn()::text"))

    def slot_backlog_bytes(self) -> int:
        """The bytes of WAL that the slots have not read yet."""
        distance = self._one(
            "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), confirmed_flush_lsn) "
            "FROM pg_replication_slots LIMIT 1"
        )
        return int(distance)

    @contextmanager
    def slot(self, *, empty: bool = False) -> Iterator[str]:
        """A slot at the beginning of the load, or at its end."""
        self._copies += 1
        name = f"bench_{self._copies}"
        if empty:
            self._admin.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
        else:
            self._admin.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [_BASE_SLOT, name])
        try:
            yield name
        finally:
            self._drop(name)

    def _drop(self, name: str) -> None:
        deadline = time.monotonic() + 10
        while True:
            try:
                self._admin.execute("SELECT pg_drop_replication_slot(%s)", [name])
            except psycopg.errors.ObjectInUse:
                # The server process of a client that has just ended may need a moment to notice.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return

    def _one(self, statement: LiteralString, parameters: Sequence[object] = ()) -> Any:
        row = self._admin.execute(statement, parameters).fetchone()
        assert row is not None
        return row[0]


def change_call(function: str) -> sql.Composed:
    """One transaction, with the keys from the first argument to the second."""
    return sql.SQL("SELECT {}(%s::bigint, %s::bigint)").format(sql.Identifier(SCHEMA, function))


class ServerCpu:
    """Measures, in a `with` block, the CPU time of the server process that serves a slot.

    Zero on systems without /proc.
    """

    def __init__(self, dsn: str, slot: str) -> None:
        self.seconds = 0.0
        self._dsn = dsn
        self._slot = slot
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bench-server-cpu", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            pid = self._find(connection)
        while not self._over.wait(_SAMPLE_SECONDS) and pid is not None:
            try:
                fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            except OSError:
                return
            self.seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _find(self, connection: psycopg.Connection) -> int | None:
        while not self._over.wait(_SAMPLE_SECONDS):
            row = connection.execute(
                "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", [self._slot]
            ).fetchone()
            if row is not None and row[0] is not None:
                return int(row[0])
        return None
