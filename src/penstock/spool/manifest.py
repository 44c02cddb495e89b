"""The file layout of a spool, and the manifest of a segment.

```
capture.json            the slot and database system that the spool belongs to
capture-status.json     status of the capture
history.jsonl           schema history: the schemas of each table, and the position from which each holds
lock                    locked by the writer
moments.lock            locked while a polling capture takes a consistent read
segments/<end>/         manifest.json and Parquet files; a directory without manifest.json is not a segment
open/<xid>/             pieces of open transactions
consumers/<name>.json   released position of a consumer
consumers/<name>.lock   locked by that consumer while it runs
tables/<name>.json      recorded publication memberships of that consumer's tables
records.json            acknowledged position of a record source
```

The history begins with a line that has the format, such as `{"format": 3}`. Then there is a line for each
version: the `position` from which it holds, and `table`, `oid`, `key` and `columns` as in a manifest. The
versions of a table are in order.

A manifest covers the range `(start, end]` of the log: every transaction that committed there, and no other.
It contains the schema of each table as of that range, so readers need neither the catalog nor a Parquet
footer. A segment without files is empty: no captured table changed in its range.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from penstock.arrow import parse_type, type_text
from penstock.change import ChangeCounts, LogicalMessage
from penstock.errors import SpoolCorruptError, SpoolFormatError
from penstock.position import Lsn, Position
from penstock.schema import Column, TableName, TableSchema

FORMAT = 3
"""The format version of all files in a spool. Readers reject newer versions and read all older ones.

Since version 2, a file may give its rows their xid, and a manifest may contain logical messages. Since
version 3, a file may contain old rows.
"""

MANIFEST = "manifest.json"
TOMBSTONE = "manifest.json.deleted"
"""The name that retention gives the manifest of a deleted segment. The files of the segment may then be
removed.
"""

_SEGMENT = re.compile(r"[0-9A-F]{16}")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, slots=True)
class SpoolLayout:
    root: Path

    @property
    def identity(self) -> Path:
        return self.root / "capture.json"

    @property
    def status(self) -> Path:
        return self.root / "capture-status.json"

    @property
    def history(self) -> Path:
        return self.root / "history.jsonl"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def moment_lock(self) -> Path:
        return self.root / "moments.lock"

    @property
    def records(self) -> Path:
        return self.root / "records.json"

    @property
    def segments(self) -> Path:
        return self.root / "segments"

    @property
    def open(self) -> Path:
        return self.root / "open"

    @property
    def consumers(self) -> Path:
        return self.root / "consumers"

    def segment(self, end: Position) -> Path:
        return self.segments / f"{end.value:016X}"

    def open_transaction(self, xid: int) -> Path:
        return self.open / str(xid)

    def consumer(self, name: str) -> Path:
        return self.consumers / f"{quote(name, safe='')}.json"

    def consumer_lock(self, name: str) -> Path:
        """Return the lock file of the consumer with that name."""
        return self.consumers / f"{quote(name, safe='')}.lock"


def parse_segment_name(name: str) -> Position | None:
    """Return the end of the segment in the directory of this name; None if it is not a segment."""
    return Position.of(int(name, 16)) if _SEGMENT.fullmatch(name) else None


def consumer_name(file_name: str) -> str | None:
    """Return the name of the consumer that a file belongs to; None for other files."""
    return unquote(file_name.removesuffix(".json")) if file_name.endswith(".json") else None


def change_file_name(start: Position, index: int, table: TableName) -> str:
    """Return the name of a Parquet file in a segment.

    It contains the start, so that a re-captured segment has other file names.

    It does not begin with `_` or `.`, which Spark treats as hidden, and contains no glob characters.
    """
    return f"{start.value:016X}-{index:04d}-{_UNSAFE.sub('_', str(table))[:60]}.parquet"


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """One Parquet file: changes of one table under one version of its schema, in order.

    `path` is relative to the segment.
    """

    schema: TableSchema
    path: str
    rows: int
    bytes: int
    counts: ChangeCounts
    min_position: Position
    max_position: Position
    commit_version: Position | None = None
    """The position of the rows' transaction, if they were written before it committed. The column in the rows
    is then null.
    """
    commit_timestamp: datetime | None = None
    xid: int | None = None
    """Top-level xid of the transaction that committed at `commit_version`; the column in the rows may contain
    xids of subtransactions.

    None in spools of format 1.
    """
    is_old: bool = False
    """Whether the file has only old rows of updates (`update_preimage`)."""

    @property
    def table(self) -> TableName:
        return self.schema.name

    @property
    def oid(self) -> int:
        return self.schema.oid


@dataclass(frozen=True, slots=True)
class Manifest:
    start: Position
    end: Position
    transactions: int
    commit_time: datetime | None
    """Commit time of the last transaction; None if there is none."""
    files: tuple[SegmentFile, ...]
    """The files of one table are in the order of its changes."""
    messages: tuple[LogicalMessage, ...] = ()
    """Logical messages in log order, each in one segment only.

    A non-transactional message belongs to the segment with `start <= lsn < end`, because a server that starts
    at a position sends the messages at or after it.
    """

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def dump_manifest(manifest: Manifest) -> bytes:
    document = {
        "format": FORMAT,
        "start": str(manifest.start),
        "end": str(manifest.end),
        "transactions": manifest.transactions,
        "commit_time": _time_text(manifest.commit_time),
        "files": [_file_document(file) for file in manifest.files],
        "messages": [_message_document(message) for message in manifest.messages],
    }
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def parse_manifest(data: bytes, *, where: str) -> Manifest:
    """Parse a manifest; `where` names the segment in errors."""
    document = parse_document(data, where=where)
    try:
        return Manifest(
            start=Position.parse(document["start"]),
            end=Position.parse(document["end"]),
            transactions=document["transactions"],
            commit_time=_parse_time(document["commit_time"]),
            files=tuple(_parse_file(file) for file in document["files"]),
            messages=tuple(_parse_message(message) for message in document.get("messages", ())),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SpoolCorruptError(
            f"{where} is not a manifest",
            hint="delete the spool; changes that the targets lack are captured again",
        ) from error


def parse_document(data: bytes, *, where: str) -> dict[str, Any]:
    """Parse a JSON document of the spool. Raises SpoolFormatError for a newer format."""
    try:
        document = json.loads(data)
        written = document["format"]
        newer = written > FORMAT
    except (ValueError, KeyError, TypeError) as error:
        raise SpoolCorruptError(
            f"{where} is not a document of the spool", hint="restore the file, or delete the spool"
        ) from error
    if newer:
        raise SpoolFormatError(
            f"{where} has format {written}; this version of penstock reads up to {FORMAT}",
            hint="run the version of penstock that wrote this spool, or a newer one",
        )
    return dict(document)


def schema_document(schema: TableSchema) -> dict[str, object]:
    return {
        "table": {"schema": schema.name.schema, "name": schema.name.name},
        "oid": schema.oid,
        "key": list(schema.key),
        "columns": [
            {
                "name": column.name,
                "type_oid": column.type_oid,
                "type_modifier": column.type_modifier,
                "arrow_type": type_text(column.arrow_type),
                **({"reader": column.reader} if column.reader else {}),
            }
            for column in schema.columns
        ],
    }


def parse_schema(document: dict[str, Any]) -> TableSchema:
    """Parse a schema.

    Equal documents give the same object, because thousands of manifests repeat a schema.
    """
    columns = tuple(
        (
            column["name"],
            column["arrow_type"],
            column["type_oid"],
            column["type_modifier"],
            column.get("reader", ""),
        )
        for column in document["columns"]
    )
    return _shared_schema(
        document["oid"],
        document["table"]["schema"],
        document["table"]["name"],
        columns,
        tuple(document["key"]),
    )


@lru_cache(maxsize=16384)
def _shared_schema(
    oid: int,
    schema: str,
    name: str,
    columns: tuple[tuple[str, str, int, int, str], ...],
    key: tuple[str, ...],
) -> TableSchema:
    return TableSchema(
        oid,
        TableName(schema, name),
        tuple(
            Column(column, parse_type(arrow_type), type_oid, type_modifier, reader)
            for column, arrow_type, type_oid, type_modifier, reader in columns
        ),
        key,
    )


def _file_document(file: SegmentFile) -> dict[str, object]:
    return {
        **schema_document(file.schema),
        "path": file.path,
        "rows": file.rows,
        "bytes": file.bytes,
        "counts": _counts_document(file.counts),
        "min_position": str(file.min_position),
        "max_position": str(file.max_position),
        "commit_version": None if file.commit_version is None else str(file.commit_version),
        "commit_timestamp": _time_text(file.commit_timestamp),
        "xid": file.xid,
        **({"is_old": True} if file.is_old else {}),
    }


def _counts_document(counts: ChangeCounts) -> dict[str, int]:
    """Omit `unidentified` if it is 0.

    If it is set, older versions of Penstock fail on the unknown field. That is intended: they would apply
    such rows.
    """
    document = asdict(counts)
    if not counts.unidentified:
        del document["unidentified"]
    return document


def _parse_file(document: dict[str, Any]) -> SegmentFile:
    version = document["commit_version"]
    return SegmentFile(
        schema=parse_schema(document),
        path=document["path"],
        rows=document["rows"],
        bytes=document["bytes"],
        counts=ChangeCounts(**document["counts"]),
        min_position=Position.parse(document["min_position"]),
        max_position=Position.parse(document["max_position"]),
        commit_version=None if version is None else Position.parse(version),
        commit_timestamp=_parse_time(document["commit_timestamp"]),
        xid=document.get("xid"),
        is_old=document.get("is_old", False),
    )


def _message_document(message: LogicalMessage) -> dict[str, object]:
    return {
        "prefix": message.prefix,
        "content": b64encode(message.content).decode(),
        "lsn": str(message.lsn),
        "xid": message.xid,
        "ordinal": message.ordinal,
        "position": None if message.position is None else str(message.position),
    }


def _parse_message(document: dict[str, Any]) -> LogicalMessage:
    position = document["position"]
    return LogicalMessage(
        prefix=document["prefix"],
        content=b64decode(document["content"]),
        lsn=Lsn.parse(document["lsn"]),
        xid=document["xid"],
        ordinal=document["ordinal"],
        position=None if position is None else Position.parse(position),
    )


def _time_text(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()


def _parse_time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
