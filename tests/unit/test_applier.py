"""Who needs which part of the log, while tables come, rest and go: a real spool, and a sink that only keeps the books."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from typing_extensions import override

from penstock.errors import PenstockError, SinkError, SinkRefusedError, SlotLostError, SlowTableError
from penstock.pipeline import error_policy
from penstock.pipeline.apply import EpochApplier
from penstock.pipeline.epochs import EpochLog
from penstock.pipeline.error_policy import TableRetries
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
        self.oids: dict[TableName, int] = {}

    def target(self, schema: TableSchema, position: int) -> Target:
        self.applied[schema.name], self.oids[schema.name] = at(position), schema.oid
        return Target(schema.name, schema.oid, schema.key, pa.schema([]), at(position))

    @override
    def load_target(self, table: TableName) -> Target | None:
        return Target(table, self.oids.get(table, 1), ("id",), pa.schema([]), self.applied.get(table)) if table in self.applied else None

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


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, house: House) -> None:
        self.now = 0.0
        house.applier._retries._clock = lambda: self.now

    def pass_longest(self) -> None:
        self.now += 2 * error_policy.LONGEST_SECONDS


@pytest.fixture
def clock(house: House) -> Clock:
    return Clock(house)


def _break(house: House, monkeypatch: pytest.MonkeyPatch, errors: Mapping[TableName, Exception]) -> None:
    """Applying changes to these tables raises; to others it works."""

    def apply(target: Target, changes: TableChanges, end: Position) -> None:
        if target.table in errors:
            raise errors[target.table]
        Ledger.apply(house.sink, target, changes, end)

    monkeypatch.setattr(house.sink, "apply", apply)


def _both(house: House) -> None:
    targets = {FIRST: house.sink.target(ORDERS, 100), SECOND: house.sink.target(ITEMS, 100)}
    house.applier.adopt(targets, {FIRST: _streaming(100), SECOND: _streaming(100)})


def test_a_table_that_backs_off_holds_up_no_other_and_takes_in_later_what_was_kept_for_it(
    house: House, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    _both(house)
    _break(house, monkeypatch, {FIRST: RuntimeError("the row is 'secret'")})
    for end in (200, 300):
        house.applier.apply(at(end))
    status = house.applier.statuses[FIRST]
    assert (status.state, status.applied) == (TableState.RETRYING, at(100))
    assert (house.sink.applied[SECOND], house.applier.position, house.released) == (at(300), at(300), 100)
    recorded = house.applier.last
    assert recorded is not None
    assert recorded.tables[FIRST].reason == status.reason
    assert "RuntimeError" in (status.reason or "")
    assert "secret" not in (status.reason or "")
    assert status.remedy
    monkeypatch.undo()
    house.applier.apply(at(400))
    assert house.sink.applied[FIRST] == at(100), "its next attempt is not due"
    clock.pass_longest()
    house.applier.apply(at(400))
    assert house.sink.taken[FIRST] == [(100, 400)]
    assert (house.applier.statuses[FIRST].state, house.released) == (TableState.STREAMING, 400)


@pytest.mark.parametrize(
    ("error", "attempts", "code", "words"),
    [
        (RuntimeError("the row is 'secret'"), error_policy.USUAL_ATTEMPTS, "PEN-1423", "RuntimeError"),
        (SinkError("it is away"), error_policy.USUAL_ATTEMPTS, "PEN-3000", "it is away"),
        (FileNotFoundError(2, "No such file", "/lake/a/part-1.parquet"), error_policy.FILE_ATTEMPTS, "PEN-3006", "/lake/a/part-1.parquet"),
        (OSError(errno.ENOSPC, "No space left on device"), error_policy.PATIENT_ATTEMPTS, "PEN-3000", "disk is full"),
    ],
    ids=["unknown", "declared", "lost-file", "full-disk"],
)
def test_a_table_that_keeps_failing_fails_alone_after_its_attempts_with_cause_and_remedy(
    house: House, clock: Clock, monkeypatch: pytest.MonkeyPatch, *, error: Exception, attempts: int, code: str, words: str
) -> None:
    monkeypatch.setattr("penstock.pipeline.bringing._QUICK_PAUSE_SECONDS", 0.0)
    _both(house)
    _break(house, monkeypatch, {FIRST: error})
    states = []
    for _ in range(attempts):
        house.applier.apply(at(200))
        states.append(house.applier.statuses[FIRST].state)
        clock.pass_longest()
    assert states == [*[TableState.RETRYING] * (attempts - 1), TableState.FAILED]
    status = house.applier.statuses[FIRST]
    assert (status.reason or "").startswith(code)
    assert words in (status.reason or "")
    assert "secret" not in (status.reason or "")
    assert f"penstock tables resync CONFIG {FIRST}" in (status.remedy or "")
    house.applier.apply(at(300))
    assert (house.sink.applied[SECOND], house.released) == (at(300), 300)


def test_tables_that_fail_together_while_no_other_succeeds_are_given_more_time(
    house: House, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when all executors are lost: none of the tables is at fault."""
    _both(house)
    _break(house, monkeypatch, {FIRST: RuntimeError("no"), SECOND: RuntimeError("no")})
    for _ in range(2 * error_policy.USUAL_ATTEMPTS):
        house.applier.apply(at(200))
        clock.pass_longest()
    assert {status.state for status in house.applier.statuses.values()} == {TableState.RETRYING}


def test_an_attempt_after_a_commit_whose_answer_was_lost_reads_from_where_the_target_is(
    house: House, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    _both(house)
    rows: list[int] = []

    def apply(target: Target, changes: TableChanges, end: Position) -> None:
        Ledger.apply(house.sink, target, changes, end)
        if target.table == FIRST:
            rows.append(changes.counts.rows)
            if len(rows) == 1:
                raise RuntimeError("the answer was lost")

    monkeypatch.setattr(house.sink, "apply", apply)
    house.applier.apply(at(200))
    assert house.applier.statuses[FIRST].applied == at(100), "its answer was lost"
    clock.pass_longest()
    house.applier.apply(at(300))
    assert rows[1] == rows[0], "one commit each"
    assert house.applier.statuses[FIRST].state is TableState.STREAMING


@pytest.mark.parametrize("end", [200, 300])
def test_an_attempt_that_finds_nothing_left_to_apply_ends_the_retries(
    house: House, clock: Clock, monkeypatch: pytest.MonkeyPatch, end: int
) -> None:
    _both(house)

    def apply(target: Target, changes: TableChanges, end: Position) -> None:
        Ledger.apply(house.sink, target, changes, end)
        if target.table == FIRST:
            house.sink.applied[FIRST] = at(300)  # as if both epochs had been applied
            raise RuntimeError("the answer was lost")

    monkeypatch.setattr(house.sink, "apply", apply)
    house.applier.apply(at(200))
    clock.pass_longest()
    house.applier.apply(at(end))
    assert house.applier.statuses[FIRST].state is TableState.STREAMING
    assert not house.applier._retries.has_due, "an idle source would have an epoch every second"
    assert house.applier._retries.failures(FIRST) == 0, "the next failure is the first one"


def test_no_attempt_counts_while_something_that_all_tables_share_does_not_work(
    house: House, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> None:
        raise SinkError("the lake is away")

    monkeypatch.setattr(house.applier._failures, "check_shared", away)
    _both(house)
    _break(house, monkeypatch, {FIRST: RuntimeError("no")})
    for _ in range(error_policy.USUAL_ATTEMPTS + 1):
        with pytest.raises(SinkError, match="the lake is away"):
            house.applier.apply(at(200))
        clock.pass_longest()
    assert house.applier.statuses[FIRST].applied == at(100)
    assert house.applier.last is None, "an epoch that is not applied is not recorded"


def test_an_idle_source_has_an_epoch_for_a_table_whose_next_attempt_is_due(
    house: House, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pipeline.apply._IDLE_SECONDS", -1.0)
    _both(house)
    _break(house, monkeypatch, {FIRST: RuntimeError("no")})
    house.applier.apply(at(200))
    monkeypatch.undo()
    monkeypatch.setattr("penstock.pipeline.apply._IDLE_SECONDS", -1.0)
    house.applier.settle()
    assert house.sink.applied[FIRST] == at(100)
    clock.pass_longest()
    house.applier.settle()
    assert house.sink.applied[FIRST] == at(200)
    last = house.applier.last
    assert last is not None
    assert last.tables[FIRST].state is TableState.STREAMING, "status reads what is recorded"


def test_a_table_that_backs_off_can_be_paused(house: House, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    _both(house)
    _break(house, monkeypatch, {FIRST: RuntimeError("no")})
    house.applier.apply(at(200))
    house.applier.pause(FIRST)
    clock.pass_longest()
    house.applier.apply(at(300))
    assert (house.applier.statuses[FIRST].state, house.released) == (TableState.PAUSED, 100)


def test_every_table_has_ended_its_attempt_before_a_shared_fault_ends_the_epoch(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    _both(house)
    begun, ended = threading.Event(), threading.Event()

    def apply(target: Target, _changes: TableChanges, _end: Position) -> None:
        if target.table == FIRST:
            assert begun.wait(10)
            raise SlotLostError("the slot is lost")
        begun.set()
        time.sleep(0.3)
        ended.set()

    monkeypatch.setattr(house.sink, "apply", apply)
    with pytest.raises(SlotLostError):
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


def test_a_swap_that_fails_is_tried_again_in_a_later_epoch_and_given_up_after_its_attempts(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    house.shadows._attempts = TableRetries(lambda: now[0])
    _both(house)
    shadow = Ledger()
    house.shadows.begin(FIRST, shadow, house.applier.position)
    house.shadows.enter(shadow.target(ORDERS, 200))
    replaced = house.sink.replace

    def fail(_table: TableName, _shadow: Sink, _position: Position) -> None:
        raise RuntimeError("the row is 'secret'")

    monkeypatch.setattr(house.sink, "replace", fail)
    house.applier.apply(at(300))
    assert (house.sink.applied[FIRST], house.sink.applied[SECOND]) == (at(300), at(300)), "neither table waits for the swap"
    assert house.shadows.is_busy
    monkeypatch.setattr(house.sink, "replace", replaced)
    house.applier.apply(at(400))
    assert house.done == [], "its next attempt is not due"
    now[0] += 100
    house.applier.apply(at(500))
    assert house.done == [(FIRST, True)]
    house.shadows.begin(FIRST, shadow, house.applier.position)
    house.shadows.enter(shadow.target(ORDERS, 500))
    monkeypatch.setattr(house.sink, "replace", fail)
    for _ in range(error_policy.USUAL_ATTEMPTS):
        assert house.shadows.is_busy
        house.applier.apply(at(600))
        now[0] += 100
    assert (house.done[-1], house.shadows.is_busy, house.applier.statuses[FIRST].state) == ((FIRST, False), False, TableState.STREAMING)


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
