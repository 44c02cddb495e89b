"""A capture whose consumers are far behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import storage
from penstock.capture.settings import CaptureLimits
from penstock.spool import Manifest, SpoolReader, release
from penstock.spool.manifest import MANIFEST, SpoolLayout, dump_manifest
from tests.support.slot.source import Source
from tests.support.spool.builders import at
from tests.support.waiting import DEADLINE_SECONDS, wait_for

BACKLOG = 800


def add_backlog(spool: Path) -> None:
    """Empty segments before all others, as left by days of a filtered database."""
    for end in range(1, BACKLOG + 1):
        directory = SpoolLayout(spool).segment(at(end))
        directory.mkdir(parents=True)
        (directory / MANIFEST).write_bytes(dump_manifest(Manifest(at(end - 1), at(end), 0, None, ())))


def noting(listed: list[Path]) -> Callable[[Path], list[storage.DirectoryEntry]]:
    """Records which directories are listed."""
    list_directories = storage.list_directories

    def list_and_note(path: Path) -> list[storage.DirectoryEntry]:
        listed.append(path)
        return list_directories(path)

    return list_and_note


def test_an_idle_capture_with_thousands_of_segments_lists_nothing_and_a_restart_counts_them(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.capture_all(0, 10)
    add_backlog(source.spool)
    release(source.spool, "one", at(0))
    with source.capture(CaptureLimits(seal_seconds=0.2, quiet_seconds=0.1)) as capture:
        assert capture.wait_until(source.insert(11, 20), DEADLINE_SECONDS), source.state()
        listed: list[Path] = []
        with monkeypatch.context() as patch:
            patch.setattr(storage, "list_directories", noting(listed))
            # A backlog from before the restart: the pause between two segments is 12 seconds.
            end, began = source.insert(21, 30), time.process_time()
            assert not capture.wait_until(end, 2.0)
            assert time.process_time() - began < 0.5
        assert listed == []
        sealed = capture.end
        assert sealed is not None
        release(source.spool, "one", sealed)
        assert capture.wait_until(end, 10.0), "small segments again, as soon as the consumer is back"
        wait_for(
            lambda: len(SpoolReader(source.spool).segments()) < BACKLOG / 2,
            "a spool without what was released",
            source.state,
        )
    assert source.ids(after=sealed) == list(range(21, 31))
