"""Writes pgoutput messages as a server would: the other end of the decoder under test."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum

POSTGRES_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


class Absent(Enum):
    """An unchanged TOAST value."""

    UNCHANGED = "u"


Value = bytes | None | Absent
"""Postgres text, NULL, or unchanged TOAST."""

Tuple = Sequence[Value]


@dataclass(frozen=True)
class TableColumn:
    name: str
    type_oid: int = 25
    type_modifier: int = -1
    is_key: bool = False


@dataclass(frozen=True)
class Table:
    oid: int
    name: str
    columns: tuple[TableColumn, ...]
    identity: str = "d"
    schema: str = "public"


def microseconds(at: datetime) -> int:
    return (at - POSTGRES_EPOCH) // timedelta(microseconds=1)


def wal_data(payload: bytes, lsn: int = 0x1000) -> bytes:
    return struct.pack("!cQQq", b"w", lsn, lsn, 0) + payload


def keepalive(wal_end: int) -> bytes:
    return struct.pack("!cQqb", b"k", wal_end, 0, 0)


def begin(xid: int, final_lsn: int = 0) -> bytes:
    return wal_data(struct.pack("!cQqI", b"B", final_lsn, 0, xid))


def commit(end_lsn: int, at: datetime = POSTGRES_EPOCH) -> bytes:
    return wal_data(struct.pack("!cBQQq", b"C", 0, end_lsn - 8, end_lsn, microseconds(at)))


def relation(table: Table) -> bytes:
    head = (
        struct.pack("!cI", b"R", table.oid)
        + table.schema.encode()
        + b"\0"
        + table.name.encode(errors="surrogateescape")
        + b"\0"
        + table.identity.encode()
    )
    columns = b"".join(
        struct.pack("!B", column.is_key or table.identity == "f")
        + column.name.encode(errors="surrogateescape")
        + b"\0"
        + struct.pack("!Ii", column.type_oid, column.type_modifier)
        for column in table.columns
    )
    return wal_data(head + struct.pack("!H", len(table.columns)) + columns)


def row(values: Tuple) -> bytes:
    return struct.pack("!H", len(values)) + b"".join(map(_value, values))


def _value(value: Value) -> bytes:
    match value:
        case None:
            return b"n"
        case Absent.UNCHANGED:
            return b"u"
        case bytes():
            return struct.pack("!cI", b"t", len(value)) + value


def insert(oid: int, new: Tuple) -> bytes:
    return wal_data(struct.pack("!cI", b"I", oid) + b"N" + row(new))


def update(oid: int, new: Tuple, old: Tuple | None = None, marker: bytes = b"K") -> bytes:
    before = b"" if old is None else marker + row(old)
    return wal_data(struct.pack("!cI", b"U", oid) + before + b"N" + row(new))


def delete(oid: int, old: Tuple, marker: bytes = b"K") -> bytes:
    return wal_data(struct.pack("!cI", b"D", oid) + marker + row(old))


def truncate(*oids: int) -> bytes:
    return wal_data(struct.pack("!cIB", b"T", len(oids), 0) + struct.pack(f"!{len(oids)}I", *oids))


def type_name(oid: int, name: str, schema: str = "public") -> bytes:
    return wal_data(struct.pack("!cI", b"Y", oid) + schema.encode() + b"\0" + name.encode() + b"\0")


def origin(name: str, lsn: int = 0) -> bytes:
    return wal_data(struct.pack("!cQ", b"O", lsn) + name.encode() + b"\0")


def message(prefix: str, content: bytes, lsn: int, *, transactional: bool) -> bytes:
    head = struct.pack("!cBQ", b"M", transactional, lsn)
    return wal_data(head + prefix.encode() + b"\0" + struct.pack("!I", len(content)) + content, lsn)


def other(kind: bytes, rest: bytes = b"") -> bytes:
    """A message of any kind, well formed or not."""
    return wal_data(kind + rest)


# --- protocol version 2: transactions that are sent while they are open -------------------------------------


def streamed(message: bytes, xid: int) -> bytes:
    """The same message inside a block: with the xid of its (sub)transaction after the kind."""
    return message[:26] + struct.pack("!I", xid) + message[26:]


def stream_start(xid: int, *, is_first: bool = True) -> bytes:
    return wal_data(struct.pack("!cIB", b"S", xid, is_first))


def stream_stop() -> bytes:
    return wal_data(b"E")


def stream_commit(xid: int, end_lsn: int, at: datetime = POSTGRES_EPOCH) -> bytes:
    return wal_data(struct.pack("!cIBQQq", b"c", xid, 0, end_lsn - 8, end_lsn, microseconds(at)))


def stream_abort(xid: int, subxid: int) -> bytes:
    return wal_data(struct.pack("!cII", b"A", xid, subxid))
