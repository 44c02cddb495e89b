"""`PollingFeed`: asks tables what has changed, look by look.

A look is one transaction of the source, and one transaction to whoever reads behind it: all tables as of one moment, rows that changed
since the last look as upserts, and, by option, those that are gone as deletes. What happened to a row between two looks is not seen, only
how it ended; nor is the order of changes within a look that of the source.

Whatever is in doubt is read in full: a table whose way of being asked has changed, a server on another timeline, a distance at which
transactions can no longer be told apart. If also the keys are gone that the table had, its rows are given out anew behind a truncate.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from penstock.capture.continuity import check_not_rewound, check_same_system
from penstock.capture.copied_versions import CopiedVersions, KnownCopies
from penstock.capture.feeds import ChangeFeed, FeedSession, Mark
from penstock.capture.known_keys import KnownKeys
from penstock.capture.polling_settings import PollingSettings
from penstock.capture.polling_state import NONE_SEEN, PollingState, TableState, parse_begin
from penstock.capture.polling_tables import begin_table, find_tables, inspect_polled
from penstock.capture.steps import LookSteps
from penstock.change import ChangeType, LogStep
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.connection import Connection, connect, source_errors
from penstock.postgres.moments import Moment, ensure_flushed, hold_moment, inspect_system
from penstock.postgres.open_transactions import FirstOnes, OpenNow, SafeLooks, inspect_open
from penstock.postgres.polled import PolledTable, RowBlock, Window, inspect_highest, read_keys_in_order, read_window
from penstock.postgres.timeline import SystemIdentity
from penstock.schema import TableName

_log = logging.getLogger(__name__)

_MOST_SEEN = 2_000_000
"""Names of row versions in memory, of a table. With more, some rows come again with every look until older transactions have ended."""


@dataclass(frozen=True, slots=True)
class PollingFeed(ChangeFeed):
    """The tables of the settings; if these name none, all that were ever added, by whatever process."""

    settings: PollingSettings

    @property
    @override
    def name(self) -> str:
        return self.settings.name

    @property
    @override
    def kind(self) -> str:
        return "polling"

    @property
    @override
    def interval_seconds(self) -> float:
        return self.settings.rules.interval_seconds

    @override
    def ensure(self) -> Mark:
        """Tables that have never been asked begin now, whether others have begun before or not."""
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
        """Have these asked from now on: what commits after this returns will be given out. Gives those that were not asked before."""
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
        """Where tables begin that are looked at now for the first time."""
        settings = self.settings
        keys = KnownKeys(settings.keys) if settings.rules.deletes else None
        with connect(settings.address) as connection:
            system = inspect_system(connection)
            found = find_tables(connection, tables)
            with hold_moment(connection, [table.name for table in found], settings.turn) as moment:
                polled = inspect_polled(connection, settings, found).checked()
                states = {table.schema.oid: begin_table(connection, table, moment, keys) for table in polled}
            ensure_flushed(connection, moment.position)
        return moment.position, PollingState(str(system), moment.position, states)

    @override
    def open(self, mark: Mark) -> FeedSession:
        return PollingSession(self.settings, mark)


class PollingSession(FeedSession):
    """One connection, from the first look to the last."""

    def __init__(self, settings: PollingSettings, mark: Mark) -> None:
        self._settings = settings
        self._mark = mark
        self._store = settings.resume
        self._keys = KnownKeys(settings.keys)
        self._copies = KnownCopies(settings.keys)
        self._stack = ExitStack()
        state = PollingState.parse(mark.state)
        try:
            self._connection: Connection = self._stack.enter_context(connect(settings.address, "penstock polling"))
            with source_errors(f"asking {settings.address.describe()}"):
                self._system = inspect_system(self._connection)
                self._stack.enter_context(self._store.held(self._connection))
            is_same = _is_same_timeline(SystemIdentity.parse(state.system), self._system)
            self._states = dict(state.tables) if is_same else _read_anew(state.tables)
            self._reached = state.reached if is_same else Position.ZERO
            self._learn_added()
        except BaseException:
            self._stack.close()
            raise
        self._safe = SafeLooks()
        self._columns: dict[tuple[int, str], _ColumnWatch] = {}
        self._told: set[TableName] = set()

    @property
    @override
    def system(self) -> SystemIdentity:
        return self._system

    @property
    @override
    def mark(self) -> Mark:
        return self._mark

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
    def look(self) -> Iterator[LogStep]:
        connection, last = self._connection, self._mark.position
        with source_errors(f"polling {self._settings.address.describe()}"):
            found = self._find()
            self._keys.keep_only({oid: state.keys for oid, state in self._states.items() if state.keys is not None})
            now = inspect_open(connection)
            safe = self._safe.look(now)
            with hold_moment(connection, [table.name for table in found], self._settings.turn) as moment:
                check_not_rewound(self._reached, moment.position)
                position = max(moment.position, Position.of(last.value + 1))
                steps = LookSteps(position, moment.taken_at)
                states = {oid: state for oid, state in self._states.items() if self._is_asked(oid)}
                copies = self._copies.load(last, position)
                for table in self._inspect(found):
                    asked = _Asked(table, self._state_of(table), moment, position, copies.get(table.schema.oid, []))
                    following = self._following(asked, now, safe)
                    states[table.schema.oid] = yield from self._ask(asked, following, steps)
            ensure_flushed(connection, moment.position)
            self._states, self._reached = states, moment.position
            state = PollingState(str(self._system), moment.position, states)
            self._mark = Mark(position if steps.has_end else max(moment.position, last), state.to_text())
            yield from steps.finish()

    def _find(self) -> list[CatalogTable]:
        """One that is gone is not asked any more. Those that others add come in at any time, those of the settings do not."""
        names = self._settings.tables
        if not names:
            self._learn_added()
        return find_tables(self._connection, names, () if names else self._added)

    def _learn_added(self) -> None:
        self._added = self._store.load_tables()
        for oid, text in self._added.items():
            self._states.setdefault(oid, parse_begin(text, str(self._system)))

    def _is_asked(self, oid: int) -> bool:
        """Where one went on that is no longer asked means nothing when it comes back."""
        return bool(self._settings.tables) or oid in self._added

    def _inspect(self, found: list[CatalogTable]) -> list[PolledTable]:
        """Of tables that others added, one that cannot be asked any more does not stop the rest; who added it sees that it has changed."""
        polled = inspect_polled(self._connection, self._settings, found)
        if self._settings.tables:
            return polled.checked()
        for name, error in polled.refused.items():
            if name not in self._told:
                self._told.add(name)
                _log.warning("table cannot be asked any more", extra={"table": str(name), "code": error.code, "reason": error.message})
        return polled.tables

    def _state_of(self, table: PolledTable) -> TableState:
        """One of which nothing is known, or which was asked in another way before, is asked for everything."""
        state = self._states.get(table.schema.oid)
        if state is None:
            return TableState(table.how)
        return state if state.how == table.how else TableState(table.how, keys=state.keys)

    def _following(self, asked: _Asked, now: OpenNow, safe: int) -> Window:
        """Where the next look at the table begins."""
        table, window = asked.table, asked.state.window
        if table.cursor is None:
            return Window(horizon=asked.moment.xmin)
        watch = self._columns.setdefault((table.schema.oid, table.how), _ColumnWatch(window.low, self._safe.looks - 1))
        are_gone = watch.first.look(now)
        low = watch.low(safe)
        watch.learn(self._safe.looks, inspect_highest(self._connection, table))
        return Window(low, None if are_gone or window.is_everything else window.horizon)

    def _ask(self, asked: _Asked, following: Window, steps: LookSteps) -> Generator[LogStep, None, TableState]:
        """What is new in one table; its state after that."""
        table, state = asked.table, asked.state
        if table.schema.oid not in self._states:
            # Dropped and made anew under the same name: the rows that it had went with it.
            yield from steps.truncate(table.schema)
        if self._settings.rules.deletes:
            if state.keys is not None and not self._keys.has(table.schema, state.keys):
                _log.warning("keys are lost or of another kind, table is read anew", extra={"table": str(table.schema.name)})
                yield from steps.truncate(table.schema)
                state = replace(state.anew(), keys=None)
            copies = self._keys.copies(table.schema, state.keys, asked.position)
            yield from self._compare(asked, state.keys, copies, steps)
        seen = yield from self._upserts(replace(asked, state=state), following, steps)
        keys = state.keys if self._settings.rules.deletes else None
        if self._settings.rules.deletes and self._keys.adopt(table.schema.oid, asked.position):
            keys = asked.position
            # The next look removes the keys of before, which the last mark that is kept must not name then.
            steps.is_due = True
        return TableState(table.how, following, seen, keys)

    def _upserts(self, asked: _Asked, following: Window, steps: LookSteps) -> Generator[LogStep, None, pa.StringArray]:
        """Rows that are new; the versions that the next look will find again."""
        table, state = asked.table, asked.state
        # What is read anew may stand behind a truncate, and must not come to lie before it.
        copies = [] if state.window.is_everything else asked.copies
        seen: list[pa.StringArray] = []
        horizons = [copy.horizon for copy in copies]
        for block in read_window(self._connection, table, state.window, following, asked.moment, horizons=horizons):
            if sum(map(len, seen)) < _MOST_SEEN:
                seen.append(block.versions.filter(block.comes_again))
            for place, fresh in _by_place(block.without(state.seen), copies, steps):
                if len(fresh.versions):
                    yield from place.add(table.schema, ChangeType.UPDATE_POSTIMAGE, fresh.texts)
        return pa.concat_arrays(seen) if seen else NONE_SEEN

    def _compare(self, asked: _Asked, before: Position | None, copies: Sequence[Position], steps: LookSteps) -> Iterator[LogStep]:
        """Deletes of the keys that are gone, since the look before or since the table was copied; one truncate if all are."""
        schema = asked.table.schema
        now = read_keys_in_order(self._connection, asked.table)
        first = next(now, None)
        looked = self._keys.compare(schema, before, _again(first, now), keeps_same=bool(copies))
        copied = (self._keys.compare_copy(schema, copy, before) for copy in copies)
        places = {name: 2 + at for at, name in enumerate(schema.key)}
        is_told = False
        for texts in chain(looked, chain.from_iterable(copied)):
            if first is not None:
                nulls = pa.nulls(len(texts[1]), pa.string())
                columns = [texts[places[name]] if name in places else nulls for name in schema.column_names]
                yield from steps.add(schema, ChangeType.DELETE, columns)
            elif not is_told:
                is_told = True
                yield from steps.truncate(schema)


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A table at one look."""

    table: PolledTable
    state: TableState
    moment: Moment
    position: Position
    copies: Sequence[CopiedVersions]
    """Since the look before."""


class _ColumnWatch:
    """The highest values of a table's column at the last looks, and how far it is safe to go."""

    def __init__(self, low: str | None, look: int) -> None:
        self.first = FirstOnes()
        self._highest: dict[int, str | None] = {look: low}

    def low(self, safe: int) -> str | None:
        """What was there at look `safe`, or, if the table is newer than that, where it began."""
        at = max((look for look in self._highest if look <= safe), default=min(self._highest))
        self._highest = {look: value for look, value in self._highest.items() if look >= at}
        return self._highest[at]

    def learn(self, look: int, highest: str | None) -> None:
        self._highest[look] = highest


def _by_place(block: RowBlock, copies: Sequence[CopiedVersions], steps: LookSteps) -> Iterator[tuple[LookSteps, RowBlock]]:
    """Rows that a copy has stand where the first such copy does, all others where the look does."""
    for at, copy in enumerate(copies):
        is_copied = copy.has(block, at)
        yield steps.at(copy.position), block.filter(is_copied)
        block = block.filter(pc.invert(is_copied))
    yield steps, block


def _again(first: list[pa.StringArray] | None, rest: Iterator[list[pa.StringArray]]) -> Iterator[list[pa.StringArray]]:
    if first is not None:
        yield first
        yield from rest


def _is_same_timeline(before: SystemIdentity, now: SystemIdentity) -> bool:
    check_same_system(now, before)
    return now.timeline == before.timeline


def _read_anew(tables: Mapping[int, TableState]) -> dict[int, TableState]:
    """After a promotion or a restore, what was read before may be of transactions that the server has lost."""
    _log.warning("the server is on another timeline, tables are read anew", extra={"tables": len(tables)})
    return {oid: state.anew() for oid, state in tables.items()}
