"""Change files merged into fewer files, and into rows."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa

from penstock.change import ChangeType
from penstock.contracts.connector import SourceCheckpoint
from penstock.contracts.reference import as_changes, reference_schema
from penstock.reference.history import row_schema
from penstock.reference.store import ChangesFile, RowFile, StoreState, folded, joined, load_history

COLUMNS = pa.schema([pa.field("id", pa.int64()), pa.field("note", pa.string())])
MOST_FILES = 8


def empty_state(directory: Path) -> StoreState:
    base = RowFile(directory, "base", row_schema(COLUMNS))
    return StoreState("one", ("id",), base.finish(), 0, 0, 0, SourceCheckpoint())


def with_change(directory: Path, state: StoreState, version: int) -> StoreState:
    """One more row, and one of the former ones changed."""
    file = RowFile(directory, "changes", reference_schema(COLUMNS))
    for ordinal, key in enumerate([version, version // 2]):
        row = pa.RecordBatch.from_pylist([{"id": key, "note": f"by {version}"}], COLUMNS)
        file.write(as_changes(row, ChangeType.UPDATE_POSTIMAGE, version, ordinal))
    added = ChangesFile(file.finish(), state.reached, version, file.rows)
    return state.with_changes(added, reached=version, checkpoint=SourceCheckpoint())


def notes_at(directory: Path, state: StoreState, version: int) -> dict[int, str]:
    return {row["id"]: row["note"] for row in load_history(directory, state).rows_at(version).to_pylist()}


def expected_at(version: int) -> dict[int, str]:
    notes: dict[int, str] = {}
    for each in range(1, version + 1):
        notes |= {each: f"by {each}", each // 2: f"by {each}"}
    return notes


def test_files_stay_few_and_no_change_is_written_often_although_nothing_can_be_folded(tmp_path: Path) -> None:
    state, count, rows_written = empty_state(tmp_path), 200, 0
    for version in range(1, count + 1):
        state = with_change(tmp_path, state, version)
        if len(state.changes) > MOST_FILES:
            before = state.names
            state = joined(tmp_path, state, COLUMNS)
            rows_written += sum(each.rows for each in state.changes if each.name not in before)
            assert len(state.changes) <= math.log2(count), "each is more than twice as long as all after it"
        assert [each.after for each in state.changes[1:]] == [each.upto for each in state.changes[:-1]], (
            "no gap, and no overlap"
        )
    assert rows_written < state.changes_rows * math.log2(count) / 2
    for version in (1, 7, 100, count):
        assert notes_at(tmp_path, state, version) == expected_at(version)


def test_fold_keeps_every_version_after_the_floor(tmp_path: Path) -> None:
    state = empty_state(tmp_path)
    for version in range(1, 20):
        state = with_change(tmp_path, state, version)
    state = folded(tmp_path, joined(tmp_path, state, COLUMNS), 12, COLUMNS)
    assert (state.floor, state.base_rows, len(state.changes)) == (12, 13, 1)
    for version in range(12, 20):
        assert notes_at(tmp_path, state, version) == expected_at(version)
    state = folded(tmp_path, state, 19, COLUMNS)
    assert state.changes == ()
    assert notes_at(tmp_path, state, 19) == expected_at(19)
