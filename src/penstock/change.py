"""What travels from the decoder to the sinks: typed change batches, and the steps of the log that carry them.

A change batch has the table's own columns, then the metadata columns below. The first three have the names that Delta's change feed and
Spark already use. Changes are ordered by `(_commit_version, _ordinal)`, a pair that is unique; never by LSN, xid or time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

import pyarrow as pa

from penstock.position import Lsn, Position
from penstock.schema import TableSchema


class ChangeType(StrEnum):
    """The values of `_change_type`. A primary key change is a `delete` of the old key, then an `insert` of the new one.

    So is every update of a table without key whose old rows travel (replica identity FULL): the old row goes, the new one comes.
    """

    INSERT = "insert"
    UPDATE_PREIMAGE = "update_preimage"
    """The row as it was before the `update_postimage` with the next ordinal. Only where old rows are asked for, and travel."""
    UPDATE_POSTIMAGE = "update_postimage"
    DELETE = "delete"
    TRUNCATE = "truncate"
    SNAPSHOT = "snapshot"
    """A row as a snapshot found it, at the position of its fence. Only in what the Spark source gives out; never in a spool."""


CHANGE_TYPE = "_change_type"
COMMIT_VERSION = "_commit_version"
COMMIT_TIMESTAMP = "_commit_timestamp"
ORDINAL = "_ordinal"
XID = "_xid"
UNCHANGED = "_unchanged"
EXACT = "_exact"

EXACT_TYPE = pa.map_(pa.string(), pa.string())
REPLACED = "\ufffd"
"""Marks a text in `_exact` that could not be read: in place of bytes that are not UTF-8, or in front of a text that its type refuses."""

METADATA_FIELDS: tuple[pa.Field, ...] = (
    pa.field(CHANGE_TYPE, pa.string(), nullable=False),
    # Null only in pieces of a transaction that was still open when they were written; the manifest then holds the one value.
    pa.field(COMMIT_VERSION, pa.int64()),
    pa.field(COMMIT_TIMESTAMP, pa.timestamp("us", "UTC")),
    pa.field(ORDINAL, pa.int64(), nullable=False),
    pa.field(XID, pa.int64(), nullable=False),
    # Names of columns whose stored value did not travel (unchanged TOAST); null when there are none. A delete names columns only if it
    # lacks part of what identifies its row: such a change is never applied.
    pa.field(UNCHANGED, pa.list_(pa.string())),
    # Column name → exact Postgres text, for values that the typed column cannot hold; null when there are none.
    pa.field(EXACT, EXACT_TYPE),
)
METADATA_NAMES = frozenset(field.name for field in METADATA_FIELDS)
_METADATA_PLACES = {field.name: place for place, field in enumerate(METADATA_FIELDS)}


def change_schema(table: TableSchema) -> pa.Schema:
    """The Arrow schema of a change batch of `table`. Every column is nullable: a delete carries only its key."""
    own = [pa.field(column.name, column.arrow_type) for column in table.columns]
    return pa.schema([*own, *METADATA_FIELDS])


def metadata_place(table: TableSchema, name: str) -> int:
    """Where a metadata column stands in a change batch of `table`, which may have a column of the same name."""
    return len(table.columns) + _METADATA_PLACES[name]


def snapshot_batch(batch: pa.RecordBatch, table: TableSchema, fence: int | None, ordinal: int) -> pa.RecordBatch:
    """Rows of a snapshot, which have the table's columns and `_exact`, as changes: each a `snapshot` at the fence, numbered from `ordinal`.

    When a row was committed, and by whom, its table does not say.
    """
    known = {CHANGE_TYPE: ChangeType.SNAPSHOT.value, COMMIT_VERSION: fence, XID: 0}
    arrays = []
    for field_ in METADATA_FIELDS[:-1]:
        if field_.name == ORDINAL:
            arrays.append(pa.array(range(ordinal, ordinal + batch.num_rows), field_.type))
        elif field_.name in known:
            arrays.append(pa.repeat(pa.scalar(known[field_.name], field_.type), batch.num_rows))
        else:
            arrays.append(pa.nulls(batch.num_rows, field_.type))
    return pa.RecordBatch.from_arrays([*batch.columns[:-1], *arrays, batch.columns[-1]], schema=change_schema(table))


def truncate_batch(table: TableSchema, position: Position) -> pa.RecordBatch:
    """A change batch of one row: the table is emptied, before any other change of the transaction at `position`."""
    known = {CHANGE_TYPE: ChangeType.TRUNCATE.value, COMMIT_VERSION: position.value, ORDINAL: 0, XID: 0}
    schema = change_schema(table)
    own = [pa.nulls(1, field_.type) for field_ in list(schema)[: len(table.columns)]]
    metadata = [pa.array([known.get(field_.name)], field_.type) for field_ in METADATA_FIELDS]
    return pa.RecordBatch.from_arrays([*own, *metadata], schema=schema)


@dataclass(frozen=True, slots=True)
class ChangeCounts:
    """What a batch holds; lets a sink choose its way without reading the rows."""

    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    truncates: int = 0
    moves: int = 0
    """Key changes, and updates of rows without key; each is also one delete and one insert.

    At most so many where rows have been taken out again.
    """
    unchanged: int = 0
    """Rows that name at least one column in `_unchanged`."""
    inexact: int = 0
    """Rows with at least one value in `_exact`."""
    unreadable: int = 0
    """Texts that are not UTF-8, and so cannot be had at all."""
    preimages: int = 0
    """Rows as they were before an update; in batches of their own."""
    unidentified: int = 0
    """Rows whose key, or whose whole old row where there is no key, did not travel. They name the missing columns in `_unchanged`."""

    @property
    def rows(self) -> int:
        return self.inserts + self.updates + self.deletes + self.truncates + self.preimages

    def __add__(self, other: ChangeCounts) -> ChangeCounts:
        return ChangeCounts(
            self.inserts + other.inserts,
            self.updates + other.updates,
            self.deletes + other.deletes,
            self.truncates + other.truncates,
            self.moves + other.moves,
            self.unchanged + other.unchanged,
            self.inexact + other.inexact,
            self.unreadable + other.unreadable,
            self.preimages + other.preimages,
            self.unidentified + other.unidentified,
        )


@dataclass(frozen=True, slots=True)
class ChangeBatch:
    """Changes of one table under one version of its schema, in order. `rows` has exactly `change_schema(table)`."""

    table: TableSchema
    rows: pa.RecordBatch
    counts: ChangeCounts
    is_old: bool = False
    """Whether these are `update_preimage` alone. They travel apart from all others, so that only those who want them read them."""


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """What `pg_logical_emit_message` put into the log, under a prefix that was asked for.

    A message of a transaction counts once that commits, at `position`; it stands before the change with the number `ordinal`. One outside
    of transactions counts at once, whatever becomes of the transaction that sent it: it has neither xid nor position.
    """

    prefix: str
    content: bytes
    """Empty for a message that was dropped because it was too large, or because too many waited for their commit."""
    lsn: Lsn
    """Where the message itself stands in the log."""
    xid: int | None = None
    ordinal: int = 0
    position: Position | None = None

    @property
    def is_transactional(self) -> bool:
        return self.xid is not None

    @property
    def place(self) -> tuple[Lsn, bool, int, Lsn]:
        """Orders committed messages as the log does: those of a commit that ends where another message begins come first."""
        return (self.position.lsn if self.position else self.lsn, not self.is_transactional, self.ordinal, self.lsn)


@dataclass(frozen=True, slots=True)
class Transactions:
    """A run of whole transactions, all committed. `end` is the position of the last; `batches` may be empty (nothing published)."""

    batches: tuple[ChangeBatch, ...]
    end: Position
    commit_time: datetime
    """Of the last transaction."""
    count: int
    messages: tuple[LogicalMessage, ...] = ()


@dataclass(frozen=True, slots=True)
class TransactionPiece:
    """Part of a transaction too long to wait for: `_commit_version` and `_commit_timestamp` are still null in its rows.

    `xid` is that of the whole transaction. `_xid` is that of the subtransaction, which may be rolled back by itself.
    """

    xid: int
    batches: tuple[ChangeBatch, ...]
    messages: tuple[LogicalMessage, ...] = ()


@dataclass(frozen=True, slots=True)
class PiecesCommitted:
    """The transaction of the pieces so far has committed at `end`."""

    xid: int
    end: Position
    commit_time: datetime
    keys: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """By OID, of tables that the transaction made: nobody could tell their keys as long as it was open, so its pieces lack them."""


@dataclass(frozen=True, slots=True)
class PiecesAborted:
    """What the subtransaction `subxid` has written so far does not count; if that is `xid` itself, the whole transaction is over."""

    xid: int
    subxid: int


@dataclass(frozen=True, slots=True)
class Quiet:
    """The server has sent everything that commits up to `position`. Transactions in pieces may be open: they commit after it."""

    position: Position


LogStep = Transactions | TransactionPiece | PiecesCommitted | PiecesAborted | LogicalMessage | Quiet
"""What a decoder gives out, in the order of the log."""
