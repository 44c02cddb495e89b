"""`PollingFeed`: polls tables and returns the changes of each poll as one transaction, in pieces on disk if
it is large.

A poll reads all tables under one consistent read. It is one transaction for consumers: changed rows since the
previous poll are upserts and, by option, deleted rows are deletes. Intermediate states between two polls are
not seen, and the order of changes within a poll is not that of the source. Rows that a copy contains are
returned at the position of the copy, which is before that of the poll (`copies.py`). They form separate
transactions, which are returned first.

A table is read in full if its polling method has changed, if the server is on another timeline, or if too
many transactions have passed to compare their ids. It is also read in full if its known keys are lost; in
that case a truncate is returned before its rows.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from penstock.capture.polling.copies import CopiedVersions, KnownCopies
from penstock.capture.polling.known_keys import KnownKeys
from penstock.capture.polling.settings import PollingSettings
from penstock.capture.polling.tables import (
    NONE_SEEN,
    PollingState,
    TableState,
    begin_table,
    find_tables,
    inspect_polled,
    parse_begin,
)
from penstock.capture.pull import ChangeFeed, FeedSession, Mark
from penstock.capture.source_checks import check_not_rewound, check_same_system
from penstock.change import ChangeBatch, ChangeType, LogStep, PiecesCommitted, TransactionPiece, Transactions
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.connection import Connection, connect, source_errors
from penstock.postgres.consistent_read import (
    ConsistentRead,
    ensure_flushed,
    hold_consistent_read,
    inspect_system,
)
from penstock.postgres.polled_tables import (
    InitialTransactions,
    OpenTransactions,
    Place,
    PolledTable,
    RowBlock,
    SafePolls,
    Window,
    change_batch,
    inspect_highest,
    inspect_open,
    read_keys_in_order,
    read_window,
    truncate_batch,
)
from penstock.postgres.server import SystemIdentity
from penstock.schema import TableName, TableSchema

_PIECE_BYTES = 16 << 20
_XID = 1
"""The transaction id under which the spool stores the pieces of a poll until the poll is complete. Pieces at
earlier positions use the following ids. These are not transaction ids of the source, since a poll covers any
number of source transactions.
"""


class PollSteps:
    """Collects the rows of one poll and yields them as log steps. `add` and `truncate` yield a step only if
    the rows have become too many to hold in memory; `finish` yields the remaining steps.
    """

    def __init__(self, position: Position, time: datetime, xid: int = _XID) -> None:
        self.is_due = False
        """Whether `finish` yields a step even without rows, so that the mark of this poll is stored."""
        self._position = position
        self._time = time
        self._xid = xid
        self._earlier: dict[Position, PollSteps] = {}
        self._own_rows = 0
        self._batches: list[ChangeBatch] = []
        self._bytes = 0
        self._is_in_pieces = False

    @property
    def rows(self) -> int:
        """The number of rows collected so far, at all positions."""
        return self._own_rows + sum(steps.rows for steps in self._earlier.values())

    def at(self, position: Position) -> PollSteps:
        """Return the object that collects rows at `position`, a position between the previous poll and this
        one. `finish` yields its steps too.
        """
        return self._earlier.setdefault(
            position, PollSteps(position, self._time, self._xid + 1 + len(self._earlier))
        )

    def add(
        self, schema: TableSchema, kind: ChangeType, texts: Sequence[pa.StringArray]
    ) -> Iterator[LogStep]:
        return self._add(change_batch(schema, kind, texts, self._place))

    def truncate(self, schema: TableSchema) -> Iterator[LogStep]:
        return self._add(truncate_batch(schema, self._place))

    @property
    def has_end(self) -> bool:
        """Whether `finish` yields a step that ends at the position of the poll."""
        return self.rows > 0 or self.is_due

    def finish(self) -> Iterator[LogStep]:
        """Yield the remaining steps, those at earlier positions first. Yields nothing if there was no row and
        `is_due` is not set.
        """
        for position in sorted(self._earlier):
            yield from self._earlier[position].finish()
        if self._is_in_pieces:
            yield from self._piece()
            yield PiecesCommitted(self._xid, self._position, self._time)
        elif self.has_end:
            yield Transactions(tuple(self._batches), self._position, self._time, 1 if self._batches else 0)

    @property
    def _place(self) -> Place:
        return Place(self._position, self._time, self._own_rows)

    def _add(self, batch: ChangeBatch) -> Iterator[LogStep]:
        self._batches.append(batch)
        self._own_rows += batch.rows.num_rows
        self._bytes += batch.rows.nbytes
        if self._bytes > _PIECE_BYTES:
            self._is_in_pieces = True
            yield from self._piece()

    def _piece(self) -> Iterator[LogStep]:
        if self._batches:
            yield TransactionPiece(self._xid, tuple(self._batches))
            self._batches, self._bytes = [], 0


_log = logging.getLogger(__name__)

_MOST_SEEN = 2_000_000
"""The maximum number of row versions in memory per table. With more of them, every poll returns some rows
again until older transactions have ended.
"""


@dataclass(frozen=True, slots=True)
class PollingFeed(ChangeFeed):
    """Polls the tables of the settings. If the settings name no tables, it polls all tables that any process
    has added.
    """

    settings: PollingSettings

    @override
    def ensure(self) -> Mark:
        """Return the last confirmed mark, or create the first one. Also starts to poll tables of the settings
        that have never been polled.
        """
        store = self.settings.resume
        mark = store.load_mark()
        if mark is None:
            position, state = self.begin(self.settings.tables)
            store.save_tables(state.to_texts())
            store.begin_mark(Mark(position, state.to_text()))
            mark = store.load_mark()
            assert mark is not None
        self.add(self.settings.tables)
        return mark

    def add(self, tables: Sequence[TableName]) -> list[TableName]:
        """Start polling these tables: later polls return the changes that are committed after this call.
        Returns the tables that were not polled before.
        """
        store = self.settings.resume
        with connect(self.settings.address) as connection:
            found = find_tables(connection, tables)
        known = store.load_tables()
        added = [table.name for table in found if table.oid not in known]
        if added:
            _, state = self.begin(added)
            store.save_tables(state.to_texts())
        return added

    def begin(self, tables: Sequence[TableName]) -> tuple[Position, PollingState]:
        """Determine the start states of tables that are polled for the first time. Returns the position of
        the consistent read, and the states.
        """
        settings = self.settings
        keys = KnownKeys(settings.keys) if settings.rules.deletes else None
        with connect(settings.address) as connection:
            system = inspect_system(connection)
            found = find_tables(connection, tables)
            with hold_consistent_read(
                connection, [table.name for table in found], settings.poll_lock
            ) as read:
                polled = inspect_polled(connection, settings, found).checked()
                states = {table.schema.oid: begin_table(connection, table, read, keys) for table in polled}
            ensure_flushed(connection, read.position)
        return read.position, PollingState(str(system), read.position, states)

    @override
    def open(self, mark: Mark) -> FeedSession:
        return PollingSession(self.settings, mark)


class PollingSession(FeedSession):
    """Polls over one connection."""

    def __init__(self, settings: PollingSettings, mark: Mark) -> None:
        self._settings = settings
        self.mark = mark
        self._store = settings.resume
        self._keys = KnownKeys(settings.keys)
        self._copies = KnownCopies(settings.keys)
        self._stack = ExitStack()
        state = PollingState.parse(mark.state)
        try:
            self._connection: Connection = self._stack.enter_context(
                connect(settings.address, "penstock polling")
            )
            with source_errors(f"querying {settings.address.describe()}"):
                self.system = inspect_system(self._connection)
                self._stack.enter_context(self._store.held(self._connection))
            is_same = _is_same_timeline(SystemIdentity.parse(state.system), self.system)
            self._states = dict(state.tables) if is_same else _reset_states(state.tables)
            self._reached = state.reached if is_same else Position.ZERO
            self._learn_added()
        except BaseException:
            self._stack.close()
            raise
        self._safe = SafePolls()
        self._columns: dict[tuple[int, str], _ColumnWatch] = {}
        self._warned: set[TableName] = set()

    @override
    def close(self) -> None:
        self._stack.close()

    @override
    def confirm(self, mark: Mark) -> None:
        self._store.save_mark(mark)
        tables = PollingState.parse(mark.state).tables
        self._keys.forget_copies({oid: state.keys for oid, state in tables.items() if state.keys is not None})
        self._copies.forget(mark.position)

    @override
    def poll(self) -> Iterator[LogStep]:
        connection, last = self._connection, self.mark.position
        with source_errors(f"polling {self._settings.address.describe()}"):
            found = self._find()
            self._keys.keep_only(
                {oid: state.keys for oid, state in self._states.items() if state.keys is not None}
            )
            now = inspect_open(connection)
            safe = self._safe.next_poll(now)
            with hold_consistent_read(
                connection, [table.name for table in found], self._settings.poll_lock
            ) as read:
                check_not_rewound(self._reached, read.position)
                position = max(read.position, Position.of(last.value + 1))
                steps = PollSteps(position, read.taken_at)
                states = {oid: state for oid, state in self._states.items() if self._is_polled(oid)}
                copies = self._copies.load(last, position)
                for table in self._inspect(found):
                    poll = _TablePoll(
                        table, self._state_of(table), read, position, copies.get(table.schema.oid, [])
                    )
                    following = self._next_window(poll, now, safe)
                    states[table.schema.oid] = yield from self._poll_table(poll, following, steps)
            ensure_flushed(connection, read.position)
            self._states, self._reached = states, read.position
            state = PollingState(str(self.system), read.position, states)
            self.mark = Mark(position if steps.has_end else max(read.position, last), state.to_text())
            yield from steps.finish()

    def _find(self) -> list[CatalogTable]:
        """Return the tables to poll: those of the settings or, if the settings name no tables, all that any
        process has added so far. Dropped tables are left out.
        """
        names = self._settings.tables
        if not names:
            self._learn_added()
        return find_tables(self._connection, names, () if names else self._added)

    def _learn_added(self) -> None:
        self._added = self._store.load_tables()
        for oid, text in self._added.items():
            self._states.setdefault(oid, parse_begin(text, str(self.system)))

    def _is_polled(self, oid: int) -> bool:
        """Whether the table is still polled, so that its state must be kept. A table that was removed gets a
        new start state when it is added again.
        """
        return bool(self._settings.tables) or oid in self._added

    def _inspect(self, found: list[CatalogTable]) -> list[PolledTable]:
        """Return the tables that can be polled. If the settings name the tables, raises an error if one of
        them cannot be polled. Otherwise such a table is left out, so that it does not stop the others; the
        process that added the table detects the change itself.
        """
        polled = inspect_polled(self._connection, self._settings, found)
        if self._settings.tables:
            return polled.checked()
        for name, error in polled.refused.items():
            if name not in self._warned:
                self._warned.add(name)
                _log.warning(
                    "table can no longer be polled",
                    extra={"table": str(name), "code": error.code, "reason": error.message},
                )
        return polled.tables

    def _state_of(self, table: PolledTable) -> TableState:
        """Return the state from which the table is polled. A table without a state, or with the state of
        another polling method, is read in full.
        """
        state = self._states.get(table.schema.oid)
        if state is None:
            return TableState(table.how)
        return state if state.how == table.how else TableState(table.how, keys=state.keys)

    def _next_window(self, poll: _TablePoll, now: OpenTransactions, safe: int) -> Window:
        """Return the window of the table's next poll."""
        table, window = poll.table, poll.state.window
        if table.cursor is None:
            return Window(horizon=poll.read.xmin)
        watch = self._columns.setdefault(
            (table.schema.oid, table.how), _ColumnWatch(window.low, self._safe.polls - 1)
        )
        have_ended = watch.first.have_ended(now)
        low = watch.low(safe)
        watch.learn(self._safe.polls, inspect_highest(self._connection, table))
        return Window(low, None if have_ended or window.is_everything else window.horizon)

    def _poll_table(
        self, poll: _TablePoll, following: Window, steps: PollSteps
    ) -> Generator[LogStep, None, TableState]:
        """Yield the changes of one table; returns its state after the poll."""
        table, state = poll.table, poll.state
        if table.schema.oid not in self._states:
            # The table was dropped and created again under the same name, so its old rows are gone.
            yield from steps.truncate(table.schema)
        if self._settings.rules.deletes:
            if state.keys is not None and not self._keys.has(table.schema, state.keys):
                _log.warning(
                    "known keys lost or incompatible, reading the table in full",
                    extra={"table": str(table.schema.name)},
                )
                yield from steps.truncate(table.schema)
                state = replace(state.reset(), keys=None)
            copies = self._keys.copies(table.schema, state.keys, poll.position)
            yield from self._compare(poll, state.keys, copies, steps)
        seen = yield from self._upserts(replace(poll, state=state), following, steps)
        keys = state.keys if self._settings.rules.deletes else None
        if self._settings.rules.deletes and self._keys.adopt(table.schema.oid, poll.position):
            keys = poll.position
            # The next poll deletes the file with the previous keys. So this mark must be stored, even without
            # changes: the stored mark would refer to the deleted file.
            steps.is_due = True
        return TableState(table.how, following, seen, keys)

    def _upserts(
        self, poll: _TablePoll, following: Window, steps: PollSteps
    ) -> Generator[LogStep, None, pa.StringArray]:
        """Yield rows that the previous polls have not returned; returns the row versions that the next poll
        will find again.
        """
        table, state = poll.table, poll.state
        # Rows of a full read may follow a truncate at the position of the poll, so they must not get the
        # earlier position of a copy.
        copies = [] if state.window.is_everything else poll.copies
        seen: list[pa.StringArray] = []
        horizons = [copy.horizon for copy in copies]
        for block in read_window(
            self._connection, table, state.window, following, poll.read, horizons=horizons
        ):
            if sum(map(len, seen)) < _MOST_SEEN:
                seen.append(block.versions.filter(block.comes_again))
            for place, fresh in _by_position(block.without(state.seen), copies, steps):
                if len(fresh.versions):
                    yield from place.add(table.schema, ChangeType.UPDATE_POSTIMAGE, fresh.texts)
        return pa.concat_arrays(seen) if seen else NONE_SEEN

    def _compare(
        self, poll: _TablePoll, before: Position | None, copies: Sequence[Position], steps: PollSteps
    ) -> Iterator[LogStep]:
        """Yield deletes of the keys that have disappeared since the previous poll or since a copy. If the
        table is empty, yield one truncate instead.
        """
        schema = poll.table.schema
        now = read_keys_in_order(self._connection, poll.table)
        first = next(now, None)
        changed = self._keys.compare(schema, before, _prepend(first, now), keeps_same=bool(copies))
        copied = (self._keys.compare_copy(schema, copy, before) for copy in copies)
        places = {name: 2 + at for at, name in enumerate(schema.key)}
        is_told = False
        for texts in chain(changed, chain.from_iterable(copied)):
            if first is not None:
                nulls = pa.nulls(len(texts[1]), pa.string())
                columns = [texts[places[name]] if name in places else nulls for name in schema.column_names]
                yield from steps.add(schema, ChangeType.DELETE, columns)
            elif not is_told:
                is_told = True
                yield from steps.truncate(schema)


@dataclass(frozen=True, slots=True, eq=False)
class _TablePoll:
    """One table in one poll."""

    table: PolledTable
    state: TableState
    read: ConsistentRead
    position: Position
    copies: Sequence[CopiedVersions]
    """The copies of the table since the previous poll."""


class _ColumnWatch:
    """Stores the highest cursor values of a table at recent polls, to determine the value from which the next
    poll must start.
    """

    def __init__(self, low: str | None, poll: int) -> None:
        self.first = InitialTransactions()
        self._highest: dict[int, str | None] = {poll: low}

    def low(self, safe: int) -> str | None:
        """Return the highest value at the poll with number `safe`, or the start value if the table was added
        after that poll.
        """
        at = max((poll for poll in self._highest if poll <= safe), default=min(self._highest))
        self._highest = {poll: value for poll, value in self._highest.items() if poll >= at}
        return self._highest[at]

    def learn(self, poll: int, highest: str | None) -> None:
        self._highest[poll] = highest


def _by_position(
    block: RowBlock, copies: Sequence[CopiedVersions], steps: PollSteps
) -> Iterator[tuple[PollSteps, RowBlock]]:
    """Split the rows by position. Rows that a copy contains get the position of the first copy that contains
    them, all others the position of the poll.
    """
    for at, copy in enumerate(copies):
        is_copied = copy.has(block, at)
        yield steps.at(copy.position), block.filter(is_copied)
        block = block.filter(pc.invert(is_copied))
    yield steps, block


def _prepend(
    first: list[pa.StringArray] | None, rest: Iterator[list[pa.StringArray]]
) -> Iterator[list[pa.StringArray]]:
    if first is not None:
        yield first
        yield from rest


def _is_same_timeline(before: SystemIdentity, now: SystemIdentity) -> bool:
    check_same_system(now, before)
    return now.timeline == before.timeline


def _reset_states(tables: Mapping[int, TableState]) -> dict[int, TableState]:
    """Return states with which all tables are read in full. After a promotion or a restore, the server may
    have lost transactions that were polled before.
    """
    _log.warning("server is on another timeline, reading tables in full", extra={"tables": len(tables)})
    return {oid: state.reset() for oid, state in tables.items()}
