"""`TriggerFeed`: what triggers wrote down, as steps of the log.

A look brings a page of whole transactions, or one that is too long for a page, in pieces. So what is in memory is bounded, whatever the
size of a transaction. A look at an idle source is two small statements; none stays open while somebody takes in what it brought.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import pyarrow as pa
from typing_extensions import override

from penstock.capture.feeds import ChangeFeed, FeedSession, Mark
from penstock.capture.trigger_rows import CommitFacts, NotedChanges, build_batches, restored, table_schema
from penstock.capture.trigger_settings import TriggerSettings
from penstock.change import (
    COMMIT_TIMESTAMP,
    COMMIT_VERSION,
    ChangeBatch,
    LogStep,
    PiecesCommitted,
    TransactionPiece,
    Transactions,
    metadata_place,
)
from penstock.errors import SlotBusyError
from penstock.postgres.catalog import inspect_types
from penstock.postgres.change_table import READER, ChangeTable, OrderedCommit, check_reader
from penstock.postgres.connection import connect, source_errors
from penstock.postgres.moments import inspect_system
from penstock.postgres.timeline import SystemIdentity
from penstock.postgres.types.resolver import TypeResolver

_MAX_COMMITS = 5_000
_REMOVED_CHANGES = 10_000
_REMOVALS = 5
"""How many times so many changes are removed at most when a mark is confirmed, and after each look, until none is left."""


@dataclass(frozen=True, slots=True)
class TriggerFeed(ChangeFeed):
    """One change table, which must be there."""

    settings: TriggerSettings

    @property
    @override
    def name(self) -> str:
        return self.settings.name

    @property
    @override
    def kind(self) -> str:
        return "trigger"

    @property
    @override
    def interval_seconds(self) -> float:
        return self.settings.poll_seconds

    @override
    def ensure(self) -> Mark:
        """What provisioning made, and confirming moves: the change table itself knows where to go on."""
        with connect(self.settings.address) as connection:
            return Mark(ChangeTable(connection, self.settings.name).inspect().confirmed)

    @override
    def open(self, mark: Mark) -> FeedSession:
        """Raises `SlotBusyError`, which passes, while somebody else reads the change table."""
        return TriggerSession(self.settings, mark)


class TriggerSession(FeedSession):
    """One connection, whose session is the only reader of the change table for as long as it lasts."""

    def __init__(self, settings: TriggerSettings, mark: Mark) -> None:
        self._settings = settings
        self._mark = mark
        self._has_more = False
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
            self._system = inspect_system(connection)
            self._types = TypeResolver(settings.types, load=partial(inspect_types, connection))
            self._stack = self._stack.pop_all()

    @property
    @override
    def system(self) -> SystemIdentity:
        return self._system

    @property
    @override
    def mark(self) -> Mark:
        return self._mark

    @property
    @override
    def has_more(self) -> bool:
        return self._has_more

    @override
    def look(self) -> Iterator[LogStep]:
        with source_errors("reading the change table"):
            commits = self._next_commits()
            fitting = _fitting(commits, self._settings.page_changes, self._settings.page_bytes)
            self._has_more = len(commits) > max(1, len(fitting))
            if fitting:
                yield self._read_page(fitting)
            elif commits:
                yield from self._read_pieces(commits[0])
            if self._has_leftovers and not self._has_more:
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
        """Those behind the mark. If there are none, look for something new; now and then move on although there is nothing."""
        commits = self._table.commits(self._mark.position, _MAX_COMMITS)
        now = time.monotonic()
        if commits or (not self._table.has_fresh() and now < self._quiet_due):
            return commits
        self._quiet_due = now + self._settings.limits.quiet_seconds
        reached = self._table.sequence()
        commits = self._table.commits(self._mark.position, _MAX_COMMITS)
        if not commits:
            self._mark = Mark(max(reached, self._mark.position))
        return commits

    def _read_page(self, commits: Sequence[OrderedCommit]) -> Transactions:
        end = commits[-1]
        batches = self._decode(self._table.read_commits(self._mark.position, end.position), commits)
        self._mark = Mark(end.position)
        return Transactions(batches, end.position, end.at, len(commits))

    def _read_pieces(self, commit: OrderedCommit) -> Iterator[LogStep]:
        limits, done = self._settings, commit.first - 1
        while done < commit.last:
            upto = self._table.cut(commit, done, max_changes=limits.page_changes, max_bytes=limits.page_bytes)
            batches = self._decode(self._table.read_part(commit, done, upto), [commit])
            yield TransactionPiece(commit.xid, tuple(map(_without_commit, batches)))
            done = upto
        self._mark = Mark(commit.position)
        yield PiecesCommitted(commit.xid, commit.position, commit.at)

    def _decode(self, columns: Sequence[pa.StringArray], commits: Sequence[OrderedCommit]) -> tuple[ChangeBatch, ...]:
        noted = NotedChanges.of(restored(columns, self._table.restore))
        shapes = {shape.id: (shape, table_schema(shape, self._types)) for shape in self._table.shapes(noted.shape_ids)}
        facts = {commit.position.value: CommitFacts(commit.xid, commit.at) for commit in commits}
        return build_batches(noted, shapes, facts)

    def _remove(self) -> None:
        for _ in range(_REMOVALS):
            self._has_leftovers = self._table.remove_confirmed(_REMOVED_CHANGES)
            if not self._has_leftovers:
                return


def _fitting(commits: Sequence[OrderedCommit], max_changes: int, max_bytes: int) -> list[OrderedCommit]:
    """As many of the first transactions as make a page; none if not even one does."""
    changes = accumulate(commit.changes for commit in commits)
    sizes = accumulate(commit.bytes for commit in commits)
    return [commit for commit, total, size in zip(commits, changes, sizes, strict=True) if total <= max_changes and size <= max_bytes]


def _without_commit(batch: ChangeBatch) -> ChangeBatch:
    """As rows of an open transaction have it; the manifest gives them their commit."""
    rows = batch.rows
    for name in (COMMIT_VERSION, COMMIT_TIMESTAMP):
        at = metadata_place(batch.table, name)
        field = rows.schema.field(at)
        rows = rows.set_column(at, field, pa.nulls(rows.num_rows, field.type))
    return replace(batch, rows=rows)
