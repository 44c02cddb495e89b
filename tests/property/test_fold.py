"""Random histories, cut into random epochs: after each, a target of every mode holds what a plain model says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schema import TableSchema
from penstock.sinks.fold import fold
from penstock.sinks.layout import Layout, Mode
from tests.integration.sinks.history import BEYOND, FLOATS, ODD, PLAIN, History
from tests.integration.sinks.source import Transaction
from tests.property.chronicle import Chronicle, PlainTarget, canonical, changes_table

TABLES = (PLAIN, ODD, BEYOND, FLOATS)
KEYED = (Mode.MIRROR,)


@dataclass(frozen=True)
class Sizes:
    """Of a history."""

    seed: int
    transactions: int
    statements: int
    truncates: float


sizes = st.builds(Sizes, st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 25), st.sampled_from([0.0, 0.0, 0.3]))


def layout_of(table: TableSchema, mode: Mode) -> Layout:
    columns = pa.schema([pa.field(column.name, column.arrow_type) for column in table.columns])
    return Layout(columns, table.key, mode)


def chronicle(table: TableSchema, sizes: Sizes) -> Chronicle:
    history = History(table, sizes.seed, groups=2, source=Chronicle)
    history.statements = sizes.statements
    history.run(sizes.transactions, truncates=sizes.truncates)
    assert isinstance(history.source, Chronicle)
    return history.source


def epochs(log: Sequence[Transaction], seed: int) -> list[Sequence[Transaction]]:
    cuts = random.Random(seed).sample(range(len(log)), len(log) // 2)
    return [log[low:high] for low, high in pairwise(sorted({0, *cuts, len(log)}))]


@pytest.mark.parametrize("mode", KEYED)
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name.name[:6])
@settings(max_examples=25, deadline=None)
@given(sizes=sizes)
def test_after_every_epoch_the_target_is_what_the_model_says(table: TableSchema, mode: Mode, sizes: Sizes) -> None:
    source = chronicle(table, sizes)
    layout = layout_of(table, mode)
    target = PlainTarget(layout, source.expected(mode, source.fence))
    for epoch in epochs(source.log, sizes.seed):
        target.lookups = 0
        changes = changes_table(table, epoch)
        target.apply(fold(changes, layout, target.lookup))
        assert canonical(target.rows, layout) == canonical(source.expected(mode, epoch[-1].position), layout)
        assert target.lookups <= 1
        if mode is Mode.MIRROR and changes["_unchanged"].null_count == changes.num_rows:
            assert target.lookups == 0, "all values travelled"
