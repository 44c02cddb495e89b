"""What a segment says about itself.

A manifest covers the ground `(start, end]` of the log: every transaction that committed there, and nothing else. It also keeps the schema
of each table *as of that place in the log*, so neither the catalog nor a Parquet footer is needed to know what the files hold. A segment
without files is an empty one: the log went on and nothing captured was in it.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from penstock.change import ChangeCounts, LogicalMessage
from penstock.errors import SpoolCorruptError, SpoolFormatError
from penstock.position import Lsn, Position
from penstock.schema import Column, TableName, TableSchema
from penstock.spool.arrow_text import parse_type, type_text
from penstock.spool.layout import FORMAT


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """One Parquet file: changes of one table under one version of its schema, in order. `path` is relative to the segment."""

    schema: TableSchema
    path: str
    rows: int
    bytes: int
    counts: ChangeCounts
    min_position: Position
    max_position: Position
    commit_version: Position | None = None
    """Of the one transaction in the file, where its rows were written before it committed: their own columns are null."""
    commit_timestamp: datetime | None = None
    xid: int | None = None
    """Of that transaction; the rows' own column may name subtransactions. None also where a spool of format 1 has it in the rows."""
    is_old: bool = False
    """Whether these are rows as they were before updates. Who has not asked for them does not read them."""

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
    """Of the last transaction; None if there is none."""
    files: tuple[SegmentFile, ...]
    """The files of one table stand in the order of its changes."""
    messages: tuple[LogicalMessage, ...] = ()
    """Those that were asked for, in the order of the log, each in one segment only.

    A message outside of transactions belongs to the segment with `start <= lsn < end`: a server that is asked to start at a position
    sends just those that stand at it or after it.
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
    """Read what `dump_manifest` wrote; `where` names the segment in errors."""
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
        raise SpoolCorruptError(f"{where} is not a manifest", hint="delete the spool; what the targets lack is captured again") from error


def parse_document(data: bytes, *, where: str) -> dict[str, Any]:
    """Read one of the spool's JSON documents and refuse what a newer version wrote."""
    try:
        document = json.loads(data)
        written = document["format"]
        newer = written > FORMAT
    except (ValueError, KeyError, TypeError) as error:
        raise SpoolCorruptError(f"{where} is not a document of the spool", hint="restore the file, or delete the spool") from error
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
    """What says the same gives the same object: a schema is much larger than the rest of a manifest, and thousands repeat it."""
    columns = tuple(
        (column["name"], column["arrow_type"], column["type_oid"], column["type_modifier"], column.get("reader", ""))
        for column in document["columns"]
    )
    return _shared_schema(document["oid"], document["table"]["schema"], document["table"]["name"], columns, tuple(document["key"]))


@lru_cache(maxsize=16384)
def _shared_schema(
    oid: int, schema: str, name: str, columns: tuple[tuple[str, str, int, int, str], ...], key: tuple[str, ...]
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
    """Versions that do not know `unidentified` cannot read a manifest that has it, and must not: they would apply such rows."""
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
