"""A streaming query under test: the rows it received, batch by batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamReader

from penstock.capture.provision import ensure_capture
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.schema import TableName
from penstock.spark.control import CONTROL_FORMAT, ControlSource
from penstock.spool.ownership import is_spool_locked
from penstock.spool.reader import SpoolReader
from tests.support.fix_postgres import Database
from tests.support.waiting import DEADLINE_SECONDS, wait_for

OnBatch = Callable[[int], None]


class BatchRefusedError(Exception):
    """Raised by a sink in a test."""


@dataclass(frozen=True)
class Batch:
    number: int
    rows: list[Row]


class RunningQuery:
    """One run.

    `on_batch` is called with the number of each batch before its rows are kept; it may wait, or raise.
    """

    def __init__(self, checkpoint: Path, *, collects: bool = True) -> None:
        self.checkpoint = checkpoint
        self._collects = collects
        self.batches: list[Batch] = []
        self.on_batch: OnBatch = lambda _number: None
        self.query: StreamingQuery | None = None

    def take(self, frame: DataFrame, number: int) -> None:
        rows = frame.collect() if self._collects else []
        if rows:
            self.on_batch(number)
        self.batches.append(Batch(number, rows))

    @property
    def rows(self) -> list[Row]:
        return [row for batch in self.batches for row in batch.rows]

    @property
    def filled(self) -> list[Batch]:
        return [batch for batch in self.batches if batch.rows]

    def wait_for_rows(self, count: int) -> list[Row]:
        """Wait for exactly this number of rows, and return them. More rows are an error too."""
        self.wait_for(lambda: len(self.rows) >= count, f"{count} rows")
        assert [(batch.number, len(batch.rows)) for batch in self.filled if len(self.rows) != count] == []
        return self.rows

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        def over() -> bool:
            assert self.query is not None
            if (error := self.query.exception()) is not None:
                raise AssertionError(f"the query failed: {error}")
            return bool(condition())

        wait_for(over, what, lambda: [(batch.number, len(batch.rows)) for batch in self.batches])

    def wait_for_failure(self) -> str:
        assert self.query is not None
        query = self.query
        wait_for(lambda: not query.isActive, "failure of the query", lambda: query.lastProgress)
        error = query.exception()
        assert error is not None
        return str(error)

    def finish(self) -> None:
        """Stop after Spark has recorded the last batch as committed.

        Before that, Spark would repeat the batch.
        """
        last = self.checkpoint / "commits" / str(self.batches[-1].number)
        self.wait_for(last.exists, f"commit of batch {last.name}")
        self.stop()

    def stop(self) -> None:
        assert self.query is not None
        self.query.stop()

    def offset(self, number: int) -> dict[str, str]:
        """The end of a batch, as Spark wrote it before running it."""
        lines = (self.checkpoint / "offsets" / str(number)).read_text(encoding="utf-8").splitlines()
        return dict(json.loads(lines[2]))


class ChangeSource:
    """One table of one database, a spool, a checkpoint."""

    def __init__(self, spark: SparkSession, database: Database, root: Path) -> None:
        self.spark = spark
        self.database = database
        self.spool = root / "spool"
        self.checkpoint = root / "checkpoint"
        self.slot = database.name
        self.address = SourceAddress.parse(database.dsn)
        self._runs: list[RunningQuery] = []
        database.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
        self.provision()

    def provision(self) -> None:
        """Create publication and slot, so that later commits of the test are captured."""
        ensure_capture(self.address, self.slot, self.slot, [TableName("public", "orders")])

    @property
    def options(self) -> dict[str, str]:
        options = {
            "dsn": self.address.dsn,
            "slot": self.slot,
            "publication": self.slot,
            "spool": str(self.spool),
        }
        if self.address.password is not None:
            options["password"] = self.address.password.reveal()
        # Short intervals for segments and for empty segments, because tests wait for both.
        return {**options, "table": "public.orders", "quietSeconds": "0.5", "startingPosition": "slot"}

    def reader(
        self, options: dict[str, str] | None = None, *, spark: SparkSession | None = None
    ) -> DataStreamReader:
        return (
            (spark or self.spark)
            .readStream.format("postgres-cdc")
            .options(**{**self.options, **(options or {})})
        )

    def start(
        self, on_batch: OnBatch | None = None, trigger: dict[str, Any] | None = None, **options: str
    ) -> RunningQuery:
        run = RunningQuery(self.checkpoint)
        if on_batch is not None:
            run.on_batch = on_batch
        return self._start(self.reader(options), run, trigger)

    def start_control(self, checkpoint: Path | None = None, **options: str) -> RunningQuery:
        self.spark.dataSource.register(ControlSource)
        reader = self.spark.readStream.format(CONTROL_FORMAT).options(**{**self.options, **options})
        return self._start(reader, RunningQuery(checkpoint or self.checkpoint, collects=False), None)

    def _start(
        self, reader: DataStreamReader, run: RunningQuery, trigger: dict[str, Any] | None
    ) -> RunningQuery:
        writer = (
            reader.load().writeStream.foreachBatch(run.take).option("checkpointLocation", str(run.checkpoint))
        )
        if trigger is not None:
            writer = writer.trigger(**trigger)
        run.query = writer.start()
        self._runs.append(run)
        return run

    def insert(self, first: int, last: int) -> None:
        """Insert rows with these ids in one transaction."""
        self.database.execute(
            "INSERT INTO orders SELECT g, 'n' || g FROM generate_series(%s::int, %s::int) g", first, last
        )

    def insert_segments(self, count: int, rows: int, first: int = 1) -> None:
        """Create this number of segments with this number of rows. A capture must be running."""
        for number in range(count):
            self.insert(first + number * rows, first + (number + 1) * rows - 1)
            self.wait_for_spool(first + (number + 1) * rows - 1)

    def wait_for_spool(self, last: int) -> None:
        """Wait until the spool has the last insert, the one with this id."""
        reader = SpoolReader(self.spool)
        goal = Position.parse(self.database.query("SELECT pg_current_wal_insert_lsn()::text")[0][0])

        def seen() -> bool:
            end = reader.end
            return end is not None and end >= goal

        wait_for(seen, f"segment with row {last}", lambda: (reader.end, goal))

    def delete_spool(self) -> None:
        """Call it when no capture writes to the spool: an ending capture frees the slot first, then writes
        its last status.
        """
        wait_for(lambda: not is_spool_locked(self.spool), "unlocked spool")
        shutil.rmtree(self.spool)

    def drop_slot(self) -> None:
        self.wait_for_idle_slot()
        self.database.execute("SELECT pg_drop_replication_slot(%s)", self.slot)

    def is_slot_active(self) -> bool:
        return self.database.query(
            "SELECT active FROM pg_replication_slots WHERE slot_name = %s", self.slot
        ) == [(True,)]

    def wait_for_idle_slot(self, seconds: float = DEADLINE_SECONDS) -> None:
        wait_for(lambda: not self.is_slot_active(), "idle slot", seconds=seconds)

    def wait_for_active_slot(self) -> None:
        wait_for(self.is_slot_active, "active slot")

    @property
    def confirmed(self) -> Position:
        rows = self.database.query(
            "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", self.slot
        )
        return Position.parse(rows[0][0])

    def close(self) -> None:
        for run in self._runs:
            run.stop()
