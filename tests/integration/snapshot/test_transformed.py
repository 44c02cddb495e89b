"""Transforms during snapshots, without Spark."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from penstock.errors import RowRefusedError
from penstock.pipeline.transform_sink import TransformingSink
from penstock.schema import TableName
from penstock.secret import Secret
from penstock.sinks.base import Sink
from penstock.transforms.columns import hash_values
from penstock.transforms.transform import Transform
from tests.support.fix_captured import Captured
from tests.support.plain_queries import Made, PlainQuery
from tests.support.snapshot.copying import Copying, Watcher
from tests.support.snapshot.local import FileSink, LocalExecutors, OriginSink
from tests.support.snapshot.tables import change, make

KEY = Secret("a key for tests")
HASHED = Transform(hash=("id",), rename={"v": "value"}, where="v LIKE 'c%' OR v IS NULL OR id < 60", key=KEY)


QUERY = PlainQuery(
    {"key": "id", "size": Made("integer", ("v",), lambda row: None if row["v"] is None else len(row["v"]))},
    Made("boolean", ("v",), lambda row: row["v"] is None or row["v"].startswith("c")),
)


class Copied:
    def __init__(self, captured: Captured, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.transform = HASHED
        self.sink = OriginSink(directory / "lake")
        seen = TransformingSink(
            self.sink, lambda _: self.transform, LocalExecutors(), directory / "staged", QUERY
        )
        self.copying = Copying(
            captured, directory / "lake", executors=LocalExecutors(), sink=seen, rows=self.sink.rows
        )

    def assert_exact(self, name: TableName) -> None:
        """The target equals the source at the fence."""
        target = self.sink.load_target(name)
        assert target is not None
        assert target.applied is not None
        held = self.copying.held[target.applied][name]
        kept = [
            (key, v)
            for key, v in zip(held["id"], held["v"], strict=True)
            if v is None or v.startswith("c") or int(str(key)) < 60
        ]
        hashes = hash_values(pa.array([key for key, _ in kept]), KEY).to_pylist()
        assert sorted((row["id"], row["value"]) for row in self.sink.rows(name)) == sorted(
            zip(hashes, (v for _, v in kept), strict=True)
        )


@pytest.fixture
def copied(captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copied:
    return Copied(captured, tmp_path, monkeypatch)


def test_K12_K13_rows_that_changed_while_a_table_was_copied_are_found_under_their_hashed_keys(
    copied: Copied,
) -> None:
    name = make(copied.copying, "k13")
    copied.copying.run("k13", chunks=4)
    change(copied.copying, "k13")
    watcher, failures = copied.copying.run("k13")
    assert not failures
    assert watcher.resumed[name][0] >= 4
    copied.assert_exact(name)


def test_K12_chunks_and_repaired_rows_go_through_queries(copied: Copied) -> None:
    name = make(copied.copying, "k12_query")
    copied.transform = QUERY.transform()
    copied.copying.run("k12_query", chunks=4)
    change(copied.copying, "k12_query")
    watcher, failures = copied.copying.run("k12_query")
    assert not failures
    assert watcher.resumed[name][0] >= 4
    target = copied.sink.load_target(name)
    assert target is not None
    assert target.applied is not None
    held = copied.copying.held[target.applied][name]
    kept = {
        int(str(key)): v and len(v)
        for key, v in zip(held["id"], held["v"], strict=True)
        if v is None or v.startswith("c")
    }
    rows = copied.sink.rows(name)
    assert {int(str(row["key"])): row["size"] for row in rows} == kept
    assert len(rows) == len(kept)


def test_a_copy_started_under_another_transform_starts_again(copied: Copied) -> None:
    name = make(copied.copying, "k13_other")
    copied.transform = Transform(hash=("id",), rename={"v": "value"}, key=KEY)
    copied.copying.run("k13_other", chunks=4)
    copied.transform = HASHED
    watcher, failures = copied.copying.run("k13_other")
    assert not failures
    assert name not in watcher.resumed
    copied.assert_exact(name)


def test_editing_a_rule_during_the_copy_of_its_table_restarts_the_copy(copied: Copied) -> None:
    name = make(copied.copying, "k13_edited")
    copied.transform = Transform(hash=("id",), rename={"v": "value"}, key=KEY)
    watcher = Watcher()

    def edit(read: int) -> None:
        if read == 4:
            copied.transform = HASHED

    watcher.after_chunk = edit
    _, failures = copied.copying.run("k13_edited", watcher=watcher)
    assert not failures
    assert any("begins again" in trouble or "starts again" in trouble for trouble in watcher.troubles)
    copied.assert_exact(name)


def test_rows_that_cannot_be_transformed_stop_their_table_and_are_not_shown(copied: Copied) -> None:
    name = make(copied.copying, "k13_cast")
    copied.transform = Transform(cast={"v": "int"})
    _, failures = copied.copying.run("k13_cast")
    error = failures[name]
    assert isinstance(error, RowRefusedError)
    assert "cannot be cast to int" in error.message


def test_every_capability_of_a_sink_is_passed_on(tmp_path: Path) -> None:
    """Also its later additions."""
    own = set(vars(TransformingSink))
    assert {name for base in Sink.__mro__[:-1] for name in vars(base) if not name.startswith("_")} <= own
    sink = TransformingSink(FileSink(tmp_path), lambda _: None, LocalExecutors(), tmp_path)
    sink.close()
    assert sink.chunk_writer is None
