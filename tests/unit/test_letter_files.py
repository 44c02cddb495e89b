"""Files of letters: what a disk that fails, a power failure or a look at many of them may do."""

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

from penstock.pipeline.letters.letter import LETTERS
from penstock.pipeline.letters.store import LetterStore, Posting
from penstock.position import Position
from penstock.sinks.layout import Mode
from penstock.spool import storage
from tests.integration.sinks.history import PLAIN
from tests.integration.sinks.source import Source, Value
from tests.letter_office import Died, Office, dying_writes, office
from tests.unit.test_letters import BEYOND, epoch, key, row


@pytest.fixture
def made() -> Iterator[Office]:
    """An empty table."""
    with office(Source(PLAIN, []), Mode.MIRROR, []) as opened:
        yield opened


def test_C08_a_letter_that_is_settled_after_the_disk_failed_while_files_became_one_stays_settled(made: Office, tmp_path: Path) -> None:
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
        store = LetterStore(copy, "p", 2)
        with dying_writes(after), suppress(Died):
            store.fold(made.name)
        assert len([name for slice in store.slices(made.name, end) for name in store.open_in(made.name, slice.path)]) == 3
        store.settle(Posting(made.name, end, superseded={first: end.value}), counts=True)
        for again in (store, LetterStore(copy, "p", 2)):
            again.sweep()
            assert again.open_names(made.name) == names - {first}
            assert sum(letter["status"] == "superseded" for letter in again.load().to_pylist()) == 1
            assert again.load().num_rows == 3


def test_what_leads_to_a_posting_is_durable_before_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Path] = []
    sync, replace_bytes = storage.sync_directory, storage.replace_bytes

    def synced(path: Path) -> None:
        steps.append(path)
        sync(path)

    def replaced(path: Path, data: bytes) -> None:
        assert {tmp_path, tmp_path / "penstock_dead_letters", store.directory} <= set(steps)
        replace_bytes(path, data)

    monkeypatch.setattr(storage, "sync_directory", synced)
    monkeypatch.setattr(storage, "replace_bytes", replaced)
    store = LetterStore(tmp_path, "p")
    posting = Posting(PLAIN.name, Position.of(1), anew=True)
    store.post(posting)
    assert store.postings() == [posting]


def test_epochs_do_not_wait_while_settled_letters_are_looked_at(made: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look finds nothing to do, and reads no more than it needs for that; the second writes all that there is anew."""
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
    assert set(LETTERS.names) in looks
    monkeypatch.undo()
    assert made.letters("superseded") == []
    assert len(made.letters()) == 1
