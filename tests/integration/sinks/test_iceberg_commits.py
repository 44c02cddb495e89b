"""Commits of the Iceberg sink: contents, refusals, and how the sink resumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from penstock.change import EXACT, EXACT_TYPE
from penstock.errors import SchemaChangedError, SinkError, SinkRefusedError, TargetRewoundError
from penstock.position import Position
from penstock.schema import Column, TableName, TableSchema
from penstock.sinks import slice_reader as shares
from penstock.sinks.base import ChangedRows, SnapshotFile
from penstock.sinks.iceberg.catalog import IcebergCatalog, LoadedTable, NewFile, TableChange, active
from penstock.sinks.iceberg.epoch import EpochWriter
from penstock.sinks.iceberg.maintenance import Maintenance
from penstock.sinks.iceberg.state import POSITION, HadoopTargets
from tests.support.sinks.iceberg_lake import NAME, Lake, open_lake, summaries
from tests.support.sinks.items import ITEMS, at, item
from tests.support.sinks.mirror import PIPELINE
from tests.support.sinks.source import NULL, Value


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Lake:
    return Lake(spark, tmp_path)


def test_k01_each_epoch_is_one_commit_with_its_position_and_a_repeated_one_is_skipped(lake: Lake) -> None:
    source, mirror = lake.source, lake.mirror
    start = mirror.target()
    source.insert(item(20))
    appended = source.commit()
    source.update(at(20), {"note": Value("second")})
    source.update(at(2), {"size": NULL}, ["note"])
    source.update(at(3), {"id": Value(30)}, ["note", "size"])
    source.delete(at(1))
    changed = source.commit()
    source.insert(item(40))
    source.delete(at(40))
    nothing = source.commit()
    mirror.spool()
    ends = [appended, changed, nothing]
    for end in ends:
        mirror.apply(mirror.reached, end)
    found = lake.summaries
    assert [each["operation"] for each in found] == ["append", "append", "overwrite", "append"]
    assert [each[POSITION] for each in found] == [str(Position.of(end)) for end in (source.fence, *ends)]
    assert found[2]["added-equality-deletes"] == "4"
    assert mirror.rows() == source.sorted_rows()
    # Repeat the epoch with the initial target, like a caller that did not get the reply; with a new sink; and
    # as part of a longer epoch.
    for sink, first, end in [
        (lake.sink, appended, changed),
        (lake.again(), source.fence, nothing),
        (lake.again(), source.fence, nothing + 5),
    ]:
        changes = mirror.changes(first, min(end, nothing))
        assert changes is not None
        sink.apply(start, changes, Position.of(end))
    assert mirror.target().applied == Position.of(nothing + 5)
    assert len(lake.summaries) == len(found) + 1
    # The queries of verify and check: the version at a position, and the table without Spark.
    version = lake.sink.version_at(NAME, Position.of(source.fence))
    assert version is not None
    assert lake.sink.read(NAME, version).count() == 9
    assert lake.sink.version_at(NAME, Position.of(source.fence - 1)) is None
    assert HadoopTargets(lake.root / "warehouse", (), PIPELINE).load_target(NAME) == mirror.target()


def test_K09_a_table_altered_by_another_writer_is_left_alone(lake: Lake) -> None:
    target, name = lake.mirror.target(), lake.sink.sql_name(NAME)
    lake.source.update(at(1), {"note": Value("second")})
    lake.source.commit()
    lake.mirror.spool()
    changes = lake.mirror.changes(lake.source.fence, lake.source.position)
    assert changes is not None
    table = IcebergCatalog(lake.spark, lake.catalog, lake.root / "warehouse").load(lake.sink.identifier(NAME))
    assert table is not None
    lake.spark.sql(f"ALTER TABLE {name} RENAME COLUMN note TO remark")
    with pytest.raises(SchemaChangedError, match="no longer has the column note"):
        lake.sink.apply(target, changes, Position.of(lake.source.position))
    lake.spark.sql(f"ALTER TABLE {name} RENAME COLUMN remark TO note")
    table.java.refresh()
    table.java.updateSpec().addField("id").commit()
    with pytest.raises(SinkRefusedError, match="partition field"):
        lake.sink.apply(target, changes, Position.of(lake.source.position))
    table.java.updateSpec().removeField("id").commit()
    lake.sink.apply(target, changes, Position.of(lake.source.position))
    assert lake.mirror.rows() == lake.source.sorted_rows()


def test_values_that_moved_from_key_to_key_are_found_though_an_epoch_is_shared_out(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, mirror = lake.source, lake.mirror
    monkeypatch.setattr(shares, "ROWS_A_TASK", 6)
    for key in range(9, 0, -1):
        source.update(at(key), {"id": Value(key + 1)}, ["note"])
    source.commit()
    mirror.spool()
    mirror.apply(mirror.reached, source.position)
    assert mirror.rows() == source.sorted_rows()


def test_a_commit_to_a_table_that_was_moved_fails(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of one pipeline: the slower one has read an outdated position."""
    source, mirror = lake.source, lake.mirror
    target = mirror.target()
    source.update(at(1), {"note": Value("second")})
    source.commit()
    mirror.spool()
    changes = mirror.changes(source.fence, source.position)
    assert changes is not None
    other, commit = lake.again(), IcebergCatalog.commit

    def slow(self: IcebergCatalog, loaded: object, change: TableChange, position: Position) -> None:
        monkeypatch.undo()
        other.apply(target, changes, position)
        commit(self, loaded, change, position)  # type: ignore[arg-type]

    monkeypatch.setattr(IcebergCatalog, "commit", slow)
    with pytest.raises(SinkError, match="another writer"):
        lake.sink.apply(target, changes, Position.of(source.position))
    assert [each["operation"] for each in lake.summaries] == ["append", "overwrite"]
    data = lake.root / "warehouse" / "public" / "items" / "data"
    assert len(list(data.glob("epoch-*.parquet"))) == 2, "the files of the slower one are removed"
    lake.sink.apply(target, changes, Position.of(source.position))
    assert len(lake.summaries) == 2
    assert mirror.rows() == source.sorted_rows()


def test_k09_a_table_dropped_or_rolled_back_during_an_epoch_is_refused(lake: Lake) -> None:
    source, mirror = lake.source, lake.mirror
    first = lake.spark.table(f"{lake.sink.sql_name(NAME)}.snapshots").collect()[0]["snapshot_id"]
    source.delete(at(1))
    source.commit()
    mirror.follow()
    target = mirror.target()
    source.insert(item(21))
    source.commit()
    mirror.spool()
    changes = mirror.changes(mirror.reached, source.position)
    assert changes is not None
    table = IcebergCatalog(lake.spark, lake.catalog, lake.root / "warehouse").load(lake.sink.identifier(NAME))
    assert table is not None
    table.java.manageSnapshots().rollbackTo(first).commit()
    with pytest.raises(TargetRewoundError, match=str(Position.of(source.fence))):
        lake.sink.apply(target, changes, Position.of(source.position))
    # A restart reads the position from the table.
    assert mirror.target().applied == Position.of(source.fence)
    lake.sink.drop(NAME)
    with pytest.raises(TargetRewoundError):
        lake.sink.apply(target, changes, Position.of(source.position))
    assert lake.sink.load_target(NAME) is None


def test_a_table_rewritten_and_its_snapshots_expired_still_knows_its_position(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(spark, tmp_path, Maintenance(delete_files=2, keep_seconds=0.0, expire_every=3))
    source, mirror = lake.source, lake.mirror
    operations = set()
    for number in range(9):
        key = number % 4 + 1
        source.update(at(key), {"note": Value(f"after {number}")})
        source.delete(at(key + 5)) if number < 3 else source.insert(item(30 + number))
        source.commit()
        mirror.spool()
        mirror.apply(mirror.reached, source.position)
        lake.sink.maintain(NAME)
        operations |= {each["operation"] for each in lake.summaries[-2:]}
    assert mirror.rows() == source.sorted_rows()
    found = lake.summaries
    assert "replace" in operations
    assert found[0].get(POSITION) != str(Position.of(source.fence)), "the first is removed"
    assert lake.again().load_target(NAME) == mirror.target()
    assert mirror.target().applied == Position.of(source.position)


def test_small_files_of_rows_are_made_one_though_nothing_is_ever_deleted(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(spark, tmp_path, Maintenance(delete_files=4, keep_seconds=3600.0, expire_every=0))
    source, mirror = lake.source, lake.mirror
    counts = []
    for key in range(100, 104):
        source.insert(item(key))
        source.commit()
        mirror.follow()
        lake.sink.maintain(NAME)
        counts.append(lake.summaries[-1]["total-data-files"])
    assert counts == ["2", "3", "1", "2"]
    assert any("/merged-" in path for path in lake.data_files), "put together as they are"
    assert mirror.rows() == source.sorted_rows()
    assert lake.again().load_target(NAME) == mirror.target()


def test_rows_deleted_while_their_files_are_merged_stay_deleted(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(spark, tmp_path, Maintenance(delete_files=3, keep_seconds=3600.0, expire_every=0))
    source, mirror, merge = lake.source, lake.mirror, EpochWriter.merge

    def crossed(self: EpochWriter, loaded: LoadedTable, locations: Sequence[str]) -> NewFile | None:
        made = merge(self, loaded, locations)
        source.delete(at(100))
        source.update(at(101), {"note": Value("second")})
        source.commit()
        mirror.follow()
        return made

    for key in (100, 101):
        source.insert(item(key))
        source.commit()
        mirror.follow()
    monkeypatch.setattr(EpochWriter, "merge", crossed)
    lake.sink.maintain(NAME)
    assert any("/merged-" in path for path in lake.data_files)
    assert lake.summaries[-1]["operation"] == "replace"
    assert mirror.rows() == source.sorted_rows()


def test_rows_that_have_numbers_keep_them_when_their_files_are_made_one(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(
        spark, tmp_path, Maintenance(delete_files=3, keep_seconds=3600.0, expire_every=0), format_version=3
    )
    for key in (100, 101):
        lake.source.insert(item(key))
        lake.source.commit()
        lake.mirror.follow()
    numbers = f"SELECT id, _row_id FROM {lake.sink.sql_name(NAME)} ORDER BY id"
    before = spark.sql(numbers).collect()
    lake.sink.maintain(NAME)
    assert len(lake.data_files) == 1
    assert spark.sql(numbers).collect() == before


@pytest.mark.parametrize("which", ["another", "none"])
def test_a_table_is_rewritten_whichever_session_is_active_in_the_thread(
    spark: SparkSession, tmp_path: Path, which: str
) -> None:
    """Iceberg's rewrite uses a catalog instance registered in a session; it must be our session."""
    lake = Lake(spark, tmp_path, Maintenance(delete_files=2, keep_seconds=3600.0, expire_every=0))
    lake.source.insert(item(100))
    lake.source.commit()
    lake.mirror.follow()
    with active(spark.newSession()):
        if which == "none":
            jvm: Any = spark._jvm
            jvm.org.apache.spark.sql.classic.SparkSession.clearActiveSession()
        lake.sink.maintain(NAME)
    assert lake.summaries[-1]["total-data-files"] == "1"


def test_deletes_that_no_file_is_read_with_do_not_stay_beside_files_that_are_left_alone(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(spark, tmp_path, Maintenance(delete_files=2, keep_seconds=3600.0, expire_every=0))
    source, mirror = lake.source, lake.mirror
    # A file of that size has the target size, so it is rewritten only because of deletes.
    (size,) = (
        path.stat().st_size
        for path in (lake.root / "warehouse" / "public" / "items" / "data").glob("*.parquet")
    )
    spark.sql(
        f"ALTER TABLE {lake.sink.sql_name(NAME)} "
        f"SET TBLPROPERTIES ('write.target-file-size-bytes' = '{size}')"
    )
    for key in (100, 200):
        source.insert(item(key))
        source.commit()
        mirror.follow()
        source.update(at(key), {"note": Value("second")})
        source.commit()
        mirror.follow()
    lake.sink.maintain(NAME)
    assert lake.summaries[-1]["total-delete-files"] == "0"
    assert any("snapshot-" in path for path in lake.data_files), "untouched files stay"
    assert POSITION not in lake.summaries[-1]
    assert lake.again().load_target(NAME) == mirror.target()


def test_a_snapshot_begun_again_leaves_nothing_of_the_first_and_can_be_resumed(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.sink.release_ownership(NAME)
    assert lake.sink.load_target(NAME) is not None
    assert lake.mirror.target().applied is None
    assert len(lake.mirror.rows()) == 9
    wider = replace(ITEMS, columns=(*ITEMS.columns, Column("more, of {it}", pa.int16(), 21)))
    place = lake.sink.begin_snapshot(wider, Position.of(200))
    leftover = Path(place.directory) / f"{place.prefix}-000000-x.parquet"
    leftover.write_bytes(b"half a file")
    place = lake.sink.begin_snapshot(wider, Position.of(300))
    assert not leftover.exists()
    file = _write(place.directory, place.schema, f"{place.prefix}-000000-y.parquet")
    assert lake.sink.can_resume_snapshot(wider, place, [file])
    assert not lake.sink.can_resume_snapshot(wider, place, [replace(file, bytes=1)])
    commit = IcebergCatalog.commit

    def crossed(self: IcebergCatalog, loaded: object, change: TableChange, position: Position) -> None:
        monkeypatch.undo()
        lake.spark.sql(f"ALTER TABLE {lake.sink.sql_name(NAME)} SET TBLPROPERTIES ('colour' = 'red')")
        commit(self, loaded, change, position)  # type: ignore[arg-type]

    monkeypatch.setattr(IcebergCatalog, "commit", crossed)
    lake.sink.finish_snapshot(
        wider, [file], Position.of(300)
    )  # a concurrent commit of another writer needs no resync
    assert not lake.sink.can_resume_snapshot(wider, place, [file])
    target = lake.sink.load_target(NAME)
    assert target is not None
    assert target.schema.field("more, of {it}").type == pa.int16()
    assert [row["id"] for row in lake.sink.read(NAME).collect()] == [1, 2]


def _write(directory: str, schema: pa.Schema, name: str) -> SnapshotFile:
    values = {"id": [1, 2], EXACT: pa.nulls(2, EXACT_TYPE)}
    path = Path(directory) / name
    pq.write_table(
        pa.table([values.get(each.name, pa.nulls(2, each.type)) for each in schema], schema=schema), path
    )
    return SnapshotFile(name, 2, path.stat().st_size, "{}")


ODD_KEYS = TableSchema(
    16409,
    TableName("public", "odd_keys"),
    (Column("day", pa.date32(), 1082), Column("share", pa.float64(), 701), Column("note", pa.string(), 25)),
    ("day", "share"),
)


def _refuse(*_: object) -> None:
    raise SinkError("no")


def test_a_repaired_snapshot_is_its_files_with_the_changed_rows_in_place(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that an equality delete cannot name are still distinct."""
    sink = open_lake(spark, tmp_path)
    place = sink.begin_snapshot(ODD_KEYS, Position.of(100))
    exact = pa.array([[("day", "infinity")], [("day", "-infinity")], None, None], EXACT_TYPE)
    rows = pa.table(
        [pa.nulls(4, pa.date32()), [0.0, 0.0, 1.0, 2.0], ["a", "b", "c", "d"], exact], schema=place.schema
    )
    rows = rows.set_column(0, place.schema.field(0), pa.array([None, None, 1, 1], pa.date32()))
    path = Path(place.directory) / f"{place.prefix}-000000-z.parquet"
    pq.write_table(rows, path)
    file = SnapshotFile(path.name, 4, path.stat().st_size, "{}")
    keys = tmp_path / "keys"
    keys.mkdir()
    pq.write_table(
        pa.table(
            {
                "match_0": pa.array([None, 1], pa.date32()),
                "match_text_0": pa.array(["infinity", None], pa.string()),
                "match_1": [-0.0, 2.0],
                "match_text_1": pa.nulls(2, pa.string()),
            }
        ),
        keys / "keys.parquet",
    )
    new = pa.table(
        {
            "value_0": pa.array([1], pa.date32()),
            "value_1": [2.0],
            "value_2": ["new"],
            EXACT: pa.nulls(1, EXACT_TYPE),
        }
    )
    pq.write_table(new, tmp_path / "rows.parquet")
    changed = ChangedRows(str(keys), (str(tmp_path / "rows.parquet"),))
    with monkeypatch.context() as patch:
        patch.setattr(EpochWriter, "repair", _refuse)
        with pytest.raises(SinkError):
            sink.repair_snapshot(ODD_KEYS, [file], changed, Position.of(200))
    filled = len(summaries(sink, spark, ODD_KEYS.name))
    for attempt in range(2):
        # The second call, as after a crash before the first reply: the table is created again.
        sink.repair_snapshot(ODD_KEYS, [file], changed, Position.of(200))
        assert sorted(row["note"] for row in sink.read(ODD_KEYS.name).collect()) == ["b", "c", "new"]
        target = sink.load_target(ODD_KEYS.name)
        assert target is not None
        assert target.applied == Position.of(200)
        if attempt == 0:
            assert len(summaries(sink, spark, ODD_KEYS.name)) == filled + 1, (
                "files that are there are not put in once more"
            )
        sink.release_ownership(ODD_KEYS.name)
