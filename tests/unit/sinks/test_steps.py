"""Changes of a table cut into steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.change import ChangeCounts
from penstock.position import Position
from penstock.sinks.base import TableChanges, apply_in_steps
from penstock.sinks.evolution import Evolution
from penstock.sinks.lineage import Origin
from penstock.sinks.modes import Mode
from penstock.sinks.slice_reader import slices_upto, step_ends
from penstock.spool import SpoolReader, SpoolWriter
from penstock.spool.reader import FileSlice
from tests.support.memory_pipeline import ListSink
from tests.support.spool.builders import ITEMS, Commit, at, committed, piece, transactions


def spooled(root: Path) -> list[FileSlice]:
    """Two segments of transactions, with one in two pieces between them."""
    writer = SpoolWriter(root, at(0))
    writer.append(transactions(Commit(10, (ITEMS,) * 3), Commit(20, (ITEMS,) * 3)))
    writer.seal()
    writer.append(piece(5, (ITEMS, 0)))
    writer.append(piece(5, (ITEMS, 1), subxid=6))
    writer.append(committed(5, 30))
    writer.append(transactions(Commit(40, (ITEMS,))))
    writer.seal()
    return list(SpoolReader(root).read(at(0), at(40)).tables[ITEMS.name].slices)


def test_steps_end_where_files_do_and_never_within_a_transaction(tmp_path: Path) -> None:
    slices = spooled(tmp_path)
    assert step_ends(slices, 100, at(50)) == [at(50)]
    assert step_ends(slices, 6, at(50)) == [at(20), at(50)]
    assert step_ends(slices, 1, at(50)) == [at(20), at(30), at(50)]
    assert step_ends(slices, 1, at(40)) == [at(20), at(30), at(40)]
    assert step_ends([], 1, at(40)) == [at(40)]


def test_files_that_reach_over_each_other_are_in_one_step(tmp_path: Path) -> None:
    slices = spooled(tmp_path)
    late = replace(slices[0], file=replace(slices[0].file, min_position=at(15)))
    assert step_ends([*slices, late], 1, at(50)) == [at(50)]


def test_changes_after_the_end_of_a_step_are_left_out(tmp_path: Path) -> None:
    slices = spooled(tmp_path)
    assert slices_upto(slices, at(50)) == slices
    assert slices_upto(slices, at(30)) == slices[:-1]
    assert slices_upto(slices, at(10)) == [replace(slices[0], upto=at(10))]


def small_steps() -> ListSink:
    sink = ListSink(ITEMS, Mode.MIRROR, [], 0)
    sink.step_rows = 1
    return sink


def test_parts_of_an_epoch_are_applied_in_order_and_hold_each_change_once(tmp_path: Path) -> None:
    slices = spooled(tmp_path)
    found: list[tuple[Position, list[FileSlice]]] = []
    changes = TableChanges(ITEMS.name, slices, ChangeCounts())
    apply_in_steps(small_steps(), changes, at(50), lambda part, upto: found.append((upto, list(part.slices))))
    assert [upto for upto, _ in found] == [at(20), at(30), at(50)]
    assert [slice for _, part in found for slice in part] == slices


def test_parts_repeat_earlier_changes_for_a_sink_that_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = spooled(tmp_path)
    sink = small_steps()
    monkeypatch.setattr(sink, "needs_earlier_changes", lambda _: True)
    found: list[list[FileSlice]] = []
    changes = TableChanges(ITEMS.name, slices, ChangeCounts())
    apply_in_steps(sink, changes, at(50), lambda part, _: found.append(list(part.slices)))
    assert found == [slices_upto(slices, upto) for upto in (at(20), at(30), at(50))]


def test_a_schema_change_is_one_step(tmp_path: Path) -> None:
    found: list[Position] = []
    columns = pa.schema([pa.field("id", pa.int32())])
    evolution = Evolution(columns, ("id",), Origin({}, 0, ""), {}, (), {}, (), {})
    changes = TableChanges(ITEMS.name, spooled(tmp_path), ChangeCounts(), evolution=evolution)
    apply_in_steps(small_steps(), changes, at(50), lambda _, upto: found.append(upto))
    assert found == [at(50)]
