"""Dead letters of a table and of the shadow that replaces it: which count depends on the result of the
swap.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.change import ChangeCounts
from penstock.pipeline.dead_letters.files import CHANGES_SUFFIX, LETTERS_SUFFIX
from penstock.pipeline.dead_letters.rejections import DEAD_LETTER_SCHEMA
from penstock.pipeline.dead_letters.store import PendingBatch
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.base import TableChanges
from penstock.sinks.modes import Mode
from penstock.spool.reader import SpoolReader
from tests.support.memory_pipeline import (
    BEYOND,
    LONG,
    Died,
    ListSink,
    MemoryPipeline,
    epoch,
    memory_pipeline,
    row,
)
from tests.support.pipeline.epochs import open_resyncs
from tests.support.sinks.history import PLAIN
from tests.support.sinks.source import Source


@pytest.fixture
def made() -> Iterator[MemoryPipeline]:
    """The table is at the end of the log, and has a dead letter for row 4."""
    with memory_pipeline(Source(PLAIN, []), Mode.MIRROR, []) as opened:
        opened.source.insert(row(4, BEYOND))
        epoch(opened)
        yield opened


class Swap:
    """A copy at the table's position, in which row 9 was rejected."""

    def __init__(self, made: MemoryPipeline) -> None:
        self.made = made
        self.done: list[tuple[TableName, bool]] = []
        self.end = made.sink.applied[made.name]
        self.stem = _letter_of_copy(made, self.end)
        self.resyncs = open_resyncs(
            made.sink,
            made.root,
            dead_letters=made.box,
            on_done=lambda name, failure: self.done.append((name, failure is None)),
        )
        self.shadow = ListSink(PLAIN, Mode.MIRROR, [], self.end.value)
        self.shadow.copy = "second"
        self.resyncs.begin(made.name, self.shadow, self.end)
        made.box.hold_for_resync(made.name, (self.stem,))
        self.resyncs.add_copied(self.shadow.load_target(made.name))
        self.resyncs.collect_copies()

    def go(self, fault: str = "") -> list[TableName]:
        """The tables that are known to have been swapped."""
        self.made.sink.faults = iter([fault])
        return list(self.resyncs.swap(SpoolReader(self.made.root / "spool"), self.end))


def _letter_of_copy(made: MemoryPipeline, end: Position) -> str:
    """Like the existing one, for another row."""
    store = made.box.store
    stem = store.new_stem(made.name, end)
    (letters,), (changes,) = (
        list(store.directory.glob(pattern)) for pattern in ("*.parquet", "_changes/*.parquet")
    )
    (letter,) = pq.read_table(letters, schema=DEAD_LETTER_SCHEMA, partitioning=None).to_pylist()
    other = {**letter, "key": '{"id":9}', "commit_version": letter["commit_version"] - 1}
    pq.write_table(
        pa.Table.from_pylist([other], DEAD_LETTER_SCHEMA), store.pending / f"{stem}{LETTERS_SUFFIX}"
    )
    shutil.copy(changes, store.pending / f"{stem}{CHANGES_SUFFIX}")
    return stem


def keys(made: MemoryPipeline) -> list[str]:
    return [letter["key"] for letter in made.letters()]


def test_C08_dead_letters_stay_open_if_the_swap_of_the_copy_is_refused(made: MemoryPipeline) -> None:
    swap = Swap(made)
    swap.go("refused")
    assert swap.done == [(made.name, False)]
    assert keys(made) == ['{"id":4}']
    made.source.insert(row(5, LONG))
    epoch(made)
    assert keys(made) == ['{"id":4}'], "and with every epoch after it"
    made.open()
    assert keys(made) == ['{"id":4}']
    assert not list(made.box.store.pending.glob("*.parquet")), "of the copy nothing is left"


@pytest.mark.parametrize(("fault", "expected"), [("before", '{"id":4}'), ("after", '{"id":9}')])
def test_C08_after_a_kill_the_target_tells_whether_the_copy_took_its_place_though_both_are_as_far(
    made: MemoryPipeline, fault: str, expected: str
) -> None:
    swap = Swap(made)
    with pytest.raises(Died):
        swap.go(fault)
    made.open()
    assert keys(made) == [expected]
    made.source.insert(row(5, LONG))
    epoch(made)
    assert keys(made) == [expected]


def test_C08_dead_letters_of_a_copy_outlive_a_repeated_swap(
    made: MemoryPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pipeline.error_policy.FIRST_SECONDS", 0.0)
    swap = Swap(made)
    swap.go("failed")
    assert keys(made) == ['{"id":4}']
    made.box.screen_resync(
        made.sink, swap.shadow.load_target(made.name), TableChanges(made.name, (), ChangeCounts()), swap.end
    )
    assert keys(made) == ['{"id":4}'], "a second attempt is no proof of the first"
    assert len(made.box.store.pending_slices([swap.stem], swap.end)) == 1
    swap.go()
    assert keys(made) == ['{"id":9}']


def test_C08_a_swap_that_failed_after_its_shadow_left_out_a_refused_row_is_repeated_with_another_copy(
    made: MemoryPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pipeline.error_policy.FIRST_SECONDS", 0.0)
    swap = Swap(made)
    made.source.insert(row(5, BEYOND))
    epoch(made)
    swap.end = made.sink.applied[made.name]
    swap.go("failed")
    swap.go()
    assert made.sink.copy == "first", "that shadow lacks row 5 and has no dead letter for it"
    assert keys(made) == ['{"id":4}', '{"id":5}']
    assert not swap.done, "the table is still to be resynced"
    assert swap.resyncs.may_begin(made.name)


def test_C08_a_copy_that_took_the_table_s_place_counts_though_the_answer_was_lost(
    made: MemoryPipeline,
) -> None:
    swap = Swap(made)
    assert swap.go("lost") == [made.name]
    assert keys(made) == ['{"id":9}']


def test_a_posting_of_an_earlier_version_is_decided_by_position(made: MemoryPipeline) -> None:
    end = made.sink.applied[made.name]
    data = (
        PendingBatch(made.name, end, is_resync=True, copy="second").dump().replace(b', "copy": "second"', b"")
    )
    batch = PendingBatch.parse(data, made.root)
    assert batch.copy is None
    assert batch.counts_for(made.sink.load_target(made.name))
