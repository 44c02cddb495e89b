"""Random histories of tables: rows are inserted, moved to other keys, swapped and inserted again."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pyarrow as pa

from penstock.change import LogStep
from penstock.schema import Column, TableName, TableSchema
from tests.support.sinks.source import NULL, Key, Row, Source, Value, in_pieces, whole

PLAIN = TableSchema(
    16401,
    TableName("public", "plain"),
    (
        Column("id", pa.int64(), 20),
        Column("note", pa.string(), 25),
        Column("amount", pa.decimal128(38, 18), 1700),
        Column("seen", pa.timestamp("us", "UTC"), 1184),
        Column("blob", pa.binary(), 17),
    ),
    ("id",),
)
# Names that could break quoting or paths of nested columns, or equal our own columns; a key of two columns,
# neither of them first.
ODD = TableSchema(
    16402,
    TableName("odd schema", 'it\'s "a" `table` {1}'),
    (
        Column("parent", pa.string(), 25),
        Column("a.b", pa.int32(), 23),
        Column('it\'s "q" \\ `x`', pa.decimal128(10, 2), 1700),
        Column("key, 2", pa.string(), 25),
        Column("t", pa.string(), 25),
        Column("value_0", pa.list_(pa.int32()), 1007),
        Column("child", pa.float64(), 701),
    ),
    ("a.b", "key, 2"),
)
# Keys that the typed columns cannot hold: only their texts differ.
BEYOND = TableSchema(
    16403,
    TableName("public", "beyond"),
    (
        Column("valid_to", pa.date32(), 1082),
        Column("life", pa.string(), 25),
        Column("number", pa.decimal128(38, 18), 1700),
        Column("_match_0", pa.string(), 25),
    ),
    ("valid_to", "number"),
)

# Equal numbers with different texts.
FLOATS = TableSchema(
    16404,
    TableName("public", "floats"),
    (
        Column("long", pa.string(), 25),
        Column("at", pa.float64(), 701),
        Column("size", pa.float32(), 700),
        Column("tags", pa.list_(pa.int32()), 1007),
    ),
    ("at", "size"),
)
_NAN, _SIZES = float("nan"), (0.5, -0.0, float("nan"))

KEYS: dict[TableSchema, Callable[[int], Key]] = {
    PLAIN: lambda at: (Value(at - 50),),
    ODD: lambda at: (Value(at // 7), Value(f"k{at % 7}'`")),
    FLOATS: lambda at: (
        Value((_NAN, -0.0, 0.25, float("inf"))[at // 3 % 4] if at < 12 else float(at // 3)),
        Value(_SIZES[at % 3]),
    ),
    BEYOND: lambda at: (
        (Value(None, "infinity"), Value(None, "-infinity"), Value(date(2024, 1, 1)))[at % 3],
        Value(Decimal(at // 3)) if at // 3 % 3 else Value(None, f"{at // 3}e40" if at >= 3 else "NaN"),
    ),
}
GROUP_KEYS = 5


class History:
    """Writes to a source: groups of a few keys each, so that rows are moved, swapped and inserted again."""

    def __init__(self, table: TableSchema, seed: int, *, groups: int, source: type[Source] = Source) -> None:
        self.random = random.Random(seed)
        self.table = table
        self.statements = 60
        self.moves_leave_values = True
        self.groups = [
            [KEYS[table](group * GROUP_KEYS + at) for at in range(GROUP_KEYS)] for group in range(groups)
        ]
        assert len({key for keys in self.groups for key in keys}) == groups * GROUP_KEYS
        first = [self.row(key) for keys in self.groups for key in keys if self.random.random() < 0.5]
        self.source = source(table, first)

    def run(self, transactions: int, *, truncates: float) -> None:
        for _ in range(transactions):
            for _ in range(self.random.randint(1, self.statements)):
                self.statement(self.random.choice(self.groups))
                if self.random.random() < 0.1:
                    self.source.skip_ordinals(self.random.randint(1, 3))
            if self.random.random() < truncates:
                self.source.truncate()
                for _ in range(20):
                    self.statement(self.random.choice(self.groups))
            self.source.commit(self.random.randint(1, 1000))

    def statement(self, keys: list[Key]) -> None:
        taken = [key for key in keys if key in self.source.rows]
        free = [key for key in keys if key not in self.source.rows]
        choice = self.random.random()
        if not taken or (free and choice < 0.2):
            self.source.insert(self.row(self.random.choice(free)))
        elif choice < 0.4:
            self.source.delete(self.random.choice(taken))
        elif free and choice < 0.7:
            self.change(self.random.choice(taken), self.random.choice(free))
        else:
            self.change(self.random.choice(taken), None)

    def change(self, key: Key, new_key: Key | None) -> None:
        """An update: each column that is not null, and that Postgres may store out of line, may be unchanged
        TOAST.
        """
        row = self.source.rows[key]
        stays = self.random.choice([0.0, 0.5, 1.0]) if new_key is None or self.moves_leave_values else 0.0
        unchanged = [
            column.name
            for column in self.table.columns
            if column.name not in self.table.key
            and row[column.name] != NULL
            and self.may_stay(column)
            and self.random.random() < stays
        ]
        values = {name: value for name, value in self.row(new_key or key).items() if name not in unchanged}
        self.source.update(key, values, unchanged)

    @staticmethod
    def may_stay(column: Column) -> bool:
        return not (pa.types.is_floating(column.arrow_type) or pa.types.is_timestamp(column.arrow_type))

    def row(self, key: Key) -> Row:
        given = dict(zip(self.table.key, key, strict=True))
        return {
            column.name: given.get(column.name) or self.value(column.arrow_type)
            for column in self.table.columns
        }

    def value(self, arrow_type: pa.DataType) -> Value:
        number = self.random.randint(0, 10**6)
        if self.random.random() < 0.15:
            return NULL
        if pa.types.is_decimal(arrow_type):
            return Value(None, f"{number}e50") if number % 3 == 0 else Value(Decimal(number).scaleb(-2))
        if pa.types.is_timestamp(arrow_type):
            return (
                Value(None, "infinity")
                if number % 3 == 0
                else Value(datetime(2024, 1, 1, tzinfo=UTC) + timedelta(seconds=number))
            )
        plain: dict[pa.DataType, object] = {
            pa.string(): f"text {number}",
            pa.binary(): number.to_bytes(4, "big"),
            pa.float64(): number / 7,
            pa.float32(): number / 4,
            pa.list_(pa.int32()): [number, None],
        }
        return Value(plain[arrow_type])

    def steps(self) -> list[list[LogStep]]:
        """The log for the spool: segments of one or more transactions; some transactions are streamed in
        pieces.
        """
        segments: list[list[LogStep]] = []
        log = list(self.source.log)
        while log:
            count = self.random.randint(1, 4)
            taken, log = log[:count], log[count:]
            if count == 1 and self.random.random() < 0.7:
                size = len(taken[0].changes)
                segments.append(
                    in_pieces(
                        self.table, taken[0], sorted(self.random.sample(range(1, size), min(2, size - 1)))
                    )
                )
            else:
                segments.append([whole(self.table, taken)])
        return segments
