"""The sink contract: targets, snapshots, epochs and maintenance.

A sink commits a table's data and its applied position in one commit. The target itself stores the position;
`Target.applied` is loaded from it. All methods run in the driver. Several threads may call `apply` at the
same time, each for another table.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pyarrow as pa
from typing_extensions import override

from penstock.change import ChangeCounts
from penstock.errors import (
    PenstockError,
    SchemaChangedError,
    SinkRefusedError,
    TargetRewoundError,
    UnsupportedTableError,
)
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.sinks.lineage import Origin
from penstock.sinks.modes import Mode
from penstock.sinks.slice_reader import slices_after, slices_upto
from penstock.spool.reader import FileSlice
from penstock.storage.temporary import is_case_sensitive

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock.sinks.evolution import Evolution
    from penstock.sinks.lineage import Alteration
    from penstock.sinks.row_values import View


_TIMES = 10


@dataclass(frozen=True, slots=True)
class MaintenanceSettings:
    """The limits at which maintenance of Delta tables is due, and the retention."""

    compact_after: int = 64
    """Number of small files at which they are compacted; 0 disables all compaction."""
    checkpoint_after: int = 50
    """Number of commits after which maintenance writes a Delta checkpoint; 0: never."""
    keep_seconds: float | None = 7 * 86400.0
    """Age after which files and versions are removed; None: nothing is removed."""
    versions: int = 20_000
    """Maximum number of versions to keep. Versions younger than `hold_seconds` are kept in any case."""
    hold_seconds: float = 3600.0
    vacuum_every_seconds: float = 86400.0


class Cooldown:
    """A pause after each run of a task, ten times as long as the run. The task therefore runs at most a tenth
    of the time, whatever the size of the table.
    """

    def __init__(self) -> None:
        self._until = 0.0

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    @contextmanager
    def after(self) -> Iterator[None]:
        """Start the pause at the end of the block, also if the block raises."""
        started = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            self._until = ended + _TIMES * (ended - started)


SHADOWS = "penstock_shadows"
"""Directory or namespace of the shadows that resyncs fill. Each pipeline has its own directory or namespace
in it.
"""


@dataclass(frozen=True, slots=True)
class Target:
    """The state of a target table, loaded from the target: its columns, its applied position, and the source
    column of each target column.
    """

    table: TableName
    source_oid: int
    key: tuple[str, ...]
    schema: pa.Schema
    applied: Position | None
    """The applied position; None if the table is not a complete copy of the source, for example because its
    first snapshot did not finish.
    """
    mode: Mode = Mode.MIRROR
    origin: Origin | None = None
    """The source column of each target column; None if the target does not record them."""
    copy: str | None = None
    """An identifier of the snapshot that filled the table; None if the target does not record it. A resync
    replaces the rows and this identifier together.
    """


@dataclass(frozen=True, slots=True)
class SnapshotPlace:
    """The directory, the name prefix and the columns of the data files that executors write for a snapshot or
    an epoch. Sent to the executors.
    """

    directory: str
    schema: pa.Schema
    """The columns of the files. Their names may differ from the column names of the table."""
    prefix: str
    values: tuple[tuple[str, str | int | bool | None], ...] = ()
    """The columns that have the same value in all rows: each with its name in `schema`, and the value. The
    rows that are passed for writing lack these columns. A timestamp is given as ISO 8601 text.
    """


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A data file that an executor wrote, as reported to the driver."""

    name: str
    rows: int
    bytes: int
    stats: str
    """Column statistics, in a format of the sink."""


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """Rows that changed between the first and the last fence of a snapshot. A repair deletes every row of the
    target whose key is in `keys`, and inserts `rows`.
    """

    keys: str
    """Directory of Parquet files that contain each changed key once. Columns: `match_<j>` and
    `match_text_<j>` for each column of the key.
    """
    rows: tuple[str, ...]
    """Parquet files with the changed rows as of the last fence. Columns: `value_<i>` for each column of the
    table, and `_exact`.
    """
    is_made: bool = False
    """Whether the transform has already been applied to `rows`."""


@dataclass(frozen=True, slots=True)
class TableChanges:
    """The changes of one table in an epoch: all changes after the table's applied position, up to the end of
    the epoch.
    """

    table: TableName
    slices: Sequence[FileSlice]
    counts: ChangeCounts
    views: Mapping[TableSchema, View] = field(default_factory=dict)
    """For each schema version, the `View` that maps its changes to the columns of the target. Empty if all
    changes already have the target's columns.
    """
    evolution: Evolution | None = None
    """The schema change that the target must apply in the same commit as these changes, if any."""
    alterations: Sequence[Alteration] = ()
    """The schema changes that the event trigger reported, of this table and of other tables."""

    @property
    def schemas(self) -> list[TableSchema]:
        """The schema versions of the changes, oldest first. A version that a later schema change restores
        appears again.
        """
        return [version for version, _ in groupby(slice.file.schema for slice in self.slices)]


ChunkWriter = Callable[
    [Iterator[pa.RecordBatch], SnapshotPlace, int, Position], tuple[SnapshotFile, Position]
]
"""Function that writes the rows of a chunk to the target. Arguments: the rows, the place, the number of the
chunk, and the fence at which the chunk is read. Runs on an executor.

Returns the written file and the fence of its rows. If an earlier attempt has already written the chunk, the
function does not read the rows, and returns the file and the fence of that attempt.
"""


def rewound_error(
    place: str, table: TableName, applied: Position | None, known: Position
) -> TargetRewoundError:
    """The error for a target that lacks changes that were already applied to it: it was dropped, replaced or
    restored to an older version. `applied` is the position that the target has now, `known` the position that
    it had before.

    The missing changes may no longer be in the spool, so the table needs a resync.
    """
    holds = (
        "does not exist, or its first snapshot did not finish"
        if applied is None
        else f"holds {table} only up to {applied}"
    )
    return TargetRewoundError(
        f"{place} {holds}, but was at {known}: it was dropped, replaced or restored to an older version",
        hint=f"penstock tables resync CONFIG {table}",
    )


def irreplaceable_error(place: object) -> TargetRewoundError:
    """The error for a target that its resynced copy cannot replace, because one of the two does not exist."""
    return TargetRewoundError(
        f"{place} cannot be replaced by the resynced copy: the table or the copy does not exist",
        hint="restart the pipeline to copy the table again",
    )


class Targets(ABC):
    """The operations of a sink that need no Spark and write no data."""

    @abstractmethod
    def load_target(self, table: TableName) -> Target | None:
        """Load the state of a target. Returns None if the table does not exist. Raises `TargetForeignError`
        if this pipeline does not own the table.
        """

    @abstractmethod
    def describe(self, table: TableName) -> str:
        """The location of the table, for messages."""

    @abstractmethod
    def are_distinct(self, one: TableName, other: TableName) -> bool:
        """Whether two tables whose names differ only in case get different locations. Called at the start of
        a run, before the first write.
        """

    def find_problems(self, tables: Collection[TableName]) -> list[PenstockError]:
        """Problems that would prevent a run from writing to these tables. `penstock check` tests write access
        separately.
        """
        del tables
        return []


class Sink(Targets):
    @abstractmethod
    def begin_snapshot(self, schema: TableSchema, fence: Position) -> SnapshotPlace:
        """Create the table if it is missing, and remove files of an unfinished snapshot. Returns the place
        for the files of the new snapshot. Idempotent.
        """

    @property
    def chunk_writer(self) -> ChunkWriter | None:
        """The function with which executors write the chunks of a snapshot. None if they write Parquet files
        to the directory of the `SnapshotPlace`.
        """
        return None

    def writer_for(self, schema: TableSchema) -> ChunkWriter | None:
        """The chunk writer for one table of the source."""
        del schema
        return self.chunk_writer

    @abstractmethod
    def can_resume_snapshot(
        self, schema: TableSchema, place: SnapshotPlace, files: Sequence[SnapshotFile]
    ) -> bool:
        """Whether an unfinished snapshot at `place` can continue. It can if the table has no applied
        position, and the files that were already written (`files`) are unchanged.
        """

    @abstractmethod
    def finish_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], fence: Position) -> None:
        """Replace the content of the table by `files`, and set its applied position to `fence`, in one
        commit.
        """

    @abstractmethod
    def repair_snapshot(
        self, schema: TableSchema, files: Sequence[SnapshotFile], changed: ChangedRows, fence: Position
    ) -> None:
        """Fill the table with `files`, make the repair that `changed` describes, and set the applied position
        to `fence`.

        The repair and the position are one commit. Until that commit the table has no applied position, and
        the caller may repeat the call with another `changed`.
        """

    @abstractmethod
    def drop(self, table: TableName) -> None:
        """Remove the table and its content."""

    def adopt(self, schema: TableSchema) -> bool:
        """Take over a table that this pipeline did not create. The table keeps its rows, and has no applied
        position, until a complete copy of the source replaces the rows.

        Returns True if a resync has to replace the rows (see `replace`), False if `finish_snapshot` replaces
        them. Raises an error if the columns of the table do not fit those of the source.
        """
        raise SinkRefusedError(
            f"{self.describe(schema.name)} cannot be adopted in this kind of sink",
            hint="set existing: replace for this table",
        )

    def remove_foreign(self, table: TableName) -> None:
        """Remove a table that this pipeline did not create."""
        self.drop(table)

    @abstractmethod
    def release_ownership(self, table: TableName) -> None:
        """Remove the applied position: the rows stay, but the table is no longer a copy of the source."""

    @abstractmethod
    def replace(self, table: TableName, shadow: Sink, position: Position) -> None:
        """Replace the content of the table by the copy in `shadow`, a sink of the same kind, and set the
        applied position to `position`, in one commit.

        After a crash, the commit was made if and only if the table has the `Target.copy` of the shadow and is
        at `position`.
        """

    def prepare_replace(self, table: TableName, shadow: Sink) -> None:
        """Do the slow part of `replace` in advance, without changing the table. The shadow may receive more
        changes afterwards.

        The snapshot thread calls this while epochs are applied, possibly more than once.
        """
        del table, shadow

    def cancel_replace(self, table: TableName, shadow: Sink) -> None:
        """Remove files that `prepare_replace` created and no `replace` used. Always called before a shadow is
        dropped, also after a successful `replace`.
        """
        del table, shadow

    @abstractmethod
    def shadow(self, copy: str) -> Sink:
        """Return a sink of the same kind that writes to the shadows of resyncs. `copy` is a name for this set
        of shadows.
        """

    @abstractmethod
    def drop_shadows(self) -> None:
        """Remove shadows of earlier runs. Called at the start of a run."""

    @abstractmethod
    def version_at(self, table: TableName, position: Position) -> int | None:
        """The newest version of the table in which this pipeline has applied no change after `position`; None
        if that version no longer exists.
        """

    @abstractmethod
    def read(self, table: TableName, version: int | None = None) -> DataFrame:
        """Read the table's rows at `version`, or at the newest version if it is None: the source's columns,
        `_exact`, and the columns that the mode adds.
        """

    def read_small(self, table: TableName, version: int | None, limit_bytes: int) -> pa.Table | None:
        """Read the same rows as `read`, but in this process and without Spark. Returns None if the rows
        exceed `limit_bytes`, or if only Spark can read them.
        """
        del table, version, limit_bytes
        return None

    @abstractmethod
    def apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        """Apply one epoch and set the applied position to `end`, in one commit. A repeated or older epoch
        changes nothing.

        The same commit applies `changes.evolution`, for which `can_evolve` returned True.
        """

    def slow_warning(self, table: TableName) -> PenstockError | None:
        """A warning with the reason why the last epoch of this table was slow; None if it was not slow."""
        del table
        return None

    def steps(self, slices: Sequence[FileSlice], end: Position) -> list[Position]:
        """Divide the changes in `slices` into commits. Returns the end position of each commit, in ascending
        order; the last one is `end`. See `apply_in_steps`.
        """
        del slices
        return [end]

    def needs_earlier_changes(self, changes: TableChanges) -> bool:
        """Whether the sink may need values from earlier changes of the epoch to apply a later part of it. If
        so, each part that is passed to `apply` begins with the first change of the epoch.
        """
        del changes
        return False

    def find_rejected(
        self, target: Target, changes: TableChanges, end: Position
    ) -> dict[tuple[int, int], str]:
        """The rejected changes, by commit version and ordinal, with the reason for each. Called after `apply`
        raised `ValuesRefusedError`. Writes nothing.
        """
        del target, changes, end
        return {}

    def can_evolve(self, target: Target, evolution: Evolution) -> bool:
        """Whether the sink can change the columns of the existing target as `evolution` plans. If not, the
        pipeline resyncs the table. Called right before `apply`.
        """
        del target, evolution
        return False

    def maintain(self, table: TableName) -> None:
        """Do the maintenance that is due; return quickly if none is due. Maintenance changes no row and no
        position.

        One thread calls this method repeatedly for every streaming table, while epochs are applied. The
        method must not delay epochs or make them fail. The caller logs the errors that the method raises. The
        process may be stopped at any point of it.
        """
        del table

    def close(self) -> None:
        """Release locks and connections at the end of a run. The sink may be used again."""
        return


def apply_in_steps(
    sink: Sink, changes: TableChanges, end: Position, apply: Callable[[TableChanges, Position], object]
) -> None:
    """Call `apply` for each part of the changes that the sink commits separately, with the end position of
    the part.

    A table that was paused, or waited for its snapshot, may have more changes than one commit should contain.
    After each part the target equals the source at the end position of the part. If there is a schema change,
    all changes are one part.

    A part contains only the changes after the previous part. Transforms and the search for rejected rows read
    all changes of a part, so if each part repeated the earlier changes, the cost would grow with the square
    of the number of parts. Only a sink that `needs_earlier_changes` gets the earlier changes again; it skips
    those that it has applied.
    """
    ends = [end] if changes.evolution is not None else sink.steps(changes.slices, end)
    if len(ends) == 1:
        apply(changes, end)
        return
    repeats = sink.needs_earlier_changes(changes)
    done = Position.ZERO
    for upto in ends:
        part = slices_after(slices_upto(changes.slices, upto), done)
        apply(replace(changes, slices=tuple(part)), upto)
        done = done if repeats else upto


def check_changes(target: Target, mode: Mode, changes: TableChanges, place: str) -> None:
    """Raise `SchemaChangedError` if changes without a view differ from the target in columns, key or source
    table, or if the target does not have the configured mode.
    """
    if target.mode is not mode:
        raise SchemaChangedError(
            f"table {target.table} has the mode {target.mode}, but {mode} is configured",
            hint=f"penstock tables resync CONFIG {target.table}, or configure the mode {target.mode} again",
        )
    for schema in changes.schemas:
        found = pa.schema([pa.field(column.name, column.arrow_type) for column in schema.columns])
        is_same = schema.key == target.key and found.equals(target.schema)
        if schema not in changes.views and (schema.oid != target.source_oid or not is_same):
            raise SchemaChangedError(
                f"table {target.table} changed its columns, its key or its identity, and the target cannot "
                "follow that",
                hint=f"remove {place} and restart the pipeline to copy the table again",
            )


EPOCHS = "penstock_epochs"
DEAD_LETTERS = "penstock_dead_letters"
SNAPSHOTS = "penstock_snapshots"
SCRATCH = "penstock_scratch"
READS = "penstock_reads"
RESERVED = frozenset({EPOCHS, DEAD_LETTERS, SNAPSHOTS, SCRATCH, READS, SHADOWS})
"""Names of Penstock's directories in the target, which are next to the directories of schemas. A source
schema with such a name is rejected, because its tables would be in one of these directories.
"""


def reserved_schema(table: TableName) -> UnsupportedTableError | None:
    """The error for a table whose schema has a reserved name; None for other tables."""
    if table.schema.casefold() not in RESERVED:
        return None
    return UnsupportedTableError(
        f"table {table} cannot be mirrored: the schema name {table.schema} is reserved for a directory of "
        "Penstock in the target",
        hint="route the table to another schema with into: in a rule for it, rename the schema at the "
        "source, or exclude it",
    )


def directory_name(name: str) -> str:
    """The directory name of a schema or table. Different names have different directory names. The escape
    character is a tilde, because delta-rs decodes percent signs in paths.
    """
    escaped = quote(name, safe=" ").replace("~", "~7E").replace("%", "~")
    return f"~2E{escaped[1:]}" if escaped.startswith(".") else escaped


class DirectoryTargets(Targets):
    """The tables of one pipeline under `root`, each in a directory."""

    def __init__(self, root: Path, pipeline: str) -> None:
        self._root = root
        self._pipeline = pipeline

    def path(self, table: TableName) -> Path:
        return self._root / directory_name(table.schema) / directory_name(table.name)

    @override
    def describe(self, table: TableName) -> str:
        return str(self.path(table))

    @override
    def are_distinct(self, one: TableName, other: TableName) -> bool:
        return is_case_sensitive(self._root)
