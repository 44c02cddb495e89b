"""Rows of the spool and of a snapshot as the steps that a consumer takes: Arrow batches, and what is reached with them.

Nothing is decoded here: a range of the spool has typed batches already, and a snapshot is read by the stream's own decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from penstock.capture.settings import CaptureSettings
from penstock.capture.snapshot import plan_tables
from penstock.change import COMMIT_VERSION, METADATA_FIELDS, snapshot_batch, truncate_batch
from penstock.connectors.progress import Offset
from penstock.position import Position
from penstock.postgres.chunks import read_chunk
from penstock.postgres.exported import export_snapshot
from penstock.postgres.membership import Member
from penstock.postgres.slot import OnWait
from penstock.schema import TableName
from penstock.spool.range import FileSlice, SpoolRange
from penstock.spool.rows import read_rows
from penstock.spool.values import RefusedValue, first_refused

BATCH_ROWS = 10_000
BATCH_BYTES = 8 << 20

_VERSION = [field.name for field in METADATA_FIELDS].index(COMMIT_VERSION) - len(METADATA_FIELDS)


@dataclass(frozen=True, slots=True)
class Begun:
    """Reading starts: everything up to `floor` is behind the consumer."""

    floor: Position
    members: Mapping[TableName, Member] = field(default_factory=dict)
    """As the tables are in the publication now, which holds for all that comes."""


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Rows of a snapshot, or the truncate before one that begins again."""

    table: TableName
    records: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class Copied:
    """The snapshot of a table has been given out whole."""

    table: TableName
    fence: Position


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """Changes of one table, in order."""

    table: TableName
    records: pa.RecordBatch

    @property
    def last_commit(self) -> tuple[Position, int]:
        """That of the last of them, and how many of them are of it."""
        versions = _versions(self.records)
        return Position.of(versions[-1].as_py()), _count(versions, versions[-1])


@dataclass(frozen=True, slots=True)
class Reached:
    """Everything that commits up to `floor` has been given out, of all tables."""

    floor: Position


Rows: TypeAlias = CopiedRows | ChangedRows
Step: TypeAlias = Begun | Rows | Copied | Reached


# --- the stream ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Range:
    """What a consumer gets of one range of the spool: the files of each table that it wants, after what it has of it already."""

    tables: Mapping[TableName, tuple[FileSlice, ...]]
    skip: Mapping[TableName, Offset]

    @classmethod
    def of(cls, spooled: SpoolRange, skip: Mapping[TableName, Offset], wants: Callable[[TableName], bool]) -> Range:
        wanted = {table: _after(found.slices, skip.get(table)) for table, found in spooled.tables.items() if wants(table)}
        return cls({table: wanted[table] for table in sorted(wanted) if wanted[table]}, skip)

    def first_refused(self, *, refuse_inexact: bool) -> RefusedValue | None:
        """The first value of any table that ends the stream."""
        found = (first_refused(table, slices, refuse_inexact=refuse_inexact) for table, slices in self.tables.items())
        return min(filter(None, found), key=attrgetter("version"), default=None)

    def rows(self) -> Iterator[ChangedRows]:
        """Table by table; within one in the order of the log."""
        for table, slices in self.tables.items():
            skip = self.skip.get(table, Offset(Position.ZERO))
            known = skip.rows or 0
            for each in slices:
                for batch in read_rows(each, BATCH_ROWS, BATCH_BYTES):
                    # They come first: all before their commit has been left out.
                    gone = min(known, _count(_versions(batch), skip.position.value)) if known else 0
                    known -= gone
                    if batch.num_rows > gone:
                        yield ChangedRows(table, batch.slice(gone))


def _after(slices: Sequence[FileSlice], offset: Offset | None) -> tuple[FileSlice, ...]:
    """The files that have commits after the offset, or at it where only a part of that commit is behind us."""
    if offset is None:
        return tuple(slices)
    after = offset.position if offset.rows is None else Position.of(offset.position.value - 1)
    left = (each for each in slices if each.file.max_position > after)
    return tuple(replace(each, after=max(each.after or after, after)) if each.file.min_position <= after else each for each in left)


def _versions(batch: pa.RecordBatch) -> pa.Array:
    """By its place, since the table may have a column of the same name."""
    return batch.column(batch.num_columns + _VERSION)


def _count(versions: pa.Array, version: object) -> int:
    return int(pc.sum(pc.equal(versions, version)).as_py() or 0)


# --- the snapshot -------------------------------------------------------------------------------------------------------------


def copy_tables(settings: CaptureSettings, tables: Sequence[TableName], on_wait: OnWait, *, again: bool) -> Iterator[Step]:
    """The rows of `tables` under one exported snapshot, one table after the other.

    When it is done `again`, the consumer may have rows of an earlier snapshot, some of which are gone from the source: each table is
    emptied first.
    """
    if not tables:
        return
    with export_snapshot(settings.address, on_wait) as exported:
        for schema, chunks in plan_tables(settings.address, tables, settings.types, settings.publication).values():
            if again:
                yield CopiedRows(schema.name, truncate_batch(schema, exported.fence))
            ordinal = 1  # behind the truncate
            for chunk in chunks:
                with closing(read_chunk(settings.address, exported.name, chunk, refuse_inexact=settings.types.refuses_inexact)) as batches:
                    for batch in batches:
                        yield CopiedRows(schema.name, snapshot_batch(batch, schema, exported.fence.value, ordinal))
                        ordinal += batch.num_rows
            yield Copied(schema.name, exported.fence)
