"""Parse the options of one use of the source, and run queries until all available changes are read.

Spark 4.2 and later read all available changes with `Trigger.AvailableNow`. Under that trigger, Spark 4.1 runs
exactly one batch of a Python source, and after a crash only the failed batch. With Spark 4.1, `available_now`
therefore repeats the query. Every run ends at the position that the source had before the first run; the last
run is the one that reads no further change.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from penstock.capture.settings import CAPTURE_OPTIONS, CaptureSettings, tables_option
from penstock.errors import ConfigError
from penstock.position import Position
from penstock.postgres.chunks import BLOCK_BYTES
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.slot import current_position
from penstock.schema import TableName
from penstock.spark.options import NOW, SLOT, SNAPSHOT, Admission, SourceOptions, check_options
from penstock.spark.snapshot_plan import ROW_BYTES

_NAME_LENGTH = 63


@dataclass(frozen=True, slots=True)
class TableChoice:
    """The selected tables: one name, patterns, or no patterns for all tables of the publication."""

    patterns: tuple[TableName, ...]
    is_single: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> TableChoice:
        if "table" in given:
            return cls((_name("table", given["table"]),), is_single=True)
        return cls(tuple(_name("tables", part) for part in _split(given.get("tables", ""))))

    @property
    def single(self) -> TableName | None:
        return self.patterns[0] if self.is_single else None

    def selects(self, table: TableName) -> bool:
        if self.is_single:
            return table == self.patterns[0]
        return not self.patterns or any(
            fnmatchcase(table.schema, each.schema) and fnmatchcase(table.name, each.name)
            for each in self.patterns
        )

    def __str__(self) -> str:
        return ",".join(map(str, self.patterns)) or "all"


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """The parsed options of one use of the source, with defaults."""

    options: Mapping[str, str]
    """Options for `CaptureSettings`, without tables, which the caller adds after reading the catalog."""
    choice: TableChoice
    consumer: str
    start: str | Position
    end: Position | None
    admission: Admission
    snapshot_admission: Admission
    chunk_bytes: int
    hold_seconds: float
    columns: tuple[str, ...] = ()
    """Columns of a batch query; empty for all."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceRequest:
        given = check_options(options)
        own = SourceOptions.parse(given)
        choice = TableChoice.parse(given)
        capture = {
            name: value for name, value in given.items() if name in CAPTURE_OPTIONS.keys and name != "tables"
        }
        capture["slot"] = given.get("slot") or _default_slot(given["dsn"], choice)
        capture["spool"] = given.get("spool") or str(
            _state_directory() / "spool" / _server(given["dsn"]) / capture["slot"]
        )
        admission = Admission.from_options(given)
        # The number of rows in heap blocks is unknown, so bytes limit a snapshot batch, unless
        # maxRowsPerBatch is set.
        snapshot_admission = (
            admission if "maxrowsperbatch" in given else Admission(None, admission.bytes, None)
        )
        return cls(
            capture,
            choice,
            own.consumer or f"spark-{choice}",
            _start(own.starting_position),
            _position("endingPosition", own.ending_position) if own.ending_position else None,
            admission,
            snapshot_admission,
            _chunk_bytes(own.chunk_bytes, snapshot_admission.rows),
            own.snapshot_hold_seconds,
            tuple(_column(part) for part in _split(own.columns)),
        )

    def capture(self, tables: Iterable[TableName] = ()) -> CaptureSettings:
        return CaptureSettings.from_options({**self.options, "tables": tables_option(tables)})


def _column(text: str) -> str:
    return text[1:-1].replace('""', '"') if text.startswith('"') else text


def _chunk_bytes(wanted: int, rows: int | None) -> int:
    """Bytes per chunk: `wanted`, or less if `rows` limits a batch, but at least one block."""
    return wanted if rows is None else min(wanted, max(BLOCK_BYTES, rows * ROW_BYTES))


def _split(text: str) -> list[str]:
    """Split at commas outside of double quotes."""
    parts = [part.strip() for part in re.findall(r'((?:"(?:[^"]|"")*"|[^,"])+)', text)]
    return [part for part in parts if part]


def _name(option: str, text: str) -> TableName:
    try:
        return TableName.parse(text.strip())
    except ValueError as error:
        raise ConfigError(
            f"the option {option!r} is {error}",
            hint='write it as in SQL: public.orders, or public."my orders"',
        ) from error


def _start(text: str) -> str | Position:
    if text.lower() in (SNAPSHOT, NOW, SLOT):
        return text.lower()
    return _position("startingPosition", text)


def _position(option: str, text: str) -> Position:
    try:
        return Position.parse(text.strip())
    except ValueError as error:
        raise ConfigError(
            f"the option {option!r} is not valid: {text!r}",
            hint="use snapshot, now, slot, or a position such as 0/16B3748"
            if option == "startingPosition"
            else "use a position such as 0/16B3748",
        ) from error


def _default_slot(dsn: str, choice: TableChoice) -> str:
    """A slot name derived from the database and the tables. Slot names are unique per server, across
    databases.
    """
    address = SourceAddress.parse(dsn)
    database = address.describe().rpartition("/")[2]
    text = f"penstock_{database}_{choice}"
    plain = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
    if plain == text.replace(".", "_") and len(plain) <= _NAME_LENGTH:
        return plain
    return f"{plain[: _NAME_LENGTH - 9]}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _server(dsn: str) -> str:
    """A directory name for the server: two servers may have databases, and so slots, with the same name."""
    place = SourceAddress.parse(dsn).describe().rpartition("/")[0].rpartition("@")[2]
    plain = re.sub(r"[^A-Za-z0-9.-]+", "_", place).strip("._")
    is_same = plain.replace("_", ":") == place and len(plain) <= _NAME_LENGTH
    return (
        plain if is_same else f"{plain[: _NAME_LENGTH - 9]}_{hashlib.sha256(place.encode()).hexdigest()[:8]}"
    )


def _state_directory() -> Path:
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "penstock"


FORMAT = "postgres-cdc"


def available_now(
    spark: SparkSession, options: Mapping[str, str], write: Callable[[DataFrame], DataStreamWriter]
) -> StreamingQuery:
    """Read all changes committed before the call, in batches as large as the options allow; returns the last
    query.

    `write` gets the stream and returns its writer, with sink and checkpoint but without a trigger. It is
    called once per run of the query. Raises the error that ended a query. On Spark 4.1 the calling program
    itself must be able to connect to the source.
    """
    is_once_enough = tuple(map(int, spark.version.split(".")[:2])) >= (4, 2)
    chosen = dict(options) if is_once_enough else {**options, "endingPosition": _now(options)}
    while True:
        stream = spark.readStream.format(FORMAT).options(**chosen).load()
        query = write(stream).trigger(availableNow=True).start()
        query.awaitTermination()
        if is_once_enough or not any(_has_moved(progress) for progress in query.recentProgress):
            return query


def _now(options: Mapping[str, str]) -> str:
    with connect(SourceRequest.parse(options).capture().address) as connection:
        return str(current_position(connection))


def _has_moved(progress: Any) -> bool:
    """Whether the batch with this progress read changes of Penstock's source. Other sources of the query are
    ignored, since they may always have data.
    """
    ours = [source for source in progress["sources"] if "position" in str(source["endOffset"])]
    return any(source["startOffset"] != source["endOffset"] for source in ours)
