"""Logs of Delta tables that are cut off at a checkpoint, with all that is needed after it."""

from __future__ import annotations

import os
import random
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.position import Position
from penstock.sinks.delta import trimming as delta_trimming
from penstock.sinks.delta.checkpoints import write_checkpoint
from penstock.sinks.delta.commit import commit, commit_info, removed
from penstock.sinks.delta.log import version_at
from penstock.sinks.delta.trimming import LogTrimmer
from penstock.sinks.upkeep import Upkeep
from penstock.spool import storage
from tests.delta_tables import APPLICATION, rows_of, state_of
from tests.unit.test_delta_checkpoints import follow, log_of, make_one
from tests.unit.test_delta_epoch import Dies, Lake

HOUR = 3600.0


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


class History:
    """A table whose commits are an hour apart, with a checkpoint now and then; what it held at each version is known."""

    def __init__(self, lake: Lake, seed: int) -> None:
        self.lake = lake
        self.random = random.Random(seed)
        self.rows = {state_of(lake.path).version: self._now()}
        self.trimmer = LogTrimmer(lake.path, None)

    def go_on(self, epochs: int) -> None:
        for _ in range(epochs):
            if self.random.random() < 0.25 and len(state_of(self.lake.path).files) > 1:
                make_one(self.lake)
                self.rows[state_of(self.lake.path).version] = self._now()
            follow(self.lake, self.random)
            self.rows[state_of(self.lake.path).version] = self._now()
            if self.random.random() < 0.4:
                self.checkpoint()
        self.age()

    def checkpoint(self, since_ms: int = 0) -> None:
        state = state_of(self.lake.path)
        write_checkpoint(self.lake.path, state, since_ms)
        self.trimmer.has(state.version)

    def age(self) -> None:
        commits = log_of(self.lake)
        for version in commits:
            at = time.time() - HOUR * (commits[-1] - version) - 60
            os.utime(self.lake.path / "_delta_log" / f"{version:020d}.json", (at, at))

    def trim(self, upkeep: Upkeep) -> None:
        self.trimmer.trim(state_of(self.lake.path), upkeep)

    def check(self, scratch: Path) -> None:
        """Every version from the beginning of the log on is what it was, to somebody who knows nothing of it."""
        commits = log_of(self.lake)
        assert commits == list(range(commits[0], commits[-1] + 1))
        assert commits[0] == 0 or commits[0] in log_of(self.lake, "*.checkpoint.parquet")
        for version in commits:
            if version in self.rows:
                shutil.rmtree(scratch, ignore_errors=True)
                shutil.copytree(self.lake.path, scratch)
                for file in (scratch / "_delta_log").iterdir():
                    if file.name[:20].isdigit() and int(file.name[:20]) > version:
                        file.unlink()
                assert {row["id"]: row["note"] for row in rows_of(scratch)} == self.rows[version], version

    def _now(self) -> dict[object, object]:
        return {row["id"].typed: row["note"].typed for row in self.lake.source.rows.values()}


def keeping(seconds: float | None = 1000 * HOUR, versions: int = 1000, hold: float = 0.0) -> Upkeep:
    return Upkeep(keep_seconds=seconds, versions=versions, hold_seconds=hold)


@pytest.mark.parametrize("seed", range(3))
def test_versions_that_are_kept_are_whole_and_files_that_only_others_need_are_gone(lake: Lake, tmp_path: Path, seed: int) -> None:
    history = History(lake, seed)
    for _ in range(3):
        history.go_on(4)
        history.checkpoint()
        history.trim(keeping(versions=history.random.randrange(1, 8)))
        history.check(tmp_path / "copy")
    history.go_on(1)
    history.checkpoint()
    history.trim(keeping(seconds=0.0))
    history.check(tmp_path / "copy")
    state = state_of(lake.path)
    assert log_of(lake) == [state.version]
    vectors = {file.vector.identity for file in state.files.values() if file.vector is not None}
    data = {file.name for file in lake.path.glob("*.parquet")}
    assert data == set(state.files), "of the files that commits named, just those are left that the last version has"
    assert len(list(lake.path.glob("*.bin"))) <= len(vectors)


def test_versions_are_kept_by_age_by_number_and_in_any_case_for_a_while(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_trimming, "_FEW_COMMITS", 1)
    history = History(lake, 1)
    for _ in range(12):
        follow(lake)
        history.checkpoint()
    history.age()
    last = state_of(lake.path).version
    history.trim(keeping(None))
    assert log_of(lake)[0] == 0, "that is left to others"
    history.trim(keeping(1000 * HOUR, versions=1000))
    assert log_of(lake)[0] == 0
    history.trim(keeping(10.5 * HOUR))
    assert log_of(lake)[0] == last - 10
    history.trim(keeping(versions=5, hold=8.5 * HOUR))
    assert log_of(lake)[0] == last - 8
    history.trim(keeping(versions=5))
    assert log_of(lake)[0] == last - 4
    assert version_at(lake.path, APPLICATION, Position.of(lake.source.fence)) is None, "not looked for where nothing is"


@pytest.mark.parametrize("seed", range(3))
def test_K01_a_crash_while_a_log_is_cut_leaves_a_log_that_begins_earlier(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    history = History(lake, seed)
    history.go_on(8)
    history.checkpoint()
    history.age()
    remove, left = storage.remove_file, [history.random.randrange(40)]

    def dying(path: Path) -> None:
        if not left[0]:
            raise Dies
        left[0] -= 1
        remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "remove_file", dying)
        with suppress(Dies):
            history.trim(keeping(versions=2))
    last = state_of(lake.path).version
    assert {row["id"]: row["note"] for row in rows_of(lake.path)} == history.rows[last]
    history.trimmer = LogTrimmer(lake.path, None)
    history.trim(keeping(versions=2))
    history.check(tmp_path / "copy")


def test_K09_files_that_a_restore_brought_back_are_left_to_vacuum(lake: Lake, tmp_path: Path) -> None:
    history = History(lake, 2)
    before = state_of(lake.path)
    follow(lake)
    make_one(lake)
    history.checkpoint()
    now = state_of(lake.path)
    actions = [removed(file) for file in now.files.values()] + [{"add": dict(file.action)} for file in before.files.values()]
    assert commit(lake.path, now.version + 1, [commit_info("RESTORE", {}, adds_only=False), *actions])
    # Gone again, from a version that is kept.
    back = state_of(lake.path)
    assert commit(
        lake.path, back.version + 1, [commit_info("DELETE", {}, adds_only=False), *(removed(each) for each in back.files.values())]
    )
    os.utime(lake.path / "_delta_log" / f"{now.version:020d}.json", (1, 1))
    history.trim(keeping(versions=3))
    assert log_of(lake)[0] == now.version
    assert all((lake.path / name).exists() for name in back.files)


def test_older_versions_are_begun_with_fewer_checkpoints(lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_trimming, "_FEW_COMMITS", 4)
    history = History(lake, 3)
    for _ in range(12):
        follow(lake)
        history.rows[state_of(lake.path).version] = history._now()
        history.checkpoint()
    history.trim(keeping())
    assert len(log_of(lake, "*.checkpoint.parquet")) == 12, "somebody may be reading them"
    history.age()
    history.trim(keeping())
    found = log_of(lake, "*.checkpoint.parquet")
    assert found[0] == 3
    assert found[-1] == state_of(lake.path).version
    assert len(found) == 4
    history.check(tmp_path / "copy")
