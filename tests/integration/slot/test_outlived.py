"""A snapshot that takes longer than the server keeps its WAL."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import SlotLostError
from penstock.pipeline.snapshots import coordinator as snapshot_round
from penstock.pipeline.snapshots.schedule import Schedule
from tests.support.fix_captured import Captured
from tests.support.slot.scratch_server import ScratchServer
from tests.support.snapshot.copying import Copying, Watcher
from tests.support.snapshot.local import FileSink, LocalExecutors


def test_N17_a_snapshot_that_outlives_the_log_of_its_slot_is_given_up_and_says_so(
    scratch_server: ScratchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy could not be kept up to date, so the error is raised at once, not after hours of copying."""
    monkeypatch.setattr(snapshot_round, "_WATCH_SECONDS", 0.1)
    captured = Captured(scratch_server.create_database(), tmp_path / "spool")
    captured.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT g, repeat('x', 700) FROM generate_series(1, 100) g",
    )
    sink = FileSink(tmp_path / "lake")
    copying = Copying(captured, tmp_path / "lake", executors=LocalExecutors(), sink=sink, rows=sink.rows)
    watcher = Watcher()
    given_up = threading.Event()
    give_up = Schedule.give_up

    def told(schedule: Schedule[Any]) -> None:
        give_up(schedule)
        given_up.set()

    def outlive(read: int) -> None:
        """The chunk, and so the copy, ends only after this returns."""
        if read == 1:
            scratch_server.set(max_slot_wal_keep_size="16MB")
            scratch_server.outrun(captured.slot)
            given_up.wait(200)

    monkeypatch.setattr(Schedule, "give_up", told)

    watcher.after_chunk = outlive
    with pytest.raises(SlotLostError, match=captured.slot) as caught:
        copying.run("t", watcher=watcher)
    assert "can no longer be read" in caught.value.message
    assert watcher.finished == []
    captured.database.close()
