"""Random but lawful streams of a publication: several tables that change their rows and their shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from random import Random

from tests import pgoutput_builder as build
from tests.pgoutput_builder import Absent, Table, TableColumn, Value


def _text(random: Random) -> bytes:
    return "".join(random.choice("aZ0 '\\\n{}é漢🙂") for _ in range(random.choice([0, 1, 3, 40]))).encode()


def _bytea(random: Random) -> bytes:
    return b"\\x" + random.randbytes(random.choice([0, 1, 5])).hex().encode()


def _numeric(random: Random) -> bytes:
    return random.choice([b"NaN", b"0", b"-1.50", b"1.%040d" % 0, b"9" * 25, b"0.%d" % random.randrange(10**9)])


def _moment(random: Random) -> bytes:
    return random.choice([b"infinity", b"0044-03-15 10:00:00+00 BC", b"2024-02-29 23:59:59.%06d+00" % random.randrange(10**6)])


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


@dataclass
class StreamWriter:
    """Writes transactions; `random` decides everything that the sizes leave open."""

    random: Random
    tables: list[Table]
    keys: dict[int, tuple[str, ...]]
    """What the catalog said at the start; a table in three is not in it."""
    messages: list[bytes] = field(default_factory=list)
    position: int = 1000
    sent: set[int] = field(default_factory=set)

    @classmethod
    def start(cls, seed: int, table_count: int) -> StreamWriter:
        random = Random(seed)
        tables = [_table(random, 16384 + at) for at in range(table_count)]
        keys = {table.oid: tuple(column.name for column in table.columns if column.is_key) for table in tables if table.oid % 3}
        return cls(random, tables, keys)

    def transaction(self, change_count: int) -> None:
        self._idle()
        self.messages.append(build.begin(self.random.randrange(2**32)))
        if self.random.random() < 0.2:
            self.messages.append(build.other(b"O", b"\0" * 8 + b"origin\0"))
        for _ in range(change_count):
            self._change()
        self.position += self.random.randrange(1, 1000)
        self.messages.append(build.commit(self.position, build.POSTGRES_EPOCH + timedelta(microseconds=self.random.randrange(10**15))))

    def _idle(self) -> None:
        if self.random.random() < 0.3:
            self.messages.append(build.keepalive(self.position + self.random.randrange(-5, 5)))
        if self.random.random() < 0.1:
            self.messages.append(build.other(b"M", b"\0" * 20))

    def _change(self) -> None:
        at = self.random.randrange(len(self.tables))
        if self.random.random() < 0.05:
            self.tables[at] = _altered(self.random, self.tables[at])
            self._describe(self.tables[at], again=True)
        table = self.tables[at]
        self._describe(table, again=self.random.random() < 0.05)
        kind = self.random.choices(["insert", "update", "delete", "truncate", "keepalive"], [8, 8, 4, 1, 1])[0]
        match kind:
            case "insert":
                self.messages.append(build.insert(table.oid, self._values(table)))
            case "update":
                self._update(table)
            case "delete":
                old, marker = self._old(table)
                self.messages.append(build.delete(table.oid, old, marker))
            case "truncate":
                chosen = self.random.sample(self.tables, self.random.randrange(1, len(self.tables) + 1))
                for other in chosen:
                    self._describe(other)
                self.messages.append(build.truncate(*(other.oid for other in chosen)))
            case _:
                self.messages.append(build.keepalive(self.position))

    def _update(self, table: Table) -> None:
        if self.random.random() < 0.4:
            self.messages.append(build.update(table.oid, self._values(table, toast=True)))
            return
        old, marker = self._old(table)
        fresh = self._values(table, toast=True)
        keep = self.random.random()
        new = [before if before is not None and self.random.random() < keep else value for before, value in zip(old, fresh, strict=True)]
        self.messages.append(build.update(table.oid, new, old, marker))

    def _old(self, table: Table) -> tuple[list[Value], bytes]:
        if table.identity == "f":
            return self._values(table, toast=self.random.random() < 0.2), b"O"
        values = self._values(table)
        return [value if column.is_key else None for column, value in zip(table.columns, values, strict=True)], b"K"

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
        if again or table.oid not in self.sent:
            self.sent.add(table.oid)
            self.messages.append(build.relation(table))


def _column(random: Random, at: int) -> TableColumn:
    return TableColumn(f"c{at}", random.choice(list(_VALUES)), is_key=random.random() < 0.3)


def _table(random: Random, oid: int) -> Table:
    columns = tuple(_column(random, at) for at in range(random.randrange(0, 7)))
    return Table(oid, f"t {oid}", columns, random.choice("ddfin"))


def _altered(random: Random, table: Table) -> Table:
    match random.randrange(4):
        case 0:
            return replace(table, columns=(*table.columns, TableColumn(f"a{random.randrange(10**6)}", random.choice(list(_VALUES)))))
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
