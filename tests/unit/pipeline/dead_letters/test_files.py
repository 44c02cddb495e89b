"""Files of the dead-letter queue: disk errors, power failures and many files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from penstock import storage
from penstock.pipeline.dead_letters.rejections import DEAD_LETTER_SCHEMA
from penstock.pipeline.dead_letters.store import DeadLetterStore, PendingBatch
from penstock.position import Position
from penstock.sinks.modes import Mode
from tests.support.memory_pipeline import (
    BEYOND,
    Died,
    MemoryPipeline,
    dying_writes,
    epoch,
    key,
    memory_pipeline,
    row,
)
from tests.support.sinks.history import PLAIN
from tests.support.sinks.source import Source, Value


@pytest.fixture
def made() -> Iterator[MemoryPipeline]:
    """An empty table."""
    with memory_pipeline(Source(PLAIN, []), Mode.MIRROR, []) as opened:
        yield opened


def test_C08_a_dead_letter_settled_after_a_disk_error_during_compaction_stays_settled(
    made: MemoryPipeline, tmp_path: Path
) -> None:
    made.many = 100
    made.open()
    for number in range(10, 13):
        made.source.insert(row(number, BEYOND))
        epoch(made)
    names = made.box.store.open_names(made.name)
    first, end = min(names), Position.of(made.source.position + 10)
    lake = made.box.store.directory.parents[1]
    for after in range(1, 16):
        copy = tmp_path / str(after)
        shutil.copytree(lake, copy)
        store = DeadLetterStore(copy, "p", 2)
        with dying_writes(after), suppress(Died):
            store.compact(made.name)
        assert (
            len(
                [
                    name
                    for slice in store.slices(made.name, end)
                    for name in store.open_in(made.name, slice.path)
                ]
            )
            == 3
        )
        store.settle(PendingBatch(made.name, end, superseded={first: end.value}), counts=True)
        for again in (store, DeadLetterStore(copy, "p", 2)):
            again.sweep()
            assert again.open_names(made.name) == names - {first}
            assert sum(letter["status"] == "superseded" for letter in again.load().to_pylist()) == 1
            assert again.load().num_rows == 3


def test_inputs_of_a_batch_are_durable_before_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Path] = []
    sync, put = storage.sync_directory, storage.put

    def synced(path: Path) -> None:
        steps.append(path)
        sync(path)

    def replaced(path: Path, data: bytes) -> None:
        assert {tmp_path, tmp_path / "penstock_dead_letters", store.directory} <= set(steps)
        put(path, data)

    monkeypatch.setattr(storage, "sync_directory", synced)
    monkeypatch.setattr(storage, "put", replaced)
    store = DeadLetterStore(tmp_path, "p")
    batch = PendingBatch(PLAIN.name, Position.of(1), is_resync=True)
    store.add_pending(batch)
    assert store.pending_batches() == [batch]


def test_epochs_do_not_wait_while_settled_dead_letters_are_compacted(
    made: MemoryPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass finds nothing to do and reads no more than that needs; the second rewrites the files."""
    store, read = made.box.store, pq.read_table
    made.source.insert(row(1))
    epoch(made)
    for number in range(3):
        made.source.update(key(1), {"amount": BEYOND, "note": Value(str(number))})
        epoch(made)
    store.forget(datetime(1970, 1, 1, tzinfo=UTC))
    looks: list[set[str]] = []

    def watched(path: Path, **given: Any) -> Any:
        with ThreadPoolExecutor(1) as other:
            assert other.submit(store._lock.acquire, timeout=10).result(), "an epoch would wait"
            other.submit(store._lock.release).result()
        found = read(path, **given)
        looks.append(set(found.column_names))
        return found

    monkeypatch.setattr(pq, "read_table", watched)
    store.forget(datetime(1970, 1, 1, tzinfo=UTC))
    assert looks
    assert all(columns == {"status", "settled_at", "refused_at"} for columns in looks)
    store.forget(datetime.now(UTC))
    assert set(DEAD_LETTER_SCHEMA.names) in looks
    monkeypatch.undo()
    assert made.letters("superseded") == []
    assert len(made.letters()) == 1


def test_a_compaction_that_meets_a_disk_error_leaves_no_file_behind(
    made: MemoryPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = made.box.store
    made.source.insert(row(1))
    epoch(made)
    for number in range(2):
        made.source.update(key(1), {"amount": BEYOND, "note": Value(str(number))})
        epoch(made)
    files = set(store.directory.iterdir())

    def fail(_: Path) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "sync_file", fail)
        with pytest.raises(OSError, match="no space"):
            store.forget(datetime.now(UTC))
    assert set(store.directory.iterdir()) == files
    store.forget(datetime.now(UTC))
    assert set(store.directory.iterdir()) != files, "the next attempt compacts them"


@pytest.mark.parametrize("failing", ["sync_file", "sync_directory", "put"])
def test_a_compaction_of_open_dead_letters_that_meets_a_disk_error_leaves_no_file_behind(
    made: MemoryPipeline, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Each attempt has new file names, so a full disk would fill further."""
    made.many = 100
    made.open()
    for number in range(10, 13):
        made.source.insert(row(number, BEYOND))
        epoch(made)
    directory = made.box.store.directory
    files = {path for path in directory.rglob("*") if path.is_file()}
    store = DeadLetterStore(directory.parents[1], "p", 2)

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage, failing, fail)
        with pytest.raises(OSError, match="no space"):
            store.compact(made.name)
    assert {path for path in directory.rglob("*") if path.is_file()} == files
    store.compact(made.name)
    assert {path for path in directory.rglob("*") if path.is_file()} != files, (
        "the next attempt compacts them"
    )
