"""Every sink, and copies of tables that end in the middle: of the first, and of one that is to take a table's place."""

from __future__ import annotations

from itertools import count

import pytest

from penstock.position import Position
from penstock.sinks.delta import sink as delta
from penstock.sinks.delta import swap
from penstock.sinks.iceberg import sink as iceberg
from penstock.sinks.iceberg.catalog import IcebergCatalog
from penstock.sinks.layout import Mode
from tests.contract.dying import dying
from tests.contract.places import SPARK, Seam, cells, parameters
from tests.contract.workshop import Busy, Workshop
from tests.integration.sinks.source import Row
from tests.property.chronicle import canonical, record_of

_FILLING: dict[str, tuple[Seam, ...]] = {
    "delta": ((delta, "adopt_files"), (delta, "remove_attempts")),
    "iceberg": ((IcebergCatalog, "load"), (IcebergCatalog, "commit"), (iceberg.IcebergSink, "_remove_leftovers")),
}
_REPLACING: dict[str, tuple[Seam, ...]] = {
    "delta": ((swap, "link"), (swap, "commit"), (delta.DeltaSink, "_check_reached")),
    "iceberg": ((IcebergCatalog, "load"), (iceberg, "link_files"), (IcebergCatalog, "swap")),
}
"""Between which steps it can end where others do most of it; by kind of sink."""


@pytest.mark.parametrize("cell", parameters(cells(Mode.MIRROR, Mode.HISTORY)))
def test_N03_a_process_that_dies_between_any_two_steps_leaves_a_copy_whole_or_still_to_be_finished(
    workshop: Workshop, cell: tuple[str, Mode]
) -> None:
    table, fence = workshop.table, Position.of(workshop.source.fence)
    for last in count(1):
        workshop.sink.drop(table.name)
        place = workshop.place.begin(workshop.sink, table, workshop.mode, fence)
        files = workshop.write(table, place, workshop.source.states[fence.value])
        with dying(_FILLING.get(cell[0], workshop.place.seams), last) as life:
            workshop.sink.finish_snapshot(table, files, fence)
        workshop.go_on_elsewhere()
        assert workshop.target().applied in ((None, fence) if life.is_over else (fence,))
        if workshop.target().applied is None:
            assert workshop.sink.can_resume_snapshot(table, place, files)
            workshop.sink.finish_snapshot(table, files, fence)
        workshop.assert_exact()
        if not life.is_over:
            assert last > 2, "it takes more steps than that"
            break
    workshop.follow(workshop.work())
    workshop.assert_exact()


# Also where it is already.
_SWAPS = [*((name, 5) for name in ("delta", "iceberg", "postgres")), ("delta", 0)]


@pytest.mark.parametrize(
    ("cell", "distance"), [pytest.param((name, Mode.MIRROR), by, id=f"{name}-{by}", marks=SPARK.get(name, [])) for name, by in _SWAPS]
)
def test_K01_a_process_that_dies_between_any_two_steps_leaves_a_table_replaced_or_as_it_was(
    workshop: Workshop, cell: tuple[str, Mode], distance: int
) -> None:
    name, busy = workshop.table.name, workshop.busy
    assert isinstance(busy, Busy)
    held = busy.sorted_rows()
    for last in count(1):
        before, name_of_copy = workshop.target(), f"copy{last % 2}"
        rows = [busy.row(number, last % 2) for number in range(3 + last % 2)]
        copy = _copy_aside(workshop, name_of_copy, rows)
        assert before.applied is not None
        position = Position.of(before.applied.value + distance)
        with dying(_REPLACING.get(cell[0], workshop.place.seams), last) as life:
            workshop.sink.replace(name, workshop.sink.shadow(name_of_copy), position)
        workshop.go_on_elsewhere()
        is_replaced = (workshop.target().applied, workshop.target().copy) == (position, copy)
        assert is_replaced or life.is_over
        if not is_replaced:
            _assert_holds(workshop, held)
            workshop.sink.replace(name, workshop.sink.shadow(name_of_copy), position)
        held = rows
        assert (workshop.target().applied, workshop.target().copy) == (position, copy)
        _assert_holds(workshop, held)
        if not life.is_over:
            assert last > 2, "it takes more steps than that"
            return


def _copy_aside(workshop: Workshop, name: str, rows: list[Row]) -> str:
    """These rows, at the fence, in a shadow of that name, unless they are still there; what tells the copy from others."""
    main, fence = workshop.sink, Position.of(workshop.source.fence)
    shadow = main.shadow(name)
    if shadow.load_target(workshop.table.name) is None:
        workshop.sink = shadow
        place = shadow.begin_snapshot(workshop.table, fence)
        shadow.finish_snapshot(workshop.table, workshop.write(workshop.table, place, rows), fence)
        workshop.sink = main
    made = shadow.load_target(workshop.table.name)
    assert made is not None
    assert made.copy is not None
    return made.copy


def _assert_holds(workshop: Workshop, rows: list[Row]) -> None:
    assert canonical(workshop.shown(), workshop.layout) == canonical([record_of(row) for row in rows], workshop.layout)
