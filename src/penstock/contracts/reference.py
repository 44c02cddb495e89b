"""What a reference table promises: the rows of a small, slowly changing table, and then what becomes of them.

The consumer drives it, in this order: `restore` if it has a checkpoint, `poll_snapshot` until that says None, then `poll_changes` for as
long as it likes, with `checkpoint` in between and `confirm` whenever a checkpoint and all rows before it are durable, `close`.
`ReferenceTableConformance` in `penstock.testing` holds an implementation to these rules.

Every batch has the table's own columns, then those of `penstock.change`: what happened to the row, and where in the order of all changes
that was. Rows of a snapshot say `snapshot`. A key change is a delete of the old key and an insert of the new one; a truncate takes every
row. A change that leaves values as they were names their columns in `_unchanged`, and what the consumer has there must stay: of the same
key, or, if a delete comes right before such an insert, of the key that was deleted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

import pyarrow as pa

from penstock.change import CHANGE_TYPE, COMMIT_VERSION, METADATA_FIELDS, ORDINAL, XID, ChangeType
from penstock.contracts.connector import SourceCheckpoint
from penstock.position import Position


class ReferenceTableSource(ABC):
    """Fills a reference table, and keeps it current. For one thread at a time.

    Errors are of the tree of `PenstockError`. One that says RETRY takes the source back to its checkpoint: ask again later, and what had
    come of a transaction that is not whole counts no more, since it comes again. Any other error ends the source, which is then good for
    `close` alone; who goes on does so with another one, restored, or with an empty table. The usual mistakes are to give out the end of a
    snapshot when it was an error that ended the reading, and to go on in the middle of a transaction whose beginning was thrown away.
    """

    # --- what the table is ----------------------------------------------------------------------------------------------

    @abstractmethod
    def schema(self) -> pa.Schema:
        """The table's own columns. Called at any time before `close`, also before the first poll; it may have to ask the source then."""

    @abstractmethod
    def key(self) -> tuple[str, ...]:
        """The columns that tell rows apart, in table order; at least one, and none of them is ever null. Called like `schema`."""

    # --- the six methods of the document ----------------------------------------------------------------------------------

    @abstractmethod
    def poll_snapshot(self) -> pa.RecordBatch | None:
        """The next rows of the snapshot, or None: it is complete, for good, and every later call says so too.

        Called in a loop, first of all. It waits for rows as long as that takes. All rows are of one moment, each row comes once, and no
        change falls between that moment and the first `poll_changes`. An empty table is complete at once. A snapshot that has to begin
        again, after an error that says RETRY, says so by a batch with a truncate: what came before it counts no more.
        """

    @abstractmethod
    def is_snapshot_complete(self) -> bool:
        """Whether every row of the snapshot has been delivered. Never true too early; true at the latest when `poll_snapshot` said None."""

    @abstractmethod
    def poll_changes(self) -> pa.RecordBatch | None:
        """The next changes in order, or None if there are none *now*: ask again later.

        Called in a loop once the snapshot is complete; before that it raises `ConnectorStateError`. It does not wait for changes. None is
        never the end of anything, and never comes in the middle of a transaction. A long transaction may come in several batches; the table
        is as the source had it whenever `checkpoint` has moved, and not in between. A source that never changes always says None.
        """

    @abstractmethod
    def checkpoint(self) -> SourceCheckpoint:
        """Enough to go on behind what has been delivered, in another process, after a restart.

        Called as often as one likes, after any poll. Cheap, and without any effect: it asks nobody and acknowledges nothing. It covers only
        what was delivered, in whole transactions: what came of one that is not whole yet comes again. In the middle of a snapshot it is the
        beginning, since rows of two moments do not make a table.
        """

    @abstractmethod
    def restore(self, checkpoint: SourceCheckpoint) -> None:
        """Go on from `checkpoint` instead of from the beginning. A snapshot that was complete there is not read again.

        Called at most once, before the first poll; after that it raises `ConnectorStateError`. Raises `CheckpointError` for a checkpoint
        that is not of this table, and the error that names the hole if what comes after it cannot be had any more.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of everything: connections, threads, locks. Acknowledges nothing. May be called more than once, and at any time.

        After it, every poll raises `ConnectorStateError`. A checkpoint that was taken before stays good.
        """

    # --- beyond the document --------------------------------------------------------------------------------------------

    def confirm(self, checkpoint: SourceCheckpoint) -> None:  # noqa: B027 - a default, and no duty
        """The checkpoint, and every row before it, is durable: the source may forget what led up to it.

        The document has no such method, and so nothing that could let go of a log. This is the only place where anything is acknowledged to
        the source. Called after the consumer's own commit, as often as it likes; an older checkpoint than before does nothing. By default
        nothing, for sources that keep no log.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class PositionedReferenceTable(ReferenceTableSource):
    """A reference table whose `_commit_version` are positions in a log from which streams of changes come too.

    So a change in such a stream can be joined with the table as it was at the change's own commit.
    """

    @abstractmethod
    def reached(self) -> Position:
        """Everything that commits up to here has been delivered. It moves with `checkpoint`, also when nothing concerns the table."""

    @abstractmethod
    def settled(self) -> Position:
        """No stream of the same log will ask again for the table as it was *before* this position.

        Called now and then by whoever keeps the table's past, from the thread that polls. It may look at files, and asks no server.
        """


class KeyedReferenceTable(ABC):
    """A table that can be asked for rows by their keys, for who cannot keep all of it.

    Plain data that can be pickled: it travels to executors, and opens what it needs in each call.
    """

    @abstractmethod
    def schema(self) -> pa.Schema:
        """The table's own columns. Called in the driver and in tasks, as often as one likes; it asks nobody."""

    @abstractmethod
    def key(self) -> tuple[str, ...]:
        """The columns that tell rows apart, in table order. Called like `schema`."""

    @abstractmethod
    def lookup(self, keys: pa.RecordBatch) -> pa.Table:
        """The rows that have these keys now: the table's columns, then `_exact`. In any order; what is not there is left out.

        Called from a task with keys that are not null, each once, under the names of `key` and with the types of `schema`. More rows than
        were asked for do no harm. Raises what keeps it from asking; the usual mistake is to give no rows instead.
        """


def reference_schema(columns: pa.Schema) -> pa.Schema:
    """What every batch of a reference table with these columns has."""
    return pa.schema([*columns, *METADATA_FIELDS])


def as_changes(rows: pa.RecordBatch, kind: ChangeType, version: int, first_ordinal: int = 0) -> pa.RecordBatch:
    """Rows of a source without a log of its own, as a batch of a reference table: all of one kind, and all of one version."""
    count = rows.num_rows
    known = {
        CHANGE_TYPE: [kind.value] * count,
        COMMIT_VERSION: [version] * count,
        ORDINAL: range(first_ordinal, first_ordinal + count),
        XID: [0] * count,
    }
    metadata = [pa.array(known.get(field.name, [None] * count), field.type) for field in METADATA_FIELDS]
    return pa.RecordBatch.from_arrays([*rows.columns, *metadata], schema=reference_schema(rows.schema))


def as_truncate(columns: pa.Schema, version: int, ordinal: int = 0) -> pa.RecordBatch:
    """A batch of one change: the table is emptied."""
    nothing = pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in columns], schema=columns)
    return as_changes(nothing, ChangeType.TRUNCATE, version, ordinal)
