"""Parse the infrequent messages one at a time. Row changes, Begin and Commit are decoded in bulk; see
`tuples` and `transactions`.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ProtocolError
from penstock.position import Lsn
from penstock.postgres.pgoutput.framing import MAX_COLUMNS, Frames

REPLICA_IDENTITIES = "dnfi"


@dataclass(frozen=True, slots=True)
class RelationColumn:
    name: str
    is_key: bool
    type_oid: int
    type_modifier: int


@dataclass(frozen=True, slots=True)
class Relation:
    """The definition of a table from this position in the log."""

    oid: int
    namespace: str
    name: str
    replica_identity: str
    columns: tuple[RelationColumn, ...]

    @property
    def is_full(self) -> bool:
        return self.replica_identity == "f"


@dataclass(frozen=True, slots=True)
class Message:
    """A logical message; its content is opaque here."""

    is_transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes


class _Reader:
    """Reads the fields of one message, and never past its end."""

    def __init__(self, frames: Frames, index: int) -> None:
        self._frames = frames
        self._index = index
        self._body = frames.body(index)
        self._at = 0

    def fault(self, reason: str) -> ProtocolError:
        return self._frames.fault(self._index, reason)

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._body):
            raise self.fault("ends inside a field")
        field = self._body[self._at : end]
        self._at = end
        return field

    def number(self, count: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(count), "big", signed=signed)

    def text(self) -> str:
        return _shown(self.octets())

    def octets(self) -> bytes:
        """The bytes up to the next zero byte."""
        end = self._body.find(b"\0", self._at)
        if end < 0:
            raise self.fault("has a name without an end")
        field = self._body[self._at : end]
        self._at = end + 1
        return field

    def finish(self) -> None:
        if self._at != len(self._body):
            raise self.fault("is longer than its fields")


def decode_relation(frames: Frames, index: int) -> Relation:
    reader = _Reader(frames, index)
    oid = reader.number(4)
    # An empty namespace means pg_catalog.
    namespace = reader.text() or "pg_catalog"
    name = reader.text()
    identity = chr(reader.number(1))
    if identity not in REPLICA_IDENTITIES:
        raise reader.fault("has an unknown replica identity")
    count = reader.number(2)
    if count > MAX_COLUMNS:
        raise reader.fault("has more columns than a table can")
    taken: dict[str, bytes] = {}
    columns = tuple(_column(reader, taken) for _ in range(count))
    reader.finish()
    return Relation(oid, namespace, name, identity, columns)


def _column(reader: _Reader, taken: dict[str, bytes]) -> RelationColumn:
    """`taken` are the names of the columns before it. An escaped name is made distinct from them."""
    is_key = bool(reader.number(1) & 1)
    octets = reader.octets()
    name = _shown(octets)
    while name in taken:
        if taken[name] == octets:
            raise reader.fault("names a column twice")
        name += "\\"
    taken[name] = octets
    return RelationColumn(name, is_key, reader.number(4), reader.number(4, signed=True))


def _shown(octets: bytes) -> str:
    """In a SQL_ASCII database, names may be invalid UTF-8. They affect one table only, so they are escaped
    instead of raising an error.
    """
    return octets.decode(errors="backslashreplace")


def decode_type(frames: Frames, index: int) -> tuple[int, str, str]:
    """A type's OID, and the namespace and name of the type, or of its base type if it is a domain."""
    reader = _Reader(frames, index)
    found = reader.number(4), reader.text() or "pg_catalog", reader.text()
    reader.finish()
    return found


def decode_message(frames: Frames, index: int) -> Message:
    reader = _Reader(frames, index)
    is_transactional = bool(reader.number(1) & 1)
    lsn = Lsn(reader.number(8))
    prefix = reader.text()
    content = reader.take(reader.number(4))
    reader.finish()
    return Message(is_transactional, lsn, prefix, content)


def decode_stream_start(frames: Frames, index: int) -> tuple[int, bool]:
    """The transaction's xid, and whether this is its first block."""
    reader = _Reader(frames, index)
    xid, flag = reader.number(4), reader.number(1)
    reader.finish()
    return xid, flag == 1


def check_stream_stop(frames: Frames, index: int) -> None:
    _Reader(frames, index).finish()


def decode_stream_abort(frames: Frames, index: int) -> tuple[int, int]:
    """The xids of the transaction and of the subtransaction that was rolled back; equal if all of it was
    rolled back.
    """
    reader = _Reader(frames, index)
    found = reader.number(4), reader.number(4)
    reader.finish()
    return found


def decode_truncate(frames: Frames, index: int) -> tuple[int, ...]:
    """The OIDs of the truncated tables, in order."""
    reader = _Reader(frames, index)
    count = reader.number(4)
    reader.take(1)
    oids = tuple(int.from_bytes(reader.take(4), "big") for _ in range(count))
    reader.finish()
    return oids


def decode_keepalive(frames: Frames, index: int) -> int:
    """The server's WAL end: everything that commits below it has been sent."""
    return _Reader(frames, index).number(8)
