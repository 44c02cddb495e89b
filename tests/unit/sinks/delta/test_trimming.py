"""Delta logs trimmed at a checkpoint, with everything that is needed after it."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from penstock import storage
from penstock.position import Position
from penstock.sinks.base import MaintenanceSettings
from penstock.sinks.delta import maintenance as delta_trimming
from penstock.sinks.delta.checkpoints import write_checkpoint
from penstock.sinks.delta.commit import commit, commit_info, removed
from penstock.sinks.delta.log import OWNER, version_at
from penstock.sinks.delta.maintenance import (
    LogTrimmer,
    parse_interval,
    removed_file_retention_seconds,
    required_retention_seconds,
    retained_hours,
)
from penstock.sinks.delta.state import DeltaState, commit_file
from tests.support.delta_tables import APPLICATION, rows_of, state_of
from tests.support.sinks.delta_lake import DyingExecutors, Lake
from tests.support.sinks.delta_logs import follow, log_of, make_one, release_ownership

HOUR = 3600.0
DAY = 24 * HOUR


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


class History:
    """A table with hourly commits and occasional checkpoints, whose rows at each version are known."""

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
        """Age commits and checkpoints, then read the table as another reader."""
        last = log_of(self.lake)[-1]
        for file in (self.lake.path / "_delta_log").glob("[0-9]*.*"):
            at = time.time() - HOUR * (last - int(file.name[:20])) - 60
            os.utime(file, (at, at))
        self.trimmer = LogTrimmer(self.lake.path, None)

    def trim(self, settings: MaintenanceSettings) -> None:
        self.trimmer.trim(state_of(self.lake.path), settings)

    def check(self, scratch: Path) -> None:
        """Every version that the log still has is unchanged for a reader without state."""
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


def keeping(
    seconds: float | None = 1000 * HOUR, versions: int = 1000, hold: float = 0.0
) -> MaintenanceSettings:
    return MaintenanceSettings(keep_seconds=seconds, versions=versions, hold_seconds=hold)


@pytest.mark.parametrize("seed", range(3))
def test_versions_that_are_kept_are_whole_and_files_that_only_others_need_are_gone(
    lake: Lake, tmp_path: Path, seed: int
) -> None:
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
    assert data == set(state.files), (
        "of the files that commits named, just those are left that the last version has"
    )
    assert len(list(lake.path.glob("*.bin"))) <= len(vectors)


def test_versions_are_kept_by_age_by_number_and_in_any_case_for_a_while(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_trimming, "_FEW_COMMITS", 1)
    history = History(lake, 1)
    for _ in range(12):
        follow(lake)
        history.checkpoint()
    history.age()
    last = state_of(lake.path).version
    history.trim(keeping(1000 * HOUR, versions=1000))
    assert log_of(lake)[0] == 0
    history.trim(keeping(10.5 * HOUR))
    assert log_of(lake)[0] == last - 11, "the rows of that version, not only later ones"
    history.trim(keeping(versions=5, hold=8.5 * HOUR))
    assert log_of(lake)[0] == last - 9
    history.trim(keeping(versions=5))
    assert log_of(lake)[0] == last - 4
    assert version_at(lake.path, APPLICATION, Position.of(lake.source.fence)) is None, (
        "not searched without files"
    )


@pytest.mark.parametrize("seed", range(3))
def test_K01_a_crash_while_a_log_is_cut_leaves_a_log_that_begins_earlier(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    history = History(lake, seed)
    history.go_on(8)
    history.checkpoint()
    history.age()
    remove, left = storage.delete, [history.random.randrange(40)]

    def dying(path: Path) -> None:
        if not left[0]:
            raise DyingExecutors
        left[0] -= 1
        remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "delete", dying)
        with suppress(DyingExecutors):
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
    actions = [removed(file) for file in now.files.values()] + [
        {"add": dict(file.action)} for file in before.files.values()
    ]
    assert commit(lake.path, now.version + 1, [commit_info("RESTORE", {}, adds_only=False), *actions])
    # Removed again by a version that is kept.
    back = state_of(lake.path)
    assert commit(
        lake.path,
        back.version + 1,
        [commit_info("DELETE", {}, adds_only=False), *(removed(each) for each in back.files.values())],
    )
    os.utime(lake.path / "_delta_log" / f"{now.version:020d}.json", (1, 1))
    history.trim(keeping(versions=3))
    assert log_of(lake)[0] == now.version
    assert all((lake.path / name).exists() for name in back.files)


def test_older_versions_are_begun_with_fewer_checkpoints(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_trimming, "_FEW_COMMITS", 4)
    history = History(lake, 3)
    for _ in range(12):
        follow(lake)
        history.rows[state_of(lake.path).version] = history._now()
        history.checkpoint()
    history.trim(keeping(hold=HOUR))
    assert len(log_of(lake, "*.checkpoint.parquet")) == 12, "a reader may be using them"
    release_ownership(lake.path, 6)
    history.age()
    history.trim(keeping(hold=HOUR))
    assert state_of(lake.path).version == 14
    found = log_of(lake, "*.checkpoint.parquet")
    assert found == [3, 6, 10, 13, 14], "6 is another writer's, and 13 was the newest until a minute ago"
    history.check(tmp_path / "copy")


@pytest.fixture
def aged(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> History:
    """Versions 0 to 14, an hour apart, and a checkpoint of each from 3 on."""
    monkeypatch.setattr(delta_trimming, "_FEW_COMMITS", 1)
    history = History(lake, 1)
    for _ in range(12):
        follow(lake)
        history.checkpoint()
    history.age()
    assert state_of(lake.path).version == 14
    return history


def test_where_nothing_is_to_be_removed_nothing_is(aged: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_trimming, "_FEW_COMMITS", 1000)
    before = sorted(file.name for file in aged.lake.path.rglob("*"))
    aged.trim(keeping(None, versions=1))
    assert sorted(file.name for file in aged.lake.path.rglob("*")) == before


def test_a_log_does_not_begin_with_a_checkpoint_that_has_only_just_been_written(lake: Lake) -> None:
    """However old its version is: until then readers started from the previous one, and may still be using
    it.
    """
    history = History(lake, 1)
    follow(lake)
    history.checkpoint()
    begun = state_of(lake.path).version
    for _ in range(5):
        follow(lake)
    history.age()
    for file in (lake.path / "_delta_log").glob("[0-9]*.json"):
        os.utime(file, (time.time() - DAY,) * 2)
    history.trimmer = LogTrimmer(lake.path, None)
    history.checkpoint()
    history.trim(keeping(2 * HOUR, hold=HOUR))
    assert log_of(lake)[0] == begun
    newest = state_of(lake.path).version
    os.utime(lake.path / "_delta_log" / f"{newest:020d}.checkpoint.parquet", (time.time() - 1.1 * HOUR,) * 2)
    history.trim(keeping(2 * HOUR, hold=HOUR))
    assert log_of(lake) == [newest]


def test_versions_that_others_checkpointed_are_cut_with_the_rest(aged: History) -> None:
    release_ownership(aged.lake.path, 5)
    aged.trim(keeping(7.5 * HOUR))
    assert log_of(aged.lake)[0] == log_of(aged.lake, "*.checkpoint.parquet")[0] == 6


def test_versions_in_use_are_kept_however_short_the_configured_time(aged: History) -> None:
    for file in (aged.lake.path / "_delta_log").glob("*.checkpoint.parquet"):
        os.utime(file, (1, 1))
    aged.trim(keeping(60.0, hold=5.5 * HOUR))
    assert log_of(aged.lake)[0] == 8


def test_a_commit_whose_file_looks_older_than_the_one_before_it_is_not(aged: History) -> None:
    os.utime(aged.lake.path / "_delta_log" / f"{11:020d}.json", (1, 1))
    aged.trim(keeping(5.5 * HOUR))
    assert log_of(aged.lake)[0] == 8


def test_tombstones_since_the_beginning_are_known_by_the_earliest_time_of_a_later_commit(
    aged: History,
) -> None:
    early = time.time() - 100 * HOUR
    os.utime(aged.lake.path / "_delta_log" / f"{12:020d}.json", (early, early))
    assert aged.trimmer.oldest_kept_ms(state_of(aged.lake.path), keeping(5.5 * HOUR)) == pytest.approx(
        early * 1000, abs=2
    )


# --- what tables ask for themselves -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("interval 30 days", 30 * DAY),
        ("INTERVAL 1 Week 12 hours", 7.5 * DAY),
        ("2 days", 2 * DAY),
        ("interval 90 minutes 30 seconds", 5430.0),
        ("interval 0 days", 0.0),
        ("interval 1 month", float("inf")),
        ("interval 0 years", float("inf")),
        ("interval -1 day", float("inf")),
        ("P30D", float("inf")),
        ("interval", float("inf")),
        ("", float("inf")),
    ],
)
def test_intervals_are_parsed_as_spark_writes_them_and_others_mean_no_limit(
    text: str, seconds: float
) -> None:
    assert parse_interval(text) == seconds


def test_a_table_requests_the_longer_of_the_retentions_of_its_log_and_its_files() -> None:
    log, files = (
        {"delta.logRetentionDuration": "interval 3 days"},
        {"delta.deletedFileRetentionDuration": "interval 4 days"},
    )
    assert [required_retention_seconds(each) for each in ({}, log, files, log | files)] == [
        0.0,
        3 * DAY,
        4 * DAY,
        4 * DAY,
    ]
    assert [removed_file_retention_seconds(each) for each in ({}, log, files)] == [7 * DAY, 7 * DAY, 4 * DAY]


def test_vacuum_respects_the_retention_of_a_table(tmp_path: Path) -> None:
    assert retained_hours(tmp_path / "none", HOUR) is None
    write_deltalake(tmp_path / "plain", pa.table({"id": [1]}))
    assert retained_hours(tmp_path / "plain", 1.5 * HOUR) == 2
    for name, interval, hours in [("days", "interval 2 days", 48), ("months", "interval 2 months", None)]:
        write_deltalake(tmp_path / name, pa.table({"id": [1]}), configuration={"delta.appendOnly": "false"})
        first = commit_file(tmp_path / name, 0)
        asked = f'"delta.deletedFileRetentionDuration":"{interval}"'
        first.write_text(
            first.read_text(encoding="utf-8").replace('"delta.appendOnly":"false"', asked), encoding="utf-8"
        )
        assert retained_hours(tmp_path / name, HOUR) == hours


def asking(history: History, **properties: str) -> DeltaState:
    state = state_of(history.lake.path)
    configuration = {
        **state.metadata.properties,
        **{f"delta.{name}": value for name, value in properties.items()},
    }
    return replace(
        state,
        metadata=replace(state.metadata, action={**state.metadata.action, "configuration": configuration}),
    )


@pytest.mark.parametrize("name", ["logRetentionDuration", "deletedFileRetentionDuration"])
def test_a_table_that_asks_for_more_history_keeps_it(aged: History, name: str) -> None:
    aged.trimmer.trim(asking(aged, **{name: "interval a while"}), keeping(HOUR, versions=2))
    assert log_of(aged.lake)[0] == 0, "an unknown format is never deleted"
    state = asking(aged, **{name: "interval 9 hours 30 minutes"})
    aged.trimmer.trim(state, keeping(HOUR, versions=2))
    assert log_of(aged.lake)[0] == 4
    aged.trimmer.trim(state, keeping(100 * HOUR, versions=2))
    assert log_of(aged.lake)[0] == 4, "neither may their number end it"
    aged.trimmer.trim(asking(aged, **{name: "interval 2 hours"}), keeping(7.5 * HOUR))
    assert log_of(aged.lake)[0] == 6, "a shorter time is not ours to shorten"


def test_without_removal_checkpoints_keep_tombstones_for_the_retention_of_delta(aged: History) -> None:
    def since(**properties: str) -> float:
        return aged.trimmer.oldest_kept_ms(asking(aged, **properties), keeping(None)) / 1000

    assert since() == pytest.approx(time.time() - 7 * DAY, abs=60)
    assert since(deletedFileRetentionDuration="interval 2 days") == pytest.approx(
        time.time() - 2 * DAY, abs=60
    )
    assert since(deletedFileRetentionDuration="for long") == 0


def take(lake: Lake) -> None:
    """Make the table a pipeline's, in a commit."""
    state = state_of(lake.path)
    mine = {**state.metadata.action, "configuration": {**state.metadata.properties, OWNER: "shop"}}
    assert commit(
        lake.path,
        state.version + 1,
        [commit_info("SET TBLPROPERTIES", {}, adds_only=False), {"metaData": mine}],
    )


def test_versions_from_before_an_adoption_are_removed_by_age_and_not_by_number(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_trimming, "_FEW_COMMITS", 1)
    history = History(lake, 1)
    for number in range(12):
        if number == 4:
            take(lake)
        follow(lake)
        history.checkpoint()
    history.age()
    last = state_of(lake.path).version
    assert last == 15
    history.trim(keeping(10.5 * HOUR, versions=3))
    assert log_of(lake)[0] == last - 11 == 4, "of before, and younger than that"
    history.trim(keeping(8.5 * HOUR, versions=3))
    assert log_of(lake)[0] == 6
    history.trim(keeping(7.5 * HOUR, versions=3))
    assert log_of(lake)[0] == last - 2, "all of before are older than that"
    history.trimmer = LogTrimmer(lake.path, None)
    take(lake)
    follow(lake)
    history.trim(keeping(versions=2))
    assert log_of(lake)[0] == last, "the checkpoint at its beginning says whose it is"


def test_a_remove_that_names_a_file_outside_the_table_or_a_live_one_removes_nothing(
    lake: Lake, tmp_path: Path
) -> None:
    outside, history = tmp_path / "outside.parquet", History(lake, 1)
    outside.write_bytes(b"another program's")
    (lake.path / "linked").symlink_to(tmp_path)
    live = next(iter(state_of(lake.path).files))
    up = os.path.relpath(outside, lake.path)
    paths = [
        up,
        up.replace("..", "%2E%2E"),
        str(outside),
        outside.as_uri(),
        "linked/outside.parquet",
        f"a/../{live}",
    ]
    version = state_of(lake.path).version + 1
    removes = [
        json.dumps({"remove": {"path": path, "dataChange": True}})
        for path in [*paths, "_delta_log/_last_checkpoint"]
    ]
    (lake.path / "_delta_log" / f"{version:020d}.json").write_text("\n".join(removes), encoding="utf-8")
    (lake.path / "_delta_log" / "_last_checkpoint").write_text("{}", encoding="utf-8")
    history.checkpoint()
    history.age()
    history.trim(keeping(seconds=0.0))
    assert log_of(lake) == [version]
    assert outside.exists()
    assert (lake.path / live).exists()
    assert (lake.path / "_delta_log" / "_last_checkpoint").exists()


def test_the_times_of_20_000_versions_take_a_quarter_of_a_megabyte(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = 20_000
    trimmer, state = LogTrimmer(lake.path, None), replace(state_of(lake.path), version=versions)
    begins_ms = int((time.time() - versions) * 1000)

    def mark(path: Path) -> storage.FileVersion:
        return storage.FileVersion(1, (begins_ms + int(path.stem) * 1000) * 1_000_000, 1)

    monkeypatch.setattr(storage, "file_version", mark)
    tracemalloc.start()
    assert trimmer.oldest_kept_ms(state, MaintenanceSettings()) == begins_ms
    # Not all that is held: pathlib interns names, and the interpreter's table of those grows on the way.
    own = tracemalloc.Filter(inclusive=True, filename_pattern=delta_trimming.__file__)
    held = tracemalloc.take_snapshot().filter_traces([own])
    tracemalloc.stop()
    assert 0 < sum(trace.size for trace in held.traces) < 250_000
