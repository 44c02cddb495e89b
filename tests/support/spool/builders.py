"""Log steps built from lists, and spools read back as lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.change import (
    CHANGE_TYPE,
    ChangeBatch,
    ChangeCounts,
    ChangeType,
    PiecesCommitted,
    TransactionPiece,
    Transactions,
    change_schema,
    metadata_index,
)
from penstock.position import Position
from penstock.schema import Column, TableName, TableSchema
from penstock.spool import FileSlice, SegmentUsage, SpoolRange, SpoolReader, SpoolWriter, released_by_all

ORDERS = TableSchema(
    16401,
    TableName("public", "orders"),
    (
        Column("id", pa.int64(), 20),
        Column("total", pa.decimal128(10, 2), 1700, 655366),
        Column("tags", pa.list_(pa.string()), 1009),
    ),
    ("id",),
)
ITEMS = TableSchema(
    16402,
    TableName("public", "items"),
    (Column("id", pa.int64(), 20), Column("note", pa.string(), 25)),
    ("id",),
)
TABLES = {ORDERS.oid: ORDERS, ITEMS.oid: ITEMS}

Seen = tuple[str, int, int]
"""One change: table name, position, ordinal."""


def at(value: int) -> Position:
    return Position.of(value)


def time_of(position: int) -> datetime:
    return datetime(2025, 1, 1, tzinfo=UTC) + timedelta(seconds=position)


@dataclass(frozen=True)
class Commit:
    """A transaction: its end position, and the table of each of its changes."""

    position: int
    tables: tuple[TableSchema, ...] = (ORDERS,)

    def seen(self) -> list[Seen]:
        return [(table.name.name, self.position, ordinal) for ordinal, table in enumerate(self.tables)]


def old_batch(table: TableSchema, rows: Sequence[tuple[int | None, int]]) -> ChangeBatch:
    """The same changes as old rows of updates."""
    made = batch(table, rows)
    place = metadata_index(table, CHANGE_TYPE)
    kinds = pa.array([ChangeType.UPDATE_PREIMAGE.value] * len(rows))
    changed = made.rows.set_column(place, made.rows.schema.field(place), kinds)
    return ChangeBatch(table, changed, ChangeCounts(preimages=len(rows)), is_old=True)


def batch(table: TableSchema, rows: Sequence[tuple[int | None, int]], *, xid: int = 7) -> ChangeBatch:
    """Inserts with these positions (None for an open transaction) and ordinals."""
    columns: dict[str, object] = {
        "_change_type": ["insert"] * len(rows),
        "_commit_version": [position for position, _ in rows],
        "_commit_timestamp": [None if position is None else time_of(position) for position, _ in rows],
        "_ordinal": [ordinal for _, ordinal in rows],
        "_xid": [xid] * len(rows),
        "id": [ordinal for _, ordinal in rows],
    }
    schema = change_schema(table)
    arrays = [pa.array(columns.get(field.name, [None] * len(rows)), field.type) for field in schema]
    return ChangeBatch(
        table, pa.RecordBatch.from_arrays(arrays, schema=schema), ChangeCounts(inserts=len(rows))
    )


def transactions(*commits: Commit) -> Transactions:
    rows: dict[TableSchema, list[tuple[int | None, int]]] = {}
    for commit in commits:
        for ordinal, table in enumerate(commit.tables):
            rows.setdefault(table, []).append((commit.position, ordinal))
    last = commits[-1].position
    return Transactions(
        tuple(batch(table, each) for table, each in rows.items()), at(last), time_of(last), len(commits)
    )


def piece(xid: int, *changes: tuple[TableSchema, int], subxid: int | None = None) -> TransactionPiece:
    """A piece of an open transaction, or of a subtransaction of it: table and ordinal of each change."""
    owner = xid if subxid is None else subxid
    return TransactionPiece(
        xid, tuple(batch(table, [(None, ordinal)], xid=owner) for table, ordinal in changes)
    )


def committed(xid: int, position: int) -> PiecesCommitted:
    return PiecesCommitted(xid, at(position), time_of(position))


def capture(root: Path, start: int, segments: Iterable[Sequence[Commit]]) -> None:
    """Write a spool with just these segments."""
    writer = SpoolWriter(root, at(start))
    for commits in segments:
        writer.append(transactions(*commits))
        writer.seal()
    writer.close()


def rows_of(part: FileSlice) -> list[Seen]:
    """The rows of one slice, filtered as every reader must filter them."""
    table = pq.read_table(part.path, columns=["_commit_version", "_ordinal"])
    assert table.num_rows == part.file.rows
    assert part.path.stat().st_size == part.file.bytes
    if part.after is not None:
        table = table.filter(pc.field("_commit_version") > part.after.value)
    if part.upto is not None:
        table = table.filter(pc.field("_commit_version") <= part.upto.value)
    constant = part.file.commit_version
    versions = table["_commit_version"].to_pylist() if constant is None else [constant.value] * table.num_rows
    return [
        (part.file.table.name, version, ordinal)
        for version, ordinal in zip(versions, table["_ordinal"].to_pylist(), strict=True)
    ]


def changes(found: SpoolRange) -> dict[str, list[Seen]]:
    """By table, in the order of the slices."""
    return {
        name.name: [row for part in table.slices for row in rows_of(part)]
        for name, table in found.tables.items()
    }


def all_changes(root: Path) -> Counter[Seen]:
    """Everything in the spool."""
    reader = SpoolReader(root)
    start, end = reader.start, reader.end
    if start is None or end is None:
        return Counter()
    return Counter(row for rows in changes(reader.read(start, end)).values() for row in rows)


def delete_released(root: Path) -> list[Position]:
    """Delete like a restarted writer, which knows only the files. Returns the ends of the
    deleted segments.
    """
    before = [segment.end for segment in SpoolReader(root).segments()]
    usage = SegmentUsage(SpoolReader(root))
    usage.scan()
    usage.delete_released(released_by_all(root))
    left = {segment.end for segment in SpoolReader(root).segments()}
    return [end for end in before if end not in left]
