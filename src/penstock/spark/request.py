"""What a user of the source asks for: the options, read and completed by their defaults."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from penstock.capture.settings import CaptureSettings, tables_option
from penstock.errors import ConfigError
from penstock.position import Position
from penstock.postgres.chunks import BLOCK_BYTES
from penstock.postgres.connection import SourceAddress
from penstock.schema import TableName
from penstock.spark import options as declared
from penstock.spark.admission import Admission
from penstock.spark.snapshot_plan import ROW_BYTES

_NAME_LENGTH = 63
_CAPTURE_OPTIONS = frozenset(CaptureSettings.OPTION_NAMES)


@dataclass(frozen=True, slots=True)
class TableChoice:
    """Which tables are wanted: names with patterns in them, or none at all for everything that the publication holds."""

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
            fnmatchcase(table.schema, each.schema) and fnmatchcase(table.name, each.name) for each in self.patterns
        )

    def __str__(self) -> str:
        return ",".join(map(str, self.patterns)) or "all"


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """A stream as it was asked for, complete."""

    options: Mapping[str, str]
    """As `CaptureSettings` reads them, without tables: these are for whoever knows the source to fill in."""
    choice: TableChoice
    consumer: str
    start: str | Position
    end: Position | None
    admission: Admission
    snapshot_admission: Admission
    chunk_bytes: int
    hold_seconds: float
    columns: tuple[str, ...] = ()
    """Of a batch; empty for all."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceRequest:
        given = declared.check_options(options)
        choice = TableChoice.parse(given)
        capture = {name: value for name, value in given.items() if name in _CAPTURE_OPTIONS and name != "tables"}
        capture["slot"] = given.get("slot") or _default_slot(given["dsn"], choice)
        capture["spool"] = given.get("spool") or str(_state_directory() / "spool" / _server(given["dsn"]) / capture["slot"])
        admission = Admission.from_options(given)
        # Blocks of a heap have no count of rows: bytes bound a batch of them, unless rows were asked for.
        in_blocks = admission if "maxrowsperbatch" in given else Admission(None, admission.bytes, None)
        return cls(
            capture,
            choice,
            given.get("consumer") or f"spark-{choice}",
            _start(given.get("startingposition") or declared.SNAPSHOT),
            _position("endingPosition", given["endingposition"]) if "endingposition" in given else None,
            admission,
            in_blocks,
            _chunk_bytes(given, in_blocks.rows),
            declared.seconds_option(given, "snapshotHoldSeconds"),
            tuple(_column(part) for part in _split(given.get("columns", ""))),
        )

    def capture(self, tables: Iterable[TableName] = ()) -> CaptureSettings:
        return CaptureSettings.from_options({**self.options, "tables": tables_option(tables)})


def _column(text: str) -> str:
    return text[1:-1].replace('""', '"') if text.startswith('"') else text


def _chunk_bytes(given: Mapping[str, str], rows: int | None) -> int:
    """Not more than a batch may hold; a chunk has one block at least."""
    wanted = declared.count_option(given, "chunkBytes") or 0
    return wanted if rows is None else min(wanted, max(BLOCK_BYTES, rows * ROW_BYTES))


def _split(text: str) -> list[str]:
    """At commas that stand outside of double quotes."""
    parts = [part.strip() for part in re.findall(r'((?:"(?:[^"]|"")*"|[^,"])+)', text)]
    return [part for part in parts if part]


def _name(option: str, text: str) -> TableName:
    try:
        return TableName.parse(text.strip())
    except ValueError as error:
        raise ConfigError(f"the option {option!r} is {error}", hint='write it as in SQL: public.orders, or public."my orders"') from error


def _start(text: str) -> str | Position:
    if text.lower() in (declared.SNAPSHOT, declared.NOW, declared.SLOT):
        return text.lower()
    return _position("startingPosition", text)


def _position(option: str, text: str) -> Position:
    try:
        return Position.parse(text.strip())
    except ValueError as error:
        raise ConfigError(
            f"the option {option!r} is {text!r}",
            hint="use snapshot, now, slot, or a position such as 0/16B3748" if option == "startingPosition" else "such as 0/16B3748",
        ) from error


def _default_slot(dsn: str, choice: TableChoice) -> str:
    """Says what it is for, and is another one for other tables; slots are named in one space for all databases of a server."""
    address = SourceAddress.parse(dsn)
    database = address.describe().rpartition("/")[2]
    text = f"penstock_{database}_{choice}"
    plain = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
    if plain == text.replace(".", "_") and len(plain) <= _NAME_LENGTH:
        return plain
    return f"{plain[: _NAME_LENGTH - 9]}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _server(dsn: str) -> str:
    """The server as the name of a directory: databases, and so slots, of the same name on two servers are two sources."""
    place = SourceAddress.parse(dsn).describe().rpartition("/")[0].rpartition("@")[2]
    plain = re.sub(r"[^A-Za-z0-9.-]+", "_", place).strip("._")
    is_same = plain.replace("_", ":") == place and len(plain) <= _NAME_LENGTH
    return plain if is_same else f"{plain[: _NAME_LENGTH - 9]}_{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def _state_directory() -> Path:
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "penstock"
