"""Spark's calls to the source reader, without Spark: offset log, commit log, and a sink that skips a batch it
already has.

It makes the same calls in the same order as Spark, which differs between 4.1 and 4.2, and may die between any
two of them. Rows are read in this process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.capture.provision import ensure_capture
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.schema import TableName
from penstock.spark.datasource import PostgresCdcSource
from penstock.spark.stream import ChangeStreamReader
from penstock.spool.ownership import is_spool_locked
from penstock.spool.reader import SpoolReader
from tests.support.fix_postgres import Database
from tests.support.waiting import wait_for

Row = dict[str, Any]
Offset = dict[str, Any]


@dataclass
class Checkpoint:
    """State that outlives a run: the ends of batches, the number committed, and the sink's rows of each."""

    offsets: list[Offset] = field(default_factory=list)
    commits: int = 0
    kept: dict[int, list[Row]] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        return [row for number in sorted(self.kept) for row in self.kept[number]]

    def start(self, number: int, reader: ChangeStreamReader) -> Offset:
        return self.offsets[number - 1] if number else _stored(reader.initialOffset())


class Run:
    """One process of a query. `older` makes the calls of Spark 4.1."""

    def __init__(self, reader: ChangeStreamReader, checkpoint: Checkpoint, *, older: bool) -> None:
        self.reader = reader
        self.checkpoint = checkpoint
        self._older = older
        self._is_begun = False

    def step(self, *, keeps: bool = True, commits: bool = True) -> bool:
        """One batch, or the rest of an unfinished one; returns whether there was any. Without `commits` the
        run must end with it.
        """
        checkpoint = self.checkpoint
        self._take_up()
        if checkpoint.commits == len(checkpoint.offsets):
            number = checkpoint.commits
            start = checkpoint.start(number, self.reader)
            end = _stored(
                self.reader.latestOffset()
                if self._older
                else self.reader.latestOffset(start, self.reader.getDefaultReadLimit())
            )
            if end == start:
                return False
            checkpoint.offsets.append(end)
        number = checkpoint.commits
        rows = self._read(checkpoint.start(number, self.reader), checkpoint.offsets[number])
        if keeps or commits:
            checkpoint.kept.setdefault(number, rows)
        checkpoint.commits += int(commits)
        return True

    def until(self, condition: Callable[[list[Row]], object], what: str) -> list[Row]:
        """Run batches until the sink's rows are as wanted."""

        def over() -> bool:
            self.step()
            return bool(condition(self.checkpoint.rows))

        wait_for(over, what, lambda: (self.checkpoint.offsets[-3:], len(self.checkpoint.rows)))
        return self.checkpoint.rows

    def end(self) -> int:
        """Run batches until there are none left and return their number. For a query that ends."""
        count = 0
        while self.step():
            count += 1
        return count

    def _take_up(self) -> None:
        if not self._is_begun and self._older and self.checkpoint.offsets:
            last = self.checkpoint.offsets[-1]
            assert self.reader.partitions(last, last) == []
        self._is_begun = True

    def _read(self, start: Offset, end: Offset) -> list[Row]:
        rows: list[Row] = []
        for partition in self.reader.partitions(start, end):
            for batch in self.reader.read(partition):
                assert isinstance(batch, pa.RecordBatch)
                rows += batch.to_pylist()
        return rows


class LocalSource:
    """One table of one database, and queries over it. Publication and slot are left to them."""

    def __init__(self, database: Database, root: Path) -> None:
        self.database = database
        self.root = root
        self.spool = root / "spool"
        self.address = SourceAddress.parse(database.dsn)
        self.slot = database.name
        self.table = TableName("public", "orders")
        database.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
        database.execute("ALTER TABLE orders SET (autovacuum_enabled = false)")

    @property
    def options(self) -> dict[str, str]:
        options = {
            "dsn": self.address.dsn,
            "slot": self.slot,
            "spool": str(self.spool),
            "quietSeconds": "0.1",
        }
        if self.address.password is not None:
            options["password"] = self.address.password.reveal()
        return {**options, "table": str(self.table)}

    def provision(self) -> None:
        ensure_capture(self.address, self.slot, self.slot, [self.table])

    @contextmanager
    def run(
        self,
        checkpoint: Checkpoint | None = None,
        given: Mapping[str, str] | None = None,
        *,
        older: bool = False,
        **options: str,
    ) -> Iterator[Run]:
        source = PostgresCdcSource(
            {name: value for name, value in {**self.options, **(given or {}), **options}.items() if value}
        )
        reader = source.streamReader(source.schema())
        assert isinstance(reader, ChangeStreamReader)
        try:
            yield Run(reader, checkpoint or Checkpoint(), older=older)
        finally:
            reader.stop()

    def insert(self, first: int, last: int) -> None:
        self.database.execute(
            "INSERT INTO orders SELECT g, 'n' || g FROM generate_series(%s::int, %s::int) g", first, last
        )

    @property
    def position(self) -> Position:
        return Position.parse(self.database.query("SELECT pg_current_wal_insert_lsn()::text")[0][0])

    @property
    def current(self) -> dict[int, str | None]:
        return dict(self.database.query("SELECT id, note FROM orders"))

    def wait_for_spool(self, position: Position) -> None:
        reader = SpoolReader(self.spool)
        wait_for(
            lambda: (end := reader.end) is not None and end >= position,
            "spool",
            lambda: (reader.end, position),
        )

    def wait_until_free(self) -> None:
        wait_for(lambda: not is_spool_locked(self.spool), "unlocked spool")


def fold(rows: Iterable[Any]) -> dict[int, str | None]:
    """The current rows by key, from rows of Spark or of the engine. A value that no row carried is `lost`."""
    state: dict[int, str | None] = {}
    for row in sorted(rows, key=lambda row: (row["_commit_version"], row["_ordinal"])):
        if row["_change_type"] == "truncate":
            state.clear()
        elif row["_change_type"] == "delete":
            state.pop(row["id"], None)
        else:
            kept = row["_unchanged"] is not None and "note" in row["_unchanged"]
            state[row["id"]] = state.get(row["id"], "lost") if kept else row["note"]
    return state


def _stored(offset: Offset) -> Offset:
    """An offset as read back from a checkpoint."""
    return dict(json.loads(json.dumps(offset)))
