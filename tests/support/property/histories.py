"""Random histories of one table, and the epochs they are cut into."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
from hypothesis import strategies as st

from penstock.schema import Column, TableName, TableSchema
from penstock.sinks.modes import Layout, Mode
from tests.support.property.source_model import Heap, SourceModel
from tests.support.sinks.history import BEYOND, FLOATS, ODD, PLAIN, History
from tests.support.sinks.source import NULL, Row, Transaction, Value

TABLES = (PLAIN, ODD, BEYOND, FLOATS)


KEYED = (Mode.MIRROR, Mode.SOFT_DELETE, Mode.HISTORY)


@dataclass(frozen=True)
class Sizes:
    """Of a history."""

    seed: int
    transactions: int
    statements: int
    truncates: float


sizes = st.builds(
    Sizes, st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 25), st.sampled_from([0.0, 0.0, 0.3])
)


def layout_of(table: TableSchema, mode: Mode) -> Layout:
    columns = pa.schema([pa.field(column.name, column.arrow_type) for column in table.columns])
    return Layout(columns, table.key, mode)


def source_model(table: TableSchema, sizes: Sizes, *, moves_leave_values: bool = True) -> SourceModel:
    history = History(table, sizes.seed, groups=2, source=SourceModel)
    history.moves_leave_values = moves_leave_values
    history.statements = sizes.statements
    history.run(sizes.transactions, truncates=sizes.truncates)
    assert isinstance(history.source, SourceModel)
    return history.source


def epochs(log: Sequence[Transaction], seed: int) -> list[Sequence[Transaction]]:
    cuts = random.Random(seed).sample(range(len(log)), len(log) // 2)
    return [log[low:high] for low, high in pairwise(sorted({0, *cuts, len(log)}))]


HEAP = TableSchema(
    16405,
    TableName("public", "heap"),
    (
        Column("a", pa.float64(), 701),
        Column("b", pa.decimal128(10, 2), 1700),
        Column("c", pa.list_(pa.int32()), 1007),
        Column("d", pa.string(), 25),
    ),
    (),
)


CHOICES: dict[str, list[Value]] = {
    "a": [Value(float("nan")), Value(0.5), NULL],
    "b": [Value(None, "NaN"), Value(None, "1e40"), NULL],
    "c": [Value([1, None]), Value([]), NULL],
    "d": [Value("x"), Value(""), NULL],
}


def heap_of(seed: int, transactions: int, statements: int, truncates: float) -> Heap:
    """Few values, so that most rows have duplicates."""
    draw = random.Random(seed)
    choices = {name: values[: draw.randint(1, 3)] for name, values in CHOICES.items()}

    def row() -> Row:
        return {name: draw.choice(values) for name, values in choices.items()}

    heap = Heap(HEAP, [row() for _ in range(draw.randint(0, 12))])
    for _ in range(transactions):
        for _ in range(draw.randint(1, statements)):
            kind = draw.random()
            if not heap.rows or kind < 0.3:
                heap.insert(row())
            elif kind < 0.7:
                heap.delete(draw.randrange(len(heap.rows)))
            else:
                heap.update(draw.randrange(len(heap.rows)), row())
            if draw.random() < truncates / 10:
                heap.truncate()
        heap.commit()
    return heap
