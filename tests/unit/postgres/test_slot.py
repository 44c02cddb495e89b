"""Errors for an unusable slot, where the server's answer depends on one column."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from penstock.errors import SlotBusyError, SlotFailoverError, SlotLostError, StandbyError, WalLevelError
from penstock.position import Lsn, Position
from penstock.postgres.server import parse_history
from penstock.postgres.slot import (
    Server,
    Slot,
    SlotReader,
    check_failover,
    check_idle,
    check_server,
    check_slot,
    server_faults,
)

GOOD = Slot("shop", "pgoutput", "logical", "db", Lsn(100), Position.of(200), "reserved", None)


def test_a_good_slot_is_let_pass() -> None:
    check_slot(GOOD, "db")
    check_idle(GOOD)


@pytest.mark.parametrize("status", ["extended", "unreserved"])
def test_a_strained_slot_is_no_error(status: str) -> None:
    check_slot(replace(GOOD, wal_status=status, safe_wal_bytes=-1), "db")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (
            "wal_removed",
            (
                "WAL that was still needed has been removed, since the slot held back more than "
                "max_slot_wal_keep_size"
            ),
        ),
        ("rows_removed", "catalog rows that were still needed have been vacuumed away on the primary"),
        ("wal_level_insufficient", "the primary's wal_level was not logical for a while"),
        ("idle_timeout", "it was not read for longer than idle_replication_slot_timeout"),
        (
            "conflicting",
            (
                "WAL or catalog rows that were still needed have been removed; this version of Postgres does "
                "not report which"
            ),
        ),
        ("something new", "it does not report why"),
    ],
)
def test_L06_an_invalidated_slot_is_refused_with_the_servers_reason(reason: str, words: str) -> None:
    with pytest.raises(SlotLostError) as caught:
        check_slot(replace(GOOD, invalidation=reason), "db")
    assert caught.value.message == (
        f"the server has invalidated slot shop ({reason}): {words}; transactions that committed after "
        "0/C8 can no longer be read"
    )
    assert caught.value.hint == (
        "SELECT pg_drop_replication_slot('shop'); then copy the tables again: "
        "for a pipeline, remove the target tables, their penstock_epochs and the state directory, and run "
        "again; "
        "for a WalCapture, drop the slot if it exists, remove the spool, and take a new snapshot"
    )


def test_L06_a_slot_without_a_restart_point_is_as_good_as_invalidated() -> None:
    with pytest.raises(SlotLostError):
        check_slot(replace(GOOD, restart=None), "db")


def test_L08_a_reader_that_the_server_does_not_describe_is_named_by_its_process() -> None:
    with pytest.raises(SlotBusyError) as caught:
        check_idle(replace(GOOD, reader=SlotReader(4711, None, None, None)))
    assert caught.value.message == "slot shop is being read by server process 4711"
    known = SlotReader(4711, "cdc", "10.0.0.7", datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC))
    assert known.describe() == "4711 (application 'cdc', client 10.0.0.7, since 2025-01-02 03:04:05 UTC)"


def test_L08_a_slot_that_was_not_created_to_the_end_is_waited_for() -> None:
    with pytest.raises(SlotBusyError, match="has not been created completely"):
        check_idle(replace(GOOD, confirmed=Position.ZERO))


def test_L11_a_standby_is_refused_with_the_way_to_the_primary() -> None:
    with pytest.raises(StandbyError) as caught:
        check_server(Server("logical", 180_000, "db", in_recovery=True))
    assert "target_session_attrs=read-write" in (caught.value.hint or "")


def test_C05_a_standby_of_a_server_without_logical_replication_has_both_faults() -> None:
    server = Server("replica", 180_000, "db", in_recovery=True)
    assert [fault.code for fault in server_faults(server)] == [StandbyError.code, WalLevelError.code]
    with pytest.raises(StandbyError):
        check_server(server)


def test_L10_failover_is_refused_where_the_server_does_not_know_it() -> None:
    check_failover(True, 170_000)
    check_failover(False, 140_000)
    with pytest.raises(
        SlotFailoverError, match="the server is Postgres 16: slots are copied to standbys since Postgres 17"
    ):
        check_failover(True, 160_004)


def test_L10_a_history_tells_where_each_timeline_was_left() -> None:
    content = (
        "# a comment\n\n1\t0/3000148\tno recovery target specified\n\n 2\tA/40000000\tbefore "
        "2025-01-02 03:04:05+00\n"
    )
    assert parse_history(content) == {1: Lsn.parse("0/3000148"), 2: Lsn.parse("A/40000000")}
