"""Random histories of several tables routed into one Delta table: after every epoch it holds the rows of
each.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings

from penstock.schema import TableSchema
from penstock.sinks.modes import Mode
from tests.support.delta_tables import epoch
from tests.support.property.delta_lake import MODES, lake
from tests.support.property.histories import HEAP, Sizes, heap_of, sizes, source_model
from tests.support.property.routed import FENCE, Shards
from tests.support.property.source_model import canonical
from tests.support.sinks.history import ODD, PLAIN


def _assert_follows(shards: Shards, mode: Mode, seed: int, *, mapped: bool) -> None:
    layout = shards.layout(mode)
    some = random.Random(seed).sample(shards.positions, (len(shards.positions) + 1) // 2)
    with lake(layout, FENCE, shards.expected(FENCE), mapped=mapped) as target:
        for low, high in pairwise([FENCE, *sorted({*some, shards.positions[-1]})]):
            target.writer.append(shards.step(low, high))
            target.writer.seal()
            changes = shards.changes(shards.target(layout), target.reader, low, high)
            if changes is not None:
                step = replace(epoch(target.path, layout, changes.slices, high), views=changes.views)
                assert step.apply(target.executors)
            assert target.canonical() == canonical(shards.expected(high), layout)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("table", [PLAIN, ODD], ids=lambda table: table.name.name[:6])
@settings(max_examples=3, deadline=None)
@given(sizes=sizes)
def test_K11_after_every_epoch_the_delta_table_has_the_rows_of_each_member(
    table: TableSchema, mode: Mode, sizes: Sizes
) -> None:
    members = [
        source_model(table, replace(sizes, seed=sizes.seed + at, truncates=0.5 * (at != 1)))
        for at in range(3)
    ]
    shards = Shards(
        table, [member.log for member in members], lambda at, position: members[at].expected(mode, position)
    )
    _assert_follows(shards, mode, sizes.seed, mapped=table is ODD)


@settings(max_examples=5, deadline=None)
@given(sizes=sizes)
def test_K11_the_delta_table_has_as_many_equal_rows_without_a_key(sizes: Sizes) -> None:
    members = [heap_of(sizes.seed + at, sizes.transactions, sizes.statements, 0.6) for at in range(2)]
    shards = Shards(
        HEAP, [member.log for member in members], lambda at, position: members[at].expected(position)
    )
    _assert_follows(shards, Mode.MIRROR, sizes.seed, mapped=False)
