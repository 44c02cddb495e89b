"""Changes of a table cut into steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.sinks.steps import slices_upto, step_ends
from penstock.spool import SpoolReader, SpoolWriter
from penstock.spool.range import FileSlice
from tests.unit.spool.builders import ITEMS, Commit, at, committed, piece, transactions


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


def test_what_lies_after_the_end_of_a_step_is_left_out(tmp_path: Path) -> None:
    slices = spooled(tmp_path)
    assert slices_upto(slices, at(50)) == slices
    assert slices_upto(slices, at(30)) == slices[:-1]
    assert slices_upto(slices, at(10)) == [replace(slices[0], upto=at(10))]
