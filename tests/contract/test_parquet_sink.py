"""`ParquetSink` without Spark: the sink rules, and the rules of an append-only log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from typing_extensions import override

from penstock import storage
from penstock.errors import SinkError, SinkRefusedError
from penstock.position import Position
from penstock.schema import Column, TableSchema
from penstock.sinks.base import ChangedRows
from penstock.sinks.executors import In, Out
from penstock.sinks.parquet.sink import ParquetSink
from penstock.sinks.parquet.targets import POSITION
from tests.support.contract.sink_harness import ITEMS, PIPELINE, SinkHarness
from tests.support.contract.sink_rules import SinkRules
from tests.support.sinks.source import Row, Value
from tests.support.snapshot.local import LocalExecutors


class FaultyExecutors(LocalExecutors):
    """May die after everything is written, before the caller gets the result; or, with `repeats`, runs each
    task twice, as Spark may.
    """

    dies = False
    repeats = False

    @override
    def run(self, function: Callable[[In], Out], tasks: Sequence[In], *, light: bool = False) -> list[Out]:
        if self.repeats:
            super().run(function, tasks)
        done = super().run(function, tasks)
        if self.dies:
            raise SinkError("the executor was lost")
        return done


class ParquetHarness(SinkHarness):
    types = (pa.int64(), pa.string(), pa.string())

    def __init__(self, root: Path) -> None:
        self.root = root / "lake"
        self.executors = FaultyExecutors()
        super().__init__(root)

    @property
    def path(self) -> Path:
        return self.root / "public" / "items"

    @override
    def open(self, pipeline: str = PIPELINE) -> ParquetSink:
        return ParquetSink(self.executors, self.root, pipeline)

    def log(self) -> list[dict[str, object]]:
        """The log as any reader sees it, in the order of the changes; snapshots by key."""
        if not any(self.path.glob(f"{POSITION}=*")):
            return []
        found: list[dict[str, object]] = ds.dataset(self.path, partitioning="hive").to_table().to_pylist()
        return sorted(found, key=lambda row: (row["_commit_version"], row["_ordinal"], row["id"] or 0))

    @override
    def rows(self) -> list[Row]:
        """For logs of tables that only had inserts."""
        return sorted(
            (
                {name: Value(row[name]) for name in ("id", "note", "size")}
                for row in self.log()
                if not _is_end(row)
            ),
            key=repr,
        )

    @override
    def put_foreign(self) -> None:
        self.path.mkdir(parents=True)
        pq.write_table(pa.table({"id": [1]}), self.path / "mine.parquet")

    @override
    @contextmanager
    def dying(self) -> Iterator[None]:
        self.executors.dies = True
        yield
        self.executors.dies = False

    @override
    @contextmanager
    def unanswered(self) -> Iterator[None]:
        """The rename is the last step, so after it only the answer to the caller can be lost."""
        apply = self.sink.apply

        def lose(*arguments: object) -> None:
            apply(*arguments)  # type: ignore[arg-type]
            raise SinkError("the answer was lost")

        self.sink.apply = lose  # type: ignore[method-assign, assignment]
        yield
        del self.sink.apply


def test_an_attempt_that_was_given_up_leaves_nothing_in_an_epoch(tmp_path: Path) -> None:
    harness = ParquetHarness(tmp_path)
    harness.copy()
    harness.executors.repeats = True
    harness.source.insert(harness.item(50, "once"))
    harness.follow()
    assert [row["note"].typed for row in harness.rows()].count("once") == 1


def _is_end(row: dict[str, object]) -> bool:
    return row["_change_type"] == "delete"


@pytest.fixture
def harness(tmp_path: Path) -> ParquetHarness:
    return ParquetHarness(tmp_path)


class TestRules(SinkRules):
    pass


def test_K15_every_change_is_written_once_in_order_after_the_snapshot(harness: ParquetHarness) -> None:
    harness.copy()
    source = harness.source
    source.insert(harness.item(20))
    source.update(harness.at(20), {"note": Value("second")})
    first = harness.follow()
    source.update(harness.at(1), {"size": Value("7")}, ["note"])
    source.truncate()
    second = harness.follow()
    log = harness.log()
    assert [row["_change_type"] for row in log[:9]] == ["snapshot"] * 9
    assert {(row["_commit_version"], row[POSITION]) for row in log[:9]} == {
        (harness.fence.value, harness.fence.value)
    }
    shown = [
        (
            row["_change_type"],
            row["id"],
            row["note"],
            row["_unchanged"],
            row["_commit_version"],
            row[POSITION],
        )
        for row in log[9:]
    ]
    assert shown == [
        ("insert", 20, "first", None, first.value, first.value),
        ("update_postimage", 20, "second", None, first.value, first.value),
        ("update_postimage", 1, None, ["note"], second.value, second.value),
        ("truncate", None, None, None, second.value, second.value),
    ]


def test_unfinished_files_are_invisible_and_removed_by_the_next_epoch(harness: ParquetHarness) -> None:
    harness.copy()
    harness.source.insert(harness.item(20))
    end = harness.commit()
    with harness.dying(), pytest.raises(SinkError):
        harness.apply(harness.fence, end)
    hidden = [entry.name for entry in harness.path.iterdir() if entry.name.startswith(".")]
    assert len(hidden) == 1
    harness.apply(harness.fence, end)
    assert [entry.name for entry in harness.path.iterdir() if entry.name.startswith(".")] == []


def test_a_log_in_which_nothing_happened_yet_has_its_columns(harness: ParquetHarness) -> None:
    place = harness.begin()
    harness.sink.finish_snapshot(harness.table, [harness.write(place, 0, [])[0]], harness.fence)
    assert ds.dataset(harness.path).schema.names[:4] == ["id", "note", "size", "_change_type"]


def test_N03_a_repaired_log_has_each_key_once(harness: ParquetHarness, tmp_path: Path) -> None:
    rows = harness.source.sorted_rows()
    place = harness.begin()
    files = [
        harness.write(place, 0, rows[:5])[0],
        harness.write(place, 1, [*rows[5:], harness.item(1, "moved")])[0],
    ]
    fence = Position.of(harness.fence.value + 50)
    keys, changed = tmp_path / "keys", tmp_path / "rows.parquet"
    keys.mkdir()
    pq.write_table(
        pa.table({"match_0": [1, 2], "match_text_0": pa.nulls(2, pa.string())}), keys / "part.parquet"
    )
    exact = pa.nulls(1, pa.map_(pa.string(), pa.string()))
    pq.write_table(
        pa.table({"value_0": [1], "value_1": ["moved"], "value_2": ["0.10"], "_exact": exact}), changed
    )
    harness.sink.repair_snapshot(harness.table, files, ChangedRows(str(keys), (str(changed),)), fence)
    assert harness.target().applied == fence
    assert harness.rows() == sorted([harness.item(1, "moved", "0.10"), *rows[2:]], key=repr)


def test_a_shadow_takes_the_log_s_place(harness: ParquetHarness) -> None:
    harness.copy()
    shadow = harness.sink.shadow("c0ffee")
    main, harness.sink = harness.sink, shadow
    harness.source.states[harness.source.fence] = rows = [harness.item(1, "again")]
    harness.copy()
    harness.sink = main
    position = Position.of(harness.source.fence + 3)
    main.replace(ITEMS, shadow, position)
    assert (harness.rows(), harness.target().applied) == (rows, position)
    shadow.drop(ITEMS)
    main.drop_shadows()
    assert harness.rows() == rows


@pytest.mark.parametrize("renames", [1, 2])
def test_the_old_log_of_a_replacement_that_died_is_removed_by_the_next_run(
    harness: ParquetHarness, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    harness.copy()
    shadow = harness.sink.shadow("c0ffee")
    main, harness.sink = harness.sink, shadow
    harness.copy()
    rename, calls = storage.rename, count()

    def dies(source: Path, target: Path) -> None:
        rename(source, target)
        if next(calls) == renames - 1:
            raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(storage, "rename", dies)
        with pytest.raises(SystemExit):
            main.replace(ITEMS, shadow, Position.of(harness.source.fence))
    main.drop_shadows()
    assert [path.name for path in harness.path.parent.iterdir()] == ["items"] * (renames - 1)


def test_a_column_of_the_name_that_positions_have_is_refused(harness: ParquetHarness) -> None:
    table = TableSchema(1, ITEMS, (Column(POSITION, pa.int64(), 20),), ())
    with pytest.raises(SinkRefusedError):
        harness.sink.begin_snapshot(table, harness.fence)
