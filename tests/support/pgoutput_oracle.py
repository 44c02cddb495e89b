"""A small, slow decoder of pgoutput: one message, field and value at a time.

The fast one must agree with it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

import pyarrow as pa

from penstock.change import REPLACED, ChangeType, LogicalMessage
from penstock.errors import ProtocolError, UnreadableTextError
from penstock.position import Lsn, Position
from penstock.schema import Column, TableName, TableSchema
from tests.support.pgoutput_builder import POSTGRES_EPOCH, Absent, Value
from tests.support.typed_text import arrow_type, decode_text


@dataclass(frozen=True)
class OracleRow:
    table: TableSchema
    change_type: str
    ordinal: int
    values: dict[str, Any]
    unchanged: tuple[str, ...] | None = None
    exact: dict[str, str] | None = None
    is_move: bool = field(default=False, compare=False)
    """The insert half of a key change."""


@dataclass(frozen=True)
class OracleTransaction:
    xid: int
    position: int
    time: datetime
    rows: list[OracleRow]
    messages: list[LogicalMessage] = field(default_factory=list)

    @property
    def moves(self) -> int:
        return sum(row.is_move for row in self.rows)


@dataclass
class _Stream:
    """A streamed transaction: its messages so far, by subtransaction, and its view of table schemas."""

    rows: list[tuple[int, OracleRow]] = field(default_factory=list)
    messages: list[LogicalMessage] = field(default_factory=list)
    tables: dict[int, tuple[int, TableSchema, bool]] = field(default_factory=dict)
    ordinal: int = 0


@dataclass
class Oracle:
    """Decodes a whole stream, whose transactions count only once they have committed."""

    keys: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    prefixes: frozenset[str] = frozenset()
    old_rows: bool = False
    transactions: list[OracleTransaction] = field(default_factory=list)
    messages: list[LogicalMessage] = field(default_factory=list)
    """The messages outside of transactions."""

    def __post_init__(self) -> None:
        self._tables: dict[int, tuple[int, TableSchema, bool]] = {}
        self._visible = self._tables
        self._described = 0
        self._streams: dict[int, _Stream] = {}
        self._waiting: list[bytes] | None = None
        self._block: _Stream | None = None

    @property
    def has_open_transaction(self) -> bool:
        """Whether a streamed transaction is incomplete."""
        return self._waiting is not None

    def decode(self, messages: Sequence[bytes]) -> list[OracleTransaction]:
        for message in messages:
            if message[:1] == b"k" and len(message) == 18:
                continue
            payload = message[25:]
            if message[:1] != b"w" or len(payload) == 0 or payload[:1] not in b"BCORYIUDTMSEcA":
                raise ProtocolError("unknown")
            if payload[:1] != b"M" or self.prefixes:
                self._check_place(payload)
                self._dispatch(payload)
        return self.transactions

    def _check_place(self, payload: bytes) -> None:
        kind = payload[:1]
        place = (
            "transaction" if self._waiting is not None else "block" if self._block is not None else "between"
        )
        allowed = {
            "between": b"BScAM",
            "transaction": b"CORYIUDTM",
            "block": b"EORYIUDTM",
        }
        if kind not in allowed[place]:
            raise ProtocolError("place")
        if kind == b"M":
            reader = _Reader(payload[5:] if place == "block" else payload[1:])
            self._message(reader, is_loose=place == "between")

    def _dispatch(self, payload: bytes) -> None:
        match payload[:1]:
            case b"S":
                self._stream_start(payload)
            case b"E":
                _unpack("!", payload)
                self._block = None
            case b"c":
                self._stream_commit(payload)
            case b"A":
                self._stream_abort(payload)
            case b"C":
                assert self._waiting is not None
                self._transaction([*self._waiting, payload])
                self._waiting = None
            case b"M" if self._waiting is None and self._block is None:
                self.messages += self._message(_Reader(payload[1:]), is_loose=True)
            case _ if self._block is not None:
                self._streamed(self._block, payload)
            case _:
                self._waiting = [*(self._waiting or []), payload]

    def _transaction(self, payloads: list[bytes]) -> None:
        _, _, xid = _unpack("!QqI", payloads[0])
        _, _, end, microseconds = _unpack("!BQQq", payloads[-1])
        whole = _Stream(tables=self._tables)
        for payload in payloads[1:-1]:
            self._take(whole, xid, payload)
        self._commit(xid, end, microseconds, whole)

    def _commit(self, xid: int, end: int, microseconds: int, stream: _Stream) -> None:
        try:
            time = POSTGRES_EPOCH + timedelta(microseconds=microseconds)
        except OverflowError:
            raise ProtocolError("time") from None
        if not (self.transactions[-1].position if self.transactions else 0) < end < 1 << 63:
            raise ProtocolError("position")
        messages = [replace(message, xid=xid, position=Position.of(end)) for message in stream.messages]
        self.transactions.append(OracleTransaction(xid, end, time, [row for _, row in stream.rows], messages))

    def _take(self, stream: _Stream, xid: int, payload: bytes) -> None:
        """One message of a transaction, without the xid that it has in a block."""
        self._visible = stream.tables
        reader = _Reader(payload[1:])
        match payload[:1]:
            case b"R":
                self._relation(reader)
            case b"Y":
                reader.fields("!I")
                reader.name()
                reader.name()
                reader.finish()
            case b"M":
                stream.messages += [
                    replace(message, xid=xid, ordinal=stream.ordinal)
                    for message in self._message(reader, is_loose=False)
                ]
            case b"I" | b"U" | b"D":
                found = self._change(payload[:1], reader)
                stream.rows += [(xid, replace(row, ordinal=stream.ordinal + row.ordinal)) for row in found]
                stream.ordinal += 2 if payload[:1] == b"U" and payload[5:6] != b"N" else 1
            case b"T":
                for oid in self._truncate(reader):
                    table = self._table(oid)
                    stream.rows.append(
                        (
                            xid,
                            self._row(
                                table, ChangeType.TRUNCATE, stream.ordinal, [None] * len(table.columns)
                            ),
                        )
                    )
                    stream.ordinal += 1

    def _stream_start(self, payload: bytes) -> None:
        xid, flag = _unpack("!IB", payload)
        if (flag == 1) == (xid in self._streams):
            raise ProtocolError("first block")
        self._block = self._streams.setdefault(xid, _Stream())

    def _streamed(self, stream: _Stream, payload: bytes) -> None:
        if payload[:1] == b"O":
            return
        (subxid,) = _Reader(payload[1:]).fields("!I")
        self._take(stream, subxid, payload[:1] + payload[5:])

    def _stream_commit(self, payload: bytes) -> None:
        xid, _, _, end, microseconds = _unpack("!IBQQq", payload)
        stream = self._ended(xid)
        del self._streams[xid]
        self._commit(xid, end, microseconds, stream)
        # The last description is valid: one sent outside the transaction may be newer than the transaction's
        # own.
        for oid, described in stream.tables.items():
            self._tables[oid] = max(described, self._tables.get(oid, described), key=lambda each: each[0])

    def _stream_abort(self, payload: bytes) -> None:
        xid, subxid = _unpack("!II", payload)
        if xid != subxid and xid not in self._streams:
            return
        stream = self._ended(xid)
        if xid == subxid:
            del self._streams[xid]
        stream.rows = [(owner, row) for owner, row in stream.rows if owner != subxid]
        stream.messages = [message for message in stream.messages if message.xid != subxid]
        # The server describes every table again after that.
        stream.tables = {}

    def _ended(self, xid: int) -> _Stream:
        if xid not in self._streams:
            raise ProtocolError("xid")
        return self._streams[xid]

    def _message(self, reader: _Reader, *, is_loose: bool) -> list[LogicalMessage]:
        flags, lsn = reader.fields("!BQ")
        prefix = reader.name()
        content = reader.take(reader.fields("!I")[0])
        reader.finish()
        if (flags & 1 == 0) != is_loose:
            raise ProtocolError("message")
        return [LogicalMessage(prefix, content, Lsn(lsn))] if prefix in self.prefixes else []

    def _relation(self, reader: _Reader) -> None:
        (oid,) = reader.fields("!I")
        name = TableName(reader.name() or "pg_catalog", reader.name())
        identity, count = reader.fields("!cH")
        if identity not in (b"d", b"n", b"f", b"i") or count > 1664:
            raise ProtocolError("relation")
        columns: list[Column] = []
        flagged: list[str] = []
        for _ in range(count):
            (flags,) = reader.fields("!B")
            column_name = reader.name()
            type_oid, modifier = reader.fields("!Ii")
            columns.append(Column(column_name, arrow_type(type_oid, modifier), type_oid, modifier))
            if flags & 1:
                flagged.append(column_name)
        reader.finish()
        names = [column.name for column in columns]
        if len(set(names)) != len(names):
            raise ProtocolError("names")
        known = self.keys.get(oid, ())
        if identity == b"f":
            flagged = [name for name in names if name in known] if set(known) <= set(names) else []
        self._described += 1
        self._visible[oid] = (
            self._described,
            TableSchema(oid, name, tuple(columns), tuple(flagged)),
            identity == b"f",
        )

    def _change(self, kind: bytes, reader: _Reader) -> list[OracleRow]:
        (oid,) = reader.fields("!I")
        (marker,) = reader.fields("!c")
        if marker not in {b"I": b"N", b"U": b"NKO", b"D": b"KO"}[kind]:
            raise ProtocolError("marker")
        table = self._table(oid)
        first = reader.row(table)
        if kind == b"D":
            reader.finish()
            return [self._row(table, ChangeType.DELETE, 0, self._shown(table, marker, first))]
        if marker == b"N":
            reader.finish()
            return [
                self._row(table, ChangeType.INSERT if kind == b"I" else ChangeType.UPDATE_POSTIMAGE, 0, first)
            ]
        if reader.fields("!c") != (b"N",):
            raise ProtocolError("marker")
        second = reader.row(table)
        reader.finish()
        new = [
            old if value is Absent.UNCHANGED and isinstance(old, bytes) else value
            for old, value in zip(first, second, strict=True)
        ]
        keys = [at for at, column in enumerate(table.columns) if column.name in table.key]
        if not keys or any(first[at] != new[at] for at in keys):
            return [
                self._row(table, ChangeType.DELETE, 0, self._shown(table, marker, first)),
                replace(self._row(table, ChangeType.INSERT, 1, new), is_move=True),
            ]
        old = (
            [self._row(table, ChangeType.UPDATE_PREIMAGE, 0, first)]
            if self.old_rows and marker == b"O"
            else []
        )
        return [*old, self._row(table, ChangeType.UPDATE_POSTIMAGE, 1, new)]

    def _shown(self, table: TableSchema, marker: bytes, values: list[Value]) -> list[Value]:
        """The old row of a delete. Identity columns that were not sent count as unchanged."""
        shown = values if self.old_rows and marker == b"O" else _key_only(table, values)
        needs_whole = marker == b"K" and self._visible[table.oid][2] and (self.old_rows or not table.key)
        needed = table.column_names if needs_whole else table.key
        names = zip(table.column_names, shown, strict=True)
        return [Absent.UNCHANGED if value is None and name in needed else value for name, value in names]

    def _truncate(self, reader: _Reader) -> list[int]:
        count, _ = reader.fields("!IB")
        oids = [reader.fields("!I")[0] for _ in range(count)]
        reader.finish()
        return oids

    def _table(self, oid: int) -> TableSchema:
        if oid not in self._visible:
            raise ProtocolError("table")
        return self._visible[oid][1]

    def _row(
        self, table: TableSchema, change_type: ChangeType, ordinal: int, values: Sequence[Value]
    ) -> OracleRow:
        typed: dict[str, Any] = {}
        unchanged: list[str] = []
        exact: dict[str, str] = {}
        for column, value in zip(table.columns, values, strict=True):
            typed[column.name] = None
            if value is Absent.UNCHANGED:
                unchanged.append(column.name)
            elif isinstance(value, bytes):
                typed[column.name], text = _typed(value, column.type_oid, column.type_modifier)
                if text is not None:
                    exact[column.name] = text
        return OracleRow(table, str(change_type), ordinal, typed, tuple(unchanged) or None, exact or None)


@lru_cache(maxsize=100_000)
def _typed(value: bytes, type_oid: int, type_modifier: int) -> tuple[Any, str | None]:
    """The value, and its text where the type cannot hold it.

    Kept, since damaged streams repeat most values of the sound ones.
    """
    try:
        decoded = decode_text(_text(value), type_oid, type_modifier)
    except (ProtocolError, UnreadableTextError):
        text = value.decode(errors="replace")
        return None, text if text.encode() != value else REPLACED + text
    # Compared as Arrow's own text: a damaged stream may contain dates in year 0, which Python cannot hold.
    values = decoded.values.cast(pa.string()) if pa.types.is_temporal(decoded.values.type) else decoded.values
    is_inexact = decoded.inexact is not None and decoded.inexact[0].as_py()
    return values[0].as_py(), value.decode() if is_inexact else None


def _text(value: bytes) -> pa.StringArray:
    # Like `pa.array`, which checks for pandas each time.
    return pa.StringArray.from_buffers(
        1, pa.py_buffer(struct.pack("=ii", 0, len(value))), pa.py_buffer(value)
    )


def _key_only(table: TableSchema, values: list[Value]) -> list[Value]:
    if not table.key:
        return values
    return [
        value if column.name in table.key else None
        for column, value in zip(table.columns, values, strict=True)
    ]


def _unpack(layout: str, payload: bytes) -> tuple[Any, ...]:
    reader = _Reader(payload[1:])
    fields = reader.fields(layout)
    reader.finish()
    return fields


class _Reader:
    def __init__(self, body: bytes) -> None:
        self.body = body

    def take(self, count: int) -> bytes:
        if count > len(self.body):
            raise ProtocolError("short")
        taken, self.body = self.body[:count], self.body[count:]
        return taken

    def fields(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def name(self) -> str:
        if b"\0" not in self.body:
            raise ProtocolError("name")
        taken, self.body = self.body.split(b"\0", 1)
        return taken.decode(errors="backslashreplace")

    def row(self, table: TableSchema) -> list[Value]:
        if self.fields("!H") != (len(table.columns),):
            raise ProtocolError("columns")
        return [self.value() for _ in table.columns]

    def value(self) -> Value:
        match self.take(1):
            case b"n":
                return None
            case b"u":
                return Absent.UNCHANGED
            case b"t":
                return self.take(self.fields("!I")[0])
            case _:
                raise ProtocolError("kind")

    def finish(self) -> None:
        if self.body:
            raise ProtocolError("long")
