"""What a sink promises.

A sink owns the position: `Target.applied` is read from the target itself, where `finish_snapshot` and `apply` put it in the same commit
as the data. All methods run in the driver; `apply` of different tables may run in different threads at the same time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.change import ChangeCounts
from penstock.errors import PenstockError, SinkRefusedError, TargetRewoundError
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.sinks.layout import Mode
from penstock.sinks.origin import Origin
from penstock.spool.range import FileSlice

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock.sinks.alterations import Alteration
    from penstock.sinks.evolution import Evolution
    from penstock.sinks.views import View

SHADOWS = "penstock_shadows"
"""The name under which shadows of tables stand, above the pipeline's own."""


@dataclass(frozen=True, slots=True)
class Target:
    """A table as it stands in the target: how far it is, and what it was made from."""

    table: TableName
    source_oid: int
    key: tuple[str, ...]
    schema: pa.Schema
    applied: Position | None
    """None: the table was begun, and its first snapshot never finished."""
    mode: Mode = Mode.MIRROR
    origin: Origin | None = None
    """From which columns of the source its own are; None: nobody wrote it down."""
    copy: str | None = None
    """Tells the copy of the source that it began with from any other; None: nobody wrote it down. A shadow's goes with its rows."""


@dataclass(frozen=True, slots=True)
class SnapshotPlace:
    """Where and how executors write a table's snapshot files. Travels to the executors."""

    directory: str
    schema: pa.Schema
    """With the names that the files must carry, which need not be the table's own."""
    prefix: str
    values: tuple[tuple[str, str | int | bool | None], ...] = ()
    """Columns that are the same in every row, by the name in `schema`; the chunks have all others. Times are texts."""


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """One written file, as its executor reports it."""

    name: str
    rows: int
    bytes: int
    stats: str
    """Column statistics, in the sink's own form."""


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """What happened to a table between the first and the last fence of its snapshot: every row under these keys is replaced."""

    keys: str
    """A directory of Parquet files: `match_<j>` and `match_text_<j>` for each column of the key, each key once."""
    rows: tuple[str, ...]
    """Parquet files of the rows that are there at the last fence: `value_<i>` for each column, and `_exact`."""
    is_made: bool = False
    """Whether all that is to be done to them on their way has been done."""


@dataclass(frozen=True, slots=True)
class TableChanges:
    """What one epoch brings to one table: changes after its applied position, up to the epoch's end."""

    table: TableName
    slices: Sequence[FileSlice]
    counts: ChangeCounts
    views: Mapping[TableSchema, View] = field(default_factory=dict)
    """How the changes of each shape are read; empty: all of them have the target's columns."""
    evolution: Evolution | None = None
    """What the target has to become for them."""
    alterations: Sequence[Alteration] = ()
    """What was told of tables that were altered meanwhile, this one and others."""
    at_once: bool = False
    """They come with one commit: what else counts with it must not count for a part of them."""

    @property
    def schemas(self) -> list[TableSchema]:
        """The versions of the source's schema among the changes, oldest first; one that came back is there again."""
        return [version for version, _ in groupby(slice.file.schema for slice in self.slices)]


ChunkWriter = Callable[[Iterator[pa.RecordBatch], SnapshotPlace, int, Position], tuple[SnapshotFile, Position]]
"""Puts the rows of a chunk where the target wants them: the rows, the place, the chunk's number, and the fence that it is read under.

Gives what was written, and the fence that its rows were read under: an earlier one, if another attempt at the chunk was first. In that case
the rows are not asked for. Runs on an executor.
"""


def rewound(place: str, table: TableName, applied: Position | None, known: Position) -> TargetRewoundError:
    """The target at `place` holds less than this run has seen in it: it was dropped, replaced or restored to an older version.

    What it lacks was released when it was applied, so that only a new copy can bring it back.
    """
    holds = "is gone, or was never filled" if applied is None else f"holds {table} only up to {applied}"
    return TargetRewoundError(
        f"{place} {holds}, and was at {known}: it was dropped, replaced or restored to an older version",
        hint=f"penstock tables resync CONFIG {table}",
    )


class Targets(ABC):
    """What can be asked of a sink before anything is written, and without Spark."""

    @abstractmethod
    def load_target(self, table: TableName) -> Target | None:
        """Read how the table stands. None if there is nothing. Raises `TargetForeignError` for what another pipeline wrote."""

    @abstractmethod
    def describe(self, table: TableName) -> str:
        """How to find the table, for people."""

    @abstractmethod
    def tells_apart(self, one: TableName, other: TableName) -> bool:
        """Whether these two tables, whose names differ only in case, have a place each. Asked at start, before anything is written."""

    def find_problems(self, tables: Collection[TableName]) -> list[PenstockError]:
        """What would keep a run from writing to these; for a check, which tries besides whether the target can be written to at all."""
        del tables
        return []


class Sink(Targets):
    @abstractmethod
    def begin_snapshot(self, schema: TableSchema, fence: Position) -> SnapshotPlace:
        """Make room for a snapshot: create the table if need be, drop what an unfinished one left. Idempotent."""

    @property
    def chunk_writer(self) -> ChunkWriter | None:
        """How executors write the chunks of a snapshot; None: to Parquet files in the directory of the place."""
        return None

    def writer_for(self, schema: TableSchema) -> ChunkWriter | None:
        """The same for the chunks of one table of the source."""
        del schema
        return self.chunk_writer

    @abstractmethod
    def can_resume_snapshot(self, schema: TableSchema, place: SnapshotPlace, files: Sequence[SnapshotFile]) -> bool:
        """Whether a snapshot that was begun at `place` can go on there: the table still waits for it, and `files` are as they were."""

    @abstractmethod
    def finish_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], fence: Position) -> None:
        """Make the table exactly `files`, and its applied position `fence`, in one commit."""

    @abstractmethod
    def repair_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], changed: ChangedRows, fence: Position) -> None:
        """Make the table `files` with the rows of `changed` in place of theirs, and its applied position `fence`.

        The replacement and the position are one commit. Until that the table has no applied position, and a repeated call, with whatever
        is changed by then, comes to the same.
        """

    @abstractmethod
    def drop(self, table: TableName) -> None:
        """Remove the table and all that it holds."""

    def adopt(self, schema: TableSchema) -> bool:
        """Take what stands in the place of the table, and is not of this pipeline, for the pipeline's own, unfilled. Its rows stay for now.

        Gives whether they are to be replaced by a shadow (see `replace`); if not, `finish_snapshot` does that in its commit. Raises if the
        columns do not fit.
        """
        raise SinkRefusedError(f"{self.describe(schema.name)} cannot be adopted in this kind of sink", hint="set existing: replace for it")

    def remove_foreign(self, table: TableName) -> None:
        """Remove what stands in the place of the table, whoever wrote it."""
        self.drop(table)

    @abstractmethod
    def disown(self, table: TableName) -> None:
        """What the target holds no longer counts as a copy; a table that is mirrored again is copied anew. The rows stay."""

    @abstractmethod
    def replace(self, table: TableName, shadow: Sink, position: Position) -> None:
        """Make the table what `shadow`, a sink of the same kind, holds of it, and its applied position `position`, in one commit.

        A table that has the shadow's `copy` and is at `position` has been replaced; one that was not, whatever was tried, is none such.
        """

    def prepare_replace(self, table: TableName, shadow: Sink) -> None:
        """Do beforehand what takes long of `replace`, for a shadow that may still get more changes. The table stays as it is.

        Called by the thread that copies, beside the epochs, perhaps more than once.
        """
        del table, shadow

    def cancel_replace(self, table: TableName, shadow: Sink) -> None:
        """Remove what `prepare_replace` left and `replace` did not use. Called before the shadow is dropped, whether it was used or not."""
        del table, shadow

    @abstractmethod
    def shadow(self, copy: str) -> Sink:
        """A sink of the same kind with room of its own for one copy, known as `copy`, that is to take a table's place (see `replace`)."""

    @abstractmethod
    def drop_shadows(self) -> None:
        """Remove what is left of shadows. Called at the start of a run, when there are none."""

    @abstractmethod
    def version_at(self, table: TableName, position: Position) -> int | None:
        """The newest version of the table that holds nothing of the pipeline's beyond `position`; None if there is none any more."""

    @abstractmethod
    def read(self, table: TableName, version: int | None = None) -> DataFrame:
        """The table's rows, of one version or as they are now: the source's columns and `_exact`, and what a mode adds."""

    def read_small(self, table: TableName, version: int | None, limit_bytes: int) -> pa.Table | None:
        """The same rows read by this process, without Spark. None: they take more memory than that, or only Spark can read them."""
        del table, version, limit_bytes
        return None

    @abstractmethod
    def apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        """Apply one epoch and set the applied position to `end`, in one commit. A repeated or older epoch changes nothing.

        With `changes.evolution`, which `can_evolve` was asked about, the target becomes that in the same commit.
        """

    def slowed(self, table: TableName) -> PenstockError | None:
        """A warning about what makes the epochs of this table slow, as far as the last one showed; None if nothing does."""
        del table
        return None

    def steps(self, slices: Sequence[FileSlice], end: Position) -> list[Position]:
        """Where the commits end by which `apply` would bring these; the last at `end`. With `at_once` it is one."""
        del slices
        return [end]

    def find_refused(self, target: Target, changes: TableChanges, end: Position) -> dict[tuple[int, int], str]:
        """After `ValuesRefusedError`: which changes the target refuses, by commit version and ordinal, and why. Nothing is written."""
        del target, changes, end
        return {}

    def can_evolve(self, target: Target, evolution: Evolution) -> bool:
        """Whether the target's columns can be changed in place; if not, the table is copied anew. Called right before `apply`."""
        del target, evolution
        return False

    def maintain(self, table: TableName) -> None:
        """Do what is due to keep the table quick to read and its place from filling up; quick itself where nothing is.

        Called again and again for every table that streams, by one thread, while epochs are applied, which must neither wait for it nor
        fail by it. No row changes, and no position. What it raises is logged; it may be cut off anywhere.
        """
        del table

    def close(self) -> None:
        """Called at the end of a run. What the sink holds on to, a lock or a connection, is let go; it may be used again."""
        return
