from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.errors import (
    CaptureFailedError,
    ConnectionLostError,
    PenstockError,
    ProtocolError,
    SlotLostError,
    SpoolCorruptError,
)
from penstock.lag import CaptureLag, OpenTransaction
from penstock.spool import CaptureFailure, CaptureStatus, SpoolReader, load_status, wait_for_end, write_status
from tests.support.spool.builders import Commit, at, capture

WELL = CaptureStatus("streaming", 4711, at(50), at(40), 12, 3456, datetime(2025, 1, 1, tzinfo=UTC))


def test_a_status_survives_its_own_text(tmp_path: Path) -> None:
    assert load_status(tmp_path) is None
    open_one = OpenTransaction(12, "psql", "shop", "active", 1.5)
    lag = CaptureLag(
        datetime(2025, 1, 1, tzinfo=UTC),
        1,
        2.5,
        3,
        None,
        "extended",
        4,
        5,
        (open_one, replace(open_one, pid=None)),
    )
    watched = replace(WELL, confirms="spooled", confirmed=at(30), waits_for=(open_one,), lag=lag)
    for status in (
        WELL,
        watched,
        replace(WELL, failure=CaptureFailure.of(SlotLostError("gone", hint="resync"))),
    ):
        write_status(tmp_path, status)
        assert load_status(tmp_path) == status
    assert [path.name for path in tmp_path.iterdir()] == ["capture-status.json"]


def test_a_status_of_an_older_version_is_read(tmp_path: Path) -> None:
    write_status(tmp_path, WELL)
    path = tmp_path / "capture-status.json"
    document = json.loads(path.read_text())
    for newer in ("confirms", "confirmed", "waits_for", "lag"):
        del document[newer]
    path.write_text(json.dumps(document))
    assert load_status(tmp_path) == WELL


def test_a_status_needs_an_aware_time() -> None:
    with pytest.raises(ValueError, match="time zone"):
        replace(WELL, updated_at=WELL.updated_at.replace(tzinfo=None))


def test_a_status_emptied_by_a_machine_crash_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "capture-status.json").touch()
    assert load_status(tmp_path) is None


def test_a_damaged_status_is_called_corrupt(tmp_path: Path) -> None:
    (tmp_path / "capture-status.json").write_text('{"format": 1, "error": "x", "recovery": "no such thing"}')
    with pytest.raises(SpoolCorruptError):
        load_status(tmp_path)


def test_waiting_ends_when_the_spool_exists(tmp_path: Path) -> None:
    pauses: list[float] = []

    def write_at_the_third_pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            capture(tmp_path, 0, [[Commit(10)], [Commit(20)]])

    reader = SpoolReader(tmp_path)
    assert wait_for_end(reader, at(15), timeout_seconds=60, sleep=write_at_the_third_pause) == at(20)
    assert len(pauses) == 3


def test_waiting_gives_up_at_the_deadline_with_the_last_state(tmp_path: Path) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    capture(tmp_path, 0, [[Commit(10)]])
    reader = SpoolReader(tmp_path)
    assert wait_for_end(reader, at(15), timeout_seconds=3, clock=lambda: now[0], sleep=sleep) == at(10)
    assert now[0] == pytest.approx(3)


@pytest.mark.parametrize("error", [SlotLostError("the slot is gone", hint="resync"), ProtocolError("bytes")])
def test_waiting_ends_at_once_when_the_capture_cannot_go_on(tmp_path: Path, error: PenstockError) -> None:
    write_status(tmp_path, replace(WELL, state="failed", failure=CaptureFailure.of(error)))
    with pytest.raises(CaptureFailedError, match=f"{error.code}: {error.message}") as caught:
        wait_for_end(SpoolReader(tmp_path), at(15), timeout_seconds=60)
    assert caught.value.hint == error.hint


def test_waiting_continues_while_the_capture_retries(tmp_path: Path) -> None:
    write_status(
        tmp_path, replace(WELL, state="waiting", failure=CaptureFailure.of(ConnectionLostError("away")))
    )
    assert wait_for_end(SpoolReader(tmp_path), at(15), timeout_seconds=0) is None


def test_existing_changes_are_returned_although_the_capture_has_failed(tmp_path: Path) -> None:
    capture(tmp_path, 0, [[Commit(20)]])
    write_status(tmp_path, replace(WELL, failure=CaptureFailure.of(ProtocolError("bytes"))))
    assert wait_for_end(SpoolReader(tmp_path), at(15), timeout_seconds=0) == at(20)
