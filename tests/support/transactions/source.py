"""A source whose server streams transactions as early as possible, and what a capture of it spools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from penstock.capture.provision import ensure_capture
from penstock.capture.settings import CaptureLimits, CaptureSettings
from penstock.capture.slot_capture import SpoolCapture
from penstock.change import LogicalMessage, LogStep, TransactionPiece, change_schema
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from penstock.postgres.pgoutput.messages import Payload
from penstock.schema import TableName
from penstock.spark.envelope import read_changes
from penstock.spool.reader import SpoolReader
from penstock.spool.status import load_status
from tests.support.fix_postgres import Database
from tests.support.waiting import DEADLINE_SECONDS

SMALLEST_WORK_MEM = "-c logical_decoding_work_mem=64kB"

Row = dict[str, Any]


class WatchedDecoder(PgOutputDecoder):
    """Records its input size and the size of the pieces it returns. One test at a time."""

    kinds: ClassVar[Counter[str]] = Counter()
    largest_piece: ClassVar[int] = 0
    most_carried: ClassVar[int] = 0

    @classmethod
    def reset(cls) -> None:
        cls.kinds.clear()
        cls.largest_piece = cls.most_carried = 0

    def decode(self, messages: Sequence[Payload]) -> list[LogStep]:
        cls = WatchedDecoder
        cls.kinds.update(chr(message[25]) for message in messages if len(message) > 25)
        steps = super().decode(messages)
        pieces = [
            sum(batch.rows.num_rows for batch in step.batches)
            for step in steps
            if isinstance(step, TransactionPiece)
        ]
        cls.largest_piece = max([cls.largest_piece, *pieces])
        cls.most_carried = max(cls.most_carried, self.carried_messages)
        return steps


class TransactionSource:
    """Two published tables and one that is not, a slot, and a spool."""

    def __init__(self, database: Database, spool: Path) -> None:
        self.database = database
        self.spool = spool
        self.address = SourceAddress.parse(database.dsn).with_parameters({"options": SMALLEST_WORK_MEM})
        self.slot = f"{database.name}_slot"
        self.kinds = WatchedDecoder.kinds
        database.execute("CREATE TABLE public.t (id bigint PRIMARY KEY, note text)")
        database.execute("CREATE TABLE public.u (id bigint PRIMARY KEY, n int)")
        database.execute("CREATE TABLE public.other (id bigint)")
        ensure_capture(self.address, self.slot, "p", [TableName("public", "t"), TableName("public", "u")])

    @property
    def position(self) -> Position:
        return Position.parse(self.database.query("SELECT pg_current_wal_insert_lsn()::text")[0][0])

    @property
    def confirmed(self) -> Position:
        rows = self.database.query(
            "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", self.slot
        )
        return Position.parse(rows[0][0])

    @contextmanager
    def capture(self, *, prefixes: tuple[str, ...] = ()) -> Iterator[SpoolCapture]:
        limits = CaptureLimits(quiet_seconds=0.1)
        settings = CaptureSettings(
            self.address, self.slot, "p", self.spool, (), limits, message_prefixes=prefixes
        )
        capture = SpoolCapture(settings)
        capture.start()
        try:
            yield capture
        finally:
            capture.stop()

    def catch_up(self, capture: SpoolCapture) -> None:
        """Wait until the spool holds everything that has committed by now."""
        position = self.position
        # WAL of open or rolled-back transactions may stay in the server's memory until a commit.
        self.database.execute("INSERT INTO public.other VALUES (0)")
        assert capture.wait_until(position, DEADLINE_SECONDS), load_status(self.spool)

    @property
    def open_files(self) -> list[Path]:
        return list(self.spool.glob("open/*/*.parquet"))

    @property
    def left_over(self) -> list[Path]:
        """Remaining files of finished transactions."""
        return list(self.spool.glob("open/*"))

    def changes(self, table: str) -> list[Row]:
        """The changes as a Spark task reads them, in log order. A row has the columns of its position in the
        log.
        """
        reader = SpoolReader(self.spool)
        assert reader.start is not None
        assert reader.end is not None
        found = reader.read(reader.start, reader.end).tables.get(TableName("public", table))
        rows = [
            row
            for part in (found.slices if found else ())
            for batch in read_changes([part], change_schema(part.file.schema))
            for row in batch.to_pylist()
        ]
        places = [(row["_commit_version"], row["_ordinal"]) for row in rows]
        assert places == sorted(set(places)), "each change is in the spool once, and in order"
        assert sum(segment.rows for segment in reader.segments()) >= len(rows)
        return rows

    def messages(self) -> list[LogicalMessage]:
        reader = SpoolReader(self.spool)
        assert reader.start is not None
        assert reader.end is not None
        return list(reader.read(reader.start, reader.end).messages)

    def mirrored(self, table: str) -> dict[int, Row]:
        """The current rows after all changes, by key."""
        rows: dict[int, Row] = {}
        for change in self.changes(table):
            own = {name: value for name, value in change.items() if not name.startswith("_")}
            match change["_change_type"]:
                case "delete":
                    del rows[change["id"]]
                case "truncate":
                    rows.clear()
                case "insert":
                    assert change["id"] not in rows
                    rows[change["id"]] = own
                case _:
                    rows[change["id"]] = own
        return rows

    def actual(self, table: str) -> dict[int, Row]:
        names = [
            row[0]
            for row in self.database.query(
                "SELECT attname FROM pg_attribute "
                "WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
                table,
            )
        ]
        rows = [
            dict(zip(names, row, strict=True)) for row in self.database.query(f"SELECT * FROM public.{table}")
        ]
        return {row["id"]: row for row in rows}
