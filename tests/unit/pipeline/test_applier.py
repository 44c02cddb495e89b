"""Which part of the log is needed while tables are added, paused and removed: a real spool, and a sink that
only records positions.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.config.policies import SchemaRule
from penstock.errors import (
    MembersDifferError,
    PenstockError,
    SinkError,
    SinkRefusedError,
    SlotLostError,
    SlowTableError,
)
from penstock.pipeline import error_policy
from penstock.pipeline.error_policy import TableRetries
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.schema_changes.tracker import CatalogSnapshot
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.base import Sink, TableChanges, Target
from penstock.sinks.delta.spark_merge import merge_statement
from penstock.spool.retention import released_positions
from tests.support.pipeline.epochs import open_epochs
from tests.support.pipeline.position_sink import FIRST, SECOND, PositionSink
from tests.support.spool.builders import ITEMS, ORDERS, Commit, at, capture, delete_released


class ApplierSetup:
    """A spool with a commit of both tables every hundred, a ledger, and the applier between them."""

    def __init__(self, directory: Path) -> None:
        (directory / "lake").mkdir()
        self.spool = directory / "spool"
        capture(self.spool, 0, [[Commit(position, (ORDERS, ITEMS))] for position in range(100, 1001, 100)])
        self.sink = PositionSink()
        self.done: list[tuple[TableName, str | None]] = []
        epochs = open_epochs(
            self.sink, directory, on_done=lambda name, failure: self.done.append((name, failure))
        )
        self.applier, self.resyncs = epochs.applier, epochs.resyncs

    @property
    def released(self) -> int:
        return released_positions(self.spool)["p"].value


@pytest.fixture
def setup(tmp_path: Path) -> ApplierSetup:
    return ApplierSetup(tmp_path)


def _streaming(position: int) -> TableStatus:
    return TableStatus(TableState.STREAMING, at(position), at(position))


def test_log_needed_by_a_copied_table_is_kept_until_an_epoch_includes_it(setup: ApplierSetup) -> None:
    setup.applier.tables.start({FIRST: setup.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    setup.applier.apply(at(200))
    setup.applier.tables.add_pending(SECOND)
    setup.applier.apply(at(300))
    assert setup.released == 200, "before there is a fence"
    setup.applier.tables.set_fence(SECOND, at(400))
    setup.applier.apply(at(600))
    assert setup.released == 400, "from its fence on"
    assert setup.applier.tables.statuses[SECOND].state is TableState.SNAPSHOTTING
    setup.applier.tables.add_copied(setup.sink.target(ITEMS, 400))
    assert setup.released == 400
    setup.applier.apply(at(700))
    assert setup.sink.taken[SECOND] == [(400, 700)]
    assert setup.released == 700
    assert setup.applier.is_level


def test_a_paused_table_keeps_its_changes_and_one_that_is_removed_lets_go_of_them_at_once(
    setup: ApplierSetup,
) -> None:
    targets = {FIRST: setup.sink.target(ORDERS, 100), SECOND: setup.sink.target(ITEMS, 100)}
    setup.applier.tables.start(targets, {FIRST: _streaming(100), SECOND: _streaming(100)})
    setup.applier.tables.pause(SECOND)
    setup.applier.apply(at(500))
    assert (setup.released, setup.sink.applied[SECOND]) == (100, at(100))
    setup.applier.tables.remove(SECOND)
    setup.applier.apply(setup.applier.position)  # as on an idle source
    assert setup.released == 500
    assert SECOND not in setup.applier.tables.statuses


def test_a_filled_table_that_joins_in_the_middle_of_an_epoch_is_not_taken_for_level(
    setup: ApplierSetup,
) -> None:
    setup.applier.tables.start({FIRST: setup.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    setup.applier.tables.add_filled(setup.sink.target(ITEMS, 100), paused=False)
    assert setup.applier.tables.statuses[SECOND].applied is None, "not applied before an epoch includes it"
    setup.applier.apply(at(300))
    assert setup.sink.taken[SECOND] == [(100, 300)]


def test_a_table_that_is_written_slowly_is_warned_of_once_and_its_status_says_why_until_that_ends(
    setup: ApplierSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[PenstockError] = []
    monkeypatch.setattr(PipelineObserver, "warned", lambda _, warning: warnings.append(warning))
    targets = {FIRST: setup.sink.target(ORDERS, 100), SECOND: setup.sink.target(ITEMS, 100)}
    setup.applier.tables.start(targets, {FIRST: _streaming(100), SECOND: _streaming(100)})
    setup.sink.slow = SlowTableError("it has the feature clustering", hint="drop it")
    for end in (200, 300):
        setup.applier.apply(at(end))
        status = setup.applier.tables.statuses[FIRST]
        assert (status.state, status.reason, status.remedy) == (
            TableState.STREAMING,
            "PEN-4012: it has the feature clustering",
            "drop it",
        )
    assert setup.applier.last is not None
    assert setup.applier.last.tables[FIRST].reason, "it is recorded, where penstock status finds it"
    assert setup.applier.tables.statuses[SECOND].reason is None
    assert warnings == [setup.sink.slow]
    setup.sink.slow = None
    setup.applier.apply(at(400))
    assert setup.applier.tables.statuses[FIRST].reason is None


def test_a_table_whose_ground_is_gone_fails_alone(setup: ApplierSetup) -> None:
    setup.applier.tables.start({FIRST: setup.sink.target(ORDERS, 500)}, {FIRST: _streaming(500)})
    setup.applier.apply(at(600))
    delete_released(setup.spool)
    setup.applier.tables.add_pending(SECOND)
    setup.applier.tables.add_copied(setup.sink.target(ITEMS, 100))
    setup.applier.apply(at(700))
    assert setup.applier.tables.statuses[SECOND].state is TableState.FAILED
    assert setup.sink.applied[FIRST] == at(700)


class Clock:
    """A clock that the test advances."""

    def __init__(self, setup: ApplierSetup) -> None:
        self.now = 0.0
        setup.applier.tables.retries._clock = lambda: self.now

    def pass_longest(self) -> None:
        self.now += 2 * error_policy.LONGEST_SECONDS


@pytest.fixture
def clock(setup: ApplierSetup) -> Clock:
    return Clock(setup)


def _break(
    setup: ApplierSetup, monkeypatch: pytest.MonkeyPatch, errors: Mapping[TableName, Exception]
) -> None:
    """Applying changes to these tables raises; to others it works."""

    def apply(target: Target, changes: TableChanges, end: Position) -> None:
        if target.table in errors:
            raise errors[target.table]
        PositionSink.apply(setup.sink, target, changes, end)

    monkeypatch.setattr(setup.sink, "apply", apply)


def _both(setup: ApplierSetup) -> None:
    targets = {FIRST: setup.sink.target(ORDERS, 100), SECOND: setup.sink.target(ITEMS, 100)}
    setup.applier.tables.start(targets, {FIRST: _streaming(100), SECOND: _streaming(100)})


def test_a_table_in_backoff_delays_no_other_and_later_applies_the_changes_kept_for_it(
    setup: ApplierSetup, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    _both(setup)
    _break(setup, monkeypatch, {FIRST: RuntimeError("the row is 'secret'")})
    for end in (200, 300):
        setup.applier.apply(at(end))
    status = setup.applier.tables.statuses[FIRST]
    assert (status.state, status.applied) == (TableState.RETRYING, at(100))
    assert (setup.sink.applied[SECOND], setup.applier.position, setup.released) == (at(300), at(300), 100)
    recorded = setup.applier.last
    assert recorded is not None
    assert recorded.tables[FIRST].reason == status.reason
    assert "RuntimeError" in (status.reason or "")
    assert "secret" not in (status.reason or "")
    assert status.remedy
    monkeypatch.undo()
    setup.applier.apply(at(400))
    assert setup.sink.applied[FIRST] == at(100), "its next attempt is not due"
    clock.pass_longest()
    setup.applier.apply(at(400))
    assert setup.sink.taken[FIRST] == [(100, 400)]
    assert (setup.applier.tables.statuses[FIRST].state, setup.released) == (TableState.STREAMING, 400)


@pytest.mark.parametrize(
    ("error", "attempts", "code", "words"),
    [
        (RuntimeError("the row is 'secret'"), error_policy.USUAL_ATTEMPTS, "PEN-1423", "RuntimeError"),
        (SinkError("it is away"), error_policy.USUAL_ATTEMPTS, "PEN-3000", "it is away"),
        (
            FileNotFoundError(2, "No such file", "/lake/a/part-1.parquet"),
            error_policy.FILE_ATTEMPTS,
            "PEN-3006",
            "/lake/a/part-1.parquet",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            error_policy.PATIENT_ATTEMPTS,
            "PEN-3000",
            "disk is full",
        ),
    ],
    ids=["unknown", "declared", "lost-file", "full-disk"],
)
def test_a_table_that_keeps_failing_fails_alone_after_its_attempts_with_cause_and_remedy(
    setup: ApplierSetup,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    *,
    error: Exception,
    attempts: int,
    code: str,
    words: str,
) -> None:
    monkeypatch.setattr("penstock.pipeline.applier._QUICK_PAUSE_SECONDS", 0.0)
    _both(setup)
    _break(setup, monkeypatch, {FIRST: error})
    states = []
    for _ in range(attempts):
        setup.applier.apply(at(200))
        states.append(setup.applier.tables.statuses[FIRST].state)
        clock.pass_longest()
    assert states == [*[TableState.RETRYING] * (attempts - 1), TableState.FAILED]
    status = setup.applier.tables.statuses[FIRST]
    assert (status.reason or "").startswith(code)
    assert words in (status.reason or "")
    assert "secret" not in (status.reason or "")
    assert f"penstock tables resync CONFIG {FIRST}" in (status.remedy or "")
    setup.applier.apply(at(300))
    assert (setup.sink.applied[SECOND], setup.released) == (at(300), 300)


def test_tables_that_fail_together_while_no_other_succeeds_are_given_more_time(
    setup: ApplierSetup, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when all executors are lost: no table is at fault."""
    _both(setup)
    _break(setup, monkeypatch, {FIRST: RuntimeError("no"), SECOND: RuntimeError("no")})
    for _ in range(2 * error_policy.USUAL_ATTEMPTS):
        setup.applier.apply(at(200))
        clock.pass_longest()
    assert {status.state for status in setup.applier.tables.statuses.values()} == {TableState.RETRYING}


def test_an_attempt_after_a_commit_whose_answer_was_lost_reads_from_where_the_target_is(
    setup: ApplierSetup, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    _both(setup)
    rows: list[int] = []

    def apply(target: Target, changes: TableChanges, end: Position) -> None:
        PositionSink.apply(setup.sink, target, changes, end)
        if target.table == FIRST:
            rows.append(changes.counts.rows)
            if len(rows) == 1:
                raise RuntimeError("the answer was lost")

    monkeypatch.setattr(setup.sink, "apply", apply)
    setup.applier.apply(at(200))
    assert setup.applier.tables.statuses[FIRST].applied == at(100), "its answer was lost"
    clock.pass_longest()
    setup.applier.apply(at(300))
    assert rows[1] == rows[0], "one commit each"
    assert setup.applier.tables.statuses[FIRST].state is TableState.STREAMING


@pytest.mark.parametrize("end", [200, 300])
def test_an_attempt_that_finds_nothing_left_to_apply_ends_the_retries(
    setup: ApplierSetup, clock: Clock, monkeypatch: pytest.MonkeyPatch, end: int
) -> None:
    _both(setup)

    def apply(target: Target, changes: TableChanges, end: Position) -> None:
        PositionSink.apply(setup.sink, target, changes, end)
        if target.table == FIRST:
            setup.sink.applied[FIRST] = at(300)  # as if both epochs had been applied
            raise RuntimeError("the answer was lost")

    monkeypatch.setattr(setup.sink, "apply", apply)
    setup.applier.apply(at(200))
    clock.pass_longest()
    setup.applier.apply(at(end))
    assert setup.applier.tables.statuses[FIRST].state is TableState.STREAMING
    assert not setup.applier.tables.retries.has_due, "an idle source would have an epoch every second"
    assert setup.applier.tables.retries.failures(FIRST) == 0, "the next failure is the first one"


def test_no_attempt_counts_while_something_that_all_tables_share_does_not_work(
    setup: ApplierSetup, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> None:
        raise SinkError("the lake is away")

    monkeypatch.setattr(setup.applier._failures, "check_shared", away)
    _both(setup)
    _break(setup, monkeypatch, {FIRST: RuntimeError("no")})
    for _ in range(error_policy.USUAL_ATTEMPTS + 1):
        with pytest.raises(SinkError, match="the lake is away"):
            setup.applier.apply(at(200))
        clock.pass_longest()
    assert setup.applier.tables.statuses[FIRST].applied == at(100)
    assert setup.applier.last is None, "an epoch that is not applied is not recorded"


def test_an_idle_source_has_an_epoch_for_a_table_whose_next_attempt_is_due(
    setup: ApplierSetup, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pipeline.applier._IDLE_SECONDS", -1.0)
    _both(setup)
    _break(setup, monkeypatch, {FIRST: RuntimeError("no")})
    setup.applier.apply(at(200))
    monkeypatch.undo()
    monkeypatch.setattr("penstock.pipeline.applier._IDLE_SECONDS", -1.0)
    setup.applier.apply_if_idle()
    assert setup.sink.applied[FIRST] == at(100)
    clock.pass_longest()
    setup.applier.apply_if_idle()
    assert setup.sink.applied[FIRST] == at(200)
    last = setup.applier.last
    assert last is not None
    assert last.tables[FIRST].state is TableState.STREAMING, "status reads the recorded state"


def test_a_table_that_backs_off_can_be_paused(
    setup: ApplierSetup, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    _both(setup)
    _break(setup, monkeypatch, {FIRST: RuntimeError("no")})
    setup.applier.apply(at(200))
    setup.applier.tables.pause(FIRST)
    clock.pass_longest()
    setup.applier.apply(at(300))
    assert (setup.applier.tables.statuses[FIRST].state, setup.released) == (TableState.PAUSED, 100)


def test_every_table_has_ended_its_attempt_before_a_shared_fault_ends_the_epoch(
    setup: ApplierSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    _both(setup)
    begun, ended = threading.Event(), threading.Event()

    def apply(target: Target, _changes: TableChanges, _end: Position) -> None:
        if target.table == FIRST:
            assert begun.wait(10)
            raise SlotLostError("the slot is lost")
        begun.set()
        time.sleep(0.3)
        ended.set()

    monkeypatch.setattr(setup.sink, "apply", apply)
    with pytest.raises(SlotLostError):
        setup.applier.apply(at(200))
    assert ended.is_set(), "another attempt would have met this one"


def test_a_copy_of_a_table_removed_during_it_is_discarded(setup: ApplierSetup) -> None:
    setup.applier.tables.start({FIRST: setup.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    setup.applier.tables.add_pending(SECOND)
    setup.applier.tables.remove(SECOND)
    setup.applier.apply(at(200))
    setup.applier.tables.set_fence(SECOND, at(200))
    setup.applier.tables.add_copied(setup.sink.target(ITEMS, 200))
    setup.applier.apply(at(300))
    assert SECOND not in setup.applier.tables.statuses
    assert setup.sink.load_target(SECOND) is None
    assert setup.released == 300


def test_a_copy_that_arrives_when_its_table_has_failed_is_no_ones(setup: ApplierSetup) -> None:
    """For example a table removed during its copy and added again: it was unpublished in between."""
    setup.applier.tables.start({FIRST: setup.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    setup.applier.tables.add_pending(SECOND)
    setup.applier.tables.add_copied(setup.sink.target(ITEMS, 200))
    setup.applier.tables.add_inactive(SECOND, TableStatus.failed(SinkRefusedError("no", hint="no"), None))
    setup.applier.apply(at(300))
    assert setup.applier.tables.statuses[SECOND].state is TableState.FAILED
    assert setup.sink.load_target(SECOND) is None
    assert SECOND not in setup.sink.taken


def test_a_table_that_is_added_again_does_not_need_the_resync_from_before_its_removal(
    setup: ApplierSetup,
) -> None:
    tables = setup.applier.tables
    tables.start({FIRST: setup.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    tables.await_resync(FIRST, "it was renamed")
    tables.remove(FIRST)
    setup.applier.apply(at(200))
    tables.add_filled(setup.sink.target(ORDERS, 200), paused=False)
    setup.applier.apply(at(300))
    tables.resync_failed(FIRST, "the target cannot be read")
    assert tables.statuses[FIRST].state is TableState.STREAMING


def test_the_catalog_is_compared_while_an_epoch_adds_a_table(
    setup: ApplierSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.applier.tables.start({FIRST: setup.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    targets = setup.applier.tables.targets

    def rule_of(_: TableName) -> SchemaRule:
        targets[SECOND] = setup.sink.target(ITEMS, 100)
        return SchemaRule()

    monkeypatch.setattr(setup.applier._tracker, "_rule_of", rule_of)
    setup.applier.observe_catalog(CatalogSnapshot({FIRST: ORDERS}))
    assert targets.keys() == {FIRST, SECOND}


def test_actions_after_a_removal_wait_until_no_epoch_touches_the_table(setup: ApplierSetup) -> None:
    setup.applier.tables.start({FIRST: setup.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    setup.applier.tables.remove(FIRST, lambda: setup.sink.release_ownership(FIRST))
    assert setup.sink.applied[FIRST] == at(100)
    setup.applier.apply(at(200))
    assert (setup.sink.applied, setup.sink.taken) == ({}, {})


def test_a_returning_table_takes_back_positions_released_after_it(setup: ApplierSetup) -> None:
    setup.applier.tables.start({FIRST: setup.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    setup.applier.apply(at(500))
    assert setup.released == 500
    setup.applier.tables.add_filled(setup.sink.target(ITEMS, 300), paused=True)
    assert setup.released == 300
    setup.applier.apply(at(600))
    assert setup.released == 300


def test_a_shadow_takes_its_targets_place_instead_of_an_epoch_and_is_done_when_that_is_recorded(
    setup: ApplierSetup,
) -> None:
    setup.applier.tables.start({FIRST: setup.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    shadow = PositionSink()
    setup.resyncs.begin(FIRST, shadow, setup.applier.position)
    setup.resyncs.set_fence(FIRST, at(200))
    setup.applier.apply(at(400))
    assert setup.released <= 200
    setup.resyncs.add_copied(shadow.target(ORDERS, 200))
    setup.applier.apply(at(500))
    assert shadow.taken[FIRST] == [(200, 400), (400, 500)], (
        "up to the recorded epoch by the thread that copied it"
    )
    assert setup.sink.taken[FIRST] == [(100, 400)]
    assert setup.sink.applied[FIRST] == at(500)
    assert setup.done == [(FIRST, None)]
    assert (setup.released, setup.resyncs.is_busy) == (500, False)


def test_a_swap_that_fails_is_tried_again_in_a_later_epoch_and_given_up_after_its_attempts(
    setup: ApplierSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    setup.resyncs._attempts = TableRetries(lambda: now[0])
    _both(setup)
    shadow = PositionSink()
    setup.resyncs.begin(FIRST, shadow, setup.applier.position)
    setup.resyncs.add_copied(shadow.target(ORDERS, 200))
    replaced = setup.sink.replace

    def fail(_table: TableName, _shadow: Sink, _position: Position) -> None:
        raise RuntimeError("the row is 'secret'")

    monkeypatch.setattr(setup.sink, "replace", fail)
    setup.applier.apply(at(300))
    assert (setup.sink.applied[FIRST], setup.sink.applied[SECOND]) == (at(300), at(300)), (
        "neither table waits for the swap"
    )
    assert setup.resyncs.is_busy
    monkeypatch.setattr(setup.sink, "replace", replaced)
    setup.applier.apply(at(400))
    assert setup.done == [], "its next attempt is not due"
    now[0] += 100
    setup.applier.apply(at(500))
    assert setup.done == [(FIRST, None)]
    setup.resyncs.begin(FIRST, shadow, setup.applier.position)
    setup.resyncs.add_copied(shadow.target(ORDERS, 500))
    monkeypatch.setattr(setup.sink, "replace", fail)
    for _ in range(error_policy.USUAL_ATTEMPTS):
        assert setup.resyncs.is_busy
        setup.applier.apply(at(600))
        now[0] += 100
    assert (setup.resyncs.is_busy, setup.applier.tables.statuses[FIRST].state) == (
        False,
        TableState.STREAMING,
    )
    name, failure = setup.done[-1]
    assert name == FIRST
    assert failure is not None


def test_a_target_whose_shadow_cannot_take_its_place_has_its_epoch(setup: ApplierSetup) -> None:
    setup.applier.tables.start({FIRST: setup.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    shadow = PositionSink()
    setup.sink.refuses = True
    setup.resyncs.begin(FIRST, shadow, setup.applier.position)
    setup.resyncs.add_copied(shadow.target(ORDERS, 200))
    setup.applier.apply(at(500))
    assert setup.sink.taken[FIRST] == [(100, 500)]
    ((name, failure),) = setup.done
    assert name == FIRST
    assert failure is not None


def test_K11_a_table_whose_resync_failed_shows_the_cause_in_its_status(setup: ApplierSetup) -> None:
    """Routed tables are resynced once their members match; that needs the cause."""
    setup.applier.tables.start({FIRST: setup.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    setup.applier.tables.await_resync(FIRST, "a member was altered")
    setup.resyncs.begin(FIRST, PositionSink(), setup.applier.position)
    setup.resyncs.fail(FIRST, MembersDifferError("its members are not alike"))
    ((name, failure),) = setup.done
    assert failure is not None
    setup.applier.tables.resync_failed(name, failure)
    status = setup.applier.tables.statuses[FIRST]
    assert status.state is TableState.FAILED
    assert f"{MembersDifferError.code}: its members are not alike" in (status.reason or "")


def test_a_shadow_of_a_table_that_was_removed_takes_nobodys_place(setup: ApplierSetup) -> None:
    setup.applier.tables.start({FIRST: setup.sink.target(ORDERS, 100)}, {FIRST: _streaming(100)})
    shadow = PositionSink()
    setup.resyncs.begin(FIRST, shadow, setup.applier.position)
    setup.resyncs.abandon(FIRST)
    setup.resyncs.set_fence(FIRST, at(200))
    setup.resyncs.add_copied(shadow.target(ORDERS, 200))
    setup.applier.apply(at(500))
    assert setup.sink.taken[FIRST] == [(100, 500)]
    assert setup.released == 500


def test_nothing_is_merged_without_a_key() -> None:
    with pytest.raises(SinkRefusedError, match="without a key"):
        merge_statement("place", "view", pa.schema([("a", pa.int32())]), (), keeps=False)
