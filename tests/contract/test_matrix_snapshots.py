"""Interrupted snapshots and interrupted resyncs in every sink."""

from __future__ import annotations

from itertools import count

import pytest

from penstock import storage
from penstock.position import Position
from penstock.sinks.delta import sink as delta
from penstock.sinks.delta import swap
from penstock.sinks.iceberg import sink as iceberg
from penstock.sinks.iceberg import swap as iceberg_swap
from penstock.sinks.iceberg.catalog import IcebergCatalog
from penstock.sinks.modes import Mode
from tests.support.contract.crash_table import Busy, CrashTable
from tests.support.contract.dying import dying
from tests.support.contract.sink_setups import SPARK, Seam, cells, parameters
from tests.support.property.source_model import canonical, record_of
from tests.support.sinks.source import Row

_FILLING: dict[str, tuple[Seam, ...]] = {
    "delta": ((delta, "adopt_files"), (delta, "remove_attempts")),
    "iceberg": (
        (IcebergCatalog, "load"),
        (IcebergCatalog, "commit"),
        (iceberg.IcebergSink, "_remove_leftovers"),
    ),
}
_REPLACING: dict[str, tuple[Seam, ...]] = {
    "delta": ((storage, "link"), (swap, "commit"), (delta.DeltaSink, "_check_reached")),
    "iceberg": ((IcebergCatalog, "load"), (iceberg_swap, "link_files"), (IcebergCatalog, "swap")),
}
"""The steps between which a process can die, by kind of sink."""


@pytest.mark.parametrize("cell", parameters(cells(Mode.MIRROR, Mode.HISTORY)))
def test_N03_a_process_that_dies_between_any_two_steps_leaves_a_copy_whole_or_still_to_be_finished(
    crash_table: CrashTable, cell: tuple[str, Mode]
) -> None:
    table, fence = crash_table.table, Position.of(crash_table.source.fence)
    for last in count(1):
        crash_table.sink.drop(table.name)
        place = crash_table.setup.begin(crash_table.sink, table, crash_table.mode, fence)
        files = crash_table.write(table, place, crash_table.source.states[fence.value])
        with dying(_FILLING.get(cell[0], crash_table.setup.seams), last) as counter:
            crash_table.sink.finish_snapshot(table, files, fence)
        crash_table.go_on_elsewhere()
        assert crash_table.target().applied in ((None, fence) if counter.is_over else (fence,))
        if crash_table.target().applied is None:
            assert crash_table.sink.can_resume_snapshot(table, place, files)
            crash_table.sink.finish_snapshot(table, files, fence)
        crash_table.assert_exact()
        if not counter.is_over:
            assert last > 2, "it takes more steps than that"
            break
    crash_table.follow(crash_table.work())
    crash_table.assert_exact()


# At distance 0 the target is already at the shadow's position.
_SWAPS = [*((name, 5) for name in ("delta", "iceberg", "postgres")), ("delta", 0)]


@pytest.mark.parametrize(
    ("cell", "distance"),
    [
        pytest.param((name, Mode.MIRROR), by, id=f"{name}-{by}", marks=SPARK.get(name, []))
        for name, by in _SWAPS
    ],
)
def test_K01_a_process_that_dies_between_any_two_steps_leaves_a_table_replaced_or_as_it_was(
    crash_table: CrashTable, cell: tuple[str, Mode], distance: int
) -> None:
    name, busy = crash_table.table.name, crash_table.busy
    assert isinstance(busy, Busy)
    held = busy.sorted_rows()
    for last in count(1):
        before, name_of_copy = crash_table.target(), f"copy{last % 2}"
        rows = [busy.row(number, last % 2) for number in range(3 + last % 2)]
        copy = _copy_aside(crash_table, name_of_copy, rows)
        assert before.applied is not None
        position = Position.of(before.applied.value + distance)
        with dying(_REPLACING.get(cell[0], crash_table.setup.seams), last) as counter:
            crash_table.sink.replace(name, crash_table.sink.shadow(name_of_copy), position)
        crash_table.go_on_elsewhere()
        is_replaced = (crash_table.target().applied, crash_table.target().copy) == (position, copy)
        assert is_replaced or counter.is_over
        if not is_replaced:
            _assert_holds(crash_table, held)
            crash_table.sink.replace(name, crash_table.sink.shadow(name_of_copy), position)
        held = rows
        assert (crash_table.target().applied, crash_table.target().copy) == (position, copy)
        _assert_holds(crash_table, held)
        if not counter.is_over:
            assert last > 2, "it takes more steps than that"
            return


def _copy_aside(crash_table: CrashTable, name: str, rows: list[Row]) -> str:
    """Copy these rows, at the fence, into the shadow of that name, unless it has them already. Returns the
    identity of the copy.
    """
    main, fence = crash_table.sink, Position.of(crash_table.source.fence)
    shadow = main.shadow(name)
    if shadow.load_target(crash_table.table.name) is None:
        crash_table.sink = shadow
        place = shadow.begin_snapshot(crash_table.table, fence)
        shadow.finish_snapshot(crash_table.table, crash_table.write(crash_table.table, place, rows), fence)
        crash_table.sink = main
    made = shadow.load_target(crash_table.table.name)
    assert made is not None
    assert made.copy is not None
    return made.copy


def _assert_holds(crash_table: CrashTable, rows: list[Row]) -> None:
    assert canonical(crash_table.shown(), crash_table.layout) == canonical(
        [record_of(row) for row in rows], crash_table.layout
    )
