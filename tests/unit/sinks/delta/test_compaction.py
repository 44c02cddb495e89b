"""Compaction of a Delta table beside its epochs: no row changes, whatever else is committed."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.errors import SinkError
from penstock.sinks.delta import compaction as delta_compaction
from penstock.sinks.delta.commit import commit, removed
from penstock.sinks.delta.compaction import SharedTable, compact, files_to_compact
from penstock.sinks.delta.state import DataFile, load_state
from tests.support.delta_tables import (
    APPLICATION,
    InlineExecutors,
    add_rows,
    files_of,
    read_all,
    rows_of,
    state_of,
)
from tests.support.sinks.delta_lake import LAYOUT, CommitsConcurrently, Lake
from tests.support.sinks.source import Value


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def follow(lake: Lake) -> None:
    lake.source.commit()
    assert lake.epoch(lake.slices()).apply(InlineExecutors())


def compacted(
    lake: Lake, meanwhile: Callable[[], None] = lambda: None, files: Sequence[DataFile] | None = None
) -> bool:
    state = state_of(lake.path)
    shared = SharedTable(lake.path, threading.Lock(), lambda: load_state(lake.path))
    return compact(
        shared, state, list(state.files.values()) if files is None else files, CommitsConcurrently(meanwhile)
    )


def test_small_files_become_one_once_they_are_many_and_no_row_changes(lake: Lake) -> None:
    lake.change()
    follow(lake)
    before = state_of(lake.path)
    assert files_to_compact(before, 4) == []
    files = files_to_compact(before, 3)
    assert len(files) == 3
    assert compacted(lake, files=files)
    assert lake.is_right
    (file,) = state_of(lake.path).files.values()
    assert file.vector is None
    assert state_of(lake.path).transactions == before.transactions
    last = [
        json.loads(line)
        for line in (lake.path / "_delta_log" / f"{before.version + 1:020d}.json").read_text().splitlines()
    ]
    assert {
        action[kind]["dataChange"] for action in last for kind in action if kind in ("add", "remove")
    } == {False}


def test_rows_deleted_while_files_are_compacted_are_deleted_from_the_new_file_too(lake: Lake) -> None:
    lake.change()
    follow(lake)

    def epoch() -> None:
        for key in (1, 9, 20):
            lake.source.delete((Value(key),))
        lake.source.update((Value(2),), {"note": Value("third")})
        follow(lake)

    assert compacted(lake, epoch)
    assert lake.is_right
    new, vector = max(
        ((file, file.vector) for file in state_of(lake.path).files.values()), key=lambda each: each[0].bytes
    )
    assert vector is not None
    assert vector.count == 4, "all rows of the last file are deleted"
    assert json.loads(new.stats or "")["tightBounds"] is False
    assert state_of(lake.path).transactions == {APPLICATION: lake.source.position}
    lake.source.delete((Value(3),))
    follow(lake)
    assert lake.is_right


@pytest.mark.parametrize("seed", range(8))
def test_concurrent_deletes_leave_the_table_equal_to_the_source(lake: Lake, seed: int) -> None:
    chance = random.Random(seed)

    def epoch() -> None:
        keys = [key for (key,) in lake.source.rows]
        for key in chance.sample(keys, min(len(keys) - 1, chance.randrange(1, 5))):
            if chance.random() < 0.5:
                lake.source.delete((key,))
            else:
                lake.source.update((key,), {"note": Value(f"{chance.random()}")})
        lake.source.insert({"id": Value(chance.randrange(10**6, 10**9)), "note": Value("new")})
        follow(lake)

    for _ in range(4):
        epoch()
        files = list(state_of(lake.path).files.values())
        compacted(
            lake,
            epoch if chance.random() < 0.7 else lambda: None,
            chance.sample(files, chance.randrange(1, len(files) + 1)),
        )
        assert lake.is_right


def _optimize(lake: Lake) -> None:
    old, rows = (
        list(state_of(lake.path).files.values()),
        pa.Table.from_pylist(rows_of(lake.path), LAYOUT.schema),
    )
    add_rows(lake.path, rows, lake.source.position)
    assert commit(lake.path, state_of(lake.path).version + 1, [removed(file) for file in old])


def _optimize_one(lake: Lake) -> None:
    (old, *_) = state_of(lake.path).files.values()
    files = files_of(lake.path)
    add_rows(lake.path, read_all(replace(files, files=files.files[:1])), lake.source.position)
    assert commit(lake.path, state_of(lake.path).version + 1, [removed(old)])


def _redefine(lake: Lake) -> None:
    state = state_of(lake.path)
    metadata = {**state.metadata.action, "configuration": {**state.metadata.properties, "a": "b"}}
    assert commit(lake.path, state.version + 1, [{"metaData": metadata}])


def _restore(lake: Lake) -> None:
    """Deleted rows are visible again: their file has no vector any more."""
    (file,) = [
        file
        for file in state_of(lake.path).files.values()
        if file.vector is not None and file.vector.count == 1
    ][:1]
    again = {name: value for name, value in file.action.items() if name != "deletionVector"}
    assert commit(lake.path, state_of(lake.path).version + 1, [removed(file), {"add": again}])


@pytest.mark.parametrize("act", [_optimize, _optimize_one, _redefine, _restore])
def test_K09_concurrent_changes_of_another_writer_stay(lake: Lake, act: Callable[[Lake], None]) -> None:
    lake.change()
    follow(lake)
    there: list[tuple[object, set[str]]] = []

    def meanwhile() -> None:
        written = lake.files()
        act(lake)
        there.append(
            (
                rows_of(lake.path),
                {name for name in lake.files() if name not in written or not name.startswith("compact-")},
            )
        )

    assert not compacted(lake, meanwhile)
    assert (rows_of(lake.path), lake.files()) == there[0]


def test_a_lost_commit_race_leaves_none_of_our_files(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_compaction, "commit", lambda *_: False)
    there = lake.files()

    def epoch() -> None:
        lake.source.delete((Value(1),))
        follow(lake)
        there.update(lake.files())

    assert not compacted(lake, epoch)
    assert {name for name in lake.files() if not name.startswith("compact-")} == {
        n for n in there if not n.startswith("compact-")
    }
    assert not list(lake.path.glob("compact-*"))
    assert lake.is_right


def test_a_commit_whose_answer_is_lost_keeps_its_files(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*arguments: object) -> bool:
        assert commit(*arguments)  # type: ignore[arg-type]
        raise SinkError("the answer is lost")

    monkeypatch.setattr(delta_compaction, "commit", lost)
    with pytest.raises(SinkError, match="lost"):
        compacted(lake)
    assert len(state_of(lake.path).files) == 1
    assert lake.is_right


def test_files_that_lost_most_of_their_rows_are_rewritten_a_few_at_a_time(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_compaction, "_SMALL_BYTES", 1)
    for key in (1, 2, 6, 7):
        lake.source.delete((Value(key),))
    follow(lake)
    state = state_of(lake.path)
    assert sorted(file.vector.count for file in state.files.values() if file.vector) == [2, 2]
    assert files_to_compact(state, 1) == [], (
        "half of four rows is not more than half, and two of five are less"
    )
    lake.source.delete((Value(3),))
    lake.source.delete((Value(8),))
    follow(lake)
    state = state_of(lake.path)
    assert len(files_to_compact(state, 1)) == 2
    monkeypatch.setattr(delta_compaction, "_AT_ONCE_BYTES", 1)
    (one,) = files_to_compact(state, 1)
    assert compacted(lake, files=[one])
    assert lake.is_right
    assert len(files_to_compact(state_of(lake.path), 1)) == 1


def test_files_that_became_empty_are_left_alone(lake: Lake) -> None:
    (first, _) = state_of(lake.path).files.values()

    def epoch() -> None:
        for key in range(1, 6):
            lake.source.delete((Value(key),))
        follow(lake)

    assert not compacted(lake, epoch, [first])
    assert lake.is_right
    assert len(state_of(lake.path).files) == 1
    assert not list(lake.path.glob("compact-*")), "files outside the table are removed"
