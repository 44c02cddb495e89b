"""Who needs which part of the log, while tables come, rest and go: a real spool, and a sink that only keeps the books."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from typing_extensions import override

from penstock.errors import PenstockError, SinkRefusedError, SlowTableError
from penstock.pipeline.apply import EpochApplier
from penstock.pipeline.epochs import EpochLog
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.snapshots.shadows import Shadows
from penstock.pipeline.states import TableState, TableStatus
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import ChangedRows, Sink, SnapshotFile, SnapshotPlace, TableChanges, Target
from penstock.sinks.delta.merge import merge_statement
from penstock.spool.consumers import released
from tests.unit.spool.builders import ITEMS, ORDERS, Commit, at, capture, delete_released

FIRST, SECOND = ORDERS.name, ITEMS.name


class Ledger(Sink):
    """Which changes each table has taken in, and up to where."""

    def __init__(self) -> None:
        self.applied: dict[TableName, Position] = {}
        self.taken: dict[TableName, list[tuple[int, int]]] = {}
        self.refuses = False
        self.slow: SlowTableError | None = None
        self.replaced: list[TableName] = []
        self.prepared: list[TableName] = []
        self.cancelled: list[TableName] = []
        self.refuses_preparing = False

    def target(self, schema: TableSchema, position: int) -> Target:
        self.applied[schema.name] = at(position)
        return Target(schema.name, schema.oid, schema.key, pa.schema([]), at(position))

    @override
    def load_target(self, table: TableName) -> Target | None:
        return Target(table, 1, ("id",), pa.schema([]), self.applied.get(table)) if table in self.applied else None

    @override
    def describe(self, table: TableName) -> str:
        return str(table)

    @override
    def tells_apart(self, one: TableName, other: TableName) -> bool:
        return True

    @override
    def begin_snapshot(self, schema: TableSchema, fence: Position) -> SnapshotPlace:
        raise AssertionError

    @override
    def can_resume_snapshot(self, schema: TableSchema, place: SnapshotPlace, files: Sequence[SnapshotFile]) -> bool:
        raise AssertionError

    @override
    def finish_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], fence: Position) -> None:
        raise AssertionError

    @override
    def repair_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], changed: ChangedRows, fence: Position) -> None:
        raise AssertionError

    @override
    def drop(self, table: TableName) -> None:
        self.applied.pop(table, None)

    @override
    def disown(self, table: TableName) -> None:
        self.applied.pop(table, None)

    @override
    def replace(self, table: TableName, shadow: Sink, position: Position) -> None:
        if self.refuses:
            raise SinkRefusedError("no", hint="no")
        self.applied[table] = position
        self.replaced.append(table)

    @override
    def prepare_replace(self, table: TableName, shadow: Sink) -> None:
        if self.refuses_preparing:
            raise SinkRefusedError("no", hint="no")
        self.prepared.append(table)

    @override
    def cancel_replace(self, table: TableName, shadow: Sink) -> None:
        self.cancelled.append(table)

    @override
    def shadow(self, copy: str) -> Sink:
        raise AssertionError

    @override
    def drop_shadows(self) -> None:
        raise AssertionError

    @override
    def version_at(self, table: TableName, position: Position) -> int | None:
        raise AssertionError

    @override
    def read(self, table: TableName, version: int | None = None) -> DataFrame:
        raise AssertionError

    @override
    def slowed(self, table: TableName) -> PenstockError | None:
        return self.slow if table == FIRST else None

    @override
    def apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        self.taken.setdefault(target.table, []).append((self.applied[target.table].value, end.value))
        self.applied[target.table] = end


class House:
    """A spool with a commit of both tables every hundred, a ledger, and the applier between them."""

    def __init__(self, directory: Path) -> None:
        (directory / "lake").mkdir()
        self.spool = directory / "spool"
        capture(self.spool, 0, [[Commit(position, (ORDERS, ITEMS))] for position in range(100, 1001, 100)])
        self.sink = Ledger()
        self.done: list[tuple[TableName, bool]] = []
        self.shadows = Shadows(self.sink, PipelineObserver(), lambda name, is_done: self.done.append((name, is_done)))
        self.applier = EpochApplier(
            self.sink,
            EpochLog(directory / "lake", "p"),
            self.spool,
            consumer="p",
            system="1/1",
            observer=PipelineObserver(),
            shadows=self.shadows,
        )

    @property
    def released(self) -> int:
        return released(self.spool)["p"].value


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def _streaming(position: int) -> TableStatus:
    return TableStatus(TableState.STREAMING, at(position), at(position))


def test_what_a_table_that_is_copied_needs_is_kept_until_an_epoch_has_taken_it_in(house: House) -> None:
    house.applier.adopt({FIRST: house.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    house.applier.apply(at(200))
    house.applier.expect(SECOND)
    house.applier.apply(at(300))
    assert house.released == 200, "before there is a fence"
    house.applier.hold(SECOND, at(400))
    house.applier.apply(at(600))
    assert house.released == 400, "from its fence on"
    assert house.applier.statuses[SECOND].state is TableState.SNAPSHOTTING
    house.applier.enter(house.sink.target(ITEMS, 400))
    assert house.released == 400
    house.applier.apply(at(700))
    assert house.sink.taken[SECOND] == [(400, 700)]
    assert house.released == 700
    assert house.applier.is_level


def test_a_paused_table_keeps_its_changes_and_one_that_is_removed_lets_go_of_them_at_once(house: House) -> None:
    targets = {FIRST: house.sink.target(ORDERS, 100), SECOND: house.sink.target(ITEMS, 100)}
    house.applier.adopt(targets, {FIRST: _streaming(100), SECOND: _streaming(100)})
    house.applier.pause(SECOND)
    house.applier.apply(at(500))
    assert (house.released, house.sink.applied[SECOND]) == (100, at(100))
    house.applier.leave(SECOND)
    house.applier.apply(house.applier.position)  # as on an idle source
    assert house.released == 500
    assert SECOND not in house.applier.statuses


def test_a_filled_table_that_joins_in_the_middle_of_an_epoch_is_not_taken_for_level(house: House) -> None:
    house.applier.adopt({FIRST: house.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    house.applier.rejoin(house.sink.target(ITEMS, 100), paused=False)
    assert house.applier.statuses[SECOND].applied is None, "nobody's until an epoch takes it in"
    house.applier.apply(at(300))
    assert house.sink.taken[SECOND] == [(100, 300)]


def test_a_table_that_is_written_slowly_is_warned_of_once_and_its_status_says_why_until_that_ends(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[PenstockError] = []
    monkeypatch.setattr(PipelineObserver, "warned", lambda _, warning: warnings.append(warning))
    targets = {FIRST: house.sink.target(ORDERS, 100), SECOND: house.sink.target(ITEMS, 100)}
    house.applier.adopt(targets, {FIRST: _streaming(100), SECOND: _streaming(100)})
    house.sink.slow = SlowTableError("it has the feature clustering", hint="drop it")
    for end in (200, 300):
        house.applier.apply(at(end))
        status = house.applier.statuses[FIRST]
        assert (status.state, status.reason, status.remedy) == (
            TableState.STREAMING,
            "PEN-4012: it has the feature clustering",
            "drop it",
        )
    assert house.applier.last is not None
    assert house.applier.last.tables[FIRST].reason, "it is recorded, where penstock status finds it"
    assert house.applier.statuses[SECOND].reason is None
    assert warnings == [house.sink.slow]
    house.sink.slow = None
    house.applier.apply(at(400))
    assert house.applier.statuses[FIRST].reason is None


def test_a_table_whose_ground_is_gone_fails_alone(house: House) -> None:
    house.applier.adopt({FIRST: house.sink.target(ORDERS, 500)}, {FIRST: _streaming(500)})
    house.applier.apply(at(600))
    delete_released(house.spool)
    house.applier.expect(SECOND)
    house.applier.enter(house.sink.target(ITEMS, 100))
    house.applier.apply(at(700))
    assert house.applier.statuses[SECOND].state is TableState.FAILED
    assert house.sink.applied[FIRST] == at(700)


def test_an_epoch_that_fails_leaves_no_table_under_way(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {FIRST: house.sink.target(ORDERS, 100), SECOND: house.sink.target(ITEMS, 100)}
    house.applier.adopt(targets, {FIRST: _streaming(100), SECOND: _streaming(100)})
    begun, ended = threading.Event(), threading.Event()

    def apply(target: Target, _changes: TableChanges, _end: Position) -> None:
        if target.table == FIRST:
            assert begun.wait(10)
            raise RuntimeError("broken")
        begun.set()
        time.sleep(0.3)
        ended.set()

    monkeypatch.setattr(house.sink, "apply", apply)
    with pytest.raises(RuntimeError, match="broken"):
        house.applier.apply(at(200))
    assert ended.is_set(), "another attempt would have met this one"


def test_a_copy_of_a_table_that_was_removed_meanwhile_is_no_ones(house: House) -> None:
    house.applier.adopt({FIRST: house.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    house.applier.expect(SECOND)
    house.applier.leave(SECOND)
    house.applier.apply(at(200))
    house.applier.hold(SECOND, at(200))
    house.applier.enter(house.sink.target(ITEMS, 200))
    house.applier.apply(at(300))
    assert SECOND not in house.applier.statuses
    assert house.sink.load_target(SECOND) is None
    assert house.released == 300


def test_a_copy_that_arrives_when_its_table_has_failed_is_no_ones(house: House) -> None:
    """As one does that was removed while it was copied, and added again: nobody published it meanwhile."""
    house.applier.adopt({FIRST: house.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    house.applier.expect(SECOND)
    house.applier.enter(house.sink.target(ITEMS, 200))
    house.applier.admit(SECOND, TableStatus.failed(SinkRefusedError("no", hint="no"), None))
    house.applier.apply(at(300))
    assert house.applier.statuses[SECOND].state is TableState.FAILED
    assert house.sink.load_target(SECOND) is None
    assert SECOND not in house.sink.taken


def test_what_follows_a_removal_waits_until_no_epoch_touches_the_table(house: House) -> None:
    house.applier.adopt({FIRST: house.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    house.applier.leave(FIRST, lambda: house.sink.disown(FIRST))
    assert house.sink.applied[FIRST] == at(100)
    house.applier.apply(at(200))
    assert (house.sink.applied, house.sink.taken) == ({}, {})


def test_a_table_that_comes_back_takes_back_what_was_released_after_it(house: House) -> None:
    house.applier.adopt({FIRST: house.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    house.applier.apply(at(500))
    assert house.released == 500
    house.applier.rejoin(house.sink.target(ITEMS, 300), paused=True)
    assert house.released == 300
    house.applier.apply(at(600))
    assert house.released == 300


def test_a_shadow_takes_its_targets_place_instead_of_an_epoch_and_is_done_when_that_is_recorded(house: House) -> None:
    house.applier.adopt({FIRST: house.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    shadow = Ledger()
    house.shadows.begin(FIRST, shadow, house.applier.position)
    house.shadows.hold(FIRST, at(200))
    house.applier.apply(at(400))
    assert house.released <= 200
    house.shadows.enter(shadow.target(ORDERS, 200))
    house.applier.apply(at(500))
    assert shadow.taken[FIRST] == [(200, 500)]
    assert house.sink.taken[FIRST] == [(100, 400)]
    assert house.sink.applied[FIRST] == at(500)
    assert house.done == [(FIRST, True)]
    assert (house.released, house.shadows.is_busy) == (500, False)


def test_a_target_whose_shadow_cannot_take_its_place_has_its_epoch(house: House) -> None:
    house.applier.adopt({FIRST: house.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    shadow = Ledger()
    house.sink.refuses = True
    house.shadows.begin(FIRST, shadow, house.applier.position)
    house.shadows.enter(shadow.target(ORDERS, 200))
    house.applier.apply(at(500))
    assert house.sink.taken[FIRST] == [(100, 500)]
    assert house.done == [(FIRST, False)]


def test_a_shadow_of_a_table_that_was_removed_takes_nobodys_place(house: House) -> None:
    house.applier.adopt({FIRST: house.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    shadow = Ledger()
    house.shadows.begin(FIRST, shadow, house.applier.position)
    house.shadows.abandon(FIRST)
    house.shadows.hold(FIRST, at(200))
    house.shadows.enter(shadow.target(ORDERS, 200))
    house.applier.apply(at(500))
    assert house.sink.taken[FIRST] == [(100, 500)]
    assert house.released == 500


def test_nothing_is_merged_without_a_key() -> None:
    with pytest.raises(SinkRefusedError, match="without a key"):
        merge_statement("place", "view", pa.schema([("a", pa.int32())]), (), keeps=False)
