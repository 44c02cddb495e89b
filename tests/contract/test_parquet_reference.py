"""`ParquetReferenceTable` passes the reference table suite; tests of what it adds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typing_extensions import override

from penstock.contracts.capture import Delete, Event, Truncate, Upsert
from penstock.contracts.reference import ReferenceTableSource
from penstock.errors import ConfigError, ReferenceUnreadableError, SchemaChangedError
from penstock.reference.parquet import ParquetReferenceTable
from penstock.testing.reference_conformance import Follower, ReferenceHarness, ReferenceTableConformance

SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("note", pa.string())])


class ParquetHarness(ReferenceHarness):
    deadline_seconds = 10.0
    many_rows = 12_000
    delivers_steps = False
    breaks = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[object, object] = {}
        self.write()

    @override
    def source(self) -> ReferenceTableSource:
        return ParquetReferenceTable(self.path, ["id"])

    @override
    def commit(self, *events: Event) -> None:
        for event in events:
            match event:
                case Upsert():
                    self.rows[event.key["id"]] = event.row["note"]
                case Delete():
                    self.rows.pop(event.key["id"], None)
                case Truncate():
                    self.rows.clear()
        self.write()

    @override
    @contextmanager
    def broken(self) -> Iterator[None]:
        whole = self.path.read_bytes()
        self.path.write_bytes(whole[: len(whole) // 2])
        yield
        self.write()

    def write(self) -> None:
        temporary = self.path.with_suffix(".tmp")
        pq.write_table(pa.table([list(self.rows), list(self.rows.values())], schema=SCHEMA), temporary)
        temporary.replace(self.path)

    @override
    def open_resources(self) -> object:
        return [
            link
            for link in map(_target, Path("/proc/self/fd").iterdir())
            if link.startswith(str(self.path.parent))
        ]


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:
        return ""


@pytest.fixture
def harness(tmp_path: Path) -> ParquetHarness:
    return ParquetHarness(tmp_path / "rows.parquet")


class TestParquetReference(ReferenceTableConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> ParquetHarness:
        return ParquetHarness(tmp_path / "rows.parquet")


def test_files_of_a_directory_are_one_table(tmp_path: Path) -> None:
    for number in range(3):
        pq.write_table(pa.table([[number], [f"n{number}"]], schema=SCHEMA), tmp_path / f"{number}.parquet")
    (tmp_path / "_SUCCESS").touch()
    pq.write_table(pa.table([[9], ["hidden"]], schema=SCHEMA), tmp_path / "_9.parquet")
    follower = Follower(
        ParquetHarness(tmp_path / ".." / "other.parquet"), ParquetReferenceTable(tmp_path, ["id"])
    )
    assert follower.finish_snapshot().table == {0: "n0", 1: "n1", 2: "n2"}
    (tmp_path / "1.parquet").unlink()
    follower.follow({0: "n0", 2: "n2"})


def test_half_a_file_is_waited_for_and_takes_nothing_away(harness: ParquetHarness) -> None:
    harness.rows = {1: "one"}
    harness.write()
    follower = Follower(harness, harness.source())
    follower.finish_snapshot()
    before = follower.source.checkpoint()
    whole = harness.path.read_bytes()
    harness.path.write_bytes(whole[: len(whole) // 2])
    for _ in range(2):
        with pytest.raises(ReferenceUnreadableError):
            follower.source.poll_changes()
    assert (follower.table, follower.source.checkpoint()) == ({1: "one"}, before)
    harness.rows = {2: "two"}
    harness.write()
    follower.follow({2: "two"})


def test_empty_directory_is_no_empty_table(tmp_path: Path) -> None:
    with ParquetReferenceTable(tmp_path, ["id"]) as source, pytest.raises(ReferenceUnreadableError):
        source.poll_snapshot()


def test_file_of_the_same_size_and_name_is_recognised_as_another(harness: ParquetHarness) -> None:
    harness.rows = {1: "aa"}
    harness.write()
    follower = Follower(harness, harness.source())
    follower.finish_snapshot()
    stamp = harness.path.stat()
    harness.rows = {1: "bb"}
    harness.write()
    os.utime(harness.path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    follower.follow({1: "bb"})
    assert follower.table == {1: "bb"}


def test_other_columns_end_the_table(harness: ParquetHarness) -> None:
    follower = Follower(harness, harness.source())
    follower.finish_snapshot()
    pq.write_table(pa.table({"id": [1]}), harness.path.with_suffix(".tmp"))
    harness.path.with_suffix(".tmp").replace(harness.path)
    with pytest.raises(SchemaChangedError):
        follower.source.poll_changes()


@pytest.mark.parametrize("key", [[], ["nothing"]])
def test_key_must_be_there(harness: ParquetHarness, key: list[str]) -> None:
    with pytest.raises(ConfigError):
        ParquetReferenceTable(harness.path, key).schema()
