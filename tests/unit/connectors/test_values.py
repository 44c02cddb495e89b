"""Values of the connector contract: checkpoints, health and epochs."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.progress import EpochLedger, Offset, Progress
from penstock.connectors.settings import HealthThresholds, Vitals, assess
from penstock.contracts.connector import Health, HealthStatus, SourceCheckpoint
from penstock.errors import CheckpointError, ConnectionLostError, SlotMissingError
from penstock.lag import CaptureLag, OpenTransaction
from penstock.position import Position
from penstock.postgres.membership import Membership
from penstock.postgres.server import SystemIdentity
from penstock.schema import TableName

names = st.builds(TableName, st.text(min_size=1, max_size=5), st.text(min_size=1, max_size=5))
positions = st.integers(0, 2**64 - 1).map(Position.of)
offsets = st.builds(Offset, positions, st.none() | st.integers(0, 2**40))
members = st.builds(Membership, st.integers(0, 2**32 - 1), st.text(max_size=5))

# --- checkpoints --------------------------------------------------------------------------------------------


@given(st.dictionaries(st.text(), st.text()), st.integers(0, 2**63), st.dictionaries(st.text(), st.text()))
def test_a_checkpoint_survives_as_text_and_the_text_is_always_the_same(
    offsets: dict[str, str], epoch: int, metadata: dict[str, str]
) -> None:
    checkpoint = SourceCheckpoint(offsets, epoch, metadata)
    text = checkpoint.to_json()
    assert SourceCheckpoint.from_json(text) == checkpoint
    assert SourceCheckpoint(dict(reversed(offsets.items())), epoch, metadata).to_json() == text
    assert json.loads(text)["version"] == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '"text"',
        '{"version":1}',
        '{"version":1,"epoch":1,"offsets":{"a":1},"metadata":{}}',
        '{"version":1,"epoch":-1,"offsets":{},"metadata":{}}',
        '{"version":1,"epoch":"1","offsets":{},"metadata":{}}',
        '{"version":1,"epoch":1,"offsets":[],"metadata":{}}',
    ],
)
def test_invalid_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError):
        SourceCheckpoint.from_json(text)


@pytest.mark.parametrize("version", [0, 2, 99, "1", None])
def test_a_checkpoint_of_another_version_is_refused_and_not_guessed_at(version: object) -> None:
    with pytest.raises(CheckpointError, match="version"):
        SourceCheckpoint.from_json(
            json.dumps({"version": version, "epoch": 1, "offsets": {}, "metadata": {}})
        )


@given(
    positions,
    st.dictionaries(names, offsets),
    st.lists(names, unique=True),
    st.dictionaries(names, members),
    st.data(),
)
def test_progress_survives_as_a_checkpoint(
    floor: Position,
    ahead: dict[TableName, Offset],
    tables: list[TableName],
    known: dict[TableName, Membership],
    data: st.DataObject,
) -> None:
    to_copy = data.draw(st.lists(st.sampled_from(tables), unique=True)) if tables else []
    progress = Progress(floor, ahead, tuple(tables), tuple(to_copy), known)
    checkpoint = progress.to_checkpoint(7, "a_slot", SystemIdentity("123", 4))
    assert Progress.from_checkpoint(SourceCheckpoint.from_json(checkpoint.to_json())) == progress
    assert checkpoint.epoch == 7


def test_no_table_is_taken_for_the_stream() -> None:
    table = TableName("stream", "stream")
    progress = Progress(Position.of(16), {table: Offset(Position.of(32))})
    assert Progress.from_checkpoint(progress.to_checkpoint(1, "s", None)) == progress


def test_offset_of_a_table_is_dropped_once_all_tables_have_reached_it() -> None:
    orders, lines = TableName("public", "orders"), TableName("public", "lines")
    progress = Progress().covering([orders, lines], copies=True).reached(Position.of(10))
    assert progress.to_copy == (orders, lines)
    progress = progress.copied(orders, Position.of(100)).copied(lines, Position.of(100))
    assert (progress.to_copy, progress.floor) == ((), Position.of(10))
    progress = progress.changed(orders, Position.of(120), 3).reached(Position.of(100))
    assert progress.ahead == {orders: Offset(Position.of(120), 3)}
    assert progress.changed(orders, Position.of(120), 2).ahead == {orders: Offset(Position.of(120), 5)}, (
        "of one commit they add up"
    )
    assert progress.changed(orders, Position.of(130), 2).ahead == {orders: Offset(Position.of(130), 2)}
    assert progress.reached(Position.of(120)).ahead == {}


def test_a_table_that_joins_is_copied_and_one_that_leaves_is_forgotten() -> None:
    orders, lines, notes = (TableName("public", name) for name in ("orders", "lines", "notes"))
    known = {table: Membership(number, "act") for number, table in enumerate((orders, lines))}
    progress = (
        Progress()
        .covering([orders, lines], copies=True)
        .begun(Position.of(10), known)
        .copied(orders, Position.of(50))
    )
    assert progress.followed == {orders: known[orders]}, "a table that will be copied may have missed changes"
    later = progress.covering([lines, notes], copies=True)
    assert (later.tables, later.to_copy, later.members, later.ahead) == (
        (lines, notes),
        (lines, notes),
        {lines: known[lines]},
        {},
    )
    assert later.covering([orders, lines, notes], copies=True).to_copy == (lines, notes, orders), (
        "it missed the changes in between"
    )
    assert progress.covering([orders], copies=False).to_copy == ()


# --- epochs -------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(2, 8), st.integers(0, 100))
def test_an_epoch_never_covers_more_than_was_returned_before_it(
    steps: list[int], most: int, start: int
) -> None:
    ledger = EpochLedger(start, Position.of(1), most)
    floors = {start: 1}
    for step in steps:
        floor = max(floors.values()) + step
        ledger.move(Position.of(floor))
        floors[ledger.last] = floor
    assert ledger.last == start + len(steps)
    assert len(ledger) <= most
    found = [ledger.floor_of(epoch) for epoch in sorted(floors)]
    for epoch, position in zip(sorted(floors), found, strict=True):
        assert position is not None
        assert position.value <= floors[epoch]
    assert found == sorted(found, key=lambda position: position.value if position else 0)
    assert ledger.floor_of(start - 1) is None


@given(st.lists(st.integers(0, 3), max_size=30))
def test_while_there_is_room_an_epoch_covers_everything_returned(steps: list[int]) -> None:
    ledger, floor, expected = EpochLedger(0, Position.ZERO), 0, [0]
    for step in steps:
        floor += step
        ledger.move(Position.of(floor))
        expected.append(floor)
    assert [ledger.floor_of(epoch) for epoch in range(len(expected))] == [
        Position.of(each) for each in expected
    ]
    middle = len(steps) // 2
    ledger.forget_before(middle)
    assert [ledger.floor_of(epoch) for epoch in range(middle, len(expected))] == [
        Position.of(each) for each in expected[middle:]
    ]


# --- health -------------------------------------------------------------------------------------------------


def test_only_an_unhealthy_status_has_a_reason() -> None:
    assert HealthStatus.degraded("slow").why == "slow"
    for health, why in (
        (Health.DEGRADED, None),
        (Health.UNHEALTHY, ""),
        (Health.HEALTHY, "fine"),
        (Health.UNKNOWN, "?"),
    ):
        with pytest.raises(ValueError, match="reason"):
            HealthStatus(health, why)


THRESHOLDS = HealthThresholds(degraded_lag_bytes=100, unhealthy_lag_bytes=1000, unhealthy_errors=3)


def lag(wal_status: str | None, *holders: OpenTransaction) -> CaptureLag:
    return CaptureLag(datetime(2026, 1, 1, tzinfo=UTC), 0, 0.0, 0, None, wal_status, 0, 0, holders)


@pytest.mark.parametrize(
    ("vitals", "health"),
    [
        (Vitals(), Health.HEALTHY),
        (Vitals(lag=lag("reserved")), Health.HEALTHY),
        (Vitals(lag=lag(None)), Health.HEALTHY),
        (Vitals(lag=lag("extended")), Health.DEGRADED),
        (Vitals(lag=lag("unreserved")), Health.DEGRADED),
        (Vitals(lag=lag("lost")), Health.UNHEALTHY),
        (Vitals(ConnectionLostError("gone"), errors=1, lag=lag("lost")), Health.UNHEALTHY),
        (
            Vitals(lag=lag("reserved", OpenTransaction(7, "psql", "shop", "idle in transaction", 900.0))),
            Health.DEGRADED,
        ),
        (Vitals(behind_bytes=1001, lag=lag("extended")), Health.UNHEALTHY),
        (Vitals(behind_bytes=100), Health.HEALTHY),
        (Vitals(behind_bytes=101), Health.DEGRADED),
        (Vitals(behind_bytes=1001), Health.UNHEALTHY),
        (Vitals(unacknowledged_bytes=100), Health.HEALTHY),
        (Vitals(unacknowledged_bytes=101), Health.DEGRADED),
        (Vitals(unacknowledged_bytes=1001), Health.UNHEALTHY),
        (Vitals(ConnectionLostError("gone"), errors=1), Health.DEGRADED),
        (Vitals(ConnectionLostError("gone"), errors=3), Health.UNHEALTHY),
        (Vitals(None, errors=3), Health.HEALTHY),
        (Vitals(SlotMissingError("gone"), errors=1), Health.UNHEALTHY),
        (Vitals(RuntimeError("secret"), errors=1), Health.UNHEALTHY),
    ],
)
def test_health_is_the_worst_that_there_is_to_say(vitals: Vitals, health: Health) -> None:
    status = assess(vitals, THRESHOLDS)
    assert status.health is health
    assert "secret" not in (status.why or "")


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (lag("lost"), "the slot has been invalidated"),
        (lag("extended"), "wal_status is extended: the slot keeps more WAL than max_wal_size"),
        (
            lag("reserved", OpenTransaction(7, "psql", "shop", "idle", 900.0)),
            "held up by process 7 (psql) in shop, open for 900 s, idle",
        ),
    ],
)
def test_health_names_the_problem_of_the_slot(seen: CaptureLag, why: str) -> None:
    assert assess(Vitals(lag=seen), THRESHOLDS).why == why
