"""Delta checkpoints that Penstock writes, as other readers read them."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession

from penstock import storage
from penstock.sinks.base import MaintenanceSettings
from penstock.sinks.delta.checkpoints import write_checkpoint
from penstock.sinks.delta.commit import commit, commit_info, removed
from penstock.sinks.delta.compaction import SharedTable
from penstock.sinks.delta.maintenance import DeltaMaintenance
from penstock.sinks.delta.state import Unsupported, newest_checkpoint
from tests.support.delta_tables import APPLICATION, InlineExecutors, state_of
from tests.support.sinks.delta_lake import Lake
from tests.support.sinks.delta_logs import follow, make_one

HOUR_MS = 3_600_000


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def cut(path: Path, version: int) -> None:
    for file in (path / "_delta_log").glob("*.json"):
        if int(file.stem) < version:
            file.unlink()


def gone(path: Path, version: int) -> set[tuple[str, str | None]]:
    """The files that a checkpoint lists as removed."""
    rows = (
        pq.read_table(path / "_delta_log" / f"{version:020d}.checkpoint.parquet", columns=["remove"])
        .column("remove")
        .to_pylist()
    )
    return {
        (row["path"], row["deletionVector"] and row["deletionVector"]["pathOrInlineDv"])
        for row in rows
        if row is not None
    }


def taken_away(path: Path, after: int, upto: int) -> set[tuple[str, str | None]]:
    """The files that commits remove."""
    found = set()
    for version in range(after + 1, upto + 1):
        for line in (path / "_delta_log" / f"{version:020d}.json").read_text(encoding="utf-8").splitlines():
            action: dict[str, Any] = json.loads(line).get("remove")
            if action:
                found.add((action["path"], action.get("deletionVector", {}).get("pathOrInlineDv")))
    return found


def test_a_checkpoint_gives_the_state_of_the_log_for_us_and_for_deltalake(lake: Lake) -> None:
    for _ in range(4):
        follow(lake)
    before = state_of(lake.path)
    write_checkpoint(lake.path, before, 0)
    assert newest_checkpoint(lake.path) == before.version
    assert (
        json.loads((lake.path / "_delta_log" / "_last_checkpoint").read_text())["version"] == before.version
    )
    cut(lake.path, before.version)
    after = state_of(lake.path)
    assert (after.version, after.protocol, after.transactions) == (
        before.version,
        before.protocol,
        before.transactions,
    )
    assert after.metadata.action == before.metadata.action
    plain = {name: {**file.action, "dataChange": False} for name, file in before.files.items()}
    assert {name: file.action for name, file in after.files.items()} == plain
    table = DeltaTable(lake.path)
    assert (table.version(), table.transaction_version(APPLICATION)) == (before.version, lake.source.position)
    rows = pa.table(
        QueryBuilder().register("t", table).execute("SELECT id, note FROM t").read_all()
    ).to_pylist()
    assert {row["id"]: row["note"] for row in rows} == {
        row["id"].typed: row["note"].typed for row in lake.source.rows.values()
    }
    follow(lake)
    assert lake.is_right


def test_tombstones_are_carried_from_checkpoint_to_checkpoint_while_they_are_needed(lake: Lake) -> None:
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


def test_a_file_that_was_added_again_has_no_tombstone(lake: Lake) -> None:
    state = state_of(lake.path)
    file = next(iter(state.files.values()))
    assert commit(lake.path, state.version + 1, [commit_info("DELETE", {}, adds_only=False), removed(file)])
    write_checkpoint(lake.path, state_of(lake.path), 0)
    assert commit(
        lake.path,
        state.version + 2,
        [commit_info("RESTORE", {}, adds_only=False), {"add": dict(file.action)}],
    )
    write_checkpoint(lake.path, state_of(lake.path), 0)
    assert gone(lake.path, state.version + 1) == {(file.path, None)}
    assert gone(lake.path, state.version + 2) == set()
    assert lake.is_right


def test_domains_that_others_wrote_stay_and_those_that_they_removed_do_not(lake: Lake) -> None:
    def domain(name: str, *, removed: bool = False) -> dict[str, Any]:
        return {"domainMetadata": {"domain": name, "configuration": "{}", "removed": removed}}

    def found(version: int) -> list[str]:
        rows = (
            pq.read_table(lake.path / "_delta_log" / f"{version:020d}.checkpoint.parquet")
            .column("domainMetadata")
            .to_pylist()
        )
        return sorted(row["domain"] for row in rows if row is not None)

    version = state_of(lake.path).version
    assert commit(lake.path, version + 1, [domain("a"), domain("b")])
    write_checkpoint(lake.path, state_of(lake.path), 0)
    assert found(version + 1) == ["a", "b"]
    assert commit(lake.path, version + 2, [domain("a", removed=True), domain("c")])
    write_checkpoint(lake.path, state_of(lake.path), 0)
    assert found(version + 2) == ["b", "c"]


def test_our_hint_replaces_deltas_with_its_checksum_and_never_moves_backward(lake: Lake) -> None:
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


@pytest.mark.parametrize(
    "name",
    ["delta.checkpoint.writeStatsAsJson", "delta.checkpoint.writeStatsAsStruct", "delta.enableRowTracking"],
)
def test_a_table_that_asks_for_more_than_we_know_is_left_to_delta(lake: Lake, name: str) -> None:
    state = state_of(lake.path)
    properties = {**state.metadata.properties, name: "false" if "Json" in name else "true"}
    other = replace(
        state, metadata=replace(state.metadata, action={**state.metadata.action, "configuration": properties})
    )
    with pytest.raises(Unsupported):
        write_checkpoint(lake.path, other, 0)
    assert newest_checkpoint(lake.path) == -1


def remove_begun_before(lake: Lake, seconds: float) -> tuple[str, int]:
    """Remove a file in a commit of now by a writer that began earlier. Returns its name and the time of the
    commit.
    """
    state = state_of(lake.path)
    file = next(iter(state.files.values()))
    action = removed(file)
    action["remove"]["deletionTimestamp"] -= int(seconds * 1000)
    assert commit(lake.path, state.version + 1, [commit_info("DELETE", {}, adds_only=False), action])
    return file.path, (
        lake.path / "_delta_log" / f"{state.version + 1:020d}.json"
    ).stat().st_mtime_ns // 1_000_000


def test_a_tombstone_has_the_time_of_its_commit_and_not_of_the_start_of_the_writer(lake: Lake) -> None:
    name, at_ms = remove_begun_before(lake, 7200)
    state = state_of(lake.path)
    write_checkpoint(lake.path, state, at_ms - 60_000)
    assert name in {path for path, _ in gone(lake.path, state.version)}
    follow(lake)
    state = state_of(lake.path)
    write_checkpoint(lake.path, state, at_ms - 60_000)
    assert name in {path for path, _ in gone(lake.path, state.version)}, "taken over as it was"
    follow(lake)
    state = state_of(lake.path)
    write_checkpoint(lake.path, state, at_ms + 1)
    assert name not in {path for path, _ in gone(lake.path, state.version)}


def test_tombstones_in_checkpoints_of_others_may_be_an_hour_too_old(lake: Lake) -> None:
    name, at_ms = remove_begun_before(lake, 1800)
    first = state_of(lake.path)
    write_checkpoint(lake.path, first, 0)
    theirs = lake.path / "_delta_log" / f"{first.version:020d}.checkpoint.parquet"
    rows = pq.read_table(theirs).to_pylist()
    for row in rows:
        if row["remove"] is not None and row["remove"]["path"] == name:
            row["remove"]["deletionTimestamp"] -= HOUR_MS // 2
    pq.write_table(pa.Table.from_pylist(rows, pq.read_schema(theirs)), theirs, store_schema=False)
    for _ in range(2):
        follow(lake)
        state = state_of(lake.path)
        write_checkpoint(lake.path, state, at_ms - 60_000)
        assert name in {path for path, _ in gone(lake.path, state.version)}
    follow(lake)
    state = state_of(lake.path)
    write_checkpoint(lake.path, state, int(theirs.stat().st_mtime * 1000) + 1000)
    assert name not in {path for path, _ in gone(lake.path, state.version)}, "all others are older"


def test_a_checkpoint_that_delta_has_just_written_stays_with_its_checksum(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(lake.path)
    log = lake.path / "_delta_log"
    target, sync = log / f"{state.version:020d}.checkpoint.parquet", storage.sync_file

    def meanwhile(path: Path) -> None:
        target.write_bytes(b"Delta's")
        sync(path)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "sync_file", meanwhile)
        write_checkpoint(lake.path, state, 0)
    assert target.read_bytes() == b"Delta's"
    assert not (log / "_last_checkpoint").exists(), "the writer announces it itself"
    assert not list(log.glob(".penstock-*"))


@pytest.mark.parametrize(("restored", "is_written"), [("another", True), (APPLICATION, False)])
def test_K09_only_one_of_our_positions_from_before_a_restore_keeps_checkpoints_from_being_written(
    lake: Lake, restored: str, *, is_written: bool
) -> None:
    state = replace(state_of(lake.path), restored=frozenset({restored}))
    maintenance = DeltaMaintenance(
        cast(SparkSession, None), InlineExecutors(), MaintenanceSettings(compact_after=0, checkpoint_after=1)
    )
    maintenance.run(SharedTable(lake.path, threading.Lock(), lambda: state), APPLICATION)
    assert (newest_checkpoint(lake.path) == state.version) is is_written
