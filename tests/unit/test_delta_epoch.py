"""An epoch of a Delta table without Spark: what a crash leaves, what somebody else's commit does to it, and how it is shared out."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder
from typing_extensions import override

from penstock.change import EXACT, EXACT_TYPE
from penstock.errors import SinkError
from penstock.position import Position
from penstock.schema import Column, TableName, TableSchema
from penstock.sinks import shares
from penstock.sinks.base import ChangedRows
from penstock.sinks.delta import deletions
from penstock.sinks.delta import epoch as delta_epoch
from penstock.sinks.delta import step as delta_step
from penstock.sinks.delta.commit import added, commit, removed, transaction
from penstock.sinks.delta.definition import snapshot_place
from penstock.sinks.delta.epoch import DeltaEpoch
from penstock.sinks.delta.repair import DeltaRepair
from penstock.sinks.delta.state import Unsupported
from penstock.sinks.delta.task import EpochPart
from penstock.sinks.executors import In, Out
from penstock.sinks.layout import Layout, Mode
from penstock.sinks.row_files import write_batches
from penstock.spool import SpoolReader, SpoolWriter, storage
from penstock.spool.range import FileSlice
from tests.delta_tables import APPLICATION, InlineExecutors, add_rows, create_table, epoch, rows_of, state_of
from tests.integration.sinks.source import Source, Value, whole

ITEMS = TableSchema(16401, TableName("public", "items"), (Column("id", pa.int64(), 20), Column("note", pa.string(), 25)), ("id",))
LAYOUT = Layout(pa.schema([("id", pa.int64()), ("note", pa.string())]), ("id",), Mode.MIRROR)


class Dies(Exception):
    """Stands for the end of the process."""


class Lake:
    """Rows 1 to 9 in two files, and changes to them."""

    def __init__(self, root: Path) -> None:
        self.path = root / "table"
        self.source = Source(ITEMS, [{"id": Value(key), "note": Value("first")} for key in range(1, 10)])
        create_table(self.path, LAYOUT)
        for keys in (range(1, 6), range(6, 10)):
            add_rows(self.path, pa.Table.from_pylist([{"id": key, "note": "first", EXACT: None} for key in keys], LAYOUT.schema))
        self._writer = SpoolWriter(root / "spool", Position.of(self.source.fence))
        self._reader = SpoolReader(root / "spool")
        self._written = 0

    def slices(self) -> Sequence[FileSlice]:
        self._writer.append(whole(ITEMS, self.source.log[self._written :]))
        self._writer.seal()
        start = self.source.log[self._written - 1].position if self._written else self.source.fence
        self._written = len(self.source.log)
        return self._reader.read(Position.of(start), Position.of(self.source.position)).tables[ITEMS.name].slices

    def epoch(self, slices: Sequence[FileSlice]) -> DeltaEpoch:
        return epoch(self.path, LAYOUT, slices, self.source.position)

    def change(self) -> None:
        self.source.update((Value(2),), {"note": Value("second")})
        self.source.delete((Value(7),))
        self.source.insert({"id": Value(20), "note": Value("new")})
        self.source.commit()

    @property
    def is_right(self) -> bool:
        expected = {row["id"].typed: row["note"].typed for row in self.source.rows.values()}
        found = rows_of(self.path)
        return len(found) == len(expected) and {row["id"]: row["note"] for row in found} == expected

    def files(self) -> set[str]:
        return {file.name for file in self.path.iterdir() if file.is_file()}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


@pytest.mark.parametrize("moment", ["before the commit", "before the vectors", "after the commit"])
def test_K01_a_crash_leaves_files_that_are_no_part_of_the_table_and_the_repeated_epoch_is_right(
    lake: Lake, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.change()
    slices = lake.slices()
    before = rows_of(lake.path)

    def dies(*arguments: object) -> bool:
        if moment == "after the commit":
            commit(*arguments)  # type: ignore[arg-type]
        raise Dies

    with monkeypatch.context() as patch:
        patch.setattr(delta_step, "mark_files" if moment == "before the vectors" else "commit", dies)
        with pytest.raises(Dies):
            lake.epoch(slices).apply(InlineExecutors())
    if moment == "after the commit":
        # It is seen by the table's own word, so the epoch is not applied again.
        assert state_of(lake.path).transactions[APPLICATION] == lake.source.position
        assert lake.is_right
        return
    assert rows_of(lake.path) == before
    assert lake.files() > {file.path for file in state_of(lake.path).files.values()}
    assert lake.epoch(slices).apply(InlineExecutors())
    assert lake.is_right


@pytest.mark.parametrize("step", ["the rows", "the positions", "the vectors"])
def test_an_epoch_for_which_the_disk_is_full_leaves_no_files(lake: Lake, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.change()
    slices, before = lake.slices(), lake.files()

    def full(first: object, *_: object, **__: object) -> None:
        if isinstance(first, Path):
            first.write_bytes(b"the beginning")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(delta_epoch, "REPORTED_BYTES", 0)
        places: dict[str, tuple[object, str]] = {
            "the rows": (pq.ParquetWriter, "write_table"),
            "the positions": (deletions, "_encoded"),
            "the vectors": (storage, "write_bytes"),
        }
        patch.setattr(*places[step], full)
        with pytest.raises((OSError, SinkError)):
            lake.epoch(slices).apply(InlineExecutors())
    assert lake.files() == before
    assert lake.epoch(slices).apply(InlineExecutors())
    assert lake.is_right


class Meanwhile(InlineExecutors):
    """Somebody else commits while the epoch is being worked out."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._act = act

    @override
    def run(self, function: Callable[[In], Out], tasks: Sequence[In], *, light: bool = False) -> list[Out]:
        found = super().run(function, tasks)
        self._act()
        return found


def test_K09_an_epoch_is_worked_out_again_when_somebody_else_committed_meanwhile(lake: Lake) -> None:
    lake.change()
    slices = lake.slices()

    def compact() -> None:
        """All rows in one file, as OPTIMIZE leaves them: the places that were found are nobody's any more."""
        old, rows = list(state_of(lake.path).files.values()), pa.Table.from_pylist(rows_of(lake.path), LAYOUT.schema)
        add_rows(lake.path, rows)
        assert commit(lake.path, state_of(lake.path).version + 1, [removed(file) for file in old])

    files = lake.files()
    assert not lake.epoch(slices).apply(Meanwhile(compact))
    assert len(lake.files() - files) == 1, "what was written for nothing is gone, and the compacted file is there"
    assert len(rows_of(lake.path)) == 9
    assert lake.epoch(slices).apply(InlineExecutors())
    assert lake.is_right


def test_an_epoch_of_inserts_reads_no_file_of_the_table(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.source.insert({"id": Value(20), "note": Value("new")})
    lake.source.commit()
    (task,) = lake.epoch(lake.slices()).plan(2)
    assert task.adds_only
    assert task.table.files == ()


def test_a_file_without_rows_left_goes_and_the_others_keep_theirs(lake: Lake) -> None:
    for key in (6, 7, 8, 9, 1):
        lake.source.delete((Value(key),))
    lake.source.commit()
    assert lake.epoch(lake.slices()).apply(InlineExecutors())
    (left,) = state_of(lake.path).files.values()
    assert left.vector is not None
    assert left.vector.count == 1
    lake.source.delete((Value(2),))
    lake.source.commit()
    assert lake.epoch(lake.slices()).apply(InlineExecutors())
    (left,) = state_of(lake.path).files.values()
    assert left.vector is not None
    assert left.vector.count == 2
    assert lake.is_right


def test_the_log_is_one_that_deltalake_reads(lake: Lake) -> None:
    lake.change()
    assert lake.epoch(lake.slices()).apply(InlineExecutors())
    log = DeltaTable(lake.path)
    assert log.version() == state_of(lake.path).version
    assert log.transaction_version(APPLICATION) == lake.source.position
    assert {uri.rpartition("/")[2] for uri in log.file_uris()} == set(state_of(lake.path).files)
    assert log.history(1)[0]["operation"] == "PENSTOCK EPOCH"
    rows = pa.table(QueryBuilder().register("t", log).execute("SELECT id, note FROM t ORDER BY id").read_all())
    expected = [{name: value.typed for name, value in row.items()} for row in lake.source.rows.values()]
    assert rows.to_pylist() == sorted(expected, key=lambda row: str(row["id"]).zfill(9))


def test_a_table_without_vectors_takes_inserts_and_leaves_the_rest_to_delta(tmp_path: Path) -> None:
    path = tmp_path / "table"
    create_table(path, LAYOUT, properties={"delta.enableDeletionVectors": "false"})
    lake = Lake(tmp_path / "other")
    lake.source.insert({"id": Value(20), "note": Value("new")})
    lake.source.commit()
    assert epoch(path, LAYOUT, lake.slices(), lake.source.position).apply(InlineExecutors())
    lake.source.delete((Value(20),))
    lake.source.commit()
    with pytest.raises(Unsupported, match="no deletion vectors"):
        epoch(path, LAYOUT, lake.slices(), lake.source.position).apply(InlineExecutors())
    assert [row["id"] for row in rows_of(path)] == [20]


def test_large_epochs_are_shared_out_and_parts_follow_key_changes_that_leave_values_behind(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "ROWS_A_TASK", 2)
    for key in (1, 2, 3):
        lake.source.update((Value(key),), {"note": Value("x")})
    lake.source.commit()
    tasks = lake.epoch(lake.slices()).plan(2)
    assert [(task.part.index, task.part.count) for task in tasks if task.part] == [(0, 2), (1, 2)]
    for key in (1, 2, 3):
        lake.source.update((Value(key),), {"id": Value(key + 100)}, ["note"])
    lake.source.commit()
    tasks = lake.epoch(lake.slices()).plan(2)
    assert [task.part.follows_moves for task in tasks if task.part] == [True] * 3


class Weighing(InlineExecutors):
    """Keeps the size of what tasks give back to the driver, and which functions ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []
        self.positions = 0

    @override
    def run(self, function: Callable[[In], Out], tasks: Sequence[In], *, light: bool = False) -> list[Out]:
        found = super().run(function, tasks)
        self.ran.append(function.__name__)
        self.positions += sum(each.positions.nbytes for part in found if isinstance(part, EpochPart) for each in part.deletions.found)
        return found


@pytest.mark.parametrize("bound", [0, 24])
def test_positions_of_deleted_rows_that_exceed_the_bound_go_to_vectors_without_the_driver(
    lake: Lake, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_epoch, "REPORTED_BYTES", bound)
    monkeypatch.setattr(shares, "ROWS_A_TASK", 2)
    monkeypatch.setattr(deletions, "_ROWS_A_TASK", 2)
    for keys in ([1, 2, 6, 7, 20], [3, 8, 9, 21], [4]):
        for key in keys:
            if key < 20:
                lake.source.delete((Value(key),))
            else:
                lake.source.insert({"id": Value(key), "note": Value("new")})
        lake.source.commit()
        executors = Weighing()
        fills: dict[str, pa.Scalar] | None = {} if keys == [4] else None
        assert replace(lake.epoch(lake.slices()), fills=fills).apply(executors)
        assert executors.positions <= bound
        assert "run_mark" in executors.ran or fills is not None or bound > 8 * len(keys)
        assert lake.is_right
        assert not list(lake.path.glob("*-deletes.parquet"))


def test_an_epoch_without_changes_moves_the_position_alone(lake: Lake) -> None:
    executors = InlineExecutors()
    assert DeltaEpoch(lake.path, APPLICATION, LAYOUT, state_of(lake.path), Position.of(500), ()).apply(executors)
    assert executors.tasks == 0
    assert state_of(lake.path).transactions == {APPLICATION: 500}
    assert not commit(lake.path, state_of(lake.path).version, [transaction(APPLICATION, Position.of(1))])


def test_rows_that_changed_during_a_copy_take_the_place_of_those_under_their_keys(lake: Lake, tmp_path: Path) -> None:
    layout = Layout(LAYOUT.columns, LAYOUT.key, Mode.HISTORY)
    path = tmp_path / "history"
    create_table(path, layout, mapped=True)
    place = snapshot_place(path, layout, Position.of(100))
    assert place is not None
    rows = pa.table({"id": pa.array([1, 2, 3]), "note": ["a", "b", "c"], EXACT: pa.nulls(3, EXACT_TYPE)})
    file = write_batches(iter(rows.to_batches()), place, 0)
    assert commit(path, 1, added([file]))
    keys = pa.table({"match_0": pa.array([2, 3, 4]), "match_text_0": pa.nulls(3, pa.string())})
    (tmp_path / "keys").mkdir()
    pq.write_table(keys, tmp_path / "keys" / "part-0.parquet")
    pq.write_table(
        pa.table({"value_0": pa.array([2, 4]), "value_1": ["second", "new"], EXACT: pa.nulls(2, EXACT_TYPE)}), tmp_path / "rows.parquet"
    )
    changed = ChangedRows(str(tmp_path / "keys"), (str(tmp_path / "rows.parquet"),))
    later = snapshot_place(path, layout, Position.of(150))
    assert later is not None
    repair = DeltaRepair(path, APPLICATION, layout, state_of(path), Position.of(150), changed, later)
    assert repair.apply(InlineExecutors())
    found = {row["id"]: row for row in rows_of(path)}
    assert {key: (row["note"], row["_valid_from"]) for key, row in found.items()} == {1: ("a", 100), 2: ("second", 150), 4: ("new", 150)}
    assert all(row["_current"] and row["_valid_to"] is None and row["_valid_from_time"].year > 2000 for row in found.values())
    assert state_of(path).transactions == {APPLICATION: 150}
