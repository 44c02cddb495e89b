"""Checkpoints that we write, as everybody else reads them; and logs that are cut off at one, with all that is needed after it."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder

from penstock.position import Position
from penstock.sinks.delta import trimming as delta_trimming
from penstock.sinks.delta.checkpoints import write_checkpoint
from penstock.sinks.delta.commit import commit, commit_info, removed
from penstock.sinks.delta.compaction import SharedTable, compact
from penstock.sinks.delta.log import version_at
from penstock.sinks.delta.state import Unsupported, load_state, newest_checkpoint
from penstock.sinks.delta.trimming import LogTrimmer
from penstock.sinks.upkeep import Upkeep
from penstock.spool import storage
from tests.delta_tables import APPLICATION, InlineExecutors, rows_of, state_of
from tests.integration.sinks.source import Value
from tests.unit.test_delta_epoch import Dies, Lake

HOUR = 3600.0


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def follow(lake: Lake, seeded: random.Random | None = None) -> None:
    """One more epoch."""
    keys = [int(str(row["id"].typed)) for row in lake.source.rows.values()]
    some = seeded or random.Random(len(lake.source.log))
    for key in some.sample(keys, min(2, len(keys))):
        lake.source.update((Value(key),), {"note": Value(f"at {lake.source.position} {key}")})
    if len(keys) > 4 and some.random() < 0.4:
        lake.source.delete((Value(some.choice(keys)),))
    lake.source.insert({"id": Value(max(keys) + 1), "note": Value("new")})
    lake.source.commit()
    assert lake.epoch(lake.slices()).apply(InlineExecutors())


def make_one(lake: Lake) -> None:
    state = state_of(lake.path)
    shared = SharedTable(lake.path, threading.Lock(), lambda: load_state(lake.path))
    assert compact(shared, state, list(state.files.values())[:-1], InlineExecutors())


def log_of(lake: Lake, pattern: str = "*.json") -> list[int]:
    return sorted(int(file.name[:20]) for file in (lake.path / "_delta_log").glob(pattern))


def cut(path: Path, version: int) -> None:
    for file in (path / "_delta_log").glob("*.json"):
        if int(file.stem) < version:
            file.unlink()


def gone(path: Path, version: int) -> set[tuple[str, str | None]]:
    """What a checkpoint says is gone."""
    rows = pq.read_table(path / "_delta_log" / f"{version:020d}.checkpoint.parquet", columns=["remove"]).column("remove").to_pylist()
    return {(row["path"], row["deletionVector"] and row["deletionVector"]["pathOrInlineDv"]) for row in rows if row is not None}


def taken_away(path: Path, after: int, upto: int) -> set[tuple[str, str | None]]:
    """What commits say that goes."""
    found = set()
    for version in range(after + 1, upto + 1):
        for line in (path / "_delta_log" / f"{version:020d}.json").read_text(encoding="utf-8").splitlines():
            action: dict[str, Any] = json.loads(line).get("remove")
            if action:
                found.add((action["path"], action.get("deletionVector", {}).get("pathOrInlineDv")))
    return found


def test_a_checkpoint_is_what_the_log_comes_to_for_us_and_for_deltalake(lake: Lake) -> None:
    for _ in range(4):
        follow(lake)
    before = state_of(lake.path)
    write_checkpoint(lake.path, before, 0)
    assert newest_checkpoint(lake.path) == before.version
    assert json.loads((lake.path / "_delta_log" / "_last_checkpoint").read_text())["version"] == before.version
    cut(lake.path, before.version)
    after = state_of(lake.path)
    assert (after.version, after.protocol, after.transactions) == (before.version, before.protocol, before.transactions)
    assert after.metadata.action == before.metadata.action
    plain = {name: {**file.action, "dataChange": False} for name, file in before.files.items()}
    assert {name: file.action for name, file in after.files.items()} == plain
    table = DeltaTable(lake.path)
    assert (table.version(), table.transaction_version(APPLICATION)) == (before.version, lake.source.position)
    rows = pa.table(QueryBuilder().register("t", table).execute("SELECT id, note FROM t").read_all()).to_pylist()
    assert {row["id"]: row["note"] for row in rows} == {row["id"].typed: row["note"].typed for row in lake.source.rows.values()}
    follow(lake)
    assert lake.is_right


def test_what_is_gone_is_taken_over_from_checkpoint_to_checkpoint_as_long_as_it_is_needed(lake: Lake) -> None:
    follow(lake)
    follow(lake)
    first = state_of(lake.path)
    write_checkpoint(lake.path, first, 0)
    assert gone(lake.path, first.version) == taken_away(lake.path, -1, first.version)
    assert gone(lake.path, first.version)
    follow(lake)
    make_one(lake)
    second = state_of(lake.path)
    write_checkpoint(lake.path, second, 0)
    assert gone(lake.path, second.version) == taken_away(lake.path, -1, second.version)
    time.sleep(0.002)
    since = int(time.time() * 1000)
    follow(lake)
    third = state_of(lake.path)
    write_checkpoint(lake.path, third, since)
    assert gone(lake.path, third.version) == taken_away(lake.path, second.version, third.version)


def test_a_file_that_came_back_is_not_gone(lake: Lake) -> None:
    state = state_of(lake.path)
    file = next(iter(state.files.values()))
    assert commit(lake.path, state.version + 1, [commit_info("DELETE", {}, adds_only=False), removed(file)])
    write_checkpoint(lake.path, state_of(lake.path), 0)
    assert commit(lake.path, state.version + 2, [commit_info("RESTORE", {}, adds_only=False), {"add": dict(file.action)}])
    write_checkpoint(lake.path, state_of(lake.path), 0)
    assert gone(lake.path, state.version + 1) == {(file.path, None)}
    assert gone(lake.path, state.version + 2) == set()
    assert lake.is_right


def test_domains_that_others_wrote_stay_and_those_that_they_removed_do_not(lake: Lake) -> None:
    def domain(name: str, *, removed: bool = False) -> dict[str, Any]:
        return {"domainMetadata": {"domain": name, "configuration": "{}", "removed": removed}}

    def found(version: int) -> list[str]:
        rows = pq.read_table(lake.path / "_delta_log" / f"{version:020d}.checkpoint.parquet").column("domainMetadata").to_pylist()
        return sorted(row["domain"] for row in rows if row is not None)

    version = state_of(lake.path).version
    assert commit(lake.path, version + 1, [domain("a"), domain("b")])
    write_checkpoint(lake.path, state_of(lake.path), 0)
    assert found(version + 1) == ["a", "b"]
    assert commit(lake.path, version + 2, [domain("a", removed=True), domain("c")])
    write_checkpoint(lake.path, state_of(lake.path), 0)
    assert found(version + 2) == ["b", "c"]


def test_the_hint_takes_the_place_of_deltas_with_its_checksum_and_never_goes_back(lake: Lake) -> None:
    log = lake.path / "_delta_log"
    (log / "_last_checkpoint").write_text('{"version":0,"size":2}')
    (log / "._last_checkpoint.crc").write_bytes(b"of the former")
    old = state_of(lake.path)
    follow(lake)
    new = state_of(lake.path)
    write_checkpoint(lake.path, new, 0)
    assert not (log / "._last_checkpoint.crc").exists()
    (log / f"{old.version:020d}.checkpoint.parquet").unlink(missing_ok=True)
    write_checkpoint(lake.path, old, 0)
    assert json.loads((log / "_last_checkpoint").read_text())["version"] == new.version


@pytest.mark.parametrize("name", ["delta.checkpoint.writeStatsAsJson", "delta.enableRowTracking"])
def test_a_table_that_asks_for_more_than_we_know_is_left_to_delta(lake: Lake, name: str) -> None:
    state = state_of(lake.path)
    properties = {**state.metadata.properties, name: "false" if "Json" in name else "true"}
    other = replace(state, metadata=replace(state.metadata, action={**state.metadata.action, "configuration": properties}))
    with pytest.raises(Unsupported):
        write_checkpoint(lake.path, other, 0)
    assert newest_checkpoint(lake.path) == -1


# --- logs that are cut off -------------------------------------------------------------------------------------------------------


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
