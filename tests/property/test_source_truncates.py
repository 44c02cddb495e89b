"""Random histories of several tables routed into one target, with truncates: it holds each table's rows after
every epoch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given, settings

from penstock.change import CHANGE_TYPE, ORDINAL, ChangeType
from penstock.schema import Column, TableSchema
from penstock.sinks.fold import expand_source_truncates, fold
from penstock.sinks.modes import Layout, Mode
from tests.support.property.histories import HEAP, KEYED, TABLES, Sizes, heap_of, sizes, source_model
from tests.support.property.source_model import PlainTarget, Record, SourceModel, canonical, changes_table
from tests.support.sinks.history import PLAIN
from tests.support.sinks.source import Transaction

SOURCE = "_source"
_LATER = 10_000
"""One transaction writes to several tables, one after the other."""


def routed(table: TableSchema) -> TableSchema:
    key = (*table.key, SOURCE) if table.key else ()
    return replace(table, columns=(*table.columns, Column(SOURCE, pa.string(), 25)), key=key)


def layout_of(table: TableSchema, mode: Mode) -> Layout:
    whole = routed(table)
    return Layout(
        pa.schema([pa.field(column.name, column.arrow_type) for column in whole.columns]), whole.key, mode
    )


def changes_of(
    table: TableSchema, logs: Mapping[str, Sequence[Transaction]], low: int, high: int, layout: Layout
) -> pa.Table:
    """The changes of all members in `(low, high]`, one member after the other, as their files are read."""
    tables = []
    for at, (name, log) in enumerate(logs.items()):
        found = changes_table(table, [each for each in log if low < each.position <= high])
        ordinals = pa.array(
            [ordinal + at * _LATER for ordinal in found.column(ORDINAL).to_pylist()], pa.int64()
        )
        found = found.set_column(found.column_names.index(ORDINAL), ORDINAL, ordinals)
        named = pa.array([name] * found.num_rows, pa.string())
        tables.append(
            found.append_column(SOURCE, named).select(
                [*layout.columns.names, *found.column_names[len(table.columns) :]]
            )
        )
    return pa.concat_tables(reversed(tables))


def at_or_before(positions: Sequence[int], position: int) -> int:
    return max(each for each in positions if each <= position)


def ends_of(logs: Mapping[str, Sequence[Transaction]], seed: int) -> list[int]:
    positions = sorted({each.position for log in logs.values() for each in log})
    some = random.Random(seed).sample(positions, (len(positions) + 1) // 2)
    return sorted({*some, *positions[-1:]})


def assert_follows(
    table: TableSchema,
    layout: Layout,
    logs: Mapping[str, Sequence[Transaction]],
    expected: Callable[[str, int], list[Record]],
    seed: int,
) -> None:
    fence = 100
    target = PlainTarget(layout, [{**row, SOURCE: name} for name in logs for row in expected(name, fence)])
    for low, high in pairwise([fence, *ends_of(logs, seed)]):
        changes = expand_source_truncates(
            changes_of(table, logs, low, high, layout), layout, SOURCE, target.lookup
        )
        assert ChangeType.TRUNCATE.value not in changes.column(CHANGE_TYPE).to_pylist()
        target.apply(fold(changes, layout, target.lookup))
        wanted = [{**row, SOURCE: name} for name in logs for row in expected(name, high)]
        assert canonical(target.rows, layout) == canonical(wanted, layout)


@pytest.mark.parametrize("mode", KEYED)
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name.name[:6])
@settings(max_examples=12, deadline=None)
@given(sizes=sizes)
def test_K11_after_every_epoch_each_member_has_its_rows_whatever_happened_to_the_others(
    table: TableSchema, mode: Mode, sizes: Sizes
) -> None:
    members = {
        f"s{at}": source_model(table, replace(sizes, seed=sizes.seed + at, truncates=0.4 * (at != 1)))
        for at in range(3)
    }

    def expected(name: str, position: int) -> list[Record]:
        member = members[name]
        return member.expected(mode, at_or_before(list(member.states), position))

    assert_follows(
        table,
        layout_of(table, mode),
        {name: member.log for name, member in members.items()},
        expected,
        sizes.seed,
    )


@settings(max_examples=40, deadline=None)
@given(sizes=sizes)
def test_K11_members_without_a_key_have_as_many_equal_rows_as_each_source_had(sizes: Sizes) -> None:
    members = {
        f"s{at}": heap_of(sizes.seed + at, sizes.transactions, sizes.statements, 0.6) for at in range(2)
    }

    def expected(name: str, position: int) -> list[Record]:
        return members[name].expected(at_or_before(list(members[name].states), position))

    assert_follows(
        HEAP,
        layout_of(HEAP, Mode.MIRROR),
        {name: member.log for name, member in members.items()},
        expected,
        sizes.seed,
    )


def test_a_log_keeps_the_truncates_of_each_table() -> None:
    member = SourceModel(PLAIN)
    member.truncate()
    member.commit()
    layout = layout_of(PLAIN, Mode.APPEND)
    changes = changes_of(PLAIN, {"a": member.log}, 100, member.position, layout)
    kept = expand_source_truncates(changes, layout, SOURCE, PlainTarget(layout, []).lookup)
    assert [(row[CHANGE_TYPE], row[SOURCE]) for row in kept.to_pylist()] == [("truncate", "a")]


def test_a_table_without_routing_is_truncated_as_usual() -> None:
    member = SourceModel(PLAIN)
    member.truncate()
    member.commit()
    changes = changes_table(PLAIN, member.log)
    layout = Layout(
        pa.schema([pa.field(column.name, column.arrow_type) for column in PLAIN.columns]),
        PLAIN.key,
        Mode.MIRROR,
    )
    assert expand_source_truncates(changes, layout, None, PlainTarget(layout, []).lookup) is changes
