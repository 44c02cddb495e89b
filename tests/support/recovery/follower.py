"""A program that follows a capture into its own database: a snapshot first, then one change at a time.

Run as `python -m tests.support.recovery.follower DIRECTORY`: the capture and its tables are in
`capture.pickle` there, the rows go into `rows.sqlite`. It runs until it is killed.
"""

from __future__ import annotations

import pickle
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from penstock.contracts.capture import Change, ChangeCapture, Delete, Truncate
from penstock.position import Position
from penstock.schema import TableName

_CREATE = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS place (position INTEGER);
CREATE TABLE IF NOT EXISTS rows (tab TEXT, key TEXT, note TEXT, PRIMARY KEY (tab, key));
"""


def follow(directory: Path) -> None:
    capture, tables = load_job(directory)
    with closing(open_store(directory)) as store, closing(capture.live()) as stream:
        store.executescript(_CREATE)
        if place(store) is None:
            copy(store, capture, tables)
        copied = place(store) or 0
        for change in stream:
            assert change.commit is not None
            if change.commit.position.value > copied:
                with store:
                    put(store, change)
            change.ack.confirm()


def open_store(directory: Path) -> sqlite3.Connection:
    return sqlite3.connect(directory / "rows.sqlite", timeout=60)


def load_job(directory: Path) -> tuple[ChangeCapture, list[TableName]]:
    capture, tables = pickle.loads((directory / "capture.pickle").read_bytes())
    return capture, tables


def place(store: sqlite3.Connection) -> int | None:
    row = store.execute("SELECT position FROM place").fetchone()
    return None if row is None else int(row[0])


def copy(store: sqlite3.Connection, capture: ChangeCapture, tables: list[TableName]) -> None:
    """Store the snapshot in one transaction, with its fence."""
    at = Position.ZERO
    with store, closing(capture.snapshot(tables)) as snapshot:
        for change in snapshot:
            put(store, change)
            assert change.commit is not None
            at = change.commit.position
        store.execute("INSERT INTO place VALUES (?)", [at.value])


def put(store: sqlite3.Connection, change: Change) -> None:
    """Putting a change twice stores it once."""
    event = change.event
    if isinstance(event, Truncate):
        store.execute("DELETE FROM rows WHERE tab = ?", [str(event.table)])
    elif isinstance(event, Delete):
        store.execute("DELETE FROM rows WHERE tab = ? AND key = ?", [str(event.table), str(event.key["id"])])
    else:
        values = [str(event.table), str(event.key["id"]), event.row["note"]]
        store.execute("INSERT OR REPLACE INTO rows VALUES (?, ?, ?)", values)


if __name__ == "__main__":
    follow(Path(sys.argv[1]))
