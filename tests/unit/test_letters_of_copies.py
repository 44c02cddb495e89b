"""Letters of a table and of the copy that is to take its place: which of them count is what the target is in the end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.change import ChangeCounts
from penstock.pipeline.letters.folding import CHANGES_SUFFIX, LETTERS_SUFFIX
from penstock.pipeline.letters.letter import LETTERS
from penstock.pipeline.letters.store import Posting
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.snapshots.shadows import Shadows
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.base import TableChanges
from penstock.sinks.layout import Mode
from penstock.spool.reader import SpoolReader
from tests.integration.sinks.history import PLAIN
from tests.integration.sinks.source import Source
from tests.letter_office import Died, ListSink, Office, office
from tests.unit.test_letters import BEYOND, LONG, epoch, row


@pytest.fixture
def made() -> Iterator[Office]:
    """The table is at the end of the log, and has a letter: of row 4."""
    with office(Source(PLAIN, []), Mode.MIRROR, []) as opened:
        opened.source.insert(row(4, BEYOND))
        epoch(opened)
        yield opened


class Swap:
    """A copy of the table that is as far as the table is, of which row 9 was refused."""

    def __init__(self, made: Office) -> None:
        self.made = made
        self.done: list[tuple[TableName, bool]] = []
        self.end = made.sink.applied[made.name]
        self.stem = _letter_of_copy(made, self.end)
        self.shadows = Shadows(made.sink, PipelineObserver(), lambda name, is_done: self.done.append((name, is_done)), letters=made.box)
        self.shadow = ListSink(PLAIN, Mode.MIRROR, [], self.end.value)
        self.shadow.copy = "second"
        self.shadows.begin(made.name, self.shadow, self.end)
        made.box.keep_for_shadow(made.name, (self.stem,))
        self.shadows.enter(self.shadow.load_target(made.name))
        self.shadows.take_in()

    def go(self, fault: str = "") -> None:
        self.made.sink.faults = iter([fault])
        self.shadows.swap(SpoolReader(self.made.root / "spool"), self.end)


def _letter_of_copy(made: Office, end: Position) -> str:
    """As the one that is there, of another row."""
    store = made.box.store
    stem = store.new_stem(made.name, end)
    (letters,), (changes,) = (list(store.directory.glob(pattern)) for pattern in ("*.parquet", "_changes/*.parquet"))
    (letter,) = pq.read_table(letters, schema=LETTERS, partitioning=None).to_pylist()
    other = {**letter, "key": '{"id":9}', "commit_version": letter["commit_version"] - 1}
    pq.write_table(pa.Table.from_pylist([other], LETTERS), store.pending / f"{stem}{LETTERS_SUFFIX}")
    shutil.copy(changes, store.pending / f"{stem}{CHANGES_SUFFIX}")
    return stem


def keys(made: Office) -> list[str]:
    return [letter["key"] for letter in made.letters()]


def test_C08_letters_stay_open_if_the_copy_that_was_to_take_the_table_s_place_is_refused(made: Office) -> None:
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
    made: Office, fault: str, expected: str
) -> None:
    swap = Swap(made)
    with pytest.raises(Died):
        swap.go(fault)
    made.open()
    assert keys(made) == [expected]
    made.source.insert(row(5, LONG))
    epoch(made)
    assert keys(made) == [expected]


def test_C08_letters_of_a_copy_outlive_an_attempt_to_put_it_in_place_that_is_repeated(
    made: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pipeline.error_policy.FIRST_SECONDS", 0.0)
    swap = Swap(made)
    swap.go("failed")
    assert keys(made) == ['{"id":4}']
    made.box.renew(made.sink, swap.shadow.load_target(made.name), TableChanges(made.name, (), ChangeCounts()), swap.end)
    assert keys(made) == ['{"id":4}'], "a second attempt is no proof of the first"
    assert len(made.box.store.pending_slices([swap.stem], swap.end)) == 1
    swap.go()
    assert keys(made) == ['{"id":9}']


def test_C08_a_swap_that_failed_after_its_shadow_left_out_a_refused_row_is_repeated_with_another_copy(
    made: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pipeline.error_policy.FIRST_SECONDS", 0.0)
    swap = Swap(made)
    made.source.insert(row(5, BEYOND))
    epoch(made)
    swap.end = made.sink.applied[made.name]
    swap.go("failed")
    swap.go()
    assert made.sink.copy == "first", "that shadow has not got row 5, and no letter of it"
    assert keys(made) == ['{"id":4}', '{"id":5}']
    assert not swap.done, "the table is still to be resynced"
    assert swap.shadows.may_begin(made.name)


def test_C08_a_copy_that_took_the_table_s_place_counts_though_the_answer_was_lost(made: Office) -> None:
    swap = Swap(made)
    swap.go("lost")
    assert swap.done == [(made.name, False)]
    assert keys(made) == ['{"id":9}']


def test_a_posting_of_an_earlier_version_is_decided_by_position(made: Office) -> None:
    end = made.sink.applied[made.name]
    data = Posting(made.name, end, anew=True, copy="second").dump().replace(b', "copy": "second"', b"")
    posting = Posting.parse(data, made.root)
    assert posting.copy is None
    assert posting.counts_for(made.sink.load_target(made.name))
