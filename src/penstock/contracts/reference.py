"""Contract of reference tables: first the rows of a small, slowly changing table, then its changes.

The consumer calls, in this order: `restore` if it has a checkpoint, `poll_snapshot` until it returns None,
then `poll_changes` as long as needed, with `checkpoint` in between and `confirm` whenever a checkpoint and
all rows before it are durable, then `close`. `ReferenceTableConformance` in `penstock.testing` checks
implementations against these rules.

Every batch has the table's own columns, then those of `penstock.change`: the kind of the change and its place
in the order of all changes. Rows of a snapshot have the kind `snapshot`. A key change is a delete of the old
key and an insert of the new one; a truncate removes every row. A change with unchanged TOAST values lists
their columns in `_unchanged`. The consumer keeps the values it has for the same key or, if a delete comes
directly before such an insert, for the deleted key.
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
    """Fills a reference table and keeps it current. For one thread at a time.

    Errors are subclasses of `PenstockError`. After an error with recovery RETRY the source continues from its
    checkpoint: call again later, and discard the rows of an incomplete transaction, which are delivered
    again. Any other error ends the source. Then only `close` may be called, and the consumer continues with a
    new source: restored from a checkpoint, or from the beginning with an empty table. Usual mistakes of
    implementations: reporting the end of a snapshot after an error, and continuing in the middle of a
    transaction whose beginning was discarded.
    """

    # --- schema and key -------------------------------------------------------------------------------------

    @abstractmethod
    def schema(self) -> pa.Schema:
        """The table's own columns. Called at any time before `close`, also before the first poll; it may
        query the source.
        """

    @abstractmethod
    def key(self) -> tuple[str, ...]:
        """The key columns, in table order; at least one, and never null. Called like `schema`."""

    # --- required -------------------------------------------------------------------------------------------

    @abstractmethod
    def poll_snapshot(self) -> pa.RecordBatch | None:
        """The next rows of the snapshot, or None when it is complete. Every later call returns None too.

        Called first, in a loop. It waits for rows. All rows are read as of one moment, each row is returned
        once, and no change is lost between that moment and the first `poll_changes`. An empty table is
        complete at once. If the snapshot restarts after an error with recovery RETRY, it begins with a batch
        that has a truncate: discard the rows before it.
        """

    @abstractmethod
    def is_snapshot_complete(self) -> bool:
        """Whether every row of the snapshot was delivered. It is never true before, and is true at the latest
        when `poll_snapshot` has returned None.
        """

    @abstractmethod
    def poll_changes(self) -> pa.RecordBatch | None:
        """The next changes in order, or None if there are none *now*: call again later.

        Called in a loop after the snapshot is complete; before that it raises `ConnectorStateError`. It does
        not wait for changes. None never means an end, and is never returned within a transaction. A long
        transaction may be split into several batches; the table equals the source whenever `checkpoint` has
        moved, and not in between. A source without changes always returns None.
        """

    @abstractmethod
    def checkpoint(self) -> SourceCheckpoint:
        """The position after the delivered rows: sufficient to resume there, in another process, after a
        restart.

        Called any number of times, after any poll. Cheap and without side effects: no request to a server and
        no acknowledgement. The checkpoint covers whole transactions only: the rows of an incomplete one are
        delivered again. During a snapshot the checkpoint is the beginning, because rows read at two moments
        are not a consistent table.
        """

    @abstractmethod
    def restore(self, checkpoint: SourceCheckpoint) -> None:
        """Continue from `checkpoint` instead of the beginning. If the snapshot was complete at the
        checkpoint, it is not read again. Restoring acknowledges nothing: an older checkpoint stays valid
        until a later one is confirmed.

        Called at most once, before the first poll; later it raises `ConnectorStateError`. Raises
        `CheckpointError` for a checkpoint of another table, and a gap error if the changes after the
        checkpoint are no longer available.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything: connections, threads, locks. Acknowledges nothing. May be called more than
        once, and at any time.

        Every later poll raises `ConnectorStateError`. Checkpoints that were taken before remain valid. A
        source that is garbage collected without this call releases everything too.
        """

    # --- with defaults --------------------------------------------------------------------------------------

    def confirm(self, checkpoint: SourceCheckpoint) -> None:  # noqa: B027 - optional
        """State that the checkpoint, and every row before it, is durable: the source may remove the changes
        before it.

        Only this method acknowledges anything to the source. Called after the consumer's own commit, any
        number of times. A checkpoint that is older than a confirmed one has no effect. The default does
        nothing, for sources without a log.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PositionedReferenceTable(ReferenceTableSource):
    """A reference table whose `_commit_version` values are positions in a log that change streams share.

    A change of such a stream can be joined with the table as it was at the change's own commit.
    """

    @abstractmethod
    def reached(self) -> Position:
        """The position up to which all commits have been delivered. It moves with `checkpoint`, even if the
        table does not change.
        """

    @abstractmethod
    def settled(self) -> Position:
        """The position *before* which no stream of the same log will need the table any more.

        Called occasionally by the owner of the table's history, from the thread that polls. It may read
        files, but sends no request to a server.
        """


class KeyedReferenceTable(ABC):
    """A table that is queried by key, for tables that are too large to store.

    Plain data that can be pickled: it is sent to executors, and opens its resources in each call.
    """

    @abstractmethod
    def schema(self) -> pa.Schema:
        """The table's own columns. Called in the driver and in tasks, any number of times; it sends no
        request.
        """

    @abstractmethod
    def key(self) -> tuple[str, ...]:
        """The key columns, in table order. Called like `schema`."""

    @abstractmethod
    def lookup(self, keys: pa.RecordBatch) -> pa.Table:
        """The current rows with these keys, in any order: the table's columns, then `_exact`. There is no row
        for a key that the table does not have.

        Called in a task. `keys` are distinct and have no nulls; they have the names of `key` and the types of
        `schema`. The result may have additional rows. Raises an error if the table cannot be read. Usual
        mistake: returning no rows instead.
        """


def reference_schema(columns: pa.Schema) -> pa.Schema:
    """Schema of the batches of a reference table with these columns."""
    return pa.schema([*columns, *METADATA_FIELDS])


def as_changes(
    rows: pa.RecordBatch, kind: ChangeType, version: int, first_ordinal: int = 0
) -> pa.RecordBatch:
    """A batch of a reference table that has `rows` as changes of one kind and one version, for sources
    without a log.
    """
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
    """A batch of one change that truncates the table."""
    nothing = pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in columns], schema=columns)
    return as_changes(nothing, ChangeType.TRUNCATE, version, ordinal)
