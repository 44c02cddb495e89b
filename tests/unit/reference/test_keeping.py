"""A reference table kept in a directory: over the example's ledger, without server or Spark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pytest
from typing_extensions import override

from examples.list_reference import COLUMNS, Ledger, ListReference
from penstock.contracts.connector import SourceCheckpoint
from penstock.contracts.reference import PositionedReferenceTable, as_truncate
from penstock.errors import (
    ConfigError,
    EnvironmentUnfitError,
    ReferenceBehindError,
    ReferenceBusyError,
    ReferencePastError,
    ReferenceStoreError,
    ReferenceTableError,
    ReferenceUnreadableError,
    SnapshotLostError,
)
from penstock.position import Position
from penstock.reference.history import ReferenceHistory
from penstock.reference.join import ReferenceCopy
from penstock.reference.keeper import KeptReference
from penstock.reference.store import load_state
from penstock.schema import TableName
from penstock.testing.capture_conformance import delete, upsert
from penstock.testing.streams import wait_for

TABLE = TableName("public", "notes")
DEADLINE_SECONDS = 30.0


class PositionedList(ListReference, PositionedReferenceTable):
    """A ledger with transaction positions, and a reader that may still need the past."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.settled_at = 0
        self.confirmed: list[SourceCheckpoint] = []
        self.failures: list[Exception] = []

    @override
    def reached(self) -> Position:
        return Position.of(self._version or 0)

    @override
    def settled(self) -> Position:
        return Position.of(self.settled_at)

    @override
    def confirm(self, checkpoint: SourceCheckpoint) -> None:
        self.confirmed.append(checkpoint)

    @override
    def poll_changes(self) -> pa.RecordBatch | None:
        if self.failures:
            raise self.failures.pop(0)
        return super().poll_changes()


@pytest.fixture
def ledger() -> Ledger:
    made = Ledger()
    made.commit(upsert(TABLE, 1, "one"), upsert(TABLE, 2, "two"))
    return made


@contextmanager
def kept(
    ledger: Ledger, directory: Path, *, as_of_commit: bool = True
) -> Iterator[tuple[KeptReference, PositionedList]]:
    source = PositionedList(ledger)
    with KeptReference(source, directory, as_of_commit=as_of_commit) as reference:
        yield reference, source


def copy_of(reference: KeptReference) -> ReferenceCopy:
    return ReferenceCopy(reference.directory, reference.identity)


def notes_at(history: ReferenceHistory, version: int) -> dict[int, str | None]:
    return {row["id"]: row["note"] for row in history.rows_at(version).to_pylist()}


def test_every_version_is_kept_unchanged(ledger: Ledger, tmp_path: Path) -> None:
    with kept(ledger, tmp_path) as (reference, _):
        copy = copy_of(reference)
        assert notes_at(copy.newest(), 1) == {1: "one", 2: "two"}
        ledger.commit(upsert(TABLE, 1, "eins"), delete(TABLE, 2))
        ledger.commit(upsert(TABLE, 2, "again"))
        history = copy.reaching(3, DEADLINE_SECONDS)
        assert notes_at(history, 1) == {1: "one", 2: "two"}
        assert notes_at(history, 2) == {1: "eins"}
        assert notes_at(history, 3) == {1: "eins", 2: "again"}


def test_next_process_resumes_where_the_last_one_stopped(ledger: Ledger, tmp_path: Path) -> None:
    with kept(ledger, tmp_path) as (reference, _):
        ledger.commit(upsert(TABLE, 1, "eins"))
        copy_of(reference).reaching(2, DEADLINE_SECONDS)
        identity = reference.identity
    ledger.commit(delete(TABLE, 2))
    with kept(ledger, tmp_path) as (reference, source):
        assert source._snapshot is None, "nothing is copied again"
        assert reference.identity == identity
        assert notes_at(copy_of(reference).reaching(3, DEADLINE_SECONDS), 3) == {1: "eins"}


def test_confirmed_rows_are_in_the_directory(ledger: Ledger, tmp_path: Path) -> None:
    with kept(ledger, tmp_path) as (reference, source):
        ledger.commit(upsert(TABLE, 3, "three"))
        copy_of(reference).reaching(2, DEADLINE_SECONDS)
        wait_for(
            lambda: source.confirmed[-1].offsets == {"version": "2"},
            "a confirmation",
            lambda: source.confirmed,
            DEADLINE_SECONDS,
        )
        state = load_state(tmp_path)
        assert state is not None
        assert state.checkpoint == source.confirmed[-1]


def test_stored_checkpoint_is_confirmed_at_the_next_start(ledger: Ledger, tmp_path: Path) -> None:
    with kept(ledger, tmp_path) as (reference, _):
        stored = load_state(reference.directory)
    assert stored is not None
    with kept(ledger, tmp_path) as (_, source):
        assert source.confirmed == [stored.checkpoint], "restoring a checkpoint does not confirm it"


def test_long_history_is_folded_as_far_as_no_reader_needs_it(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.reference.keeper._MOST_FILES", 5)
    monkeypatch.setattr("penstock.reference.keeper._FEWEST_FOLDED_ROWS", 3)
    with kept(ledger, tmp_path) as (reference, source):
        copy = copy_of(reference)
        old = copy.newest()
        for number in range(2, 24):
            source.settled_at = number // 2
            ledger.commit(upsert(TABLE, number, "x"))
            copy_of(reference).reaching(number, DEADLINE_SECONDS)
        history = copy.reaching(23, DEADLINE_SECONDS)
        fresh = copy_of(reference).reaching(23, DEADLINE_SECONDS)
        assert 3 < fresh.floor <= 23 // 2, "folded, and never beyond the settled position"
        state = load_state(tmp_path)
        assert state is not None
        assert len(state.changes) <= 7
        for version in range(fresh.floor, 24):
            assert notes_at(history, version) == notes_at(fresh, version)
            assert len(notes_at(fresh, version)) == version
        with pytest.raises(ReferencePastError):
            fresh.rows_at(fresh.floor - 1)
        assert old.floor == 1


def test_without_a_past_everything_is_folded(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.reference.keeper._MOST_FILES", 3)
    with kept(ledger, tmp_path, as_of_commit=False) as (reference, _):
        for number in range(2, 12):
            ledger.commit(upsert(TABLE, number, "x"))
            copy_of(reference).reaching(number, DEADLINE_SECONDS)
        state = load_state(tmp_path)
        assert state is not None
        assert state.floor > 1
        assert len(notes_at(copy_of(reference).newest(), state.reached)) == 11


def test_task_that_waits_for_a_version_that_does_not_come_says_so(ledger: Ledger, tmp_path: Path) -> None:
    with kept(ledger, tmp_path) as (reference, _), pytest.raises(ReferenceBehindError):
        copy_of(reference).reaching(2, 0.1)


def test_trouble_that_passes_is_waited_out(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.reference.keeper._FIRST_PAUSE_SECONDS", 0.01)
    with kept(ledger, tmp_path) as (reference, source):
        source.failures += [ReferenceUnreadableError("for a moment")] * 2
        ledger.commit(upsert(TABLE, 1, "eins"))
        assert notes_at(copy_of(reference).reaching(2, DEADLINE_SECONDS), 2) == {1: "eins", 2: "two"}
        reference.check()


def test_transaction_that_trouble_breaks_off_is_kept_whole(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.reference.keeper._FIRST_PAUSE_SECONDS", 0.01)

    class Stumbling(PositionedList):
        """Cannot be read once, in the middle of the second transaction."""

        has_stumbled = False

        @override
        def poll_changes(self) -> pa.RecordBatch | None:
            if len(self._waiting) == 2 and not self.has_stumbled:
                self.has_stumbled = self._ledger.is_shut = True
            try:
                return super().poll_changes()
            finally:
                self._ledger.is_shut = False

    source = Stumbling(ledger)
    with KeptReference(source, tmp_path, as_of_commit=True) as reference:
        ledger.commit(*(upsert(TABLE, number, "new") for number in range(1, 6)))
        assert notes_at(copy_of(reference).reaching(2, DEADLINE_SECONDS), 2) == dict.fromkeys(
            range(1, 6), "new"
        )
        state = load_state(tmp_path)
        assert state is not None
        assert state.changes_rows == 5, "each change once"
    assert source.has_stumbled


def test_copy_that_is_lost_on_the_way_begins_again(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.reference.keeper._FIRST_PAUSE_SECONDS", 0.01)
    ledger.commit(*(upsert(TABLE, number, "x") for number in range(35)))

    class Losing(PositionedList):
        losses = 0
        most = 2

        @override
        def poll_snapshot(self) -> pa.RecordBatch | None:
            if self._snapshot is not None and self.losses < self.most:
                self.losses += 1
                self._snapshot = None
                self._ledger.commit(delete(TABLE, self.losses))
                raise SnapshotLostError("gone")
            is_again = self._snapshot is None and self.losses > 0
            batch = super().poll_snapshot()
            if not is_again or batch is None:
                return batch
            assert self._snapshot is not None
            self._snapshot = chain([batch], self._snapshot)
            return as_truncate(COLUMNS, self._fence)

    with KeptReference(Losing(ledger), tmp_path, as_of_commit=True) as reference:
        history = copy_of(reference).newest()
        assert notes_at(history, 4) == {number: "x" for number in range(35) if number not in (1, 2)}

    class AlwaysLosing(Losing):
        most = 1000

    with pytest.raises(SnapshotLostError):
        KeptReference(AlwaysLosing(ledger), tmp_path / "other").start()


def test_query_that_outlives_the_reference_table_gets_an_error(ledger: Ledger, tmp_path: Path) -> None:
    with kept(ledger, tmp_path) as (reference, _):
        copy = copy_of(reference)
        copy.newest()
    with pytest.raises(ReferenceBehindError, match="no longer kept current"):
        copy.newest()
    with pytest.raises(ReferenceBehindError, match="no longer kept current"):
        copy.reaching(2, DEADLINE_SECONDS)
    assert notes_at(copy.reaching(1, 0), 1) == {1: "one", 2: "two"}, "known rows stay"
    with kept(ledger, tmp_path):
        copy.newest()


def test_the_error_that_ends_the_copy_is_raised_by_tasks_and_driver(ledger: Ledger, tmp_path: Path) -> None:
    with kept(ledger, tmp_path) as (reference, source):
        source.failures.append(ReferenceStoreError("it is over", hint="do this"))
        with pytest.raises(ReferenceStoreError, match="it is over") as raised:
            copy_of(reference).reaching(2, DEADLINE_SECONDS)
        assert raised.value.hint == "do this"
        with pytest.raises(ReferenceStoreError, match="it is over"):
            reference.check()
    with kept(ledger, tmp_path) as (reference, _):
        copy_of(reference).newest()


def test_two_keepers_of_one_directory_are_refused(ledger: Ledger, tmp_path: Path) -> None:
    with kept(ledger, tmp_path), pytest.raises(ReferenceBusyError), kept(ledger, tmp_path):
        pass


def test_recreated_copy_is_not_taken_for_the_old_one(ledger: Ledger, tmp_path: Path) -> None:
    with kept(ledger, tmp_path) as (reference, _):
        copy = copy_of(reference)
        copy.newest()
    (tmp_path / "reference.json").unlink()
    with kept(ledger, tmp_path), pytest.raises(ReferenceStoreError, match="copied again"):
        copy.newest()


def test_directory_that_an_executor_does_not_reach_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnfitError, match="nowhere"):
        ReferenceCopy(tmp_path / "nowhere", "x").newest()


def test_indistinguishable_rows_are_refused_at_the_start(ledger: Ledger, tmp_path: Path) -> None:
    class Twice(PositionedList):
        @override
        def poll_snapshot(self) -> pa.RecordBatch | None:
            batch = super().poll_snapshot()
            return None if batch is None else pa.concat_batches([batch, batch])

    with pytest.raises(ReferenceTableError, match="same id"):
        KeptReference(Twice(ledger), tmp_path).start()
    assert load_state(tmp_path) is None


def test_table_without_positions_has_no_commits_to_join_at(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ListReference"):
        KeptReference(ListReference(ledger), tmp_path, as_of_commit=True)
    with KeptReference(ListReference(ledger), tmp_path) as reference:
        ledger.commit(upsert(TABLE, 3, "three"))
        assert len(notes_at(copy_of(reference).reaching(2, DEADLINE_SECONDS), 2)) == 3
