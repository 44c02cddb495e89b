"""An epoch of a Delta table without Spark: crashes, concurrent commits of other writers, and parallel
tasks.
"""

from __future__ import annotations

import errno
import json
import random
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder
from typing_extensions import override

from penstock import storage
from penstock.change import EXACT, EXACT_TYPE
from penstock.errors import KeyChangesTooLargeError, SinkError
from penstock.pipeline.error_policy import Action, decide
from penstock.position import Position
from penstock.sinks import key_moves, slice_reader
from penstock.sinks import slice_reader as shares
from penstock.sinks.base import ChangedRows
from penstock.sinks.delta import deletions
from penstock.sinks.delta import epoch as delta_epoch
from penstock.sinks.delta import epoch as delta_step
from penstock.sinks.delta import epoch as delta_task
from penstock.sinks.delta import state as delta_state
from penstock.sinks.delta.commit import added, commit, removed, transaction
from penstock.sinks.delta.definition import snapshot_place
from penstock.sinks.delta.epoch import DeltaCommit, EpochPart
from penstock.sinks.delta.lookup import Bounds, load_bounds
from penstock.sinks.delta.state import DataFile, Unsupported
from penstock.sinks.executors import In, Out, join_task, split_tasks
from penstock.sinks.keys import key_hashes
from penstock.sinks.modes import Layout, Mode
from penstock.sinks.row_files import write_batches
from tests.support.delta_tables import (
    APPLICATION,
    InlineExecutors,
    add_rows,
    create_table,
    epoch,
    rows_of,
    state_of,
)
from tests.support.sinks.delta_lake import ITEMS, LAYOUT, CommitsConcurrently, DyingExecutors, Lake
from tests.support.sinks.source import Value


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


@pytest.mark.parametrize("moment", ["before the commit", "before the vectors", "after the commit"])
def test_K01_a_crash_leaves_files_that_are_no_part_of_the_table_and_the_repeated_epoch_is_right(
    lake: Lake, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.change()
    slices = lake.slices()
    before = rows_of(lake.path)

    def dies(*arguments: object) -> bool:
        if moment == "after the commit":
            commit(*arguments)  # type: ignore[arg-type]
        raise DyingExecutors

    with monkeypatch.context() as patch:
        patch.setattr(delta_step, "mark_files" if moment == "before the vectors" else "commit", dies)
        with pytest.raises(DyingExecutors):
            lake.epoch(slices).apply(InlineExecutors())
    if moment == "after the commit":
        # The table's own state shows it, so the epoch is not applied again.
        assert state_of(lake.path).transactions[APPLICATION] == lake.source.position
        assert lake.is_right
        return
    assert rows_of(lake.path) == before
    assert lake.files() > {file.path for file in state_of(lake.path).files.values()}
    assert lake.epoch(slices).apply(InlineExecutors())
    assert lake.is_right


@pytest.mark.parametrize("step", ["the rows", "the positions", "the vectors"])
def test_an_epoch_for_which_the_disk_is_full_leaves_no_files(
    lake: Lake, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.change()
    slices, before = lake.slices(), lake.files()

    def full(first: object, *_: object, **__: object) -> None:
        if isinstance(first, Path):
            first.write_bytes(b"the beginning")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(delta_epoch, "REPORTED_BYTES", 0)
        places: dict[str, tuple[object, str]] = {
            "the rows": (pq.ParquetWriter, "write_table"),
            "the positions": (deletions, "_encoded"),
            "the vectors": (storage, "write"),
        }
        patch.setattr(*places[step], full)
        with pytest.raises((OSError, SinkError)):
            lake.epoch(slices).apply(InlineExecutors())
    assert lake.files() == before
    assert lake.epoch(slices).apply(InlineExecutors())
    assert lake.is_right


class LastFails(InlineExecutors):
    """All tasks of a step but the last one do their work."""

    def __init__(self, step: Callable[..., object]) -> None:
        super().__init__()
        self._step = step
        self.finished = 0

    @override
    def run(self, function: Callable[[In], Out], tasks: Sequence[In], *, light: bool = False) -> list[Out]:
        if function is not self._step:
            return super().run(function, tasks)
        self.finished = len(super().run(function, tasks[:-1]))
        raise SinkError("a task failed")


@pytest.mark.parametrize("step", [delta_task.write_epoch, deletions.run_mark])
def test_files_of_finished_tasks_are_removed_if_another_task_of_the_epoch_fails(
    lake: Lake, step: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.change()
    slices, before = lake.slices(), lake.files()
    monkeypatch.setattr(shares, "ROWS_A_TASK", 1)
    monkeypatch.setattr(deletions, "_ROWS_A_TASK", 1)
    monkeypatch.setattr(delta_epoch, "REPORTED_BYTES", 0)
    executors = LastFails(step)
    with pytest.raises(SinkError, match="a task failed"):
        lake.epoch(slices).apply(executors)
    assert executors.finished
    assert lake.files() == before
    assert lake.epoch(slices).apply(InlineExecutors())
    assert lake.is_right


def test_files_of_table_and_epoch_are_sent_once_for_all_tasks(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.change()
    monkeypatch.setattr(shares, "ROWS_A_TASK", 1)
    tasks = lake.epoch(list(lake.slices())).plan(2)
    common, own = split_tasks(tasks)
    assert common is not None
    assert len(own) > 1
    assert {"slices", "table"} <= common.fields.keys()
    assert [join_task(common, each) for each in own] == tasks


def test_files_of_an_epoch_whose_commit_was_not_answered_stay(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.change()
    slices = lake.slices()

    def unanswered(path: Path, version: int, actions: Sequence[dict[str, Any]]) -> bool:
        commit(path, version, actions)
        raise SinkError("the answer was lost")

    monkeypatch.setattr(delta_step, "commit", unanswered)
    with pytest.raises(SinkError, match="the answer was lost"):
        lake.epoch(slices).apply(InlineExecutors())
    assert lake.is_right


def test_K09_an_epoch_is_computed_again_when_another_writer_committed_first(lake: Lake) -> None:
    lake.change()
    slices = lake.slices()

    def compact() -> None:
        """All rows in one file, as OPTIMIZE writes them: row positions found earlier are invalid."""
        old, rows = (
            list(state_of(lake.path).files.values()),
            pa.Table.from_pylist(rows_of(lake.path), LAYOUT.schema),
        )
        add_rows(lake.path, rows)
        assert commit(lake.path, state_of(lake.path).version + 1, [removed(file) for file in old])

    files = lake.files()
    assert not lake.epoch(slices).apply(CommitsConcurrently(compact))
    assert len(lake.files() - files) == 1, "unused files are removed, and the compacted file exists"
    assert len(rows_of(lake.path)) == 9
    assert lake.epoch(slices).apply(InlineExecutors())
    assert lake.is_right


def test_an_epoch_of_inserts_reads_no_file_of_the_table(lake: Lake) -> None:
    lake.source.insert({"id": Value(20), "note": Value("new")})
    lake.source.commit()
    (task,) = lake.epoch(lake.slices()).plan(2)
    assert task.adds_only
    assert task.table.files == ()


def test_the_commit_of_an_epoch_of_inserts_visits_no_file_of_the_table(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise AssertionError("an insert must not cost time for each file of the table")

    lake.source.insert({"id": Value(20), "note": Value("new")})
    lake.source.commit()
    monkeypatch.setattr(delta_epoch, "mark_files", fails)
    assert lake.epoch(lake.slices()).apply(InlineExecutors())
    assert lake.is_right


def test_a_file_without_rows_is_removed_and_the_others_keep_theirs(lake: Lake) -> None:
    for key in (6, 7, 8, 9, 1):
        lake.source.delete((Value(key),))
    lake.source.commit()
    assert lake.epoch(lake.slices()).apply(InlineExecutors())
    (left,) = state_of(lake.path).files.values()
    assert left.vector is not None
    assert left.vector.count == 1
    lake.source.delete((Value(2),))
    lake.source.commit()
    assert lake.epoch(lake.slices()).apply(InlineExecutors())
    (left,) = state_of(lake.path).files.values()
    assert left.vector is not None
    assert left.vector.count == 2
    assert lake.is_right


def test_the_log_is_one_that_deltalake_reads(lake: Lake) -> None:
    lake.change()
    assert lake.epoch(lake.slices()).apply(InlineExecutors())
    log = DeltaTable(lake.path)
    assert log.version() == state_of(lake.path).version
    assert log.transaction_version(APPLICATION) == lake.source.position
    assert {uri.rpartition("/")[2] for uri in log.file_uris()} == set(state_of(lake.path).files)
    assert log.history(1)[0]["operation"] == "PENSTOCK EPOCH"
    rows = pa.table(
        QueryBuilder().register("t", log).execute("SELECT id, note FROM t ORDER BY id").read_all()
    )
    expected = [{name: value.typed for name, value in row.items()} for row in lake.source.rows.values()]
    assert rows.to_pylist() == sorted(expected, key=lambda row: str(row["id"]).zfill(9))


def test_a_table_without_vectors_takes_inserts_and_leaves_the_rest_to_delta(tmp_path: Path) -> None:
    path = tmp_path / "table"
    create_table(path, LAYOUT, properties={"delta.enableDeletionVectors": "false"})
    lake = Lake(tmp_path / "other")
    lake.source.insert({"id": Value(20), "note": Value("new")})
    lake.source.commit()
    assert epoch(path, LAYOUT, lake.slices(), lake.source.position).apply(InlineExecutors())
    lake.source.delete((Value(20),))
    lake.source.commit()
    with pytest.raises(Unsupported, match="no deletion vectors"):
        epoch(path, LAYOUT, lake.slices(), lake.source.position).apply(InlineExecutors())
    assert [row["id"] for row in rows_of(path)] == [20]


def test_large_epochs_are_shared_out_and_parts_follow_key_changes_that_leave_values_behind(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "ROWS_A_TASK", 2)
    for key in (1, 2, 3):
        lake.source.update((Value(key),), {"note": Value("x")})
    lake.source.commit()
    tasks = lake.epoch(lake.slices()).plan(2)
    assert [(task.part.index, task.part.count) for task in tasks if task.part] == [(0, 2), (1, 2)]
    for key in (1, 2, 3):
        lake.source.update((Value(key),), {"id": Value(key + 100)}, ["note"])
    lake.source.commit()
    tasks = lake.epoch(lake.slices()).plan(2)
    assert [task.part.follows_moves for task in tasks if task.part] == [True] * 3


class Reading(InlineExecutors):
    """Records the number of changes in each task of an epoch."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.held: list[int] = []
        read = slice_reader.read_slices

        def counted(*arguments: Any) -> pa.Table:
            rows = read(*arguments)
            self.held.append(rows.num_rows)
            return rows

        patch.setattr(delta_task, "read_slices", counted)


def _shifted(root: Path, count: int) -> Lake:
    """Add one to the keys 1 to `count`; all notes are unchanged TOAST. The greatest is changed first to avoid
    duplicates.
    """
    lake = Lake(root)
    for key in range(10, count + 1):
        lake.source.insert({"id": Value(key), "note": Value(f"note {key}")})
    lake.source.commit()
    assert lake.epoch(lake.slices()).apply(InlineExecutors())
    for key in range(count, 0, -1):
        lake.source.update((Value(key),), {"id": Value(key + 1)}, ["note"])
    lake.source.commit()
    return lake


def test_an_update_that_shifts_all_keys_is_shared_out_though_values_moved_from_key_to_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = _shifted(tmp_path, 200)
    monkeypatch.setattr(shares, "ROWS_A_TASK", 50)
    executors = Reading(monkeypatch)
    assert lake.epoch(lake.slices()).apply(executors)
    assert lake.is_right
    assert len(executors.held) == 8
    assert max(executors.held) < 150, "of 400 changes"


@pytest.mark.parametrize("seed", range(10))
def test_values_that_key_changes_moved_through_parts_of_an_epoch_equal_the_source(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, chance = Lake(tmp_path), random.Random(seed)
    monkeypatch.setattr(shares, "ROWS_A_TASK", 5)
    if seed % 2:  # different keys may have one hash
        monkeypatch.setattr(
            slice_reader, "key_hashes", lambda rows, names: key_hashes(rows, names) % np.uint64(11)
        )
    for epoch_number in range(3):
        for number in range(40):
            keys = [int(str(row["id"].typed)) for row in lake.source.rows.values()]
            free = [key for key in range(1, 16) if key not in keys]
            act = chance.choice(["move", "move", "move", "change", "touch", "delete", "insert"])
            key = chance.choice(keys) if keys else 0
            if free and (act == "insert" or not keys):
                lake.source.insert(
                    {"id": Value(chance.choice(free)), "note": Value(f"inserted {epoch_number} {number}")}
                )
            elif act == "move" and free:
                values = {"id": Value(chance.choice(free))}
                changed = {"note": Value(f"moved {epoch_number} {number}")}
                is_kept = chance.random() < 0.8
                lake.source.update(
                    (Value(key),), values if is_kept else {**values, **changed}, ["note"] if is_kept else []
                )
            elif act == "change":
                lake.source.update((Value(key),), {"note": Value(f"changed {epoch_number} {number}")})
            elif act == "touch":
                lake.source.update((Value(key),), {}, ["note"])
            elif act == "delete" and len(keys) > 3:
                lake.source.delete((Value(key),))
            if chance.random() < 0.1:
                lake.source.commit()
        lake.source.commit()
        assert lake.epoch(lake.slices()).apply(InlineExecutors())
        assert lake.is_right


def test_key_changes_that_connect_more_changes_than_a_task_may_hold_fail_the_table_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = _shifted(tmp_path, 200)
    before = lake.files()
    monkeypatch.setattr(shares, "ROWS_A_TASK", 50)
    monkeypatch.setattr(key_moves, "CONNECTED_ROWS", 60)
    with pytest.raises(KeyChangesTooLargeError, match=r"key changes of public\.items") as failed:
        lake.epoch(lake.slices()).apply(InlineExecutors())
    assert failed.value.hint is not None
    assert "penstock tables resync CONFIG public.items" in failed.value.hint
    assert decide(failed.value, ITEMS.name).action is Action.FAIL_TABLE, "the others continue"
    assert lake.files() == before


class Weighing(InlineExecutors):
    """Records the size of task results and the functions that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []
        self.positions = 0

    @override
    def run(self, function: Callable[[In], Out], tasks: Sequence[In], *, light: bool = False) -> list[Out]:
        found = super().run(function, tasks)
        self.ran.append(function.__name__)
        self.positions += sum(
            each.positions.nbytes
            for part in found
            if isinstance(part, EpochPart)
            for each in part.deletions.found
        )
        return found


@pytest.mark.parametrize("bound", [0, 24])
def test_positions_of_deleted_rows_that_exceed_the_bound_go_to_vectors_without_the_driver(
    lake: Lake, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_epoch, "REPORTED_BYTES", bound)
    monkeypatch.setattr(shares, "ROWS_A_TASK", 2)
    monkeypatch.setattr(deletions, "_ROWS_A_TASK", 2)
    for keys in ([1, 2, 6, 7, 20], [3, 8, 9, 21], [4]):
        for key in keys:
            if key < 20:
                lake.source.delete((Value(key),))
            else:
                lake.source.insert({"id": Value(key), "note": Value("new")})
        lake.source.commit()
        executors = Weighing()
        fills: dict[str, pa.Scalar] | None = {} if keys == [4] else None
        assert replace(lake.epoch(lake.slices()), fills=fills).apply(executors)
        assert executors.positions <= bound
        assert "run_mark" in executors.ran or fills is not None or bound > 8 * len(keys)
        assert lake.is_right
        assert not list(lake.path.glob("*-deletes.parquet"))


def test_an_epoch_without_changes_moves_the_position_alone(lake: Lake) -> None:
    executors = InlineExecutors()
    assert DeltaCommit(lake.path, APPLICATION, LAYOUT, state_of(lake.path), Position.of(500), ()).apply(
        executors
    )
    assert executors.tasks == 0
    assert state_of(lake.path).transactions == {APPLICATION: 500}
    assert not commit(lake.path, state_of(lake.path).version, [transaction(APPLICATION, Position.of(1))])


def test_bounds_of_files_are_parsed_once_and_freed_with_the_files(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = []

    def counted(stats: str | None, fields: tuple[pa.Field, ...]) -> Bounds:
        parsed.append(stats)
        return load_bounds(stats, fields)

    monkeypatch.setattr(delta_state, "load_bounds", counted)
    state, end = state_of(lake.path), Position.of(500)
    tables = [
        DeltaCommit(lake.path, APPLICATION, LAYOUT, state, end, ()).table(scanned=True) for _ in range(3)
    ]
    assert [file.bounds for table in tables for file in table.files] == [((1, 5),), ((6, 9),)] * 3
    assert len(parsed) == 2
    tracemalloc.start()
    for number in range(3000):  # the number of files created and removed in 3,000 epochs of a compacted table
        stats = json.dumps({"numRecords": number, "minValues": {"id": number}})
        written = DataFile({"path": f"{number}.parquet", "size": 1, "stats": stats})
        later = replace(state, files={written.path: written})
        table = DeltaCommit(lake.path, APPLICATION, LAYOUT, later, end, ()).table(scanned=True)
        assert table.files[0].bounds == ((number, None),)
        parsed.clear()
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < 100_000


def test_rows_that_changed_during_a_copy_take_the_place_of_those_under_their_keys(
    lake: Lake, tmp_path: Path
) -> None:
    layout = Layout(LAYOUT.columns, LAYOUT.key, Mode.HISTORY)
    path = tmp_path / "history"
    create_table(path, layout, mapped=True)
    place = snapshot_place(path, layout, Position.of(100))
    assert place is not None
    rows = pa.table({"id": pa.array([1, 2, 3]), "note": ["a", "b", "c"], EXACT: pa.nulls(3, EXACT_TYPE)})
    file = write_batches(iter(rows.to_batches()), place, 0)
    assert commit(path, 1, added([file]))
    keys = pa.table({"match_0": pa.array([2, 3, 4]), "match_text_0": pa.nulls(3, pa.string())})
    (tmp_path / "keys").mkdir()
    pq.write_table(keys, tmp_path / "keys" / "part-0.parquet")
    pq.write_table(
        pa.table({"value_0": pa.array([2, 4]), "value_1": ["second", "new"], EXACT: pa.nulls(2, EXACT_TYPE)}),
        tmp_path / "rows.parquet",
    )
    changed = ChangedRows(str(tmp_path / "keys"), (str(tmp_path / "rows.parquet"),))
    later = snapshot_place(path, layout, Position.of(150))
    assert later is not None
    repair = DeltaCommit(path, APPLICATION, layout, state_of(path), Position.of(150))
    assert repair.repair(changed, later, InlineExecutors())
    found = {row["id"]: row for row in rows_of(path)}
    assert {key: (row["note"], row["_valid_from"]) for key, row in found.items()} == {
        1: ("a", 100),
        2: ("second", 150),
        4: ("new", 150),
    }
    assert all(
        row["_current"] and row["_valid_to"] is None and row["_valid_from_time"].year > 2000
        for row in found.values()
    )
    assert state_of(path).transactions == {APPLICATION: 150}
