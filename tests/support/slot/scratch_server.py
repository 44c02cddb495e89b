"""A Postgres server that tests restart, reconfigure and fill."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psycopg

from penstock.testing.embedded import EmbeddedPostgres
from tests.support.fix_postgres import Database
from tests.support.waiting import wait_for


class ScratchServer:
    """A server for tests that restart it, exhaust its limits and change its settings. Its limits are low."""

    SLOTS = 3
    SENDERS = 4

    def __init__(self, directory: Path, version: int, settings: Mapping[str, str] | None = None) -> None:
        limits = {
            "max_replication_slots": str(self.SLOTS),
            "max_wal_senders": str(self.SENDERS),
            "max_prepared_transactions": "5",
            "min_wal_size": "32MB",
            "max_wal_size": "64MB",
            "autovacuum": "off",
            **(settings or {}),
        }
        self.postgres = EmbeddedPostgres(directory / "data", version, limits, fsync=False)
        self._numbers = itertools.count(1)

    def create_database(self) -> Database:
        name = f"rough_{next(self._numbers)}"
        with psycopg.connect(self.postgres.dsn(), autocommit=True) as admin:
            admin.execute(f"CREATE DATABASE {name}".encode())
        return Database(name, self.postgres.dsn(name))

    def set(self, **settings: str) -> None:
        """Change settings until `tidy`. Takes effect at once."""
        with psycopg.connect(self.postgres.dsn(), autocommit=True) as admin:
            for name, value in settings.items():
                admin.execute(f"ALTER SYSTEM SET {name} = '{value}'".encode())
            admin.execute("SELECT pg_reload_conf()")
            wait_for(
                lambda: all(_has_changed(admin, name) for name in settings),
                f"other values of {', '.join(settings)}",
            )

    def fill_log(self, segments: int) -> None:
        """Write that many WAL segments and a checkpoint."""
        with psycopg.connect(self.postgres.dsn(), autocommit=True) as admin:
            for _ in range(segments):
                admin.execute("SELECT pg_logical_emit_message(false, 'filler', 'x')")
                admin.execute("SELECT pg_switch_wal()")
            admin.execute("CHECKPOINT")

    def outrun(self, slot: str) -> None:
        """Write WAL until the server invalidates the slot; its checkpointer may read a new setting later than
        other processes.
        """
        with psycopg.connect(self.postgres.dsn(), autocommit=True) as admin:

            def is_lost() -> bool:
                self.fill_log(6)
                found = admin.execute(
                    "SELECT wal_status FROM pg_replication_slots WHERE slot_name = %s", [slot]
                ).fetchone()
                return found == ("lost",)

            wait_for(is_lost, f"the loss of {slot}")

    def tidy(self) -> None:
        with psycopg.connect(self.postgres.dsn(), autocommit=True) as admin:
            admin.execute("ALTER SYSTEM RESET ALL")
            admin.execute("SELECT pg_reload_conf()")
            deadline = time.monotonic() + 20
            while slots := admin.execute("SELECT slot_name, active_pid FROM pg_replication_slots").fetchall():
                for slot, pid in slots:
                    with suppress(psycopg.errors.ObjectInUse, psycopg.errors.UndefinedObject):
                        admin.execute("SELECT pg_terminate_backend(%s, 2000)", [pid]) if pid else None
                        admin.execute("SELECT pg_drop_replication_slot(%s)", [slot])
                assert time.monotonic() < deadline, f"could not drop {slots}"


def _has_changed(admin: psycopg.Connection, name: str) -> bool:
    row = admin.execute(
        "SELECT setting, reset_val, boot_val FROM pg_settings WHERE name = %s", [name]
    ).fetchone()
    return len(set(row or ())) > 1
