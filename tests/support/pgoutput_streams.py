"""Random valid streams of a publication: several tables whose rows and columns change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import pairwise
from random import Random

from tests.support import pgoutput_builder as build
from tests.support.pgoutput_builder import Absent, Table, TableColumn, Value


def _text(random: Random) -> bytes:
    return "".join(random.choice("aZ0 '\\\n{}é漢🙂") for _ in range(random.choice([0, 1, 3, 40]))).encode()


def _bytea(random: Random) -> bytes:
    return b"\\x" + random.randbytes(random.choice([0, 1, 5])).hex().encode()


def _numeric(random: Random) -> bytes:
    return random.choice(
        [b"NaN", b"0", b"-1.50", b"1.%040d" % 0, b"9" * 25, b"0.%d" % random.randrange(10**9)]
    )


def _moment(random: Random) -> bytes:
    return random.choice(
        [b"infinity", b"0044-03-15 10:00:00+00 BC", b"2024-02-29 23:59:59.%06d+00" % random.randrange(10**6)]
    )


_VALUES: dict[int, Callable[[Random], bytes]] = {
    25: _text,
    3802: _text,
    17: _bytea,
    1700: _numeric,
    1184: _moment,
    20: lambda random: str(random.randrange(-(2**63), 2**63)).encode(),
    23: lambda random: str(random.randrange(-9, 9)).encode(),
    16: lambda random: random.choice([b"t", b"f"]),
    701: lambda random: random.choice([b"1.5", b"Infinity", b"-0", b"1e-300"]),
}


PREFIXES = ("penstock", "outbox", "")


@dataclass
class _Open:
    """A transaction that is sent while it is open.

    `levels` are its open subtransactions, the innermost last.
    """

    xid: int
    levels: list[_Level]
    used: set[int] = field(default_factory=set)
    """The tables that it holds a lock on."""
    sent: set[int] = field(default_factory=set)
    """The tables that have been described to it."""
    altered: dict[int, Table] = field(default_factory=dict)


@dataclass
class _Level:
    """A subtransaction: its own xid, those of subtransactions that ended in it, and the tables altered before
    it began.
    """

    xid: int
    ended: list[int]
    altered_before: dict[int, Table]


@dataclass
class StreamWriter:
    """Writes transactions; `random` decides everything that the sizes leave open."""

    random: Random
    tables: list[Table]
    keys: dict[int, tuple[str, ...]]
    """The keys in the catalog at the start; every third table is missing from it."""
    messages: list[bytes] = field(default_factory=list)
    position: int = 1000
    sent: set[int] = field(default_factory=set)
    open: dict[int, _Open] = field(default_factory=dict)
    ended: int = 0
    """How many transactions have committed."""
    _in: _Open | None = None

    @classmethod
    def start(cls, seed: int, table_count: int) -> StreamWriter:
        random = Random(seed)
        tables = [_table(random, 16384 + at) for at in range(table_count)]
        keys = {
            table.oid: tuple(column.name for column in table.columns if column.is_key)
            for table in tables
            if table.oid % 3
        }
        return cls(random, tables, keys)

    def transaction(self, change_count: int) -> None:
        """A whole transaction, sent at its commit."""
        self._idle()
        self.messages.append(build.begin(self._xid()))
        self._origin()
        for _ in range(change_count):
            self._change()
        self.messages.append(build.commit(self._next_position(), self._time()))
        self.ended += 1

    def block(self, change_count: int) -> None:
        """The next block of an open transaction, or the first of a new one; afterwards, it may roll back a
        part, or end.
        """
        self._idle()
        known = bool(self.open) and self.random.random() < 0.7
        stream = self.random.choice(list(self.open.values())) if known else self._begin()
        self.messages.append(build.stream_start(stream.xid, is_first=not known))
        if not known:
            self._origin()
        self._in = stream
        for _ in range(change_count):
            self._savepoint(stream)
            self._change()
        self._in = None
        self.messages.append(build.stream_stop())
        match self.random.randrange(5):
            case 0:
                self._commit(stream)
            case 1 if len(stream.levels) > 1:
                self._roll_back(stream)
            case 2 if self.random.random() < 0.4:
                self._abort(stream)
            case 3 if self.random.random() < 0.2:
                # Parts of a transaction that was dropped before any of it was sent.
                self.messages.append(build.stream_abort(self._xid(), self._xid()))

    def finish(self) -> None:
        """End every transaction that is open."""
        for stream in self.random.sample(list(self.open.values()), len(self.open)):
            self._idle()
            self._abort(stream) if self.random.random() < 0.2 else self._commit(stream)

    def _begin(self) -> _Open:
        xid = self._xid()
        self.open[xid] = _Open(xid, [_Level(xid, [], {})])
        return self.open[xid]

    def _savepoint(self, stream: _Open) -> None:
        match self.random.randrange(8):
            case 0:
                stream.levels.append(_Level(self._xid(), [], dict(stream.altered)))
            case 1 if len(stream.levels) > 1:
                released = stream.levels.pop()
                stream.levels[-1].ended += [*released.ended, released.xid]

    def _roll_back(self, stream: _Open) -> None:
        level = stream.levels.pop()
        for subxid in (*level.ended, level.xid):
            self.messages.append(build.stream_abort(stream.xid, subxid))
        stream.altered = level.altered_before
        stream.sent = set()

    def _abort(self, stream: _Open) -> None:
        for subxid in [each for level in stream.levels[1:] for each in (*level.ended, level.xid)]:
            self.messages.append(build.stream_abort(stream.xid, subxid))
        self.messages.append(build.stream_abort(stream.xid, stream.xid))
        del self.open[stream.xid]

    def _commit(self, stream: _Open) -> None:
        self.messages.append(build.stream_commit(stream.xid, self._next_position(), self._time()))
        del self.open[stream.xid]
        self.ended += 1
        self.tables = [stream.altered.get(table.oid, table) for table in self.tables]
        # Tables that it altered and did not describe must be described to other transactions; those it
        # described need not.
        self.sent -= stream.altered.keys()
        self.sent |= stream.sent

    def _next_position(self) -> int:
        self.position += self.random.randrange(1, 1000)
        return self.position

    def _time(self) -> datetime:
        return build.POSTGRES_EPOCH + timedelta(microseconds=self.random.randrange(10**15))

    def _xid(self) -> int:
        taken = {level.xid for stream in self.open.values() for level in stream.levels}
        taken |= {xid for stream in self.open.values() for level in stream.levels for xid in level.ended}
        return next(xid for xid in iter(lambda: self.random.randrange(1, 2**32), 0) if xid not in taken)

    def _emit(self, message: bytes) -> None:
        self.messages.append(
            message if self._in is None else build.streamed(message, self._in.levels[-1].xid)
        )

    def _idle(self) -> None:
        if self.random.random() < 0.3:
            self.messages.append(build.keepalive(self.position + self.random.randrange(-5, 5)))
        if self.random.random() < 0.1:
            self.messages.append(self._message(transactional=False))

    def _origin(self) -> None:
        if self.random.random() < 0.2:
            self.messages.append(build.origin("origin"))

    def _message(self, *, transactional: bool) -> bytes:
        return build.message(
            self.random.choice(PREFIXES), _text(self.random), self.position, transactional=transactional
        )

    def _change(self) -> None:
        free = [table for table in self._visible() if self._may_use(table)]
        if not free:
            return
        table = self.random.choice(free)
        if self.random.random() < 0.05 and self._may_alter(table):
            table = self._alter(table)
        self._describe(table, again=self.random.random() < 0.05)
        kind = self.random.choices(
            ["insert", "update", "delete", "truncate", "message", "keepalive"], [16, 16, 8, 2, 1, 2]
        )[0]
        match kind:
            case "insert":
                self._emit(build.insert(table.oid, self._values(table)))
            case "update":
                self._update(table)
            case "delete":
                old, marker = self._old(table)
                self._emit(build.delete(table.oid, old, marker))
            case "truncate":
                chosen = self.random.sample(free, self.random.randrange(1, len(free) + 1))
                described = [self._described(other) for other in chosen]
                self._emit(build.truncate(*(other.oid for other in described)))
            case "message":
                message = self._message(transactional=True)
                # The server names the whole transaction here, whichever savepoint the message was sent after.
                self.messages.append(message if self._in is None else build.streamed(message, self._in.xid))
            case _:
                self.messages.append(build.keepalive(self.position))

    def _described(self, table: Table) -> Table:
        current = next(other for other in self._visible() if other.oid == table.oid)
        self._describe(current)
        return current

    def _visible(self) -> list[Table]:
        altered = {} if self._in is None else self._in.altered
        return [altered.get(table.oid, table) for table in self.tables]

    def _others(self) -> list[_Open]:
        return [stream for stream in self.open.values() if stream is not self._in]

    def _may_use(self, table: Table) -> bool:
        """ALTER TABLE locks out other sessions until its transaction ends."""
        return not any(table.oid in stream.altered for stream in self._others())

    def _may_alter(self, table: Table) -> bool:
        return not any(table.oid in stream.used for stream in self._others())

    def _alter(self, table: Table) -> Table:
        altered = _altered(self.random, table)
        if self._in is None:
            self.tables = [altered if other.oid == table.oid else other for other in self.tables]
            self.sent.discard(table.oid)
        else:
            self._in.altered[table.oid] = altered
            self._in.sent.discard(table.oid)
        return altered

    def _update(self, table: Table) -> None:
        if self.random.random() < 0.4:
            self._emit(build.update(table.oid, self._values(table, toast=True)))
            return
        old, marker = self._old(table)
        fresh = self._values(table, toast=True)
        keep = self.random.random()
        new = [
            before if before is not None and self.random.random() < keep else value
            for before, value in zip(old, fresh, strict=True)
        ]
        self._emit(build.update(table.oid, new, old, marker))

    def _old(self, table: Table) -> tuple[list[Value], bytes]:
        if table.identity == "f":
            return self._values(table, toast=self.random.random() < 0.2), b"O"
        values = self._values(table)
        return [
            value if column.is_key else None for column, value in zip(table.columns, values, strict=True)
        ], b"K"

    def _values(self, table: Table, *, toast: bool = False) -> list[Value]:
        return [self._value(column, toast) for column in table.columns]

    def _value(self, column: TableColumn, toast: bool) -> Value:
        chance = self.random.random()
        if toast and chance < 0.15:
            return Absent.UNCHANGED
        if chance > 0.85:
            return None
        return _VALUES[column.type_oid](self.random)

    def _describe(self, table: Table, *, again: bool = False) -> None:
        sent = self.sent if self._in is None else self._in.sent
        if self._in is not None:
            self._in.used.add(table.oid)
        if again or table.oid not in sent:
            sent.add(table.oid)
            if self.random.random() < 0.2:
                self._emit(build.type_name(20_000 + self.random.randrange(9), "mood"))
            self._emit(build.relation(table))


def _column(random: Random, at: int) -> TableColumn:
    return TableColumn(f"c{at}", random.choice(list(_VALUES)), is_key=random.random() < 0.3)


def _table(random: Random, oid: int) -> Table:
    columns = tuple(_column(random, at) for at in range(random.randrange(0, 7)))
    return Table(oid, f"t {oid}", columns, random.choice("ddfin"))


def _altered(random: Random, table: Table) -> Table:
    match random.randrange(4):
        case 0:
            return replace(
                table,
                columns=(
                    *table.columns,
                    TableColumn(f"a{random.randrange(10**6)}", random.choice(list(_VALUES))),
                ),
            )
        case 1:
            return replace(table, columns=table.columns[:-1])
        case 2:
            return replace(table, identity=random.choice("dfin"))
        case _:
            return replace(table, name=f"t {random.randrange(10**6)}")


def split(random: Random, messages: list[bytes], call_count: int) -> list[list[bytes]]:
    """Cut the messages into calls at random places; a call may be empty."""
    cuts = sorted(random.randrange(len(messages) + 1) for _ in range(call_count - 1))
    bounds = [0, *cuts, len(messages)]
    return [messages[low:high] for low, high in pairwise(bounds)]
