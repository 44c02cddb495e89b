"""Typed change batches (`ChangeBatch`), and the `LogStep`s in which decoders return them.

A change batch has the table's columns, then the metadata columns below. The first three have the names that
Delta's change data feed and Spark use. Changes are ordered by the unique pair `(_commit_version, _ordinal)`,
never by LSN, xid or time.
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
    """The values of `_change_type`.

    A change of the primary key is a `delete` of the old key and an `insert` of the new one.

    In a table without a key (REPLICA IDENTITY FULL), every update is a `delete` of the old row and an
    `insert` of the new one.
    """

    INSERT = "insert"
    UPDATE_PREIMAGE = "update_preimage"
    """The old row of the `update_postimage` with the next ordinal.

    Exists only if `source.old_rows` is set and the server sends the old row.
    """
    UPDATE_POSTIMAGE = "update_postimage"
    DELETE = "delete"
    TRUNCATE = "truncate"
    SNAPSHOT = "snapshot"
    """A row of a snapshot. Its position is the fence of that snapshot.

    Only in the output of the Spark source; never in a spool.
    """


CHANGE_TYPE = "_change_type"
COMMIT_VERSION = "_commit_version"
COMMIT_TIMESTAMP = "_commit_timestamp"
ORDINAL = "_ordinal"
XID = "_xid"
UNCHANGED = "_unchanged"
EXACT = "_exact"

EXACT_TYPE = pa.map_(pa.string(), pa.string())
REPLACED = "\ufffd"
"""The character that marks an unreadable text in `_exact`. It replaces bytes that are not UTF-8, or precedes
a text that is invalid for the column's type.
"""

METADATA_FIELDS: tuple[pa.Field, ...] = (
    pa.field(CHANGE_TYPE, pa.string(), nullable=False),
    # Null only in rows that were written while their transaction was open; the segment's manifest then has
    # the value.
    pa.field(COMMIT_VERSION, pa.int64()),
    pa.field(COMMIT_TIMESTAMP, pa.timestamp("us", "UTC")),
    pa.field(ORDINAL, pa.int64(), nullable=False),
    pa.field(XID, pa.int64(), nullable=False),
    # Names of columns whose value the server did not send (unchanged TOAST); null if there are none. In a
    # delete, they are columns of the replica identity that the server did not send; a delete with such
    # columns is never applied.
    pa.field(UNCHANGED, pa.list_(pa.string())),
    # Column name → exact Postgres text, for values that the typed column cannot hold; null if there are none.
    pa.field(EXACT, EXACT_TYPE),
)
METADATA_NAMES = frozenset(field.name for field in METADATA_FIELDS)
_METADATA_INDEXES = {field.name: place for place, field in enumerate(METADATA_FIELDS)}


def change_schema(table: TableSchema) -> pa.Schema:
    """The Arrow schema of a change batch of `table`. Every column is nullable, because a delete may have only
    the key.
    """
    own = [pa.field(column.name, column.arrow_type) for column in table.columns]
    return pa.schema([*own, *METADATA_FIELDS])


def metadata_index(table: TableSchema, name: str) -> int:
    """The index of a metadata column in a change batch.

    Use it instead of the name: the table may have a column of that name.
    """
    return len(table.columns) + _METADATA_INDEXES[name]


def snapshot_batch(
    batch: pa.RecordBatch, table: TableSchema, fence: int | None, ordinal: int
) -> pa.RecordBatch:
    """Convert snapshot rows (the table's columns and `_exact`) to changes of type `snapshot`. Their position
    is `fence`, and their ordinals begin at `ordinal`.

    The commit time of a snapshot row is null, and its xid is 0.
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
    return pa.RecordBatch.from_arrays(
        [*batch.columns[:-1], *arrays, batch.columns[-1]], schema=change_schema(table)
    )


def truncate_batch(table: TableSchema, position: Position) -> pa.RecordBatch:
    """A change batch with one TRUNCATE, ordered before all other changes of the transaction at `position`."""
    known = {CHANGE_TYPE: ChangeType.TRUNCATE.value, COMMIT_VERSION: position.value, ORDINAL: 0, XID: 0}
    schema = change_schema(table)
    own = [pa.nulls(1, field_.type) for field_ in list(schema)[: len(table.columns)]]
    metadata = [pa.array([known.get(field_.name)], field_.type) for field_ in METADATA_FIELDS]
    return pa.RecordBatch.from_arrays([*own, *metadata], schema=schema)


@dataclass(frozen=True, slots=True)
class ChangeCounts:
    """Numbers of changes by kind. They let a sink choose its write method without reading the rows."""

    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    truncates: int = 0
    moves: int = 0
    """Key changes, and updates in tables without a key; each is also counted as one delete and one insert.

    An upper bound if rows of rolled-back subtransactions were removed from the file.
    """
    unchanged: int = 0
    """Rows that name at least one column in `_unchanged`."""
    inexact: int = 0
    """Rows with at least one value in `_exact`."""
    unreadable: int = 0
    """Texts that are not valid UTF-8. Their values are lost."""
    preimages: int = 0
    """Old rows of updates. They are in separate batches."""
    unidentified: int = 0
    """Rows that the server sent without the complete key or, for a table without a key, without the complete
    old row.

    `_unchanged` names the missing columns.
    """

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
    """Changes of one table under one version of its schema, in order.

    `rows` has exactly `change_schema(table)`.
    """

    table: TableSchema
    rows: pa.RecordBatch
    counts: ChangeCounts
    is_old: bool = False
    """Whether the batch has only `update_preimage` rows.

    Old rows are in separate batches, so that a reader that does not need them can skip these batches.
    """


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """A message of `pg_logical_emit_message` with a prefix that the capture subscribes to.

    A transactional message takes effect at its commit (`position`), before the change of that commit with the
    same `ordinal`. A non-transactional message takes effect at once, even if its transaction rolls back; it
    has neither xid nor position.
    """

    prefix: str
    content: bytes
    """Empty for a message that was dropped because of its size, or because too many messages waited for their
    commit.
    """
    lsn: Lsn
    """The address of the message itself."""
    xid: int | None = None
    ordinal: int = 0
    position: Position | None = None

    @property
    def is_transactional(self) -> bool:
        return self.xid is not None

    @property
    def sort_key(self) -> tuple[Lsn, bool, int, Lsn]:
        """The key that sorts committed messages in log order.

        The messages of a transaction precede a non-transactional message whose address is the end of that
        transaction's commit.
        """
        return (
            self.position.lsn if self.position else self.lsn,
            not self.is_transactional,
            self.ordinal,
            self.lsn,
        )


@dataclass(frozen=True, slots=True)
class Transactions:
    """Consecutive committed transactions.

    `end` is the position of the last one; `batches` may be empty, if no published table changed.
    """

    batches: tuple[ChangeBatch, ...]
    end: Position
    commit_time: datetime
    """Commit time of the last transaction."""
    count: int
    messages: tuple[LogicalMessage, ...] = ()


@dataclass(frozen=True, slots=True)
class TransactionPiece:
    """Part of a large transaction that is still open: `_commit_version` and `_commit_timestamp` are null in
    its rows.

    `xid` identifies the top-level transaction. The column `_xid` has the subtransaction of each row, which
    may be rolled back alone.
    """

    xid: int
    batches: tuple[ChangeBatch, ...]
    messages: tuple[LogicalMessage, ...] = ()


@dataclass(frozen=True, slots=True)
class PiecesCommitted:
    """The commit, at `end`, of a transaction that was sent in pieces."""

    xid: int
    end: Position
    commit_time: datetime
    keys: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """The keys of the tables that the transaction created, by table OID.

    The keys were unknown while the transaction was open, so the table schemas in its pieces have no key.
    """


@dataclass(frozen=True, slots=True)
class PiecesAborted:
    """The rollback of the subtransaction `subxid`, or of the whole transaction if `subxid` equals `xid`."""

    xid: int
    subxid: int


@dataclass(frozen=True, slots=True)
class Idle:
    """The server has sent every transaction that commits up to `position`.

    Transactions sent in pieces may still be open.
    """

    position: Position


LogStep = Transactions | TransactionPiece | PiecesCommitted | PiecesAborted | LogicalMessage | Idle
"""The output of a decoder, in log order."""
