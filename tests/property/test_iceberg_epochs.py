"""Epochs of an Iceberg table without Spark: the files that executors write, read as the specification
says.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from penstock.change import EXACT, ChangeCounts, ChangeType
from penstock.position import Position
from penstock.schema import Column, TableName, TableSchema
from penstock.sinks import row_chains as gathering
from penstock.sinks import slice_reader
from penstock.sinks import slice_reader as shares
from penstock.sinks.base import SnapshotPlace, TableChanges
from penstock.sinks.evolution import Evolution, ResyncRequired
from penstock.sinks.executors import Executors
from penstock.sinks.iceberg.catalog import FormerColumns, NewFile, TableChange, former_columns
from penstock.sinks.iceberg.epoch import EpochWriter
from penstock.sinks.iceberg.files import RewriteTask, RowRequest, StoredFiles, rewrite_file
from penstock.sinks.iceberg.reader import EpochTarget, TableReader
from penstock.sinks.iceberg.schema import FIELD_ID
from penstock.sinks.keys import key_codes
from penstock.sinks.modes import CURRENT, Layout, Mode
from penstock.sinks.row_values import View
from penstock.spool import SpoolReader, SpoolWriter
from tests.support.delta_tables import InlineExecutors
from tests.support.property.evolving import NAME, Act, Change, FollowingTarget, Source
from tests.support.property.histories import (
    HEAP,
    TABLES,
    Sizes,
    epochs,
    heap_of,
    layout_of,
    sizes,
    source_model,
)
from tests.support.property.source_model import Record, canonical
from tests.support.sinks.history import ODD
from tests.support.sinks.source import Change as LogChange
from tests.support.sinks.source import Transaction, Value, whole

KINDS = {"insert": ChangeType.INSERT, "update": ChangeType.UPDATE_POSTIMAGE, "delete": ChangeType.DELETE}


class PlainReader(TableReader):
    """Reads the rows of a `Lake` without Spark."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake

    @override
    def fetch(self, target: EpochTarget, wanted: Sequence[RowRequest], directory: Path) -> StoredFiles:
        rows = projected(self._lake.rows, target)
        if target.layout.mode is Mode.HISTORY and wanted[0].is_old:
            rows = rows.filter(rows.column(CURRENT))
        if all(each.keys is not None for each in wanted):
            names = list(wanted[0].columns)
            keys = pa.concat_tables([pq.read_table(each.keys).rename_columns(names) for each in wanted])
            rows = rows.filter(_equal(rows, keys, names))
        directory.mkdir(parents=True)
        pq.write_table(
            rows.rename_columns([f"v_{at}" for at in range(rows.num_columns)]), directory / "rows.parquet"
        )
        return StoredFiles((str(directory / "rows.parquet"),), target.past.fills)

    @override
    def rewrite(self, target: EpochTarget, executors: Executors, scratch: Path) -> list[NewFile]:
        rows = projected(self._lake.rows, target)
        scratch.mkdir(exist_ok=True)
        path = scratch / "rows.parquet"
        pq.write_table(rows.rename_columns([f"v_{at}" for at in range(rows.num_columns)]), path)
        (file,) = executors.run(rewrite_file, [RewriteTask(str(path), target.place, target.past.fills)])
        path.unlink()
        return [NewFile(file.name, file.rows, file.bytes)] if file.rows else []


def projected(rows: pa.Table, target: EpochTarget) -> pa.Table:
    past, schema = target.past, target.layout.schema
    columns = [
        pa.nulls(rows.num_rows, each.type)
        if each.name in past.added
        else rows.column(past.names.get(each.name, each.name)).cast(each.type)
        for each in schema
    ]
    return pa.table(columns, schema=schema)


def _equal(rows: pa.Table, keys: pa.Table, names: Sequence[str]) -> pa.Array:
    """As in an equality delete: null is null; there are no inexact numbers among them."""
    bare = rows.select(names)
    found, asked = key_codes([bare, keys.select(names).cast(bare.schema)], names)
    wanted = set(asked.tolist())
    return pa.array([code in wanted for code in found.tolist()], pa.bool_())


class Lake:
    """One table, and the spool of its changes."""

    def __init__(self, root: Path, layout: Layout, rows: Sequence[Record], fence: int = 100) -> None:
        self.layout = layout
        self.rows = pa.Table.from_pylist(list(rows), layout.schema)
        self.executors = InlineExecutors(3)
        self.changes: list[TableChange] = []
        self._root = root
        (root / "data").mkdir(parents=True)
        self._writer = EpochWriter(PlainReader(self), self.executors, root / "scratch")
        self._spool = SpoolWriter(root / "spool", Position.of(fence))
        self._reader = SpoolReader(root / "spool")
        self.position = fence

    def spool(self, table: TableName, *, upto: bool = True) -> TableChanges | None:
        """The changes since the last call; with `upto` the next call starts after them."""
        self._spool.seal()
        end = self._reader.end
        assert end is not None
        found = self._reader.read(Position.of(self.position), end).tables.get(table)
        self.position = end.value if upto else self.position
        return None if found is None else TableChanges(table, found.slices, found.counts)

    def add(self, table: TableSchema, transactions: Sequence[Transaction]) -> None:
        self._spool.append(whole(table, transactions))

    def apply(self, changes: TableChanges, evolution: Evolution | None = None) -> None:
        past = FormerColumns()
        if evolution is not None:
            past = former_columns(evolution, 2)
            self.layout = Layout(evolution.columns, evolution.key, self.layout.mode)
        fields = [
            pa.field(each.name, each.type, metadata={FIELD_ID: str(at)})
            for at, each in enumerate(self.layout.schema, 1)
        ]
        place = SnapshotPlace(str(self._root / "data"), pa.schema(fields), f"epoch-{self.position}")
        target = EpochTarget("t", self.layout, place, past)
        change = self._writer.write(target, changes)
        if past.is_rewritten and not change.is_whole:
            change = replace(change, rewritten=self._writer.rewrite(target))
        self.rows = projected(self.rows, target)
        self._commit(change)
        assert not (self._root / "scratch").exists() or not list((self._root / "scratch").iterdir())

    def _commit(self, change: TableChange) -> None:
        self.changes.append(change)
        if change.is_whole:
            self.rows = self.rows.slice(0, 0)
        elif change.rewritten is not None:
            self.rows = pa.concat_tables([self.rows.slice(0, 0), *map(self._read, change.rewritten)])
        for file in change.deletes:
            keys = pq.read_table(self._root / "data" / file.name)
            assert keys.column_names == list(change.columns)
            self.rows = self.rows.filter(
                pa.array(
                    [not gone for gone in _equal(self.rows, keys, change.columns).to_pylist()], pa.bool_()
                )
            )
        self.rows = pa.concat_tables([self.rows, *map(self._read, change.files)])

    def _read(self, file: NewFile) -> pa.Table:
        return (
            pq.read_table(self._root / "data" / file.name)
            .select(self.layout.schema.names)
            .cast(self.layout.schema)
        )

    def canonical(self) -> list[str]:
        return canonical(self.rows.to_pylist(), self.layout)


@contextmanager
def lake(layout: Layout, rows: Sequence[Record], fence: int = 100) -> Iterator[Lake]:
    root = Path(tempfile.mkdtemp(prefix="penstock-lake-"))
    try:
        yield Lake(root, layout, rows, fence)
    finally:
        shutil.rmtree(root)


def follow(target: Lake, table: TableSchema, transactions: Sequence[Transaction]) -> None:
    target.add(table, transactions)
    changes = target.spool(table.name)
    if changes is not None:
        target.apply(changes)


@pytest.mark.parametrize("mode", [Mode.MIRROR, Mode.SOFT_DELETE, Mode.HISTORY])
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name.name[:6])
@settings(max_examples=3, deadline=None)
@given(sizes=sizes)
def test_after_every_epoch_the_iceberg_table_equals_the_model(
    table: TableSchema, mode: Mode, sizes: Sizes
) -> None:
    source = source_model(table, sizes)
    layout = layout_of(table, mode)
    with lake(layout, source.expected(mode, source.fence), source.fence) as target:
        for each in epochs(source.log, sizes.seed):
            follow(target, table, each)
            assert target.canonical() == canonical(source.expected(mode, each[-1].position), layout)


@pytest.mark.parametrize("mode", [Mode.MIRROR, Mode.SOFT_DELETE, Mode.HISTORY])
@settings(max_examples=3, deadline=None)
@given(sizes=sizes, size=st.integers(2000, 8000))
def test_an_epoch_cut_by_bytes_and_built_in_slices_gives_the_same_rows(
    mode: Mode, sizes: Sizes, size: int
) -> None:
    source = source_model(ODD, sizes)
    layout = layout_of(ODD, mode)
    with (
        pytest.MonkeyPatch.context() as patch,
        lake(layout, source.expected(mode, source.fence), source.fence) as target,
    ):
        patch.setattr(shares, "BYTES_A_TASK", size)
        patch.setattr(slice_reader, "_PIECE_BYTES", size)
        patch.setattr(gathering, "SLICE_BYTES", size // 10)
        follow(target, ODD, source.log)
        assert target.canonical() == canonical(source.expected(mode, source.position), layout)


@settings(max_examples=8, deadline=None)
@given(sizes=sizes)
def test_R05_rows_without_key_go_one_by_one_duplicates_too(sizes: Sizes) -> None:
    heap = heap_of(sizes.seed, sizes.transactions, sizes.statements, sizes.truncates)
    layout = layout_of(HEAP, Mode.MIRROR)
    with lake(layout, heap.expected(heap.fence), heap.fence) as target:
        for each in epochs(heap.log, sizes.seed):
            follow(target, HEAP, each)
            assert target.canonical() == canonical(heap.expected(each[-1].position), layout)


@settings(max_examples=3, deadline=None)
@given(sizes=sizes)
def test_K15_an_append_log_only_grows(sizes: Sizes) -> None:
    source = source_model(ODD, sizes)
    with lake(layout_of(ODD, Mode.APPEND), [], source.fence) as target:
        for each in epochs(source.log, sizes.seed):
            follow(target, ODD, each)
        assert not any(change.deletes or change.is_whole for change in target.changes)
        found = [(row["_commit_version"], row["_ordinal"]) for row in target.rows.to_pylist()]
    assert sorted(found) == [
        (each.position, change.ordinal) for each in source.log for change in each.changes
    ]


def test_an_epoch_of_inserts_is_shared_by_files_and_looks_nothing_up(tmp_path: Path) -> None:
    layout = layout_of(ODD, Mode.MIRROR)
    source = source_model(ODD, Sizes(1, 1, 1, 0.0))
    target = Lake(tmp_path, layout, [])
    rows = source.states[source.fence]
    for at, row in enumerate(rows[:4], 1):
        target.add(ODD, [Transaction(100 + at, (LogChange(ChangeType.INSERT, 0, row),))])
        target._spool.seal()
    changes = target.spool(ODD.name)
    assert changes is not None
    target.apply(replace(changes, counts=ChangeCounts(inserts=250_000)))
    assert (target.executors.tasks, target.rows.num_rows, len(target.changes[0].files)) == (3, 4, 3)


@pytest.mark.parametrize("mode", [Mode.MIRROR, Mode.SOFT_DELETE, Mode.HISTORY])
def test_K11_a_truncate_of_one_of_several_tables_takes_its_rows_alone(tmp_path: Path, mode: Mode) -> None:
    """Two lookups: the deleted rows, and then, by keys of another table, rows that an unchanged value comes
    from.
    """
    columns = (Column("id", pa.int64(), 20), Column("note", pa.string(), 25))
    members = [
        TableSchema(oid, TableName("public", name), columns, ("id",)) for oid, name in ((1, "a"), (2, "b"))
    ]
    layout = Layout(
        pa.schema([("id", pa.int64()), ("note", pa.string()), ("_source", pa.string())]),
        ("id", "_source"),
        mode,
    )
    added = layout.mode.snapshot_values(Position.of(100), None)  # type: ignore[arg-type]
    rows = [
        {"id": key, "note": "old", "_source": name, EXACT: None, **added} for name in "ab" for key in (1, 2)
    ]
    target = Lake(tmp_path, layout, rows)
    insert = LogChange(ChangeType.INSERT, 1, {"id": Value(3), "note": Value("new")})
    target.add(members[0], [Transaction(110, (LogChange(ChangeType.TRUNCATE, 0), insert))])
    target.add(
        members[1],
        [Transaction(120, (LogChange(ChangeType.UPDATE_POSTIMAGE, 0, {"id": Value(1)}, ("note",)),))],
    )
    changes = [target.spool(each.name, upto=each is members[1]) for each in members]
    views = {
        each: View({"id": "id", "note": "note"}, {"_source": pa.scalar(each.name.name)}, source="_source")
        for each in members
    }
    slices = [slice for each in changes if each is not None for slice in each.slices]
    counts = ChangeCounts(inserts=1, updates=1, truncates=1, unchanged=1)
    target.apply(TableChanges(TableName("public", "all"), slices, counts, views))
    live = [
        row for row in target.rows.to_pylist() if row.get(CURRENT, True) and not row.get("_deleted", False)
    ]
    found = sorted((row["_source"], row["id"], row["note"]) for row in live)
    assert found == [("a", 3, "new"), ("b", 1, "old"), ("b", 2, "old")]


acts = st.tuples(
    st.sampled_from(["write", "write", "write", "delete", "add", "add", "drop", "rename", "swap", "widen"]),
    st.integers(0, 5),
    st.sampled_from(["a", "b", "c"]),
)


class FollowingLake:
    def __init__(self, root: Path, source: Source, mode: Mode) -> None:
        """A new copy."""
        self.known = FollowingTarget.copy(source)
        layout = Layout(self.known.columns, self.known.key, mode)
        added = layout.mode.snapshot_values(Position.of(100), None)  # type: ignore[arg-type]
        self.lake = Lake(root, layout, [{**row, EXACT: None, **added} for row in source.table().values()])

    def apply(self, changes: list[Change], source: Source) -> None:
        at = self.lake.position
        for change in changes:
            at += 10
            row = {name: Value(value) for name, value in change.row.items()}
            self.lake.add(change.schema, [Transaction(at, (LogChange(KINDS[change.kind], 0, row),))])
        found = self.lake.spool(NAME)
        assert found is not None
        views, evolution = self.known.follow(found.schemas, source.shape())
        if evolution is not None:
            self.known.columns, self.known.key, self.known.origin = (
                evolution.columns,
                evolution.key,
                evolution.origin,
            )
        self.lake.apply(replace(found, views=views), evolution)

    def rows(self, names: list[str]) -> dict[int, dict[str, object]]:
        """Rows that the source also has."""
        found = self.lake.rows.to_pylist()
        live = [row for row in found if row.get(CURRENT, True) and not row.get("_deleted", False)]
        return {row[self.known.key[0]]: {name: row[name] for name in names} for row in live}


@pytest.mark.parametrize("mode", [Mode.MIRROR, Mode.SOFT_DELETE, Mode.HISTORY])
@settings(deadline=None, max_examples=8)
@given(plan=st.lists(st.lists(acts, max_size=4), min_size=1, max_size=4))
def test_S01_to_S06_an_iceberg_table_follows_in_the_commit_that_needs_it(
    mode: Mode, plan: list[list[Act]]
) -> None:
    source = Source()
    with tempfile.TemporaryDirectory() as directory:
        target = FollowingLake(Path(directory) / "0", source, mode)
        for number, some in enumerate(plan, 1):
            changes = [
                change
                for act in (*some, ("write", 50 + number, ""))
                if (change := source.do(act)) is not None
            ]
            try:
                target.apply(changes, source)
            except ResyncRequired:
                target = FollowingLake(Path(directory) / str(number), source, mode)
            names = [column.name for column in source.columns]
            assert target.rows(names) == source.table()
