"""`TriggerFeed`, which reads the change table and returns its changes as log steps, and the settings of a
trigger capture. A poll returns a page of whole transactions, or one transaction that is too long for a page
in pieces, so memory is bounded for any transaction size. Polling an idle source takes two small statements.
No transaction stays open while the caller processes the steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
from typing_extensions import override

from penstock.capture.pull import ChangeFeed, FeedSession, FeedSettings, Mark
from penstock.capture.settings import CaptureLimits, CaptureMethod, CaptureSettings, Confirm
from penstock.capture.trigger.rows import CommitFacts, RecordedChanges, build_batches, restored, table_schema
from penstock.change import (
    COMMIT_TIMESTAMP,
    COMMIT_VERSION,
    ChangeBatch,
    LogStep,
    PiecesCommitted,
    TransactionPiece,
    Transactions,
    metadata_index,
)
from penstock.errors import ConfigError, SlotBusyError
from penstock.location import absolute_path
from penstock.postgres.catalog import inspect_types
from penstock.postgres.change_table import READER, ChangeTable, OrderedCommit, check_reader
from penstock.postgres.connection import SourceAddress, connect, source_errors
from penstock.postgres.consistent_read import inspect_system
from penstock.postgres.slot import is_slot_name
from penstock.postgres.types.column import TypePolicy
from penstock.postgres.types.registry import TypeResolver

_LONGEST = 50
"""The maximum length of the name of a change table. The names of the triggers contain it, and Postgres limits
the length of trigger names.
"""
NAME_RULE = f"use lower-case letters, digits and underscores, {_LONGEST} at most, and no pg_ prefix"


def is_change_table_name(name: str) -> bool:
    return is_slot_name(name) and len(name) <= _LONGEST and not name.startswith("pg_")


@dataclass(frozen=True, slots=True)
class TriggerSettings:
    """Settings of a trigger capture."""

    address: SourceAddress
    name: str
    """The name of the schema of the change table, and part of the names of the triggers."""
    spool: Path
    limits: CaptureLimits = field(default_factory=CaptureLimits)
    types: TypePolicy = TypePolicy.DEFAULT
    confirm: Confirm = Confirm.APPLIED
    poll_seconds: float = 0.1
    """The pause before the next poll when the last one has read everything."""
    page_changes: int = 20_000
    page_bytes: int = 16 << 20
    """The maximum size of the text that one query reads. A single change that is larger is still read."""

    @classmethod
    def of(cls, settings: CaptureSettings) -> TriggerSettings:
        """Return the settings of a capture whose method is triggers."""
        return cls(
            settings.address, settings.slot, settings.spool, settings.limits, settings.types, settings.confirm
        )

    @property
    def feed(self) -> FeedSettings:
        """The settings of the feed: its identity, its polling interval, and the spool for its changes."""
        return FeedSettings(
            self.name,
            CaptureMethod.TRIGGER,
            self.spool,
            self.limits,
            self.types,
            self.confirm,
            self.poll_seconds,
        )

    def __post_init__(self) -> None:
        if not is_change_table_name(self.name):
            raise ConfigError(f"{self.name!r} cannot be the name of a change table", hint=NAME_RULE)
        object.__setattr__(self, "spool", absolute_path(self.spool, "spool"))


_MAX_COMMITS = 5_000
_REMOVED_CHANGES = 10_000
_REMOVALS = 5
"""The maximum number of delete statements after a confirmation, and after each poll while confirmed changes
are left.
"""


@dataclass(frozen=True, slots=True)
class TriggerFeed(ChangeFeed):
    """Reads one change table, which must exist."""

    settings: TriggerSettings

    @override
    def ensure(self) -> Mark:
        """Return the position that is confirmed in the change table. Provisioning has created the table
        before.
        """
        with connect(self.settings.address) as connection:
            return Mark(ChangeTable(connection, self.settings.name).inspect().confirmed)

    @override
    def open(self, mark: Mark) -> FeedSession:
        """Open a session that reads the change table after `mark`. Raises `SlotBusyError`, which is retried,
        while another session reads the change table.
        """
        return TriggerSession(self.settings, mark)


class TriggerSession(FeedSession):
    """Reads the change table over one connection. The connection holds the lease of the change table, so no
    other session can read it at the same time.
    """

    def __init__(self, settings: TriggerSettings, mark: Mark) -> None:
        self._settings = settings
        self.mark = mark
        self._has_leftovers = True
        self._quiet_due = 0.0
        self._stack = ExitStack()
        with self._stack:
            connection = self._stack.enter_context(connect(settings.address, READER))
            self._table = ChangeTable(connection, settings.name)
            state = self._table.inspect()
            holder = self._table.take_lease()
            if holder is not None:
                raise SlotBusyError(f"another process reads the change table {settings.name}: {holder}")
            check_reader(state, mark.position, settings.name)
            if not state.is_accepted:
                self._table.accept()
            self.system = inspect_system(connection)
            self._types = TypeResolver(settings.types, load=partial(inspect_types, connection))
            self._stack = self._stack.pop_all()

    @override
    def poll(self) -> Iterator[LogStep]:
        with source_errors("reading the change table"):
            commits = self._next_commits()
            fitting = _fitting(commits, self._settings.page_changes, self._settings.page_bytes)
            self.has_more = len(commits) > max(1, len(fitting))
            if fitting:
                yield self._read_page(fitting)
            elif commits:
                yield from self._read_pieces(commits[0])
            if self._has_leftovers and not self.has_more:
                self._remove()

    @override
    def confirm(self, mark: Mark) -> None:
        with source_errors("confirming changes"):
            self._table.confirm(mark.position)
            self._remove()

    @override
    def close(self) -> None:
        self._stack.close()

    def _next_commits(self) -> list[OrderedCommit]:
        """Return the commits after the mark that have a position. If there are none, first assign positions
        to new commits. Every `quiet_seconds`, advance the mark even if there are no changes.
        """
        commits = self._table.commits(self.mark.position, _MAX_COMMITS)
        now = time.monotonic()
        if commits or (not self._table.has_unordered() and now < self._quiet_due):
            return commits
        self._quiet_due = now + self._settings.limits.quiet_seconds
        reached = self._table.sequence()
        commits = self._table.commits(self.mark.position, _MAX_COMMITS)
        if not commits:
            self.mark = Mark(max(reached, self.mark.position))
        return commits

    def _read_page(self, commits: Sequence[OrderedCommit]) -> Transactions:
        end = commits[-1]
        batches = self._decode(self._table.read_commits(self.mark.position, end.position), commits)
        self.mark = Mark(end.position)
        return Transactions(batches, end.position, end.at, len(commits))

    def _read_pieces(self, commit: OrderedCommit) -> Iterator[LogStep]:
        limits, done = self._settings, commit.first - 1
        while done < commit.last:
            upto = self._table.cut(commit, done, max_changes=limits.page_changes, max_bytes=limits.page_bytes)
            batches = self._decode(self._table.read_part(commit, done, upto), [commit])
            yield TransactionPiece(commit.xid, tuple(map(_without_commit, batches)))
            done = upto
        self.mark = Mark(commit.position)
        yield PiecesCommitted(commit.xid, commit.position, commit.at)

    def _decode(
        self, columns: Sequence[pa.StringArray], commits: Sequence[OrderedCommit]
    ) -> tuple[ChangeBatch, ...]:
        recorded = RecordedChanges.of(restored(columns, self._table.restore))
        shapes = {
            shape.id: (shape, table_schema(shape, self._types))
            for shape in self._table.shapes(recorded.shape_ids)
        }
        facts = {commit.position.value: CommitFacts(commit.xid, commit.at) for commit in commits}
        return build_batches(recorded, shapes, facts)

    def _remove(self) -> None:
        for _ in range(_REMOVALS):
            self._has_leftovers = self._table.remove_confirmed(_REMOVED_CHANGES)
            if not self._has_leftovers:
                return


def _fitting(commits: Sequence[OrderedCommit], max_changes: int, max_bytes: int) -> list[OrderedCommit]:
    """Return the first commits that fit into a page together; empty if even the first one does not fit."""
    changes = accumulate(commit.changes for commit in commits)
    sizes = accumulate(commit.bytes for commit in commits)
    return [
        commit
        for commit, total, size in zip(commits, changes, sizes, strict=True)
        if total <= max_changes and size <= max_bytes
    ]


def _without_commit(batch: ChangeBatch) -> ChangeBatch:
    """Return the batch with NULL as commit position and commit time, as in pieces of an open transaction. The
    manifest adds the values.
    """
    rows = batch.rows
    for name in (COMMIT_VERSION, COMMIT_TIMESTAMP):
        at = metadata_index(batch.table, name)
        field = rows.schema.field(at)
        rows = rows.set_column(at, field, pa.nulls(rows.num_rows, field.type))
    return replace(batch, rows=rows)
